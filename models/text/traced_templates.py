"""Jinja templates in a sandbox whose output says what the template wrote and what came from a message.

All that a template does to text passes the output, `~`, a filter, a call or `%`, or is a method of TracedText. Each
keeps origins or says UNKNOWN, so that no text of a message ever counts as the template's.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from typing import Any

from jinja2 import Environment, Undefined, nodes, pass_context, pass_environment
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.nodes import EvalContext
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from pshard.models.text.template_growth import TURNING, check_formatted, check_growth, check_joined, check_written
from pshard.models.text.template_limits import (
    LONGEST_TEXT,
    Steps,
    check_layout,
    check_operator,
    check_widths,
)
from pshard.models.text.traced_text import MESSAGE, TracedText, join_texts

# fmt: off
_CHOOSING = (  # these filters give what they got, or things that were in it
    "attr", "batch", "d", "default", "dictsort", "first", "groupby", "items", "last", "list", "map", "max", "min",
    "random", "reject", "rejectattr", "reverse", "select", "selectattr", "slice", "sort", "sum", "unique",
)
# fmt: on
_CHANGING = ("capitalize", "lower", "trim", "upper")  # and these what TracedText's own method makes of it

COUNTED = "counted turns"  # a filter that no template can name
_LISTS = ("append", "pop")  # methods by which templates keep lists; what they are given is a copy
_VARIABLES = ("_loop_vars", "_block_vars")  # Jinja adds these to a call: the names in force around it


class GenerationBlocks(Extension):
    """{% generation %} marks what the assistant said, for training; here it is plain text."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Any) -> nodes.Node:
        """The statements up to {% endgeneration %}, as if there were no mark; what they set ends with them."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _TracedCode(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """`a ~ b` joins as the output does."""
        self.write("environment.concat(map(environment.finalize, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")


class TracedTemplates(ImmutableSandboxedEnvironment):
    """Templates that render to TracedText. Of what is rendered with, each plain str counts as the template's own."""

    code_generator_class = _TracedCode
    intercepted_binops = frozenset(["%", "*", "**", "+"])  # of which results may be huge, or hide who wrote them

    def __init__(self) -> None:
        self.steps = Steps()
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlocks], finalize=self._write
        )
        traced: dict[str, Callable[..., Any]] = {name: _guard_filter(name, filter) for name, filter in FILTERS.items()}
        traced |= {"join": _join, "replace": _replace, "string": write_text, "safe": write_text}
        traced |= {"sum": _sum, "tojson": _to_json_text}
        counted = {name: _count_filter(name, filter, self.steps) for name, filter in traced.items()}
        self.filters = {**counted, COUNTED: self.steps.count}
        del self.globals["lipsum"]

    def concat(self, parts: Iterable[str]) -> TracedText:  # type: ignore[override]
        """The parts of an output as one text."""
        texts = list(parts)
        if sum(map(len, texts)) > LONGEST_TEXT:
            raise SecurityError("it makes a text beyond all use")
        text = join_texts(texts)
        self.steps.take(text)
        return text

    def _write(self, value: Any) -> str:
        text = write_text(value)
        self.steps.take(text)
        return text

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """The template's tree; each turn of its loops is a step."""
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, COUNTED, [], [], None, None, lineno=loop.lineno)
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Also the methods by which templates queue ids of calls: the list is a copy, and each call is a step."""
        return (type(obj) is list and attr in _LISTS) or super().is_safe_attribute(obj, attr, value)

    def call(self, context: Context, function: Any, /, *args: Any, **settings: Any) -> Any:
        """What the function gives; text of a plain function or method is UNKNOWN where a message may be in it."""
        given = [*args, *(value for name, value in settings.items() if name not in _VARIABLES)]
        owner, plain = getattr(function, "__self__", None), _are_plain(given)
        check_widths(given)
        args = self._check_method(function, args, {n: v for n, v in settings.items() if n not in _VARIABLES})
        if type(owner) is str and not plain:  # " ".join(contents): text that traces does the same
            function = getattr(join_texts([owner]), function.__name__)
        result = super().call(context, function, *args, **settings)
        self.steps.take(result, pieces=isinstance(owner, str | bytes))
        return result if plain and (type(owner) is str or not isinstance(owner, str)) else _doubt(result)

    def _check_method(self, function: Any, given: tuple[Any, ...], settings: Mapping[str, Any]) -> tuple[Any, ...]:
        """What a method of text is given, each item of it there. Raises SecurityError where too much may come of it."""
        formatter = getattr(getattr(function, "__wrapped__", None), "__self__", None)  # the sandbox's text.format
        if isinstance(formatter, str):
            check_layout(formatter)
            check_formatted(formatter, [*given, *settings.values()])
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if isinstance(owner, str | bytes) and name == "join" and len(given) == 1:
            check_growth(name, [given[0], owner], settings)
            parts = given[0] if isinstance(given[0], list | tuple) else [*self.steps.count_lightly(given[0])]
            check_joined(parts, owner)
            return (parts,)
        if isinstance(owner, str | bytes) or name == "maketrans":
            check_growth(name, [owner, *given], settings)
        return given

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """`left % right`, and other operators whose result may be huge."""
        check_operator(operator, left, right)
        if operator == "%" and isinstance(left, str | bytes):
            check_formatted(left if isinstance(left, str) else left.decode("latin-1"), [right])
        result = super().call_binop(context, operator, left, right)
        self.steps.take(result)
        if operator != "%":
            return result
        return result if _are_plain([left, right]) else _doubt(result)


def trace_message(value: Any) -> Any:
    """A message, or a part of one, with all its texts as TracedText."""
    if isinstance(value, str):
        return TracedText(value, bytes([MESSAGE]) * len(value))
    if isinstance(value, Mapping):
        return {trace_message(key): trace_message(item) for key, item in value.items()}
    return [trace_message(item) for item in value] if isinstance(value, list | tuple) else value


def write_text(value: Any) -> str:
    """What Jinja writes for a value. Only text and numbers have known origins: a list shows what is in it."""
    if isinstance(value, TracedText) or type(value) is str:
        return value
    check_written(value)
    return str(value) if _are_plain([value]) else TracedText(str(value))


def _are_plain(values: Iterable[Any]) -> bool:
    """Whether there is no text in the values that a message may have brought."""
    plain = (int, float, Undefined, Environment, Context, EvalContext)
    return all(value is None or type(value) is str or isinstance(value, plain) for value in values)


def _doubt(result: Any) -> Any:
    """The result; text that does not know its origins is UNKNOWN."""
    return TracedText(result) if isinstance(result, str) and not isinstance(result, TracedText) else result


def _guard_filter(name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
    """The filter; its text is UNKNOWN where a message may be in it and nobody can say where."""

    @wraps(filter)
    def guarded(*args: Any, **settings: Any) -> Any:
        result = filter(*args, **settings)
        if name in _CHOOSING or result is None or isinstance(result, int | float):
            return result
        if _are_plain([*args, *settings.values()]):
            return result
        if isinstance(result, str):
            return _doubt(result) if name in _CHANGING else TracedText("".join([result]))
        raise TypeError(f"the filter {name!r} gives a {type(result).__name__}, in which messages cannot be told apart")

    return guarded


def _count_filter(name: str, filter: Callable[..., Any], steps: Steps) -> Callable[..., Any]:
    """The filter, each use of which is a step."""

    @wraps(filter)
    def counted(*args: Any, **settings: Any) -> Any:
        check_widths([*args, *settings.values()])
        at = 1 if args and isinstance(args[0], Environment | Context | EvalContext) else 0  # before what it works on
        if len(args) > at:
            if name == "format":
                check_layout(args[at])
                check_formatted(write_text(args[at]), [*args[at + 1 :], *settings.values()])
            check_growth(name, args[at:], settings)
            if name in TURNING and isinstance(args[at], Iterator):
                args = (*args[:at], steps.count_lightly(args[at]), *args[at + 1 :])
        result = filter(*args, **settings)
        steps.take(result, pieces=len(args) > at and isinstance(args[at], str | bytes))
        return result

    return counted


@pass_environment
def _join(environment: Environment, value: Iterable[Any], d: Any = "", attribute: str | int | None = None) -> str:
    parts = value if attribute is None else map(make_attrgetter(environment, attribute), value)
    between, texts, left = join_texts([write_text(d)]), list[str](), LONGEST_TEXT
    for part in parts:
        texts.append(write_text(part))
        left -= len(texts[-1]) + len(between)
        if left < 0:
            raise SecurityError("it joins a text beyond all use")
    return between.join(texts)


def _replace(s: Any, old: Any, new: Any, count: int | None = None) -> str:
    return join_texts([write_text(s)]).replace(write_text(old), write_text(new), -1 if count is None else count)


@pass_context
def _sum(context: Context, iterable: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
    """As Jinja's, one operator after another: lists add up too."""
    if isinstance(start, str | bytes):
        raise TypeError("sum adds numbers and lists; use join for text")
    environment = context.environment
    assert isinstance(environment, TracedTemplates)
    for item in iterable if attribute is None else map(make_attrgetter(environment, attribute), iterable):
        start = environment.call_binop(context, "+", start, item)
    return start


def _to_json_text(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Unlike Jinja's own filter: no HTML escapes, and letters beyond ASCII stay. Named as templates name them.

    It counts as a message throughout: what it adds are the brackets and quotes of JSON.
    """
    text = json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return trace_message(text)
