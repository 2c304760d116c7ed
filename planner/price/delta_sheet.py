"""Rows of gated delta nets from what a card's kernels reach."""

from pshard.batch_sizes import DELTA_STEPS
from pshard.machine import DeltaTiming
from pshard.planner.price.kernel_rates import CardRates, Work, seconds_of
from pshard.tensor import TensorSpec
from pshard.units.operations import DeltaNet

HEADS = ((16, 32, 128), (16, 64, 128))  # key heads, value heads, numbers of each
SEQUENCES, TOKENS = (1, 4, 16, 64), (1, 64, 256, 1024, 4096, 16384)
_NONE = TensorSpec("", "F32", (1,))


def delta_rows(card: CardRates) -> list[DeltaTiming]:
    """One token each of several sequences, and prompts of one."""
    rows = []
    for heads in HEADS:
        net = DeltaNet((_NONE,), _NONE, _NONE, _NONE, *heads)
        for tokens, sequences in [(1, n) for n in SEQUENCES] + [(n, 1) for n in TOKENS[1:]]:
            chunked = tokens > DELTA_STEPS
            kernel = "delta nets of prompts" if chunked else "delta nets of few tokens"
            seconds = seconds_of(card, kernel, delta_work(net, tokens, sequences, chunked))
            rows.append(DeltaTiming("acc", *heads, tokens, sequences, seconds))
    return rows


def delta_work(net: DeltaNet, tokens: int, sequences: int, chunked: bool) -> Work:
    """Of so many tokens of each sequence: states are read and written, rows have two bytes a number."""
    width = net.channels + 2 * net.value_heads * net.head
    nbytes = 2 * sequences * (net.state_nbytes + width * tokens)
    return Work(net.flops(tokens * sequences, chunked), nbytes, each=tokens)
