"""POST /v1/completions."""

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pshard.server.api.asks import CompletionAsk
from pshard.server.http.answers import Answer, Answers, Asked
from pshard.server.http.desk import Call, Desk
from pshard.server.http.replies import Reply, Stream, prepare_event, reply_json, write_event
from pshard.server.reading.read_requests import read_completion_request
from pshard.server.routes.choice_stream import stream_choices
from pshard.server.shapes.show_completion import (
    Heading,
    show_completion,
    show_completion_choice,
    show_completion_logprobs,
)
from pshard.server.text.answer_reader import Delta
from pshard.server.text.echoed import Echo
from pshard.server.text.token_words import Entry


@dataclass(frozen=True)
class _Told:
    """What the answer is written with. echoes: one for each prompt, of those that are part of the answer."""

    desk: Desk
    ask: CompletionAsk
    heading: Heading
    answers: Answers
    echoes: tuple[Echo, ...]

    def echo(self, index: int) -> Echo:
        return self.echoes[index // self.ask.generation.choices] if self.echoes else Echo("", ())

    def logprobs(self, index: int, entries: tuple[Entry, ...], begins: bool) -> dict[str, Any] | None:
        """Those of some of an answer; `begins`: of its beginning, where the prompt's own stand."""
        if self.ask.generation.likely is None:
            return None
        echo = self.echo(index)
        shifted = tuple(replace(entry, offset=entry.offset + len(echo.text)) for entry in entries)
        if begins and self.echoes:
            shifted = (*echo.score(self.answers.all[index].scored), *shifted)
        return show_completion_logprobs(shifted, self.desk.words)


async def complete(desk: Desk, call: Call) -> Reply:
    """Continue prompts. Raises Fault."""
    ask, prompts, echoes = await desk.read(read_completion_request, call.body)
    guide = None
    seconds = desk.limits.compile_seconds
    if ask.rule is not None:
        guide = await desk.off_loop(desk.guides.follow_rule, ask.rule, seconds=seconds)
    elif ask.schema is not None:
        guide = await desk.off_loop(desk.guides.follow_schema, ask.schema, ask.format, seconds=seconds)
    heading = desk.head("cmpl-", ask.generation.drafts)
    scored = ask.echo and ask.generation.likely is not None
    answers = Answers(desk, Asked(heading.id, call.key, prompts, ask.generation, guide, scored))
    told = _Told(desk, ask, heading, answers, echoes)
    answers.start()
    if ask.answering.stream:
        return Stream(_stream(told), answers.cancel)
    await answers.gather()
    choices = [_show_whole(told, i, answer) for i, answer in enumerate(answers.all)]
    return reply_json(show_completion(heading, choices, answers.usage()))


def _show_whole(told: _Told, index: int, answer: Answer) -> dict[str, Any]:
    ids = answer.reader.ids if told.ask.answering.ids else None
    logprobs = told.logprobs(index, answer.whole.entries, True)
    return show_completion_choice(index, told.echo(index).text + answer.whole.text, logprobs, answer.reason, ids)


def _stream(told: _Told) -> AsyncIterator[bytes]:
    """Chunks of all choices; with echo the first of each begins with the prompt."""
    begun, plain = set[int](), dict[int, Callable[[str], bytes]]()

    def show_text(index: int, text: str, logprobs: dict[str, Any] | None = None, reason: str = "") -> dict[str, Any]:
        choice = show_completion_choice(index, text, logprobs, reason or None)
        return show_completion(told.heading, [choice], None)

    def show(index: int, delta: Delta) -> Iterator[bytes]:
        answer, begins = told.answers.all[index], index not in begun
        if not delta and not answer.reason:
            return
        begun.add(index)
        text = (told.echo(index).text if begins else "") + delta.text
        logprobs = told.logprobs(index, delta.entries, begins)
        if answer.reason or logprobs:
            yield write_event(show_text(index, text, logprobs, answer.reason))
            return
        if index not in plain:
            plain[index] = prepare_event(partial(show_text, index))
        yield plain[index](text)

    def show_usage() -> dict[str, Any]:
        return show_completion(told.heading, [], told.answers.usage())

    return stream_choices(told.answers, show, show_usage if told.ask.answering.usage else None)
