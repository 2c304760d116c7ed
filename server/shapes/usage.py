"""Counts of a request's tokens."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Usage:
    """Tokens of all prompts, those of them that were adopted from earlier texts, and tokens of all answers."""

    prompt: int
    cached: int
    made: int

    def show(self) -> dict[str, Any]:
        """As /v1/chat/completions and /v1/completions tell it."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.made,
            "total_tokens": self.prompt + self.made,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }
