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
            n = min(inside)
            if piece.rows == "all":
                first, rest = (None, None) if piece.mask is None else (piece.mask[:n], piece.mask[n:])
                firsts[i] = replace(piece, ids=piece.ids[:n], of=piece.of[:n], mask=first)
                rests[i] = replace(piece, ids=piece.ids[n:], of=piece.of[n:], mask=rest)
            else:
                firsts[i] = replace(piece, ids=piece.ids[:n], rows="none")
                rests[i] = replace(piece, ids=piece.ids[n:])
    return firsts, rests


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
