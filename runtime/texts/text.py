"""What a pool of texts takes and gives: handles, new tokens, rows of logits. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pshard.batch import PROMPT, VERIFY, Span
from pshard.errors import UserError


class GivenUp(Exception):
    """A step has ended in its midst, as nobody waited for any of its texts any more: they are closed."""


@dataclass(eq=False)
class Text:
    """A handle. ids: the tokens whose cells are computed, also after it was closed; cached: how many of them were
    adopted from shared blocks when it was opened; salt: texts share with those of an equal one, None: with nobody.

    number: its place among the plan's sequences; blocks: that hold its cells, in order; keys: of its blocks that are
    shared. committed: tokens that are no drafts. borders: lengths at which its states are kept for others; opened: the
    row of its first draft in the last step, where states that cannot be cut back have not taken them in.
    """

    ids: list[int]
    cached: int
    salt: str | None
    number: int = 0
    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    committed: int = 0
    borders: frozenset[int] = frozenset()
    opened: int | None = None
    is_open: bool = True

    @property
    def drafts(self) -> int:
        """Tokens at its end that `TextPool.commit` has not been told of."""
        return len(self.ids) - self.committed


@dataclass(frozen=True)
class Piece:
    """New tokens of a text in one step, at least one, and what is wanted of their logits.

    rows: of which of them, "none", "last" or "all". best: so many of the largest, the first of equal ones first (1:
    greedy). full: all of them, on the host. mask: uint32 words [ceil(vocab / 32)], bit i % 32 of word i // 32 says
    whether token i may come among the best; with rows="all" a line of them for each row. of: ids whose logits are
    wanted too; with rows="all" one of each row, else any number. kind: as of `Span`; of what a text verifies nothing is
    shared or kept before `TextPool.commit` says how many tokens hold.
    """

    text: Text
    ids: tuple[int, ...]
    rows: str = "last"
    best: int = 0
    full: bool = False
    mask: np.ndarray | None = None
    of: tuple[int, ...] = ()
    kind: str = PROMPT

    @property
    def drafts(self) -> bool:
        """Whether the tokens are drafts."""
        return self.kind == VERIFY

    @property
    def span(self) -> Span:
        """The piece in a batch."""
        rows = {"none": 0, "last": 1, "all": len(self.ids)}[self.rows]
        return Span(len(self.ids), len(self.text.ids), rows, self.kind)

    @property
    def needs_total(self) -> bool:
        """Whether log-probabilities are wanted."""
        return self.best > 1 or bool(self.of)

    @property
    def is_quick(self) -> bool:
        """Whether the largest logit is all that is wanted."""
        return self.best == 1 and not (self.full or self.of or self.mask is not None)


def check_wish(piece: Piece, vocab: int) -> None:
    """Raise UserError for what can't be told of rows of so many logits."""
    if piece.rows not in ("none", "last", "all"):
        raise UserError(f"logits are wanted of {piece.rows!r} tokens; say none, last or all")
    if not 0 <= piece.best <= vocab:
        raise UserError(f"{piece.best} best logits are wanted of {vocab}")
    if piece.of and not 0 <= min(piece.of) <= max(piece.of) < vocab:
        raise UserError(f"logits of token ids {min(piece.of)}..{max(piece.of)} are wanted, and ids are 0..{vocab - 1}")
    lines = (len(piece.ids),) if piece.rows == "all" else ()
    if piece.mask is not None and (piece.mask.shape != (*lines, -(-vocab // 32)) or piece.mask.dtype != np.uint32):
        raise UserError(
            f"a mask is {'a line a row of ' * len(lines)}{-(-vocab // 32)} words of uint32 for {vocab} tokens; this is "
            f"{piece.mask.dtype} {list(piece.mask.shape)}"
        )


def check_open(text: Text) -> None:
    """Raise UserError for a text that is closed."""
    if not text.is_open:
        raise UserError("the text is closed; open it again with its tokens")


def check_no_drafts(text: Text) -> None:
    """Raise UserError for a text that is closed, or has drafts."""
    check_open(text)
    if text.drafts:
        raise UserError(f"{text.drafts} tokens of the text are drafts; commit them, or cut them off, then go on")


def check_pieces(pieces: Sequence[Piece], most: int, vocab: int, open_rows: int | None) -> None:
    """Raise UserError where pieces are no step. most: its tokens; open_rows: of drafts, see `TextPool.open_rows`."""
    tokens = sum(len(piece.ids) for piece in pieces)
    if not 0 < tokens <= most or not all(piece.ids for piece in pieces):
        raise UserError(f"a step takes 1 to {most} tokens, and each piece at least one; these are {tokens}")
    for piece in pieces:
        check_wish(piece, vocab)
        if not piece.drafts:
            check_no_drafts(piece.text)
    drafted = sum(len(piece.ids) for piece in pieces if piece.drafts)
    if open_rows is not None and drafted > open_rows:
        raise UserError(
            f"{drafted} rows of drafts in a step: the plan has room for {open_rows}; verify fewer, or plan with --spec "
            "and more drafts"
        )
    if len({piece.text for piece in pieces}) < len(pieces):
        raise UserError("a text has two pieces in one step; join them")


@dataclass(frozen=True)
class Row:
    """Of the logits after one token, float32 on the host: the `best` ids and their logits, masked; log_total: the log
    of the sum of exp of all unmodified ones (a log-probability is a logit less that), nan unless `best` is more than 1
    or `of` names some; full and `of` as asked for, unmodified. bad: there is a NaN among them."""

    ids: np.ndarray
    logits: np.ndarray
    log_total: float
    full: np.ndarray | None
    of: np.ndarray
    bad: bool


@dataclass(frozen=True)
class BlockCounts:
    """KV blocks: all there are, those that texts and sequences hold, those without a holder that stay for whoever
    begins alike, and those that are empty. cache_bytes: host memory that checkpoints of shared prefixes, and blocks
    on their way to files, take. files_problem: why the last file could not be written, "" where it was."""

    total: int
    used: int
    cached: int
    free: int
    cache_bytes: int = 0
    files_problem: str = ""
