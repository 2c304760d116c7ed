"""Pieces of one micro-batch put together: its tokens, and what is wanted of its rows. No torch."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pshard.batch import Batch
from pshard.runtime.kernels.api import Segment
from pshard.runtime.texts.text import Piece
from pshard.runtime.texts.text_blocks import NewTokens, TextBlocks

Wish = tuple[Piece, tuple[int, ...]]  # of a row: its piece, and the ids whose logits are wanted


def join_pieces(blocks: TextBlocks, pieces: Sequence[Piece]) -> NewTokens:
    """The new tokens of pieces, in blocks that their texts have or now take."""
    ids, segments = list[int](), list[Segment]()
    for piece in pieces:
        segments.append(blocks.new_segment(piece.text, len(ids), len(piece.ids), len(piece.text.ids)))
        ids += piece.ids
    spans = tuple(piece.span for piece in pieces)
    return NewTokens(tuple(piece.text for piece in pieces), ids, tuple(segments), Batch(spans))


def list_wishes(pieces: Sequence[Piece]) -> Iterator[Wish]:
    """What is wanted of each row of them, in turn."""
    for piece in pieces:
        if piece.rows == "all":
            masks = [piece] * len(piece.ids)
            if piece.mask is not None:
                masks = [replace(piece, mask=mask) for mask in piece.mask]
            yield from ((one, piece.of[i : i + 1]) for i, one in enumerate(masks))
        elif piece.rows == "last":
            yield piece, piece.of
