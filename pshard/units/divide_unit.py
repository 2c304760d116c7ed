"""A unit divided between CPU and accelerator, and between arena and staging slot: what of it lies where. No torch.

Of a kind that is divided by rows (an FFN) the CPU has the last rows of some matrices, which are byte ranges of the
packed layout. Or these are streamed while all else lies in the VRAM arena: so a micro-batch that is too large for the
CPU has there what a small one has. Of a kind whose matrices are stacks of equal parts the CPU has the last of
these; the first may lie in the arena while those between are streamed, so that one unit is pinned, streamed and
computed by the CPU at once. What all parts share is with the accelerator's first ones, and in host memory.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from pshard.homes import SITES
from pshard.model_config import ModelConfig
from pshard.quant import ROW_BLOCK, TENSOR_ALIGN, align
from pshard.tensor import TensorSpec
from pshard.units.share import AT_ONCE, WHOLE, Share, Wave
from pshard.units.unit import Division, Unit

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

    pieces: those bytes, as few ranges as there are. first: the number of its first part.
    """

    unit: Unit
    starts: tuple[int, ...]
    pieces: tuple[Piece, ...]
    first: int = 0

    @property
    def nbytes(self) -> int:
        return self.unit.packed_nbytes

    @property
    def parts(self) -> range:
        """Numbers of the parts, of a unit that has some."""
        return range(self.first, self.first + max((t.parts for t in self.unit.tensors), default=0))


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


def divide_operations(unit: Unit, share: Share, config: ModelConfig) -> Division:
    """What each side does of a unit that is divided so; nothing on the CPU and after it where that has no share."""
    parts = divide_unit(unit, share)
    if parts.on_cpu is not None:
        assert unit.kind.divide is not None
        return unit.kind.divide(parts.on_acc.by_role, parts.on_cpu.unit.by_role, config)
    if unit.kind.keep and parts.kept:
        return Division(unit.kind.keep(parts.kept.unit.by_role, parts.brought.unit.by_role, config), (), ())
    return Division(unit.operations(config), (), ())


def can_divide(unit: Unit, share: Share) -> bool:
    """Whether every place would have something of the unit, and no record of the packed layout is cut."""
    total = count_shares(unit)
    own = total - share.cpu
    if unit.kind.parts:
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
    return _divide_parts(unit, share) if unit.kind.parts else _divide_rows(unit, share)


def _divide_rows(unit: Unit, share: Share) -> DividedUnit:
    """An FFN: the accelerator's first rows, with all that follows them, and the last ones: the CPU's, with the norm, or
    streamed."""
    first = share.kept or count_shares(unit) - share.cpu
    begun, last, vectors = (list[tuple[int, TensorSpec]]() for _ in range(3))
    for start, tensor in unit.offsets().values():
        if tensor.role in unit.kind.divided:  # a bias too
            rest = _cut(tensor, tensor.shape[0] - first)
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
    total = count_shares(unit)
    own = total - share.cpu
    return DividedUnit(
        _portion_of_parts(unit, 0, share.kept) if share.kept else None,
        _portion_of_parts(unit, share.kept, own, shared=not share.kept),
        _portion_of_parts(unit, 0, own).unit,
        _portion_of_parts(unit, own, total) if share.cpu else None,
    )


def _portion_of_parts(unit: Unit, first: int, end: int, shared: bool = True) -> Portion:
    """Parts `first` to before `end` of every stack; shared: with what all parts share."""
    held = []
    for start, tensor in unit.offsets().values():
        if tensor.parts:
            before = replace(tensor, shape=(tensor.rows // tensor.parts * first, tensor.cols))
            rows = tensor.rows // tensor.parts * (end - first)
            part = replace(tensor, shape=(rows, tensor.cols), parts=end - first)
            held.append((start + before.packed_nbytes, part))
        elif shared:
            held.append((start, tensor))
    return replace(_portion(unit, held), first=first)


def whole_unit(unit: Unit) -> Portion:
    """All of a unit."""
    return divide_unit(unit, WHOLE).brought


def last_parts(unit: Unit, first: int) -> Portion:
    """The parts of a unit from number `first` on, with what all parts share."""
    return _portion_of_parts(unit, first, count_shares(unit))


@lru_cache(1 << 13)
def find_portion(portion: Portion, held: Portion) -> Portion:
    """A portion where it lies in a blob that has only `held` of its unit. Raises ValueError where that lacks some."""
    offsets, starts = held.unit.offsets(), []
    begins = {tensor.role: start for start, tensor in zip(held.starts, held.unit.tensors, strict=True)}
    for start, tensor in zip(portion.starts, portion.unit.tensors, strict=True):
        if tensor.role not in begins or start < begins[tensor.role]:
            raise ValueError(f"{tensor.name} is not there from its byte {start} on")
        starts.append(offsets[tensor.role][0] + start - begins[tensor.role])
    found = _portion(portion.unit, list(zip(starts, portion.unit.tensors, strict=True)))
    return replace(found, first=portion.first)


def _portion(unit: Unit, held: Sequence[tuple[int, TensorSpec]]) -> Portion:
    starts, part = tuple(start for start, _ in held), replace(unit, tensors=tuple(tensor for _, tensor in held))
    return Portion(part, starts, _join_pieces(_list_pieces(starts, part)))


def _list_pieces(starts: Sequence[int], unit: Unit) -> list[Piece]:
    """The bytes of each tensor, with the space up to the next where it begins as a tensor does."""
    return [
        Piece(start, to, tensor.packed_nbytes if start % TENSOR_ALIGN else align(tensor.packed_nbytes, TENSOR_ALIGN))
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


def arena_portion(unit: Unit, where: str, share: Share) -> Portion | None:
    """What of a unit lies in the arena; None when nothing does."""
    parts = divide_unit(unit, share)
    site = SITES[where]
    return parts.brought if site.in_arena else parts.kept if site.is_on_acc else None


@dataclass(frozen=True)
class DividedSizes:
    """Bytes of a divided unit: what the placement says where it is, in a blob and as it is copied, and what is kept in
    the arena beside a slot. on_host: what host memory keeps where the arena always has its part."""

    brought: int
    copied: int
    kept: int
    on_host: int


class _Alike:
    """A unit that stands for all that are like it."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit

    def __hash__(self) -> int:
        return hash(self.unit.likeness)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Alike) and self.unit.likeness == other.unit.likeness


def divided_sizes(unit: Unit, share: Share) -> DividedSizes:
    """Bytes of a divided unit, which a search asks for thousands of times. Raises ValueError as `divide_unit` does."""
    return _sizes(_Alike(unit), share)


@lru_cache(1 << 13)
def _sizes(alike: _Alike, share: Share) -> DividedSizes:
    parts = divide_unit(alike.unit, share)
    copied = sum(piece.nbytes for piece in parts.brought.pieces)
    kept, on_host = parts.kept.nbytes if parts.kept else 0, alike.unit.packed_nbytes
    if alike.unit.kind.parts:
        on_host = last_parts(alike.unit, share.kept or count_shares(alike.unit) - share.cpu).nbytes
    return DividedSizes(parts.brought.unit.packed_nbytes, copied, kept, on_host)


def count_waves(unit: Unit, share: Share, waves: int) -> int:
    """In how many waves of so many a streamed unit comes: one that has parts, and is not divided."""
    return 1 if share or not unit.kind.parts else max(1, min(waves, count_shares(unit)))


def find_brought(unit: Unit, share: Share, wave: Wave = AT_ONCE) -> Portion:
    """What comes to a slot of a streamed unit: of a divided one the accelerator's part, else what a wave brings."""
    return divide_unit(unit, share).brought if share else find_wave(unit, *wave)


@lru_cache(1 << 12)
def find_wave(unit: Unit, wave: int, waves: int) -> Portion:
    """What one of several waves brings of a unit: some of its parts, with what all parts share. The first are the
    largest, where the parts cannot be shared out evenly."""
    if waves == 1:
        return divide_unit(unit, WHOLE).brought
    each, more = divmod(count_shares(unit), waves)
    first = wave * each + min(wave, more)
    return _portion_of_parts(unit, first, first + each + (wave < more))


def without_cpu(unit: Unit, share: Share) -> Share | None:
    """How the unit is streamed whole with the same bytes in the arena, where the CPU computes nothing of it; None for
    a kind of which nothing is kept beside a slot."""
    if not unit.kind.parts and unit.kind.keep is None:
        return None
    return Share(kept=share.kept or count_shares(unit) - share.cpu)


@lru_cache(1 << 12)
def count_shares(unit: Unit) -> int:
    """What can be divided of a unit, in what its kind counts: parts, or rows; 0 for a unit that cannot be divided."""
    kind = unit.kind
    if kind.parts:
        return max((t.parts for t in unit.tensors), default=0)
    return max((t.rows for t in unit.tensors if t.role in kind.divided), default=0)


def share_sixteenths(unit: Unit, sixteenths: int) -> int:
    """What is about so many sixteenths of a unit and may be the CPU's; 0 when the unit is too small."""
    total = count_shares(unit)
    own = align(total * (SIXTEENTHS - sixteenths) // SIXTEENTHS, 1 if unit.kind.parts else ROW_BLOCK)
    return total - own if 0 < own < total else 0


@lru_cache(1 << 12)
def list_shares(unit: Unit, sixteenths: tuple[int, ...], on_cpu: tuple[int, ...] = ()) -> tuple[Share, ...]:
    """The ways to divide a unit in which CPU and arena have so many sixteenths or nothing, or the CPU one of the other
    counts; none for most kinds."""
    some = sorted({share_sixteenths(unit, n) for n in sixteenths} - {0})
    others = sorted({*some, *on_cpu})
    shares = [Share(cpu) for cpu in others]
    if unit.kind.parts:
        shares += [Share(cpu, kept) for cpu in (0, *others) for kept in some]
    return tuple(share for share in shares if can_divide(unit, share))


def joined_width(unit: Unit, share: Share, config: ModelConfig) -> int:
    """Elements a token that the CPU hands over of a divided unit."""
    return unit.kind.joins(share.cpu, config) if share.cpu else 0


def _cut(tensor: TensorSpec, rows: int) -> TensorSpec:
    return replace(tensor, shape=(rows, *tensor.shape[1:]))
