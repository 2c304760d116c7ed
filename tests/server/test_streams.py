"""What streams tell of an answer, whatever comes at once: events in order, whole calls, failures."""

import threading
import time
from dataclasses import dataclass, replace

import pytest
from http_client import ask, events_of
from quick_service import QuickService
from small_service import demo_model

from pshard.server.api.limits import DEFAULT_LIMITS
from pshard.server.jobs import Ended, Made, Progress
from pshard.server.routes.make_app import make_app

STOP, STILL = Ended("stop"), ": still here"
TEMPLATE = "<think><tool_call>{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}"
PROPERTIES = {"type": "object", "properties": {"n": {"type": "integer"}}}
RESPONSES = {
    "input": "Hi",
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "tools": [{"type": "function", "name": "get", "parameters": PROPERTIES}, {"type": "custom", "name": "edit"}],
}


@dataclass
class Speaker(QuickService):
    """Says the same to every request; each of its words comes at once."""

    words: tuple[str, ...] = ()
    ended: Ended = STOP

    def submit(self, job, listener):
        for word in self.words:
            listener.put(Progress(len(job.prompt), len(job.prompt), 0))  # keeps apart what would become one event
            listener.put(Made(tuple(demo_model().tokenizer.encode(word, add_special=False))))
        listener.put(self.ended)
        listener.wake()


def stream(path: str, body: dict, *words: str, ended: Ended = STOP) -> list:
    response = ask(make_app(Speaker(words=words, ended=ended), demo_model(TEMPLATE)), path, body)
    assert response.status_code == 200, response.text
    return events_of(response)


CALL = '<tool_call>{"name": "%s", "arguments": {%s'
UNFINISHED = [
    ("Let me s", "message", lambda item: item["content"][0]["text"] == "Let me s"),
    ("<think>hm", "reasoning", lambda item: item["content"][0]["text"] == "hm" and item["encrypted_content"]),
    (CALL % ("get", '"n": 1'), "function_call", lambda item: item["arguments"] == '{"n": 1'),
    (CALL % ("edit", '"input": "a'), "custom_tool_call", lambda item: item["input"] == '{"input": "a'),
]


@pytest.mark.parametrize(("words", "kind", "right"), UNFINISHED, ids=[kind for _, kind, _ in UNFINISHED])
def test_a_response_that_fails_has_the_item_that_was_unfinished(words, kind, right) -> None:
    first = CALL % ("get", "}}</tool_call>")
    *events, last = stream("/v1/responses", RESPONSES, first, words, ended=Ended("error", "a step failed"))
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "a step failed"}
    whole, cut = last["response"]["output"]
    assert (whole["type"], whole["status"], whole["arguments"]) == ("function_call", "completed", "{}")
    assert (cut["type"], cut["status"]) == (kind, "incomplete") and right(cut), cut
    added = [event["item"]["id"] for event in events if event["type"] == "response.output_item.added"]
    done = [event["item"]["id"] for event in events if event["type"] == "response.output_item.done"]
    assert added == [whole["id"], cut["id"]] and done == [whole["id"]]


ANSWER = [  # as a slow reader gets it: much at once
    "<think>hm</think>Let me see." + CALL % ("get", '"n": 1'),
    "2}}</tool_call>So far.<think>so</think>Then again." + CALL % ("get", '"n": 3}}</tool_call>'),
    "Done.",
]
CHAT = {
    "messages": [{"role": "user", "content": "Hi"}],
    "stream": True,
    "tools": [{"type": "function", "function": {"name": "get", "parameters": PROPERTIES}}],
}
MESSAGE = {
    "messages": CHAT["messages"],
    "stream": True,
    "max_tokens": 400,
    "tools": [{"name": "get", "input_schema": PROPERTIES}],
}
IN_ORDER = ["hm", "Let me see.", '{"n": 12}', "So far.", "so", "Then again.", '{"n": 3}', "Done."]


def test_items_of_a_response_are_in_the_order_in_which_the_model_wrote_them() -> None:
    *events, last = stream("/v1/responses", RESPONSES, *ANSWER)
    told = [item.get("arguments") or item["content"][0]["text"] for item in last["response"]["output"]]
    assert last["type"] == "response.completed" and told == IN_ORDER
    pieces = dict.fromkeys(range(len(IN_ORDER)), "")
    for event in events:
        if event["type"].endswith(".delta"):
            pieces[event["output_index"]] += event["delta"]
    assert list(pieces.values()) == IN_ORDER


def test_blocks_of_a_message_are_in_the_order_in_which_the_model_wrote_them() -> None:
    events = stream("/v1/messages", MESSAGE, *ANSWER)
    pieces = dict.fromkeys(range(len(IN_ORDER)), "")
    kinds = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
    names = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}
    for event in events:
        if event["type"] == "content_block_delta":
            pieces[event["index"]] += event["delta"][names[kinds[event["index"]]]]
    assert list(pieces.values()) == IN_ORDER and events[-2]["delta"]["stop_reason"] == "tool_use"


def test_a_chunk_of_a_chat_has_one_part_of_a_call() -> None:
    """Clients add up parts of the same index between chunks; two in the first chunk are two calls to them."""
    chunks = stream("/v1/chat/completions", CHAT, *ANSWER)[:-1]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    parts = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert all(len(part) == 1 for part in parts)
    calls: dict[int, str] = {}
    for (part,) in parts:
        calls[part["index"]] = calls.get(part["index"], "") + part["function"]["arguments"]
    assert calls == {0: '{"n": 12}', 1: '{"n": 3}'}
    assert "".join(delta.get("content", "") for delta in deltas) == "Let me see.So far.Then again.Done."


def test_texts_of_a_stream_end_no_line() -> None:
    """Many clients split lines as Python splits text, which knows more ends of lines than server-sent events do."""
    text = "a\u2028b\u2029c\x85d"
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "Hi", "stream": True})):
        told = [chunk["choices"][0] for chunk in stream(path, body | {"max_tokens": 100}, text[:3], text[3:])[:-1]]
        assert "".join(choice.get("text") or choice.get("delta", {}).get("content", "") for choice in told) == text


@dataclass
class SlowSpeaker(Speaker):
    """Reads a prompt in 16 steps, and then says what it says token by token, each in the time of a step."""

    def submit(self, job, listener):
        said = [token for word in self.words for token in demo_model().tokenizer.encode(word, add_special=False)]
        steps = [Progress(i, 16, 0) for i in range(1, 17)] + [Made((token,)) for token in said]

        def speak() -> None:
            for event in (*steps, self.ended):
                listener.put(event)
                listener.wake()
                time.sleep(0.02)

        threading.Thread(target=speak).start()


@pytest.mark.parametrize(("path", "body", "ping"), [
    ("/v1/chat/completions", CHAT, STILL), ("/v1/completions", {"prompt": "Hi", "stream": True}, STILL),
    ("/v1/responses", RESPONSES, STILL), ("/v1/messages", MESSAGE, "event: ping"),
])  # fmt: skip
def test_a_long_prompt_keeps_no_stream_silent(path, body, ping) -> None:
    app = make_app(SlowSpeaker(words=("Yes.",)), demo_model(TEMPLATE), replace(DEFAULT_LIMITS, ping_seconds=0.05))
    told = ask(app, path, body).text
    assert told.count(ping) >= 3, told


def test_a_call_that_is_told_when_it_is_whole_keeps_no_stream_silent() -> None:
    service = SlowSpeaker(words=(CALL % ("edit", '"input": "a long text that takes a while"}}</tool_call>'),))
    app = make_app(service, demo_model(TEMPLATE), replace(DEFAULT_LIMITS, ping_seconds=0.05))
    told = ask(app, "/v1/responses", RESPONSES).text
    begun, done = told.index("event: response.output_item.added"), told.index("event: response.output_item.done")
    assert told[begun:done].count(STILL) >= 3, told
