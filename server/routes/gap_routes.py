"""POST /infill, in llama.cpp's form."""

import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from pshard.server.http.answers import Answers, Asked
from pshard.server.http.desk import Call, Desk
from pshard.server.http.replies import Reply, Stream, reply_json, write_event
from pshard.server.reading.read_requests import read_gap_request
from pshard.server.routes.choice_stream import stream_events
from pshard.server.text.answer_reader import Delta


async def fill_gap(desk: Desk, call: Call) -> Reply:
    """Fill the gap between two texts. Raises Fault."""
    generation, answering, prompt = await desk.read(read_gap_request, call.body)
    answers = Answers(desk, Asked(desk.head("infill-").id, call.key, [prompt], generation))
    begun = time.monotonic()
    answers.start()
    if answering.stream:
        return Stream(_stream(desk, answers, begun), answers.cancel)
    await answers.gather()
    return reply_json(_show_end(desk, answers, answers.all[0].whole.text, begun))


def _show_end(desk: Desk, answers: Answers, text: str, begun: float) -> dict[str, Any]:
    """The object that ends an answer."""
    (answer,) = answers.all
    usage, stopped = answers.usage(), answer.reader.stopped
    return {
        "content": text,
        "stop": True,
        "stop_type": "word" if stopped else "eos" if answer.reason == "stop" else "limit",
        "stopping_word": stopped,
        "model": desk.model.name,
        "tokens_predicted": usage.made,
        "tokens_evaluated": usage.prompt,
        "tokens_cached": usage.cached,
        "truncated": False,
        "timings": {
            "prompt_n": usage.prompt - usage.cached,
            "predicted_n": usage.made,
            "total_ms": 1e3 * (time.monotonic() - begun),
        },
    }


def _stream(desk: Desk, answers: Answers, begun: float) -> AsyncIterator[bytes]:
    """Events with what is new, the last one with the end."""

    def show(_: int, delta: Delta) -> Iterator[bytes]:
        if delta.text:
            yield write_event({"content": delta.text, "stop": False})

    return stream_events(answers, show, lambda: [write_event(_show_end(desk, answers, "", begun))])
