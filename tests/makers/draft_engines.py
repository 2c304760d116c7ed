"""Engines of a model with another one that drafts for it, under plans made by hand."""

from dataclasses import replace
from pathlib import Path

from engines import pinned_everywhere
from plan_samples import make_variant, with_workload

from pshard.models.attach_draft import open_drafted
from pshard.planner.place_head import place_head
from pshard.runtime.build_engine import build_engine
from pshard.runtime.devices.device import open_device
from pshard.runtime.engine import Engine

CONTEXT, TOKENS = 256, (1, 16, 64)


def open_with(model: Path, draft: Path, on_acc: bool = True, sequences: int = 1, context: int = CONTEXT) -> Engine:
    """All of the model in VRAM, and the draft model there too or on the CPU."""
    file = open_drafted(model, draft)
    tiers = pinned_everywhere(file.spec, TOKENS, context, sequences)
    variant = with_workload(make_variant(file.spec, tiers, context, sequences), type_k="f32", type_v="f32")
    in_vram = {unit.name for unit in file.spec.head.units if on_acc}
    drafter = place_head(file.spec.head, variant.workload.state_shape, 4, in_vram)
    return build_engine(file, replace(variant, drafter=drafter), open_device("cpu"), kernels="fast")
