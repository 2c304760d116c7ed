"""The machine as the plans of one model see it: how much host memory they may take, and the disk that holds the model,
where host memory may not."""

from bisect import bisect_left
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pshard.batch_sizes import SMALL_BATCH
from pshard.errors import CannotWrite, NoPlan, UserError
from pshard.machine import MachineProfile
from pshard.on_disk import mark_made
from pshard.session.packed_models import Tell
from pshard.workload import MIB, UNLIMITED_MIB, Workload

if TYPE_CHECKING:
    from pshard.model import ModelSpec
    from pshard.models import ModelFile

AMPLE = 0.8  # what is below this part of what is usable needs no disk: slots and buffers fit beside it
ALIKE = 64  # sizes of --ram that are nearer to each other than this part of a model are alike
MOST_PLANNED = 4  # sizes of --ram that are planned in full before one is named
SLOW = 1e9  # bytes a second: NVMe drives do better
PACKS = 0.8  # of the time that units take: from here on the processor's time is what they take
FASTER = 2  # times the rate of units that a disk has, which is then not what they wait for


def limit_ram(profile: MachineProfile, ram_mib: int, flag: str = "--ram") -> MachineProfile:
    """The machine with so much host memory for all that runs; 0: what there is. Raises UserError for more than that."""
    there = profile.host.memory_bytes
    if ram_mib * MIB > there:
        raise UserError(f"{flag} {ram_mib} MiB are more than the {there // MIB} MiB of this machine; give less")
    return replace(profile, ram_bytes=ram_mib * MIB)


def may_need_disk(spec: "ModelSpec", profile: MachineProfile, workload: Workload) -> bool:
    """Whether host memory may not hold a model with the KV cells and other states of a workload. Several ranks
    have no disk to read from yet."""
    from pshard.planner.price.host_limits import usable_bytes

    ranks, states = len(workload.vram_mib), (u.state_nbytes(spec.config, workload.state_shape) for u in spec.units)
    nbytes = spec.packed_nbytes + sum(states)
    return ranks == 1 and nbytes > AMPLE * usable_bytes(profile, ranks)


def recall_disk(file: "ModelFile", profile: MachineProfile) -> MachineProfile:
    """The profile with what it knows of the disk that holds a model; nothing is timed."""
    if not profile.disks:
        return profile
    from pshard.profile.timed.time_disk import name_source

    return profile.of_disk(name_source(file))


def use_disk(
    file: "ModelFile", profile: MachineProfile, workload: Workload, given: Path | None, say: Tell, later: Tell
) -> MachineProfile:
    """The profile with the timings of the disk that holds the model, where plans may need it, and the model's spec with
    marks on what cannot be read from there; else with none. A disk that the profile lacks is timed now, and kept there.
    given: the profile's file, where one was asked for; later: takes what is worth a line where a plan is made."""
    if not may_need_disk(file.spec, profile, workload):
        return replace(profile, disks=())
    from pshard.profile.timed.time_disk import name_source, time_disk
    from pshard.registries.profile_store import save_profile
    from pshard.runtime.kernels.cpu import native

    file.spec = mark_made(file)
    disk = name_source(file)
    known = profile.of_disk(disk)
    if any(row.cpu_seconds for row in known.unit_reads) or not native.is_available():
        return known
    found = time_disk(file)
    if not found:
        say("note: nothing of this model can be used from disk as it lies in its files; a GGUF file can")
        return known
    others = tuple(row for row in profile.disks if row.disk != disk)
    profile = replace(profile, disks=(*others, *found))
    later(describe_disk(profile.of_disk(disk)))
    try:
        save_profile(replace(profile, ram_bytes=0, prompt_math=Workload.prompt_math), given)
    except CannotWrite as error:
        say(f"note: the timings of the disk are for this run only: {error}")
    return profile.of_disk(disk)


def assume_disk(
    file: "ModelFile",
    profile: MachineProfile,
    workload: Workload,
    given: Path | None,
    elsewhere: bool,
    say: Tell,
    later: Tell,
) -> MachineProfile:
    """The same for a model that is to be planned only: where its weights are not here, or it is to run `elsewhere`,
    with the disk that PSHARD_DISK makes up, or the first that the profile has timed."""
    if not elsewhere and _is_here(Path(file.spec.path)):
        return use_disk(file, profile, workload, given, say, later)
    if not may_need_disk(file.spec, profile, workload):
        return replace(profile, disks=())
    from pshard.runtime.memory.disk.fake_disk import VARIABLE, read_fake_disk

    file.spec = mark_made(file)
    if fake := read_fake_disk():
        profile = replace(profile, disks=fake.timings)
    known = sorted({row.disk for row in profile.disks})
    if not known:
        say(f"note: no disk was timed, so nothing is planned to stay there; {VARIABLE}=fake:rate=7G plans for 7 GB/s")
        return profile
    say(f"note: planned for {known[0]}" if fake else f"note: planned for the disk that was timed: {known[0]}")
    return profile.of_disk(known[0])


def _is_here(model: Path) -> bool:
    """Whether a model's weights are here: of a header alone the file is a hole for the most part."""
    files = [*model.glob("*.safetensors"), *model.glob("*.gguf")] if model.is_dir() else [model]
    sizes = [file.stat() for file in files if file.is_file()]
    return sum(512 * stat.st_blocks for stat in sizes) > sum(stat.st_size for stat in sizes) / 2


def name_least_ram(error: UserError, spec: "ModelSpec", profile: MachineProfile, workload: Workload) -> UserError:
    """The error of a plan that cannot be made under --ram, with the least that one can be made under; the same error
    where there is none, or --ram is not why."""
    if not workload.ram_mib:
        return error
    from pshard.planner.make_plan import plan_roughly, plan_variant
    from pshard.session.run_request import suggest_budget

    def suggest(wider: MachineProfile) -> Workload:
        return suggest_budget(replace(workload, vram_mib=(UNLIMITED_MIB,) * len(workload.vram_mib)), spec, wider)

    on_cpu = profile.accelerators[0].kind == "cpu"
    suggests = on_cpu and suggest(profile).vram_mib == workload.vram_mib  # else the budget was given

    def works(mib: int, roughly: bool = True) -> bool:
        """Whether that loads, planned as it will be; roughly: with micro-batches that are small and no
        single tokens."""
        wider = replace(profile, ram_bytes=mib * MIB)
        asked = replace(suggest(wider) if suggests else workload, ram_mib=mib)
        wider = wider if may_need_disk(spec, wider, asked) else replace(wider, disks=())
        small = next((n for n in asked.tiers() if n >= max(asked.answer_rows, SMALL_BATCH)), asked.max_ubatch)
        try:
            if roughly:
                plan_roughly(spec, wider, replace(asked, max_ubatch=small), 1.0).variant  # noqa: B018 is checked
            else:
                plan_variant(spec, wider, asked)
        except (UserError, ValueError):
            return False
        return True

    step = max(1, spec.packed_nbytes // MIB // ALIKE)
    tried = range(workload.ram_mib + step, profile.host.memory_bytes // MIB, step)
    least = bisect_left(tried, True, key=works)
    loads = next((mib for mib in tried[least : least + MOST_PLANNED] if works(mib, roughly=False)), None)
    if loads is None:
        return error
    return NoPlan(f"--ram {workload.ram_mib} MiB is too little for {spec.name}; give {loads} MiB or more")


def describe_disk(profile: MachineProfile) -> str:
    """A line about the profile's only disk."""
    best = max(profile.unit_reads, key=lambda row: row.nbytes / row.seconds)
    rate = best.nbytes / best.seconds
    line = f"disk: {best.disk} brings {rate / 1e9:.2f} GB/s of weights to host memory"
    if not best.direct:
        line += ", through the page cache, as its file system refuses direct reads"
    alone = max(row.nbytes / row.seconds for row in profile.disks)
    if best.cpu_seconds > PACKS * best.seconds and alone > FASTER * rate:
        return f"{line}; the processor, which packs what is read, limits that, not the disk"
    is_slow = rate < SLOW * (1 - best.disturbed)  # whatever other programs cost
    return line + ("; an NVMe drive would be several times as fast" if is_slow else "")
