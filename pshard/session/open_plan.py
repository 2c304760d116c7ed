"""Composes the rooms: finds the profile, the registry and the variant of a model, and loads an engine with them."""

import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pshard.buffers import TORCH_RESERVE_MIB, kv_layer_bytes, scratch_bytes
from pshard.commands.split_flags import count_devices
from pshard.errors import UserError
from pshard.machine import MachineProfile
from pshard.model import check_kv_types
from pshard.plan import Variant
from pshard.workload import Limits, Workload, binding_limits

if TYPE_CHECKING:
    from pshard.model import ModelSpec
    from pshard.models import ModelFile
    from pshard.runtime.engine import Engine
    from pshard.runtime.ranks.group import Group

UNLIMITED_MIB = 1 << 30
KERNELS = ("fast", "plain")


@dataclass(frozen=True)
class Request:
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
    kernels: str = "fast"
    replan: bool = False
    needed: int = 1
    max_tp: Limits = ()
    reduce_dtype: str | None = None
    devices: int | None = None  # how many, where neither budgets nor ratios say it
    auto_ratios: bool = False  # any ratios will do, and a plan that is made anew has those predicted to be the fastest


@dataclass(frozen=True)
class Opened:
    """A model file with the profile of this machine and the variant that serves the request."""

    file: "ModelFile"
    profile: MachineProfile
    variant: Variant
    registry: Path
    why: str = ""  # how the variant compared with others, where -sm auto left it to a run


def open_plan(request: Request) -> Opened:
    """Open the model and choose its variant. Raises UserError: no profile, no plan, stale plan, no fitting variant."""
    from pshard.models import open_model
    from pshard.registries.choose import choose_variant, plan_command
    from pshard.registries.fingerprint import fingerprint_inputs
    from pshard.registries.profile_store import load_profile
    from pshard.registries.store import check_fresh, load_registry, registry_path, save_variants

    file = open_model(request.model)
    check_kv_types(file.spec.config, request.type_k, request.type_v)
    profile = load_profile(request.profile)
    check_machine(profile)
    want = _workload(request, profile)
    path = registry_path(request.model, request.registry)
    inputs = fingerprint_inputs(file.fingerprint_inputs(), profile)
    full = _full_workload(request, want, file.spec)
    command = plan_command(str(request.model), full if request.vram_mib else _suggest_budget(full, file.spec))
    for flag, place in (("--registry", request.registry), ("--profile", request.profile)):
        if place is not None:
            command += f" {flag} {shlex.quote(str(place))}"
    command += " -ts auto" if request.auto_ratios and request.split_mode != "auto" else ""
    if request.replan:
        if request.vram_mib is None:
            raise UserError("--replan needs a budget: give --vram")
        from pshard.planner.choose_mode import plan_split

        planned = plan_split(file.spec, profile, full, request.auto_ratios)
        for note in save_variants(path, file.spec.name, inputs, [planned]).notes:
            print(f"note: {note}", file=sys.stderr)
    registry = load_registry(path, command)
    check_fresh(registry, inputs, f"{command} (or add --replan)")
    choice = choose_variant(registry, want, command)
    try:
        check_plan(file.spec, choice.variant, profile)
    except ValueError as error:
        raise UserError(f"the registry {path} is corrupt: {error}; delete it and run: {command}") from None
    reduce_dtype = request.reduce_dtype or choice.variant.reduce_dtype
    return Opened(file, profile, replace(choice.variant, reduce_dtype=reduce_dtype), path, choice.why)


def settle_plan(request: Request) -> tuple[Request, int]:
    """How many processes run the model, and what to ask of each; a plan that is to be made anew is made here, once.

    Raises UserError as `open_plan` does, and for --replan under torchrun, whose ranks would each make a plan.
    """
    from pshard.runtime.ranks.group import started_ranks

    if request.replan and started_ranks() > 1:
        raise UserError("--replan is for one process; under torchrun run pshard-plan with the same flags first")
    auto = request.split_mode == "auto" or request.auto_ratios
    if not auto and not request.replan:
        return request, _count_given(request)
    opened = open_plan(request)
    opened.file.close()
    ranks = len(opened.variant.ranks)
    if started_ranks() not in (0, ranks):
        raise UserError(
            f"the plan that is taken ({opened.variant.way}) is for {ranks} rank{'s' * (ranks > 1)}, but "
            f"{started_ranks()} were started; start {ranks} with torchrun, or ask for a split with -sm and -ts"
        )
    says = ranks == 1 or started_ranks() > 0  # of those that this starts, rank 0 will
    if opened.why and says and os.environ.get("RANK", "0") == "0":
        print(f"note: {opened.why}", file=sys.stderr)
    return replace(request, replan=False), ranks


def _count_given(request: Request) -> int:
    """How many ranks the request names, by their number, budgets or ratios."""
    if request.split_mode == "none":
        return 1
    return max(request.devices or 1, len(request.tensor_split), len(request.vram_mib or ()))


def _workload(request: Request, profile: MachineProfile) -> Workload:
    """The request as what a variant must at least offer."""
    devices = _count_given(request)
    if devices == 1 and request.auto_ratios and request.devices is None:
        devices = len(profile.accelerators)
        if request.replan:
            devices = count_devices((), True, profile, "-sm" if request.split_mode == "auto" else "-ts")
    budgets = request.vram_mib or (free_vram_mib(profile),) * devices
    if len(budgets) == 1:
        budgets *= devices
    return Workload(
        budgets,
        request.context or request.needed,
        request.sequences or 1,
        request.type_k,
        request.type_v,
        split_mode=request.split_mode,
        tensor_split=request.tensor_split if devices > 1 else (),
        max_tp=binding_limits(request.max_tp, devices),
        reduce_dtype=request.reduce_dtype or Workload.reduce_dtype,
    )


def _suggest_budget(full: Workload, spec: "ModelSpec") -> Workload:
    """The workload with a budget to plan for when none was given: what is free, at most what the whole model takes."""
    ranks = len(full.vram_mib)
    kv = kv_layer_bytes(spec.config, full.context, full.sequences, full.type_k, full.type_v) * spec.config.n_layers
    scratch = scratch_bytes(spec, full.max_ubatch, full.sequences, 4, full.context)
    whole = -(-(spec.packed_nbytes + kv) // ranks >> 20) + (scratch >> 20) + TORCH_RESERVE_MIB + 1
    return replace(full, vram_mib=tuple(min(free, whole) for free in full.vram_mib))


def _full_workload(request: Request, want: Workload, spec: "ModelSpec") -> Workload:
    """What to plan for: the context that was asked for, else at least the one that pshard-plan takes by itself.

    Raises UserError when the model has not so much context, as no plan could be made.
    """
    most = spec.config.context
    if most and want.share > most:
        raise UserError(f"{want.share} tokens of context are more than the model's {most}; ask for fewer")
    usual = min(Workload.context, (most or Workload.context) * want.sequences)
    full = replace(want, context=request.context or max(request.needed, usual))
    prompt = min(want.prompt, max(1, full.share // 2))
    return replace(full, prompt=prompt, generated=max(1, min(want.generated, full.share - prompt)))


def check_plan(spec: "ModelSpec", variant: Variant, profile: MachineProfile) -> None:
    """Raise ValueError for a plan that the runtime cannot rely on: one that was edited, or damaged in a way that reads
    like a plan."""
    from pshard.cuts.rank_parts import cut_ranks
    from pshard.planner.check_plan import check_runnable

    check_runnable(cut_ranks(spec, variant.split), variant, profile.accelerators[0].kind)


def free_vram_mib(profile: MachineProfile) -> int:
    """Free memory of the first accelerator in MiB; without limit for the CPU as accelerator."""
    if profile.accelerators[0].kind != "cuda":
        return UNLIMITED_MIB
    import torch

    return torch.cuda.mem_get_info(0)[0] >> 20


def check_machine(profile: MachineProfile) -> None:
    """Raise UserError when the profile was measured on another machine than this one."""
    from pshard.profile.identify import identify_accelerators, identify_host

    here = identify_host(profile.host.threads)
    pairs = [("cpu", profile.host.cpu, here.cpu), ("isa", profile.host.isa, here.isa)]
    pairs.append(("kernels", profile.host.kernels, here.kernels))
    if here.cores < profile.host.threads:
        pairs.append(("cores", str(profile.host.cores), str(here.cores)))
    kind = profile.accelerators[0].kind
    try:
        accelerators = identify_accelerators(kind)
    except UserError:  # there is none of that kind here
        accelerators = ()
    for i, planned in enumerate(profile.accelerators):
        found = accelerators[i] if i < len(accelerators) else None
        pairs.append((f"{kind} {i}", planned.name, found.name if found else "none"))
        if found and planned.driver:
            pairs.append((f"driver {i}", planned.driver, found.driver))
    changed = [f"{what}: {old} -> {new}" for what, old, new in pairs if old != new]
    if changed:
        from pshard.runtime.kernels.cpu import native

        missing = f" ({native.why_missing()})" if here.kernels != profile.host.kernels and native.why_missing() else ""
        what = "; ".join(changed)
        raise UserError(f"the machine profile is of another machine: {what}{missing}; run pshard-profile")


def open_group(opened: Opened, ranks: int) -> "Group":
    """Join the ranks of this run; sums on GPUs go the way that the profile found to be the fastest for their size."""
    from pshard.runtime.ranks.group import init_group

    profile, in_turns = opened.profile, opened.variant.split_mode == "layer"
    kind, threads = profile.accelerators[0].kind, profile.host.threads
    return init_group(
        ranks, kind, threads, in_turns, reduce_dtype=opened.variant.reduce_dtype, timings=profile.collectives
    )


def start_engine(
    opened: Opened,
    variant: Variant,
    kernels: str = "fast",
    group: "Group | None" = None,
    on_close: Callable[[], None] = lambda: None,
) -> "Engine":
    """Load the model under a variant on this machine's accelerator, with a progress bar on a terminal."""
    from pshard.registries.profile_store import note_page_locks
    from pshard.runtime.build_engine import build_engine
    from pshard.runtime.devices.device import open_device
    from pshard.runtime.devices.threads import use_threads

    index = group.local_rank if group is not None and group.size > 1 else variant.device
    device = open_device(opened.profile.accelerators[0].kind, index)
    if group is None or group.size == 1:  # a rank of several keeps the share of threads it was given
        use_threads(opened.profile.host.threads)
    with loading_bar(opened.file.spec.name, opened.file.spec.packed_nbytes) as progress:
        engine = build_engine(
            opened.file, variant, device, kernels=kernels, group=group, progress=progress, on_close=on_close,
            tiles=opened.profile.tiles_of(index),
        )  # fmt: skip
    if group is None or group.size == 1:  # several ranks share what the system gives
        memory = engine.memory()
        refused = not memory.page_locked
        if device.locks and note_page_locks(memory.host_locked, refused) and refused:
            engine.notes += ("the limit of page-locking is remembered: pshard-plan plans with it from now on",)
    return engine


@contextmanager
def loading_bar(name: str, total: int) -> Iterator[Any]:
    """A progress bar on stderr counting packed bytes; silent on a pipe."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn(f"loading {name}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.advance(task, done)


def environment_of(profile: MachineProfile) -> tuple[tuple[str, str], ...]:
    """Hardware and versions, as measurements carry them."""
    import torch

    from pshard import __version__

    host, accelerator = profile.host, profile.accelerators[0]
    pairs = [
        ("cpu", host.cpu),
        ("isa", host.isa),
        ("threads", str(host.threads)),
        ("accelerator", accelerator.name),
        ("torch", torch.__version__),
        ("pshard", __version__),
        ("profile", f"{profile.provenance.source} {profile.provenance.date}"),
    ]
    if accelerator.driver:
        pairs.insert(4, ("driver", accelerator.driver))
    return tuple(pairs)


def load(
    model: str | Path,
    vram: int | tuple[int, ...] | None = None,
    *,
    context: int | None = None,
    sequences: int | None = None,
    type_k: str = "bf16",
    type_v: str = "bf16",
    registry: str | Path | None = None,
    kernels: str = "fast",
    replan: bool = False,
) -> "Engine":
    """Load a planned model and return its engine.

    Args:
        model: GGUF file or safetensors folder.
        vram: budget in MiB; the largest planned variant that fits is taken. None: what is free.
        context: cells of the KV cache that are needed; sequences: how many share them. None: whatever is planned.
        type_k, type_v: types of the KV cache: "bf16", "f16", "f32" or "q8_0".
        registry: plan file, when it does not lie in its usual place.
        kernels: "fast", or "plain" for torch in float32.
        replan: plan now (needs vram) instead of using the stored plan.

    Returns:
        Engine with `generate`, `forward`, `plan`, `memory()`, `reset` and `close`.

    Raises:
        UserError: one line saying what is missing, stale or out of range, and the command that mends it.
    """
    for name, value in (("context", context), ("sequences", sequences)):
        if value is not None and value < 1:
            raise UserError(f"{name} is {value}; it is 1 or more, or None for what is planned")
    if kernels not in KERNELS:
        raise UserError(f"kernels is {kernels!r}; choose from {', '.join(KERNELS)}")
    budgets = (vram,) if isinstance(vram, int) else vram
    place = Path(registry) if registry else None
    request = Request(
        Path(model), budgets, context, sequences, type_k, type_v, registry=place, kernels=kernels, replan=replan
    )
    opened = open_plan(request)
    return start_engine(opened, opened.variant, kernels, on_close=opened.file.close)
