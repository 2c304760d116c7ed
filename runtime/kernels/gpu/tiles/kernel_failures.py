"""What Triton raises for a kernel that a card cannot run, told in one line."""

import re
import sys
from types import TracebackType

from pshard.errors import KernelRefused
from pshard.runtime.kernels.gpu.card_limits import CardLimits


def is_kernel_failure(error: BaseException) -> bool:
    """Whether a kernel could not be compiled, assembled or given what it needs: nothing was started."""
    if "triton" not in sys.modules:  # then no kernel of its was asked for, and it takes a second to import
        return False
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    if isinstance(error, OutOfResources | PTXASError | CompilationError):
        return True
    return isinstance(error, RuntimeError) and str(error).startswith("PassManager::run failed")


def describe_failure(error: BaseException) -> str:
    """The kernel and what it lacked, in one line without the compiler's text."""
    from triton.runtime.errors import OutOfResources, PTXASError

    name = _kernel_name(error.__traceback__)
    if isinstance(error, OutOfResources):
        return f"{name} needs {error.required} of {error.name}, of which the card has {error.limit}"
    if isinstance(error, PTXASError):
        found = re.search(r"(?:error|fatal)\s*:\s*(.+)", str(error))
        return f"{name} cannot be assembled ({found.group(1) if found else 'no reason given'})"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return f"{name} cannot be compiled ({lines[-1]})"


def refuse(error: BaseException, limits: CardLimits) -> KernelRefused:
    """What to raise for a failure that no other tile makes up for."""
    return KernelRefused(f"{describe_failure(error)}: {name_card(limits)} cannot run this; use --kernels plain (slow)")


def name_card(limits: CardLimits) -> str:
    """A card with what its kernels are compiled for."""
    return f"{limits.name} (sm_{limits.capability})"


def _kernel_name(frames: TracebackType | None) -> str:
    """The kernel whose launch failed: of the innermost frame that is a method of one."""
    found = "a kernel"
    while frames is not None:
        of = frames.tb_frame.f_locals.get("self")
        if of is not None and type(of).__name__ == "JITFunction":
            found = str(of.__name__)
        frames = frames.tb_next
    return found
