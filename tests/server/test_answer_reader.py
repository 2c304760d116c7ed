"""Answers read token by token: whole characters, stop strings, reasoning, calls of tools, in every cut of the text."""

import codecs
import json

import pytest

from pshard.models.text.traced_text import TracedText
from pshard.server.api.asks import Tool
from pshard.server.jobs import Likely, Made
from pshard.server.shapes.show_chat import show_calls
from pshard.server.text.answer_reader import AnswerReader, Delta
from pshard.server.text.formats import find_format
from pshard.server.text.prompts import close_thinking

TOOLS = (Tool("get", "", {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}}),)


class Words:
    """A tokenizer of given words: those in angle brackets with bars are special."""

    def __init__(self, words: list[bytes]) -> None:
        self.words = words

    def stream(self):
        words, decoder = self.words, codecs.getincrementaldecoder("utf-8")("replace")

        class Stream:
            def push(self, token: int) -> str:
                return decoder.decode(b"" if is_special(words[token]) else words[token])

            def finish(self) -> str:
                return decoder.decode(b"", final=True)

        return Stream()

    def special_name(self, token: int) -> str | None:
        return self.words[token].decode() if is_special(self.words[token]) else None


def is_special(word: bytes) -> bool:
    return word.startswith(b"<|") or word in (b"[TOOL_CALLS]", b"[ARGS]", b"<think!>")


def read(words: list[bytes], stops=(), format=None, likely=False, at_once=False):
    """The whole answer, and the deltas that it came in."""
    reader = AnswerReader(Words(words), stops, format)
    made = [Made((i,), (Likely(i, -1.0),) if likely else ()) for i in range(len(words))]
    if at_once:
        made = [Made(tuple(range(len(words))), tuple(Likely(i, -1.0) for i in range(len(words))) if likely else ())]
    deltas = [delta for one in made for delta in reader.push(one)] + reader.finish()
    whole = Delta(
        "".join(d.text for d in deltas),
        "".join(d.thought for d in deltas),
        tuple(c for d in deltas for c in d.calls),
        tuple(e for d in deltas for e in d.entries),
    )
    return whole, deltas, reader


def cuts(text: str) -> list[list[bytes]]:
    """The text in letters, in pairs, in sevens, and at once; what is special stays whole."""
    import re

    found = []
    for n in (1, 2, 7, len(text)):
        parts = re.split(r"(<\|[^|]*\|>|\[TOOL_CALLS\]|\[ARGS\])", text)
        found.append(
            [
                w.encode()
                for p in parts
                for w in ([p] if is_special(p.encode()) else [p[i : i + n] for i in range(0, len(p), n)])
            ]
        )
    return found


@pytest.mark.parametrize("at_once", [False, True])
def test_stop_strings_end_the_text_wherever_it_is_cut(at_once) -> None:
    for words in cuts("one two three\n\nfour"):
        assert read(words, ("\n\n", "xx"), at_once=at_once)[0].text == "one two three"
        assert read(words, ("fours", "\n\n\n"), at_once=at_once)[0].text == "one two three\n\nfour"
        whole, _, reader = read(words, ("three", "two"), likely=True, at_once=at_once)
        assert whole.text == "one " and reader.stopped == "two"
        assert [e.offset for e in whole.entries] == [e.offset for e in whole.entries if e.offset < 4]


def test_what_began_like_a_stop_string_is_held_back_no_longer_than_needed() -> None:
    _, deltas, _ = read([b"a", b"<", b"/", b"b"], ("</s>",))
    assert [d.text for d in deltas] == ["a", "", "", "</b", ""]


def test_special_tokens_that_clients_name_as_stops_end_the_text() -> None:
    whole, _, reader = read([b"a", b"<|eot|>", b"b"], ("<|eot|>",))
    assert whole.text == "a" and reader.stopped == "<|eot|>" and reader.count == 2


def test_characters_are_whole_and_broken_ones_are_told_at_the_end() -> None:
    snowman = "☃".encode()
    _, deltas, _ = read([b"a" + snowman[:1], snowman[1:2], snowman[2:], b"\xe2\x98"], likely=True)
    assert [d.text for d in deltas] == ["a", "", "☃", "", "�"]
    assert len([e for d in deltas for e in d.entries]) == 4


def test_reasoning_is_apart_from_the_answer_in_every_cut() -> None:
    template = "<think>{{ tools }}</think>"
    for words in cuts("<think>\nhm, a < b\n</think>\n\nYes.\n"):
        whole, _, _ = read(words, format=find_format(template, "user: x", (), False))
        assert (whole.thought, whole.text) == ("hm, a < b", "Yes.\n")
    for words in cuts("hm\n</think>\n\nYes"):  # the prompt opened it
        whole, _, _ = read(words, format=find_format(template, "assistant<think>\n", (), False))
        assert (whole.thought, whole.text) == ("hm", "Yes")
    whole, _, _ = read([b"I say <think> aloud"], format=find_format("{{ x }}", "", (), False))
    assert whole.text == "I say <think> aloud"


ARGUMENTS = '{"s": "a}\\"b", "n": 1}'
AS_TAGS = '<function=get>\n<parameter=s>\na}"b\n</parameter>\n<parameter=n>\n1\n</parameter>\n</function>'
NAME, WITH = '"name": "get"', f'"arguments": {ARGUMENTS}'
HERMES, MISTRAL = "<tool_call>{{ tools }}", "[TOOL_CALLS]{{ tools }}"
CALLS = [
    (HERMES, f"<tool_call>\n{{{NAME}, {WITH}}}\n</tool_call>"),
    (HERMES, f"<tool_call>\n{{{WITH}, {NAME}}}\n</tool_call>"),
    (HERMES, f"<tool_call>\n{AS_TAGS}\n</tool_call>"),
    ("{{ x }}", f"<tool_call>{{{NAME}, {WITH}}}</tool_call>"),
    (MISTRAL, f'[TOOL_CALLS][{{{NAME}, {WITH}, "id": "123456789"}}]'),
    (MISTRAL, f"[TOOL_CALLS]get[ARGS]{ARGUMENTS}"),
    ("ipython{{ tools }}", f'{{{NAME}, "parameters": {ARGUMENTS}}}'),
    ("<|python_tag|>{{ tools }}", f'<|python_tag|>{{"type": "function", {NAME}, "parameters": {ARGUMENTS}}}'),
    ("<|channel|>{{ tools }}", f"<|channel|>commentary to=functions.get <|constrain|>json<|message|>{ARGUMENTS}"),
]


@pytest.mark.parametrize(("template", "text"), CALLS, ids=[f"{t[:12]}-{i}" for i, (t, _) in enumerate(CALLS)])
def test_calls_are_found_in_every_format_and_cut(template, text) -> None:
    prompt = "<|start|>assistant" if "channel" in template else ""
    for words in cuts(text):
        whole, deltas, reader = read(words, format=find_format(template, prompt, TOOLS, False))
        (call,) = show_calls(whole.calls)
        assert call["function"]["name"] == "get" and whole.text == "" and reader.called
        assert json.loads(call["function"]["arguments"]) == {"s": 'a}"b', "n": 1}
        assert call["id"].startswith("call_") or len(call["id"]) == 9


def test_ends_of_lines_within_arguments_are_as_json_has_them() -> None:
    """Models write them as they are, and clients that read strictly give up the answer."""
    text = '<tool_call>\n{"name": "get", "arguments":\n{"s":\n"a\n\t\\"b\\n"}}\n</tool_call>'
    for words in cuts(text):
        whole, _, _ = read(words, format=find_format(HERMES, "", TOOLS, False))
        (call,) = show_calls(whole.calls)
        assert call["function"]["arguments"] == '{"s":\n"a\\n\\t\\"b\\n"}'
        assert json.loads(call["function"]["arguments"]) == {"s": 'a\n\t"b\n'}


def test_several_calls_come_with_text_before_and_reasoning() -> None:
    template = "<think><tool_call>{{ tools }}"
    call = '<tool_call>\n{"name": "get", "arguments": {"n": %d}}\n</tool_call>'
    for words in cuts(f"<think>\nhm\n</think>\n\nLet me see.\n{call % 1}\n{call % 2}"):
        whole, _, _ = read(words, format=find_format(template, "", TOOLS, False))
        assert (whole.thought, whole.text) == ("hm", "Let me see.")
        assert [json.loads(c["function"]["arguments"])["n"] for c in show_calls(whole.calls)] == [1, 2]


@pytest.mark.parametrize(("template", "text"), CALLS, ids=[f"{t[:12]}-{i}" for i, (t, _) in enumerate(CALLS)])
@pytest.mark.parametrize("at_once", [False, True])
def test_an_answer_of_one_call_ends_with_it(template, text, at_once) -> None:
    prompt = "<|start|>assistant" if "channel" in template else ""
    for words in cuts(text * 2):
        format = find_format(template, prompt, TOOLS, False, single=True)
        whole, _, reader = read(words, format=format, at_once=at_once)
        (call,) = show_calls(whole.calls)
        assert json.loads(call["function"]["arguments"]) == {"s": 'a}"b', "n": 1}
        assert reader.called and not reader.stopped
    whole, _, _ = read([f'[{{{NAME}, {WITH}}},{{"na'.encode()], format=find_format(None, "", TOOLS, True))
    assert len(show_calls(whole.calls)) == 1 and whole.text == ""  # what was cut off is no text
    calls = f"[{{{NAME}, {WITH}}},{{{NAME}, {WITH}}}]"
    for words in cuts(calls):
        assert len(show_calls(read(words, format=find_format(None, "", TOOLS, True))[0].calls)) == 2
        reader = AnswerReader(Words(words), (), find_format(None, "", TOOLS, True, single=True))
        reader.push(Made(tuple(range(len(words)))))
        assert reader.ended and reader.count <= len(words)


def test_channels_of_gpt_oss_are_told_apart() -> None:
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    for words in cuts(text):
        whole, _, _ = read(words, format=find_format("<|channel|>", "<|start|>assistant", (), False))
        assert (whole.thought, whole.text) == ("hm", "Yes.")
    for words in cuts(' to=functions.get<|channel|>commentary json<|message|>{"n":1}'):
        whole, _, _ = read(words, format=find_format("<|channel|>{{ tools }}", "<|start|>assistant", TOOLS, False))
        assert show_calls(whole.calls)[0]["function"]["arguments"] == '{"n":1}' and whole.text == ""
    whole, _, _ = read([b"plain"], format=find_format("<|channel|>", "<|start|>assistant", (), False))
    assert whole.text == "plain"


def test_what_is_no_call_is_text_and_nothing_of_it_is_lost() -> None:
    for template, text in (
        ("<tool_call>{{ tools }}", "<tool_call>I will not</tool_call>"),
        ("ipython{{ tools }}", "{not json}"),
        ("[TOOL_CALLS]{{ tools }}", "[TOOL_CALLS]nothing"),
    ):
        for words in cuts(text):
            whole, _, reader = read(words, format=find_format(template, "", TOOLS, False))
            assert whole.text == text and not reader.called
    whole, _, _ = read(
        [b'<tool_call>{"name": "get", "arguments": {"s": "cut'],
        format=find_format("<tool_call>tools", "", TOOLS, False),
    )
    assert show_calls(whole.calls)[0]["function"]["arguments"] == '{"s": "cut'


def test_without_tools_calls_are_text() -> None:
    text = '<tool_call>{"name": "get", "arguments": {}}</tool_call>'
    for words in cuts(text):
        assert read(words, format=find_format("<tool_call>{{ tools }}", "", (), False))[0].text == text


def test_a_prompt_that_opens_reasoning_is_closed_before_a_grammar() -> None:
    assert close_thinking(TracedText("x<think>\n")).forget() == "x<think>\n\n</think>\n\n"
    assert close_thinking(TracedText("<|start|>assistant")).forget().endswith("<|channel|>final<|message|>")
    assert close_thinking(TracedText("plain")).forget() == "plain"
