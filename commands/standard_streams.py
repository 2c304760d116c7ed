"""Standard streams that a command cannot use: closed ones, and output that nothing more can be written to."""

import os
import sys


def open_closed_streams() -> None:
    """Open the null device for standard streams that are closed: nothing is read there, and what is written is lost.

    Else the next file that is opened would have the stream's number, and get what libraries and children write to it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def flush_output() -> None:
    """Write what the output streams still hold. Raises OSError where that fails: Python would find out too late, when
    the command's exit code is known."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def silence_failing() -> str | None:
    """What the output is called that can no longer be written to, if there is any; the rest of it is lost from now on.

    A stream keeps what it could not write, so that writing it once more fails again.
    """
    failing = None
    for stream, name in ((sys.stdout, "the output"), (sys.stderr, "the error output")):
        try:
            stream.flush()
        except OSError:
            failing = failing or name
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return failing
