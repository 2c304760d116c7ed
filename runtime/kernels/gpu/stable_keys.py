"""Makes Triton name a kernel by its sources alone, so that every process finds what another one compiled."""

from functools import cache
from typing import Any


@cache  # once in a process
def keep_keys_stable() -> None:
    """Let the key of a kernel have the global constants of all functions that it calls.

    Triton 3.6 and 3.7 take over a function's constants before they have looked for these. So a key has them only where
    another kernel that calls the function was met before, and a process compiles again what another one compiled.
    """
    try:
        from triton.runtime.jit import DependenciesFinder

        take_over = DependenciesFinder._update_hash
    except (ImportError, AttributeError):
        return  # a Triton that is made otherwise: at worst kernels are compiled again

    def look_first(finder: Any, function: Any) -> None:
        _ = function.cache_key  # Triton finds a function's constants as it makes the function's own key
        take_over(finder, function)

    DependenciesFinder._update_hash = look_first
