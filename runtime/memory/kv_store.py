"""Saves a text in one file that any number of ranks, on any device, can load.

The file (kv_file.py) holds cells by what they mean, not by where they lay. Its fields: fingerprint of the model,
layers, kv_heads, head_dim, type_k, type_v, tokens (ids of the cells). Its parts:

    for every layer K then V, for every KV head: [cells, head_dim] numbers of type_k or type_v; of q8_0 and q4_0 for
        each cell the head's codes (of 8 or 4 bits) and then its scales (f16, one for 32 codes). Latents are the K of
        one head, whose V has no number. Of a layer with a window the last cells only: from the block of KV_BLOCK cells
        on where what the next token sees begins. Of a layer that chooses cells then the index: [cells, numbers], f32
    of a model with a gated delta net, whose fields have `states`: the lengths of checkpoints, the last one the text's;
        of each for every such layer and key head a part, see checkpoints/saved_states.py
    with who drafted beside the text, whose fields have `drafter`, its name, and `drafter_cells`, of how many of the
        text's tokens: what that keeps, see speculation/; who has another drafter, or none, leaves it out

Every rank writes and reads the heads it holds, at their place; a head that several ranks hold is the lowest one's to
write. The ranks must see the same file.
"""

import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from pshard.cuts.rank_parts import Ranges
from pshard.errors import UserError
from pshard.jsonio import open_regular, to_json
from pshard.model import ModelSpec
from pshard.runtime.checkpoints.checkpoints import Checkpoint
from pshard.runtime.checkpoints.saved_states import find_states
from pshard.runtime.executor import Executor
from pshard.runtime.kernels.api import Segment
from pshard.runtime.kernels.kv_codec import put_head, take_head
from pshard.runtime.memory.kv_cache import read_cells, write_cells
from pshard.runtime.memory.kv_file import DAMAGED, Beside, KVFile, Outline, WrongFile, begin_file, finish_file
from pshard.runtime.memory.weights import WeightSource
from pshard.runtime.ranks.group import Group
from pshard.units.attention import QKV
from pshard.units.kv_cells import KV_BLOCK, kv_nbytes, longest_sequence, window_start
from pshard.units.latent_attention import KV_A
from pshard.units.state import CellState, FixedState, LatentState, StateShape
from pshard.units.unit import Unit

TakeBeside = Callable[[Sequence[int], Beside | None, Callable[[int], bytearray]], None]
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
    """One head's keys or values of one layer: number of its part, its unit, "k" or "v", head among this rank's, of so
    many numbers. Or what "index" says of the layer's cells, of which every rank has all."""

    number: int
    unit: str
    what: str
    head: int
    dim: int
    written: bool  # by this rank


class KVStore:
    """Saves and loads sequences of one engine. All ranks of the group make the same calls."""

    def __init__(self, source: WeightSource, held: Sequence[Ranges], kv: StateShape, executor: Executor, group: Group):
        """source: the whole model; held: what of it every rank has (pshard.cuts.rank_parts.split_ranges)."""
        self._source, self._kv, self._executor, self._group = source, kv, executor, group
        self._blocks = tuple(_blocks_of(source.spec, kv, held, group.rank))
        laws = (unit.state(source.spec.config, kv) for unit in source.spec.units)
        caches = (law for law in laws if isinstance(law, CellState | LatentState))
        self._heads = tuple(heads for _, *heads in _list_caches(source.spec, kv))
        self._held = held[group.rank]
        self._index = source.spec.config.selection.head if source.spec.config.selection else 0
        self._states = find_states(source.spec, held, group.rank)
        self._windows = tuple(law.window if isinstance(law, CellState) else 0 for law in caches)  # of every layer

    def save(
        self,
        path: Path,
        held: Segment,
        tokens: Sequence[int],
        states: Sequence[Checkpoint] = (),
        kept: tuple[Beside, Iterable[bytes]] | None = None,
    ) -> None:
        """Write the cells of a sequence with these tokens, which lie where `held` says, and its checkpoints, the last
        one of all tokens; the file is there whole or not at all. kept: of who drafts.

        Raises UserError.
        """
        self._check_states()
        beside, parts = kept or (None, ())
        outline = self._outline(tokens, [one.length for one in states], beside)
        temporary = self._begin(path, outline)
        try:
            sums, problem = self._write_parts(temporary, held, outline, states), None
            sums += _write_beside(temporary, outline, parts)
        except OSError as error:
            sums, problem = [], error.strerror
        said = self._group.gather((problem, sums))
        problem = next((p for p, _ in said if p), None)
        if self._group.rank == 0:
            written = dict(s for _, part in said for s in part)
            try:
                if not problem:
                    finish_file(temporary, path, outline, [written[i] for i in range(len(outline.sizes))])
            except OSError as error:
                problem = error.strerror
            temporary.unlink(missing_ok=True)
        self._raise_together(path, problem)

    def _begin(self, path: Path, outline: Outline) -> Path:
        """The file beside the wanted one, which rank 0 makes."""
        temporary, problem = "", None
        if self._group.rank == 0:
            try:
                temporary = str(begin_file(path, outline))
            except OSError as error:
                problem = error.strerror
        self._raise_together(path, problem)
        return Path(self._group.broadcast(temporary))

    def _raise_together(self, path: Path, problem: str | None) -> None:
        """Raise on every rank what rank 0 ran into."""
        if problem := self._group.broadcast(problem):
            raise UserError(f"cannot write the KV cache to {path}: {problem}; give another file")

    def load(
        self, path: Path, take: Callable[[int], Segment], drafter: TakeBeside
    ) -> tuple[tuple[int, ...], list[Checkpoint]]:
        """Fill cells from a file, where `take` says that so many lie; returns their token ids, and checkpoints.
        drafter: takes what the file has of who drafts, of the tokens that it is given.

        Raises UserError: not such a file, damaged, of another model or KV type, longer than the context, not the same
        on all ranks; or as `take`.
        """
        self._check_states()
        problem: str | None = None
        tokens: tuple[int, ...] = ()
        states: list[Checkpoint] = []
        try:
            tokens, states = self._read(path, take, drafter)
        except UserError as error:
            problem = str(error)
        except WrongFile as error:
            problem = f"the KV cache {path} {error}"
        except OSError as error:
            problem = f"cannot read the KV cache {path}: {error.strerror}; give another file"
        read = zlib.crc32(json.dumps(tokens).encode())
        said = self._group.gather((problem, read))
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

    def _outline(self, tokens: Sequence[int], states: Sequence[int], beside: Beside | None = None) -> Outline:
        """Of a file of these tokens, and checkpoints of these lengths, and what is kept beside them."""
        config = self._source.spec.config
        fields = {
            "fingerprint": self.fingerprint,
            "layers": len(self._windows),
            "kv_heads": _one_or_all([heads for heads, _ in self._heads]),
            "head_dim": _one_or_all([dim for _, dim in self._heads]),
            "type_k": self._kv.type_k,
            "type_v": self._kv.type_v,
            "tokens": list(tokens),
        }
        sizes = list[int]()
        for window, (heads, dim) in zip(self._windows, self._heads, strict=True):
            for what in "kv":
                sizes += heads * [self._block_bytes(window, what, len(tokens), dim)]
            sizes += [kv_nbytes("f32", self._index) * len(tokens)] if self._index else []
        if self._states:
            fields["states"] = list(states)
            sizes += self._states.sizes * len(states)
        if config.rope.long_factors:  # keys of a short context are turned by other angles
            longest = longest_sequence(config, self._kv.context)
            fields["angles"] = "long" if longest > config.rope.original_context else "short"
        if beside:
            fields |= {"drafter": beside.name, "drafter_cells": beside.cells}
            sizes += beside.sizes
        return Outline("text", fields, tuple(sizes))

    def _block_bytes(self, window: int, what: str, cells: int, dim: int) -> int:
        if what == "v" and self._source.spec.config.latent:
            return 0  # a latent is both
        kind = self._kv.type_k if what == "k" else self._kv.type_v
        there = cells - min(cells, window_start(cells, window))
        return there * kv_nbytes(kind, dim)

    @property
    def _first_state(self) -> int:
        """The number of the first part behind the cells'."""
        return sum(2 * heads + (self._index > 0) for heads, _ in self._heads)

    def _write_parts(
        self, path: Path, held: Segment, outline: Outline, states: Sequence[Checkpoint]
    ) -> list[tuple[int, int]]:
        """Write this rank's parts; returns (number, CRC) of each."""
        sums = list[tuple[int, int]]()
        with open(path, "r+b") as file:
            for unit, heads in self._by_unit().items():
                memory = self._read_cells(unit, held)
                for block in (b for b in heads if b.written):
                    raw = take_head(memory[block.what], block.head, block.dim).view(torch.uint8).numpy().tobytes()
                    file.seek(outline.offsets[block.number])
                    file.write(raw)
                    sums.append((block.number, zlib.crc32(raw)))
            if self._states:
                first = self._first_state
                written = self._states.write(file, outline.offsets[first:], states)
                sums += [(first + number, crc) for number, crc in written]
        return sums

    def _read(
        self, path: Path, take: Callable[[int], Segment], drafter: TakeBeside
    ) -> tuple[tuple[int, ...], list[Checkpoint]]:
        with open_regular(path) as opened:
            file = KVFile(opened, "text")
            tokens, lengths, beside = self._check_outline(path, file.outline)
            held = take(len(tokens))
            for unit, heads in self._by_unit().items():
                memory = self._read_cells(unit, held)
                for block in heads:
                    if raw := file.read_part(block.number, f"layer of {unit}"):
                        values = torch.frombuffer(raw, dtype=torch.uint8).view(memory[block.what].dtype)
                        put_head(memory[block.what], block.head, block.dim, values)
                write_cells(self._executor.residents.state_now(unit), self._place(unit, held)[0], memory)
                self._executor.device.synchronize()
            behind = len(file.outline.sizes) - (len(beside.sizes) if beside else 0)
            drafter(tokens, beside, lambda n: file.read_part(behind + n, "what drafts"))
            if not self._states or not lengths:
                return tokens, []
            like, first = self._executor.residents.read_fixed(0), self._first_state
            found = self._states.read(lambda n, what: file.read_part(first + n, what), lengths, like)
            return tokens, list(found)

    def _check_outline(self, path: Path, found: Outline) -> tuple[tuple[int, ...], list[int], Beside | None]:
        """The tokens and the lengths of checkpoints of a file that this engine can take, and what it has of who drafts.
        Raises UserError, WrongFile for others."""
        config, fields = self._source.spec.config, found.fields
        wanted = self._outline((), ()).fields
        if not isinstance(fields.get("tokens"), list):
            raise WrongFile("has a header that says nothing of its text: remove it")
        for name in wanted:
            if name not in ("tokens", "states") and (there := fields.get(name)) != wanted[name]:
                what = "is of another model" if name == "fingerprint" else f"has {name} {there}"
                raise WrongFile(f"{what}; this run has {wanted[name]}: remove the file")
        tokens = tuple(fields["tokens"])
        if not all(type(token) is int and 0 <= token < config.vocab for token in tokens):
            raise WrongFile("names tokens that the model does not have: remove it")
        if len(tokens) > (longest := longest_sequence(config, self._kv.context)):
            raise UserError(f"the KV cache {path} has {len(tokens)} cells, the context {longest}: give a larger -c")
        lengths = _check_lengths(fields.get("states"), len(tokens)) if self._states else []
        own = self._outline(tokens, lengths).sizes
        beside = _find_beside(fields, found.sizes[len(own) :], len(tokens))
        if found.sizes != own + (beside.sizes if beside else ()):
            raise WrongFile(DAMAGED)
        return tokens, lengths, beside

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


def _find_beside(fields: Mapping[str, Any], sizes: tuple[int, ...], tokens: int) -> Beside | None:
    """What a file has of who drafts. Raises WrongFile where it cannot be so."""
    name, cells = fields.get("drafter"), fields.get("drafter_cells")
    if name is None and cells is None:
        return None
    if type(name) is not str or type(cells) is not int or not 0 < cells <= tokens:
        raise WrongFile("has a header that says nothing of who drafts: remove it")
    return Beside(name, cells, sizes)


def _write_beside(path: Path, outline: Outline, parts: Iterable[bytes]) -> list[tuple[int, int]]:
    """Write what is kept beside a text, the last parts; returns (number, CRC) of each. Raises OSError."""
    if "drafter" not in outline.fields:
        return []
    written, made = list[tuple[int, int]](), list(parts)
    first = len(outline.sizes) - len(made)
    with open(path, "r+b") as file:
        for number, raw in enumerate(made, first):
            file.seek(outline.offsets[number])
            file.write(raw)
            written.append((number, zlib.crc32(raw)))
    return written


def _check_lengths(lengths: Any, cells: int) -> list[int]:
    """The lengths of checkpoints, when they rise up to that of the text. Raises WrongFile."""
    whole = isinstance(lengths, list) and all(type(n) is int and n > 0 for n in lengths)
    if not whole or lengths != sorted(set(lengths)) or lengths[-1:] != ([cells] if cells else []):
        raise WrongFile("has no state of its text: remove it")
    return lengths


def _one_or_all(values: list[int]) -> int | list[int]:
    """What holds of all layers, or that of each."""
    return values[0] if len(set(values)) == 1 else values


def _list_caches(spec: ModelSpec, shape: StateShape) -> list[tuple[Unit, int, int]]:
    """The units that keep cells, each with its KV heads and the numbers of one."""
    caches = (u for u in spec.units if (law := u.state(spec.config, shape)) and law.cell)
    return [(u, config.n_kv_heads, config.head_dim) for u in caches for config in (u.sees(spec.config),)]


def _blocks_of(spec: ModelSpec, shape: StateShape, ranges: Sequence[Ranges], rank: int) -> Iterator[HeadCells]:
    """The blocks that a rank holds."""
    before = 0
    for unit, heads, d in _list_caches(spec, shape):
        key = unit.by_role[KV_A if spec.config.latent else QKV[1]].name
        rows = [r[unit.name].get(key, (0, 0, 0, 0)) for r in ranges]
        held = [range(start // d, stop // d) for start, stop, _, _ in rows]
        for at, head in enumerate(held[rank]):
            first = next(r for r, mine in enumerate(held) if head in mine)
            for i, what in enumerate("kv"):
                yield HeadCells(before + i * heads + head, unit.name, what, at, d, first == rank)
        before += 2 * heads
        if rule := spec.config.selection:
            if held[rank]:
                first = next(r for r, mine in enumerate(held) if mine)
                yield HeadCells(before, unit.name, "index", 0, rule.head, first == rank)
            before += 1
