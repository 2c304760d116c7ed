"""Engines for tests: a model file, hand-made plans, the CPU as accelerator."""

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from plan_samples import make_tier, make_variant, with_workload

from pshard.models import open_model
from pshard.plan import TierPlan
from pshard.reserve import TORCH_RESERVE_MIB
from pshard.runtime.build_engine import build_engine
from pshard.runtime.devices.device import open_device
from pshard.runtime.engine import Engine
from pshard.speculation import Acceptance, Drafting


def pinned_everywhere(spec, tokens=(1, 64), context=128, sequences=1, drafts=0) -> tuple[TierPlan, ...]:
    """Tiers with everything in the arena: the reference of every other placement."""
    places = {u.name: ("pinned", "vram" if u.kind.state else None) for u in spec.units}
    return tuple(make_tier(spec, n, places, 0, context, sequences, batch=tokens[-1], drafts=drafts) for n in tokens)


def converse(engine: Engine) -> torch.Tensor:
    """A prompt of many micro-batches, of which the last logits are wanted, a short one and single tokens: logits."""
    rng = random.Random(1)
    first, *rest = [[rng.randrange(320) for _ in range(n)] for n in (201, 19, 1, 1, 4, 1)]
    return torch.cat([engine.forward(first)[None], *(engine.forward(ids, all_logits=True) for ids in rest)])


def open_engine(
    path: Path,
    tiers=None,
    kernels="plain",
    context=128,
    sequences=1,
    tokens=(1, 64),
    device="cpu",
    kv_types=("f32", "f32"),
    checkpoint_bytes=0,
    exact=False,
    drafts=0,
) -> Engine:
    """An engine under given tiers (default: everything pinned), on the CPU as accelerator unless told otherwise.
    drafts: of a step, that there is room for."""
    file = open_model(path)
    tiers = tiers or pinned_everywhere(file.spec, tokens, context, sequences, drafts)
    reserve = TORCH_RESERVE_MIB if device == "cuda" else 0
    variant = make_variant(file.spec, tiers, context, sequences, reserve_mib=reserve)
    variant = with_workload(variant, type_k=kv_types[0], type_v=kv_types[1])
    if drafts:
        variant = with_workload(variant, drafting=Drafting("lookup", drafts), acceptance=Acceptance((0.5,)))
    options = {"checkpoint_bytes": checkpoint_bytes, "exact": exact}
    return build_engine(file, variant, open_device(device), kernels=kernels, **options)


def read_twice(engine: Engine, prompts: Sequence[list[int]]) -> tuple[int, torch.Tensor]:
    """Graphs that are held at the end, and logits: of a text of the prompts, and of one of them in reverse."""
    with engine:
        outputs = [engine.forward(prompt) for prompt in prompts]
        engine.reset(0)
        outputs += [engine.forward(prompt) for prompt in reversed(prompts)]
        return len(engine.device._graphs), torch.stack(outputs)
