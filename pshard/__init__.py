"""pshard: profile the machine, plan where every unit of a model lives, and run the plan."""

import os
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# torch's OpenMP threads sleep between operators instead of spinning, which takes the cores from the C++ pool (7 ms a
# token on 16 cores, prompts at 0.4 of their rate on two); torch reads it when it is imported, so pshard comes first
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

if TYPE_CHECKING:
    from pshard.session.load import load

__all__ = ["load"]


def __getattr__(name: str) -> Any:
    if name == "load":  # late: importing pshard must not import torch
        from pshard.session.load import load

        return load
    raise AttributeError(name)
