"""Calls as models really write them, and answers that only look like calls, in every cut of the text."""

import json

import pytest
from test_answer_reader import HERMES, MISTRAL, Words, cuts, read

from pshard.server.api.asks import Tool
from pshard.server.jobs import Made
from pshard.server.shapes.show_chat import show_calls
from pshard.server.text.answer_reader import AnswerReader
from pshard.server.text.formats import find_format

TOOLS = (
    Tool("get", "", {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}}),
    Tool("write", "", {"type": "object", "properties": {"path": {}, "content": {"type": "string"}}}),
)
LLAMA, CODER = "ipython{{ tools }}", "<tool_call><function=x>{{ tools }}"


def calls_of(whole) -> list[tuple[str, dict]]:
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in show_calls(whole.calls)]


def tag(name: str, **values: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<function={name}>\n{inner}</function>"


@pytest.mark.parametrize("template", [LLAMA, HERMES])
@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Ada Lovelace", "born": 1815}',
        '{"name": "Ada Lovelace", "arguments": {"n": 1}}',
        '{"name": "get", "born": 1815}',
        '{"born": 1815, "name": "get"}',
        '[{"name": "Ada Lovelace"}, {"name": "get"}]',
        "[1, 2]; {}",
        '{"name": "get"}',
        '"name": "get", "arguments": {}',
        "<function=unknown>\n</function> is how it looks",
    ],
)
def test_json_that_names_no_tool_or_has_no_arguments_is_the_answer(template, text) -> None:
    for words in cuts(text):
        whole, _, reader = read(words, format=find_format(template, "", TOOLS, False))
        assert whole.text == text and not whole.calls and not reader.called


def test_an_answer_in_json_is_told_as_soon_as_it_can_be_no_call() -> None:
    for begin in ('{"born": ', '{"name": "Ada"', "[1"):
        _, deltas, _ = read([begin.encode(), b" and more"], format=find_format(LLAMA, "", TOOLS, False))
        assert deltas[0].text.strip() == begin.strip()


def test_within_a_tag_an_unknown_tool_is_called_so_that_the_agent_can_answer() -> None:
    for text in (
        '<tool_call>{"name": "fetch", "arguments": {"n": 1}}</tool_call>',
        f"<tool_call>{tag('fetch', n='1')}",
    ):
        for words in cuts(text):
            whole, _, _ = read(words, format=find_format(CODER, "", TOOLS, False))
            assert [name for name, _ in calls_of(whole)] == ["fetch"] and whole.text == ""


ONE, TWO, THREE = (f'{{"name": "get", "arguments": {{"n": {n}}}}}' for n in (1, 2, 3))
LISTS = [
    (LLAMA, f"{ONE}; {TWO}; {THREE}"),
    (LLAMA, f"[{ONE}, {TWO}, {THREE}]"),
    (LLAMA, f"\n{ONE}\n{TWO}\n{THREE}\n"),
    (LLAMA, f"<|python_tag|>{ONE}; {TWO}; {THREE}"),
    ("{{ functions }} after functools[", f"functools[{ONE}, {TWO}, {THREE}]"),
    (HERMES, f"{ONE}; {TWO}; {THREE}"),
    (HERMES, f"[{ONE}, {TWO}, {THREE}]"),
    (HERMES, f"<tool_call>\n{ONE}\n{TWO}\n{THREE}\n</tool_call>"),
    (HERMES, f"<tool_call>[{ONE}, {TWO}, {THREE}]</tool_call>"),
    (HERMES, f"<tool_call>{ONE}; {TWO}</tool_call>\n<tool_call>{THREE}</tool_call>"),
    (MISTRAL, f"[TOOL_CALLS][{ONE}, {TWO}, {THREE}]"),
    (CODER, tag("get", n="1") + "\n" + tag("get", n="2") + "\n</tool_call>\n" + tag("get", n="3")),
    (CODER, f"<tool_call>\n{tag('get', n='1')}\n{tag('get', n='2')}\n{tag('get', n='3')}\n</tool_call>"),
]


@pytest.mark.parametrize(("template", "text"), LISTS)
def test_lists_of_calls_are_several_calls(template, text) -> None:
    for words in cuts(text):
        whole, _, _ = read(words, format=find_format(template, "", TOOLS, False))
        assert calls_of(whole) == [("get", {"n": 1}), ("get", {"n": 2}), ("get", {"n": 3})] and whole.text == ""
        format = find_format(template, "", TOOLS, False, single=True)
        assert calls_of(read(words, format=format)[0]) == [("get", {"n": 1})]


def test_a_function_without_its_opening_tag_is_a_call() -> None:
    for end in ("</tool_call>", "\n</tool_call>", ""):
        for words in cuts(f"I look.\n{tag('get', s='a', n='7')}{end}"):
            whole, _, _ = read(words, format=find_format(CODER, "", TOOLS, False))
            assert calls_of(whole) == [("get", {"s": "a", "n": 7})] and whole.text == "I look."


HARD = [
    "x = '</tool_call>' # and\n<tool_call>",
    "a</parameter>b\n</parameter> c",
    "say </function>\n then",
    "</function></tool_call> is an end, </parameter>\n</function>\n</tool_call> too, and that was all",
]


@pytest.mark.parametrize("value", HARD)
def test_tags_within_an_argument_end_nothing(value) -> None:
    after = '<tool_call>{"name": "get", "arguments": {"n": 2}}</tool_call>'
    written = json.dumps({"name": "write", "arguments": {"content": value, "path": "p"}})
    first = ("write", {"content": value, "path": "p"})
    for text in (
        f"<tool_call>\n{written}\n</tool_call>\n{after}",
        f"<tool_call>\n{tag('write', content=value, path='p')}\n</tool_call>\n{after}",
        f"{tag('write', path='p', content=value)}\n</tool_call>\n{after}",
    ):
        for words in cuts(text):
            whole, _, _ = read(words, format=find_format(CODER, "", TOOLS, False))
            assert calls_of(whole) == [first, ("get", {"n": 2})] and whole.text == "", text
    for words in cuts(f"<tool_call>\n{tag('write', content=value)}\n</tool_call>\nDone."):
        whole, _, _ = read(words, format=find_format(CODER, "", TOOLS, False))
        assert calls_of(whole) == [("write", {"content": value})] and whole.text == "Done."


def test_brackets_that_a_model_forgets_end_with_the_tag() -> None:
    text = '<tool_call>{"name": "get", "arguments": {"n": 1</tool_call>\n' + f"<tool_call>{TWO}</tool_call>So."
    for words in cuts(text):
        whole, _, reader = read(words, format=find_format(HERMES, "", TOOLS, False))
        first, second = show_calls(whole.calls)
        assert first["function"]["arguments"] == '{"n": 1' and second["function"]["arguments"] == '{"n": 2}'
        assert whole.text == "So." and reader.called and not reader.cut


WHOLE = [
    (HERMES, f"<tool_call>{ONE}</tool_call>"),
    (MISTRAL, '[TOOL_CALLS]get[ARGS]{"n": 1}'),
    (LLAMA, ONE),
    (CODER, f"<tool_call>\n{tag('write', path='p', content='half</parameter>of it')}\n</tool_call>"),
    (CODER, tag("get", s="a", n="1")),
    ("<|channel|>{{ tools }}", '<|channel|>commentary to=functions.get<|message|>{"n": 1}'),
]


@pytest.mark.parametrize(("template", "text"), WHOLE)
@pytest.mark.parametrize("single", [False, True])
def test_no_beginning_of_a_call_gives_a_whole_one(template, text, single) -> None:
    letters = cuts(text)[0]
    whole, _, _ = read(letters, format=find_format(template, "", TOOLS, False))
    ((name, arguments),) = calls_of(whole)
    for n in range(len(letters)):
        found, _, reader = read(letters[:n], format=find_format(template, "", TOOLS, False, single=single))
        for call in show_calls(found.calls):
            try:
                assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (name, arguments)
            except ValueError:
                assert reader.cut and not reader.called and not reader.ended


def test_a_forced_call_that_is_cut_does_not_end_the_answer() -> None:
    text = '{"name":"get","arguments":{"s":"aaa'
    reader = AnswerReader(Words([text.encode()]), (), find_format(None, "", TOOLS, True, single=True))
    reader.push(Made((0,)))
    reader.finish()
    assert reader.cut and not reader.called and not reader.ended
