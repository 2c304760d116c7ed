"""Published figures of dense models beside predictions for the same machine: `python benchmarks/published.py`.

Prints JSON: the rows, each with what `pshard-plan --vram 15000` with micro-batches of up to 16384 tokens is predicted
to reach on the example sheet of that machine, and times to the first token with other kernels for the prompt's
products. `--tables FILE` prints the tables of docs/published.md from such a file; nothing is planned then.
"""

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from planner import make_spec
from pshard.batch_sizes import SMALL_BATCH
from pshard.machine import MachineProfile
from pshard.model import ModelSpec
from pshard.planner.make_plan import plan_variant
from pshard.planner.price.datasheet import SHAPES as SHAPES_TIMED
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.planner.price.example_sheets import MACHINES
from pshard.planner.price.kernel_rates import RTX_5080
from pshard.planner.price.predict_published import Predictor
from pshard.times.gpu_tiles import INT8_KERNEL, LEAST_GAIN, Tile, TileChoice
from pshard.workload import Workload

SHEET = MACHINES["rtx5080-xeon-w5-3425"]
VRAM_MIB, UBATCH, ANSWER, BATCHED_PROMPT = 15000, 16384, 200, 4096
FAR = 0.25  # a prediction that is further off needs a reason
SHAPES = {  # layers, d_model, heads, kv_heads, d_ffn, vocab
    "Qwen3-32B": (64, 5120, 64, 8, 25600, 151936),
    "Llama3-70B": (80, 8192, 64, 8, 28672, 128256),
    "Devstral-123B": (88, 12288, 96, 8, 28672, 131072),
}
SLOW_LINK = 0.65
# seconds to the first token and tokens per second (of all users) by (context, users): llama.cpp PR 22692
SINGLE, BATCHED = (16384, 65536, 131072, 262144), (4, 16, 32, 64)
PUBLISHED = {
    "Qwen3-32B": (
        ((9.8, 6.51), (75.2, 3.26), (266.4, 1.45), (1114.5, 0.59)),
        ((7.8, 24.50), (32.7, 32.65), (66.4, 35.46), (137.2, 34.46)),
    ),
    "Llama3-70B": (
        ((18.5, 1.76), (135.8, 1.72), (425.1, 0.95), (1638.9, 0.44)),
        ((19.7, 6.90), (83.6, 10.80), (170.9, 12.60), (346.2, 13.13)),
    ),
    "Devstral-123B": (
        ((33.9, 1.32), (223.1, 1.02), (725.8, 0.69), (2694.7, 0.35)),
        ((28.0, 4.32), (113.1, 9.92), (229.7, 14.35), (463.5, 18.34)),
    ),
}
# what else the prompt's products could be, and what a kernel would reach: docs/published.md says by which source
OURS = "int8, ours"
INT8_SHARES = {"Q4_0": 0.453, "Q6_K": 0.251}  # of plain int8, as sm_86: h100-int8-products-0141.json
TILE = Tile(64, 1, 4, 1, tokens=128)  # of products in int8; prices do not ask which


def sheet_with_int8() -> MachineProfile:
    """The sheet's profile as if products in int8 had been timed beside those in bfloat16."""
    profile = profile_from_datasheet(SHEET)
    for qtype, share in INT8_SHARES.items():
        int8 = replace(SHEET, acc_flops=share * 4 * RTX_5080.tensor, acc_unpack=0.0)
        profile = _take_faster(profile, profile_from_datasheet(int8), qtype)
    return profile


def _take_faster(profile: MachineProfile, int8: MachineProfile, qtype: str) -> MachineProfile:
    """The profile with a type's products as `int8` has them, for numbers of tokens for which these are faster."""
    both = [(m, n) for m, n in zip(profile.matmuls, int8.matmuls, strict=True) if (m.device, m.qtype) == ("acc", qtype)]
    choices = tuple(
        TileChoice("acc", INT8_KERNEL, qtype, m.tokens, TILE, n.seconds, m.seconds)
        for m, n in both
        if m.tokens > SMALL_BATCH and (m.rows, m.cols) == SHAPES_TIMED[-1]
    )
    faster = {choice.tokens for choice in choices if choice.gain > LEAST_GAIN}
    taken = {m: n for m, n in both if m.tokens in faster}
    matmuls = tuple(taken.get(m, m) for m in profile.matmuls)
    return replace(profile, matmuls=matmuls, tiles=(*profile.tiles, *choices))


KERNELS = {
    OURS: sheet_with_int8(),
    "fp16 sums": profile_from_datasheet(replace(SHEET, acc_flops=0.88 * 2 * RTX_5080.tensor)),
    "int8 as published": profile_from_datasheet(replace(SHEET, acc_flops=0.33 * 4 * RTX_5080.tensor, acc_unpack=0.0)),
    "int8 at half its peak": profile_from_datasheet(
        replace(SHEET, acc_flops=0.5 * 4 * RTX_5080.tensor, acc_unpack=0.0)
    ),
}


@dataclass(frozen=True)
class Row:
    """One published measurement: the context fills up to the answer, or each of several users brings a prompt."""

    model: str
    context: int
    users: int
    first_token: float
    rate: float

    @property
    def workload(self) -> Workload:
        """What is planned for it."""
        prompt = BATCHED_PROMPT if self.users > 1 else self.context - ANSWER
        return Workload((VRAM_MIB,), self.context, self.users, max_ubatch=UBATCH, prompt=prompt, generated=ANSWER)

    @property
    def name(self) -> str:
        """How the tables call it."""
        return f"{self.users} users" if self.users > 1 else f"{self.context >> 10}K"


def list_rows() -> Iterator[Row]:
    """All rows, in the order in which they were published."""
    for kind in range(2):
        for model, figures in PUBLISHED.items():
            for given, (first_token, rate) in zip((SINGLE, BATCHED)[kind], figures[kind], strict=True):
                context, users = (given * (BATCHED_PROMPT + ANSWER), given) if kind else (given, 1)
                yield Row(model, context, users, first_token, rate)


def predict(row: Row, profile: MachineProfile | None = None) -> tuple[float, float]:
    """Seconds to the first token of the last user, and tokens per second of all. Raises NoPlan where nothing fits."""
    spec, workload = make_spec(row.model, *SHAPES[row.model]), row.workload
    profile = profile or profile_from_datasheet(SHEET)
    predictor = Predictor([spec], profile, plan_variant(spec, profile, workload))
    seconds = predictor.decode(ANSWER, row.users, workload.prompt)
    return predictor.prefill(workload.prompt, row.users), ANSWER * row.users / seconds


def host_rate(row: Row, tokens_per_second: float) -> float:
    """Bytes per second that the host's memory gives at least while that is reached: what VRAM cannot hold."""
    spec = make_spec(row.model, *SHAPES[row.model])
    cells = row.users * (row.workload.prompt + ANSWER // 2)
    outside = _weight_bytes(spec) + cells * _cell_bytes(row.model) - (VRAM_MIB << 20)
    return outside * tokens_per_second / row.users


def predict_rows() -> Iterator[dict[str, Any]]:
    """Every row with its predictions."""
    for row in list_rows():
        first_token, rate = predict(row)
        others = {name: round(predict(row, profile)[0], 2) for name, profile in KERNELS.items()}
        yield {
            "model": row.model, "context": row.context, "users": row.users, "row": row.name,
            "first_token": [row.first_token, round(first_token, 2)], "rate": [row.rate, round(rate, 3)],
            "host_gbs": [round(host_rate(row, r) / 1e9, 1) for r in (row.rate, rate)], "first_token_with": others,
        }  # fmt: skip


def compare_table(rows: Iterable[dict[str, Any]]) -> str:
    """The table of rows as published and predicted; what is further off than FAR is bold."""
    lines = [
        "| model | row | TTFT s, published | predicted | ratio | tok/s, published | predicted | ratio | GB/s | why |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        (ttft, own_ttft), (rate, own_rate), (gbs, own_gbs) = r["first_token"], r["rate"], r["host_gbs"]
        lines.append(
            f"| {r['model']} | {r['row']} | {ttft:g} | {_short(own_ttft)} | {_ratio(own_ttft / ttft)} "
            f"| {rate:g} | {_short(own_rate)} | {_ratio(own_rate / rate)} | {gbs:.0f}, {own_gbs:.0f} "
            f"| {', '.join(find_reasons(r))} |"
        )
    return "\n".join(lines)


def kernel_table(rows: Iterable[dict[str, Any]]) -> str:
    """The table of times to the first token by the kernel of the prompt's products, over the published ones."""
    head = ["model", "row", "published s", "bf16 (today)", *KERNELS]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for r in rows:
        published, today = r["first_token"]
        cells = [f"{_short(s)} ({s / published:.2f})" for s in (today, *r["first_token_with"].values())]
        lines.append(f"| {r['model']} | {r['row']} | {published:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def margin_table(rows: Iterable[dict[str, Any]]) -> str:
    """The table of rows with products in int8 by OURS: by how much the first token, and the whole job, is won or lost;
    a margin of 10% is 10% less time than published."""
    head = "model | row | TTFT s, published | int8, ours | margin | whole job s, published | int8, ours | margin"
    lines = [f"| {head} |", "|---" * 8 + "|"]
    for r in rows:
        answers = [ANSWER * r["users"] / rate for rate in r["rate"]]
        firsts = r["first_token"][0], r["first_token_with"][OURS]
        cells = []
        for published, own in (firsts, (firsts[0] + answers[0], firsts[1] + answers[1])):
            cells += [_short(published), _short(own), f"{1 - own / published:+.0%}"]
        lines.append(f"| {r['model']} | {r['row']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def job_table(rows: Iterable[dict[str, Any]]) -> str:
    """The table of rows whose whole job, the prompt and ANSWER tokens of every user, is faster as published."""
    lines = ["| model | row | whole job s, published | predicted | ratio |", "|---|---|---|---|---|"]
    for r in rows:
        published, own = (s + ANSWER * r["users"] / rate for s, rate in zip(r["first_token"], r["rate"], strict=True))
        if published < own:
            lines.append(
                f"| {r['model']} | {r['row']} | {_short(published)} | {_short(own)} | {_ratio(own / published)} |"
            )
    return "\n".join(lines)


def find_reasons(row: dict[str, Any]) -> list[str]:
    """Letters of docs/published.md: "a" for the prompt; for the answer "b" where the published run moved no more than
    the link carries, and "c" where it moved less than SLOW_LINK of that."""
    (ttft, own_ttft), (rate, own_rate), (gbs, _) = row["first_token"], row["rate"], row["host_gbs"]
    found = ["a"] if is_far(own_ttft / ttft) else []
    if is_far(own_rate / rate) and own_rate > rate and 1e9 * gbs <= 1.01 * SHEET.link:
        found.append("b" if 1e9 * gbs >= SLOW_LINK * SHEET.link else "c")
    return found


def is_far(ratio: float) -> bool:
    """Whether prediction over published needs a reason."""
    return not 1 / (1 + FAR) <= ratio <= 1 + FAR


def _ratio(ratio: float) -> str:
    return f"**{ratio:.2f}**" if is_far(ratio) else f"{ratio:.2f}"


def _short(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def _weight_bytes(spec: ModelSpec) -> int:
    return sum(unit.packed_nbytes for unit in spec.units)


def _cell_bytes(model: str) -> int:
    layers, _, _, kv_heads, _, _ = SHAPES[model]
    return layers * kv_heads * 128 * 2 * 2


def main() -> None:
    """JSON of all rows, or the tables of a file of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, metavar="FILE", help="print tables of this file's rows")
    args = parser.parse_args()
    if args.tables:
        rows = json.loads(args.tables.read_text(encoding="utf-8"))
        print(*(t(rows) for t in (compare_table, job_table, margin_table, kernel_table)), sep="\n\n")
        return
    print("[\n" + ",\n".join(" " + json.dumps(row) for row in predict_rows()) + "\n]")


if __name__ == "__main__":
    main()
