"""Gated delta nets beside what the machine allows: states against the memory's rate, chunks against products.

    python benchmarks/delta_net.py -o benchmarks/results/delta_net.json
    python benchmarks/delta_net.py -p 4096 -np 1 -o delta_net.json
    python benchmarks/delta_net.py --sweep

On the GPU where there is one, or with --cpu on the CPU. Every timed call is checked first against plain torch in
float64. Few tokens read and write their states, which rotate over more than any cache holds: bytes of both ways, beside
a device copy or, on the CPU, a pass that reads as many. Prompts: floating-point operations of chunks, beside a library
product in the same run. On the GPU prompts come first, the longest at once, and each beside flash-linear-attention's
`chunk_gated_delta_rule` where `fla-core` is installed, which has neither the convolution nor the gate.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cpu_kernels import ROTATION, compare_with_ceiling, format_rates, time_in_turn, use_native_threads, write_json
from delta_rival import is_installed, time_rule

from pshard.commands.command_line import new_parser, parse_ints, run_cli
from pshard.profile.timed.operands import OperandPool
from pshard.runtime.kernels.api import DeltaWeights
from pshard.runtime.kernels.cpu import native
from pshard.runtime.kernels.cpu.host import HostKernels
from pshard.runtime.kernels.gpu.card_limits import card_limits
from pshard.runtime.kernels.plain import PlainKernels
from pshard.tensor import TensorSpec
from pshard.units.operations import DeltaNet

NONE = TensorSpec("", "F32", (1,))
SHAPES = {"Qwen3-Next-80B-A3B": (16, 32, 128), "Qwen3.5-27B": (16, 48, 128)}


def main(argv: list[str]) -> int:
    """Run the benchmark; prints a line for each case and, with -o, writes JSON."""
    parser = new_parser("delta_net.py", str(__doc__).splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, help="JSON file to write")
    parser.add_argument("--cpu", action="store_true", help="the CPU's kernels also where there is a GPU")
    parser.add_argument("--sweep", action="store_true", help="try other warps and tiles of the GPU's kernels first")
    parser.add_argument("-np", "--sequences", type=parse_ints, default=(1, 16, 64), help="that decode, as 1,16,64")
    parser.add_argument("-p", "--prompts", type=parse_ints, default=(64, 512, 4096), help="tokens, as 512,4096")
    parser.add_argument("-t", "--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=0.6, help="time spent on each case of the CPU")
    args = parser.parse_args(argv)
    if args.cpu or not torch.cuda.is_available():
        use_native_threads(args.threads)
        torch.set_num_threads(args.threads)
        results = [r for name in SHAPES for r in run_on_cpu(name, args)]
        if args.output:
            write_json(args.output, "delta_net", results, argv)
    else:
        run_on_gpu(args)
    return 0


def make_net(name: str) -> tuple[DeltaNet, DeltaWeights]:
    """A model's delta net with random weights."""
    net = DeltaNet((NONE,), NONE, NONE, NONE, *SHAPES[name])
    generator = torch.Generator().manual_seed(1)
    conv = torch.randn(net.channels, 4, generator=generator) * 0.4
    decay = -torch.logspace(-2, 1, net.value_heads)
    weights = DeltaWeights(conv, torch.zeros(net.value_heads), decay, torch.ones(net.head), 1e-6, *net.shape)
    return net, weights


def make_inputs(net: DeltaNet, sequences: int, tokens: int, device: str, kind: torch.dtype) -> dict[str, torch.Tensor]:
    """Rows, tails and places of so many sequences; `out` is NaN."""
    generator, rows = torch.Generator(device).manual_seed(2), sequences * tokens
    width = net.value_heads * net.head
    named = {
        name: torch.randn(rows, n, generator=generator, device=device).to(kind)
        for name, n in (("qkv", net.channels), ("z", width), ("beta", net.value_heads), ("alpha", net.value_heads))
    }
    named["out"] = torch.full((rows, width), torch.nan, dtype=kind, device=device)
    named["tails"] = torch.randn(sequences, 3, net.channels, generator=generator, device=device)
    named["slots"] = torch.arange(sequences, dtype=torch.int32, device=device)
    named["offsets"] = torch.arange(0, rows + 1, tokens, dtype=torch.int32, device=device)
    return named


def check(
    kernels: Any, weights: DeltaWeights, named: dict[str, torch.Tensor], states: torch.Tensor, **how: Any
) -> float:
    """The error of one call beside plain torch in float64, of the deviation; ValueError for more than 2%."""
    want = {n: x.clone() if x.dtype == torch.int32 else x.double() for n, x in named.items()}
    right, got = states.double(), states.clone()
    PlainKernels().delta_net(weights=weights, states=right, **want, longest=how["longest"])
    kernels.delta_net(weights=weights, states=got, **{**named, "tails": named["tails"].clone()}, **how)
    errors = [
        ((a.double() - b).square().mean().sqrt() / b.std()).item()
        for a, b in ((named["out"], want["out"]), (got, right))
    ]
    if not max(errors) < 0.02:
        raise ValueError(f"errors of {errors} of the deviation: the kernels compute something else")
    return max(errors)


def run_on_cpu(name: str, args: argparse.Namespace) -> list[dict]:
    """Every case of one model."""
    (net, weights), kernels, results = make_net(name), HostKernels(), []
    pool = OperandPool(ROTATION, torch.device("cpu"))
    for sequences in args.sequences:
        named = make_inputs(net, sequences, 1, "cpu", torch.float32)
        shape, nbytes = (sequences, net.value_heads, net.head, net.head), 2 * sequences * net.state_nbytes
        states = [part.view(torch.float32).view(shape) for part in pool.rotate_states(sequences * net.state_nbytes)]
        error = check(kernels, weights, named, torch.randn(shape) * 0.1, longest=1)

        def ours(i: int, states: list[torch.Tensor] = states, named: dict[str, torch.Tensor] = named) -> None:
            kernels.delta_net(weights=weights, states=states[i % len(states)], **named, longest=1)

        def ceiling(i: int, nbytes: int = nbytes) -> None:
            start = i * nbytes % max(1, pool.memory.numel() - nbytes)
            native.read_bandwidth(pool.memory[start:], nbytes)

        seconds, read_seconds = time_in_turn(ours, ceiling, args.seconds)
        found = compare_with_ceiling(nbytes, seconds, read_seconds)
        results.append({"model": name, "sequences": sequences, "nbytes": nbytes, "error": error, **found})
        print(f"{name}, {sequences} x 1 token: {format_rates(found)} | error {error:.1e}", flush=True)
    for tokens in args.prompts:
        named = make_inputs(net, 1, tokens, "cpu", torch.float32)
        states = torch.zeros(1, net.value_heads, net.head, net.head)
        error = check(kernels, weights, named, states, longest=tokens)
        square = torch.randn(1024, 1024)
        flops = net.flops(tokens, True)

        def run(i: int, states: torch.Tensor = states, named: dict[str, torch.Tensor] = named, n: int = tokens) -> None:
            kernels.delta_net(weights=weights, states=states, **named, longest=n)

        seconds, product = time_in_turn(run, lambda i, square=square: square @ square, args.seconds)
        rate, best = flops / min(seconds) / 1e9, 2 * 1024**3 / min(product) / 1e9
        result = {"model": name, "tokens": tokens, "seconds": min(seconds), "gflops": rate, "ceiling_gflops": best}
        results.append({**result, "of_ceiling": rate / best, "error": error})
        print(f"{name}, {tokens} tokens: {min(seconds) * 1e3:.2f} ms, {rate:.0f} of {best:.0f} GFLOP/s, "
              f"{rate / best:.2f} | error {error:.1e}", flush=True)  # fmt: skip
    return results


def run_on_gpu(args: argparse.Namespace) -> None:
    """Every case, in bfloat16, as CUDA graphs."""
    from gpu_kernels import Bench, ceilings

    from pshard.runtime.kernels.gpu.cuda import CudaKernels

    bench = Bench(CudaKernels("cuda", 4096), time.perf_counter() + 400)
    ceilings(bench)
    nets = {name: make_net(name) for name in SHAPES}
    if args.sweep:
        for net, weights in nets.values():
            sweep(bench, net, to_gpu(weights))

    def add(case: str, run: Callable[[], dict[str, Any]]) -> float | None:
        """A row, kept at once: who has little time stops the run when it has seen enough."""
        us = bench.case(case, run).get("us")
        save_gpu(bench, args)
        return us

    for tokens in sorted(args.prompts, reverse=True):
        for name, (net, weights) in nets.items():
            case = f"{name} 1 x {tokens}"
            ours = add(case, partial(time_chunks, bench, net, to_gpu(weights), tokens))
            if is_installed():
                add(f"flash-linear-attention, {case}", partial(time_rule, net, tokens, ours))
    for name, (net, weights) in nets.items():
        for sequences in args.sequences:
            add(f"{name} {sequences} x 1", partial(time_steps, bench, net, to_gpu(weights), sequences))


def to_gpu(weights: DeltaWeights) -> DeltaWeights:
    """The same weights in VRAM."""
    return replace(weights, **{n: getattr(weights, n).cuda() for n in ("conv", "dt_bias", "decay", "norm")})


def save_gpu(bench: Any, args: argparse.Namespace) -> None:
    """What is known so far."""
    if args.output:
        machine = {"device": card_limits("cuda").name, "copy_gbs": bench.copy_gbs, "gemm_tflops": bench.gemm_tflops}
        write_json(args.output, "delta_net", [machine, *bench.cases], sys.argv[1:])


def time_steps(bench: Any, net: DeltaNet, weights: DeltaWeights, sequences: int) -> dict[str, Any]:
    """One token of each sequence, with states of many layers."""
    from gpu_kernels import time_us

    named = make_inputs(net, sequences, 1, "cuda", torch.bfloat16)
    shape, nbytes = (sequences, net.value_heads, net.head, net.head), 2 * sequences * net.state_nbytes
    states = [torch.randn(shape, device="cuda") * 0.1 for _ in range(max(2, (1 << 30) // (nbytes // 2)))]
    error = check(bench.kernels, weights, named, states[0], longest=1)
    calls = [lambda s=s: bench.kernels.delta_net(weights=weights, states=s, **named, longest=1) for s in states]
    return bench.bytes_case(time_us(calls), nbytes, round(error, 6))


def time_chunks(bench: Any, net: DeltaNet, weights: DeltaWeights, tokens: int) -> dict[str, Any]:
    """A prompt of one sequence."""
    from gpu_kernels import time_us

    named = make_inputs(net, 1, tokens, "cuda", torch.bfloat16)
    states = torch.zeros(1, net.value_heads, net.head, net.head, device="cuda")
    scratch = torch.empty(net.scratch_nbytes(tokens, 1, 2), dtype=torch.uint8, device="cuda")
    how: dict[str, Any] = {"longest": tokens, "scratch": scratch}
    error = check(bench.kernels, weights, named, states, **how)
    us = time_us([lambda: bench.kernels.delta_net(weights=weights, states=states, **named, **how)] * 3)
    tflops = net.flops(tokens, True) / us / 1e6
    found = {"us": round(us, 1), "tflops": round(tflops, 1), "of_gemm": round(tflops / bench.gemm_tflops, 3)}
    return {**found, "error": round(error, 5)}


def sweep(bench: Any, net: DeltaNet, weights: DeltaWeights) -> None:
    """Other warps, rows, registers and columns, one at a time, for 16 sequences and for 4096 tokens; the fastest stay.
    Then what each kernel of a prompt takes."""
    from pshard.runtime.kernels.gpu.delta import delta_kernels

    prompt = partial(time_chunks, bench, net, weights, 4096)
    tries: tuple[tuple[str, tuple[int, ...], Callable[[], dict[str, Any]]], ...] = (
        ("STEP_WARPS", (4, 8, 16), partial(time_steps, bench, net, weights, 16)),
        ("CONV_ROWS", (32, 16, 64), prompt),
        ("CONV_WARPS", (4, 8), prompt),
        ("PREPARE_REGISTERS", (168, 255, 128), prompt),
        ("PREPARE_WARPS", (4, 8), prompt),
        ("ADVANCE_WARPS", (4, 8), prompt),
        ("PROGRAMS", (96, 200, 48), prompt),
        ("GATE_ROWS", (16, 8, 32), prompt),
        ("DELTA_ROWS", (2048, 1024, 512), prompt),
    )
    for name, values, run in tries:
        found = []
        for value in values:
            setattr(delta_kernels, name, value)
            result = bench.case(f"  {name} {value}", run)
            if "us" in result:
                found.append((result["us"], value))
        setattr(delta_kernels, name, min(found)[1] if found else values[0])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        time_chunks(bench, net, weights, 4096)
    for event in profile.key_averages():
        if event.key.endswith("_kernel"):
            print(f"  {event.key}: {event.device_time:.1f} us each, {event.count} times", flush=True)


if __name__ == "__main__":
    sys.exit(run_cli(main))
