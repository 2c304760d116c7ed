"""The frame of a stream of events: pings, what is new, an error or the end; and OpenAI's end."""

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

from pshard.server.api.faults import Fault, show_fault
from pshard.server.http.answers import Answers
from pshard.server.http.replies import PING, write_event
from pshard.server.text.answer_reader import Delta

Show = Callable[[int, Delta], Iterator[bytes]]


async def stream_events(answers: Answers, show: Show, end: Callable[[], Iterable[bytes]]) -> AsyncIterator[bytes]:
    """Server-sent events. show: those of a choice's number and what is new of it; end: those behind the last one."""
    yield PING
    try:
        async for piece in answers.tell(show, lambda: PING):
            yield piece
    except Fault as fault:
        yield write_event(show_fault(fault))
        return
    for piece in end():
        yield piece


def stream_choices(answers: Answers, show: Show, usage: Callable[[], dict[str, Any]] | None) -> AsyncIterator[bytes]:
    """The same as OpenAI's clients read it. usage: the chunk before the end, None where none is wanted."""

    def end() -> Iterator[bytes]:
        if usage is not None:
            yield write_event(usage())
        yield b"data: [DONE]\n\n"

    return stream_events(answers, show, end)
