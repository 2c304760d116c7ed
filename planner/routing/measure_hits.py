"""What share of a run's choices found their expert in VRAM."""

import numpy as np

from pshard.model import ModelSpec
from pshard.routing.expert_map import TierExperts
from pshard.routing.record import RoutingRecord


def measure_hits(record: RoutingRecord, spec: ModelSpec, tier: TierExperts) -> float | None:
    """The share of the choices in a tier's layers that experts in VRAM served in micro-batches of the smallest tier;
    None where there were none.

    spec: the model in the run's order of experts. tier: where these are in that tier, of all or of a rank's layers.
    """
    ends = np.cumsum(record.batches)
    decoded = [np.arange(end - n, end) for n, end in zip(record.batches, ends) if n <= tier.tokens]
    if not decoded:
        return None
    ids, hits = record.of_layers([layer.layer for layer in tier.layers]).ids[np.concatenate(decoded)], 0
    orders = {unit.layer: unit.order or tuple(range(record.experts)) for unit in spec.units if unit.kind.parts}
    for i, layer in enumerate(tier.layers):
        hits += int(np.isin(ids[:, i], orders[layer.layer][: layer.pinned]).sum())
    return hits / ids.size
