"""Steps of the sizes that a server will have, run before it says that it is ready: on a GPU the first one of a size
compiles kernels, which may take seconds, and captures graphs."""

from itertools import pairwise
from typing import TYPE_CHECKING

from pshard.batch import VERIFY
from pshard.batch_sizes import RUNGS, SMALL_BATCH
from pshard.machine import MachineProfile
from pshard.runtime.texts.text import Piece, Text
from pshard.server.life.read_facts import served_tiers

if TYPE_CHECKING:
    from pshard.runtime.engine import Engine
    from pshard.runtime.texts.text_pool import TextPool

SALT = "rehearsal"  # no other text shares its blocks
DRAWN = 40  # of the largest logits, as for a text that is drawn


def compiles_kernels(profile: MachineProfile) -> bool:
    """Whether a step's first run takes longer than later ones."""
    return profile.accelerators[0].kind == "cuda"


def rehearse_steps(engine: "Engine", deterministic: bool, drafts: int = 0) -> None:
    """Run prompts of every tier, alone and beside texts that decode, then texts that decode, ever fewer, and with
    drafts, at most so many a text; nothing is left of them. What has no room in the KV cache is left out. All ranks
    call it. Raises StepFailed."""
    pool = engine.texts
    tiers = served_tiers([tier.tokens for tier in engine.rank_plan.tiers], deterministic)
    most = min(engine.plan.workload.sequences, tiers[-1])
    prompts = list(pairwise((SMALL_BATCH, *(tokens for tokens in tiers if tokens > SMALL_BATCH))))
    texts: list[Text] = []
    pool.keep_tier(tiers[0])
    try:
        for smaller, tier in prompts:
            _run_prompt(pool, [], smaller, tier)
        _open_texts(pool, texts, most - 1)  # a prompt is one more
        for smaller, tier in prompts if texts else ():
            _run_prompt(pool, texts, smaller, tier)
        _open_texts(pool, texts, most)
        most_rows = min(tiers[-1], pool.most_rows, len(texts) * (drafts + 1))
        for rows in (rung for rung in RUNGS if drafts and 1 < rung <= most_rows):
            _run_drafts(pool, texts, rows, drafts)
        for width in sorted({len(texts), *(rung for rung in RUNGS if rung < len(texts))}, reverse=True):
            for best in (DRAWN, 1):
                pool.step([Piece(text, (0,), best=best) for text in texts[:width]])
    finally:
        for text in texts:
            pool.close(text, keep=False)
        pool.keep_tier(1)


def _open_texts(pool: "TextPool", texts: list[Text], count: int) -> None:
    """Let there be so many, if they have room for what they will be given, a block each."""
    while len(texts) < count:
        text = pool.open((0,), SALT)
        texts.append(text)
        if pool.missing(dict.fromkeys(texts, 1)):
            pool.close(texts.pop(), keep=False)
            break
    if begun := [Piece(text, (0,), best=1) for text in texts if not text.ids]:
        pool.step(begun)


def _run_drafts(pool: "TextPool", texts: list[Text], rows: int, drafts: int) -> None:
    """A step of so many rows of texts that verify drafts, as many as they may; none where blocks are lacking."""
    counts = [min(drafts + 1, rows - start) for start in range(0, rows, drafts + 1)]
    wanted = {text: len(text.ids) + n for text, n in zip(texts, counts)}
    if not pool.missing(wanted):
        for best in (DRAWN, 1):
            pool.step([Piece(text, (0,) * n, "all", best, kind=VERIFY) for text, n in zip(wanted, counts)])
            for text in wanted:
                pool.cut(text, text.committed)


def _run_prompt(pool: "TextPool", decoding: list[Text], smaller: int, tier: int) -> None:
    """A prompt that fills a tier beside texts that decode, as far as a text may be that long; none where that is a step
    of a smaller tier, or blocks are lacking."""
    text, n = pool.open((0,), SALT), min(tier - len(decoding), pool.longest)
    try:
        wanted = {text: n, **{one: len(one.ids) + 1 for one in decoding}}
        if n + len(decoding) > smaller and not pool.missing(wanted):
            pool.step([*(Piece(one, (0,), best=1) for one in decoding), Piece(text, (0,) * n, best=1)])
    finally:
        pool.close(text, keep=False)
