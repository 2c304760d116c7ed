"""Which stored variant serves a workload, and what to say when none does."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, isclose, log

from pshard.errors import NotPlanned
from pshard.plan import PlanSet, Variant
from pshard.predicted_times import as_measured, as_profiled, round_seconds
from pshard.workload import UNLIMITED_MIB, Workload, binding_limits, format_limits

MOST_LISTED = 4  # plans that an error lists
NEAR_BUDGET = 0.9  # of the largest budget that fits: the load that a plan is for tells more from here on


def plan_command(model_path: str, want: Workload) -> str:
    """The pshard-plan command that makes a variant for this workload."""
    words = ["pshard-plan", "-m", str(model_path), "--vram", ",".join(map(str, want.vram_mib))]
    words += ["--ram", str(want.ram_mib)] * (want.ram_mib > 0)
    words += ["-c", str(want.context), "-np", str(want.sequences)]
    standard = Workload(want.vram_mib)
    if (want.type_k, want.type_v) != (standard.type_k, standard.type_v):
        words += ["-ctk", want.type_k, "-ctv", want.type_v]
    if want.split_mode != standard.split_mode:
        words += ["-sm", want.split_mode]
    if want.max_ubatch != standard.max_ubatch:
        words += ["-ub", str(want.max_ubatch)]
    if want.tensor_split:
        words += ["-ts", ",".join(f"{share:.9g}" for share in want.tensor_split)]  # `_same_shares` to nine digits
    if want.max_tp:
        words += ["--max-tp", format_limits(want.max_tp)]
    if want.concurrency:
        words += ["--serve", "--concurrency", str(want.concurrency)]
    if want.reduce_dtype != standard.reduce_dtype:
        words += ["--reduce-dtype", want.reduce_dtype]
    if want.prompt_math != standard.prompt_math:
        words += ["--prompt-math", want.prompt_math]
    return shlex.join(words)


@dataclass(frozen=True)
class Choice:
    """The variant that serves a workload; `why`: how several ways to split compared, where that was the choice."""

    variant: Variant
    why: str = ""


def choose_variant(plans: PlanSet, want: Workload, replan_command: str) -> Choice:
    """The variant with the largest budget that fits in `want.vram_mib`, which is what is at hand on each device.

    It must hold at least the wanted context and sequences, with the same KV types and split. Among budgets of at least
    NEAR_BUDGET of that one for a server's load goes first where that is wanted (of the nearest concurrency), and last
    where it is not; then the largest budget, then the one for fewest sequences goes first, then the wanted ubatch, then
    the smallest context; the largest context when none is wanted; then the one with the shortest predicted round (other
    ratios of a split). With split mode "auto" any split will do, also of one device of those or of the first few:
    sequences and context go first as above, then the round. Raises NotPlanned that lists the variants there are.
    """
    fitting = [v for v in plans.variants if _serves(v, want)]
    if not fitting:
        there = list(dict.fromkeys(_describe(v.workload) for v in plans.variants)) or ["none"]
        more = [f"and {len(there) - MOST_LISTED} more"] if len(there) > MOST_LISTED else []
        listed = "; ".join(there[:MOST_LISTED] + more)
        raise NotPlanned(f"no plan fits {_describe(want)}; planned are: {listed}; run: {replan_command}")
    if want.split_mode == "auto":
        return _choose_way(fitting, want)
    largest = max(sum(v.workload.vram_mib) for v in fitting)
    return Choice(
        max(
            fitting,
            key=lambda v: (
                _rank_budget(v, largest),
                _rank_load(v, want),
                sum(v.workload.vram_mib),
                v.workload.ram_mib,
                -v.workload.sequences,
                v.workload.max_ubatch == want.max_ubatch,
                _rank_context(v, want),
                v.workload.prompt_math == want.prompt_math,
                v.workload.max_ubatch,
                -_round(v, want),
            ),
        )
    )


def _choose_way(fitting: Sequence[Variant], want: Workload) -> Choice:
    """The shortest round, of all as measured where all were run undisturbed, else of all as the profile predicts them:
    plans that were run have times that were fitted to that, which the others had no chance to."""

    def closeness(v: Variant) -> tuple[float, int, int]:
        return _rank_load(v, want), -v.workload.sequences, _rank_context(v, want)

    closest = max(map(closeness, fitting))
    alike = [v for v in fitting if closeness(v) == closest]
    run = [v for v in alike if v.validated and not v.disturbed]
    view = as_measured if len(run) == len(alike) else as_profiled
    rounds = sorted(
        ((_round(view(v), want), v) for v in alike), key=lambda pair: (pair[0], -sum(pair[1].workload.vram_mib))
    )
    if len(rounds) == 1:
        return Choice(alike[0])
    sort = "measured" if len(run) == len(alike) else "predicted"
    listed = ", ".join(f"{_name_way(v)} {seconds:.3g} s" for seconds, v in rounds)
    why = f"-sm auto takes the shortest of the {sort} rounds: {listed}"
    if run and sort == "predicted":
        why += f"; {', '.join(map(_name_way, run))} was also measured, which is left out, as others were not"
    return Choice(rounds[0][1], why)


def _rank_budget(variant: Variant, largest: int) -> float:
    """The higher the better: budgets near the largest one are alike, as what is free differs from day to day."""
    budget = sum(variant.workload.vram_mib)
    return budget if budget < NEAR_BUDGET * largest else largest


def _rank_load(variant: Variant, want: Workload) -> float:
    """The higher the better: how near the load of a server is to the one that is wanted; texts that all run at once
    are no load."""
    made, wanted = variant.workload.concurrency, want.concurrency
    return -abs(log(made / wanted)) if made and wanted else -inf if made or wanted else 0.0


def _rank_context(variant: Variant, want: Workload) -> int:
    """The higher the better: the smallest context that serves, the largest when none is wanted."""
    context = variant.workload.context
    return -context if want.context > 1 else context


def _round(variant: Variant, want: Workload) -> float:
    """Seconds of a round of the wanted texts, cut to what the variant's cells hold, as pshard-plan cuts them."""
    load = replace(variant.workload, prompt=want.prompt, generated=want.generated).cut_texts()
    return round_seconds(replace(variant, workload=load))


def _name_way(variant: Variant) -> str:
    return f"{variant.way} ({','.join(map(str, variant.workload.vram_mib))} MiB)"


def keeps_ram(made: Workload, want: Workload) -> bool:
    """Whether a plan was made for so much host memory at most, or for all there is where all may be taken."""
    return made.ram_mib == 0 if not want.ram_mib else 0 < made.ram_mib <= want.ram_mib


def _serves(variant: Variant, want: Workload) -> bool:
    auto, made = want.split_mode == "auto", variant.workload
    there = want.vram_mib
    if auto:  # one of the devices, or the first few
        there = want.vram_mib[made.device : made.device + len(made.vram_mib)]
    return (
        len(made.vram_mib) == len(there)
        and all(planned <= mib for planned, mib in zip(made.vram_mib, there))
        and keeps_ram(made, want)
        and made.context >= want.context
        and made.sequences >= want.sequences
        and (made.type_k, made.type_v) == (want.type_k, want.type_v)
        and (auto or (made.split_mode, made.device) == (want.split_mode, want.device))
        and ((auto and made.split_mode == "none") or _has_split(made, want))
    )


def _has_split(made: Workload, want: Workload) -> bool:
    """Whether what was planned for several devices has the ratios and limits that are wanted, if any are."""
    limits = binding_limits(want.max_tp, len(made.vram_mib)) if made.split_mode == "tensor" else ()
    return (not limits or made.max_tp == limits) and (
        not want.tensor_split or _same_shares(made.tensor_split, want.tensor_split)
    )


def _same_shares(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return len(one) == len(other) and all(isclose(a, b, rel_tol=1e-6) for a, b in zip(one, other))


def _describe(made: Workload) -> str:
    split = "" if made.split_mode == "none" else f" -sm {made.split_mode}"
    split += f" on device {made.device}" if made.device else ""
    split += " -ts " + ",".join(f"{share:.4g}" for share in made.tensor_split) if made.tensor_split else ""
    split += f" --max-tp {format_limits(made.max_tp)}" if made.max_tp else ""
    split += f" --serve --concurrency {made.concurrency}" if made.concurrency else ""
    split += f" --prompt-math {made.prompt_math}" if made.prompt_math != Workload.prompt_math else ""
    budget = "" if made.vram_mib[0] >= UNLIMITED_MIB else f"{','.join(map(str, made.vram_mib))} MiB "
    budget += f"--ram {made.ram_mib} " if made.ram_mib else ""
    return f"{budget}-c {made.context} -np {made.sequences} -ctk {made.type_k} -ctv {made.type_v}{split}"
