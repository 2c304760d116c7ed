"""POST /v1/chat/completions."""

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pshard.server.api.asks import ChatAsk
from pshard.server.http.answers import Answer, Answers, Asked
from pshard.server.http.desk import Call, Desk
from pshard.server.http.replies import Reply, Stream, prepare_event, reply_json, write_event
from pshard.server.reading.read_requests import read_chat_request
from pshard.server.routes.choice_stream import stream_choices
from pshard.server.shapes.show_chat import (
    show_chat,
    show_chat_choice,
    show_chat_logprobs,
    show_chunk,
    show_delta,
    show_message,
    show_new,
)
from pshard.server.shapes.show_completion import Heading
from pshard.server.text.answer_reader import Delta
from pshard.server.text.prompts import Prompt

if TYPE_CHECKING:
    from pshard.runtime.sampling import Constraint

BEGIN = {"role": "assistant", "content": ""}


@dataclass(frozen=True)
class _Told:
    desk: Desk
    ask: ChatAsk
    heading: Heading
    answers: Answers

    def logprobs(self, entries: tuple[Any, ...]) -> dict[str, Any] | None:
        return None if self.ask.generation.likely is None else show_chat_logprobs(entries, self.desk.words)


async def chat(desk: Desk, call: Call) -> Reply:
    """Continue a conversation. Raises Fault."""
    ask, prompt = await desk.read(read_chat_request, call.body)
    heading = desk.head("chatcmpl-", ask.generation.drafts)
    answers = await prepare_chat(desk, ask, prompt, heading.id, call.key)
    told = _Told(desk, ask, heading, answers)
    answers.start()
    if ask.answering.stream:
        return Stream(_stream(told), answers.cancel)
    await answers.gather()
    choices = [_show_whole(told, i, answer) for i, answer in enumerate(answers.all)]
    return reply_json(show_chat(heading, choices, answers.usage()))


async def prepare_chat(desk: Desk, ask: ChatAsk, prompt: Prompt, id: str, key: str) -> Answers:
    """Answers to a conversation that can be started. Raises Fault where it cannot be kept to what was asked."""
    guide: Callable[[], Constraint] | None = None
    if ask.guided:
        mark, seconds = prompt.format.mark if prompt.format else "", desk.limits.compile_seconds
        guide = await desk.off_loop(desk.guides.follow_ask, ask, desk.limits.calls, mark, seconds=seconds)
    return Answers(desk, Asked(id, key, [prompt], ask.generation, guide))


def reason_of(answer: Answer) -> str:
    """Why an answer ended, as it is told."""
    return "tool_calls" if answer.reader.called and answer.reason == "stop" else answer.reason


def _show_whole(told: _Told, index: int, answer: Answer) -> dict[str, Any]:
    ids = answer.reader.ids if told.ask.answering.ids else None
    logprobs = told.logprobs(answer.whole.entries)
    return show_chat_choice(index, show_message(answer.whole), logprobs, reason_of(answer), ids)


def _stream(told: _Told) -> AsyncIterator[bytes]:
    """Chunks of all choices: each begins with the role, and ends with a chunk that has the reason."""
    usage, plain = told.ask.answering.usage, dict[int, Callable[[str], bytes]]()

    def show_text(index: int, text: str) -> dict[str, Any]:
        return show_chunk(told.heading, [show_delta(index, {"content": text}, None)], usage)

    def show(index: int, delta: Delta) -> Iterator[bytes]:
        answer = told.answers.all[index]
        if index in plain and delta.is_text and not answer.reason:
            yield plain[index](delta.text)
            return
        choices = []
        if index not in plain:
            plain[index] = prepare_event(partial(show_text, index))
            choices.append(show_delta(index, BEGIN, None))
        for i, new in enumerate(show_new(delta)):
            choices.append(show_delta(index, new, None if i else told.logprobs(delta.entries)))
        if answer.reason:
            choices.append(show_delta(index, {}, None, reason_of(answer)))
        for choice in choices:
            yield write_event(show_chunk(told.heading, [choice], usage))

    def show_usage() -> dict[str, Any]:
        return show_chunk(told.heading, [], False) | {"usage": told.answers.usage().show()}

    return stream_choices(told.answers, show, show_usage if usage else None)
