"""Renders chat templates: Jinja in a sandbox, with what Hugging Face templates expect to find."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pshard.errors import UserError


class GenerationBlocks(Extension):
    """{% generation %} marks what the assistant said, for training; here it is plain text."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Any) -> Any:
        """The statements up to {% endgeneration %}, as if there were no mark."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    bos: str,
    eos: str,
    add_generation_prompt: bool = True,
) -> str:
    """The prompt text of a conversation: messages are {"role": ..., "content": ...}.

    The text spells out its special tokens: encode it with `add_special=False`. Raises UserError for a template that
    is not valid, refuses the messages, or steps out of the sandbox.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlocks]
    )
    environment.filters["tojson"] = _to_json_text
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    try:
        return environment.from_string(template).render(
            messages=list(messages),
            tools=None,  # templates ask whether these two are none
            documents=None,
            bos_token=bos,
            eos_token=eos,
            add_generation_prompt=add_generation_prompt,
        )
    except (
        TemplateError,
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise UserError(f"chat template: {str(error) or type(error).__name__}; give the prompt as plain text") from None


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json_text(value: Any, ensure_ascii: bool = False, **settings: Any) -> str:
    """Unlike Jinja's own filter: no HTML escapes, and letters beyond ASCII stay. Templates set indent and others."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **settings)
