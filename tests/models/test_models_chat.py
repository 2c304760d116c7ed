"""Chat templates render as transformers renders them, in a sandbox, and a bad one is one line."""

import json

import pytest

from pshard.errors import UserError
from pshard.models.text.chat import render_chat

CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA2 = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate') }}
{% endif %}
{% if message['role'] == 'user' %}[INST] {{ message['content'] | trim }} [/INST]{% else %}
 {{ message['content'] }}{{ eos_token }}{% endif %}
{% endfor %}{% if tools is not none %}{{ tools | tojson }}{% endif %}"""
TALK = [
    {"role": "user", "content": "  Grüße & <b>?  "},
    {"role": "assistant", "content": "Hallo"},
    {"role": "user", "content": "Mehr"},
]


MARKED = """{% for message in messages %}{% if message.role == 'assistant' %}
{% generation %}
  {{ message.content }}{{ eos_token }}
{% endgeneration %}
{% else %}{{ message.content }}{% continue %}{% endif %}!
{% endfor %}"""


@pytest.mark.parametrize("template", [CHATML, LLAMA2, MARKED])
@pytest.mark.parametrize("prompt", [True, False])
def test_rendering_equals_transformers(template: str, prompt: bool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    (expected,), _ = render_jinja_template(
        [TALK], chat_template=template, add_generation_prompt=prompt, bos_token="<s>", eos_token="</s>"
    )
    assert render_chat(template, TALK, "<s>", "</s>", add_generation_prompt=prompt) == expected


def test_json_keeps_letters_and_angle_brackets() -> None:
    assert render_chat("{{ messages[0].content | tojson }}", TALK, "", "") == json.dumps(
        TALK[0]["content"], ensure_ascii=False
    )
    assert render_chat("{{ {'a': 1} | tojson(indent=2) }}", TALK, "", "") == '{\n  "a": 1\n}'


def test_the_date_of_today_can_be_asked() -> None:
    assert render_chat("{{ strftime_now('%Y') }}", TALK, "", "").isdigit()


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% if %}", "chat template"),
        ("{{ raise_exception('system role not supported') }}", "system role not supported"),
        ("{{ messages.clear() }}", "chat template"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "chat template"),
        ("{{ messages[0].content + 1 }}", "chat template"),
        ("{{ 1 // 0 }}", "chat template"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "recursion"),
    ],
)
def test_a_bad_template_is_a_user_error(template: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        render_chat(template, TALK, "<s>", "</s>")
