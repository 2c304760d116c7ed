"""When those are woken who read what the scheduler left: not while its thread is in a hurry."""

import contextlib

from pshard.server.jobs import Event, Listener


class Handover:
    """Wakes the listeners of all events that were put since it last did.

    A reader that wakes wants Python's lock, which a thread gives up in nothing but long native calls and waits. So the
    engine's thread wakes readers when it begins one of these: they read while it computes, and it never waits for them.
    """

    def __init__(self) -> None:
        self._left: list[Listener] = []

    def listen(self, listener: Listener) -> Listener:
        """A listener that is woken later; for the engine's thread."""
        return _Later(listener, self._left)

    def release(self) -> None:
        """Wake them now."""
        for listener in self._left:
            with contextlib.suppress(Exception):  # whose own affair it is, as `put` is
                listener.wake()
        self._left.clear()


class _Later:
    """A Listener."""

    def __init__(self, listener: Listener, left: list[Listener]) -> None:
        self._listener, self._left = listener, left

    def put(self, event: Event) -> None:
        self._left.append(self._listener)
        self._listener.put(event)

    def wake(self) -> None:
        """Everybody is, by `Handover.release`."""
