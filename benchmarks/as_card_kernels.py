"""All kinds of kernels as another card has them, beside this GPU's own code and what a sheet's formula says.

    python benchmarks/as_card_kernels.py --as-card 86 --out FILE

Each case is timed twice, as a profile times it: `as_card`, the code of that card, and `native`, this GPU's own, each in
a process of its own. Beside both times stands what `planner/price/kernel_rates.py` says (`sheet_us`), and by how much
that is off: 0.1 means that the sheet's time is a tenth too long. `slots` and `tensor` have what the kernel reached.

Products of many tokens are the library's, which stays this GPU's own: they are compared with its share in both codes.
A case that fails is recorded with its error, and the others go on.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from card_ways import run_way

from pshard.batch_sizes import SMALL_BATCH
from pshard.model_config import Experts
from pshard.planner.price.delta_sheet import delta_work
from pshard.planner.price.kernel_rates import (
    H100,
    CardRates,
    Work,
    experts_kernel,
    memory_of,
    pass_work,
    seconds_of,
)
from pshard.profile.timed.operands import OperandPool
from pshard.profile.timed.time_delta import time_delta
from pshard.profile.timed.time_experts import time_experts, time_router
from pshard.profile.timed.time_kernels import KernelBench, time_attention, time_elementwise, time_matmul
from pshard.profile.timed.time_latent import time_latent
from pshard.profile.timing_loop import Pace
from pshard.profile.tuning.compile_ahead import compile_ahead, count_processes, requests_of
from pshard.quant import packed_nbytes
from pshard.tensor import TensorSpec
from pshard.units.operations import Attend, AttendLatent, DeltaNet, used_share

WAYS = ("native", "as_card")
QTYPES = ("Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "MXFP4")
SHAPE = (14336, 4096)  # rows and columns of a product
TOKENS = (1, 8, 32, 512, 4096)
HEADS = (Attend(64, 8, 64), Attend(32, 8, 128), Attend(16, 8, 256))
LATENT = AttendLatent(16, 512, 64)
CELLS = {"bf16": 2.0, "q8_0": 34 / 32}  # bytes of a number
PROMPTS = ((4096, 4096), (1024, 16384))  # tokens, cells
DECODING = ((32768, 1), (4096, 16))  # cells, sequences
MIXTURES = (  # types of gate and up, and of down; width; experts
    (("Q4_0", "Q4_0"), 2048, Experts(128, 8, 768)),
    (("Q4_K", "Q6_K"), 2048, Experts(128, 8, 768)),
    (("MXFP4", "MXFP4"), 2880, Experts(32, 4, 2880, "chosen", normed=False, activation="clamped", biases=True)),
)
NONE = TensorSpec("", "F32", (1,))
NET = DeltaNet((NONE,), NONE, NONE, NONE, 16, 32, 128)
MANY, FEW = "products of many tokens", "products of few tokens"
POOL_BYTES = 1 << 30
COMPILING = 0.5  # share of a process's time in which kernels are compiled ahead; the others are as they are timed


@dataclass(frozen=True)
class Case:
    """What is timed. kernel: as `kernel_rates.KERNELS` calls it; unpacked: bytes read and written before."""

    name: str
    kernel: str
    work: Work
    seconds: Callable[[KernelBench], float]
    unpacked: float = 0.0

    @property
    def is_library(self) -> bool:
        """Whether a library multiplies, whatever card the kernels are compiled for."""
        return self.unpacked > 0


def list_cases() -> list[Case]:
    """All cases; those of one kind lie apart, so that a process that runs out of time has some of each."""
    kinds = [list(kind) for kind in (_products(), _attention(), _latents(), _experts(), _deltas(), _rows())]
    longest = max(map(len, kinds))
    order = [(at * longest / len(kind), kind[at]) for kind in kinds for at in range(len(kind))]
    return [case for _, case in sorted(order, key=lambda pair: pair[0])]


def _products() -> Iterator[Case]:
    rows, cols = SHAPE
    for tokens in TOKENS:
        for qtype in QTYPES:
            yield _product(qtype, rows, cols, tokens)
    for tokens in (16, 64):
        yield _product("BF16", rows, cols, tokens)


def _product(qtype: str, rows: int, cols: int, tokens: int) -> Case:
    """As a sheet counts one (`planner/price/datasheet.py`)."""

    def seconds(bench: KernelBench) -> float:
        return time_matmul(bench, qtype, rows, cols, [tokens])[0].seconds

    packed = packed_nbytes(qtype, rows, cols)
    unpacked = packed + 2 * rows * cols if tokens > SMALL_BATCH else 0
    nbytes = packed + 4 * tokens * (rows + cols)
    name = f"product {qtype} {rows}x{cols}, {tokens} tokens"
    kernel = MANY if unpacked else FEW
    if qtype == "MXFP4" and not unpacked:
        kernel = f"{FEW if tokens > 1 else 'products of one token'}, MXFP4"
    work = Work(2.0 * tokens * rows * cols, nbytes, 0.0 if unpacked else rows * cols)
    return Case(name, kernel, work, seconds, unpacked)


def pairs_of(tokens: int, context: int) -> float:
    """Pairs of a token and a cell that it sees."""
    return tokens * (context - tokens) + tokens * (tokens + 1) / 2


def _attention() -> Iterator[Case]:
    for shape in HEADS:
        heads, groups, dim = shape.heads
        for kind, each in CELLS.items():
            for tokens, context, sequences in _spans():
                seconds = partial(_attend, shape, kind, tokens, context, sequences)
                numbers = 2 * sequences * context * groups * dim
                work = Work(4.0 * heads * dim * sequences * pairs_of(tokens, context), each * numbers, numbers)
                name = f"attention {heads}x{groups}x{dim} {kind}, {sequences}x{tokens} of {context}"
                yield Case(name, _attention_kernel(dim, kind, tokens), work, seconds)


def _attention_kernel(dim: int, kind: str, tokens: int) -> str:
    """As `kernel_rates` calls it."""
    if tokens == 1:
        return "decoding, bf16" if kind == "bf16" else f"decoding, heads of {dim}, {kind}"
    return f"prompts, heads of {dim}" + ("" if kind == "bf16" else f", {kind}")


def _latents() -> Iterator[Case]:
    heads, _, width = LATENT.heads
    for kind, each in CELLS.items():
        for tokens, context, sequences in _spans():
            seconds = partial(_attend_latent, kind, tokens, context, sequences)
            operations = 2.0 * heads * (width + LATENT.rank) * sequences * pairs_of(tokens, context)
            numbers = sequences * context * width
            name = f"latent {heads}x{LATENT.rank}+{LATENT.rope} {kind}, {sequences}x{tokens} of {context}"
            kernel = f"{'prompts' if tokens > 1 else 'decoding'} over latents, {kind}"
            yield Case(name, kernel, Work(operations, numbers * each, 0.0 if tokens > 1 else numbers), seconds)


def _spans() -> list[tuple[int, int, int]]:
    """Tokens, cells and sequences."""
    return [(tokens, context, 1) for tokens, context in PROMPTS] + [(1, cells, n) for cells, n in DECODING]


def _attend(shape: Attend, kind: str, tokens: int, context: int, sequences: int, bench: KernelBench) -> float:
    return time_attention(bench, shape, kind, tokens, [context], sequences)[0].seconds


def _attend_latent(kind: str, tokens: int, context: int, sequences: int, bench: KernelBench) -> float:
    return time_latent(bench, LATENT, kind, tokens, [context], sequences)[0].seconds


def _experts() -> Iterator[Case]:
    for types, width, rule in MIXTURES:
        one = sum(packed_nbytes(q, rule.d_expert, width) for q in (types[0], types[0]))
        one += packed_nbytes(types[1], width, rule.d_expert)
        for tokens in (1, 16, 1024, 4096):
            seconds = partial(_multiply_experts, types, width, rule, tokens)
            operations = 6.0 * tokens * rule.used * width * rule.d_expert
            touched = rule.count * used_share(rule.used, rule.count, tokens)
            each = tokens * rule.used / touched
            kernel = experts_kernel(tokens, each)
            work = Work(operations, one * touched + 8.0 * tokens * width, 3.0 * width * rule.d_expert * touched, each)
            name = f"experts {'/'.join(dict.fromkeys(types))}, {rule.used} of {rule.count}, {tokens} tokens"
            yield Case(name, kernel, work, seconds)
    for tokens in (1, 4096):
        _, width, rule = MIXTURES[0]
        work = Work(2.0 * tokens * width * rule.count, 4.0 * width * (rule.count + tokens))
        seconds = partial(_route, width, rule, tokens)
        yield Case(f"router of {rule.count}, {tokens} tokens", "routing", work, seconds)


def _multiply_experts(types: tuple[str, str], width: int, rule: Experts, tokens: int, bench: KernelBench) -> float:
    return time_experts(bench, types, width, rule, [tokens])[0].seconds


def _route(width: int, rule: Experts, tokens: int, bench: KernelBench) -> float:
    return time_router(bench, "F32", width, rule, [tokens])[0].seconds


def _deltas() -> Iterator[Case]:
    for tokens, sequences in ((1, 1), (1, 16), (64, 1), (1024, 1), (4096, 1)):
        seconds = partial(_run_delta, tokens, sequences)
        kernel = f"delta nets of {'prompts' if tokens > 1 else 'few tokens'}"
        name = f"delta net {'x'.join(map(str, NET.shape))}, {sequences}x{tokens} tokens"
        yield Case(name, kernel, delta_work(NET, tokens, sequences, tokens > 1), seconds)


def _run_delta(tokens: int, sequences: int, bench: KernelBench) -> float:
    return time_delta(bench, NET, [tokens], sequences)[0].seconds


def _rows() -> Iterator[Case]:
    """Norms and the like; counted as a sheet does."""
    d_ffn, d_model = SHAPE
    shape = HEADS[1]
    widths = {"norm": d_model, "rope": (shape.n_heads + shape.n_kv_heads) * shape.head_dim, "silu_mul": d_ffn}
    for tokens in (1, 4096):
        for what, width in widths.items():
            seconds = partial(_pass_rows, what, tokens)
            yield Case(f"{what} of {width}, {tokens} tokens", *pass_work(what, tokens, width), seconds)


def _pass_rows(what: str, tokens: int, bench: KernelBench) -> float:
    rows = time_elementwise(bench, SHAPE[1], SHAPE[0], HEADS[1], [tokens])
    return next(row.seconds for row in rows if row.what == what)


def sheet_seconds(case: Case, card: CardRates) -> float:
    """What a sheet of this card says; a library's products are this GPU's own, whatever the code."""
    code = 90 if case.is_library else card.code
    return seconds_of(replace(card, code=code), case.kernel, case.work) + case.unpacked / memory_of(card)


def compare(case: Case, way: str, seconds: object, card: CardRates) -> dict[str, Any]:
    """What one way of a row has: measured and foreseen microseconds, rates, and how far the sheet is off; the error
    where there is no time, or that no time was left."""
    if not isinstance(seconds, float):
        return {way: seconds or "no time left"}
    said, work = sheet_seconds(case, card), case.work
    found = {
        "us": round(seconds * 1e6, 2),
        "sheet_us": round(said * 1e6, 2),
        "off": round(said / seconds - 1, 3),
        "tflops": round(work.operations / seconds / 1e12, 2),
        "gbs": round((work.nbytes + case.unpacked) / seconds / 1e9, 1),
        "slots": round(work.operations / seconds / card.processors / card.clock, 1),
        "tensor": round(work.operations / seconds / card.tensor, 4),
    }
    return {way: found}


def card_of(name: str, code: int) -> CardRates:
    """The datasheet of the GPU that is there, an H100 or an H200, taken for code of that capability."""
    return replace(H100, name=name, code=code, memory=4800e9 if "H200" in name else H100.memory)


def make_rows(cases: Sequence[Case], times: dict[str, dict[str, Any]], cards: dict[str, CardRates]) -> list[dict]:
    """One row of the result for each case. `share`: the rate as the other card over this GPU's own."""
    rows = []
    for case in cases:
        row: dict[str, Any] = {"case": case.name, "kernel": case.kernel, "library": case.is_library}
        both = [times[way].get(case.name) for way in ("native", "as_card")]
        row["share"] = round(both[0] / both[1], 3) if all(isinstance(s, float) for s in both) else None
        for way in WAYS:
            row |= compare(case, way, times[way].get(case.name), cards[way])
        rows.append(row)
    return sorted(rows, key=lambda row: row["case"])


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """The table; microseconds, and `off` in percent."""
    print(f"{'case':52s}{'as card':>10s}{'sheet':>10s}{'off':>7s}{'native':>10s}{'sheet':>10s}{'off':>7s}{'share':>7s}")
    for row in rows:
        cells = ""
        for way in ("as_card", "native"):
            one = row[way]
            if isinstance(one, dict):
                cells += f"{one['us']:10.1f}{one['sheet_us']:10.1f}{100 * one['off']:+6.0f}%"
            else:
                cells += f"{one[:24]:>27s}"
        print(f"{row['case']:52s}{cells}{row['share'] or '-':>7}")


def page_table(result: dict[str, Any]) -> str:
    """The table of docs/cards.md from a result file: each case in both codes, and how far today's formula is off."""
    measured = {row["case"]: row for row in result["rows"]}
    lines = ["| kernel | as sm_86 us | sheet | sm_90 us | sheet | sm_86 of sm_90 |", "|---|---|---|---|---|---|"]
    for case in sorted(list_cases(), key=lambda case: case.name):
        cells = []
        for way, code in (("as_card", int(result["as_card"])), ("native", 90)):
            us = measured[case.name][way]["us"]
            off = 1e6 * sheet_seconds(case, card_of(result["gpu"], code)) / us - 1
            cells += [f"{us:.4g}", f"{100 * off:+.0f}%"]
        lines.append(f"| {case.name} | {' | '.join(cells)} | {measured[case.name]['share']:.0%} |")
    return "\n".join(lines)


def time_all(bench: KernelBench, cases: Sequence[Case], until: float) -> dict[str, float | str]:
    """Case -> seconds, or the error in words; what time.monotonic() leaves no time for is missing."""
    found: dict[str, float | str] = {}
    for case in cases:
        if time.monotonic() > until:
            break
        try:
            with torch.inference_mode():
                found[case.name] = case.seconds(bench) or "takes no time"  # beyond the products it is timed with
        except Exception as error:
            found[case.name] = f"{type(error).__name__}: {error}"[:200]
        bench.kernels.forget()
    return found


def compile_cases(bench: KernelBench, cases: Sequence[Case], seconds: float) -> None:
    """Compile for about so many seconds, on all cores, what the cases need, the first first."""
    rehearsal, wanted = replace(bench, rehearses=True), dict[Any, None]()
    for case in cases:
        try:
            with torch.inference_mode():
                wanted |= dict.fromkeys(requests_of(partial(case.seconds, rehearsal)))
        except Exception as error:  # told when it is timed
            sys.stderr.write(f"{case.name}: {error}\n")
        bench.kernels.forget()
    done = compile_ahead(list(wanted), count_processes(), seconds)
    sys.stderr.write(f"{len(done)} of {len(wanted)} kernels compiled\n")


def time_way(seconds: float) -> dict[str, Any]:
    """What one of the processes does."""
    from pshard.runtime.kernels.gpu.cuda import CudaKernels

    start, device, cases = time.monotonic(), torch.device("cuda"), list_cases()
    kernels = CudaKernels(device, max(TOKENS))
    bench = KernelBench("acc", kernels, device, OperandPool(POOL_BYTES, device), Pace(0.06), 1.0)
    compile_cases(bench, cases, COMPILING * seconds)
    ready = time.monotonic() - start
    times = time_all(bench, cases, start + seconds)
    took = {"compiling": round(ready, 1), "all": round(time.monotonic() - start, 1)}
    return {"times": times, "took_s": took, "passed_over": list(kernels._picker.passed_over)}


def main() -> int:
    """Entry point of the script; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--as-card", default="86", metavar="86", help="capability of the other card (default 86)")
    parser.add_argument("--seconds", type=float, default=120.0, help="no case begins later than this (default 120)")
    parser.add_argument("--out", type=Path, required=True, help="file to write, JSON")
    parser.add_argument("--table", action="store_true", help="print the table of docs/cards.md from the file instead")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)  # what one of the processes does
    args = parser.parse_args()
    if args.table:
        print(page_table(json.loads(args.out.read_text(encoding="utf-8"))))
        return 0
    if args.way:
        print(json.dumps(time_way(args.seconds)))
        return 0
    found: dict[str, Any] = {}
    for way in WAYS:
        found[way] = run_way(__file__, way, args.as_card, args.seconds / 2, args.out) or {"times": {}}
    name = torch.cuda.get_device_name()
    cards = {"native": card_of(name, 90), "as_card": card_of(name, int(args.as_card))}
    rows = make_rows(list_cases(), {way: found[way]["times"] for way in WAYS}, cards)
    result = {
        "gpu": name, "as_card": args.as_card, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d %H:%M"),
        "took_s": {way: found[way].get("took_s") for way in WAYS},
        "passed_over": {way: found[way].get("passed_over") for way in WAYS}, "rows": rows,
    }  # fmt: skip
    args.out.write_text(json.dumps(result, indent=1))
    print_rows(rows)
    return 0 if all(found[way]["times"] for way in WAYS) else 1


if __name__ == "__main__":
    sys.exit(main())
