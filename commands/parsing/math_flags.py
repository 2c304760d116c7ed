"""The flag that says how a GPU multiplies prompts' weights."""

from typing import Any

from pshard.times.gpu_tiles import PROMPT_MATHS


def add_math_flag(group: Any, default: str | None = None) -> None:
    """Add the flag to a parser or a group of it. default: None where the plan says it."""
    group.add_argument(
        "--prompt-math", choices=PROMPT_MATHS, default=default,
        help="how a GPU multiplies weights for more than 64 tokens; auto: each type as the profile found faster "
        f"({default or 'that of the plan'})",
    )  # fmt: skip
