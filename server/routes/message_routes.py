"""POST /v1/messages and /v1/messages/count_tokens."""

from collections.abc import AsyncIterator, Iterator

from pshard.server.api.faults import Fault, show_messages_fault
from pshard.server.http.answers import Answer, Answers
from pshard.server.http.desk import Call, Desk
from pshard.server.http.replies import PING, Reply, Stream, reply_json, write_event
from pshard.server.reading.read_requests import count_message_tokens, read_message
from pshard.server.routes.chat_routes import prepare_chat, reason_of
from pshard.server.shapes.show_completion import Heading
from pshard.server.shapes.show_message_blocks import Blocks, Events, show_message_usage, show_whole_message
from pshard.server.text.answer_reader import Delta

REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


async def send_message(desk: Desk, call: Call) -> Reply:
    """Continue a conversation. Raises Fault."""
    ask, prompt = await desk.read(read_message, call.body)
    heading = desk.head("msg_")
    answers = await prepare_chat(desk, ask, prompt, heading.id, call.key)
    answers.start()
    if ask.answering.stream:
        return Stream(_stream(heading, answers), answers.cancel)
    await answers.gather()
    (answer,) = answers.all
    blocks = Blocks()
    blocks.take(answer.whole)
    blocks.close(answer.reader.cut)
    told = show_whole_message(heading.id, heading.model, blocks.done, ending_of(answer), answers.usage())
    return reply_json(told)


async def count_tokens(desk: Desk, call: Call) -> Reply:
    """How many tokens the prompt of a conversation has. Raises Fault."""
    return reply_json({"input_tokens": await desk.read(count_message_tokens, call.body)})


def ending_of(answer: Answer) -> tuple[str, str | None]:
    """Why an answer ended, and the stop string that ended it."""
    if answer.reader.stopped:
        return "stop_sequence", answer.reader.stopped
    return REASONS.get(reason_of(answer), "end_turn"), None


async def _stream(heading: Heading, answers: Answers) -> AsyncIterator[bytes]:
    """Events from message_start, which waits for the first of the prompt, to message_stop."""
    yield PING
    blocks, begun = Blocks(), False

    def write(events: Events) -> bytes:
        return b"".join(write_event({"type": name, **told}, name) for name, told in events)

    def start() -> bytes:
        message = show_whole_message(heading.id, heading.model, [], (None, None), answers.usage())
        return write([("message_start", {"message": message})])

    def show(_: int, delta: Delta) -> Iterator[bytes]:
        nonlocal begun
        if not begun:
            begun = True
            yield start()
        if events := blocks.take(delta):
            yield write(events)

    def ping() -> bytes:  # clients that watch a stream for life count events, and no comments
        return write([("ping", {})]) if begun else PING

    (answer,) = answers.all
    try:
        async for piece in answers.tell(show, ping):
            yield piece
    except Fault as fault:
        yield write_event(show_messages_fault(fault), "error")
        return
    reason, stopped = ending_of(answer)
    delta = {"delta": {"stop_reason": reason, "stop_sequence": stopped}, "usage": show_message_usage(answers.usage())}
    yield write([*blocks.close(answer.reader.cut), ("message_delta", delta), ("message_stop", {})])
