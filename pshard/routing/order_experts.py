"""A model with its experts in an order of popularity. No torch."""

from dataclasses import replace

from pshard.model import ModelSpec
from pshard.units.moe.popularity import Popularity
from pshard.units.unit import Unit


def order_experts(spec: ModelSpec, popularity: Popularity | None) -> ModelSpec:
    """The model with each layer's experts in that order, and prices by it; None: in their own order, all chosen alike.

    Only where an expert's weights lie changes, and so which are among the first: routers keep their rows, and chosen
    experts their numbers. So ties are broken as before, and a record decides no more of a logit than who computes it.
    Raises ValueError when it is not of these experts.
    """
    if popularity is spec.popularity:
        return spec
    units = tuple(_order_unit(unit, popularity) if unit.kind.parts else unit for unit in spec.units)
    return replace(spec, units=units, popularity=popularity)


def _order_unit(unit: Unit, popularity: Popularity | None) -> Unit:
    if popularity is None or not unit.tensors:
        return replace(unit, order=())
    parts = max(tensor.parts for tensor in unit.tensors)
    try:
        order = popularity.order_of(unit.layer)
    except KeyError:
        raise ValueError(f"the popularity of experts says nothing of layer {unit.layer}") from None
    if len(order) != parts:
        raise ValueError(f"the popularity is of {len(order)} experts, and {unit.name} has {parts}")
    return replace(unit, order=order)
