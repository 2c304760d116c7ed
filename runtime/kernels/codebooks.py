"""The codebooks of types whose indices stand for 4 or 8 weights, and what else kernels must know of such a type.

Books come from the gguf package, which has them as llama.cpp does; none is written down here.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True)
class BookType:
    """How a type with a codebook is coded.

    width: weights of an index. parity: every eighth sign makes the eight's minus signs even in number; its bit holds
    something else. halves: scales of 16 columns, not of 32. eighths: a scale is d (2n + 1) over this. step: what a
    value of the book is multiplied by; the delta of IQ1 is then 1 of these.
    """

    width: int
    parity: bool = False
    halves: bool = False
    eighths: int = 1
    step: int = 1


BOOK_TYPES = {
    "IQ3_S": BookType(4),
    "IQ3_XXS": BookType(4, parity=True, eighths=4),
    "IQ2_S": BookType(8, halves=True, eighths=8),
    "IQ2_XS": BookType(8, parity=True, halves=True, eighths=8),
    "IQ2_XXS": BookType(8, parity=True, eighths=8),
    "IQ1_S": BookType(8, eighths=8, step=8),
    "IQ1_M": BookType(8, halves=True, eighths=8, step=8),
}


@lru_cache
def load_book(qtype: str) -> np.ndarray:
    """int8 [entries, width]: what each index stands for, before sign and delta."""
    import gguf.quants

    kind = getattr(gguf.quants, qtype)
    kind.init_grid()
    book = BOOK_TYPES[qtype].step * kind.grid.reshape(-1, BOOK_TYPES[qtype].width)
    return np.ascontiguousarray(book.astype(np.int8))


@lru_cache
def list_levels(qtype: str) -> tuple[int, ...]:
    """The different numbers of a book, rising: 8 at most."""
    return tuple(int(level) for level in np.unique(load_book(qtype)))
