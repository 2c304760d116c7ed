"""A toy model of routed experts that like some, a text in which words come again, and plans for ranks that run here."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from experts_file import ExpertsFile, skew_routers
from plan_samples import make_rank_plan, make_tier, make_variant

from pshard.cuts.rank_parts import cut_ranks
from pshard.model_config import Experts
from pshard.plan import Variant
from pshard.routing.follow_use import HitCounts
from pshard.routing.followed import under_plan
from pshard.routing.record import RoutingRecord
from pshard.runtime.engine import Engine

FILE = skew_routers(ExpertsFile(Experts(16, 2, 96), layers=4, d_model=128), 0.5)
CONTEXT = 256


def write_text(n: int, seed: int, again: float) -> list[int]:
    """Words of which a few are common; so often one of the last five comes `again`."""
    rng = np.random.default_rng(seed)
    words = rng.choice(320, n, p=(common := np.arange(1, 321) ** -0.8) / common.sum()).tolist()
    for at in range(1, n):
        if rng.random() < again:
            words[at] = words[at - rng.integers(1, min(at, 5) + 1)]
    return words


TEXT = write_text(120, 3, 0.6)
PROMPT = 12  # of the text, at once


@dataclass(frozen=True, eq=False)
class Walk:
    """What a rank has of a text. logits: of the tokens that were decoded. hits: of all ranks."""

    logits: torch.Tensor
    hits: list[HitCounts]
    record: RoutingRecord


def walk_text(engine: Engine) -> Walk:
    """The text's prefix at once, then token by token."""
    engine.forward(TEXT[:PROMPT])
    logits = torch.stack([engine.forward([token]) for token in TEXT[PROMPT:]])
    return Walk(logits, [slots.found for slots in engine.hits_by_rank()], engine.record_routing("ab" * 32))


def run_here(variant: Variant) -> Variant:
    """A plan's placements and slots with buffers for the CPU as accelerator."""
    parts, ranks = cut_ranks(under_plan(FILE.spec, variant), variant.split), []
    for part, rank in zip(parts, variant.ranks):
        cached, tiers = sum(own.nbytes for own in rank.caches), []
        for tier in rank.tiers:
            places = {p.unit: (p.where, p.kv, *p.share) for p in tier.placements}
            made = make_tier(part, tier.tokens, places, max(1, tier.buffers.slots), CONTEXT, 1, in_place=tier.in_place)
            tiers.append(replace(made, buffers=replace(made.buffers, cached=cached)))
        ranks.append(replace(make_rank_plan(part, tuple(tiers), rank.rank, rank.share), caches=rank.caches))
    found = make_variant(FILE.spec, ranks[0].tiers, CONTEXT, 1, tuple(ranks))
    return replace(found, workload=found.workload.under(variant.split), popularity=variant.popularity)
