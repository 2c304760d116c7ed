"""Templates that keep lists, and those that take tools by their older name."""

from datetime import datetime

import pytest

from pshard.errors import UserError
from pshard.models.text.chat import render_chat
from pshard.models.text.tool_templates import takes_tools
from pshard.models.text.traced_text import MESSAGE

QUEUE = """{%- set open = namespace(ids=[]) -%}
{%- macro show(message) -%}
    {%- for call in message.tool_calls -%}
        {%- set _ = open.ids.append(call.id) -%}<call>{{ call.id }}:{{ call.function.arguments | tojson }}
    {%- endfor -%}
{%- endmacro -%}
{%- for message in messages -%}
    [{{ message.role }}]
    {%- if message.tool_calls -%}{{ show(message) }}
    {%- elif message.role == 'tool' -%}for {{ open.ids.pop(0) if open.ids else '?' }}: {{ message.content }}
    {%- else -%}{{ message.content }}{%- endif -%}
{%- endfor -%}"""
CALLS = [{"id": f"c{n}", "type": "function", "function": {"name": "f", "arguments": {"n": n}}} for n in (1, 2)]
CONVERSATION = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "", "tool_calls": CALLS},
    {"role": "tool", "content": "one"},
    {"role": "tool", "content": "two"},
]
TOOLS = [{"type": "function", "function": {"name": "f<", "description": "ä", "parameters": {}}}]
OLDER = "{% set told = 'You have\\n' + functions %}{{ told }} on {{ datetime }}|{{ messages[0].content }}"


def test_a_template_may_queue_the_ids_of_calls() -> None:
    text = render_chat(QUEUE, CONVERSATION, "", "")
    assert text == '[user]Hi[assistant]<call>c1:{"n": 1}<call>c2:{"n": 2}[tool]for c1: one[tool]for c2: two'
    at = text.index("for c1") + 4
    assert set(text.origins[at : at + 2]) == {MESSAGE}  # what came from a message stays known as such
    assert [len(message.get("tool_calls", ())) for message in CONVERSATION] == [0, 2, 0, 0]


def test_lists_that_grow_are_ended_like_loops() -> None:
    for template in (
        "{% set x = [] %}{% for n in range(60000) %}{% set _ = x.append(n) %}{% endfor %}",
        "{% set x = [0] %}{% for n in x %}{% set _ = x.append(n) %}{% endfor %}",
    ):
        with pytest.raises(UserError, match="steps"):
            render_chat(template, [], "", "", most_steps=10000)


@pytest.mark.parametrize("way", ["x.extend(x)", "x.clear()", "{'a': 1}.update({'b': 2})", "messages[0].update({})"])
def test_other_changes_stay_forbidden(way) -> None:
    with pytest.raises(UserError):
        render_chat("{% set x = [1] %}{{ " + way + " }}", CONVERSATION, "", "")


def test_tools_have_their_older_name_where_a_template_asks_for_it() -> None:
    day = datetime.now().strftime("%b %d %Y")
    text = render_chat(OLDER, CONVERSATION[:1], "", "", tools=TOOLS)
    assert text.startswith('You have\n[\n  {\n    "type": "function"') and '"f<"' in text
    assert text.endswith(f" on {day}|Hi") and "ä" in text and takes_tools(OLDER)
    assert render_chat(OLDER, CONVERSATION[:1], "", "") == f"You have\n on {day}|Hi"
    loop = "{% for one in functions %}{{ one.function.name }};{% endfor %}"
    assert render_chat(loop, [], "", "", tools=TOOLS) == "f<;"
    assert render_chat(OLDER, CONVERSATION[:1], "", "", variables={"functions": "none", "datetime": "now"}).startswith(
        "You have\nnone on now"
    )
    assert not takes_tools("You have no functions. {{ messages[0].content }}")
