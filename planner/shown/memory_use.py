"""How much memory a plan takes, beside what there is."""

from dataclasses import dataclass
from operator import add

from pshard.cuts.rank_parts import cut_ranks
from pshard.homes import DISK
from pshard.machine import MachineProfile
from pshard.model import ModelSpec
from pshard.on_host import list_beyond
from pshard.plan import Variant
from pshard.planner.check_plan import count_host_bytes
from pshard.planner.price.host_limits import count_hosts, process_bytes
from pshard.print_table import count_mib, show_size
from pshard.routing.followed import under_plan

LEFT = 8  # a plan that leaves less than this part of host memory is worth a word
GIB = 1 << 30


@dataclass(frozen=True)
class MemoryUse:
    """What a plan takes. vram_mib: of each budget, what torch and the kernels hold included. host_bytes: of weights, KV
    cache and, without a GPU, of what lies in the budget, on all hosts together, which have host_memory_bytes, or may
    take so many: is_limited, by --ram. disk_bytes: of weights that stay on disk. own_bytes: what the program itself
    takes of --ram beside the plan; 0 without it."""

    vram_mib: tuple[int, ...]
    host_bytes: int
    host_memory_bytes: int
    is_limited: bool = False
    disk_bytes: int = 0
    own_bytes: int = 0

    @property
    def host(self) -> str:
        """Host memory in words."""
        return f"{show_bytes(self.host_bytes + self.own_bytes)} of {show_size(self.host_memory_bytes)}"

    @property
    def own(self) -> str:
        """What of it is the program's, in words; empty where that does not count."""
        return f", of which the program itself takes {show_bytes(self.own_bytes)}" if self.own_bytes else ""


def show_bytes(nbytes: int) -> str:
    """In GiB, or in MiB where that is not one."""
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{count_mib(nbytes)} MiB"


def measure_use(spec: ModelSpec, profile: MachineProfile, variant: Variant) -> MemoryUse:
    """What the variant takes on the machine that it was planned for."""
    kind, hosts = profile.accelerators[0].kind, count_hosts(profile, len(variant.ranks))
    specs = cut_ranks(under_plan(spec, variant), variant.split)
    reserves = (rank.reserve_mib if kind == "cuda" else 0 for rank in variant.ranks)
    drafting = (variant.workload.drafter_mib if variant.drafter_on(rank.rank) else 0 for rank in variant.ranks)
    own = map(add, reserves, drafting)
    used = (max(tier.buffers.total for tier in rank.tiers) for rank in variant.ranks)
    return MemoryUse(
        tuple(mib + count_mib(nbytes) for mib, nbytes in zip(own, used)),
        count_host_bytes(specs, variant, kind),
        hosts * (profile.ram_bytes or profile.host.memory_bytes),
        profile.ram_bytes > 0,
        sum(portion.nbytes for portion in list_beyond(spec, variant.ranks[0], DISK)),
        hosts * process_bytes(profile, len(variant.ranks)) if profile.ram_bytes else 0,
    )


def describe_tight(use: MemoryUse, free: int | None = None) -> str | None:
    """A line where host memory may be too small for the plan beside what else there is; None where it is not.

    free: bytes of it that are free now, where the plan is for this machine.
    """
    takes = f"the plan keeps {use.host_bytes / GIB:.1f} GiB in host memory"
    left = use.host_memory_bytes - use.host_bytes
    if not use.is_limited and left < use.host_memory_bytes / LEFT:
        return (
            f"{takes}, which leaves {left / GIB:.1f} of {use.host_memory_bytes / GIB:.4g} to the system, other "
            "programs and the file while it is read; where they need more the machine swaps or ends the run: a shorter "
            "-c, a smaller file or a larger --vram leaves more"
        )
    if free is not None and use.host_bytes > free:
        return f"{takes}, of which {free / GIB:.1f} are free now; end what else holds memory before it runs"
    return None
