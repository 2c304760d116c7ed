"""Requests to /infill, as llama.cpp's clients write them."""

from dataclasses import replace
from typing import Any

from pshard.runtime.sampling import Sampling
from pshard.runtime.sampling.chain import SAMPLERS
from pshard.server.api.asks import Gap, Generation
from pshard.server.api.limits import Limits
from pshard.server.api.tables.fields import Field, Fields, Items, OneOf, Table, Text
from pshard.server.api.tables.sampling_fields import Most, read_sampling, read_stops, sampling_table

ELSE = ("n", "suffix", "samplers", "n_predict", "t_max_predict_ms", "return_token_ids", "response_format")
NAMES = (*SAMPLERS, "infill")  # the last, which llama.vim names, joins tokens that begin alike; it does nothing here


def gap_table(limits: Limits) -> Table:
    """Fields of a request to /infill. Its bounds of time are not kept: `n_predict` says how much is made."""
    text = Text(limits.body)
    extra = Fields((Field("filename", Text(4096), ""), Field("text", text, "", needed=True)))
    return (
        Field("model", Text(256), ""),
        Field("input_prefix", text, ""),
        Field("input_suffix", text, ""),
        Field("prompt", text, "", "how the text in the gap begins"),
        Field("input_extra", Items(extra, 256), (), "other files"),
        Field("n_predict", Most(), None, "-1: fills the context"),
        Field("samplers", Items(OneOf(NAMES), 16), (), "the order in which they apply"),
        *(field for field in sampling_table(limits) if field.name not in ELSE),
    )


def read_gap(v: dict[str, Any], usual: Sampling, vocab: int) -> tuple[Gap, Generation]:
    """The gap, and how it is filled. Raises Fault by the field that is wrong."""
    files = tuple((entry["filename"], entry["text"]) for entry in v["input_extra"])
    sampling = read_sampling(v, usual, vocab)
    order = tuple(name for name in dict.fromkeys(v["samplers"]) if name in SAMPLERS)
    if order:
        sampling = replace(sampling, samplers=order)
    generation = Generation(v["n_predict"], sampling, read_stops(v["stop"]), ignore_end=v["ignore_eos"])
    return Gap(v["input_prefix"], v["input_suffix"], v["prompt"], files), generation
