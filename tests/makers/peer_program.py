"""What the ranks of test_peer_exchange.py run: FOLDER RANK RANKS SCENARIO[+SCENARIO], on one mapped file per rank."""

import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
from interpreted import mend_interpreter
from rank_program import inner_norm

from pshard.runtime.ranks.group import Group

POLL_SECONDS = 1e-4


def summand(rank: int, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """A part whose sum depends on the order in which it is made."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + rank)) * 10.0 ** (rank % 3)


def open_exchange(folder: Path, rank: int, ranks: int) -> Any:
    """An exchange between processes of one host, each memory a mapped file: for Triton's interpreter."""
    from pshard.runtime.kernels.gpu.exchange.triton_exchange import exchange_nbytes
    from pshard.runtime.ranks.peer_memory import PeerExchange

    memories = []
    for r in range(ranks):
        path = folder / f"memory-{r}"
        end = time.monotonic() + 60
        if r == rank:
            with open(path.with_suffix(".new"), "wb") as file:
                file.truncate(exchange_nbytes(ranks))
            path.with_suffix(".new").rename(path)
        while not path.exists():
            assert time.monotonic() < end
            time.sleep(0.01)
        memories.append(torch.from_file(str(path), shared=True, size=exchange_nbytes(ranks), dtype=torch.uint8))
    addresses = [m.data_ptr() for m in memories]
    return PeerExchange(memories[rank], addresses, rank, torch.zeros(1, dtype=torch.int32), memories)


SUMS = [
    ((1, 96), "rows", "f32"),
    ((3, 160), "rows", "bf16"),
    ((2, 700), "rows", "f32"),
    ((1, 7), "one-shot", "f32"),
    ((3, 5000), "one-shot", "bf16"),
    ((5, 5000), "two-shot", "f32"),
    ((3, 5000), "two-shot", "f16"),
    ((3, 5000), "one-shot", "f32"),
    ((2, 64), "rows", "f32"),
]


def sums(exchange: Any, out: Path) -> None:
    results = []
    for seed, (shape, algorithm, wire) in enumerate(SUMS):
        part = summand(exchange.rank, shape, seed)
        onto = torch.arange(part.numel(), dtype=torch.float32).view(shape)
        exchange.sum(part, onto, algorithm, wire, accumulate=True)
        exchange.sum(part, part, algorithm, wire, accumulate=False)
        results += [onto, part]
    torch.save(results, out / f"sums-{exchange.rank}.pt")


def rounds(exchange: Any, out: Path) -> None:
    """The same by one program, which takes several rounds."""
    from pshard.runtime.kernels.gpu.exchange import triton_exchange

    triton_exchange.LAUNCHED = 1
    sums(exchange, out)


def norms(exchange: Any, out: Path) -> None:
    """A sum that is added as it is, and one that is normalised before."""
    from pshard.runtime.ranks.sum_norm import NO_SUM_NORM

    found, weight = list[torch.Tensor](), summand(9, (96,), 2)
    for within in (NO_SUM_NORM, inner_norm(inner_weight(96))):
        part, hidden, normed = summand(exchange.rank, (3, 96), 0), summand(9, (3, 96), 1), torch.zeros(3, 128)
        exchange.sum_rows(part, hidden, "f32", True, (weight, 1e-5, normed[:, :96]), within=within)
        found += [hidden, normed]
    torch.save(found, out / f"norms-{exchange.rank}.pt")


def inner_weight(cols: int) -> torch.Tensor:
    """Of `inner_norm`."""
    return summand(9, (cols,), 4)


MANY = [  # rows of two places come between rows of one
    *((7, 96, "f32", torch.float32), (5, 2000, "bf16", torch.bfloat16)),
    *((3, 5000, "bf16", torch.bfloat16), (9, 1500, "bf16", torch.float32)),
]
USED = 3  # experts of a token


def many(exchange: Any, out: Path) -> None:
    """Sums of whole rows by two programs, which take several rounds: alone, in place, with their norm, with their norm
    of parts that are still what experts gave, and normalised before they are added."""
    from pshard.runtime.kernels.gpu.exchange import triton_exchange
    from pshard.runtime.kernels.gpu.experts.grouped import add_up
    from pshard.runtime.kernels.gpu.experts.picked import Picked

    triton_exchange.LAUNCHED, results = 2, []
    for seed, (rows, cols, wire, dtype) in enumerate(MANY):
        part, hidden = summand(exchange.rank, (rows, cols), seed).to(dtype), summand(9, (rows, cols), seed)
        alone, in_place = hidden.clone(), part.float().clone()
        exchange.sum(part, alone, "many-rows", wire, accumulate=True)
        exchange.sum(in_place, in_place, "many-rows", wire, accumulate=False)
        normed, rounded = torch.zeros(rows, cols + 8), torch.zeros(rows, cols, dtype=torch.bfloat16)
        norm = summand(9, (cols,), 2), 1e-5, normed[:, :cols]
        exchange.sum_many_rows(part, hidden, wire, True, norm, rounded if seed else None)
        ids = (
            torch.arange(rows * USED, dtype=torch.int32).view(rows, USED) % 5 - 1
        )  # one has no expert, one is elsewhere
        picked = summand(exchange.rank, (rows * USED, cols), 9)
        pairs = Picked(picked, ids, torch.rand(rows, USED), torch.tensor([1, 1, 0, 1]))
        made, from_pairs, from_made = torch.zeros(rows, cols, dtype=dtype), hidden.clone(), hidden.clone()
        add_up(pairs, made, False)
        norm = *norm[:2], torch.zeros(rows, cols)
        exchange.sum_many_rows(made, from_made, wire, True, norm)
        exchange.sum_many_rows(part, from_pairs, wire, True, norm, pairs=pairs)
        inner = summand(9, (rows, cols), seed), torch.zeros(rows, cols)
        exchange.sum_many_rows(part, inner[0], wire, True, (*norm[:2], inner[1]), within=inner_norm(inner_weight(cols)))
        results.append((hidden, normed, rounded, alone, in_place, from_pairs, from_made, *inner))
    torch.save(results, out / f"many-{exchange.rank}.pt")


def pushes(exchange: Any, out: Path) -> None:
    """Sums of parts that leave from a product, on all ranks, some or none, as rows of one and of three."""
    from random_weights import random_weight

    from pshard.runtime.kernels.api import PendingSum
    from pshard.runtime.kernels.gpu.cuda import CudaKernels

    kernels, results = CudaKernels("cpu", 4), []
    matrix, _ = random_weight("Q4_0", 64, 512, exchange.rank)
    for seed, tokens in enumerate((1, 3, 1, 1)):
        x = summand(exchange.rank, (tokens, 512), seed).to(torch.bfloat16)
        found = []
        for leaves in (True, False, exchange.rank == 0, exchange.rank != 0):
            part, hidden = torch.zeros(tokens, 64), summand(9, (tokens, 64), seed)
            normed = torch.zeros(tokens, 64, dtype=torch.bfloat16)
            if leaves:
                kernels.linear_part(exchange, "f32", x, matrix, part, torch.empty(0))
            else:
                kernels.linear(x, matrix, part, torch.empty(0))
            kernels.sum_rms_norm(PendingSum(exchange, part, "f32"), hidden, torch.ones(64), 1e-5, normed)
            found.append((part, hidden, normed))
        results.append(found)
    torch.save(results, out / f"pushes-{exchange.rank}.pt")


def slices(exchange: Any, out: Path) -> None:
    """Norms of rows of three slices, whose programs meet: a process for each, as the interpreter has one at a time. The
    second sum is normalised before it is added."""
    from triton.runtime.interpreter import TensorHandle, interpreter_builder

    from pshard.runtime.kernels.gpu.products import triton_row_sum
    from pshard.runtime.ranks.sum_norm import NO_SUM_NORM

    programs, cols = 4, 2 * triton_row_sum.SLICE + 160  # the last has no columns, as those that are left out
    row = [summand(exchange.rank, (1, 96), seed) for seed in range(3)]
    exchange.sum_rows(row[0], row[1], "f32", True, (torch.ones(96), 1e-5, row[2]))  # else each process reads the kernel
    hidden, normed = torch.zeros(2, cols).share_memory_(), torch.zeros(2, cols).share_memory_()
    for counts in (exchange._epochs, exchange._squares):
        counts.share_memory_()
    triton_row_sum.MAX_COLS = triton_row_sum.SLICE  # of a launch: one program for each row
    row_of = interpreter_builder.create_get_program_id
    for seed, within in ((0, NO_SUM_NORM), (3, inner_norm(inner_weight(cols)))):
        part, children = summand(exchange.rank, (2, cols), seed), []
        for piece in range(programs):
            children.append(os.fork())
            if children[-1] == 0:
                here = TensorHandle(np.array([piece], np.int32), triton_row_sum.tl.int32)
                interpreter_builder.create_get_program_id = lambda axis, here=here: here if axis else row_of(0)
                norm = summand(9, (cols,), 2), 1e-5, normed
                exchange.sum_rows(part, hidden, "f32", True, norm, within=within)
                os._exit(0)
        assert all(os.waitpid(child, 0)[1] == 0 for child in children)
    torch.save([hidden, normed], out / f"slices-{exchange.rank}.pt")


def gathers(exchange: Any, out: Path) -> None:
    widths = (4100, 0, 37)[: exchange.size]
    start = sum(widths[: exchange.rank])
    table = torch.full((2, sum(widths)), -1.0)
    table[:, start : start + widths[exchange.rank]] = exchange.rank + torch.arange(2.0)[:, None] / 4
    exchange.gather(table, widths)
    torch.save(table, out / f"gathers-{exchange.rank}.pt")


class PeerGroup(Group):
    """Ranks that have nothing but an exchange."""

    def __init__(self, exchange: Any, widths: tuple[int, ...]) -> None:
        self.rank, self.size, self._exchange, self._widths = exchange.rank, exchange.size, exchange, widths
        self._asked = 0

    def add_sum(self, hidden: torch.Tensor, part: torch.Tensor) -> None:
        self._exchange.sum(part, hidden, self._exchange.algorithms(*part.shape, "f32")[0], "f32", True)

    @property
    def peers(self) -> Any:
        return self._exchange

    def row_exchange(self, rows: int, columns: int) -> Any:
        by_rows = {"rows", "many-rows"} & set(self._exchange.algorithms(rows, columns, "f32"))
        return self._exchange if by_rows else None

    def pushes(self, part: torch.Tensor) -> bool:
        self._asked += 1
        return self._asked % 3 != self.rank  # ranks need not agree

    def logit_widths(self, columns: int, on_device: bool) -> tuple[int, ...]:
        return self._widths

    def gather_logits(self, table: torch.Tensor, widths: tuple[int, ...]) -> None:
        self._exchange.gather(table, widths)


def engines(exchange: Any, out: Path) -> None:
    """A rank of an engine on the GPU's kernels; the second of three ranks holds nothing."""
    torch.save(run_engine(exchange, out, 4, [5, 6]), out / f"engines-{exchange.rank}.pt")


def prompts(exchange: Any, out: Path) -> None:
    """A prompt of a mixture, whose sums take the norms that follow along, and where they do not."""
    from pshard.runtime.blocks import router_block
    from pshard.runtime.kernels.gpu.products import many_rows
    from pshard.runtime.walks.unit_runs import UnitRuns

    def multiply(x: torch.Tensor, w: torch.Tensor, rows: torch.Tensor, accumulate: bool) -> None:
        result = x.float() @ w.float().T
        rows.copy_(rows + result if accumulate else result)

    many_rows._multiply_by_library = multiply  # which has no such types on a CPU
    found = []
    for tokens in (32, 4096):  # the choices of a router are made by both ranks, or by each
        router_block.DIVIDED_TOKENS = tokens
        found.append(run_engine(exchange, out, 80, [7 * i % 320 for i in range(70)]))
    UnitRuns._sum_for = lambda *_: None
    found.append(run_engine(exchange, out, 80, [7 * i % 320 for i in range(70)]))
    torch.save(found, out / f"prompts-{exchange.rank}.pt")


def run_engine(exchange: Any, out: Path, tokens: int, prompt: list[int]) -> torch.Tensor:
    """The prompt's logits by the model that lies in the folder, with micro-batches of so many tokens."""
    from engines import pinned_everywhere
    from plan_samples import make_rank_plan, make_variant, with_workload

    from pshard.cuts.tensor_cuts import cut_model, vocab_sizes
    from pshard.models import open_model
    from pshard.runtime import build_engine as session
    from pshard.runtime.devices.device import open_device
    from pshard.runtime.kernels.gpu.cuda import CudaKernels
    from pshard.runtime.kernels.plain import PlainKernels

    shares, context = (1.0, 1.0) if exchange.size == 2 else (1.0, 0.0, 1.0), 64 if tokens < 64 else 128
    spec = open_model(out / "m.gguf").spec
    specs = [cut_model(spec, shares, r) for r in range(exchange.size)]
    tiers = (tokens,)
    plans = tuple(make_rank_plan(s, pinned_everywhere(s, tiers, context), r, shares[r]) for r, s in enumerate(specs))
    variant = make_variant(spec, plans[0].tiers, context, 1, plans)
    variant = with_workload(variant, split_mode="tensor", tensor_split=shares)
    session.choose_kernels = lambda *_: (CudaKernels("cpu", tokens), PlainKernels(), ())
    group = PeerGroup(exchange, vocab_sizes(spec, shares))
    with session.build_engine(open_model(out / "m.gguf"), variant, open_device("cpu"), group=group) as engine:
        return engine.forward(prompt, all_logits=True)


def late(exchange: Any, out: Path) -> None:
    from pshard.runtime.ranks import peer_memory

    peer_memory.PATIENCE = 20
    if exchange.rank == 0:
        for algorithm in ("rows", "one-shot", "two-shot"):
            exchange.sum(torch.ones(1, 64), torch.zeros(1, 64), algorithm, "f32", True)
        (out / "late").write_text(str(exchange.late_rank()))


def poll_gently() -> None:
    """What is read again and again until a peer has written leaves the core to that peer."""
    from triton.runtime.interpreter import InterpreterBuilder

    add, load = InterpreterBuilder.create_atomic_rmw, InterpreterBuilder.create_masked_load

    def add_and_rest(*arguments: Any) -> Any:
        time.sleep(POLL_SECONDS)
        return add(*arguments)

    def load_and_rest(self: Any, ptrs: Any, mask: Any, other: Any, cache: Any, eviction: Any, volatile: Any) -> Any:
        if volatile:
            time.sleep(POLL_SECONDS)
        return load(self, ptrs, mask, other, cache, eviction, volatile)

    InterpreterBuilder.create_atomic_rmw, InterpreterBuilder.create_masked_load = add_and_rest, load_and_rest


def main() -> None:
    folder, rank, ranks, scenarios = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4].split("+")
    mend_interpreter()
    poll_gently()
    np.seterr(over="ignore")
    from pshard.runtime.ranks import peer_memory  # noqa: F401  imports Triton's kernels once for all scenarios

    for scenario in scenarios:
        memories = folder / f"of-{scenario}"
        memories.mkdir(exist_ok=True)
        child = os.fork()  # a scenario may change numbers of modules
        if child == 0:
            try:
                globals()[scenario](open_exchange(memories, rank, ranks), folder)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"rank {rank} failed in {scenario}")


if __name__ == "__main__":
    main()
