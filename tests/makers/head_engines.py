"""Engines of tiny models with a multi-token head, under plans made by hand."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engines import pinned_everywhere
from head_files import write_headed
from plan_samples import make_tier, make_variant, with_workload

from pshard.cuts.rank_parts import cut_ranks
from pshard.model import ModelSpec
from pshard.model_config import ModelConfig
from pshard.models import open_model
from pshard.plan import RankPlan, TierPlan, Variant
from pshard.planner.place_head import place_head
from pshard.reserve import TORCH_RESERVE_MIB
from pshard.runtime.build_engine import build_engine
from pshard.runtime.devices.device import open_device
from pshard.runtime.engine import Engine
from pshard.runtime.texts.choose_rows import RowChooser
from pshard.units.moe.experts import EXPERTS
from pshard.units.unit import Unit


@dataclass
class HeadedEngines:
    """Those of one model, which is written. own: its head has a table, and an output, of its own."""

    path: Path
    like: str
    own: bool = False
    tensors: dict[str, np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        self.tensors = write_headed(self.path, self.like, own=self.own)

    @property
    def config(self) -> ModelConfig:
        return open_model(self.path).spec.config

    def open(self, kernels: str = "fast", on_acc: bool = True, **sizes: Any) -> Engine:
        """An engine of the model, all in VRAM, with its head, which is there too or on the CPU."""
        return open_headed(self.path, kernels, on_acc, **sizes)


def open_headed(
    path: Path,
    kernels: str = "fast",
    on_acc: bool = True,
    *,
    head: bool = True,
    device: str = "cpu",
    sequences: int = 1,
    context: int = 512,
    tokens: tuple[int, ...] = (1, 16, 64),
    experts_on_acc: bool = True,
) -> Engine:
    """An engine of a file with a head; head: whether the plan has it. experts_on_acc: where the head is so too."""
    file = open_model(path)
    spec = replace(file.spec, keeps_states=head)
    tiers = pinned_everywhere(spec, tokens, context, sequences)
    if on_acc:  # as plans have it: rows are looked up on the host
        tiers = tuple(_look_up_on_host(spec, tier, context, sequences) for tier in tiers)
    reserve = TORCH_RESERVE_MIB if device == "cuda" else 0
    variant = make_variant(spec, tiers, context, sequences, reserve_mib=reserve)
    variant = with_workload(variant, type_k="f32", type_v="f32")
    if head:
        variant = add_head(variant, file.spec, on_acc, experts_on_acc)
    return build_engine(file, variant, open_device(device), kernels=kernels, checkpoint_bytes=1 << 24)


def _look_up_on_host(spec: ModelSpec, tier: TierPlan, context: int, sequences: int) -> TierPlan:
    places = {p.unit: (p.where, p.kv) for p in tier.placements} | {"embedding": ("cpu", None)}
    return make_tier(spec, tier.tokens, places, 0, context, sequences)


def add_head(variant: Variant, spec: Any, on_acc: bool, experts_on_acc: bool = True) -> Variant:
    """The variant with a plan for the head, of each rank that has some of it."""

    def stays(unit: Unit) -> bool:
        return on_acc and (experts_on_acc or unit.kind is not EXPERTS)

    plans = list[RankPlan]()
    for rank, part in zip(variant.ranks, cut_ranks(spec, variant.split), strict=True):
        if head := part.head:
            in_vram = {u.name for u in head.units if (u.name in rank.resident if u.lent else stays(u))}
            plans.append(place_head(head, variant.workload.state_shape, 4, in_vram, rank.rank))
    return replace(variant, drafter=plans[0], drafter_parts=tuple(plans[1:]))


def record_logits(engine: Engine) -> list[torch.Tensor]:
    """Every row of logits that the head gives from now on."""
    head, found = engine.drafter._program, list[torch.Tensor]()
    run = head.run

    def run_all(*args: Any, chooser: RowChooser | None = None, **more: Any) -> torch.Tensor:
        table = run(*args, **more)
        found.extend(table.clone())
        if chooser and len(table):
            chooser.take(table)
        return table

    head.run = run_all
    return found
