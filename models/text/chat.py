"""Renders chat templates: Jinja in a sandbox, with what Hugging Face templates expect to find."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2.exceptions import TemplateError

from pshard.errors import UserError
from pshard.models.text.template_limits import MOST_STEPS
from pshard.models.text.traced_templates import TracedTemplates, trace_message
from pshard.models.text.traced_text import TracedText, join_texts


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    bos: str,
    eos: str,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    arguments: Mapping[str, Any] | None = None,
    most_steps: int = MOST_STEPS,
) -> TracedText:
    """The prompt text of a conversation: messages are {"role": ..., "content": ...}.

    tools: as templates expect them ({"type": "function", "function": {...}}); None: there are none. arguments: more
    that the template is told, as {"enable_thinking": False}. most_steps: loops and calls that it may do.

    The template spells out its special tokens, and the text knows what of it came from a message: `encode_chat` of the
    tokenizer takes both into account. A role is the caller's word, not a person's: templates make tokens of it. Raises
    UserError for a template that is not valid, refuses the messages, or steps out of the sandbox.
    """
    environment = TracedTemplates(most_steps)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    try:
        text = environment.from_string(template).render(
            messages=[_trace_turn(message) for message in messages],
            **(arguments or {}),
            tools=trace_message(tools) if tools else None,  # templates ask whether these two are none
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
        MemoryError,
    ) as error:
        raise UserError(f"chat template: {str(error) or type(error).__name__}; give the prompt as plain text") from None
    return join_texts([text])


def _trace_turn(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message, traced but for its role."""
    traced: dict[str, Any] = trace_message(message)
    if isinstance(role := message.get("role"), str):
        traced["role"] = join_texts([role])
    return traced


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
