"""Renders chat templates: Jinja in a sandbox, with what Hugging Face templates expect to find."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template
from jinja2.exceptions import SecurityError, TemplateError

from pshard.errors import UserError
from pshard.models.text.template_limits import MOST_STEPS, Steps
from pshard.models.text.tool_templates import give_functions
from pshard.models.text.traced_templates import TracedTemplates, trace_message
from pshard.models.text.traced_text import TracedText, join_texts

LONGEST_LAYOUT = 1 << 12  # of a date
THOUGHT_NAMES = ("reasoning_content", "thinking", "reasoning")  # as transformers 5 finds it; the first stands for all


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    bos: str,
    eos: str,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    most_steps: int = MOST_STEPS,
) -> TracedText:
    """The prompt text of a conversation: messages are {"role": ..., "content": ...}, with what else templates read:
    tool_calls, reasoning_content.

    The template spells out its special tokens, and the text knows what of it came from a message: `encode_chat` of the
    tokenizer takes both into account. A role is the caller's word, not a person's: templates make tokens of it. Tools
    (JSON schemas), documents and variables (whatever else a template knows, as enable_thinking or reasoning_effort)
    count as messages. Templates that take tools as `functions` get them so. Raises UserError for a template that is not
    valid, refuses the messages, steps out of the sandbox or takes more than `most_steps` loops and calls, and for a
    variable that has the name of another argument.
    """
    given = {
        "messages": [_trace_turn(message) for message in messages],
        "tools": trace_message(tools),  # templates ask whether these two are none
        "documents": trace_message(documents),
        "bos_token": bos,
        "eos_token": eos,
        "add_generation_prompt": add_generation_prompt,
    }
    if taken := sorted(given.keys() & (variables or {}).keys()):
        raise UserError(f"chat template: {taken[0]} is given already; give a variable of the template another name")
    try:
        compiled = _compile(template)
        steps: Steps = compiled.environment.steps  # type: ignore[attr-defined]
        steps.begin(most_steps)
        others = {**give_functions(template, tools), **(variables or {})}
        text = compiled.render(trace_message(others) | given)
    except Exception as error:  # a template is a stranger's program: it may raise whatever Jinja and Python have
        raise UserError(f"chat template: {str(error) or type(error).__name__}; give the prompt as plain text") from None
    return join_texts([text])


@lru_cache(maxsize=8)  # a conversation renders the same one again and again
def _compile(template: str) -> Template:
    environment = TracedTemplates()
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _tell_time
    return environment.from_string(template)


def _trace_turn(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message, traced but for its role. What the model thought has all its names: templates read one of them."""
    traced: dict[str, Any] = trace_message(message)
    thought = next((traced[name] for name in THOUGHT_NAMES if traced.get(name) is not None), None)
    if thought is not None:
        traced = {"thinking": thought, **traced, "reasoning_content": thought}
    if isinstance(role := message.get("role"), str):
        traced["role"] = join_texts([role])
    return traced


def _tell_time(layout: str) -> str:
    if len(layout) > LONGEST_LAYOUT:
        raise SecurityError(f"it gives strftime_now more than {LONGEST_LAYOUT} letters")
    return datetime.now().strftime(layout)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
