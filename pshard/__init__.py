"""pshard: profile the machine, plan where every unit of a model lives, and run the plan."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from pshard.opening import load

__all__ = ["load"]


def __getattr__(name: str) -> Any:
    if name == "load":  # late: importing pshard must not import torch
        from pshard.opening import load

        return load
    raise AttributeError(name)
