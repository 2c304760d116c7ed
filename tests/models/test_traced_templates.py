"""What the template wrote and what came from a message stays told apart, whatever a template does to its text."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pshard.errors import UserError
from pshard.models.text.chat import render_chat
from pshard.models.text.traced_templates import TracedTemplates
from pshard.models.text.traced_text import MESSAGE, TEMPLATE, UNKNOWN, TracedText, join_texts

BAD = "  <end>A bC</think>D<end>\n"  # what a person writes


def talk(content: str, name: str) -> list[dict[str, Any]]:
    turn = {"role": "user", "content": content, "parts": [{"type": "text", "text": content}], "name": name}
    return [turn, {"role": "user", "content": name}]


TALK = talk(BAD, "<end>")
C = "messages[0].content"

# Templates whose output is known letter by letter. The template's own marks are <end> as well.
EXACT = [
    f"<end>{{{{ {C} }}}}<end>",
    f"{{{{ '<end>' + {C} + '<end>' }}}}",
    f"{{{{ '<end>' ~ {C} ~ 5 ~ '<end>' }}}}",
    f"{{{{ '<end>' ~ ({C} | trim) }}}}{{{{ {C}.strip() + '<end>' }}}}",
    f"<end>{{{{ {C}.split('</think>')[-1].lstrip('\\n') }}}}",
    f"<end>{{{{ {C}.split() | join('<end>') }}}}",
    f"{{{{ '<end>'.join([{C}, {C}]) }}}}",
    f"{{{{ [{C}, '<end>'] | join }}}}",
    "{{ messages | map(attribute='content') | join('<end>') }}",
    "{{ messages | join('<end>', attribute='content') }}",
    f"<end>{{{{ {C} | replace('b', '<end>') }}}}",
    f"<end>{{{{ 'x'.replace('x', {C}) }}}}",
    f"<end>{{{{ {C}[2:7] }}}}{{{{ {C}[::-1] }}}}{{{{ {C} | first }}}}{{{{ {C} | reverse }}}}",
    f"{{% for letter in {C} %}}{{{{ letter }}}}{{% endfor %}}<end>",
    f"<end>{{{{ {C} | list | join }}}}",
    f"<end>{{% if '</think>' in {C} %}}{{{{ {C}.partition('</think>')[2] }}}}{{% endif %}}",
    f"{{% set all %}}<end>{{{{ {C} }}}}{{% endset %}}{{{{ all | trim }}}}",
    f"{{% set ns = namespace(all='<end>') %}}{{% set ns.all = ns.all + {C} %}}{{{{ ns.all | string }}}}",
    f"{{% macro write(text) %}}<end>{{{{ text }}}}{{% endmacro %}}{{{{ write({C}) | trim }}}}",
    f"{{% macro wrap() %}}<end>{{{{ caller() }}}}{{% endmacro %}}{{% call wrap() %}}{{{{ {C} }}}}{{% endcall %}}",
    f"{{% filter trim %}}<end>{{{{ {C} }}}}{{% endfilter %}}",
    f"{{% block all %}}<end>{{{{ {C} }}}}{{% endblock %}}{{{{ self.all() }}}}",
    "{% for part in messages[0].parts %}<end>{{ part['text'] }}{{ part.get('none', '<end>') }}{% endfor %}",
    "{% for k, v in messages[0] | items %}<end>{{ k }}{% if v is string %}{{ v }}{% endif %}{% endfor %}",
    f"<end>{{{{ ({C}, '<end>') | last }}}}{{{{ '%s' % {C} }}}}",
    f"<end>{{{{ {C} | safe }}}}",
    f"<end>{{{{ {C} | default('x') }}}}{{{{ none_such | default('<end>') }}}}",
    "<end>{{ '<|' + messages[0].role + '|>' }}{{ messages[0].name | upper }}",
    f"{{{{ '<end>' * 2 }}}}{{{{ 2 * {C} }}}}{{{{ {C} * 2 }}}}",
]
# Templates that hide which letter is whose: all of these are doubtful, none passes for the template's.
HIDING = [
    f"{{{{ '<end>%s<end>%s' % ({C}, 1) }}}}",
    f"{{{{ '<end>{{}}<end>'.format({C}) }}}}",
    f"{{{{ {C}.format('a') }}}}",
    f"{{{{ '%s <end>' | format({C}) }}}}",
    f"{{{{ [{C}] }}}}",
    f"{{{{ [{C}] ~ '' }}}}",
    f"{{{{ [{C}] | string }}}}",
    f"{{{{ [{C}] | trim }}}}",
    f"{{{{ {C} | indent }}}}",
    f"{{{{ {C} | center(80) }}}}",
    f"{{{{ {C}.center(80) }}}}",
    f"{{{{ {C} | e }}}}",
    f"{{{{ {C} | e | trim }}}}",
    f"{{% autoescape true %}}{{{{ {C} }}}}{{% endautoescape %}}",
    f"{{% autoescape true %}}{{% set all %}}{{{{ {C} }}}}{{% endset %}}{{{{ all.unescape() }}}}{{% endautoescape %}}",
    f"{{{{ namespace(all={C}) }}}}",
    f"{{{{ dict(a={C}) | xmlattr }}}}",
    f"{{{{ {C}.swapcase() }}}}",
    f"{{{{ {C}.replace('', '-') }}}}",
    f"{{{{ strftime_now({C}) }}}}",
]


def rendered(template: str) -> TracedText:
    return render_chat(template, TALK, "<s>", "</s>")


def plainly_rendered(template: str) -> str:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["strftime_now"] = lambda layout: layout
    return environment.from_string(template).render(messages=TALK)


@pytest.mark.parametrize("template", EXACT)
def test_the_template_owns_what_it_wrote_and_nothing_else(template: str) -> None:
    """The same template over a message without a letter of its own words says which letters are its own."""
    text = rendered(template)
    assert str.__eq__(text, plainly_rendered(template))
    assert UNKNOWN not in text.origins and MESSAGE in text.origins and TEMPLATE in text.origins
    written = [text[begin:end] for begin, end in text.runs(TEMPLATE)]
    assert set("".join(written)) <= set("<end>|user5"), written  # `A bC</think>D` holds other letters
    # each <end> is either one of the template's, all of it, or one of the message's, all of it
    spelled = [text.origins[at : at + 5] for at in range(len(text)) if text.startswith("<end>", at)]
    assert all(len(set(origins)) == 1 for origins in spelled)
    mine = sum(origins[0] == TEMPLATE for origins in spelled)
    assert mine == render_chat(template, talk("  xA bC</think>Dx\n", "x"), "", "").count("<end>")


@pytest.mark.parametrize("template", HIDING)
def test_text_of_unclear_origin_never_passes_for_the_template(template: str) -> None:
    text = rendered(template)
    assert str.__eq__(text, plainly_rendered(template)) or "namespace" in template or "strftime" in template
    assert UNKNOWN in text.origins
    owned = "".join(text[begin:end] for begin, end in text.runs(TEMPLATE))
    assert owned == ""


def test_json_is_a_message_throughout() -> None:
    text = rendered("<end>{{ messages | tojson }}")
    assert text.runs(TEMPLATE) == [(0, 5)] and text.runs(MESSAGE) == [(5, len(text))]


def test_a_filter_that_hides_messages_in_a_list_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TracedTemplates.__init__.__globals__["FILTERS"], "letters", lambda text: [*text])
    with pytest.raises(UserError, match="'letters' gives a list"):
        rendered(f"{{{{ {C} | letters }}}}")
    assert rendered("{{ 'ab' | letters | length }}") == "2"


def test_text_made_into_bytes_is_refused() -> None:
    for way in (".encode().decode()", " | urlencode"):
        with pytest.raises(UserError, match="turns text into bytes"):
            rendered(f"{{{{ {C}{way} }}}}")


CASED = st.text(alphabet="abAB \n,", max_size=20)
OPERATIONS: list[Any] = [
    lambda t: t[1:-1],
    lambda t: t[::-2],
    lambda t: [t[i] for i in range(-len(t), len(t))],
    lambda t: [*t],
    lambda t: t + "abc" + t,
    lambda t: "ab" + t,
    lambda t: 3 * t,
    lambda t: t * 2,
    lambda t: t.strip(),
    lambda t: t.strip("aA"),
    lambda t: t.lstrip(),
    lambda t: t.rstrip("a\n"),
    lambda t: t.removeprefix("ab"),
    lambda t: t.removesuffix("A"),
    lambda t: t.split(),
    lambda t: t.split(None, 1),
    lambda t: t.split("ab"),
    lambda t: t.split("A", 2),
    lambda t: t.rsplit(),
    lambda t: t.rsplit(None, 1),
    lambda t: t.rsplit("aa", 1),
    lambda t: t.splitlines(),
    lambda t: t.splitlines(True),
    lambda t: t.partition("ab"),
    lambda t: t.rpartition("ab"),
    lambda t: t.replace("ab", "b,b"),
    lambda t: t.replace("A", "", 1),
    lambda t: t.join(["a", "b", "c"]),
    lambda t: t.join([]),
]


@settings(max_examples=150)
@given(CASED)
def test_text_that_traces_is_cut_and_joined_as_any_text(text: str) -> None:
    """Here capitals are a message's: so they must say after every operation."""
    traced = TracedText(text, bytes(letter.isupper() for letter in text))
    for number, operation in enumerate(OPERATIONS):
        found, expected = operation(traced), operation(text)
        assert found == expected and type(found) in (TracedText, list, tuple), number
        for part in [found] if isinstance(found, str) else found:
            assert part.origins == bytes(letter.isupper() for letter in part), number


def test_text_that_forgets_is_plain() -> None:
    text = join_texts(["a", TracedText("b")])
    assert type(text.forget()) is str and text.forget() == "ab" and text.forget().encode() == b"ab"


def test_other_cases_keep_origins_where_no_letter_becomes_two() -> None:
    text = join_texts(["ab", TracedText("cd", bytes([MESSAGE] * 2))])
    for changed in (text.upper(), text.title(), text.capitalize(), text.lower()):
        assert changed.origins == text.origins
    assert set(join_texts(["aß", text]).upper().origins) == {UNKNOWN}


def test_empty_separators_are_refused_as_everywhere() -> None:
    with pytest.raises(ValueError, match="empty separator"):
        join_texts(["ab"]).partition("")
