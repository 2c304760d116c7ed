"""Whether two plans are one plan under two names on the machine at hand: then their rates differ by noise alone."""

from pshard.homes import ON_CPU
from pshard.plan import Placement, Variant


def do_same_work(one: Variant, other: Variant, accelerator: str) -> bool:
    """Whether the plans run the same kernels on the same weights with the same copies, in every tier of every rank.

    accelerator: "cuda" or "cpu". With the CPU as the accelerator its arena is host memory, and its kernels are the
    host's: units that are pinned there and units of the CPU are the same work. What a change of tiers moves between
    the two is not counted.
    """
    return _list_work(one, accelerator) == _list_work(other, accelerator)


def _list_work(variant: Variant, accelerator: str) -> list[object]:
    on_host = accelerator == "cpu"
    return [
        (rank.share, tier.tokens, [_name_place(place, on_host) for place in tier.placements])
        for rank in variant.ranks
        for tier in rank.tiers
    ]


def _name_place(place: Placement, on_host: bool) -> object:
    """The placement; on a host that is its own accelerator, what copies neither weights nor cells is one."""
    stays = place.sort == ON_CPU or (place.is_whole_in_arena and not place.has_state_on_host)
    return (place.unit, "in place") if on_host and stays else place
