"""GGUF metadata -> Rope: how heads are turned, by the keys that llama.cpp reads."""

from dataclasses import replace
from typing import Any

import numpy as np

from pshard.model_config import Rope
from pshard.models.architectures import Architecture
from pshard.models.build_units import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS
from pshard.models.families.by_layer import NO_TURN
from pshard.models.keys import BASES, FACTORS, Keys
from pshard.models.rope import FACTOR, LOG_MULTIPLIER, scaling_factor, yarn_attention_factor
from pshard.models.stored import FETCH_AGAIN, StoredTensor

_TYPE, _GROWS = "rope.scaling.type", "rope.scaling.attn_factor"
_ORIGINAL, _SECTIONS = "rope.scaling.original_context_length", "rope.dimension_sections"
_YARN = "rope.scaling.yarn_"
_NAMES = ("ext_factor", "attn_factor", "log_multiplier", "beta_fast", "beta_slow")


def leave_unread(arch: Architecture, metadata: dict[str, Any]) -> dict[str, Any]:
    """The metadata without numbers of YaRN that llama.cpp does not read of this architecture: it has its own there."""
    read = (*arch.yarn_keys, *(("log_multiplier",) if arch.latent else ()))
    unread = {f"{arch.gguf}.{_YARN}{name}" for name in _NAMES if name not in read}
    return {key: value for key, value in metadata.items() if key not in unread}


def gguf_rope(
    arch: Architecture, keys: Keys, head_dim: int, stored: dict[str, StoredTensor], windowed: bool = False
) -> Rope:
    """How heads are turned. windowed: some layers have a window. Raises UserError that names the key or tensor."""
    plain = Rope(
        dims=keys.length("rope.dimension_count", head_dim),
        base=keys.real("rope.freq_base", 10000.0, BASES),
        pairing=arch.gguf_pairing,
        freq_factors=read_floats(stored[ROPE_FACTORS], arch.by_layer) if ROPE_FACTORS in stored else (),
    )
    plain = _leave_still(arch, keys, plain)
    factor, kind = scaling_factor(keys), keys.get(_TYPE)
    if windowed:
        _check_windowed(arch, keys, factor)
    if LONG_FACTORS in stored or SHORT_FACTORS in stored:
        keys.refuse_unless(_TYPE, "none", "linear", "longrope")
        if factor != 1.0 and kind != "none":
            keys.refuse(FACTOR, f"is {factor:g} in a file with {LONG_FACTORS}, which is not supported yet")
        return _scale_by_longrope(plain, keys, stored)
    if kind == "yarn":
        return _scale_by_yarn(arch, plain, keys, factor)
    keys.refuse_unless(_GROWS, 1.0)
    keys.refuse_unless(f"{_YARN}attn_factor", 1.0)  # where it is read, it counts without YaRN alone
    keys.refuse_unless(f"{_YARN}ext_factor", 0.0)  # which would be YaRN whatever the type is
    keys.refuse_unless(_TYPE, "none", "linear")
    if factor == 1.0 or kind == "none":
        return plain
    return replace(plain, scaling="linear", factor=factor)


def _check_windowed(arch: Architecture, keys: Keys, factor: float) -> None:
    """Raise UserError for what llama.cpp does to layers with a window in another way than to those without."""
    kind = keys.get(_TYPE)
    if (arch.full_every and not arch.still_every) or arch.by_layer or arch.sorted:  # whose positions are not scaled
        keys.refuse_unless(_GROWS, 1.0)
        if kind == "yarn" and factor < 1.0:
            keys.refuse(FACTOR, f"is {factor:g}, below 1, which is not supported with windows")
    elif (arch.full_every or arch.window_every > 1) and kind == "none" and factor != 1.0:
        keys.refuse(
            FACTOR, f"is {factor:g}, which counts in layers with a window though {keys.prefix}{_TYPE} is 'none'"
        )


def _leave_still(arch: Architecture, keys: Keys, rope: Rope) -> Rope:
    """Positions of several dimensions are equal in a text, but for the last one, which is 0: its pairs stay."""
    found = keys.values.get(keys.prefix + _SECTIONS)
    if not arch.sections or not isinstance(found, list) or not any(found):
        return rope
    if len(found) not in (3, 4) or not all(type(n) is int and 0 <= n <= rope.dims for n in found):
        keys.refuse(_SECTIONS, f"is {found}, not how many pairs turn by each of four positions")
    pairs = [pair % sum(found) for pair in range(rope.dims // 2)]
    turned = [pair < (3 * found[pair % 3] if arch.sections == "interleaved" else sum(found[:3])) for pair in pairs]
    if all(turned):
        return rope
    factors = rope.freq_factors or (1.0,) * len(turned)
    return replace(rope, freq_factors=tuple(by if turns else NO_TURN for by, turns in zip(factors, turned)))


def _scale_by_yarn(arch: Architecture, plain: Rope, keys: Keys, factor: float) -> Rope:
    keys.refuse_unless(f"{_YARN}ext_factor", 1.0)
    # attn_factor multiplies YaRN's own factor; yarn_attn_factor is overwritten by it
    # sine and cosine stay as they are where scores grow instead (see Latent)
    own = yarn_attention_factor(factor)
    if keys.get(LOG_MULTIPLIER):  # elsewhere it is the weight of what divides that factor
        own = 1.0 if arch.latent else own / yarn_attention_factor(factor, keys.real(LOG_MULTIPLIER))
    return replace(
        plain,
        scaling="yarn",
        rounded=not arch.sinks,  # gpt-oss' checkpoints say so, which GGUF has no key for
        factor=factor,
        original_context=keys.integer(_ORIGINAL, keys.integer("context_length")),
        beta_fast=keys.real(f"{_YARN}beta_fast", 32.0),
        beta_slow=keys.real(f"{_YARN}beta_slow", 1.0),
        attention_factor=own * keys.real(_GROWS, 1.0, FACTORS),
    )


def _scale_by_longrope(plain: Rope, keys: Keys, stored: dict[str, StoredTensor]) -> Rope:
    """Two sets of divisors: which is used is up to the context."""
    for one, other in ((LONG_FACTORS, SHORT_FACTORS), (SHORT_FACTORS, LONG_FACTORS)):
        if other not in stored:
            stored[one].fail(f"has no {other} beside it: the file is incomplete", FETCH_AGAIN)
    return replace(
        plain,
        scaling="longrope",
        original_context=keys.integer(_ORIGINAL, keys.integer("context_length")),
        attention_factor=keys.real(_GROWS, 1.0, FACTORS),
        freq_factors=read_floats(stored[SHORT_FACTORS]),
        long_factors=read_floats(stored[LONG_FACTORS]),
    )


def read_floats(tensor: StoredTensor, still: bool = False) -> tuple[float, ...]:
    """The values of a small F32 vector: the only data that is read when a model is opened. still: some
    may be NO_TURN."""
    if tensor.qtype != "F32" or len(tensor.shape) != 1:
        tensor.fail(f"is {tensor.qtype} of shape {list(tensor.shape)}, not a vector of F32")
    values = tuple(tensor.read().view("<f4").tolist())
    none = float(np.float32(NO_TURN)) if still else FACTORS[0]
    hole = still and not any(values)  # of a file without weights, which can be planned: see inverse_frequencies
    if not hole and not all(FACTORS[0] <= v <= FACTORS[1] or v == none for v in values):
        tensor.fail(
            f"has factors that are not within {FACTORS[0]:g} to {FACTORS[1]:g}: the file is damaged", FETCH_AGAIN
        )
    return values
