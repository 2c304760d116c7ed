"""Brings together what each rank has: nouns, and which experts a run's tokens have used."""

import base64
from typing import Any, TypeVar

import numpy as np

from pshard.jsonio import from_json, to_json
from pshard.model import ModelSpec
from pshard.routing.record import RoutingRecord, id_type, join_layers
from pshard.runtime.ranks.group import Group

_Noun = TypeVar("_Noun")


def gather_nouns(own: _Noun, group: Group) -> tuple[_Noun, ...]:
    """What every rank has of a noun, in order. All ranks call it."""
    return tuple(from_json(type(own), each) for each in _gather(to_json(own), group))


def gather_record(own: RoutingRecord | None, spec: ModelSpec, group: Group) -> RoutingRecord:
    """A record of all layers, on every rank; all ranks call it. own: of those with experts that this rank holds, as
    `spec` says. Raises ValueError where no rank has recorded any."""
    parts = [own] if own else []
    if spec.neighbours is not None:  # else each rank has all routers, which choose alike
        parts = [_unpack(each) for each in _gather(own and _pack(own), group) if each is not None]
    if not parts:
        raise ValueError("the engine was not built to record routing")
    return join_layers(parts)


def _gather(own: Any, group: Group) -> list[Any]:
    """What every rank has (anything JSON holds), in order."""
    return [group.broadcast(own, rank) for rank in range(group.size)]


def _pack(record: RoutingRecord) -> list[Any]:
    ids = base64.b64encode(record.ids.tobytes()).decode()
    return [record.fingerprint, record.layers, record.experts, record.used, record.batches, ids]


def _unpack(said: list[Any]) -> RoutingRecord:
    fingerprint, layers, experts, used, batches, ids = said
    numbers = np.frombuffer(base64.b64decode(ids), id_type(experts)).reshape(-1, len(layers), used)
    return RoutingRecord(fingerprint, tuple(layers), experts, numbers, tuple(batches))
