"""The group of ranks of a run: all-reduce, gather, hand-over, broadcast, and who is alive.

One process per rank, started by `start_ranks.py` or by torchrun; both describe the group in the environment
(RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT).
"""

import contextlib
import ctypes
import os
import pickle
import signal
import sys
from collections.abc import Sequence
from datetime import timedelta
from math import inf
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from pshard.batch_sizes import SMALL_BATCH
from pshard.collectives import BY_ROWS, MANY_ROWS, PUSHED, fastest_collective, wire_type
from pshard.errors import UserError
from pshard.machine import CollectiveTiming
from pshard.runtime.devices.numa import bind_memory, place_rank, read_nodes, read_pci_node, read_siblings
from pshard.runtime.devices.threads import rank_threads, use_threads
from pshard.runtime.kernels.cpu import native
from pshard.runtime.ranks.network import use_route_to
from pshard.runtime.ranks.shared_memory import MESSAGE_BYTES, LateRank, open_exchange
from pshard.runtime.ranks.started import read_number, started_ranks
from pshard.runtime.ranks.watch import LOST_SECONDS, RankWatch

if TYPE_CHECKING:
    from pshard.runtime.ranks.peer_memory import PeerExchange

WIRES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
ROUNDED = 2 << 20  # numbers that NCCL sums at once in another type than float32
MEET_SECONDS = 120.0  # all ranks must be up by then
SHORT_BYTES = 512  # of a value that is broadcast in one message
SENDS_AHEAD = 4  # micro-batches that a CPU rank may be ahead of the next one
REDUCE_SECONDS = 120.0  # no rank may be later than this to a sum; a dead process is noticed much sooner (rank_watch)


class RankLost(UserError):
    """Another rank died or hangs; the message names it."""


class Group:
    """The ranks of a run. With one rank every method is free and returns its input.

    Sums run in a fixed order: all ranks get the same bits, and so does a repeated run.

    Attributes:
        rank, size: this process and how many there are.
        local_rank: number of this process on its host, which is also that of its GPU.
        local_size: how many of the ranks run on this host.
        backend: what sums: "none" (one rank), "shm" (shared memory), "gloo", "nccl" or "peers" (GPUs that write into
            each other's memory; NCCL where that was measured to be faster).
        threads: CPU threads that this rank should use; cores: processors that it keeps to, its memory near them.
        reduce_dtype: what parts are rounded to before they are summed: one of pshard.collectives.REDUCE_DTYPES.
    """

    rank = 0
    size = 1
    local_rank = 0
    local_size = 1
    backend = "none"
    threads = 0
    cores: tuple[int, ...] = ()
    reduce_dtype = "auto"

    @property
    def peers(self) -> "PeerExchange | None":
        """The GPUs' memories, where all of them write into each other's."""
        return None

    def wire(self, part: torch.Tensor) -> str:
        """What this part [rows, columns] is rounded to before it is summed: "f32", "bf16" or "f16"."""
        return wire_type(self.reduce_dtype, part.numel() // part.shape[-1], part.is_cuda)

    def all_reduce(self, tensor: torch.Tensor, algorithm: str | None = None, exact: bool = False) -> None:
        """Sum a contiguous float32 tensor over the ranks, in place. Raises RankLost.

        All ranks give it on the same kind of device. algorithm: one of `algorithms`, to time it; None: the best. exact:
        it is not rounded to what parts travel in.
        """

    def algorithms(self, rows: int, columns: int) -> tuple[str, ...]:
        """The ways in which parts of that shape may be summed on the device."""
        return (self.backend,)

    def part_dtype(self, rows: int, columns: int) -> torch.dtype:
        """What a kernel may leave a part of that shape in for `add_sum`: float32, or what it is rounded to anyway."""
        return torch.float32

    def add_sum(self, hidden: torch.Tensor, part: torch.Tensor) -> None:
        """hidden += sum of the ranks' parts, contiguous [rows, columns], hidden float32, part float32 or of
        `part_dtype`; `part` is lost. Raises RankLost."""
        self.all_reduce(part)
        hidden.add_(part)

    def row_exchange(self, rows: int, columns: int) -> "PeerExchange | None":
        """What sums parts of that shape by whole rows on the GPU, so that a norm can go with it; None: nothing does."""
        return None

    def pushes(self, part: torch.Tensor) -> bool:
        """Whether this part [rows, columns] of a sum by rows leaves for the peers from the product that makes it."""
        return False

    def logit_widths(self, columns: int, on_device: bool) -> tuple[int, ...] | None:
        """Columns of the logits that each rank brings, when all may use `gather_logits`; else None. Called by all.

        on_device: whether this rank's columns are always computed on its GPU.
        """
        return None

    def gather_logits(self, table: torch.Tensor, widths: tuple[int, ...]) -> None:
        """Bring the other ranks' columns into a GPU's table [rows, sum(widths)] float32, in which ours are."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise RankLost when a sum on the GPU gave up waiting for a rank. Called where the host has waited."""

    def send(self, tensor: torch.Tensor, target: int) -> None:
        """Hand a contiguous float32 tensor to a rank, which takes it with `receive` in the same order, and to which no
        other rank hands anything.

        Returns before it is taken, if need be; the tensor may be written to again after `finish_send`. Raises
        RankLost.
        """
        raise NotImplementedError

    def finish_send(self) -> None:
        """Wait (on a GPU: let its current stream wait) until what was sent last may be written to."""

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Fill a tensor with what rank `source` sends; on a GPU in the current stream. Waits without limit. Raises
        RankLost."""
        raise NotImplementedError

    def gather_columns(self, local: torch.Tensor, seconds: float | None = None, alike: bool = False) -> torch.Tensor:
        """Put the ranks' columns side by side: [rows, own columns, maybe 0] -> [rows, all]. Raises RankLost.

        seconds: how much later than this one another rank may come; None: as to a sum. alike: every rank brings as
        many columns. Otherwise how many each brings is learnt in the first such call and may not change.
        """
        return local

    def broadcast(self, value: Any, source: int = 0, soon: bool = False) -> Any:
        """The `source` rank's value (anything that pickles) on every rank. Waits without limit. Raises RankLost.

        soon: all ranks come at about the same time, so that those of one host wait in shared memory, which takes some
        microseconds instead of hundreds, and keeps a core busy.
        """
        return value

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value (anything that pickles), in order. Raises RankLost."""
        return [self.broadcast(value, rank) for rank in range(self.size)]

    def barrier(self) -> None:
        """Wait, without limit, until every rank is here."""

    def close(self) -> None:
        """Leave the group."""


class TorchGroup(Group):
    """Ranks over torch.distributed: NCCL for CUDA tensors, shared memory or gloo for tensors on the CPU."""

    def __init__(
        self,
        rank: int,
        size: int,
        device: str,
        store: dist.Store,
        watch: RankWatch,
        shared_memory: bool,
        peer_memory: bool,
        timings: Sequence[CollectiveTiming],
    ) -> None:
        self._timings = tuple(timings)
        self._chosen: dict[tuple[int, int], str] = {}
        self._pushed: dict[int, bool] = {}  # columns -> whether such a row is pushed
        self.rank, self.size = rank, size
        self._watch, self._closed = watch, False
        self._widths: tuple[int, ...] = ()
        self._sending: list[tuple[dist.Work, torch.Tensor]] = []
        # NVLink multicast hangs on some hosts and sums in another order: leave it off
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        # what one rank has in a graph another may start by itself, so no way to sum may depend on being captured
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
        # a rank that receives has 4 MiB for every channel, beside the budget: all of NVLink's took 250 MiB
        os.environ.setdefault("NCCL_MAX_P2P_NCHANNELS", "8")
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(days=7),  # waiting for a user's next prompt has no limit; sums have their own
        )
        # taken now: a sum may be captured in a graph
        self._rounded = torch.empty(ROUNDED, dtype=torch.int16, device="cuda") if device == "cuda" else None
        if device == "cuda":  # NCCL takes its memory and meets now, not in the first step or while a graph is captured
            dist.all_reduce(torch.zeros(1, device="cuda"))
            torch.cuda.synchronize()
        self._exchange = open_exchange(store, rank, size) if shared_memory else None
        if device == "cpu" and shared_memory and self._exchange is None and rank == 0:
            why = native.why_missing() or "they do not reach each other's memory"
            print(f"note: ranks sum by gloo, some hundred microseconds each time ({why})", file=sys.stderr)
        self._peers = _open_peers(store, rank, size) if device == "cuda" and peer_memory else None
        on_gpu = "peers" if self._peers else "nccl"
        self.backend = on_gpu if device == "cuda" else "shm" if self._exchange else "gloo"

    @property
    def peers(self) -> "PeerExchange | None":
        return self._peers

    def algorithms(self, rows: int, columns: int) -> tuple[str, ...]:
        if self._peers is None:
            return (self.backend,)
        return (*self._peers.algorithms(rows, columns, self._wire_on_gpu(rows)), "nccl")

    def _wire_on_gpu(self, rows: int) -> str:
        return wire_type(self.reduce_dtype, rows, on_gpu=True)

    def algorithm(self, rows: int, columns: int) -> str:
        """How parts of that shape are summed on the GPU: a name of `runtime.peer_memory`, or "nccl"."""
        if not self._peers:
            return "nccl"
        if (rows, columns) not in self._chosen:
            ways = self.algorithms(rows, columns)
            if MANY_ROWS in ways:  # spares others' work, a norm and adding up experts: no timing of a sum shows that
                ways = (MANY_ROWS, "nccl")
            wire, nbytes = self._wire_on_gpu(rows), 4 * rows * columns
            fastest = fastest_collective(self._timings, self.size, nbytes, wire, among=ways)
            self._chosen[rows, columns] = fastest[0] if fastest else ways[0]
        return self._chosen[rows, columns]

    def add_sum(self, hidden: torch.Tensor, part: torch.Tensor) -> None:
        algorithm = self.algorithm(*part.shape) if part.is_cuda else "nccl"
        if self._peers and algorithm != "nccl":
            self._peers.sum(part, hidden, algorithm, self.wire(part), accumulate=True)
        else:
            super().add_sum(hidden, part)

    def part_dtype(self, rows: int, columns: int) -> torch.dtype:
        # kernels of few rows give float32; those of many give either
        rounds = rows > SMALL_BATCH and self.algorithm(rows, columns) != "nccl"
        return torch.bfloat16 if rounds and self._wire_on_gpu(rows) == "bf16" else torch.float32

    def row_exchange(self, rows: int, columns: int) -> "PeerExchange | None":
        return self._peers if self.algorithm(rows, columns) in (BY_ROWS, MANY_ROWS) else None

    def pushes(self, part: torch.Tensor) -> bool:
        rows, columns = part.shape
        if rows > 1 or self.wire(part) != "f32":
            return False
        if columns not in self._pushed:
            fastest = fastest_collective(self._timings, self.size, part.nbytes, among=(BY_ROWS, PUSHED))
            self._pushed[columns] = fastest is not None and fastest[0] == PUSHED
        return self._pushed[columns]

    def logit_widths(self, columns: int, on_device: bool) -> tuple[int, ...] | None:
        if self._peers is None:
            return None
        said = self.gather((columns, on_device))
        return tuple(n for n, _ in said) if all(there for _, there in said) else None

    def gather_logits(self, table: torch.Tensor, widths: tuple[int, ...]) -> None:
        assert self._peers is not None
        self._peers.gather(table, widths)

    def check(self) -> None:
        late = self._peers.late_rank() if self._peers else None
        if late is not None:
            verdict = self._watch.verdict(LOST_SECONDS + 1)
            raise RankLost(f"rank {self.rank} of {self.size} stops: {verdict or f'rank {late} did not come to a sum'}")

    def all_reduce(self, tensor: torch.Tensor, algorithm: str | None = None, exact: bool = False) -> None:
        tensor = tensor.view(1, -1) if exact else tensor  # few numbers: one row
        wire = "f32" if exact else self.wire(tensor)
        columns = tensor.shape[-1]
        if algorithm is None and tensor.is_cuda:
            algorithm = self.algorithm(tensor.numel() // columns, columns)
        if tensor.is_cuda and self._peers and algorithm not in (None, "nccl"):
            self._peers.sum(tensor.view(-1, columns), tensor.view(-1, columns), algorithm, wire, False)
            return
        dtype = WIRES[wire]
        if dtype != tensor.dtype and tensor.is_cuda:
            assert self._rounded is not None
            for numbers in tensor.view(-1).split(ROUNDED):
                rounded = self._rounded[: numbers.numel()].view(dtype).copy_(numbers)
                dist.all_reduce(rounded)  # NCCL adds in the wire's type too
                numbers.copy_(rounded)
            return
        if dtype != tensor.dtype:
            tensor.copy_(tensor.to(dtype))
        try:
            if self._exchange and not tensor.is_cuda:
                self._exchange.sum(tensor, REDUCE_SECONDS)
            elif tensor.is_cuda:
                dist.all_reduce(tensor)  # in the current stream; the host goes on
            else:
                dist.all_reduce(tensor, async_op=True).wait(timedelta(seconds=REDUCE_SECONDS))
        except RuntimeError as error:
            self._fail(error)

    def send(self, tensor: torch.Tensor, target: int) -> None:
        if self._exchange and self._fits_inbox(tensor):
            self._exchange.put(tensor, target)
            return
        here = tensor if tensor.is_cuda else tensor.clone()
        self._sending.append((self._start(dist.isend, here, target), here))
        if len(self._sending) > SENDS_AHEAD:
            self._wait_for(self._sending.pop(0)[0])

    def finish_send(self) -> None:
        while self._sending and self._sending[0][1].is_cuda:
            self._wait_for(self._sending.pop(0)[0])

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        if self._exchange and self._fits_inbox(tensor):
            self._exchange.take(tensor, source)
            return
        self._wait_for(self._start(dist.irecv, tensor, source))

    def _fits_inbox(self, tensor: torch.Tensor) -> bool:
        """Whether it goes through shared memory; the ranks that send and take it agree, as they know its size."""
        return not tensor.is_cuda and tensor.nbytes <= MESSAGE_BYTES

    def _wait_for(self, work: dist.Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            self._fail(error)

    def _start(self, operation: Any, tensor: torch.Tensor, peer: int) -> dist.Work:
        """Begin a transfer between two ranks; batched, as NCCL then takes the communicator that there is."""
        try:
            return dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer)])[0]
        except RuntimeError as error:
            self._fail(error)

    def gather_columns(self, local: torch.Tensor, seconds: float | None = None, alike: bool = False) -> torch.Tensor:
        rows, width = local.shape
        if not self._widths and not alike:
            self._widths = tuple(self._all_widths(width))
        widths = (width,) * self.size if alike else self._widths
        if width != widths[self.rank]:
            raise ValueError(f"{width} columns, after {widths[self.rank]} in the first gather")
        try:
            if self._exchange and not local.is_cuda:
                sizes, seconds = [rows * n for n in widths], REDUCE_SECONDS if seconds is None else seconds
                parts = self._exchange.gather(local.contiguous(), sizes, seconds).split(sizes)
                return torch.cat([part.view(rows, n) for part, n in zip(parts, widths)], dim=1)
            padded = local.new_zeros(rows, max(widths))
            padded[:, :width] = local
            blocks = [torch.empty_like(padded) for _ in widths]
            dist.all_gather(blocks, padded)
        except RuntimeError as error:
            self._fail(error)
        return torch.cat([block[:, :n] for block, n in zip(blocks, widths)], dim=1)

    def _all_widths(self, width: int) -> list[int]:
        widths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        try:
            dist.all_gather(widths, torch.tensor([width]))
        except RuntimeError as error:
            self._fail(error)
        return [int(w) for w in widths]

    def broadcast(self, value: Any, source: int = 0, soon: bool = False) -> Any:
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL) if self.rank == source else b""
        begin = bytearray((len(data).to_bytes(8, "big") + data)[:SHORT_BYTES].ljust(SHORT_BYTES))
        try:
            self._broadcast_short(torch.frombuffer(begin, dtype=torch.uint8), source, soon)
            missing = int.from_bytes(begin[:8], "big") - (SHORT_BYTES - 8)
            rest = bytearray(data[SHORT_BYTES - 8 :] or max(0, missing))
            if rest:
                dist.broadcast(torch.frombuffer(rest, dtype=torch.uint8), source)
        except RuntimeError as error:
            self._fail(error)
        return pickle.loads(begin[8:] + rest)  # what pads it comes after its end

    def _broadcast_short(self, message: torch.Tensor, source: int, soon: bool) -> None:
        """Bytes of the `source` rank into every rank's, in place."""
        if soon and self._exchange:
            sizes = [message.numel() if rank == source else 0 for rank in range(self.size)]
            message.copy_(self._exchange.gather(message[: sizes[self.rank]], sizes, inf))
        else:
            dist.broadcast(message, source)

    def barrier(self) -> None:
        try:
            dist.all_reduce(torch.zeros(1))  # on the CPU: dist.barrier would pick a GPU
        except RuntimeError as error:
            self._fail(error)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._watch.close()
            if self._exchange:
                self._exchange.close()
            dist.destroy_process_group()

    def _fail(self, error: RuntimeError) -> NoReturn:
        late = str(error) if isinstance(error, LateRank) else None
        reason = late or self._watch.verdict(LOST_SECONDS + 1) or f"a collective failed: {str(error).splitlines()[0]}"
        raise RankLost(f"rank {self.rank} of {self.size} stops: {reason}") from error


def _open_peers(store: dist.Store, rank: int, size: int) -> "PeerExchange | None":
    """Peers' memory where Triton is installed and all GPUs reach each other."""
    try:
        from pshard.runtime.ranks.peer_memory import open_peer_exchange
    except ImportError:
        return None
    return open_peer_exchange(store, rank, size)


def init_group(
    ranks: int,
    device: str,
    threads: int | None = None,
    in_turns: bool = False,
    shared_memory: bool = True,
    peer_memory: bool = True,
    reduce_dtype: str = "auto",
    timings: Sequence[CollectiveTiming] = (),
) -> Group:
    """Join the group of `ranks` processes whose tensors live on `device` ("cpu" or "cuda").

    Gives this rank its own cores, and its part of the `threads` that serve the whole host best (default: as many as it
    has cores), see `rank_threads` with `in_turns`. For CUDA the rank's device is number LOCAL_RANK.
    `shared_memory=False` keeps to gloo between CPU ranks and `peer_memory=False` to NCCL between GPUs (to measure
    them). `reduce_dtype`: one of collectives.REDUCE_DTYPES. `timings`: a profile's, by which the way of summing
    on GPUs is chosen per size. Raises UserError when the environment describes another number of ranks.
    """
    started = started_ranks() or 1
    if started != ranks:
        said = f"{started} rank{'s' * (started > 1)} {'were' if started > 1 else 'was'} started"
        raise UserError(
            f"{said}, but the model is to run on {ranks}; start {ranks} with torchrun, or make --vram, -sm and -ts "
            f"for {started}"
        )
    if ranks == 1:
        return Group()
    rank = read_number("RANK", 0, ranks - 1)
    here = read_number("LOCAL_WORLD_SIZE", 1, ranks) if "LOCAL_WORLD_SIZE" in os.environ else ranks
    local = read_number("LOCAL_RANK", 0, here - 1) if "LOCAL_RANK" in os.environ else rank
    if not os.environ.get("MASTER_ADDR"):
        raise UserError("RANK and WORLD_SIZE are set, but not MASTER_ADDR, where ranks meet: start them with torchrun")
    read_number("MASTER_PORT", 1, 65535)
    _die_with_starter()
    address = None
    if here < ranks:  # several hosts
        shared_memory = False
        address = use_route_to(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    cores = bind_cores(local, here, _gpu_nodes(here) if device == "cuda" else ())
    threads = rank_threads(threads, here, len(cores), in_turns) if threads else len(cores)
    use_threads(threads)
    if device == "cuda":
        torch.cuda.set_device(local)
    try:
        store, beats = _open_store(rank, ranks), _open_store(rank, ranks, client_only=True)
    except RuntimeError as error:
        raise UserError(
            f"rank {rank} cannot meet the others: {' '.join(str(error).split())[:200]}; start them again"
        ) from None
    watch = RankWatch(dist.PrefixStore("pshard-watch", beats), rank, ranks, MEET_SECONDS, here < ranks, address)
    group = TorchGroup(
        rank, ranks, device, dist.PrefixStore("pshard", store), watch, shared_memory, peer_memory, timings
    )
    group.local_rank, group.local_size, group.reduce_dtype = local, here, reduce_dtype
    group.threads, group.cores = threads, cores
    return group


def _gpu_nodes(count: int) -> tuple[int, ...]:
    """NUMA nodes of the first GPUs, which are those of the ranks; -1, or nothing at all, where that is not known."""
    if torch.cuda.device_count() < count:
        return ()  # said where the device is opened
    import pynvml

    try:
        pynvml.nvmlInit()
        uuids = [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(count)]
        places = [pynvml.nvmlDeviceGetPciInfo(pynvml.nvmlDeviceGetHandleByUUID(uuid)).busId for uuid in uuids]
    except pynvml.NVMLError:
        return ()
    return tuple(read_pci_node(place if isinstance(place, str) else place.decode()) for place in places)


def bind_cores(local_rank: int, local_size: int, near: Sequence[int] = ()) -> tuple[int, ...]:
    """Keep this process on its share of the cores it may use, and its memory on their NUMA nodes; returns the cores.

    near: nodes of the ranks' GPUs.
    torchrun leaves every rank all cores and one thread (OMP_NUM_THREADS=1); neither is wanted.
    """
    if not hasattr(os, "sched_setaffinity"):
        return tuple(range(max(1, (os.cpu_count() or 1) // local_size)))
    nodes = read_nodes()
    place = place_rank(local_rank, local_size, tuple(os.sched_getaffinity(0)), nodes, read_siblings(), near)
    for thread in os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else ["0"]:
        with contextlib.suppress(ProcessLookupError):  # a thread that just ended
            os.sched_setaffinity(int(thread), place.cores)
    spill = bool(near)  # GPUs may all be on one node, whose memory need not hold all of the ranks' weights
    if place.nodes and (why := bind_memory(place.nodes, spill)) and len(nodes) > 1:
        print(f"note: memory is not bound to NUMA nodes {place.nodes}: {why}", file=sys.stderr)
    return place.cores


def _open_store(rank: int, ranks: int, client_only: bool = False) -> dist.Store:
    """The key-value store where ranks meet: on rank 0, or in torchrun's agent."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serve = rank == 0 and not by_agent and not client_only
    listening = os.environ.get("PSHARD_LISTEN_FD") if serve else None
    store = dist.TCPStore(
        address,
        port,
        world_size=None,
        is_master=serve,
        timeout=timedelta(seconds=MEET_SECONDS),
        wait_for_workers=False,
        master_listen_fd=int(listening) if listening else None,
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"attempt-{attempt}", store)


def _die_with_starter() -> None:
    """Have the kernel end this rank when the process that started it is killed (Linux)."""
    starter = os.environ.get("PSHARD_STARTED_BY")
    if starter and os.name == "posix" and os.uname().sysname == "Linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(starter):
            raise UserError("the process that started this rank is gone; start the command again")
