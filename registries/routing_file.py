"""Routing records in files (format: registries/FORMAT.md#routing-records)."""

import hashlib
import json
import struct
import zlib
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Protocol

import numpy as np

from pshard.errors import UserError
from pshard.jsonio import from_json, open_regular, parse_json, remove_leftovers, to_json, write_bytes_atomically
from pshard.model import ModelSpec
from pshard.routing.play_record import keep_last
from pshard.routing.record import RoutingRecord, id_type

MAGIC, VERSION = b"pshardrt", 1
_FIXED = struct.Struct("<8sIIII")  # magic, version, length of the header, CRC-32 of the header, and of what follows it
SAMPLE_BYTES = 256  # of the first and the last row of every router, for the fingerprint
MOST_EXPERTS = 1 << 16


@dataclass(frozen=True)
class _Header:
    """`batches`: sizes of micro-batches, each with how many of it follow each other."""

    fingerprint: str
    layers: tuple[int, ...]
    experts: int
    used: int
    tokens: int
    batches: tuple[tuple[int, int], ...]


class _Model(Protocol):
    """What is needed of a ModelFile."""

    @property
    def spec(self) -> ModelSpec: ...

    def tensor_bytes(self, name: str) -> np.ndarray: ...


def fingerprint_routers(model: _Model) -> str:
    """SHA-256 (hex) of what decides which experts a text uses and costs little to read: the rule of the choice, and a
    sample of every router. Files of one model whose experts are quantised otherwise have the same."""
    config = model.spec.config
    found = hashlib.sha256(json.dumps([config.architecture, config.n_layers, config.d_model]).encode())
    found.update(json.dumps(to_json(config.experts), sort_keys=True).encode())
    for unit in model.spec.units:
        for matrix in unit.matrices if unit.kind.routes else ():
            rows = model.tensor_bytes(matrix.name).reshape(matrix.rows, -1)
            found.update(matrix.name.encode() + bytes(rows[0][:SAMPLE_BYTES]) + bytes(rows[-1][:SAMPLE_BYTES]))
    return found.hexdigest()


def write_routing(path: Path, record: RoutingRecord) -> None:
    """Write a record whole or not at all. Raises UserError when that place cannot be written."""
    sizes = tuple((size, len(list(alike))) for size, alike in groupby(record.batches))
    fields = _Header(record.fingerprint, record.layers, record.experts, record.used, record.tokens, sizes)
    header = json.dumps(to_json(fields)).encode()
    ids = np.ascontiguousarray(record.ids, id_type(record.experts)).tobytes()
    fixed = _FIXED.pack(MAGIC, VERSION, len(header), zlib.crc32(header), zlib.crc32(ids))
    try:
        remove_leftovers(path)
        write_bytes_atomically(path, fixed + header + ids)
    except OSError as error:
        raise UserError(f"cannot write the routing record {path}: {error.strerror}; choose another place") from None


def is_routing(path: Path) -> bool:
    """Whether a file begins as routing records do; not where it cannot be read."""
    try:
        with open_regular(path) as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_routing(path: Path) -> RoutingRecord:
    """Read a record. Raises UserError: missing, unreadable, something else, of another version, cut off or damaged."""
    try:
        with open_regular(path) as file:
            data = file.read()
    except OSError as error:
        raise UserError(f"cannot read the routing record {path}: {error.strerror}; give another file") from None
    if len(data) < _FIXED.size or not data.startswith(MAGIC):
        raise UserError(f"{path} is no routing record; pshard-run --record-routing FILE makes one")
    _, version, length, of_header, of_ids = _FIXED.unpack_from(data)
    if version != VERSION:
        raise UserError(f"the routing record {path} has format {version}; this pshard reads {VERSION}: record again")
    header, ids = data[_FIXED.size : _FIXED.size + length], data[_FIXED.size + length :]
    try:
        if (zlib.crc32(header), zlib.crc32(ids)) != (of_header, of_ids):
            raise ValueError("its checksums do not match")
        return _decode(from_json(_Header, parse_json(header)), ids)
    except ValueError as error:
        raise UserError(f"the routing record {path} is cut off or damaged ({error}): record again") from None


def _decode(header: _Header, ids: bytes) -> RoutingRecord:
    """Raises ValueError for what no run writes."""
    layers, experts, used, tokens = header.layers, header.experts, header.used, header.tokens
    if not layers or list(layers) != sorted(set(layers)) or tokens < 1 or not 1 <= used <= experts <= MOST_EXPERTS:
        raise ValueError("it has no tokens or layers, or tokens take more experts than there are")
    if min(min(size, times) for size, times in header.batches or ((0, 0),)) < 1:
        raise ValueError("a micro-batch has no tokens")
    if sum(size * times for size, times in header.batches) != tokens:
        raise ValueError("its micro-batches are not its tokens")
    kind, shape = id_type(experts), (tokens, len(layers), used)
    if len(ids) != tokens * len(layers) * used * kind.itemsize:
        raise ValueError("it has another number of experts than its tokens chose")
    chosen = np.frombuffer(ids, kind).reshape(shape)
    if chosen.max() >= experts:
        raise ValueError(f"a token chose expert {chosen.max()} of {experts}")
    batches = tuple(size for size, times in header.batches for _ in range(times))
    return RoutingRecord(header.fingerprint, layers, experts, chosen, batches)


def keep_record(registry: Path, record: RoutingRecord) -> None:
    """Write as much of a record as plans with slots are priced by beside the registry, for plans that are made again.
    Raises UserError as `write_routing` does."""
    write_routing(_place_beside(registry), keep_last(record))


def recall_record(registry: Path, model: _Model) -> RoutingRecord | None:
    """What `keep_record` has kept beside a registry; None where that is nothing. Raises UserError for a file that
    cannot be read, or is of another model."""
    place = _place_beside(registry)
    if not place.exists():
        return None
    record = read_routing(place)
    check_routing(record, model, place)
    return record


def _place_beside(registry: Path) -> Path:
    return registry.with_name(f"{registry.name}.routing")


def check_routing(record: RoutingRecord, model: _Model, path: Path) -> None:
    """Raise UserError for a record of another model than this."""
    rule = model.spec.config.experts
    if rule is None:
        raise UserError("the model has no routed experts; leave out --routing")
    own = tuple(unit.layer for unit in model.spec.units if unit.kind.routes)
    same = (record.layers, record.experts, record.used) == (own, rule.count, rule.used)
    if not same or record.fingerprint != fingerprint_routers(model):
        what = f"{len(record.layers)} layers of {record.experts} experts, {record.used} a token"
        raise UserError(
            f"the routing record {path} is of another model ({what}); record this one with pshard-run --record-routing"
        )
