"""A machine profile from a datasheet's rates, for machines that are not at hand and for tests."""

from dataclasses import dataclass

from pshard.batch_sizes import SMALL_BATCH
from pshard.machine import (
    AcceleratorInfo,
    AttentionTiming,
    CollectiveTiming,
    Contention,
    CopyTiming,
    ElementwiseTiming,
    HostInfo,
    MachineProfile,
    MatmulTiming,
    Provenance,
    ReadTiming,
)
from pshard.planner.price.delta_sheet import delta_rows
from pshard.planner.price.experts.expert_sheet import expert_rows, route_rows
from pshard.planner.price.kernel_rates import CardRates, pass_work, seconds_of
from pshard.quant import QUANT_TYPES, packed_nbytes

SHAPES = ((1024, 1024), (4096, 4096), (25600, 5120), (152064, 5120))
TOKENS = (1, 4, 16, 64, 128, 512, 2048, 4096)
CONTEXTS = (128, 1024, 8192, 65536)
COPY_SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 28)


@dataclass(frozen=True)
class Rates:
    """A machine in two dozen figures. Rates in bytes or floating-point operations per second, times in seconds."""

    link: float
    acc_memory: float
    acc_flops: float
    host_memory: float
    host_flops: float
    acc_attention: float = 0.0  # operations per second in attention; 0: half of acc_flops
    host_attention: float = 0.0
    card: CardRates | None = None  # what experts, routers, delta nets, norms and the like reach; None: rates above
    acc_unpack: float = 0.0  # at which weights are unpacked for a product of many tokens; 0: it takes no time
    heads: tuple[tuple[int, int, int], ...] = (
        (32, 8, 128),
    )  # (heads, KV heads, head size) that attention is given for
    acc_memory_bytes: int = 16 << 30
    host_memory_bytes: int = 64 << 30
    cores: int = 8
    cpu: str = "datasheet CPU"
    accelerator: str = "datasheet GPU"
    kind: str = "cuda"
    pcie_generation: int = 5
    pcie_width: int = 16
    kernel_seconds: float = 3e-6  # launch and drain of one kernel
    step_seconds: float = 10e-6  # fixed cost of a unit
    copy_seconds: float = 10e-6  # latency of one copy
    handoff_seconds: float = 36e-6
    link_with_cpu: float = 0.0  # 0: the link keeps 85% and the CPU gets what host memory has left
    cpu_with_link: float = 0.0
    collective_rate: float = 0.0  # 0: no collectives
    ranks: int = 1


def profile_from_datasheet(rates: Rates, notes: tuple[str, ...] = ()) -> MachineProfile:
    """Tables as `pshard-profile` writes them, by roofline: time = max(bytes / rate, flops / rate) + fixed.

    Above SMALL_BATCH tokens our GPU kernels write packed weights out as bfloat16 first: the sheet's `acc_unpack`.
    """
    link = min(rates.link, rates.host_memory)  # a copy reads host memory
    link_with_cpu = rates.link_with_cpu or min(0.85 * link, rates.host_memory / 2)
    cpu_with_link = rates.cpu_with_link or max(rates.host_memory - link_with_cpu, 0.3 * rates.host_memory)
    sides = (
        ("host", rates.host_memory, rates.host_flops, rates.host_attention or 0.5 * rates.host_flops, 0.0),
        ("acc", rates.acc_memory, rates.acc_flops, rates.acc_attention or 0.5 * rates.acc_flops, rates.acc_unpack),
    )
    fixed = rates.kernel_seconds
    matmuls, attention, elementwise = [], [], []
    for device, memory, flops, attended, unpack in sides:
        for qtype in QUANT_TYPES:
            for rows, cols in SHAPES:
                for tokens in TOKENS:
                    nbytes = packed_nbytes(qtype, rows, cols) + 4 * tokens * (rows + cols)
                    seconds = max(nbytes / memory, 2 * tokens * rows * cols / flops) + fixed
                    if unpack and tokens > SMALL_BATCH:
                        seconds += _unpacked_nbytes(qtype, rows, cols) / unpack
                    matmuls.append(MatmulTiming(device, qtype, rows, cols, tokens, seconds))
        for tokens in TOKENS:
            for n, n_kv, size in rates.heads:
                for context in (c for c in (*CONTEXTS, tokens) if c >= tokens):
                    nbytes, pairs = context * n_kv * size * 4, tokens * (context - tokens) + tokens * (tokens + 1) / 2
                    seconds = max(nbytes / memory, 4 * n * size * pairs / attended) + 2 * fixed
                    attention.append(AttentionTiming(device, n, n_kv, size, "bf16", tokens, context, seconds))
            elementwise += _pass_rows(device, tokens, memory, rates)
        step = rates.step_seconds if device == "acc" else rates.kernel_seconds
        elementwise.append(ElementwiseTiming(device, "step", 1, 1, step))
    copies = [
        CopyTiming(direction, memory, n, n / (link * share) + rates.copy_seconds)
        for direction in ("h2d", "d2h")
        for memory, share in (("pinned", 1.0), ("pageable", 0.2))
        for n in COPY_SIZES
    ]
    collectives = [
        CollectiveTiming("datasheet", ranks, n, n / rates.collective_rate + rates.copy_seconds)
        for ranks in range(2, rates.ranks + 1)
        for n in COPY_SIZES
        if rates.collective_rate
    ]
    routing = [(at, memory, flops, fixed, rates.card if at == "acc" else None) for at, memory, flops, *_ in sides]
    accelerators = tuple(
        AcceleratorInfo(
            rates.kind, i, rates.accelerator, rates.acc_memory_bytes, rates.pcie_generation, rates.pcie_width
        )
        for i in range(rates.ranks)
    )
    return MachineProfile(
        host=HostInfo(rates.cpu, "", "native", rates.cores, 1, 0, rates.host_memory_bytes, rates.cores),
        accelerators=accelerators,
        matmuls=tuple(matmuls),
        attention=tuple(attention),
        elementwise=tuple(elementwise),
        copies=tuple(copies),
        reads=(ReadTiming(rates.cores, rates.host_memory),),
        contention=Contention(link_with_cpu, cpu_with_link, 0.8 * link, 0.8 * link),
        handoff_seconds=rates.handoff_seconds,
        provenance=Provenance("datasheet", "", "", "", "", "", "", notes=notes),
        collectives=tuple(collectives),
        experts=tuple(row for side in routing for row in expert_rows(*side)),
        routes=tuple(row for side in routing for row in route_rows(*side)),
        deltas=tuple(delta_rows(rates.card)) if rates.card else (),
    )


def _pass_rows(device: str, tokens: int, memory: float, rates: Rates) -> list[ElementwiseTiming]:
    """Norms and the like of so many tokens: by the side's memory, or what the accelerator's card reaches."""
    rows, on_gpu = [], device == "acc" and rates.kind == "cuda"
    for width in (1024, 8192, 65536):
        for what in ("norm", *(("two norms",) if on_gpu else ()), "residual", "rope", "silu_mul", "embed"):
            kernel, work = pass_work(what, tokens, width)
            seconds = work.nbytes / memory + rates.kernel_seconds
            if rates.card and device == "acc":
                seconds = seconds_of(rates.card, kernel, work)
            rows.append(ElementwiseTiming(device, what, tokens, width, seconds))
    return rows


def _unpacked_nbytes(qtype: str, rows: int, cols: int) -> int:
    """Bytes read and written when a matrix is unpacked to bfloat16; none where it is stored so."""
    return 0 if qtype == "BF16" else packed_nbytes(qtype, rows, cols) + 2 * rows * cols
