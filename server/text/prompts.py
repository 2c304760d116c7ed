"""Prompts: what a conversation or a text becomes in tokens. Slow for long texts: called off the event loop."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from pshard.errors import UserError
from pshard.models.text.tool_templates import takes_tools
from pshard.models.text.traced_text import TracedText, join_texts
from pshard.server.api.asks import ChatAsk, Gap, Message, Tool
from pshard.server.api.faults import Fault, bad_field, too_long
from pshard.server.text.formats import ENDS, HARMONY, THOUGHTS, ChatFormat, find_format
from pshard.server.text.turns import SHORT_IDS, answer_results, give_objects, rewrite_turns, shorten_ids, split_calls
from pshard.session.chat.conversation import PLAIN

if TYPE_CHECKING:
    from pshard.models.text.tokenizer import Tokenizer
    from pshard.server.snapshot import ServedModel

GAPS = (  # names of special tokens: before the prefix, before the suffix, before what fills the gap
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"), ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"), ("<PRE>", "<SUF>", "<MID>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)  # fmt: skip
GAP_ENDS = ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|endoftext|>", "<file_sep>", "<EOT>", "▁<EOT>")
FILE = "<|file_sep|>"
LIMIT = "chat template: it "  # begins what a template is told that does too much


@dataclass(frozen=True)
class Prompt:
    """Token ids, at least one. format: how to read the answer to a chat. ends: tokens that end the answer."""

    ids: tuple[int, ...]
    format: ChatFormat | None = None
    ends: frozenset[int] = frozenset()


class Prompts:
    """Makes prompts for one model."""

    def __init__(self, model: "ServedModel", most_steps: int) -> None:
        """most_steps: of a chat template."""
        self._model, self._most_steps = model, most_steps
        self._longest: int | None = None  # bytes of a token

    def prepare(self) -> None:
        """Work out now what is worked out once for all texts, in a process of which each request gets a copy."""
        if (tokenizer := self._model.tokenizer) is not None:
            self._measure_tokens(tokenizer)
            with suppress(UserError):  # requests that need it are told
                tokenizer.encode("a", parse_special=False)

    def of_text(self, text: str, where: str) -> Prompt:
        """A text to be continued. Raises Fault without a tokenizer, and where it does not fit the context."""
        tokenizer = self.find_tokenizer(where)
        self._check_length(len(text), where)
        ids = tokenizer.encode(text)
        if not ids and tokenizer.bos_id is not None:
            ids = [tokenizer.bos_id]
        if not ids:
            raise bad_field(where, "has no tokens; give a text")
        return self.of_ids(tuple(ids), where)

    @cached_property
    def gap_marks(self) -> tuple[int, int, int] | None:
        """Tokens before a gap's prefix, before its suffix and before what fills it; None for a model that has none."""
        if self._model.tokenizer is None:
            return None
        for names in GAPS:
            ids = [self._model.tokenizer.encode(name, add_special=False) for name in names]
            if all(len(found) == 1 for found in ids):
                return ids[0][0], ids[1][0], ids[2][0]
        return None

    def of_gap(self, gap: Gap, where: str) -> Prompt:
        """A gap between two texts, to be filled. Raises Fault for a model without marks of gaps, and where it does not
        fit the context."""
        tokenizer = self.find_tokenizer(where)
        if self.gap_marks is None:
            raise bad_field(where, "is not taken: this model continues text, it has no marks to fill gaps by")
        self._check_length(sum(map(len, (gap.before, gap.after, gap.begun))), where)
        mark_before, mark_after, mark_gap = self.gap_marks

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special=False, parse_special=False)

        ids = [token for token in tokenizer.encode("") if token == tokenizer.bos_id]
        file_mark = tokenizer.encode(FILE, add_special=False)
        for name, text in gap.files:  # as models read a repository whose last file has the gap
            ids += [*file_mark, *encode(f"{name}\n{text}\n")] if len(file_mark) == 1 else encode(f"{text}\n")
        ids += [mark_before, *encode(gap.before), mark_after, *encode(gap.after), mark_gap, *encode(gap.begun)]
        made = self.of_ids(tuple(ids), where)
        return replace(made, ends=made.ends | {*self.gap_marks} | self._find_ends(tokenizer, GAP_ENDS))

    def of_ids(self, ids: tuple[int, ...], where: str) -> Prompt:
        """Tokens to be continued. Raises Fault where they do not fit the context."""
        if len(ids) > self._model.context:
            raise self._too_long(where, len(ids))
        tokenizer = self._model.tokenizer
        return Prompt(ids, None, tokenizer.eos_ids if tokenizer else frozenset())

    def of_chat(self, ask: ChatAsk) -> Prompt:
        """A conversation, as the model's template writes it. Raises Fault for one that the template refuses, or that
        does not fit the context."""
        tokenizer = self.find_tokenizer(ask.where)
        self._check_length(sum(map(count_letters, ask.messages)), ask.where)
        text = self._render(ask)
        self._check_length(len(text), ask.where)  # with all that tools and calls are
        ids = tokenizer.encode_chat(text)
        if not ids:
            raise bad_field(ask.where, "make a prompt without tokens; say something")
        if len(ids) >= self._model.context:
            raise self._too_long(ask.where, len(ids))
        forced, guided = bool(ask.forced), ask.guided and not ask.forced
        format = find_format(self._model.template, text.forget(), ask.tools, forced, not ask.several, guided)
        return Prompt(tuple(ids), format, tokenizer.eos_ids | self._find_ends(tokenizer))

    def count_chat(self, ask: ChatAsk) -> list[int]:
        """All tokens of a conversation, whatever has room in the context. Raises Fault for one that the template
        refuses."""
        return self.find_tokenizer(ask.where).encode_chat(self._render(ask))

    def write_chat(self, ask: ChatAsk) -> str:
        """A conversation as the template writes it. Raises Fault for one that the template refuses."""
        self.find_tokenizer(ask.where)
        return self._render(ask).forget()

    def _render(self, ask: ChatAsk) -> TracedText:
        from pshard.models.text.chat import render_chat

        tokenizer, template = self._model.tokenizer, self._model.template or PLAIN
        assert tokenizer is not None
        messages, arguments = list(ask.messages), {**self._model.arguments, **ask.arguments}
        if not takes_tools(template):
            messages = describe_tools(messages, ask.tools)
        if guided := ask.guided:  # a grammar leaves no room to think
            arguments = {"enable_thinking": False} | arguments
        tools = [tool.as_template() for tool in ask.tools] or None

        def render(turns: list[Message]) -> TracedText:
            begin, end = tokenizer.bos_text, tokenizer.eos_text
            steps = self._most_steps
            return render_chat(template, turns, begin, end, tools=tools, variables=arguments, most_steps=steps)

        if SHORT_IDS in template:
            messages = shorten_ids(messages)
        try:
            text = self._try_ways(render, messages)
        except UserError as error:
            raise Fault(400, str(error), param=ask.where, code="template_error") from None
        return close_thinking(text) if guided else text

    @staticmethod
    def _try_ways(render: Callable[[list[Message]], TracedText], messages: list[Message]) -> TracedText:
        """The prompt, of the messages as they are or in another way that the template takes. Raises UserError: why it
        refuses them as they are."""
        try:
            return render(messages)
        except UserError as error:
            if LIMIT in str(error):  # it would be there again
                raise
            for turns in rewrite_turns(messages, (simplify_turns, split_calls, give_objects, answer_results)):
                with suppress(UserError):
                    return render(turns)
            raise

    def find_tokenizer(self, where: str) -> "Tokenizer":
        if self._model.tokenizer is None:
            raise bad_field(
                where,
                "cannot be text: the model file has no tokenizer that can be read; give token ids to /v1/completions",
            )
        return self._model.tokenizer

    def _check_length(self, letters: int, where: str) -> None:
        """Raises Fault for texts of so many letters that cannot fit, whatever their tokens are: encoding them might
        take long."""
        tokenizer, context = self.find_tokenizer(where), self._model.context
        if letters <= context:
            return
        longest = self._measure_tokens(tokenizer)
        if letters > context * longest:
            raise self._too_long(where, letters // longest, least=True)

    def _measure_tokens(self, tokenizer: "Tokenizer") -> int:
        if self._longest is None:
            self._longest = max(len(tokenizer.token_bytes(token)) for token in range(self._model.vocab)) + 32
        return self._longest

    def _too_long(self, where: str, tokens: int, least: bool = False) -> Fault:
        return too_long(where, tokens, self._model.context, self._model.trained, least)

    def _find_ends(self, tokenizer: "Tokenizer", names: tuple[str, ...] = ENDS) -> frozenset[int]:
        found = (tokenizer.encode(name, add_special=False) for name in names)
        return frozenset(ids[0] for ids in found if len(ids) == 1 and tokenizer.special_name(ids[0]) in names)


def count_letters(message: Message) -> int:
    """Letters of a message that every template writes: not the spaces around it, nor what was thought before it."""
    content: str = message["content"]
    if message["role"] == "assistant":
        content = content[max(content.rfind(end) + len(end) if end in content else 0 for end in THOUGHTS.values()) :]
    return len(content.strip())


def simplify_turns(messages: list[Message]) -> list[Message]:
    """The same conversation for templates that take a system at its beginning alone, and turns that alternate: what the
    system says later is said by the user, and messages of the user in a row are one."""
    turns: list[Message] = []
    for message in messages:
        role = message["role"]
        if role == "system" and any(turn["role"] != "system" for turn in turns):
            role = "user"
        if turns and turns[-1]["role"] == role and role in ("system", "user"):
            turns[-1] = turns[-1] | {"content": f"{turns[-1]['content']}\n\n{message['content']}"}
        else:
            turns.append(message | {"role": role})
    return turns


def describe_tools(messages: list[Message], tools: tuple[Tool, ...]) -> list[Message]:
    """The messages, for a template that says nothing of tools: the system tells of them, calls and their answers become
    text."""
    words = [_spell_message(message) for message in messages]
    if not tools:
        return words
    listed = "\n".join(json.dumps(tool.as_template()["function"], ensure_ascii=False) for tool in tools)
    told = (
        f"You can call these functions, one JSON object each:\n{listed}\n"
        'To call one, write <tool_call>{"name": ..., "arguments": {...}}</tool_call>.'
    )
    if words and words[0]["role"] == "system":
        return [{"role": "system", "content": f"{words[0]['content']}\n{told}"}, *words[1:]]
    return [{"role": "system", "content": told}, *words]


def _spell_message(message: Message) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>{message['content']}</tool_response>"}
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
    written = "".join(f"<tool_call>{call}</tool_call>" for call in calls)
    return {key: value for key, value in message.items() if key != "tool_calls"} | {
        "content": message["content"] + written
    }


def close_thinking(text: TracedText) -> TracedText:
    """A prompt after which the answer itself begins: an open tag of reasoning is closed, a channel is chosen."""
    end = next((end for begin, end in THOUGHTS.items() if text.rstrip().endswith(begin)), None)
    if end is not None:
        return join_texts([text, f"\n{end}\n\n"])
    if text.endswith("<|start|>assistant"):
        return join_texts([text, f"{HARMONY}final<|message|>"])
    return text
