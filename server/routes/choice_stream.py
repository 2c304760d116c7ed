"""The frame of OpenAI's streams of choices: pings, chunks, an error or the end."""

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from pshard.server.api.faults import Fault, show_fault
from pshard.server.http.answers import Answers
from pshard.server.http.replies import PING, write_event
from pshard.server.text.answer_reader import Delta


async def stream_choices(
    answers: Answers, show: Callable[[int, Delta], Iterator[bytes]], usage: Callable[[], dict[str, Any]] | None
) -> AsyncIterator[bytes]:
    """Server-sent events. show: those of a choice's number and what is new of it; usage: the chunk before the end, None
    where none is wanted."""
    yield PING
    try:
        async for piece in answers.tell(show, lambda: PING):
            yield piece
    except Fault as fault:
        yield write_event(show_fault(fault))
        return
    if usage is not None:
        yield write_event(usage())
    yield b"data: [DONE]\n\n"
