"""Whether this process was started as one rank of several, as its environment says. No torch."""

import os

from pshard.errors import UserError


def started_ranks() -> int:
    """How many ranks `start_ranks` or torchrun started this process as one of; 0 when neither did, or it alone.

    Raises UserError as `read_number` does.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return 0
    ranks = read_number("WORLD_SIZE", 1, None)
    return ranks if ranks > 1 else 0


def read_number(name: str, least: int, most: int | None) -> int:
    """A variable by which a rank is told of its group. Raises UserError unless it is a whole number in these limits."""
    text = os.environ.get(name, "")
    if not text.isascii() or not text.isdigit() or int(text) < least or (most is not None and int(text) > most):
        raise UserError(
            f"RANK and WORLD_SIZE are set, but {name} is {text!r}: start several ranks with torchrun, or by this "
            "command itself with RANK and WORLD_SIZE unset"
        )
    return int(text)
