"""What the ranks of the group tests run: `main` is started once per rank by start_ranks.py or torchrun.

Its first argument names scenarios of this file, one after the other: "sums+hands@shm".
"""

import json
import os
import signal
import sys
import time
from itertools import product
from pathlib import Path

import torch

from pshard.errors import UserError
from pshard.reserve import TORCH_RESERVE_MIB
from pshard.runtime.kernels.cpu import native
from pshard.runtime.ranks import group as parallel
from pshard.runtime.ranks import watch
from pshard.runtime.ranks.group import Group, init_group
from pshard.runtime.ranks.sum_norm import NO_SUM_NORM, SumNorm


def partial(rank: int, shape: tuple[int, ...]) -> torch.Tensor:
    """A summand whose sum depends on the order in which it is made."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)) * 10.0 ** (rank % 3)


def normalise(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Its RMS norm, float64."""
    return x.double() * (x.double().square().mean(1, keepdim=True) + 1e-5).rsqrt() * weight


def inner_norm(weight: torch.Tensor) -> SumNorm:
    """How a sum is normalised before it is added."""
    return SumNorm(weight, torch.full((1,), 0.75, device=weight.device))


def add_normalised(hidden: torch.Tensor, part: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What a sum of parts makes of hidden by `inner_norm`, float64."""
    return (hidden.double() + normalise(part, weight)) * 0.75


def sums(group: Group, out: Path) -> None:
    results = []
    for shape in ((1, 7), (3, 64), (5, 4096), (300, 1111)):
        tensor = partial(group.rank, shape)
        group.all_reduce(tensor)
        results.append(tensor)
    torch.save(results, out / f"sums-{group.rank}.pt")


def gathers(group: Group, out: Path) -> None:
    sizes = [3, 5] if group.size == 2 else [3, 0, 5, 2]
    local = torch.full((2, sizes[group.rank]), float(group.rank))
    gathered = group.gather_columns(local)
    said = group.broadcast({"tokens": [1, 2, 3], "by": group.rank})
    group.barrier()
    (out / f"gathers-{group.rank}.json").write_text(json.dumps([gathered.tolist(), said]))


def hands(group: Group, out: Path) -> None:
    """Messages of all sizes from rank to rank; those who send are ahead of those who take."""
    sizes, passed = [1, 5000, 262144, 262145, 700000, 3, 64] * 3, 0
    for i, n in enumerate(sizes):
        message, mine = torch.arange(n, dtype=torch.float32) + i, torch.zeros(n)
        if group.rank:
            time.sleep(0.002 * (i % 3))
            group.receive(mine, group.rank - 1)
            passed += int(torch.equal(mine, message))
        if group.rank + 1 < group.size:
            handed = message.clone()
            group.send(handed, group.rank + 1)
            group.finish_send()
            handed.fill_(-1)  # what was sent may be written to
    group.barrier()  # as the gather of logits: nobody leaves before all has come
    (out / f"hands-{group.rank}").write_text(str(passed))


def cores(group: Group, out: Path) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    (out / f"cores-{group.rank}.json").write_text(json.dumps([allowed, torch.get_num_threads()]))


def network(group: Group, out: Path) -> None:
    (out / f"network-{group.rank}").write_text(f"{group.backend} {os.environ.get('GLOO_SOCKET_IFNAME')}")


def keep_summing(group: Group, out: Path) -> None:
    """Until something happens; rank 1 tells the test its process id after some sums."""
    for i in range(10**9):
        group.all_reduce(torch.ones(64))
        if i == 10 and group.rank == 1:
            (out / "pid.tmp").write_text(str(os.getpid()))
            (out / "pid.tmp").rename(out / "pid")


def keep_summing_watched(group: Group, out: Path) -> None:
    watch.LOST_SECONDS = 4.0
    keep_summing(group, out)


def keep_summing_on_gpu(group: Group, out: Path) -> None:
    tensor = torch.ones(1, 4096, device="cuda")
    for i in range(10**9):
        group.all_reduce(tensor)
        torch.cuda.synchronize()
        if i == 10 and group.rank == 1:
            (out / "pid").write_text(str(os.getpid()))


def crash(group: Group, out: Path) -> None:
    group.all_reduce(torch.ones(64))
    if group.rank == 1:
        os._exit(9)
    group.all_reduce(torch.ones(64))


def crash_in_line(group: Group, out: Path) -> None:
    """Rank 2 waits for hidden states from rank 1, which dies; rank 0 waits for logits."""
    tensor = torch.ones(64)
    if group.rank == 1:
        group.receive(tensor, 0)
        os._exit(9)
    elif group.rank == 2:
        group.receive(tensor, 1)
    else:
        group.send(tensor, 1)
    group.gather_columns(torch.ones(1, 3 * (group.rank == 2)), float("inf"))


def stop_first(group: Group, out: Path) -> None:
    stop(group, out, 0)


def stop(group: Group, out: Path, rank: int = 1) -> None:
    watch.LOST_SECONDS = 4.0  # what is tested is what follows
    if group.rank == rank:
        os.kill(os.getpid(), signal.SIGSTOP)
    group.all_reduce(torch.ones(64))


def late(group: Group, out: Path) -> None:
    parallel.REDUCE_SECONDS = 1.0
    if group.rank == 1:
        time.sleep(600)
    group.all_reduce(torch.ones(64))


def gpu_sums(group: Group, out: Path) -> None:
    """Every way that the group has, in every type, three times: [(shape, dtype, algorithm, sums)]."""
    found = []
    for shape in ((1, 7), (3, 5120), (32, 8192), (100, 5120), (700, 5120)):
        for dtype in ("f32", "bf16", "f16"):
            group.reduce_dtype = dtype
            for algorithm in group.algorithms(*shape):
                sums = [partial(group.rank, shape).cuda() for _ in range(3)]
                for tensor in sums:
                    group.all_reduce(tensor, algorithm)
                found.append((shape, dtype, algorithm, torch.stack(sums).cpu()))
    group.check()
    torch.save(found, out / f"gpu_sums-{group.rank}.pt")


def gpu_norms(group: Group, out: Path) -> None:
    """Sums that take the norm along, each twice, then twice with a norm of their own before they are added: [(hidden,
    normed)]; what is handed over quantised is."""
    from pshard.runtime.kernels.api import PendingSum
    from pshard.runtime.kernels.gpu.cuda import CudaKernels

    kernels, found = CudaKernels("cuda", 64), []
    for shape in ((1, 5120), (32, 8192), (4, 768), (1, 5120)):
        exchange = group.row_exchange(*shape)
        assert exchange is not None
        weight = partial(8, shape[1:]).cuda()
        for norm in (NO_SUM_NORM, NO_SUM_NORM, *2 * [inner_norm(partial(7, shape[1:]).cuda())]):
            hidden, normed = partial(9, shape).cuda(), torch.empty(shape, dtype=torch.bfloat16, device="cuda")
            sums = PendingSum(exchange, partial(group.rank, shape).cuda(), "f32", norm)
            kernels.sum_rms_norm(sums, hidden, weight, 1e-5, normed)
            handed, anew = kernels._activations.quantise(normed)[0], kernels._activations.quantise(normed.clone())[0]
            assert all(torch.equal(getattr(handed, n), getattr(anew, n)) for n in ("words", "scale", "sums"))
            found.append((hidden.cpu(), normed.cpu()))
    group.check()
    torch.save(found, out / f"gpu_norms-{group.rank}.pt")


def gpu_many_rows(group: Group, out: Path) -> None:
    """Sums of whole rows of prompts with their norm, from parts of both types, added as they are and normalised before:
    [(hidden, normed, rounded)]."""
    from pshard.runtime.kernels.api import PendingSum
    from pshard.runtime.kernels.gpu.cuda import CudaKernels

    kernels, found = CudaKernels("cuda", 64), []
    for shape in ((65, 2048), (300, 2880), (4096, 2048), (700, 4096), (1100, 5376), (70, 8192), (4096, 2048)):
        exchange, weight = group.row_exchange(*shape), partial(8, shape[1:]).cuda()
        assert exchange is not None and group.part_dtype(*shape) is torch.bfloat16
        for dtype, norm in product(
            (torch.float32, torch.bfloat16), (NO_SUM_NORM, inner_norm(partial(7, shape[1:]).cuda()))
        ):
            hidden, part = partial(9, shape).cuda(), partial(group.rank, shape).cuda().to(dtype)
            normed, rounded = torch.empty_like(hidden), torch.empty(shape, dtype=torch.bfloat16, device="cuda")
            kernels.sum_rms_norm(PendingSum(exchange, part, "bf16", norm), hidden, weight, 1e-5, normed, rounded)
            found.append((hidden.cpu(), normed.cpu(), rounded.cpu()))
    group.check()
    torch.save(found, out / f"gpu_many_rows-{group.rank}.pt")


def gpu_pushes(group: Group, out: Path) -> None:
    """Parts that leave for the peers from the product that makes them, and ones that do not: [(part, hidden)]."""
    from random_weights import random_weight

    from pshard.runtime.kernels.api import PendingSum
    from pshard.runtime.kernels.gpu.cuda import CudaKernels

    kernels, found = CudaKernels("cuda", 64), []
    for qtype, tokens in (("Q4_0", 1), ("Q6_K", 1), ("Q4_0", 8), ("Q8_0", 32)):
        matrix, _ = random_weight(qtype, 5120, 2560, group.rank)
        exchange, weight = group.row_exchange(tokens, 5120), torch.ones(5120, device="cuda")
        assert exchange is not None
        x = partial(group.rank, (tokens, 2560)).to("cuda", torch.bfloat16)
        for leaves in (False, True, True, False):
            part, hidden = torch.zeros(tokens, 5120, device="cuda"), torch.zeros(tokens, 5120, device="cuda")
            if leaves:
                kernels.linear_part(exchange, "f32", x, matrix, part, matrix.data)
            else:
                kernels.linear(x, matrix, part, matrix.data)
            kernels.sum_rms_norm(
                PendingSum(exchange, part, "f32"), hidden, weight, 1e-5, torch.empty_like(x.new_zeros(hidden.shape))
            )
            found.append((part.cpu(), hidden.cpu()))
    group.check()
    torch.save(found, out / f"gpu_pushes-{group.rank}.pt")


def gpu_crash(group: Group, out: Path) -> None:
    tensor = torch.ones(1, 4096, device="cuda")
    group.all_reduce(tensor)
    torch.cuda.synchronize()
    if group.rank == 1:
        os._exit(9)
    group.all_reduce(tensor)
    torch.cuda.synchronize()


def gpu_late(group: Group, out: Path) -> None:
    from pshard.runtime.ranks import peer_memory

    tensor = torch.ones(1, 4096, device="cuda")
    group.all_reduce(tensor)
    torch.cuda.synchronize()
    if group.rank == 1:
        time.sleep(600)
    peer_memory.PATIENCE = 100_000
    group.all_reduce(tensor)
    torch.cuda.synchronize()
    group.check()


def fast_engine(group: Group, out: Path) -> None:
    """As `engine`, on CPUs with the C++ kernels."""
    engine(group, out, "fast")


def engine(group: Group, out: Path, on_cpu: str = "plain") -> None:
    """The logits of a conversation with the model and under the plan that lie in the folder."""
    from engines import converse

    from pshard.jsonio import from_json
    from pshard.models import open_model
    from pshard.plan import Variant
    from pshard.runtime.build_engine import build_engine
    from pshard.runtime.devices.device import open_device

    variant = from_json(Variant, json.loads((out / "plan.json").read_text()))
    kind, kernels = ("cuda", "fast") if group.backend in ("nccl", "peers") else ("cpu", on_cpu)
    device = open_device(kind, group.local_rank)
    group.reduce_dtype = variant.workload.reduce_dtype
    with build_engine(open_model(out / "m.gguf"), variant, device, kernels=kernels, group=group) as opened:
        torch.save(converse(opened), out / f"engine-{group.rank}.pt")


def followed(group: Group, out: Path) -> None:
    """Logits, hits in slots and the routing record of a text that the toy model of routed experts decodes under the
    plan in the folder."""
    from followed_text import FILE, walk_text

    from pshard.jsonio import from_json
    from pshard.plan import Variant
    from pshard.runtime.build_engine import build_engine
    from pshard.runtime.devices.device import open_device

    variant = from_json(Variant, json.loads((out / "plan.json").read_text()))
    with build_engine(FILE, variant, open_device("cpu"), kernels="plain", group=group, records=True) as engine:
        walk = walk_text(engine)
    found, record = walk.hits, walk.record
    torch.save((walk.logits, found, record.ids, record.layers, record.batches), out / f"followed-{group.rank}.pt")


def leaves_early(group: Group, out: Path) -> None:
    """Rank 0, which has the store, is long gone when the others are done."""
    watch.GOODBYE_SECONDS = 1.2  # the others hear it
    time.sleep(4.0 * (group.rank > 0))


def careless(group: Group, out: Path) -> None:
    """Ends without leaving the group, while its watch beats all the time."""
    watch.BEAT_SECONDS = 1e-5
    time.sleep(0.7)
    raise UserError("enough")


def user_error(group: Group, out: Path) -> None:
    raise UserError("the budget is too small")


def wide_norms(group: Group, out: Path) -> None:
    """Logits of every family in `out` whose norms go over all ranks, with attention on the accelerator and on the CPU
    of every second rank: a prompt in two micro-batches, and tokens one by one."""
    from plan_samples import make_tier
    from thread_ranks import split_variant

    from pshard.models import open_model
    from pshard.runtime.build_engine import build_engine
    from pshard.runtime.devices.device import open_device
    from pshard.workload import Split

    device = "cuda" if group.backend in ("peers", "nccl") else "cpu"
    found = {}
    for path in sorted(out.glob("*.gguf")):
        for on_cpu in (False, True):

            def tiers(spec, on_cpu=on_cpu):
                here = on_cpu and group.rank % 2
                where = {u.name: ("cpu" if here and u.kind.state else "pinned", "host" if here else "vram")
                         if u.kind.state else ("pinned", None) for u in spec.units}  # fmt: skip
                return tuple(make_tier(spec, n, where, 2, 256, 1, batch=64) for n in (1, 64))

            reserve = TORCH_RESERVE_MIB if device == "cuda" else 0
            own = open_device(device, group.local_rank if device == "cuda" else 0)
            variant = split_variant(path, Split("tensor", (1.0,) * group.size), 256, tiers, reserve)
            with build_engine(open_model(path), variant, own, kernels="fast", group=group) as engine:
                ids = [1 + 7 * i % 300 for i in range(90)]
                parts = [engine.forward(ids[:80], all_logits=True), *(engine.forward([i]) for i in ids[80:])]
            found[path.stem, on_cpu] = torch.cat([part.view(-1, part.shape[-1]) for part in parts])
    torch.save(found, out / f"wide_norms-{group.rank}.pt")


def drafts(group: Group, out: Path) -> None:
    """Drafts of the cut head of the model in `out`, launched at once where that can be, then one by one; and whether it
    could."""
    from head_engines import add_head
    from plan_samples import with_workload
    from thread_ranks import split_variant

    from pshard.models import open_model
    from pshard.runtime.build_engine import build_engine
    from pshard.runtime.devices.device import open_device
    from pshard.runtime.speculation.second_program import Ask
    from pshard.workload import Split

    kind = "cuda" if group.backend in ("peers", "nccl") else "cpu"
    path, reserve = out / "m.gguf", TORCH_RESERVE_MIB if kind == "cuda" else 0
    variant = split_variant(path, Split("tensor", (1.0,) * group.size), 512, None, reserve, keeps_states=True)
    variant = add_head(with_workload(variant, type_k="f32", type_v="f32"), open_model(path).spec, True)
    ids, found, device = [1 + 7 * i % 89 for i in range(300)], [], open_device(kind, group.local_rank)
    with build_engine(open_model(path), variant, device, group=group, checkpoint_bytes=1 << 24) as engine:
        walks = engine.drafter._program.walks
        for at_once in (True, False):
            if not at_once:
                chained = walks._chain is not None and walks._chain[1] is not None
                walks.follow_on = lambda *_: None
            text, told = engine.texts.begin(), []
            for length in (5, 61, 70, 253):
                engine.texts.extend([(text, ids[len(text.ids) : length])])
                told += engine.drafter.draft([Ask(text, (ids[length],), 7)])
            engine.texts.close(text)
            found.append(told)
    torch.save((found, chained), out / f"drafts-{group.rank}.pt")


def main() -> int:
    scenario, ranks, out = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    try:
        scenario, _, backend = scenario.partition("@")
        if backend == "no-library":
            native._WHY_MISSING = "it is gone"
        device = "cuda" if backend in ("peers", "nccl") else "cpu"
        group = init_group(ranks, device, shared_memory=backend != "gloo", peer_memory=backend != "nccl")
        for each in scenario.split("+"):
            globals()[each](group, out)
        group.close()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
