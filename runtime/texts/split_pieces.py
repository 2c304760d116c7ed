"""Pieces of a step that take more than one micro-batch. No torch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from pshard.runtime.memory.kv_blocks import blocks_of
from pshard.runtime.texts.text import Piece


def split_at_borders(pieces: Sequence[Piece]) -> tuple[list[Piece], dict[int, Piece]]:
    """What of pieces is before the first border of their text, where states are to be kept; and by its place the rest
    of those that go on behind one."""
    firsts, rests = list(pieces), dict[int, Piece]()
    for i, piece in enumerate(pieces):
        if piece.drafts or not piece.text.borders:
            continue
        start = len(piece.text.ids)
        inside = [at - start for at in piece.text.borders if start < at < start + len(piece.ids)]
        if inside:
            firsts[i], rests[i] = _split(piece, min(inside))
    return firsts, rests


def _split(piece: Piece, n: int) -> tuple[Piece, Piece]:
    """The first n tokens of a piece, and the others, each with what is wanted of its rows."""
    if piece.rows != "all":
        return replace(piece, ids=piece.ids[:n], rows="none"), replace(piece, ids=piece.ids[n:])
    first, rest = (None, None) if piece.mask is None else (piece.mask[:n], piece.mask[n:])
    before = replace(piece, ids=piece.ids[:n], of=piece.of[:n], mask=first)
    return before, replace(piece, ids=piece.ids[n:], of=piece.of[n:], mask=rest)


def cut_pieces(pieces: Sequence[Piece], most: int, room: int) -> Iterator[list[tuple[int, Piece]]]:
    """Pieces in micro-batches of at most so many tokens, with tables of so many blocks: what each has, by the piece's
    place. A text has one part of a micro-batch, and none goes beyond a border where its states are to be kept. Before
    the next one is asked for texts have the tokens of the last."""
    left = list(enumerate(pieces))
    while left:
        taken, later, tokens, blocks = list[tuple[int, Piece]](), list[tuple[int, Piece]](), 0, 0
        for i, piece in left:
            start = len(piece.text.ids)
            ends = [at - start for at in piece.text.borders if at > start]
            count = min(len(piece.ids), most - tokens, *ends)
            wanted = blocks_of(start + count)
            if count < 1 or (taken and blocks + wanted > room):
                later.append((i, piece))
                continue
            first, rest = (piece, None) if count == len(piece.ids) else _split(piece, count)
            taken.append((i, first))
            if rest is not None:
                later.append((i, rest))
            tokens, blocks = tokens + count, blocks + wanted
        yield taken
        left = later


def split_by_tables(pieces: Sequence[Piece], there: int, room: Callable[[int], int]) -> Iterator[Sequence[Piece]]:
    """All of them, or as many at once as the micro-batch's tables of blocks have room for: texts that share blocks may
    have more of them, counted for each, than there are. room: of the tables for so many tokens."""
    blocks = sum(map(_count_blocks, pieces))
    if blocks <= there:  # always
        yield pieces
        return
    tokens, blocks = 0, 0
    for i, piece in enumerate(pieces):
        tokens += len(piece.ids)
        blocks += _count_blocks(piece)
        if blocks > room(tokens) and i:
            yield pieces[:i]
            yield from split_by_tables(pieces[i:], there, room)
            return
    yield pieces


def _count_blocks(piece: Piece) -> int:
    return blocks_of(len(piece.text.ids) + len(piece.ids))
