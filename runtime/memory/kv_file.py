"""A sequence's KV cache in one file that any number of ranks, on any device, can load.

The file holds cells by what they mean, not by where they lay (version 2, little-endian):

    "pshardkv", u32 version, u32 length of the header, u32 its CRC-32
    header, JSON: fingerprint of the model, layers, kv_heads, head_dim, type_k, type_v, tokens (ids of the cells)
    u32 CRC-32 of every block
    blocks: for every layer K then V, for every KV head: [cells, head_dim] numbers of type_k or type_v; of q8_0 for each
        cell the head's codes (int8) and then its scales (f16, one for 32 codes). Latents are the K of one head, whose V
        has no number. Of a layer with a window the last cells only: from the block of KV_BLOCK cells on where what the
        next token sees begins
    of a model with a gated delta net, whose header has `states`: the lengths of checkpoints, the last one the text's;
        of each for every such layer and key head a block, see checkpoints/saved_states.py

Every rank writes and reads the heads it holds, at their place; a head that several ranks hold is the lowest one's to
write. The ranks must see the same file.
"""

import hashlib
import json
import os
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import torch

from pshard.cuts.rank_parts import Ranges
from pshard.errors import UserError
from pshard.jsonio import check_regular, open_regular, parse_json, remove_leftovers, resolve_place, to_json
from pshard.model import ModelSpec
from pshard.runtime.checkpoints.checkpoints import Checkpoint
from pshard.runtime.checkpoints.saved_states import find_states
from pshard.runtime.executor import Executor
from pshard.runtime.kernels.api import Segment
from pshard.runtime.kernels.kv_codec import put_head, take_head
from pshard.runtime.memory.kv_cache import read_cells, write_cells
from pshard.runtime.memory.weights import WeightSource
from pshard.runtime.ranks.group import Group
from pshard.units.attention import QKV
from pshard.units.kv_cells import KV_BLOCK, kv_nbytes, longest_sequence, window_start
from pshard.units.latent_attention import KV_A
from pshard.units.state import CellState, FixedState, LatentState, StateShape

MAGIC, VERSION = b"pshardkv", 2
_FIXED = struct.Struct("<8sIII")
SAMPLE_BYTES = 256  # of every tensor, for the fingerprint: a fine-tuned model may differ in few of them


def fingerprint_model(source: WeightSource) -> str:
    """SHA-256 (hex) of the model's configuration, its tensors' shapes and a sample of every tensor's bytes."""
    found = hashlib.sha256(json.dumps(to_json(source.spec.config), sort_keys=True).encode())
    for unit in source.spec.units:
        tensors = to_json(unit.tensors)
        told = {"name": unit.name, "kind": unit.kind.name, "layer": unit.layer, "tensors": tensors}
        found.update(json.dumps(told).encode())
        for tensor in unit.tensors:
            raw = source.part_bytes(tensor.name, 0) if tensor.parts else source.tensor_bytes(tensor.name)
            found.update(bytes(raw[0][:SAMPLE_BYTES] if raw.ndim > 1 else raw[:SAMPLE_BYTES]))
            source.forget_tensor(tensor.name)
    return found.hexdigest()


@dataclass(frozen=True)
class HeadCells:
    """One head's keys or values of one layer: number in the file, its unit, "k" or "v", head among this rank's."""

    number: int
    unit: str
    what: str
    head: int
    written: bool  # by this rank


class KVStore:
    """Saves and loads sequences of one engine. All ranks of the group make the same calls."""

    def __init__(self, source: WeightSource, held: Sequence[Ranges], kv: StateShape, executor: Executor, group: Group):
        """source: the whole model; held: what of it every rank has (pshard.cuts.rank_parts.split_ranges)."""
        self._source, self._kv, self._executor, self._group = source, kv, executor, group
        self._blocks = tuple(_blocks_of(source.spec, kv, held, group.rank))
        laws = (unit.state(source.spec.config, kv) for unit in source.spec.units)
        caches = (law for law in laws if isinstance(law, CellState | LatentState))
        self._held = held[group.rank]
        self._states = find_states(source.spec, self._held)
        self._windows = tuple(law.window if isinstance(law, CellState) else 0 for law in caches)  # of every layer

    def save(self, path: Path, held: Segment, tokens: Sequence[int], states: Sequence[Checkpoint] = ()) -> None:
        """Write the cells of a sequence with these tokens, which lie where `held` says, and its checkpoints, the last
        one of all tokens; the file is there whole or not at all.

        Raises UserError.
        """
        self._check_states()
        header = self._header(tokens, [one.length for one in states])
        temporary = self._create(path, len(tokens), header, len(states))
        try:
            sums, problem = self._write_blocks(Path(temporary), held, header, states), None
        except OSError as error:
            sums, problem = [], error.strerror
        said = [self._group.broadcast([problem, sums], r) for r in range(self._group.size)]
        problem = next((p for p, _ in said if p), None)
        if self._group.rank == 0:
            problem = problem or self._finish(Path(temporary), path, header, dict(s for _, part in said for s in part))
            Path(temporary).unlink(missing_ok=True)
        self._raise_together(path, problem)

    def _create(self, path: Path, cells: int, header: bytes, states: int) -> str:
        """Rank 0 makes a file of full size beside the wanted one; returns its name."""
        temporary, problem = "", None
        if self._group.rank == 0:
            try:
                check_regular(path)
                remove_leftovers(path)
                handle, temporary = tempfile.mkstemp(
                    dir=resolve_place(path).parent, prefix=f".{path.name}.", suffix=".tmp"
                )
                with os.fdopen(handle, "wb") as file:
                    file.truncate(self._places(cells, header, states)[1])
            except OSError as error:
                problem = error.strerror
        self._raise_together(path, problem)
        return self._group.broadcast(temporary)

    def _raise_together(self, path: Path, problem: str | None) -> None:
        """Raise on every rank what rank 0 ran into."""
        if problem := self._group.broadcast(problem):
            raise UserError(f"cannot write the KV cache to {path}: {problem}; give another file")

    def load(self, path: Path, take: Callable[[int], Segment]) -> tuple[tuple[int, ...], list[Checkpoint]]:
        """Fill cells from a file, where `take` says that so many lie; returns their token ids, and checkpoints.

        Raises UserError: not such a file, damaged, of another model or KV type, longer than the context, not the same
        on all ranks; or as `take`.
        """
        self._check_states()
        problem: str | None = None
        tokens: tuple[int, ...] = ()
        states: list[Checkpoint] = []
        try:
            tokens, states = self._read(path, take)
        except UserError as error:
            problem = str(error)
        except OSError as error:
            problem = f"cannot read the KV cache {path}: {error.strerror}; give another file"
        read = zlib.crc32(json.dumps(tokens).encode())
        said = [self._group.broadcast([problem, read], r) for r in range(self._group.size)]
        if first := next((p for p, _ in said if p), None):
            raise UserError(first)
        if any(other != read for _, other in said):
            raise UserError(f"ranks find different KV caches in {path}, just replaced or no shared file; try again")
        return tokens, states

    def _check_states(self) -> None:
        """Raise UserError, on every rank, when a unit keeps a state that the file has no place for."""
        spec = self._source.spec
        for unit in spec.units:
            law = unit.state(spec.config, self._kv)
            known = isinstance(law, CellState | LatentState) or (self._states and isinstance(law, FixedState))
            if law is not None and not known:
                raise UserError(
                    f"{unit.name} ({unit.kind.name}) keeps a state that is no KV cache, and only KV caches can be "
                    "saved and loaded; give the prompt again"
                )

    @cached_property
    def fingerprint(self) -> str:
        """The model's: see `fingerprint_model`."""
        return fingerprint_model(self._source)

    @cached_property
    def slice_fingerprint(self) -> str:
        """Of what this rank has of the model."""
        held = json.dumps(to_json(self._held), sort_keys=True)
        return hashlib.sha256(f"{self.fingerprint} {held}".encode()).hexdigest()

    def _header(self, tokens: Sequence[int], states: Sequence[int] = ()) -> bytes:
        config = self._source.spec.config
        fields = {
            "fingerprint": self.fingerprint,
            "layers": len(self._windows),
            "kv_heads": config.n_kv_heads,
            "head_dim": config.head_dim,
            "type_k": self._kv.type_k,
            "type_v": self._kv.type_v,
            "tokens": list(tokens),
        }
        if self._states:
            fields["states"] = list(states)
        if config.rope.long_factors:  # keys of a short context are turned by other angles
            longest = longest_sequence(config, self._kv.context)
            fields["angles"] = "long" if longest > config.rope.original_context else "short"
        return json.dumps(fields).encode()

    @property
    def _cell_blocks(self) -> int:
        return 2 * len(self._windows) * self._source.spec.config.n_kv_heads

    def _places(self, cells: int, header: bytes, states: int) -> tuple[int, int]:
        """(offset of the first block, bytes of the file) with so many checkpoints."""
        count = states * self._states.count if self._states else 0
        start = _FIXED.size + len(header) + 4 * (self._cell_blocks + count)
        nbytes = count * self._states.block_nbytes if self._states else 0
        return start, start + sum(self._layer_bytes(i, cells) for i in range(len(self._windows))) + nbytes

    def _states_start(self, cells: int, start: int) -> int:
        """Where checkpoints begin, behind the cells' blocks, which begin at `start`."""
        return start + sum(self._layer_bytes(i, cells) for i in range(len(self._windows)))

    def _layer_bytes(self, layer: int, cells: int) -> int:
        heads = self._source.spec.config.n_kv_heads
        return heads * sum(self._block_bytes(layer, what, cells) for what in "kv")

    def _block_bytes(self, layer: int, what: str, cells: int) -> int:
        if what == "v" and self._source.spec.config.latent:
            return 0  # a latent is both
        kind = self._kv.type_k if what == "k" else self._kv.type_v
        there = cells - min(cells, window_start(cells, self._windows[layer]))
        return there * kv_nbytes(kind, self._source.spec.config.head_dim)

    def _offset(self, block: HeadCells, cells: int, start: int) -> int:
        heads = self._source.spec.config.n_kv_heads
        layer, rest = divmod(block.number, 2 * heads)
        k, v = (self._block_bytes(layer, what, cells) for what in "kv")
        before = sum(self._layer_bytes(i, cells) for i in range(layer))
        return start + before + (rest * k if rest < heads else heads * k + (rest - heads) * v)

    def _write_blocks(
        self, path: Path, held: Segment, header: bytes, states: Sequence[Checkpoint]
    ) -> list[tuple[int, int]]:
        """Write this rank's blocks; returns (number, CRC) of each."""
        cells, sums, dim = held.past, [], self._source.spec.config.head_dim
        start, _ = self._places(cells, header, len(states))
        with open(path, "r+b") as file:
            for unit, heads in self._by_unit().items():
                memory = self._read_cells(unit, held)
                for block in (b for b in heads if b.written):
                    raw = take_head(memory[block.what], block.head, dim).view(torch.uint8).numpy().tobytes()
                    file.seek(self._offset(block, cells, start))
                    file.write(raw)
                    sums.append((block.number, zlib.crc32(raw)))
            if self._states:
                written = self._states.write(file, self._states_start(cells, start), states)
                sums += [(self._cell_blocks + number, crc) for number, crc in written]
        return sums

    def _finish(self, temporary: Path, path: Path, header: bytes, sums: dict[int, int]) -> str | None:
        """Write what stands before the blocks and give the file its name; returns what went wrong."""
        try:
            with open(temporary, "r+b") as file:
                file.write(_FIXED.pack(MAGIC, VERSION, len(header), zlib.crc32(header)) + header)
                file.write(struct.pack(f"<{len(sums)}I", *(sums[i] for i in range(len(sums)))))
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, resolve_place(path))
        except OSError as error:
            return str(error.strerror)
        return None

    def _read(self, path: Path, take: Callable[[int], Segment]) -> tuple[tuple[int, ...], list[Checkpoint]]:
        with open_regular(path) as file:
            header, fields = _read_header(path, file)
            wanted = json.loads(self._header(()))
            for name in wanted:
                if name not in ("tokens", "states") and (found := fields.get(name)) != wanted[name]:
                    what = "is of another model" if name == "fingerprint" else f"has {name} {found}"
                    raise UserError(f"the KV cache {path} {what}; this run has {wanted[name]}: remove the file")
            config, tokens = self._source.spec.config, tuple(fields["tokens"])
            if not all(type(token) is int and 0 <= token < config.vocab for token in tokens):
                raise UserError(f"the KV cache {path} names tokens that the model does not have: remove it")
            if len(tokens) > (longest := longest_sequence(config, self._kv.context)):
                raise UserError(f"the KV cache {path} has {len(tokens)} cells, the context {longest}: give a larger -c")
            lengths = _check_lengths(path, fields.get("states"), len(tokens)) if self._states else []
            start, nbytes = self._places(len(tokens), header, len(lengths))
            if os.fstat(file.fileno()).st_size != nbytes:
                raise UserError(f"the KV cache {path} is cut off or damaged: remove it")
            blocks = self._cell_blocks + (len(lengths) * self._states.count if self._states else 0)
            sums = struct.unpack(f"<{blocks}I", file.read(4 * blocks))
            held = take(len(tokens))
            for unit, heads in self._by_unit().items():
                memory = self._read_cells(unit, held)
                for block in heads:
                    file.seek(self._offset(block, len(tokens), start))
                    layer = block.number // (2 * config.n_kv_heads)
                    raw = bytearray(file.read(self._block_bytes(layer, block.what, len(tokens))))
                    if zlib.crc32(raw) != sums[block.number]:
                        raise UserError(f"the KV cache {path} is damaged (layer of {unit}): remove it")
                    if raw:
                        values = torch.frombuffer(raw, dtype=torch.uint8).view(memory[block.what].dtype)
                        put_head(memory[block.what], block.head, config.head_dim, values)
                write_cells(self._executor.residents.state_now(unit), self._place(unit, held)[0], memory)
                self._executor.device.synchronize()
            return tokens, self._read_states(path, file, start, sums, lengths)

    def _read_states(
        self, path: Path, file: BinaryIO, start: int, sums: Sequence[int], lengths: Sequence[int]
    ) -> list[Checkpoint]:
        """The checkpoints of a text of the last of these lengths."""
        if not self._states or not lengths:
            return []
        like, at = self._executor.residents.read_fixed(0), self._states_start(lengths[-1], start)
        try:
            return self._states.read(file, at, sums[self._cell_blocks :], lengths, like)
        except UserError as error:
            raise UserError(f"the KV cache {path} {error}: remove it") from None

    def _read_cells(self, unit: str, held: Segment) -> dict[str, torch.Tensor]:
        self._executor.device.synchronize()
        return read_cells(self._executor.residents.state_now(unit), *self._place(unit, held))

    def _place(self, unit: str, held: Segment) -> tuple[tuple[int, ...], int]:
        """The blocks of those cells of a sequence that the file has of a layer, and how many cells they are."""
        law = self._source.spec.unit(unit).state(self._source.spec.config, self._kv)
        if law is None or not law.window:
            return held.blocks, held.past
        start = min(held.past, window_start(held.past, law.window))
        return held.recent[start // KV_BLOCK :], held.past - start

    def _by_unit(self) -> dict[str, list[HeadCells]]:
        units: dict[str, list[HeadCells]] = {}
        for block in self._blocks:
            units.setdefault(block.unit, []).append(block)
        return units


def _check_lengths(path: Path, lengths: Any, cells: int) -> list[int]:
    """The lengths of checkpoints, when they rise up to that of the text. Raises UserError."""
    whole = isinstance(lengths, list) and all(type(n) is int and n > 0 for n in lengths)
    if not whole or lengths != sorted(set(lengths)) or lengths[-1:] != ([cells] if cells else []):
        raise UserError(f"the KV cache {path} has no state of its text: remove it")
    return lengths


def _read_header(path: Path, file: Any) -> tuple[bytes, dict[str, Any]]:
    fixed = file.read(_FIXED.size)
    if len(fixed) < _FIXED.size or not fixed.startswith(MAGIC):
        raise UserError(f"{path} is no KV cache of pshard; give another file")
    _, version, length, checksum = _FIXED.unpack(fixed)
    if version != VERSION:
        age = "an older" if version < VERSION else "a newer"
        raise UserError(f"the KV cache {path} is of {age} version, {version}; this pshard reads {VERSION}: remove it")
    header = file.read(length)
    if zlib.crc32(header) != checksum:
        raise UserError(f"the KV cache {path} is cut off or damaged: remove it")
    try:
        fields = parse_json(header)
    except ValueError:
        fields = None
    if not isinstance(fields, dict) or not isinstance(fields.get("tokens"), list):
        raise UserError(f"the KV cache {path} has a header that says nothing of its text: remove it")
    return header, fields


def _blocks_of(spec: ModelSpec, shape: StateShape, ranges: Sequence[Ranges], rank: int) -> Iterator[HeadCells]:
    """The blocks that a rank holds."""
    heads, d = spec.config.n_kv_heads, spec.config.head_dim
    caches = (u for u in spec.units if (law := u.state(spec.config, shape)) and law.cell)
    for layer, unit in enumerate(caches):
        key = unit.by_role[KV_A if spec.config.latent else QKV[1]].name
        rows = [r[unit.name].get(key, (0, 0, 0, 0)) for r in ranges]
        held = [range(start // d, stop // d) for start, stop, _, _ in rows]
        for at, head in enumerate(held[rank]):
            first = next(r for r, mine in enumerate(held) if head in mine)
            for i, what in enumerate("kv"):
                yield HeadCells((2 * layer + i) * heads + head, unit.name, what, at, first == rank)
