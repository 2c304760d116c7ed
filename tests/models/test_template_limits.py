"""Chat templates come to an end, whatever they are; calls of the tokenizer leave stderr as it was, from any thread."""

import os
import threading

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
            both_in.wait(10)

    thread = threading.Thread(target=call_first)
    thread.start()
    first_in.wait(10)
    with name_failures("it failed"):
        both_in.set()
        thread.join(10)  # the first one leaves while the second is within
    after = os.fstat(2)
    assert (after.st_dev, after.st_ino) == (before.st_dev, before.st_ino)
