"""The fields of all interfaces that say how tokens are drawn, and what they make of the server's own settings."""

from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from typing import Any

from pshard.runtime.sampling import Sampling
from pshard.runtime.sampling.chain import Penalties
from pshard.server.api.faults import bad_field
from pshard.server.api.limits import Limits
from pshard.server.api.tables.fields import (
    NOTHING,
    ByType,
    Field,
    Fields,
    Flag,
    Items,
    Number,
    Object,
    OneOf,
    Refused,
    Table,
    Text,
    Whole,
)
from pshard.server.api.tables.rule_fields import RULES, rule_table

MOST_TOKENS = 1 << 31
SAMPLER, SCHEMA = "is not one of the samplers here", "is not taken; give a JSON schema"
KEPT, STOPS = "is not taken: answers are as the model makes them", "is not taken; give stop, which may name tokens"
ENDS = "is not kept: thinking ends when the model ends it"
ELSEWHERE: tuple[tuple[Any, ...], ...] = (  # fields of llama.cpp's, vLLM's and SGLang's that change
    # answers: why they are refused here, and values by which they change none
    ("mirostat", SAMPLER), ("mirostat_mode", SAMPLER), ("typical_p", SAMPLER, 1), ("tfs_z", SAMPLER, 1),
    ("tfs", SAMPLER, 1), ("top_a", SAMPLER), ("top_n_sigma", SAMPLER, -1), ("dynatemp_range", SAMPLER),
    ("dry_multiplier", SAMPLER), ("xtc_probability", SAMPLER), ("smoothing_factor", SAMPLER), ("samplers", SAMPLER),
    ("stop_token_ids", STOPS), ("include_stop_str_in_output", "is not done: a stop string is no part of an answer"),
    ("min_tokens", "is not taken; ignore_eos goes on past the end"), ("use_beam_search", KEPT), ("bad_words", KEPT),
    ("length_penalty", KEPT, 1), ("allowed_token_ids", "is not taken; give logit_bias"),
    ("prompt_logprobs", "is not taken; give echo with logprobs to /v1/completions"),
    ("truncate_prompt_tokens", "is not taken: prompts are never cut", -1), ("n_predict", "is max_tokens here", -1),
    ("n_probs", "is logprobs here"), ("chat_template", "is not taken: templates are those of the model"),
    ("continue_final_message", "is not taken: the template ends a message"),
    ("structural_tag", SCHEMA), ("stop_regex", STOPS),
    ("epsilon_cutoff", SAMPLER), ("eta_cutoff", SAMPLER), ("logits_processors", SAMPLER),
    ("custom_logit_processor", SAMPLER), ("no_stop_trim", "is not done: a stop string is no part of an answer"),
    ("t_max_predict_ms", "is not taken; give max_tokens"), ("documents", "is not taken; write them into a message"),
    ("lora", "is not taken: no adapters are loaded"), ("lora_path", "is not taken: no adapters are loaded"),
    ("thinking_token_budget", ENDS, -1), ("thinking_budget_tokens", ENDS, -1), ("reasoning_budget", ENDS, -1),
    ("cache_salt", "is not taken: with several keys each shares with itself alone"),
)  # fmt: skip
SEEDS = 1 << 63


class Most:
    """How many tokens an answer may have, from `least`; -1, as None: as many as there is room for."""

    def __init__(self, least: int = 1) -> None:
        self._count = Whole(least, MOST_TOKENS)

    def read(self, value: Any, where: str) -> int | None:
        return None if value == -1 else self._count.read(value, where)

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [self._count.schema(), {"const": -1}]}


def sampling_table(limits: Limits, rules: bool = False) -> Table:
    """Fields that chat and completions share. rules: with those that say by which rules an answer is made; they are
    refused elsewhere."""
    refused = tuple(Field(name, Refused(SCHEMA)) for name in (*RULES, "structured_outputs"))
    return (
        *(rule_table(limits) if rules else refused),
        Field("temperature", Number(0, 2), about="0: the likeliest token, always"),
        Field("top_p", Number(0, 1)),
        Field("top_k", Whole(-1, MOST_TOKENS), about="0 and -1: off"),
        Field("min_p", Number(0, 1)),
        Field("presence_penalty", Number(-2, 2)),
        Field("frequency_penalty", Number(-2, 2)),
        Field("repeat_penalty", Number(0, 10, above=True)),
        Field("repetition_penalty", Number(0, 10, above=True), about="another name of repeat_penalty"),
        Field("repeat_last_n", Whole(-1, MOST_TOKENS), about="tokens that penalties look back; -1: all"),
        Field("seed", Whole(-SEEDS, SEEDS - 1), about="the same answers under any load; -1: another each time"),
        Field("logit_bias", Object(limits.biases), {}, about="token id to what is added to its logit, -100 to 100"),
        Field("stop", stop_kind(limits), ()),
        Field("n", Whole(1, limits.choices), 1),
        Field("ignore_eos", Flag(), False, about="go on past the end of the text, for timings"),
        Field("return_token_ids", Flag(), False, about="adds token_ids to each choice; not in a stream"),
        Field("stream", Flag(), False),
        Field("stream_options", _stream_options(), None),
        Field("response_format", response_format_kind(), None),
        *(Field(name, Refused(why, (*NOTHING, *neutral))) for name, why, *neutral in ELSEWHERE),
        Field("skip_special_tokens", Refused("is always true here: special tokens are no text", (True,))),
        Field("add_generation_prompt", Refused("is always true here: the answer is a message of its own", (True,))),
        Field("suffix", Refused("is not taken: the model continues text, it does not fill gaps")),
    )


def stop_kind(limits: Limits) -> ByType:
    """One stop string, or a list of them."""
    word = Text(limits.stop_letters, 1)
    return ByType((("string", word), ("array", Items(word, limits.stops))), "a text or a list of texts")


def response_format_kind() -> Fields:
    """What `response_format` may be."""
    inner = Fields(
        (
            Field("name", Text(256), ""),
            Field("description", Text(1 << 16), ""),
            Field("strict", Flag(), False),
            Field("schema", Object(), {}),
        )
    )
    return Fields(
        (Field("type", OneOf(("text", "json_object", "json_schema")), needed=True), Field("json_schema", inner, None))
    )


def speculative_field() -> Field:
    """What a request may say of drafts."""
    kind = Fields((Field("n_max", Whole(0, MOST_TOKENS), about="drafts of a step at most; the answer says how many"),))
    return Field("speculative", kind, {"n_max": None})


def _stream_options() -> Fields:
    often = Refused("is not done: usage comes once, at the end of the stream")
    return Fields((Field("include_usage", Flag(), False), Field("continuous_usage_stats", often)))


def read_sampling(values: Mapping[str, Any], usual: Sampling, vocab: int) -> Sampling:
    """How tokens are drawn: the request's fields where it has them, else as the server was started. Raises Fault for a
    bias on what is no token."""
    p = usual.penalties
    repeat = values.get("repeat_penalty") or values.get("repetition_penalty")
    penalties = Penalties(
        p.repeat if repeat is None else repeat,
        _or(values.get("frequency_penalty"), p.frequency),
        _or(values.get("presence_penalty"), p.presence),
        _or(values.get("repeat_last_n"), p.last),
    )
    top_k = _or(values.get("top_k"), usual.top_k)
    bias = read_bias(values.get("logit_bias") or {}, vocab)
    return replace(
        usual,
        temperature=_or(values.get("temperature"), usual.temperature),
        top_p=max(_or(values.get("top_p"), usual.top_p), 1e-9),  # 0: the best one alone, as with any tiny mass
        top_k=max(top_k, 0),
        min_p=_or(values.get("min_p"), usual.min_p),
        seed=_read_seed(values.get("seed"), usual.seed),
        penalties=penalties,
        logit_bias=usual.logit_bias + bias,
    )


def read_bias(given: Mapping[str, Any], vocab: int) -> tuple[tuple[int, float], ...]:
    """`logit_bias`: token ids as texts, each with what is added. Raises Fault by the token."""
    number, found = Number(-100, 100), []
    for name, more in given.items():
        where = f"logit_bias.{name[:20]}"
        if not (name.isascii() and name.isdigit() and len(name) < 10 and int(name) < vocab):
            raise bad_field(where, f"names no token; ids are 0 to {vocab - 1}")
        found.append((int(name), number.read(more, where)))
    return tuple(found)


def seed_choice(sampling: Sampling, choice: int) -> Sampling:
    """The sampling of one choice of several: each has numbers of its own, which depend on seed and choice alone."""
    seed = sampling.seed
    if seed is None or (choice == 0 and seed >= 0):
        return sampling
    mixed = sha256(f"{seed}:{choice}".encode()).digest()
    return replace(sampling, seed=int.from_bytes(mixed[:8], "big") >> 1)


def read_stops(given: str | tuple[str, ...]) -> tuple[str, ...]:
    """Stop strings, each once."""
    return (given,) if isinstance(given, str) else tuple(dict.fromkeys(given))


def _read_seed(given: int | None, usual: int | None) -> int | None:
    """A seed as samplers take it: negative ones become others that are not."""
    return usual if given is None else None if given == -1 else given % SEEDS


def _or(value: Any, usual: Any) -> Any:
    return usual if value is None else value
