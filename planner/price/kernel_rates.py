"""What our kernels reach on a card, by one formula: the least of three limits counts.

    seconds = max(operations / rate, bytes / (memory * MEMORY of the card))
    rate    = min(tensor * tensor rate of the card, slots * processors * clock)

`tensor` is the share of the rate that the card's tensor cores are rated at. `slots` is what a processor's issue slots
leave: operations of products in a clock of one processor, while it also loads, decodes, scales and takes exponentials.
It hangs on a kernel's code, and so on the capability that it is compiled for, not on the card: that of GeForce cards is
measured on an H100 that runs their code (docs/cards.md), at its rated clock.
"""

from dataclasses import dataclass

H100_CLOCK, H100_PROCESSORS = 1.83e9, 132  # at which its tensor cores have their rated 989.4 TFLOP/s


@dataclass(frozen=True)
class CardRates:
    """A card by its datasheet. `code`: the capability whose code is timed, 86 for GeForce cards; `tensor`: bfloat16
    products with float32 sums a second; `clock` in Hz; `memory` in bytes a second."""

    name: str
    code: int
    processors: int
    clock: float
    tensor: float
    memory: float


@dataclass(frozen=True)
class Reached:
    """Shares of a kernel, see above. slots: 0 where tensor cores or memory bind it on every card that was timed;
    `source`: a file in benchmarks/results, or the page that quotes others' figures."""

    tensor: float
    slots: float
    source: str


RTX_5080 = CardRates("NVIDIA GeForce RTX 5080", 86, 84, 2.617e9, 112.6e12, 960e9)
RTX_4060 = CardRates("NVIDIA GeForce RTX 4060", 86, 24, 2.46e9, 30.2e12, 272e9)
H100 = CardRates("NVIDIA H100 80GB HBM3", 90, H100_PROCESSORS, H100_CLOCK, 989.4e12, 3350e9)

MEMORY = {86: 0.85, 90: 0.725}  # copies reach 91% of a GeForce's, our kernels for one token 78 to 108% of copies
_AS_SM86, _H100 = "h100-as-sm86-attention-0711.json", "h100-gpu-kernels-0041.json"
# Attention of prompts by numbers of a head, bf16 cells: 0.8 is what FlashAttention's loops reach of a GeForce's tensor
# rate; slots from 4096 tokens and from 1024 behind 15360, both together.
KERNELS: dict[tuple[str, int], Reached] = {
    ("products of many tokens", 86): Reached(1.0, 0.0, "docs/published.md"),
    ("products of many tokens", 90): Reached(0.805, 0.0, _H100),
    ("experts of many tokens", 86): Reached(1 / 3, 0.0, "h200-gpu-experts-0307.json"),
    ("prompts, heads of 64", 86): Reached(0.8, 966.0, _AS_SM86),
    ("prompts, heads of 128", 86): Reached(0.8, 1025.0, _AS_SM86),
    ("prompts, heads of 256", 86): Reached(0.8, 844.0, _AS_SM86),
    ("prompts, heads of 64", 90): Reached(0.8, 1383.0, _AS_SM86),
    ("prompts, heads of 128", 90): Reached(0.8, 1916.0, _AS_SM86),
    ("prompts, heads of 256", 90): Reached(0.8, 910.0, _AS_SM86),
}


def rate_of(card: CardRates, kernel: str) -> float:
    """Operations a second of a kernel that is not bound by memory. Raises KeyError for one that was not timed."""
    reached = KERNELS[kernel, card.code]
    by_slots = reached.slots * card.processors * card.clock
    return min(reached.tensor * card.tensor, by_slots or float("inf"))


def memory_of(card: CardRates) -> float:
    """Bytes a second of a kernel that memory binds."""
    return MEMORY[card.code] * card.memory
