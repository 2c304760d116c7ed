"""Homes: where bytes live. Lanes: the queues that copies between homes take. Sites: a home of weights together with who
computes from it, which is what a plan says of a unit. All that there are of each are declared here. No torch.

A home that is added with `declare_home` is planned, simulated, checked and run like these; see docs/architecture.md.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

ACC, CPU = "acc", "cpu"  # who computes: the accelerator, or the host's CPU


@dataclass(frozen=True, eq=False)
class Lane:
    """A queue of copies that run one after the other, beside all other lanes.

    Attributes:
        name: as simulations and figures call it.
        timed: the `direction` of those copies in a profile that say how long one takes, by its bytes: rate and latency.
    """

    name: str
    timed: str

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple:  # another process has one of its own
        return _find_lane, (self.name,)


@dataclass(frozen=True, eq=False)
class Home:
    """Where bytes live.

    Attributes:
        name: as plans call it.
        way_in: the lanes by which its bytes come to the accelerator's memory, in turn; none where they are there.
        way_out: the lane by which they come back; None where nothing does.
        is_readable: whether kernels of the accelerator can read it in place.
        in_host_memory: whether what lies there takes host memory.
    """

    name: str
    way_in: tuple[Lane, ...] = ()
    way_out: Lane | None = None
    is_readable: bool = False
    in_host_memory: bool = False

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple:  # another process has one of its own
        return _find_home, (self.name,)


@dataclass(frozen=True, eq=False)
class Site:
    """Where a unit's weights live and who computes it; `name` is what a plan's `where` says."""

    name: str
    home: Home
    computer: str

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple:  # another process has one of its own
        return _find_site, (self.name,)

    @cached_property
    def is_on_acc(self) -> bool:
        """Whether the accelerator computes."""
        return self.computer == ACC

    @cached_property
    def in_arena(self) -> bool:
        """Whether the weights lie in the accelerator's arena."""
        return not self.home.way_in

    @cached_property
    def is_beyond_host(self) -> bool:
        """Whether the weights live beyond host memory, and take none of it."""
        return not self.in_arena and not self.home.in_host_memory

    @cached_property
    def moves_each_step(self) -> bool:
        """Whether weights come to the accelerator for every micro-batch: through a staging slot, or read in place."""
        return self.is_on_acc and not self.in_arena


LINK = Lane("link", "h2d")
BACK = Lane("d2h", "d2h")
READ = Lane("disk", "disk")  # from the model's file to host memory, packed on the way
COMPUTE = Lane(ACC, "")  # where the accelerator computes: activations pass there, between units; see `Tables.handoff`

VRAM = Home("vram")
HOST = Home("host", (LINK,), BACK, is_readable=True, in_host_memory=True)
DISK = Home("disk", (READ, LINK))

# names of the sites that there always are; of units on demand the CPU brings what is used: experts to slots, and rows
PINNED, STREAMED, ON_CPU, ON_DISK, ON_DEMAND = "pinned", "streamed", "cpu", "disk", "demand"
DIVIDED = "divided"  # what is said of a unit that has several

HOMES: dict[str, Home] = {home.name: home for home in (VRAM, HOST, DISK)}
SITES: dict[str, Site] = {
    site.name: site
    for site in (
        Site(PINNED, VRAM, ACC),
        Site(STREAMED, HOST, ACC),
        Site(ON_CPU, HOST, CPU),
        Site(ON_DISK, DISK, ACC),
        Site(ON_DEMAND, DISK, CPU),
    )
}
MOVING = {site.name: site.home for site in SITES.values() if site.moves_each_step}  # homes of sites whose weights move


def list_lanes() -> tuple[Lane, ...]:
    """All lanes of copies, each once."""
    lanes = [lane for home in HOMES.values() for lane in (*home.way_in, home.way_out) if lane is not None]
    return tuple(dict.fromkeys(lanes))


def _find_lane(name: str) -> Lane:
    return next(lane for lane in (COMPUTE, *list_lanes()) if lane.name == name)


def _find_home(name: str) -> Home:
    return HOMES[name]


def _find_site(name: str) -> Site:
    return SITES[name]


def list_sorts(used: Collection[str]) -> tuple[str, ...]:
    """What a unit may be called by where it is, in the order of tables: its site, or DIVIDED; those beyond host memory
    only where they are among what is used."""
    return (*(name for name, site in SITES.items() if name in used or not site.is_beyond_host), DIVIDED)


def list_far_homes() -> tuple[Home, ...]:
    """Homes beyond host memory, from which weights come through further lanes, the first declared first."""
    return tuple(home for home in HOMES.values() if home.way_in and not home.in_host_memory)


@contextmanager
def declare_home(home: Home) -> Iterator[Site]:
    """Add a home that lies beyond host memory, for as long as the context lasts. Its weights are called by its name in
    plans, and come to the accelerator for every micro-batch. Raises ValueError for a name that is taken, or a way that
    does not end in the link."""
    if home.name in HOMES or home.name in SITES:
        raise ValueError(f"there is a home or a site called {home.name!r} already")
    if not home.way_in or home.way_in[-1] is not LINK:
        raise ValueError(f"what lives in {home.name!r} must come to the accelerator over the link")
    HOMES[home.name], SITES[home.name], MOVING[home.name] = home, Site(home.name, home, ACC), home
    try:
        yield SITES[home.name]
    finally:
        del HOMES[home.name], SITES[home.name], MOVING[home.name]
