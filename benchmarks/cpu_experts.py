"""Routed experts on the CPU against the DRAM read rate of the same threads, and against a dense FFN of equal work.

Few tokens: every call takes other experts, in memory that no cache holds; a pass that only sums as many bytes is timed
between the calls, which are recorded and replayed, as those of a decode step are. Many tokens: an FFN that has as many
rows as a token's experts together is timed between our calls.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from cpu_kernels import (
    ROTATION,
    compare_with_ceiling,
    format_rates,
    make_operands,
    time_in_turn,
    use_native_threads,
    write_json,
)

from pshard.commands.command_line import new_parser, parse_ints, run_cli
from pshard.model_config import Experts
from pshard.quant import packed_nbytes
from pshard.runtime.kernels.api import ExpertWeights, Packed, Routes
from pshard.runtime.kernels.cpu import native
from pshard.runtime.kernels.cpu.host import HostKernels
from pshard.runtime.kernels.cpu.recording import record

DENSE_TOKENS = 128  # from here a dense FFN is what to compare with


@dataclass(frozen=True)
class Case:
    """A model's routed experts: their rule, the model's width, the type of their weights."""

    name: str
    rule: Experts
    hidden: int
    qtype: str

    @property
    def expert_nbytes(self) -> int:
        """Bytes of one expert."""
        inner = self.rule.d_expert
        return 2 * packed_nbytes(self.qtype, inner, self.hidden) + packed_nbytes(self.qtype, self.hidden, inner)


CASES = (
    Case("qwen3-30b-a3b", Experts(128, 8, 768), 2048, "Q4_0"),
    Case("gpt-oss", Experts(32, 4, 2880, activation="clamped"), 2880, "MXFP4"),
)


def main(argv: list[str]) -> int:
    """Run the benchmark; prints a table and, with -o, writes JSON."""
    parser = new_parser("cpu_experts.py", str(__doc__).splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, help="JSON file to write")
    parser.add_argument("-M", "--tokens", type=parse_ints, default=(1, 4, 512), help="tokens per call, as 1,4,512")
    parser.add_argument("-t", "--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=2.0, help="time spent on each model and token count")
    args = parser.parse_args(argv)
    use_native_threads(args.threads)
    print("| model | M | ms | GB/s | ceiling GB/s | of ceiling | best of ceiling | dense FFN, ms | times dense |")
    print("|---|---|---|---|---|---|---|---|---|")
    results = [result for case in CASES for result in time_case(case, args)]
    if args.output:
        write_json(args.output, "cpu_experts", results, argv)
    return 0


def time_case(case: Case, args: argparse.Namespace) -> list[dict]:
    """One row of results for each token count."""
    rule = case.rule
    layers = -(-ROTATION // (rule.count * case.expert_nbytes))
    shapes = ((rule.d_expert, case.hidden), (rule.d_expert, case.hidden), (case.hidden, rule.d_expert))
    stacks = [make_operands(case.qtype, *shape, layers * rule.count) for shape in shapes]
    weights = [gather_layer([s[i * rule.count : (i + 1) * rule.count] for s in stacks]) for i in range(layers)]
    results = []
    for tokens in args.tokens:
        result = {"model": case.name, "type": case.qtype, "tokens": tokens, "expert_bytes": case.expert_nbytes}
        result |= time_tokens(case, weights, stacks[0], tokens, args.seconds)
        results.append(result)
        dense = (
            f"{result['dense_seconds'] * 1e3:.1f} | {result['times_dense']:.2f}"
            if "dense_seconds" in result
            else "- | -"
        )
        print(f"| {case.name} | {tokens} | {format_rates(result)} | {dense} |", flush=True)
    return results


def gather_layer(stacks: list[list[Packed]]) -> ExpertWeights:
    """The experts of one layer."""
    addresses = torch.tensor([[matrix.data.data_ptr() for matrix in stack] for stack in stacks])
    gate, up, down = map(tuple, stacks)
    return ExpertWeights(gate, up, down, addresses)


def time_tokens(case: Case, layers: list[ExpertWeights], gates: list[Packed], tokens: int, seconds: float) -> dict:
    """Calls of so many tokens, each with other experts, beside reads of as many bytes; a dense FFN where it counts."""
    kernels, rule, pairs = HostKernels(), case.rule, tokens * case.rule.used
    generator = torch.Generator().manual_seed(0)
    x, out = torch.randn(tokens, case.hidden, generator=generator), torch.empty(tokens, case.hidden)
    scratch = {
        "gated": torch.empty(pairs, rule.d_expert),
        "picked": torch.empty(pairs, case.hidden),
        "order": torch.empty(4 * (pairs + rule.count) + 64, dtype=torch.int32),
    }
    turns = 2 if tokens >= DENSE_TOKENS else 8
    routes = [choose_at_random(rule, tokens, turn, generator) for turn in range(turns)]
    touched = [len(r.ids.unique()) for r in routes]
    nbytes = round(statistics.mean(touched) * case.expert_nbytes)
    memory = torch.empty(0, dtype=torch.uint8).set_(gates[0].data.untyped_storage())

    def compute(layer: ExpertWeights, taken: Routes) -> None:
        kernels.experts(x, taken, layer, rule, out, scratch, accumulate=False)

    calls = [record(lambda layer=layer, taken=taken: compute(layer, taken)) for taken in routes for layer in layers]

    def ours(i: int) -> None:
        call = calls[i % len(calls)]
        assert call is not None, "the call computes with torch"
        call.replay()

    def ceiling(i: int) -> None:
        at = (i * nbytes + memory.numel() // 2) % max(1, memory.numel() - nbytes)
        native.read_bandwidth(memory[at:], min(nbytes, memory.numel()))

    result = compare_with_ceiling(min(nbytes, memory.numel()), *time_in_turn(ours, ceiling, seconds))
    if tokens >= DENSE_TOKENS:
        result |= time_dense(case, ours, x, out, seconds)
    return result


def choose_at_random(rule: Experts, tokens: int, turn: int, generator: torch.Generator) -> Routes:
    """Routes of chance; those of single tokens take each expert once before any is taken again."""
    if tokens == 1:
        turns = rule.count // rule.used
        order = torch.randperm(rule.count, generator=torch.Generator().manual_seed(turn // turns))
        ids = order.view(turns, 1, rule.used)[turn % turns]
    else:
        ids = torch.rand(tokens, rule.count, generator=generator).argsort(1)[:, : rule.used]
    return Routes(ids.int().contiguous(), torch.full((tokens, rule.used), 1 / rule.used))


def time_dense(case: Case, ours: Callable[[int], None], x: torch.Tensor, out: torch.Tensor, seconds: float) -> dict:
    """An FFN of as many rows as a token's experts have."""
    kernels, inner, tokens = HostKernels(), case.rule.d_expert * case.rule.used, x.shape[0]
    gate, up = make_operands(case.qtype, inner, case.hidden, 2)
    (down,) = make_operands(case.qtype, case.hidden, inner, 1)
    both, tile = torch.empty(tokens, 2 * inner), torch.empty(80 << 20, dtype=torch.uint8)

    def dense(i: int) -> None:
        kernels.gate_up(x, gate, up, both[:, :inner], both, tile)
        kernels.linear(both[:, :inner], down, out, tile)

    mine, theirs = map(statistics.median, time_in_turn(ours, dense, seconds))
    return {"dense_seconds": theirs, "times_dense": mine / theirs}


if __name__ == "__main__":
    sys.exit(run_cli(main))
