"""What a request asks for, whichever of the interfaces it came by."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pshard.runtime.sampling import Sampling

Message = dict[str, Any]


@dataclass(frozen=True)
class Generation:
    """How answers are made. most: tokens of each, None: as many as the context has room for. stops: texts that end it
    and are no part of it. choices: answers to each prompt. likely: so many likeliest tokens are told beside each token;
    None: no log-probabilities. ignore_end: go on past the end of the text. drafts: of a step at most, None: as the plan
    has them."""

    most: int | None
    sampling: "Sampling"
    stops: tuple[str, ...] = ()
    choices: int = 1
    likely: int | None = None
    ignore_end: bool = False
    drafts: int | None = None


@dataclass(frozen=True)
class Answering:
    """How answers are told. stream: as they are made; usage: counts at the end of the stream; ids: the tokens too."""

    stream: bool = False
    usage: bool = False
    ids: bool = False


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. parameters: JSON schema of its arguments. custom: the client knows it as one
    that takes a text, which is the argument `input`. space: the namespace that the name begins with, for clients that
    tell it apart. where: the field that has the schema, for errors."""

    name: str
    description: str
    parameters: dict[str, Any]
    custom: bool = False
    space: str = ""
    where: str = ""

    @property
    def own_name(self) -> str:
        """The name within its namespace."""
        return self.name[len(self.name_in(self.space, "")) :]

    @staticmethod
    def name_in(space: str, name: str) -> str:
        """What the model calls a tool of a namespace; "" is none."""
        return f"{space}{'' if not space or space.endswith('__') else '__'}{name}"

    def as_template(self) -> dict[str, Any]:
        """As chat templates expect it."""
        words = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": words}


@dataclass(frozen=True)
class Rule:
    """What an answer follows besides JSON schemas. kind: "grammar" (GBNF or Lark), "regex", which all of it matches, or
    "choice": it is one of several texts. where: the field that has it, for errors."""

    kind: str
    value: str | tuple[str, ...]
    where: str


@dataclass(frozen=True)
class ChatAsk:
    """A conversation to be continued.

    messages: as chat templates expect them. choice: "none", "auto", "required", or ("name",) of the tool that has to be
    called. several: an answer may have more than one call. schema: a JSON schema that an answer without calls follows;
    rule: what else it follows, where there are no tools.
    arguments: of the template. where and format: the fields that have the conversation and the schema, for errors.
    """

    messages: tuple[Message, ...]
    generation: Generation
    answering: Answering
    tools: tuple[Tool, ...] = ()
    choice: str | tuple[str] = "none"
    several: bool = True
    schema: dict[str, Any] | None = None
    rule: Rule | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    where: str = "messages"
    format: str = "response_format"

    @property
    def forced(self) -> tuple[Tool, ...]:
        """Tools of which at least one has to be called; none: the model is free."""
        if isinstance(self.choice, tuple):
            return tuple(tool for tool in self.tools if (tool.name,) == self.choice)
        return self.tools if self.choice == "required" else ()

    @property
    def guided(self) -> bool:
        """Whether a grammar says what the answer may be, all of it."""
        return bool(self.forced) or self.schema is not None or self.rule is not None


@dataclass(frozen=True)
class CompletionAsk:
    """Prompts to be continued: texts or token ids. echo: the prompt is part of the answer. suffix: what comes after the
    gap behind the only prompt."""

    prompts: tuple[str | tuple[int, ...], ...]
    generation: Generation
    answering: Answering
    echo: bool = False
    schema: dict[str, Any] | None = None
    rule: Rule | None = None
    format: str = "response_format"
    suffix: str = ""


@dataclass(frozen=True)
class Gap:
    """A gap to be filled: what is before it and after it, how its filling begins, and other files by their names."""

    before: str
    after: str
    begun: str = ""
    files: tuple[tuple[str, str], ...] = ()
