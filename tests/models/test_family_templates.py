"""Templates in the manner of the families render as transformers renders them: tools, reasoning, documents, and what
they refuse."""

from datetime import datetime
from typing import Any

import pytest
from family_templates import FAMILY_TEMPLATES
from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from pshard.errors import UserError
from pshard.models.text.chat import render_chat
from pshard.models.text.traced_text import MESSAGE, TEMPLATE

SEARCH = {
    "type": "function",
    "function": {
        "name": "search", "description": "Finds <things> & Öle.\nOr not.",
        "parameters": {
            "type": "object", "required": ["words"],
            "properties": {
                "words": {"type": "string"}, "most": {"type": "integer", "default": 3},
                "kinds": {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}},
            },
        },
    },
}  # fmt: skip
CLOCK = {"type": "function", "function": {"name": "clock", "description": "", "parameters": {
    "type": "object", "properties": {"zone": {"type": ["string", "null"]}}, "required": []}}}  # fmt: skip
ASKED = {"role": "user", "content": " Wie spät, <b>?\n"}
CALLS = [
    {"type": "function", "function": {"name": "search", "arguments": {"words": "ä'\"", "most": 2, "kinds": ["a"]}}}
]
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [ASKED],
    "system": [{"role": "system", "content": "Be brief. /no_think "}, ASKED],
    "turns": [ASKED, {"role": "assistant", "content": "<think>\nhm</think>\n\nNow"}, {"role": "user", "content": "?"}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": " b"}]}],
    "picture": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}],
    "thought": [ASKED, {"role": "assistant", "content": "Late", "reasoning": "the clock\n"}],
    "called": [
        ASKED,
        {"role": "assistant", "content": "", "thinking": "search", "tool_calls": CALLS},
        {"role": "tool", "content": "nothing"},
        {"role": "tool", "content": "more"},
    ],
    "answered": [
        {"role": "system", "content": "s"}, ASKED,
        {"role": "assistant", "content": None, "tool_calls": CALLS},
        {"role": "tool", "content": "12:00"},
        {"role": "assistant", "content": "Noon."},
        {"role": "user", "content": "Thanks"},
    ],
    "twice": [ASKED, ASKED],
    "alone": [{"role": "tool", "content": "12:00"}],
    "nobody": [{"role": "skip", "content": "x"}, ASKED],
}  # fmt: skip
GIVEN: dict[str, dict[str, Any]] = {
    "plain": {},
    "tools": {"tools": [SEARCH, CLOCK]},
    "no tools": {"tools": []},
    "thinking": {"variables": {"enable_thinking": True, "thinking_budget": 600, "reasoning_effort": "high"}},
    "not thinking": {"variables": {"enable_thinking": False, "thinking_budget": 0}, "tools": [CLOCK]},
    "documents": {
        "documents": [{"doc_id": 1, "text": "Es war <eine> Ü."}],
        "variables": {"controls": {"length": "short", "originality": None}},
        "tools": [SEARCH],
    },
}


def render_by_transformers(
    template: str, conversation: list[dict[str, Any]], given: dict[str, Any], **more: Any
) -> str:
    others = {name: value for name, value in given.items() if name != "variables"} | given.get("variables", {})
    (text,), _ = render_jinja_template(
        [conversation], chat_template=template, bos_token="<s>", eos_token="</s>", **others, **more
    )
    return text


@pytest.mark.parametrize("family", FAMILY_TEMPLATES)
def test_every_conversation_is_what_transformers_makes_of_it(family: str) -> None:
    template, texts, refused = FAMILY_TEMPLATES[family], set[str](), 0
    for talk in CONVERSATIONS.values():
        for given in GIVEN.values():
            for prompt in (True, False):
                try:
                    wanted = render_by_transformers(template, talk, given, add_generation_prompt=prompt)
                except (TemplateError, TypeError) as error:
                    refused += 1
                    with pytest.raises(UserError) as ours:
                        render_chat(template, talk, "<s>", "</s>", prompt, **given)
                    assert isinstance(error, TypeError) or str(error) in str(ours.value)
                    continue
                found = render_chat(template, talk, "<s>", "</s>", prompt, **given)
                assert str.__eq__(found, wanted), (talk, given)
                at = found.find("Wie")
                assert at < 0 or found.origins[at : at + 8] == bytes([MESSAGE]) * 8
                texts.add(wanted)
    assert len(texts) >= 12 and refused < len(CONVERSATIONS) * len(GIVEN)


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_what_was_thought_goes_by_all_its_names(name: str) -> None:
    talk = [{"role": "assistant", "content": "x", name: "hm"}]
    assert render_chat("{{ messages[0].reasoning_content }}{{ messages[0].thinking }}", talk, "", "") == "hmhm"


def test_what_a_marked_answer_sets_ends_with_it() -> None:
    template = "{% set a = 1 %}{% generation %}{% set a = 2 %}{{ a }}{% endgeneration %}{{ a }}{{ messages[0].role }}"
    assert render_chat(template, [ASKED], "", "") == render_by_transformers(template, [ASKED], {}) == "21user"


def test_tools_and_variables_are_no_words_of_the_template() -> None:
    tool = {"name": "<end>", "description": "<end>"}
    text = render_chat("<end>{{ tools[0].name }}{{ mood }}{{ tools | tojson }}", [], "", "", tools=[tool],
                       variables={"mood": "<end>"})  # fmt: skip
    assert text.runs(TEMPLATE) == [(0, 5)]


def test_a_variable_does_not_stand_for_the_messages() -> None:
    with pytest.raises(UserError, match="messages is given already"):
        render_chat("{{ messages }}", [ASKED], "", "", variables={"messages": []})


def test_json_is_written_as_the_template_asks() -> None:
    for how in ("", "(indent=2)", "(true)", "(separators=(',', ':'))", "(sort_keys=true)", "(false, 1, none, true)"):
        template = "{{ messages[0] | tojson" + how + " }}"
        assert str.__eq__(render_chat(template, [ASKED], "", ""), render_by_transformers(template, [ASKED], {})), how


def test_the_date_is_today_s() -> None:
    text = render_chat("{{ strftime_now('%d %B %Y') }}", [ASKED], "", "")
    assert abs((datetime.strptime(text.forget(), "%d %B %Y") - datetime.now()).days) <= 1
