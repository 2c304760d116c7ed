"""Workload: what a plan is made for."""

from dataclasses import dataclass, replace

from pshard.speculation import MOST_ROWS, NO_DRAFTS, USUAL_OPEN, Acceptance, Drafting
from pshard.times.gpu_tiles import AUTO
from pshard.times.running_requests import DECODE_WIDTHS, running_shares
from pshard.units.kinds import kinds_by_flag
from pshard.units.state import StateShape

MIB = 1 << 20
UNLIMITED_MIB = 1 << 30  # of the CPU as accelerator: a budget that nothing exceeds
SPLIT_MODES = ("none", "layer", "tensor")
LARGEST_UBATCH = 16384  # tokens, of what is planned without being asked for

Limits = tuple[tuple[str, int], ...]  # (kind of unit, over how many ranks it is cut at most)


def parse_limits(text: str) -> Limits:
    """ "attn=2,head=1" -> (kind's name, 2), (another's, 1). Raises ValueError that says what is wrong."""
    found: dict[str, int] = {}
    kinds = kinds_by_flag()
    for part in text.split(","):
        name, _, most = part.strip().partition("=")
        if name not in kinds:
            raise ValueError(f"{part!r} is not UNIT=K with a UNIT of {', '.join(kinds)} (attn=2)")
        if not most.isascii() or not most.isdigit() or int(most) < 1:
            raise ValueError(f"{part!r}: {most!r} is not a number of ranks, 1 or more")
        if kinds[name].name in found:
            raise ValueError(f"{text!r} names {name} twice")
        found[kinds[name].name] = int(most)
    return tuple(sorted(found.items()))


def format_limits(limits: Limits) -> str:
    """What `parse_limits` reads."""
    names = {kind.name: flag for flag, kind in kinds_by_flag().items()}
    return ",".join(f"{names[kind]}={most}" for kind, most in limits)


def binding_limits(limits: Limits, ranks: int) -> Limits:
    """Those that are below the number of ranks."""
    return tuple((kind, most) for kind, most in limits if most < ranks)


def usual_ubatch(prompt: int) -> int:
    """Tokens of the largest micro-batch where none is asked for: what carries a prompt of so many tokens at once, as
    each micro-batch streams the weights anew."""
    return max(Workload.max_ubatch, min(LARGEST_UBATCH, 1 << max(0, prompt - 1).bit_length()))


@dataclass(frozen=True)
class Split:
    """How a model is spread over ranks: in which mode (SPLIT_MODES), what share each has, and, with "tensor", kinds of
    units that fewer ranks share. One rank has everything."""

    mode: str = "none"
    shares: tuple[float, ...] = (1.0,)
    limits: Limits = ()


@dataclass(frozen=True)
class Workload:
    """Budgets and lengths. `vram_mib` has one budget per device; tokens are counted per micro-batch (ubatch).

    context are the cells of the KV cache, which the sequences share as they need them. prompt and generated are the
    expected lengths per sequence; they weigh the tiers against each other. concurrency: of a server's load, how many
    of the sequences run on average (`running_shares`); 0 where all of them always do. drafting: who drafts, and how
    many drafts a text's step has; acceptance: how likely they hold, where there are drafts. drafter_mib: of each
    budget that has a part of it, what a second program takes that drafts. ram_mib: of host memory that all of it may
    take on a host; 0: what there is. prompt_math: how a GPU multiplies prompts' weights; auto: each type as it was
    timed to be faster.
    """

    vram_mib: tuple[int, ...]
    context: int = 8192
    sequences: int = 1
    type_k: str = "bf16"
    type_v: str = "bf16"
    max_ubatch: int = 4096
    prompt: int = 4096
    generated: int = 256
    split_mode: str = "none"  # one of SPLIT_MODES
    tensor_split: tuple[float, ...] = ()
    max_tp: Limits = ()  # kinds that are not named are cut over all ranks
    device: int = 0  # the accelerator that a plan for one is for
    reduce_dtype: str = "auto"  # in which type ranks' parts are summed: one of REDUCE_DTYPES
    concurrency: int = 0
    drafting: Drafting = NO_DRAFTS
    acceptance: Acceptance | None = None
    drafter_mib: int = 0
    ram_mib: int = 0
    prompt_math: str = AUTO  # one of PROMPT_MATHS

    def under(self, split: Split) -> "Workload":
        """The same with another split."""
        return replace(self, split_mode=split.mode, tensor_split=split.shares, max_tp=split.limits)

    @property
    def state_shape(self) -> StateShape:
        """What sizes the states of its sequences."""
        return StateShape(self.context, self.sequences, self.type_k, self.type_v, self.largest, self.open_rows)

    @property
    def open_rows(self) -> int:
        """Rows of a step that drafts may leave open. A plan without drafts has room for some of lookup."""
        planned = self.sequences * self.drafting.rows if self.drafting.drafts else 0
        return min(self.largest, max(planned, min(self.sequences * USUAL_OPEN, MOST_ROWS)))

    @property
    def terms(self) -> str:
        """All but budgets and split, in words."""
        users = f" for {self.sequences} sequences" if self.sequences > 1 else ""
        users += f", of which {self.concurrency} run on average" if self.concurrency else ""
        kv = self.type_k if self.type_k == self.type_v else f"{self.type_k} keys and {self.type_v} values"
        drafts = f", {self.drafting} accepted by {self.acceptance}" if self.drafting.drafts else ""
        math = f", prompts in {self.prompt_math}" if self.prompt_math != AUTO else ""
        return (
            f"context {self.context}{users}, KV {kv}, ubatch {self.max_ubatch}, prompts of {self.prompt}, "
            f"answers of {self.generated}{drafts}{math}"
        )

    @property
    def largest(self) -> int:
        """Tokens of the largest micro-batch."""
        return min(self.max_ubatch, self.context)

    @property
    def share(self) -> int:
        """Cells of each sequence when all have equally many."""
        return self.context // self.sequences

    def cut_texts(self) -> "Workload":
        """The same with texts that its cells hold: a prompt takes half of them at most, an answer the rest."""
        cells = self.context if self.concurrency else self.share
        prompt = min(self.prompt, max(1, cells // 2))
        return replace(self, prompt=prompt, generated=max(1, min(self.generated, cells - prompt)))

    @property
    def prompt_tokens(self) -> int:
        """Tokens of prompts that are computed together: those of all sequences, or of one request to a server."""
        return self.prompt * (1 if self.concurrency else self.sequences)

    @property
    def rounds_of_prompts(self) -> int:
        """How often that happens in a round: the requests that run on average come one after the other."""
        return self.concurrency or 1

    def running(self) -> tuple[tuple[int, float], ...]:
        """How many texts are answered at once for what share of the time: (texts, share), ascending."""
        if not self.concurrency:
            return ((self.sequences, 1.0),)
        shares = running_shares(self.concurrency, self.sequences)
        return tuple((n, share) for n, share in enumerate(shares, 1) if share)

    def answer_steps(self) -> tuple[tuple[int, float], ...]:
        """How many steps of so many rows the answers of a round take: (rows, steps). A row is a token that a text
        decodes, or with drafts one of those that it verifies; a step without drafts has a row a text."""
        held, found = self.acceptance, list[tuple[int, float]]()
        for texts, share in self.running():
            if held is None or not self.drafting.drafts:
                found.append((texts, self.generated * share))
                continue
            steps = self.generated * share / held.mean_tokens(self.drafting.drafts)
            found += [(texts, (1 - held.share) * steps)] * (held.share < 1)
            found.append((texts * self.drafting.rows, held.share * steps))
        return tuple(found)

    @property
    def draft_steps(self) -> float:
        """How many steps with drafts the answers of a round take; 0 without drafts."""
        held, drafts = self.acceptance, self.drafting.drafts
        return self.generated / held.mean_tokens(drafts) * held.share if held and drafts else 0.0

    @property
    def answer_tokens(self) -> float:
        """Of all texts that are answered in a round."""
        return sum(texts * (self.generated * share) for texts, share in self.running())

    @property
    def answer_rows(self) -> int:
        """Of the largest step of answers alone: all sequences, with their drafts."""
        return self.sequences * self.drafting.rows

    @property
    def widths(self) -> frozenset[int]:
        """How many texts at once get a tier to be answered in."""
        some = {width for width in DECODE_WIDTHS if width < self.sequences} if self.concurrency else set[int]()
        return frozenset({1, self.sequences} | some)

    def count_verifying(self, tokens: int) -> int:
        """How many texts verify all their drafts in a step of the tier of so many tokens; 0 in other tiers."""
        texts, more = divmod(tokens, self.drafting.rows)
        return texts if self.drafting.drafts and not more and texts in self.widths else 0

    def tiers(self) -> tuple[int, ...]:
        """Token counts that get a plan: decode (one token per sequence), then ubatch sizes up to the largest; of a
        server's load each width of DECODE_WIDTHS that it may have; with drafts also one and all of the sequences with
        theirs.

        A step runs under the smallest tier that covers its tokens.
        """
        wanted = {16, 128, 512, 1024, 2048, 4096, 8192, 16384, self.largest, *self.widths}
        wanted |= {self.drafting.rows, self.answer_rows}
        return tuple(sorted(t for t in wanted if t <= self.largest))
