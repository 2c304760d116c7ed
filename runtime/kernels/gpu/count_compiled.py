"""What compiling GPU kernels takes of a process: a first run waits for it, later ones find them in Triton's cache."""

from dataclasses import dataclass
from typing import Any

LEAST_SECONDS = 1.0  # below, nobody has noticed


@dataclass
class Compiled:
    """Kernels that this process compiled, and the seconds that took."""

    kernels: int = 0
    seconds: float = 0.0

    def describe(self) -> str:
        """A line for who waited; "" where that was hardly so."""
        if self.seconds < LEAST_SECONDS:
            return ""
        return (
            f"{self.kernels} GPU kernel{'' if self.kernels == 1 else 's'} had to be compiled meanwhile, which took "
            f"{self.seconds:.0f} s; later runs find them in Triton's cache"
        )


def count_compiled() -> Compiled:
    """What is compiled from now on; nothing ever is where there is no Triton."""
    compiled = Compiled()
    try:
        from triton import knobs
    except ImportError:
        return compiled
    before = knobs.compilation.listener

    def listen(*, times: Any, cache_hit: bool, **rest: Any) -> None:
        if not cache_hit:
            compiled.kernels += 1
            compiled.seconds += times.total / 1e6
        if before is not None:
            before(times=times, cache_hit=cache_hit, **rest)

    knobs.compilation.listener = listen
    return compiled
