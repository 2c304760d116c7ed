"""What a run asks for, and the workloads that follow from it: the one a plan must serve, and the one to plan for."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pshard.buffers import scratch_bytes
from pshard.errors import UserError
from pshard.machine import MachineProfile
from pshard.planner.serving.size_load import size_load
from pshard.reserve import reserve_mib
from pshard.session.this_machine import free_vram_mib
from pshard.speculation import NONE
from pshard.workload import MIB, Limits, Workload, binding_limits, usual_ubatch

if TYPE_CHECKING:
    from pshard.model import ModelSpec


MARGIN_MIB = 768  # of what is free that a plan leaves, or a twentieth of a small memory


@dataclass(frozen=True)
class RunRequest:
    """What a run asks for. None means: whatever the plan says.

    `needed` is the context that the run takes when none is asked for: it chooses a plan; planning makes a larger one.
    """

    model: Path
    vram_mib: tuple[int, ...] | None = None
    context: int | None = None
    sequences: int | None = None
    type_k: str = "bf16"
    type_v: str = "bf16"
    split_mode: str = "none"
    tensor_split: tuple[float, ...] = ()
    registry: Path | None = None
    profile: Path | None = None
    replan: bool = False
    needed: int = 1
    ubatch: int | None = None  # tokens of a micro-batch at most
    plans: bool = False  # what is not planned yet is planned
    max_tp: Limits = ()
    reduce_dtype: str | None = None
    devices: int | None = None  # how many, where neither budgets nor ratios say it
    concurrency: int = 0  # of a server's load, how many requests run on average; 0: no server
    drafts: str = NONE  # who is to draft, as --spec says
    draft_model: Path | None = None  # that drafts
    ram_mib: int = 0  # of host memory in all; 0: what there is
    prompt_math: str | None = None  # how prompts are multiplied; a plan for another way does not serve
    disk_cache: Path | None = None  # where the model's packed file is written once, and read
    auto_ratios: bool = False  # any ratios will do, and a plan that is made anew has those predicted to be the fastest

    @property
    def ranks(self) -> int:
        """How many ranks it names, by their number, budgets or ratios."""
        if self.split_mode == "none":
            return 1
        return max(self.devices or 1, len(self.tensor_split), len(self.vram_mib or ()))


def places_of(request: RunRequest) -> tuple[tuple[str, Path | None], ...]:
    """The request's files by their flags."""
    return ("--registry", request.registry), ("--profile", request.profile), ("--disk-cache", request.disk_cache)


def count_devices(ratios: tuple[float, ...], auto_ratios: bool, profile: MachineProfile, flag: str) -> int:
    """How many devices one budget is for. Raises UserError, about `flag`, when that cannot be known."""
    if not auto_ratios:
        return len(ratios) or 1
    if len(profile.accelerators) < 2:
        raise UserError(f"{flag} auto: the profile knows one device; give --vram a budget for each rank")
    return len(profile.accelerators)


def check_budgets(vram_mib: tuple[int, ...], profile: MachineProfile, flag: str) -> None:
    """Raise UserError, about `flag`, for a budget above the memory of its device. Ranks beyond the devices of the
    profile are on others like the first."""
    for i, mib in enumerate(vram_mib):
        device = profile.accelerators[i if i < len(profile.accelerators) else 0]
        there = device.memory_bytes // MIB
        if mib > there:
            which = f"accelerator {device.index} ({device.name})"
            raise UserError(
                f"{flag}: a budget of {mib} MiB is more than the {there} MiB of {which}; give {there} or less"
            )


def wanted_workload(request: RunRequest, profile: MachineProfile) -> Workload:
    """The request as what a variant must at least offer. Raises UserError for a budget that no device here has."""
    check_budgets(request.vram_mib or (), profile, "--vram")
    devices = request.ranks
    if devices == 1 and request.auto_ratios and request.devices is None:
        devices = len(profile.accelerators)
        if request.replan:
            devices = count_devices((), True, profile, "-sm" if request.split_mode == "auto" else "-ts")
    budgets = request.vram_mib or (free_vram_mib(profile),) * devices
    if len(budgets) == 1:
        budgets *= devices
    sequences = request.sequences or max(1, request.concurrency)
    return Workload(
        vram_mib=budgets,
        context=request.context or request.needed,
        max_ubatch=request.ubatch or usual_ubatch(request.needed // 2 // sequences),
        sequences=sequences,
        type_k=request.type_k,
        type_v=request.type_v,
        split_mode=request.split_mode,
        tensor_split=request.tensor_split if devices > 1 else (),
        max_tp=binding_limits(request.max_tp, devices),
        reduce_dtype=request.reduce_dtype or Workload.reduce_dtype,
        concurrency=request.concurrency,
        ram_mib=request.ram_mib,
        prompt_math=request.prompt_math or Workload.prompt_math,
    )


def full_workload(request: RunRequest, want: Workload, spec: "ModelSpec") -> Workload:
    """What to plan for: the context that was asked for, else at least the one that pshard-plan takes by itself.

    Raises UserError when the model has not so much context, as no plan could be made.
    """
    most = spec.config.context
    if most and want.share > most:
        flags = "-c or -n" if request.plans else "-c, -n, -p or -d"  # of a run, or of a bench, which plans nothing
        raise UserError(f"{want.share} tokens of context are more than the model's {most}; give a smaller {flags}")
    if want.concurrency:
        sizes = size_load(want.concurrency, most or None, request.sequences, request.context)
        return replace(want, **vars(sizes))
    usual = min(Workload.context, (most or Workload.context) * want.sequences)
    context, prompt = request.context or max(request.needed, usual), request.needed // 2 // want.sequences
    return replace(want, context=context, prompt=max(want.prompt, prompt)).cut_texts()


def suggest_budget(full: Workload, spec: "ModelSpec", profile: MachineProfile) -> Workload:
    """The workload with a budget to plan for when none was given: what is free less a margin, at most what the whole
    model takes. Other programs may take of the margin before the plan no longer fits."""
    ranks = len(full.vram_mib)
    kv = sum(unit.state_nbytes(spec.config, full.state_shape) for unit in spec.units)
    scratch = scratch_bytes(spec, full.max_ubatch, full.state_shape, 4)
    reserve = max(reserve_mib(profile.reserve_of(full.device + rank)) for rank in range(ranks))
    whole = -(-(spec.packed_nbytes + kv) // ranks >> 20) + (scratch >> 20) + reserve + 1
    devices = profile.accelerators
    there = [devices[i if i < len(devices) else 0].memory_bytes // MIB for i in range(ranks)]
    usable = [min(free, most) - min(MARGIN_MIB, most // 20) for free, most in zip(full.vram_mib, there)]
    if profile.ram_bytes and devices[0].kind == "cpu":  # the budget is a part of it, beside others
        from pshard.planner.price.host_limits import times_rows, usable_bytes  # with all that prices plans

        tables = (unit for unit in spec.units if unit.kind.is_looked_up)
        stay = (unit for unit in tables if unit.stays_in_memory or not times_rows(profile))
        looked_up = sum(unit.packed_nbytes for unit in stay)
        usable = [(usable_bytes(profile, ranks) - looked_up - kv) // ranks // MIB] * ranks
    return replace(full, vram_mib=tuple(max(1, min(mib, whole)) for mib in usable))
