"""Which stored variant serves a workload, and what to say when none does."""

import shlex
from dataclasses import replace
from math import isclose

from pshard.errors import UserError
from pshard.pace import round_seconds
from pshard.plan import Registry, Variant
from pshard.workload import Workload, format_limits


def plan_command(model_path: str, want: Workload) -> str:
    """The pshard-plan command that makes a variant for this workload."""
    words = ["pshard-plan", "-m", str(model_path), "--vram", ",".join(map(str, want.vram_mib))]
    words += ["-c", str(want.context), "-np", str(want.sequences)]
    standard = Workload(want.vram_mib)
    if (want.type_k, want.type_v) != (standard.type_k, standard.type_v):
        words += ["-ctk", want.type_k, "-ctv", want.type_v]
    if want.split_mode != standard.split_mode:
        words += ["-sm", want.split_mode]
    if want.tensor_split:
        words += ["-ts", ",".join(f"{share:g}" for share in want.tensor_split)]
    if want.max_tp:
        words += ["--max-tp", format_limits(want.max_tp)]
    if want.reduce_dtype != standard.reduce_dtype:
        words += ["--reduce-dtype", want.reduce_dtype]
    return shlex.join(words)


def choose_variant(registry: Registry, want: Workload, replan_command: str) -> Variant:
    """The variant with the largest budget that fits in `want.vram_mib`, which is what is at hand on each device.

    It must hold at least the wanted context and sequences, with the same KV types and split. Among equal budgets the
    one for fewest sequences goes first, then the wanted ubatch, then the smallest context; the largest context when
    none is wanted; then the one with the shortest predicted round (other ratios of a split). With split mode "auto" any
    split will do, also one device of those, and the round counts before the budget. Raises UserError that lists the
    variants there are.
    """
    fitting = [v for v in registry.variants if _serves(v, want)]
    if fitting:
        return max(
            fitting,
            key=lambda v: (
                0 if want.split_mode == "auto" else sum(v.vram_mib),
                -v.sequences,
                v.max_ubatch == want.max_ubatch,
                -v.context if want.context > 1 else v.context,
                v.max_ubatch,
                -round_seconds(replace(v, prompt=want.prompt, generated=want.generated)),
            ),
        )
    wanted = _describe(want)
    there = "; ".join(_describe(v) for v in registry.variants) or "none"
    raise UserError(f"no plan fits {wanted}; planned are: {there}; run: {replan_command}")


def _serves(variant: Variant, want: Workload) -> bool:
    auto = want.split_mode == "auto"
    there = want.vram_mib
    if auto and variant.split_mode == "none":
        there = want.vram_mib[variant.device : variant.device + 1]
    return (
        len(variant.vram_mib) == len(there)
        and all(planned <= mib for planned, mib in zip(variant.vram_mib, there))
        and variant.context >= want.context
        and variant.sequences >= want.sequences
        and (variant.type_k, variant.type_v) == (want.type_k, want.type_v)
        and (auto or (variant.split_mode, variant.device) == (want.split_mode, want.device))
        and (not want.max_tp or variant.max_tp == want.max_tp)
        and (not want.tensor_split or _same_shares(variant.tensor_split, want.tensor_split))
    )


def _same_shares(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return len(one) == len(other) and all(isclose(a, b, rel_tol=1e-6) for a, b in zip(one, other))


def _describe(made: Variant | Workload) -> str:
    split = "" if made.split_mode == "none" else f" -sm {made.split_mode}"
    split += f" --max-tp {format_limits(made.max_tp)}" if made.max_tp else ""
    budget = ",".join(map(str, made.vram_mib))
    return f"{budget} MiB -c {made.context} -np {made.sequences} -ctk {made.type_k} -ctv {made.type_v}{split}"
