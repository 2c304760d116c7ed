"""`pshard.load`: what it is given."""

from typing import Any

import pytest

import pshard
from pshard.errors import UserError


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"vram": "11.5G"}, "vram is '11.5G'; it is a whole number of MiB, or one for each device"),
        ({"vram": 11776.0}, "vram is 11776.0; it is a whole number of MiB, or one for each device"),
        ({"vram": [6000, 0.5]}, r"vram is \[6000, 0.5\]; it is a whole number of MiB, or one for each device"),
        ({"context": 8e3}, "context is 8000.0; it is a whole number of 1 or more"),
        ({"ram": "6G"}, "ram is '6G'; it is a whole number of 1 or more"),
    ],
)
def test_sizes_that_are_no_whole_numbers_are_refused_by_name(given: dict[str, Any], said: str) -> None:
    """These were a TypeError from somewhere inside."""
    with pytest.raises(UserError, match=said):
        pshard.load("model.gguf", **given)
