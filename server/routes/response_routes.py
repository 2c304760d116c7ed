"""POST /v1/responses and /v1/responses/input_tokens."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

from pshard.server.api.faults import Fault, show_fault
from pshard.server.http.answers import Answers
from pshard.server.http.desk import Call, Desk
from pshard.server.http.replies import PING, Reply, Stream, reply_json, write_event
from pshard.server.reading.read_requests import count_response_tokens, read_response_request
from pshard.server.routes.chat_routes import prepare_chat
from pshard.server.shapes.show_completion import Heading
from pshard.server.shapes.show_responses import Events, OutputItems, show_response
from pshard.server.text.answer_reader import Delta


async def respond(desk: Desk, call: Call) -> Reply:
    """Continue a conversation. Raises Fault."""
    (ask, prompt), echo, sealed = await desk.read(read_response_request, call.body)
    heading = desk.head("resp_")
    answers = await prepare_chat(desk, ask, prompt, heading.id, call.key)
    items = OutputItems(desk.words, ask, sealed)
    answers.start()
    if ask.answering.stream:
        return Stream(_stream(heading, echo, answers, items), answers.cancel)
    await answers.gather()
    (answer,) = answers.all
    items.take(answer.whole)
    items.close(answer.reason == "stop", answer.reader.cut)
    return reply_json(show_response(heading, echo, status_of(answer.reason), items.done, answers.usage()))


async def count_tokens(desk: Desk, call: Call) -> Reply:
    """How many tokens the prompt of a response has. Raises Fault."""
    count = await desk.read(count_response_tokens, call.body)
    return reply_json({"object": "response.input_tokens", "input_tokens": count})


def status_of(reason: str) -> str:
    """The status of a response whose answer ended so."""
    return "completed" if reason == "stop" else "incomplete"


async def _stream(heading: Heading, echo: dict[str, Any], answers: Answers, items: OutputItems) -> AsyncIterator[bytes]:
    """Events with rising numbers, from created to completed, incomplete or failed."""
    number = 0

    def write(events: Events) -> bytes:
        nonlocal number
        parts = []
        for name, told in events:
            parts.append(write_event({"type": name, "sequence_number": number, **told}, name))
            number += 1
        return b"".join(parts)

    def show(_: int, delta: Delta) -> Iterator[bytes]:
        if events := items.take(delta):
            yield write(events)

    begun = {"response": show_response(heading, echo, "in_progress", [], None)}
    yield PING + write([("response.created", begun), ("response.in_progress", begun)])
    (answer,) = answers.all
    try:
        async for piece in answers.tell(show, lambda: PING):
            yield piece
    except Fault as fault:
        failed = show_response(heading, echo, "failed", items.cut(), answers.usage())
        error = show_fault(fault)["error"]
        failed["error"] = {"code": error["code"] or "server_error", "message": error["message"]}
        yield write([("response.failed", {"response": failed})])
        return
    yield write(items.close(answer.reason == "stop", answer.reader.cut))
    status = status_of(answer.reason)
    whole = show_response(heading, echo, status, items.done, answers.usage())
    yield write([(f"response.{status}", {"response": whole})])
