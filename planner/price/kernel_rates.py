"""What our kernels reach on a card, by one formula: the least of three limits counts.

    seconds = start + max(operations / rate, numbers / decoding, bytes / bandwidth)
    rate    = min(tensor * tensor rate of the card, slots * each / (each + half) * processors * clock)

`tensor` is the share of the rate that the card's tensor cores are rated at. `slots` is what a processor's issue slots
leave: operations of products in a clock of one processor, while it also loads, decodes, scales and takes exponentials.
Where a tile is decoded once for the `each` tokens that share it, `half` of them reach half of that. `decoded` is what
issue slots leave where decoding binds: weights or cached numbers in a clock of one processor. Slots hang on a kernel's
code, and so on the capability that it is compiled for, not on the card: those of GeForce cards are measured on an H100
that runs their code (docs/cards.md), at its rated clock.
"""

from dataclasses import dataclass

H100_CLOCK, H100_PROCESSORS = 1.83e9, 132  # at which its tensor cores have their rated 989.4 TFLOP/s
LAUNCH = 2e-6  # seconds of a kernel beside its work
PAIRED = 8  # tokens up to which each pick of an expert decodes the expert's weights for itself
TILE = 16  # tokens of an expert, up to which its products take as long as those of one


@dataclass(frozen=True)
class CardRates:
    """A card by its datasheet. `code`: the capability whose code is timed, 86 for GeForce cards; `tensor`: bfloat16
    products with float32 sums a second; `clock` in Hz; `memory` in bytes a second, of which our kernels of one token
    reach the share `copies`: 78 to 108% of what copies do (91% on a GeForce)."""

    name: str
    code: int
    processors: int
    clock: float
    tensor: float
    memory: float
    copies: float


@dataclass(frozen=True)
class Reached:
    """Shares of a kernel, see above. 0: what binds on no card that was timed; memory: of the card's rated one, 0 for
    its `copies`; start: seconds; `source`: a file in benchmarks/results, or the page that quotes others' figures."""

    tensor: float
    slots: float
    source: str
    half: float = 0.0
    decoded: float = 0.0
    memory: float = 0.0
    start: float = LAUNCH


@dataclass(frozen=True)
class Work:
    """What a kernel does. numbers: weights or cached numbers that it decodes; each: tokens that share what is decoded
    once."""

    operations: float
    nbytes: float
    numbers: float = 0.0
    each: float = 1.0


RTX_5080 = CardRates("NVIDIA GeForce RTX 5080", 86, 84, 2.617e9, 112.6e12, 960e9, 0.85)
RTX_4060 = CardRates("NVIDIA GeForce RTX 4060", 86, 24, 2.46e9, 30.2e12, 272e9, 0.85)
H100 = CardRates("NVIDIA H100 80GB HBM3", 90, H100_PROCESSORS, H100_CLOCK, 989.4e12, 3350e9, 0.725)

_AS_SM86, _H100 = "h100-as-sm86-attention-0711.json", "h100-gpu-kernels-0041.json"
_KINDS = "h100-as-sm86-kernels-1206.json"
TWO, THREE = 2 * LAUNCH, 3 * LAUNCH
# Attention of prompts by numbers of a head, bf16 cells: 0.8 is what FlashAttention's loops reach of a GeForce's tensor
# rate; slots from 4096 tokens and from 1024 behind 15360, both together.
KERNELS: dict[tuple[str, int], Reached] = {
    ("products of many tokens", 86): Reached(1.0, 0.0, "docs/published.md"),
    ("products of many tokens", 90): Reached(0.805, 0.0, _H100),
    ("prompts, heads of 64", 86): Reached(0.8, 966.0, _AS_SM86, start=TWO),
    ("prompts, heads of 128", 86): Reached(0.8, 1025.0, _AS_SM86, start=TWO),
    ("prompts, heads of 256", 86): Reached(0.8, 844.0, _AS_SM86, start=TWO),
    ("prompts, heads of 64", 90): Reached(0.8, 1383.0, _AS_SM86, start=TWO),
    ("prompts, heads of 128", 90): Reached(0.8, 1916.0, _AS_SM86, start=TWO),
    ("prompts, heads of 256", 90): Reached(0.8, 910.0, _AS_SM86, start=TWO),
}

# What both codes share: kernels that decode with the same instructions.
# Tensor shares of kernels that tensor cores bound on no card that was timed are those of attention. Norms and rows are
# counted with eight bytes a number and move fewer, so that their memory share is above 1. Two norms in one launch were
# timed on an H200 alone: start is between those of one row of 2816 and of 5376, memory that of 4096 rows of 5376.
KERNELS |= {
    (kernel, code): reached
    for code in (86, 90)
    for kernel, reached in {
        "products of few tokens": Reached(0.8, 528.0, _KINDS),
        "products of one token, MXFP4": Reached(0.8, 0.0, _KINDS, decoded=14.6),
        "products of few tokens, MXFP4": Reached(0.8, 528.0, _KINDS, decoded=9.8),
        "decoding, bf16": Reached(0.8, 0.0, _KINDS, memory=0.83, start=TWO),
        "decoding, heads of 64, q8_0": Reached(0.8, 0.0, _KINDS, decoded=5.0, start=TWO),
        "decoding, heads of 128, q8_0": Reached(0.8, 0.0, _KINDS, decoded=5.0, start=TWO),
        "decoding over latents, bf16": Reached(0.8, 0.0, _KINDS, decoded=1.38, start=TWO),
        "decoding over latents, q8_0": Reached(0.8, 0.0, _KINDS, decoded=1.03, start=TWO),
        "experts of one token": Reached(0.8, 0.0, _KINDS, decoded=12.0, start=THREE),
        "delta nets of few tokens": Reached(0.8, 0.0, _KINDS, start=6e-6),
        "norms": Reached(0.0, 0.0, _KINDS, memory=1.22, start=2.5e-6),
        "two norms": Reached(0.0, 0.0, "docs/results.md", memory=0.915, start=3.3e-6),
        "rows": Reached(0.0, 0.0, _KINDS, memory=1.22, start=1.45e-6),
    }.items()
}
# And what they do not: as sm_86, and an H100's own.
KERNELS |= {
    (kernel, code): reached
    for kernel, both in {
        "prompts over latents, bf16": (Reached(0.8, 414.0, _KINDS), Reached(0.8, 368.0, _KINDS)),
        "prompts over latents, q8_0": (Reached(0.8, 157.0, _KINDS), Reached(0.8, 175.0, _KINDS)),
        "prompts, heads of 64, q8_0": (Reached(0.8, 411.0, _KINDS), Reached(0.8, 723.0, _KINDS)),
        "prompts, heads of 128, q8_0": (Reached(0.8, 416.0, _KINDS), Reached(0.8, 1022.0, _KINDS)),
        "prompts, heads of 256, q8_0": (Reached(0.8, 456.0, _KINDS), Reached(0.8, 543.0, _KINDS)),
        "decoding, heads of 256, q8_0": (
            Reached(0.8, 0.0, _KINDS, decoded=3.25, start=TWO),
            Reached(0.8, 0.0, _KINDS, decoded=4.8, start=TWO),
        ),
        "experts of few tokens": (
            Reached(0.8, 0.0, _KINDS, decoded=6.0, start=THREE),
            Reached(0.8, 0.0, _KINDS, decoded=6.7, start=THREE),
        ),
        "experts of many tokens": (
            Reached(0.8, 424.0, _KINDS, half=74.0, start=THREE),
            Reached(0.8, 1330.0, _KINDS, half=76.0, start=THREE),
        ),
        "delta nets of prompts": (
            Reached(0.8, 232.0, _KINDS, half=150.0, start=6e-6),
            Reached(0.8, 360.0, _KINDS, half=240.0, start=6e-6),
        ),
        "routing": (Reached(0.8, 152.0, _KINDS, start=4.5e-6), Reached(0.8, 263.0, _KINDS, start=4.5e-6)),
    }.items()
    for code, reached in zip((86, 90), both)
}


def rate_of(card: CardRates, kernel: str, each: float = 1.0) -> float:
    """Operations a second of a kernel that is bound by neither memory nor decoding; infinite where it does none worth
    counting. Raises KeyError for one that was not timed."""
    reached = KERNELS[kernel, card.code]
    share = each / (each + reached.half)
    by_slots = share * reached.slots * card.processors * card.clock
    return min(reached.tensor * card.tensor or float("inf"), by_slots or float("inf"))


def memory_of(card: CardRates, kernel: str = "") -> float:
    """Bytes a second of a kernel that memory binds; of most of them, without a name."""
    share = KERNELS[kernel, card.code].memory if kernel else 0.0
    return (share or card.copies) * card.memory


def seconds_of(card: CardRates, kernel: str, work: Work) -> float:
    """What the formula says. Raises KeyError for a kernel that was not timed."""
    reached = KERNELS[kernel, card.code]
    decoding = reached.decoded * card.processors * card.clock
    by_slots = work.numbers / decoding if decoding else 0.0
    by_rate = work.operations / rate_of(card, kernel, work.each)
    return reached.start + max(by_rate, by_slots, work.nbytes / memory_of(card, kernel))


def pass_work(what: str, tokens: int, width: int) -> tuple[str, Work]:
    """Which kernel an elementwise row of a profile is, and what it does: it reads and writes eight bytes a number, of
    two norms for each."""
    kernel = {"norm": "norms", "two norms": "two norms"}.get(what, "rows")
    return kernel, Work(0.0, (2 if what == "two norms" else 1) * 8.0 * tokens * width)


def experts_kernel(tokens: int, each: float) -> str:
    """Which kernel multiplies routed experts of so many tokens, of which an expert that is used gets `each`."""
    if tokens <= PAIRED:
        return "experts of one token"
    return "experts of few tokens" if each <= TILE else "experts of many tokens"
