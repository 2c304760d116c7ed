"""Plans are one plan under two names where they run the same kernels and copy the same."""

from dataclasses import replace

from report_samples import make_plan_variant

from pshard.plan import Placement, Variant
from pshard.session.same_work import do_same_work


def place_all(where: dict[str, tuple[str, str | None]], rows: int = 0) -> Variant:
    """A variant with one tier of these units."""
    made = make_plan_variant()
    (rank,) = made.ranks
    placements = tuple(Placement(unit, place, kv, rows if kv is None else 0) for unit, (place, kv) in where.items())
    return replace(made, ranks=(replace(rank, tiers=(replace(rank.tiers[0], placements=placements),)),))


PINNED = place_all({"blk.0.attention": ("pinned", "vram"), "blk.0.ffn": ("pinned", None)})
CPU = place_all({"blk.0.attention": ("cpu", "host"), "blk.0.ffn": ("cpu", None)})
FETCHED = place_all({"blk.0.attention": ("pinned", "host"), "blk.0.ffn": ("pinned", None)})
STREAMED = place_all({"blk.0.attention": ("pinned", "vram"), "blk.0.ffn": ("streamed", None)})
DIVIDED = place_all({"blk.0.attention": ("pinned", "vram"), "blk.0.ffn": ("pinned", None)}, rows=32)


def test_where_the_cpu_is_the_accelerator_all_that_stays_in_place_is_the_same_work() -> None:
    assert do_same_work(PINNED, CPU, "cpu")
    for other in (FETCHED, STREAMED, DIVIDED):
        assert not do_same_work(PINNED, other, "cpu") and not do_same_work(CPU, other, "cpu")


def test_on_a_gpu_only_equal_placements_are_the_same_work() -> None:
    variants = (PINNED, CPU, FETCHED, STREAMED, DIVIDED)
    assert all(do_same_work(a, b, "cuda") == (a is b) for a in variants for b in variants)


def test_plans_of_other_tiers_are_other_work() -> None:
    (rank,) = CPU.ranks
    larger = replace(CPU, ranks=(replace(rank, tiers=(replace(rank.tiers[0], tokens=4096),)),))
    assert do_same_work(CPU, CPU, "cpu") and not do_same_work(CPU, larger, "cpu")
