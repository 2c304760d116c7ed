"""Chat templates come to an end, whatever they are; calls of the tokenizer leave stderr as it was, from any thread."""

import os
import threading
import tracemalloc

import pytest

from pshard.errors import UserError
from pshard.models.text.chat import render_chat
from pshard.models.text.library_calls import name_failures

HI = [{"role": "user", "content": "hi"}]
MACRO = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}"
DOUBLE = "{% set ns = namespace(x='aaaa') %}{% for i in range(60) %}{% set ns.x = ns.x OP ns.x %}{% endfor %}"
ENDLESS = {
    "loops": "{% for i in range(60000) %}{% for j in range(60000) %}{% endfor %}{% endfor %}",
    "filters": "{% for i in range(60000) %}{{ range(60000) | list | length }}{% endfor %}",
    "calls": MACRO,
    "repeat": "{{ 'a' * 10 ** 10 }}",
    "double": DOUBLE.replace("OP", "+"),
    "join": DOUBLE.replace("OP", "~"),
    "pad": "{{ 'a' | center(9999999999) }}",
    "width": "{{ '%999999999d' % 1 }}",
    "star": "{{ '%*d' % (999999999, 1) }}",
    "format": "{{ '{:>999999999}'.format(1) }}",
    "power": "{{ 10 ** 64 ** 64 }}",
    "square": "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "words": "{{ lipsum(60000) }}",
}
LONG, MANY, TIMES = (
    "('x'*60000)",
    "(['x'*60000]*60000)",
    "{% for i in range(24) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
)
KEEP = "{%% set ns = namespace(l=[]) %%}{%% for i in range(60000) %%}{%% set ns.l = ns.l + [%s] %%}{%% endfor %%}"
GROWING = {
    "replace": f"{{{{ {LONG}|replace('x', 'y'*60000) }}}}",
    "replace method": f"{{{{ {LONG}.replace('x', 'y'*60000) }}}}",
    "message": "{{ (messages[0].content * 30000).replace('h', 'y'*60000) }}",
    "join": f"{{{{ {MANY}|join }}}}",
    "join method": f"{{{{ ''.join({MANY}) }}}}",
    "join by letters": f"{{{{ {LONG}.join('y'*60000) }}}}",
    "join of attributes": "{{ ([{'a': 'x'*60000}]*60000)|join(attribute='a') }}",
    "translate": f"{{{{ {LONG}.translate({{120: 'y'*60000}}) }}}}",
    "expandtabs": "{{ ('\\t'*60000).expandtabs(60000) }}",
    "written": f"{{{{ {MANY} }}}}",
    "nested": "{{ [[1]*60000]*60000 }}",
    "joined by ~": "{{ '' ~ [[1]*60000]*60000 }}",
    "upper": "{{ ([[1]*60000]*60000)|upper }}",
    "namespace": f"{{% set ns = namespace(a={MANY}) %}}{{{{ ns }}}}",
    "sum": "{{ ([[0]*60000]*60000)|sum(start=[])|length }}",
    "json": "{{ ([1]*60000)|tojson(indent=60000) }}",
    "json separators": f"{{{{ ([1]*60000)|tojson(separators=({LONG}, 'y')) }}}}",
    "%": f"{{{{ ('%s'*30000) % (({LONG},)*30000) }}}}",
    "widths": "{{ ('%99999d'*9000) % ((1,)*9000) }}",
    "format": f"{{{{ ('{{0}}'*20000).format({LONG}) }}}}",
    "format_map": f"{{{{ ('{{a}}'*20000).format_map({{'a': {LONG}}}) }}}}",
    "width in text": "{{ '{:{}}'.format(1, '999999999') }}",
    "format filter": f"{{{{ ('%s'*30000)|format(*([{LONG}]*30000)) }}}}",
    "indent": "{{ ('\\n'*60000)|indent(60000) }}",
    "wordwrap": f"{{{{ ('x '*30000)|wordwrap(1, wrapstring={LONG}) }}}}",
    "urlize": f"{{{{ ('http://a.de '*5000)|urlize(target={LONG}) }}}}",
    "xmlattr": f"{{{{ {{'a': {MANY}}}|xmlattr }}}}",
    "pprint": f"{{{{ {MANY}|pprint }}}}",
    "date": "{{ strftime_now('%60000d'*9000) }}",
    "letters": f"{{% set ns = namespace(x='aa') %}}{TIMES}{{{{ ns.x|list|length }}}}",
    "pieces": f"{{% set ns = namespace(x='a,') %}}{TIMES}{{{{ ns.x.split(',')|length }}}}",
    "lists that stay": KEEP % "('x,'*30000).split(',')",
    "letters that stay": KEEP % "('x'*60000)|select|list",
    "numbers that stay": KEEP % "range(60000)|list",
    "blocks": KEEP.replace("{%% set ns.l", "{%% set x %%}" + "x" * 100_000 + "{%% endset %%}{%% set ns.l") % "x",
}
SLOW = ("json separators", "format filter", "upper", "letters that stay", "joined by ~")  # refused where another is
RAISING = {
    "loops": "{% for i in [1] %}" * 100 + "{% endfor %}" * 100,
    "conditions": "{% if 1 %}" * 100 + "{% endif %}" * 100,
    "brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "sum": "{{ 1" + "+1" * 20_000 + " }}",
    "cycler": "{{ cycler() }}",
    "file": "{% include 'a' %}",
}


@pytest.mark.quick(*(name for name in GROWING if name not in SLOW))
@pytest.mark.parametrize("template", GROWING.values(), ids=GROWING)
def test_a_template_is_refused_before_it_has_made_gigabytes(template) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match="chat template: "):
            render_chat(template, HI, "", "", most_steps=50_000)
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("template", RAISING.values(), ids=RAISING)
def test_whatever_a_template_raises_is_one_line(template) -> None:
    with pytest.raises(UserError, match="chat template: "):
        render_chat(template, HI, "", "")


def test_what_templates_do_to_long_messages_is_allowed() -> None:
    text = "A line of some length, and <b>marks</b>.\n" * 20_000  # as much as a request may bring
    template = """{%- for m in messages -%}{%- set c = m.content | trim -%}
        {{- c.replace('<b>', '**') | replace('</b>', '**') }}{{ c.split('</think>')[-1] }}{{ c.splitlines() | length }}
        {{- c | tojson }}{{ [c] | tojson(indent=4) }}{{ c | indent(4) | length }}{{ c | upper | length }}
        {{- '%s' % c }}{{ '{}'.format(c) | length }}{{ ' '.join([c, c]) }}{{ [[1], [2, 3]] | sum(start=[]) }}
        {{- messages | map(attribute='content') | join }}{{ c.split() | length }}
    {%- endfor -%}"""
    made = render_chat(template, [{"role": "user", "content": text}], "", "")
    assert (
        len(made) > 5 * len(text) and made.startswith("A line of some length, and **marks**.") and "[1, 2, 3]" in made
    )


def test_replacing_keeps_who_wrote_each_letter() -> None:
    made = render_chat(
        "{{ messages[0].content.replace('hi', '<end>', 2) }}", [{"role": "user", "content": "hi,hi;hi"}], "", ""
    )
    assert made == "<end>,<end>;hi" and made.origins == bytes([0] * 5 + [1] + [0] * 5 + [1, 1, 1])


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_a_template_that_never_ends_or_grows_beyond_use_is_refused(template) -> None:
    with pytest.raises(UserError, match="chat template: "):
        render_chat(template, HI, "", "", most_steps=50_000)


def test_loops_know_where_they_are() -> None:
    template = "{% for i in 'abc' %}{{ i }}{{ loop.index }}/{{ loop.length }}{{ ';' if not loop.last }}{% endfor %}"
    assert render_chat(template, HI, "", "") == "a1/3;b2/3;c3/3"


def test_steps_are_counted_for_each_conversation_anew() -> None:
    template = "{% for m in messages %}{% for i in range(900) %}{% endfor %}{{ m.content }}{% endfor %}"
    for _ in range(3):
        assert render_chat(template, HI, "", "", most_steps=1000) == "hi"


def test_threads_in_the_tokenizer_leave_stderr_as_it_was() -> None:
    before = os.fstat(2)
    first_in, both_in = threading.Event(), threading.Event()

    def call_first() -> None:
        with name_failures("it failed"):
            first_in.set()
            both_in.wait(60)

    thread = threading.Thread(target=call_first)
    thread.start()
    first_in.wait(60)
    with name_failures("it failed"):
        both_in.set()
        thread.join(60)  # the first one leaves while the second is within
    after = os.fstat(2)
    assert (after.st_dev, after.st_ino) == (before.st_dev, before.st_ino)
