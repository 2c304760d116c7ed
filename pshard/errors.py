"""Errors that a user can act on. A command prints the message as one line and exits with code 2."""


class UserError(Exception):
    """Something the user gave is wrong. The message says what, where, and what to do."""


class StepFailed(RuntimeError):
    """A step of the engine broke half-way (out of memory, a failed copy). No text may come from its caches any more:
    the engine refuses further work. A command prints the message as one line and exits with code 1."""


class KernelRefused(StepFailed):
    """A kernel cannot run on the GPU at hand, however often the model is loaded; the message names both."""


class NoRoom(KernelRefused):
    """What is to be timed does not fit the GPU's free memory: the kernels may well run there."""


class CannotWrite(UserError):
    """A place that cannot be written to: a read-only folder, a full disk."""


class NoPlan(UserError):
    """No plan keeps within the memory at hand."""


class Shortage(NoPlan):
    """The same, before what may work was tried.

    Attributes:
        why: the message but for what to do.
        missing: bytes of host memory that are lacking at least; 0 where it is VRAM alone.
        smallest_mib: no smaller budget works; None where none does.
    """

    def __init__(self, why: str, missing: int, smallest_mib: int | None) -> None:
        super().__init__(f"{why}; raise --vram, lower -c, or take a smaller model")
        self.why, self.missing, self.smallest_mib = why, missing, smallest_mib


class BudgetTooSmall(NoPlan):
    """The VRAM budget cannot hold any plan.

    Attributes:
        smallest_mib: the smallest budget, in MiB, for which a plan exists.
    """

    def __init__(self, message: str, smallest_mib: int) -> None:
        super().__init__(message)
        self.smallest_mib = smallest_mib


class NotPlanned(UserError):
    """No plan is stored for the model, or none that serves what is asked for."""


class StaleRegistry(UserError):
    """A registry was made from other inputs than the ones at hand, or in an older format; the message names it.

    Attributes:
        plans: how many plans a registry of an older format has.
    """

    def __init__(self, message: str, plans: int = 0) -> None:
        super().__init__(message)
        self.plans = plans


LONGEST_LINE = 2000  # letters; an error may quote what a damaged file holds


def as_line(error: Exception) -> str:
    """An error's message as one line that a terminal can show: spaces joined, others' control characters escaped, and
    what is too long cut out of its middle, as the file stands at its beginning and the remedy at its end."""
    text = " ".join(str(error).split())
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    half = LONGEST_LINE // 2
    return line if len(line) <= LONGEST_LINE else f"{line[:half]} [...] {line[-half:]}"


def name_cause(error: Exception) -> str:
    """Why a file cannot be read, for a message that names the file itself: the system's own words repeat it."""
    return getattr(error, "strerror", None) or str(error)
