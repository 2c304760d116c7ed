"""A unit divided between CPU and accelerator, and between arena and staging slot: what of it lies where. No torch.

Of a kind that is divided by rows (an FFN) the CPU has the last rows of some matrices, which are byte ranges of the
packed layout. Or these are streamed while all else lies in the VRAM arena: so a micro-batch that is too large for the
CPU has there what a small one has. Of a kind that has equal parts the CPU has the last of these; the first may lie in
the arena while those between are streamed, so that one unit is pinned, streamed and computed by the CPU at once. What
all parts share is with the accelerator's first ones, and in host memory.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from pshard.model_config import ModelConfig
from pshard.quant import ROW_BLOCK, TENSOR_ALIGN, align
from pshard.tensor import TensorSpec
from pshard.units.operations import used_share
from pshard.units.share import Share
from pshard.units.unit import Unit

SIXTEENTHS = 16  # what the CPU may have of a unit is counted in these


@dataclass(frozen=True)
class Piece:
    """Consecutive bytes: `nbytes` from `start` of the unit's blob, which lie at `to` in that of its portion."""

    start: int
    to: int
    nbytes: int


@dataclass(frozen=True)
class Portion:
    """What one place has of a unit, as a unit of its own, and where in the whole unit's blob each of its tensors is.

    pieces: those bytes, as few ranges as there are.
    """

    unit: Unit
    starts: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return self.unit.packed_nbytes

    def pieces_of(self, parts: Collection[int]) -> tuple[Piece, ...]:
        """Of a kind with parts: the bytes of these ones that are here, and of what all parts share."""
        part_of = self.unit.kind.part_of
        assert part_of is not None
        return _join_pieces(
            piece
            for piece, tensor in zip(_list_pieces(self.starts, self.unit), self.unit.tensors)
            if part_of(tensor.role) is None or part_of(tensor.role) in parts
        )


@dataclass(frozen=True)
class DividedUnit:
    """The portions of a unit; None: there is none.

    kept: in the arena though the unit is streamed. brought: what is copied to where the placement says, the arena or a
    slot. on_acc: both of these.
    """

    kept: Portion | None
    brought: Portion
    on_acc: Unit
    on_cpu: Portion | None


def can_divide(unit: Unit, share: Share) -> bool:
    """Whether every place would have something of the unit, and no record of the packed layout is cut."""
    total = count_shares(unit)
    own = total - share.cpu
    if unit.kind.part_of is not None:
        return share.cpu >= 0 and 0 <= share.kept < own
    if share.kept:
        return not share.cpu and unit.kind.keep is not None and 0 < share.kept < total and share.kept % ROW_BLOCK == 0
    return 0 < own < total and own % ROW_BLOCK == 0


@lru_cache(1 << 13)
def divide_unit(unit: Unit, share: Share) -> DividedUnit:
    """Divide a unit: the last of its rows or parts are the CPU's, the first `kept` ones the arena's.

    Raises ValueError when either side would have nothing, or the cut is not between two records of the packed layout.
    """
    if not share:
        return DividedUnit(None, _portion(unit, list(unit.offsets().values())), unit, None)
    if not can_divide(unit, share):
        raise ValueError(f"{unit.name} of {count_shares(unit)} cannot be divided into {share.in_words}")
    return _divide_parts(unit, share) if unit.kind.part_of else _divide_rows(unit, share)


def _divide_rows(unit: Unit, share: Share) -> DividedUnit:
    """An FFN: the accelerator's first rows, with all that follows them, and the last ones: the CPU's, with the norm, or
    streamed."""
    first = share.kept or count_shares(unit) - share.cpu
    begun, last, vectors = (list[tuple[int, TensorSpec]]() for _ in range(3))
    for start, tensor in unit.offsets().values():
        if tensor.role in unit.kind.divided:
            rest = _cut(tensor, tensor.rows - first)
            begun.append((start, _cut(tensor, first)))
            last.append((start + tensor.packed_nbytes - rest.packed_nbytes, rest))
        else:
            begun.append((start, tensor))
            if len(tensor.shape) == 1:
                vectors.append((start, tensor))
    in_arena = _portion(unit, begun)
    if share.kept:
        return DividedUnit(in_arena, _portion(unit, last), unit, None)
    return DividedUnit(
        None, in_arena, in_arena.unit, _portion(unit, sorted([*last, *vectors], key=lambda held: held[0]))
    )


def _divide_parts(unit: Unit, share: Share) -> DividedUnit:
    """A unit with parts: what they share is where the accelerator's first ones are, and in host memory."""
    part_of = unit.kind.part_of
    assert part_of is not None
    own = count_shares(unit) - share.cpu
    shared, kept, copied, on_cpu = (list[tuple[int, TensorSpec]]() for _ in range(4))
    for start, tensor in unit.offsets().values():
        part = part_of(tensor.role)
        here = shared if part is None else kept if part < share.kept else copied if part < own else on_cpu
        here.append((start, tensor))
    kept, copied = (shared + kept, copied) if share.kept else ([], shared + copied)
    return DividedUnit(
        _portion(unit, kept) if kept else None,
        _portion(unit, copied),
        replace(unit, tensors=tuple(tensor for _, tensor in (*kept, *copied))),
        _portion(unit, shared + on_cpu) if on_cpu else None,
    )


def _portion(unit: Unit, held: Sequence[tuple[int, TensorSpec]]) -> Portion:
    starts, part = tuple(start for start, _ in held), replace(unit, tensors=tuple(tensor for _, tensor in held))
    return Portion(part, starts, _join_pieces(_list_pieces(starts, part)))


def _list_pieces(starts: Sequence[int], unit: Unit) -> list[Piece]:
    """The bytes of each tensor."""
    return [
        Piece(start, to, align(tensor.packed_nbytes, TENSOR_ALIGN))
        for start, (to, tensor) in zip(starts, unit.offsets().values(), strict=True)
    ]


def _join_pieces(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Pieces that follow each other on both sides are one. There is always one, as an empty copy has an end too."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last and (last.start + last.nbytes, last.to + last.nbytes) == (piece.start, piece.to):
            joined[-1] = replace(last, nbytes=last.nbytes + piece.nbytes)
        else:
            joined.append(piece)
    return tuple(joined) or (Piece(0, 0, 0),)


def brought_part(unit: Unit, share: Share) -> Unit:
    """What is copied to where the placement says: all of the unit when it is not divided."""
    return divide_unit(unit, share).brought.unit if share else unit


def arena_portion(unit: Unit, where: str, share: Share) -> Portion | None:
    """What of a unit lies in the arena; None when nothing does."""
    parts = divide_unit(unit, share)
    return parts.brought if where == "pinned" else parts.kept if where == "streamed" else None


def kept_nbytes(unit: Unit, share: Share) -> int:
    """Bytes in the arena of a unit that is streamed."""
    kept = divide_unit(unit, share).kept if share.kept else None
    return kept.nbytes if kept else 0


@lru_cache(1 << 13)
def expected_copy(unit: Unit, share: Share, config: ModelConfig, tokens: int) -> tuple[Piece, ...]:
    """What a micro-batch of so many tokens is expected to have copied of a streamed unit."""
    return expected_pieces(divide_unit(unit, share).brought, config, tokens)


def expected_pieces(portion: Portion, config: ModelConfig, tokens: int) -> tuple[Piece, ...]:
    """What so many tokens are expected to use of a portion: where they choose among parts, about as many as that."""
    part_of, chosen = portion.unit.kind.part_of, portion.unit.kind.chosen
    if part_of is None or chosen is None:
        return portion.pieces
    parts = sorted({part for t in portion.unit.tensors if (part := part_of(t.role)) is not None})
    used = max(1, round(len(parts) * used_share(*chosen(config), tokens)))
    return portion.pieces_of([parts[i * len(parts) // used] for i in range(used)])


def without_cpu(unit: Unit, share: Share) -> Share | None:
    """How the unit is streamed whole with the same bytes in the arena, where the CPU computes nothing of it; None for
    a kind of which nothing is kept beside a slot."""
    if unit.kind.part_of is None and unit.kind.keep is None:
        return None
    return Share(kept=share.kept or count_shares(unit) - share.cpu)


@lru_cache(1 << 12)
def count_shares(unit: Unit) -> int:
    """What can be divided of a unit, in what its kind counts: parts, or rows; 0 for a unit that cannot be divided."""
    kind = unit.kind
    if kind.part_of is not None:
        return len({kind.part_of(t.role) for t in unit.tensors} - {None})
    return max((t.rows for t in unit.tensors if t.role in kind.divided), default=0)


def share_sixteenths(unit: Unit, sixteenths: int) -> int:
    """What is about so many sixteenths of a unit and may be the CPU's; 0 when the unit is too small."""
    total = count_shares(unit)
    own = align(total * (SIXTEENTHS - sixteenths) // SIXTEENTHS, 1 if unit.kind.part_of else ROW_BLOCK)
    return total - own if 0 < own < total else 0


@lru_cache(1 << 12)
def list_shares(unit: Unit, sixteenths: tuple[int, ...]) -> tuple[Share, ...]:
    """The ways to divide a unit in which CPU and arena have so many sixteenths or nothing; none for most kinds."""
    some = sorted({share_sixteenths(unit, n) for n in sixteenths} - {0})
    shares = [Share(cpu) for cpu in some]
    if unit.kind.part_of is not None:
        shares += [Share(cpu, kept) for cpu in (0, *some) for kept in some]
    return tuple(share for share in shares if can_divide(unit, share))


def joined_width(unit: Unit, share: Share, config: ModelConfig) -> int:
    """Elements a token that the CPU hands over of a divided unit."""
    return unit.kind.joins(share.cpu, config) if share.cpu else 0


def _cut(tensor: TensorSpec, rows: int) -> TensorSpec:
    return replace(tensor, shape=(rows, tensor.cols))
