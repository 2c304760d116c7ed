"""The clock that limits go by: what else a machine does takes none of its seconds, so it changes no plan."""

import os


def cpu_seconds() -> float:
    """Seconds of processor time of this process, and of solvers that it started and that have ended."""
    now = os.times()
    return now.user + now.system + now.children_user + now.children_system
