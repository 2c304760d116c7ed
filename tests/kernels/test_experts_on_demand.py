"""Experts that the C++ library reads within its call: what is computed, and who lies in which slot."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pshard.model_config import Experts
from pshard.quant import packed_nbytes
from pshard.routing.follow_use import DemandFollower
from pshard.runtime.kernels.api import ExpertWeights, Packed, Routes
from pshard.runtime.kernels.cpu import native
from pshard.runtime.kernels.cpu.host import HostKernels
from pshard.runtime.memory.demand_slots import _Library
from pshard.runtime.memory.disk.reader import DiskReader, PackedPiece, PieceList

pytestmark = pytest.mark.skipif(not native.is_available(), reason=f"CPU kernels: {native.why_missing()}")

LAYERS, COUNT, USED, WIDTH = 3, 6, 2, 16
EACH = packed_nbytes("F32", WIDTH, WIDTH)
RULE = Experts(COUNT, USED, WIDTH)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """float32 [layers, experts, 3, numbers] in a file, and in memory."""
    numbers = torch.randn(LAYERS, COUNT, 3, EACH // 4, generator=torch.Generator().manual_seed(1))
    path = tmp_path_factory.mktemp("experts") / "file"
    path.write_bytes(numbers.numpy().tobytes())
    return path, numbers


@dataclass(frozen=True)
class Here:
    """See Demand, of kernels of the library alone."""

    pool: int
    row: int

    def open(self) -> tuple[int, int]:
        return self.pool, self.row

    def bring(self, ids: torch.Tensor) -> None:
        raise AssertionError("the library does so itself")


def describe(addresses: torch.Tensor, numbers: torch.Tensor, demand: Here | None = None) -> ExpertWeights:
    stacks = [tuple(Packed(part, "F32", WIDTH, WIDTH) for part in numbers[:, m]) for m in range(3)]
    return ExpertWeights(stacks[0], stacks[1], stacks[2], addresses, demand=demand)


def compute(weights: ExpertWeights, ids: torch.Tensor, seed: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    x, mix, pairs = torch.randn(len(ids), WIDTH, generator=rng), torch.rand(len(ids), USED, generator=rng), ids.numel()
    scratch = {
        "gated": torch.empty(pairs * WIDTH),
        "picked": torch.empty(pairs * WIDTH),
        "order": torch.empty(4 * (pairs + COUNT) + 64, dtype=torch.int32),
    }
    out = torch.ones(len(ids), WIDTH)
    HostKernels().experts(x, Routes(ids, mix), weights, RULE, out, scratch, True)
    return out


rows = st.lists(st.permutations(range(COUNT)).map(lambda order: order[:USED]), min_size=1, max_size=2)


@settings(max_examples=30, deadline=None)
@given(
    slots=st.integers(2 * USED, LAYERS * COUNT),
    steps=st.lists(st.tuples(st.integers(0, LAYERS - 1), rows), max_size=20),
    barred=st.sets(st.integers(0, LAYERS * COUNT - 1), max_size=3),
)
def test_results_are_those_of_memory_and_slots_those_of_the_follower(weights, slots, steps, barred) -> None:
    """barred: experts that lie in memory all the time, and come to no slot."""
    path, numbers = weights
    eligible = np.array([i not in barred for i in range(LAYERS * COUNT)]).reshape(LAYERS, COUNT)
    first = [(int(layer), int(expert)) for layer, expert in np.argwhere(eligible)][: slots // 2]
    follower, shared = (DemandFollower(eligible, slots, first) for _ in range(2))
    at_home = torch.tensor([[[p.data_ptr() for p in each] for each in layer] for layer in numbers]).transpose(1, 2)
    table = torch.where(torch.from_numpy(eligible)[:, None], 0, at_home).contiguous()
    memory, reader = torch.zeros(slots, 3 * EACH, dtype=torch.uint8), DiskReader()
    try:
        file = reader.add_file(path)
        pool = _Library(reader.address, shared, (memory.data_ptr(), 3 * EACH, EACH * np.arange(3, dtype=np.int64)))
        for layer, held in enumerate(eligible):
            here = [(3 * COUNT * layer + 3 * e + m) * EACH for e in np.flatnonzero(held) for m in range(3)]
            pieces = [PackedPiece(file, offset, EACH, -1, i % 3 * EACH) for i, offset in enumerate(here)]
            starts = np.concatenate([[0], 3 * held.cumsum()]).astype(np.int64)
            pool.add_layer(layer, PieceList(pieces).table, starts)
        pool.add_table(table)
        for layer, expert in first:
            slot = shared.slot_of[layer, expert]
            memory[slot].view(torch.float32).view(3, -1).copy_(numbers[layer, expert])
            table[layer, :, expert] = torch.tensor([memory[slot].data_ptr() + m * EACH for m in range(3)])
        for seed, (layer, chosen) in enumerate(steps):
            ids = torch.tensor(chosen, dtype=torch.int32)
            right = compute(describe(at_home[layer].contiguous(), numbers[layer]), ids, seed)
            found = compute(describe(table[layer], numbers[layer], Here(pool.address, layer)), ids, seed)
            follower.arrive(follower.look_up(layer, ids.numpy()).started)
            assert torch.equal(found, right)
            assert (shared.slot_of == follower.slot_of).all() and pool.counts == follower.counts
            places = follower.slot_of[:, None] * 3 * EACH + EACH * np.arange(3)[:, None] + memory.data_ptr()
            expected = np.where(follower.slot_of[:, None] < 0, 0, places)
            assert (table.numpy() == np.where(eligible[:, None], expected, at_home)).all()
        reader.check()
    finally:
        reader.close()
