"""Requests to /v1/completions."""

from typing import Any

from pshard.runtime.sampling import Sampling
from pshard.server.api.asks import Answering, CompletionAsk, Generation
from pshard.server.api.faults import Fault, bad_field
from pshard.server.api.limits import Limits
from pshard.server.api.tables.fields import ByType, Field, Flag, Items, Table, Text, Whole, read_fields
from pshard.server.api.tables.other_names import refuse_others
from pshard.server.api.tables.rule_fields import read_rules
from pshard.server.api.tables.sampling_fields import (
    MOST_TOKENS,
    Most,
    read_sampling,
    read_stops,
    sampling_table,
    speculative_field,
)

USUAL_MOST = 16  # as OpenAI has it


class _Prompt:
    """A text, or token ids."""

    def __init__(self, vocab: int, letters: int) -> None:
        self._id, self._text = Whole(0, vocab - 1), Text(letters)

    def read(self, value: Any, where: str) -> str | tuple[int, ...]:
        if isinstance(value, str):
            return self._text.read(value, where)
        return Items(self._id, MOST_TOKENS, 1).read(value, where)

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [self._text.schema(), Items(self._id, MOST_TOKENS, 1).schema()]}


class _Prompts:
    """A text, a list of texts, token ids, or a list of lists of them: always read as a tuple of prompts."""

    def __init__(self, vocab: int, limits: Limits) -> None:
        self._one, self._most = _Prompt(vocab, limits.body), limits.prompts

    def read(self, value: Any, where: str) -> tuple[str | tuple[int, ...], ...]:
        if isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], int | float)):
            return (self._one.read(value, where),)
        if not isinstance(value, list):
            raise bad_field(where, "is a text, a list of texts, token ids, or a list of lists of token ids")
        return Items(self._one, self._most, 1).read(value, where)

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [self._one.schema(), Items(self._one, self._most, 1).schema()]}


def completion_table(limits: Limits, vocab: int) -> Table:
    """Fields of a request to /v1/completions."""
    refuse_more = ByType((("number", Whole(1, limits.choices)),), "a whole number")
    return (
        Field("model", Text(256), ""),
        Field("prompt", _Prompts(vocab, limits), needed=True),
        Field("max_tokens", Most(0), USUAL_MOST, "0 with echo: scores the prompt only; -1: fills the context"),
        Field("echo", Flag(), False, "the prompt is part of the answer"),
        Field("logprobs", Whole(0, limits.top), None),
        Field("suffix", Text(limits.body), "", "what follows the gap behind the prompt, for models with marks of gaps"),
        Field("best_of", refuse_more, None, "only equal to n"),
        speculative_field(),
        *(field for field in sampling_table(limits, rules=True) if field.name != "suffix"),
        *refuse_others("/v1/completions"),
    )


def read_completion(body: Any, table: Table, usual: Sampling, limits: Limits, vocab: int) -> CompletionAsk:
    """What a request to /v1/completions asks for. Raises Fault by the field that is wrong."""
    v = read_fields(body, table)
    if v["best_of"] not in (None, v["n"]):
        raise bad_field("best_of", "is not taken unless it equals n: all answers are given, none is chosen")
    if v["max_tokens"] == 0 and not v["echo"]:
        raise bad_field("max_tokens", "is 1 or more; 0 is for echo, which scores the prompt")
    if v["suffix"] and (v["echo"] or len(v["prompt"]) > 1 or not isinstance(v["prompt"][0], str)):
        raise bad_field("suffix", "is for one prompt that is text, without echo")
    check_jobs(len(v["prompt"]), v["n"], limits)
    generation = Generation(
        v["max_tokens"],
        read_sampling(v, usual, vocab),
        read_stops(v["stop"]),
        v["n"],
        v["logprobs"],
        v["ignore_eos"],
        v["speculative"]["n_max"],
    )
    return CompletionAsk(v["prompt"], generation, read_answering(v), v["echo"], *read_rules(v, limits), v["suffix"])


def read_answering(v: dict[str, Any]) -> Answering:
    """How the answer is told. Raises Fault for options of a stream where there is none."""
    options = v["stream_options"]
    if options is not None and not v["stream"]:
        raise bad_field("stream_options", "is only for stream: true")
    if v["return_token_ids"] and v["stream"]:
        raise bad_field("return_token_ids", "is only for answers that are not streamed")
    return Answering(v["stream"], bool(options and options["include_usage"]), v["return_token_ids"])


def check_jobs(prompts: int, choices: int, limits: Limits) -> None:
    """Raises Fault for more answers than one request may ask for."""
    if prompts * choices > limits.jobs:
        told = f"asks for {prompts * choices} answers, {choices} to each of {prompts} prompts; {limits.jobs} at most"
        raise Fault(400, f"n {told}", param="n", code="invalid_value")
