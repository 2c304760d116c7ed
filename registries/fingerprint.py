"""What a plan depends on, spelled out, so that a stale registry can say which input changed."""

import hashlib
import json
from collections.abc import Iterable
from functools import lru_cache

from pshard.jsonio import to_json
from pshard.machine import MachineProfile
from pshard.plan import REGISTRY_VERSION

PLAN_FORMAT = 6  # raise when buffers, steps, packed layout or a plan's nouns change: stored plans no longer fit

PAGE_LOCKS = "page-locked memory"  # the limit that runs have met: left out where none was
DISK = "disk"  # and its timings: left out where no plan needs one

Inputs = tuple[tuple[str, str], ...]


def fingerprint_inputs(model_inputs: Iterable[tuple[str, str]], profile: MachineProfile) -> Inputs:
    """Everything whose change invalidates a plan, as (name, value) pairs in a fixed order.

    model_inputs: what the model file says of itself (architecture, digest of shapes and quant types, bytes). The
    profile has timings of disks where plans need the model's, of that one alone.
    """
    host = profile.host
    pairs = [(f"model {name}", str(value)) for name, value in model_inputs]
    pairs += [("cpu", host.cpu), ("isa", host.isa), ("kernels", host.kernels), ("threads", str(host.threads))]
    for acc in profile.accelerators:
        link = f", PCIe {acc.pcie_generation} x{acc.pcie_width}" if acc.pcie_generation else ""
        value = f"{acc.kind} {acc.name}, {acc.memory_bytes >> 20} MiB{link}"
        pairs.append((f"accelerator {acc.index}", value))
        if acc.driver:
            pairs.append((f"driver {acc.index}", acc.driver))
    if profile.lockable_bytes is not None:
        pairs.append((PAGE_LOCKS, f"{profile.lockable_bytes} bytes at most"))
    if profile.disks:
        quiet = [{k: v for k, v in row.items() if k != "disturbed"} for row in to_json(profile.disks)]
        rows = json.dumps(quiet, sort_keys=True).encode()
        pairs.append((DISK, f"{profile.disks[0].disk}, timed as {hashlib.sha256(rows).hexdigest()[:12]}"))
    pairs += [profile_input(profile), ("registry format", str(REGISTRY_VERSION)), ("plan format", str(PLAN_FORMAT))]
    return tuple(pairs)


def profile_input(profile: MachineProfile) -> tuple[str, str]:
    """The pair that says which profile it was."""
    return "profile", f"{profile.provenance.source} {profile.provenance.date} {digest_profile(profile)[:12]}"


@lru_cache(4)  # asked for each set of plans that is read or written
def digest_profile(profile: MachineProfile) -> str:
    """SHA-256 (hex) of a profile with all its tables; a limit of page-locking, or of host memory, changes none of them.
    Disks are apart: most plans need none.

    Profiles of before there were several hosts, or experts, delta nets or reading in place were timed, or kernels that
    are refused or what torch takes were kept, are what they were.
    """
    data = to_json(profile)
    for apart in ("lockable_bytes", "disks", "ram_bytes", "prompt_math"):
        del data[apart]
    for later in ("ranks_per_host", "experts", "routes", "deltas", "in_place", "refused", "reserves"):
        if not data[later]:
            del data[later]
    if not data["provenance"]["short"]:  # profiles of before there were short ones are what they were
        del data["provenance"]["short"]
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def digest(inputs: Iterable[tuple[str, str]]) -> str:
    """The fingerprint: SHA-256 (hex) of the pairs."""
    return hashlib.sha256(json.dumps([list(pair) for pair in inputs]).encode()).hexdigest()


def stand_under(made: Inputs, current: Inputs) -> bool:
    """Whether plans made for the one run under the other. The limit of page-locking may differ: they are slower than
    they might be. Plans that were made without a disk need none: they were for less context, or more memory."""
    ignored = (PAGE_LOCKS,) if DISK in dict(made) else (PAGE_LOCKS, DISK)
    return [p for p in made if p[0] not in ignored] == [p for p in current if p[0] not in ignored]


def explain_difference(stored: Iterable[tuple[str, str]], current: Iterable[tuple[str, str]]) -> list[str]:
    """One entry per input that differs, as "threads: 8 -> 12"; empty when nothing does."""
    old, new = dict(stored), dict(current)
    names = list(new) + [name for name in old if name not in new]
    return [
        f"{_call(name)}: {old.get(name, 'absent')} -> {new.get(name, 'absent')}"
        for name in names
        if old.get(name) != new.get(name)
    ]


def _call(name: str) -> str:
    """An input's name as people are told it: some names of a model's inputs say already that they are a model's."""
    rest = name.removeprefix("model ")
    return rest if "model" in rest else name
