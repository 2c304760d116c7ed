"""The tokens of one text, which several ranks draw in step."""

import secrets
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pshard.errors import UserError
from pshard.session.open_plan import tell_once

if TYPE_CHECKING:
    from pshard.runtime.engine import Engine
    from pshard.runtime.sampling import Constraint, Sampling
    from pshard.runtime.speculation.speculator import DraftSettings
    from pshard.session.lead_ranks import LedEngine

Grammar = tuple[str, str]  # "grammar" or "schema", and its text


def generate_text(
    engine: "Engine | LedEngine",
    prompt: Sequence[int],
    most: int,
    sampling: "Sampling",
    grammar: Grammar | None = None,
    drafts: "DraftSettings | None" = None,
    saved: Path | None = None,
) -> Generator[int]:
    """Continue sequence 0 and yield at most so many tokens. All ranks call it, with a seed, and draw the same tokens.

    grammar: what they follow; drafts: who drafts. saved: where the prompt's cells are kept, once there is a token; a
    file that cannot be written ends no run.
    """
    for token in engine.generate(prompt, most, sampling, False, make_constraint(engine, grammar), drafts):
        yield token
        if saved is not None:
            save_prompt(engine, saved)
            saved = None


def fix_seed(sampling: "Sampling") -> "Sampling":
    """The settings with a seed, so that all ranks draw the same tokens."""
    return sampling if sampling.seed is not None else replace(sampling, seed=secrets.randbits(62))


def make_constraint(engine: "Engine | LedEngine", grammar: Grammar | None) -> "Constraint | None":
    """What the tokens of one text are to follow. Raises UserError for a grammar that cannot be read."""
    if grammar is None:
        return None
    from pshard.runtime.sampling.grammar import follow_grammar

    return follow_grammar(grammar[0], grammar[1], engine.tokenizer, engine.vocab)


def save_prompt(engine: "Engine | LedEngine", path: Path) -> None:
    """Write a prompt cache; a disk that is full by now ends no run. All ranks call it."""
    try:
        engine.save(path)
    except UserError as error:
        if engine.rank_plan.rank == 0:
            tell_once(f"note: the run goes on without a prompt cache: {error}")
