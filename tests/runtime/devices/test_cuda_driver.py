"""The driver's interface with a driver that only keeps books."""

from typing import Any

import pytest

from pshard.runtime.devices import cuda_driver
from pshard.runtime.devices.cuda_driver import (
    current_context,
    destroy_events,
    enter_context,
    launch_graph,
    queue_copy,
    record_event,
)


class Books:
    """Every call by name; `status` is what they answer."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.status, self.made = 0, 0

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append((name, *arguments))
            return self.status

        return call

    def cuEventCreate(self, handle: Any, flags: int) -> int:
        self.made += 1
        handle._obj.value = 100 + self.made
        return 0


@pytest.fixture
def books(monkeypatch: pytest.MonkeyPatch) -> Books:
    books = Books()
    monkeypatch.setattr(cuda_driver, "cuda_driver", lambda: books)
    return books


def test_a_handle_serves_again_when_nobody_has_its_event(books: Books) -> None:
    spare: list[int] = []
    held = [record_event(7, spare) for _ in range(3)]
    assert books.made == 3 and spare == []
    handles = [event.handle for event in held]
    held.clear()
    again = [record_event(8, spare) for _ in range(3)]
    assert books.made == 3 and sorted(e.handle for e in again) == sorted(handles)
    assert books.calls[-1] == ("cuEventRecord", again[-1].handle, 8)
    again.clear()
    destroy_events(spare)
    assert spare == [] and [c[0] for c in books.calls[-3:]] == ["cuEventDestroy_v2"] * 3


def test_an_event_is_told_from_one_that_has_not_happened_and_from_an_error(books: Books) -> None:
    event = record_event(7, [])
    assert event.happened()
    books.status = 600
    assert not event.happened()
    books.status = 700
    for ask in (event.happened, event.synchronize, lambda: event.hold(7)):
        with pytest.raises(RuntimeError, match="CUDA error 700"):
            ask()


def test_a_thread_takes_a_context_that_is_not_its_own_yet(books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    own = [0]

    def get(context: Any) -> int:
        context._obj.value = own[-1]
        return 0

    def put(context: int) -> int:
        own.append(context)
        return 0

    monkeypatch.setattr(books, "cuCtxGetCurrent", get, raising=False)
    monkeypatch.setattr(books, "cuCtxSetCurrent", put, raising=False)
    assert current_context() == 0
    for context in (5, 5, 6):
        enter_context(context)
        assert current_context() == context
    assert own == [0, 5, 6]  # asked for once


def test_a_refused_copy_or_graph_is_an_error_that_says_which(books: Books) -> None:
    queue_copy(1 << 40, 2 << 40, 12, 7)
    launch_graph(3 << 40, 7)
    assert books.calls == [("cuMemcpyAsync", 1 << 40, 2 << 40, 12, 7), ("cuGraphLaunch", 3 << 40, 7)]
    books.status = 1
    with pytest.raises(RuntimeError, match=r"a copy of 12 bytes \(CUDA error 1\)"):
        queue_copy(1 << 40, 2 << 40, 12, 7)
    with pytest.raises(RuntimeError, match=r"a graph \(CUDA error 1\)"):
        launch_graph(3 << 40, 7)
    with pytest.raises(RuntimeError, match="an event"):
        record_event(7, [5])
