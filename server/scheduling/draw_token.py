"""What is asked of a text's logits, and the token that is drawn from what came."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan

import numpy as np
import torch

from pshard.batch import DECODE, VERIFY
from pshard.errors import StepFailed, UserError
from pshard.runtime.sampling.sampler import NO_NUMBERS, Sampler
from pshard.runtime.speculation.accept import MadeUp, match_drafts
from pshard.runtime.texts.text import Piece, Row, Text
from pshard.server.jobs import Likely
from pshard.server.scheduling.request import Request

MOST = 256  # best logits that are asked for; a draw from more takes all of them
FEWEST = 2  # of best logits when log-probabilities are wanted: with one the pool does not add up the others


def make_sampler(run: Request, vocab: int) -> Sampler:
    """What draws a job's tokens. Raises UserError for settings that the model cannot follow."""
    job = run.job
    sampler = Sampler(job.sampling, job.constrain() if job.constrain else None, vocab)
    sampler.see(job.prompt)
    return sampler


def make_piece(run: Request, count: int, drafts: tuple[int, ...] = ()) -> Piece:
    """The next `count` tokens of a job's text, and what is wanted of their logits. drafts: those behind the text's own;
    fewer, where its grammar does not allow them."""
    assert run.text is not None and run.sampler is not None
    at, text = len(run.text.ids), run.text
    if run.decodes:
        best, full, mask, of = _wish(run, _enough(run))
        if mask is not None and drafts:
            held, words = run.sampler.walk(drafts)
            drafts = drafts[:held]
            mask = np.stack(words) if len(words) > 1 else mask
        ids = (*run.tokens[at:], *drafts)
        rows, kind = ("all", VERIFY) if len(ids) > 1 else ("last", DECODE)
        return Piece(text, ids, rows, best, full, mask, of, kind=kind)
    ids = tuple(run.tokens[at : at + count])
    if scores(run):
        return _scored_piece(run, text, ids)
    if at + count < run.goal or not run.job.most:
        return Piece(text, ids, rows="none")
    return Piece(text, ids, "last", *_wish(run, _enough(run)))


def limit_piece(run: Request, count: int) -> int:
    """How many of `count` tokens may go in one piece: all logits are asked for of a last token only."""
    alone = scores(run) and run.job.most > 0 and not _enough(run) and count == run.remaining > 1
    return count - 1 if alone else count


def scores(run: Request) -> bool:
    """Whether tokens of the prompt are still to be scored."""
    return run.job.scored and len(run.scored) < len(run.job.prompt)


def _enough(run: Request) -> int:
    """So many of the largest logits are asked for to draw from, of those that a grammar allows; 0: all. Where the
    likeliest of all tokens are to be told, those that it allows do not say them."""
    sampler = run.sampler
    assert sampler is not None
    enough = sampler.enough if run.job.likely or scores(run) else sampler.enough_allowed
    return enough if enough <= MOST else 0


def _wish(run: Request, enough: int) -> tuple[int, bool, np.ndarray | None, tuple[int, ...]]:
    """best, full, mask and of: `enough` of the largest logits, and what log-probabilities take."""
    assert run.sampler is not None
    mask = run.sampler.allowed() if enough else None
    if run.job.likely is None:
        return enough, not enough, mask, ()
    return max(enough, run.job.likely, FEWEST), not enough, mask, ()


def _scored_piece(run: Request, text: Text, ids: tuple[int, ...]) -> Piece:
    at, prompt = len(text.ids), run.job.prompt
    following = prompt[at + 1 : at + 1 + len(ids)]
    of = following if len(following) == len(ids) else (*following, 0)  # nothing follows the last one
    ends = at + len(ids) == len(prompt) and run.job.most > 0
    enough = _enough(run) if ends else 1
    best = max(enough, run.job.likely or 0, FEWEST)
    return Piece(text, ids, "all", best, not enough, None, of)


def draw_token(run: Request, row: Row) -> tuple[int, Likely | None]:
    """The next token of a text, with its log-probability where that is wanted. Raises StepFailed for a row with a NaN,
    and when nothing is left to draw from."""
    assert run.sampler is not None
    if row.bad:
        raise StepFailed(NO_NUMBERS)
    if row.full is not None:  # the grammar's mask is put on it here
        token = run.sampler.choose(torch.from_numpy(row.full))
        logit = float(row.full[token])
    else:
        enough = _enough(run)
        token = run.sampler.choose_among(row.ids[:enough], row.logits[:enough])
        logit = nan
    if run.job.likely is None:
        return token, None
    return token, _describe(token, logit, row, run.job.likely)


@dataclass(frozen=True)
class Drawn:
    """What was drawn from the rows of a step: tokens that go on a text, with their log-probabilities where these are
    wanted, how many drafts held, whether a stop came behind them, and why nothing more could be drawn."""

    tokens: list[int]
    likely: list[Likely]
    held: int
    stopped: bool = False
    error: StepFailed | UserError | None = None


def draw_tokens(run: Request, rows: Sequence[Row], drafts: Sequence[int], made_up: MadeUp | None) -> Drawn:
    """The tokens after a text's last one, from the row after it and those after its drafts: drafts are told while what
    is drawn equals them, and then one token more. made_up: says instead how many hold."""
    assert run.sampler is not None
    if made_up and drafts:
        held = made_up.count(len(drafts))
        run.sampler.see(drafts[:held])
        tokens = [*drafts[:held], draw_token(run, rows[held])[0]]
        return Drawn(tokens, [], held)
    tokens, likely = list[int](), list[Likely]()

    def draw(at: int) -> int:
        token, told = draw_token(run, rows[at])
        tokens.append(token)
        likely.extend([told] if told else [])
        return token

    try:
        match_drafts(draw, drafts, run.job.stops)
    except (StepFailed, UserError) as failure:
        return Drawn(tokens, likely, len(tokens), error=failure)
    held, stopped = len(tokens) - 1, tokens[-1] in run.job.stops
    if stopped:
        del tokens[-1], likely[-1:]
    return Drawn(tokens, likely, held, stopped)


def score_rows(run: Request, start: int, rows: Sequence[Row]) -> None:
    """Keep what the rows after the tokens from `start` on say of those that follow. Raises StepFailed for a NaN."""
    prompt, likely = run.job.prompt, run.job.likely or 0
    if not run.scored:
        run.scored.append(Likely(prompt[0], nan))
    for at, row in enumerate(rows, start + 1):
        if row.bad:
            raise StepFailed(NO_NUMBERS)
        if len(run.scored) <= at < len(prompt):
            run.scored.append(_describe(prompt[at], float(row.of[0]), row, likely))


def _describe(token: int, logit: float, row: Row, count: int) -> Likely:
    """A token with its log-probability, and the likeliest in its place. logit: the token's; nan: it is among the
    best."""
    total = row.log_total
    if total != total and row.full is not None:
        largest = float(row.full.max())
        total = largest + float(np.log(np.exp(row.full.astype(np.float64) - largest).sum()))
    ids = row.ids.tolist()
    logits = row.logits.tolist()
    if logit != logit:
        logit = logits[ids.index(token)]
    return Likely(token, logit - total, tuple((i, value - total) for i, value in zip(ids[:count], logits[:count])))
