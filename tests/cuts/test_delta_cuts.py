"""Cuts of gated delta nets over value heads: those that compute the same are let through, all others refused."""

from dataclasses import replace

import pytest
from golden.shapes import make_shape

from pshard.cuts.check_cut import TensorCut, UnitCut, check_cut
from pshard.errors import UserError
from pshard.tensor import TensorSpec
from pshard.units.operations import DeltaNet, Norm, Product, ProductGroup
from pshard.units.unit import Unit, UnitKind

KEYS, VALUES, D, WIDTH = 4, 8, 16, 32
SIZES = {"q": KEYS * D, "k": KEYS * D, "v": VALUES * D, "z": VALUES * D, "beta": VALUES, "alpha": VALUES}


def make_unit(tiled: bool) -> Unit:
    stacks = VALUES // KEYS if tiled else 0

    def matrix(name: str, rows: int, cols: int = WIDTH) -> TensorSpec:
        return TensorSpec(f"blk.0.{name}", "F32", (rows, cols), stacks if name in ("v", "z", "beta", "alpha") else 0)

    products = {name: matrix(name, rows) for name, rows in SIZES.items()}
    conv = {f"conv_{n}": matrix(f"conv_{n}", SIZES[n], 4) for n in "qkv"}
    vectors = {n: TensorSpec(f"blk.0.{n}", "F32", (size,)) for n, size in (("dt", VALUES), ("decay", VALUES))}
    vectors |= {"norm": TensorSpec("blk.0.norm", "F32", (D,)), "first": TensorSpec("blk.0.first", "F32", (WIDTH,))}
    out = matrix("out", WIDTH, VALUES * D)
    net = DeltaNet(tuple(conv.values()), vectors["dt"], vectors["decay"], vectors["norm"], KEYS, VALUES, D, tiled)
    steps = (Norm(vectors["first"], WIDTH), ProductGroup(tuple(products.values())), net, Product(out, adds=True))
    kind = UnitKind("net", "layer", (("pinned", "vram"),), lambda tensors, config: steps, None)
    tensors = (*vectors.values(), *products.values(), *conv.values(), out)
    return Unit("blk.0.net", kind, 0, tensors)


def cut_heads(heads: tuple[tuple[int, int], ...], tiled: bool) -> UnitCut:
    """As ranks would hold these value heads, of tiled ones in each stack."""
    stacks = VALUES // KEYS if tiled else 1
    group = 1 if tiled else VALUES // KEYS
    keys = tuple((a // group, -(-b // group)) if a < b else (a // group,) * 2 for a, b in heads)

    def rows(role: str, ranges: tuple[tuple[int, int], ...], width: int, stacked: int = 1) -> TensorCut:
        return TensorCut(role, "rows", tuple((a * width, b * width) for a, b in ranges), stacked)

    return UnitCut("blk.0.net", (
        TensorCut("first", "none", ()), TensorCut("norm", "none", ()),
        *(rows(n, keys, D) for n in ("q", "k", "conv_q", "conv_k")),
        *(rows(n, heads, D, stacks) for n in ("v", "z", "conv_v")),
        *(rows(n, heads, 1, stacks) for n in ("beta", "alpha", "dt", "decay")),
        TensorCut("out", "cols", tuple((a * D, b * D) for a, b in heads)),
    ))  # fmt: skip


def check(cut: UnitCut, tiled: bool = False) -> None:
    check_cut(make_shape("deepseek-v2-lite"), make_unit(tiled), cut)


GOOD = ((0, 2), (2, 6), (6, 6), (6, 8))


@pytest.mark.parametrize("heads", [GOOD, ((0, 8),), ((0, 1), (1, 2), (2, 4), (4, 8))], ids=str)
def test_whole_value_heads_with_their_keys_are_let_through(heads: tuple[tuple[int, int], ...]) -> None:
    check(cut_heads(heads, False))


def test_nothing_cut_gives_no_sum() -> None:
    roles = [t.role for t in make_unit(False).tensors]
    with pytest.raises(UserError, match="the all-reduce would count wrongly"):
        check(UnitCut("blk.0.net", tuple(TensorCut(role, "none", ()) for role in roles)))


@pytest.mark.parametrize(
    ("role", "change", "why"),
    [
        ("norm", {"axis": "rows", "ranges": ((0, 4), (4, 8), (8, 8), (8, 16))}, "the same for every head"),
        ("k", {"ranges": ((0, 16), (16, 48), (48, 48), (48, 48))}, "q and k that are not cut alike"),
        ("z", {"ranges": ((0, 48), (48, 96), (96, 96), (96, 128))}, "v and z that are not cut alike"),
        ("beta", {"ranges": ((0, 3), (3, 6), (6, 6), (6, 8))}, "beta or alpha cut elsewhere"),
        ("decay", {"ranges": ((0, 3), (3, 6), (6, 6), (6, 8))}, "not cut where the heads are"),
        ("conv_v", {"axis": "none", "ranges": ()}, "not cut where the heads are"),
    ],
)
def test_tensors_that_are_cut_elsewhere_are_named(role: str, change: dict, why: str) -> None:
    good = cut_heads(GOOD, False)
    bad = tuple(replace(t, **change) if t.role == role else t for t in good.tensors)
    with pytest.raises(UserError, match=why):
        check(UnitCut(good.unit, bad))


def test_heads_are_whole_and_share_their_keys_evenly() -> None:
    with pytest.raises(UserError, match="unequal numbers of value heads"):
        check(cut_heads(((0, 3), (3, 8)), False))
    good = cut_heads(((0, 4), (4, 8)), False)
    inside = ((0, 56), (56, 128))
    bad = tuple(replace(t, ranges=inside) if t.role in ("v", "z", "conv_v", "out") else t for t in good.tensors)
    with pytest.raises(UserError, match="cut inside a head"):
        check(UnitCut(good.unit, bad))


def test_tiled_heads_keep_their_keys_in_every_stack() -> None:
    """Up to the product behind, whose columns nobody cuts in stacks yet."""
    with pytest.raises(UserError, match=r"out is cut up to 64 of 128"):
        check(cut_heads(((0, 1), (1, 4)), True), True)
    flat = tuple(replace(t, stacks=1) if t.role == "conv_v" else t for t in cut_heads(((0, 1), (1, 4)), True).tensors)
    with pytest.raises(UserError, match="conv_v is not cut where the heads are"):
        check(UnitCut("blk.0.net", flat), True)
