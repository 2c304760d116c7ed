"""The output: final norm and head; logits of the rows that are wanted. A tied head is the embedding's table.

What a mix of several streams leaves is not normalised.
"""

from dataclasses import replace

from pshard.homes import PINNED
from pshard.model_config import ModelConfig
from pshard.quant import ROW_BLOCK
from pshard.units.enter import normalise
from pshard.units.operands import FOUND, STREAM
from pshard.units.operations import BendLogits, Operation, PickRows, Product, Take
from pshard.units.ports import GIVES_LOGITS
from pshard.units.ranges import Targets, place_rows
from pshard.units.unit import ANYWHERE, Cut, Tensors, Unit, UnitKind

NORM, BIAS, HEADS = "output_norm.weight", "output_norm.bias", ("output.weight", "token_embd.weight")


def _operations(tensors: Tensors, config: ModelConfig) -> tuple[Operation, ...]:
    heads = (tensors[role] for role in HEADS if role in tensors)  # a rank may have none
    taken = (Take(STREAM, config.d_model),) if config.streams else normalise(tensors, NORM, config)
    products = [Product(head, out=FOUND) for head in heads]
    bent = config.logit_scale != 1 or config.logit_cap != 0
    scales = [BendLogits(p.matrix.rows, config.logit_scale, config.logit_cap, FOUND) for p in products if bent]
    return PickRows(config.d_model), *taken, *products, *scales


def _bounds(config: ModelConfig, tensors: Tensors, targets: Targets) -> tuple[int, ...]:
    return place_rows(config.vocab, ROW_BLOCK, targets)


OUTPUT = UnitKind(
    "output",
    position="last",
    places=ANYWHERE,
    operations=_operations,
    cut=Cut(
        dict.fromkeys((NORM, BIAS), ("none", "all")) | dict.fromkeys(HEADS, ("rows", "cut")),
        length=lambda config, tensors: config.vocab,
        bounds=_bounds,
        flag="head",
    ),
    ports=GIVES_LOGITS,
    strategy="head",
    contends="weights",
    lock_order=2,
)

_PINNED = replace(OUTPUT, places=((PINNED, None),))


def hold_output(unit: Unit) -> Unit:
    """A model's output that is to stay in VRAM, as its head drafts by it: were it streamed, each draft would take a
    copy of it."""
    return replace(unit, kind=_PINNED)
