"""Prompts' products in bfloat16 or int8: a profile's timings under each of PROMPT_MATHS, and which types use which."""

from collections.abc import Iterator
from dataclasses import replace

from pshard.batch_sizes import SMALL_BATCH
from pshard.machine import ExpertTiming, MachineProfile
from pshard.model import ModelSpec
from pshard.times.gpu_tiles import (
    AUTO,
    INT8_EXPERTS,
    INT8_KERNEL,
    LIBRARY,
    TileChoice,
    choose_bucket,
    experts_type,
    holds_pairs,
    pairs_together,
    scale_math,
    settle_math,
)
from pshard.units.operations import ExpertProducts, GatedProduct, Product, ProductGroup, matrices_of

Choices = dict[tuple[str, str, str], dict[int, TileChoice]]  # by device, kernel and type, by tokens


def price_math(profile: MachineProfile) -> MachineProfile:
    """The profile with the times of matmuls and experts under its `prompt_math`: what was timed one way takes as many
    times as long the other way as the largest matrices of its type did."""
    if profile.prompt_math == AUTO:
        return profile
    choices = _group(profile.tiles)
    matmuls = tuple(
        replace(m, seconds=m.seconds * _scale(choices, profile, (m.device, INT8_KERNEL, m.qtype), m.tokens))
        if m.tokens > SMALL_BATCH
        else m
        for m in profile.matmuls
    )
    experts = tuple(replace(e, seconds=e.seconds * _scale_experts(choices, profile, e)) for e in profile.experts)
    return replace(profile, matmuls=matmuls, experts=experts)


def _scale_experts(choices: Choices, profile: MachineProfile, e: ExpertTiming) -> float:
    pairs, key = e.tokens * e.used, (e.device, INT8_EXPERTS, experts_type(e.gate_qtype, e.down_qtype))
    choice = choices.get(key, {}).get(pairs_together(pairs, e.experts))
    return scale_math(choice, profile.prompt_math) if choice and holds_pairs(choice.tile, pairs, e.experts) else 1.0


def _group(tiles: tuple[TileChoice, ...]) -> Choices:
    found: Choices = {}
    for choice in tiles:
        if choice.is_int8:
            found.setdefault((choice.device, choice.kernel, choice.qtype), {})[choice.tokens] = choice
    return found


def _scale(choices: Choices, profile: MachineProfile, key: tuple[str, str, str], tokens: int) -> float:
    counts = choices.get(key)
    return scale_math(counts[choose_bucket(counts, tokens)], profile.prompt_math) if counts else 1.0


def uses_int8(profile: MachineProfile) -> bool:
    """Whether an accelerator makes any products of many tokens in int8."""
    return any(c.is_int8 and c.tile != LIBRARY for c in settle_math(profile.tiles, profile.prompt_math))


def describe_math(spec: ModelSpec, profile: MachineProfile) -> str:
    """Which of a model's products of many tokens a GPU makes in int8; "" where it was not timed or asked for."""
    if not any(choice.is_int8 for choice in profile.tiles):
        return ""
    settled = settle_math(profile.tiles_of(0), profile.prompt_math)
    used = {(c.kernel, c.qtype): c.tokens for c in reversed(settled) if c.is_int8 and c.tile != LIBRARY}
    found = [_name(*one) + _from(one[0], used[one]) for one in _types(spec) if one in used]
    others = [_name(*one) for one in _types(spec) if one not in used]
    return "; ".join(f"in {way}: {', '.join(names)}" for way, names in (("int8", found), ("bf16", others)) if names)


def describe_no_int8(spec: ModelSpec, profile: MachineProfile) -> str | None:
    """What stays in bfloat16 though int8 was asked for, and why; None where nothing does."""
    if profile.prompt_math != "int8":
        return None
    if profile.accelerators[0].kind != "cuda":
        return "--prompt-math int8 is for GPUs; the CPU's kernels choose their own types"
    timed = {(c.kernel, c.qtype) for c in profile.tiles_of(0) if c.is_int8}
    others = [_name(*one) for one in _types(spec) if one not in timed]
    if not others:
        return None
    return (
        f"--prompt-math int8: {', '.join(others)} stay in bf16, as the profile has no times of theirs in int8; "
        "pshard-profile -m times the types that have it"
    )


def _types(spec: ModelSpec) -> list[tuple[str, str]]:
    """Kernels and types of the model's products of many tokens: those of the output are of few."""
    return sorted(set(_list_types(spec)))


def _list_types(spec: ModelSpec) -> Iterator[tuple[str, str]]:
    for unit in spec.units:
        for operation in () if unit.kind.gives_logits else unit.operations(spec.config):
            match operation:
                case ExpertProducts():
                    yield INT8_EXPERTS, experts_type(operation.gate.qtype, operation.down.qtype)
                case Product() | ProductGroup() | GatedProduct():
                    yield from ((INT8_KERNEL, matrix.qtype) for matrix in matrices_of(operation))


def _from(kernel: str, tokens: int) -> str:
    return "" if kernel == INT8_EXPERTS else f" from {tokens} tokens"


def _name(kernel: str, qtype: str) -> str:
    return f"experts of {qtype}" if kernel == INT8_EXPERTS else qtype
