"""Published figures of mixtures of experts beside predictions: `python benchmarks/published_experts.py`.

Prints JSON: the rows of gpt-oss-120b, as benchmarks/published.py does those of dense models, on the same machine's
sheet. The other published mixtures are hybrids:
benchmarks/published_hybrids.py. `--table FILE` prints the table of docs/published.md from such a file.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from published import ANSWER, SHEET, SINGLE, UBATCH, is_far

from pshard.model import ModelSpec
from pshard.model_config import Experts, ModelConfig, Rope
from pshard.models.architectures import find_gguf_architecture
from pshard.models.build_units import build_units
from pshard.models.stored import StoredTensor
from pshard.planner.make_plan import plan_variant
from pshard.planner.price.datasheet import Rates, profile_from_datasheet
from pshard.planner.price.predict_published import Predictor
from pshard.workload import Workload

MODEL, RULE = "GPT-OSS-120B", Experts(128, 4, 2880, "chosen", normed=False, activation="clamped", biases=True)
COLUMNS = ("published", "predicted", "ratio")
LETTERS = "de"  # of docs/published.md
# seconds to the first token and tokens per second by context, by budget in MiB: llama.cpp PR 22692, 16 GB and 8 GB
PUBLISHED = {
    15000: ((3.7, 32.21), (20.1, 29.39), (58.8, 25.71), (188.3, 21.54)),
    8000: ((3.9, 29.12), (23.3, 26.74), (89.8, 24.00), (431.3, 5.36)),
}


@dataclass(frozen=True)
class ExpertRow:
    """One published measurement of one user: the context fills up to the answer."""

    vram_mib: int
    context: int
    first_token: float
    rate: float

    @property
    def workload(self) -> Workload:
        """What is planned for it."""
        prompt = self.context - ANSWER
        return Workload((self.vram_mib,), self.context, max_ubatch=UBATCH, prompt=prompt, generated=ANSWER)

    @property
    def name(self) -> str:
        """How the table calls it."""
        return f"{self.context >> 10}K, {self.vram_mib} MiB"


def list_rows() -> Iterator[ExpertRow]:
    """All rows, in the order in which they were published."""
    for mib, figures in PUBLISHED.items():
        for context, own in zip(SINGLE, figures, strict=True):
            yield ExpertRow(mib, context, *own)


def make_gpt_oss() -> ModelSpec:
    """gpt-oss-120b as its published GGUF file holds it, experts in MXFP4 and other matrices in Q8_0."""
    arch = find_gguf_architecture("gpt-oss", MODEL, has_experts=True)
    rope = Rope(64, 150000.0, arch.gguf_pairing, "yarn", 32.0, 4096, rounded=False)
    config = ModelConfig(
        "gpt-oss", 36, 2880, 64, 8, 64, 2880, 201088, 1e-5, 262144, rope,
        sliding_window=128, window_every=arch.window_every, experts=RULE,
    )  # fmt: skip
    no_file: Any = None
    stored = {name: StoredTensor(name, qtype, shape, no_file, 0) for name, qtype, shape in _list_tensors(config)}
    return ModelSpec(MODEL, "", config, build_units(arch, config, stored, MODEL))


def _list_tensors(config: ModelConfig) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    d, q, kv = config.d_model, config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    n, f = RULE.count, RULE.d_expert
    yield "token_embd.weight", "Q8_0", (config.vocab, d)
    yield "output.weight", "Q8_0", (config.vocab, d)
    yield "output_norm.weight", "F32", (d,)
    for layer in range(config.n_layers):
        b = f"blk.{layer}."
        for role, shape in (("q", (q, d)), ("k", (kv, d)), ("v", (kv, d)), ("output", (d, q))):
            yield f"{b}attn_{role}.weight", "Q8_0", shape
            yield f"{b}attn_{role}.bias", "F32", shape[:1]
        yield b + "attn_sinks.weight", "F32", (config.n_heads,)
        yield b + "attn_norm.weight", "F32", (d,)
        yield b + "ffn_norm.weight", "F32", (d,)
        yield b + "ffn_gate_inp.weight", "F32", (n, d)
        yield b + "ffn_gate_inp.bias", "F32", (n,)
        for role, stack in (("gate", (n, f, d)), ("up", (n, f, d)), ("down", (n, d, f))):
            yield f"{b}ffn_{role}_exps.weight", "MXFP4", stack
            yield f"{b}ffn_{role}_exps.bias", "F32", stack[:2]


def predict(row: ExpertRow, rates: Rates = SHEET) -> tuple[float, float]:
    """Seconds to the first token and tokens per second."""
    return predict_model(make_gpt_oss(), row, rates)


def predict_model(spec: ModelSpec, row: ExpertRow, rates: Rates = SHEET) -> tuple[float, float]:
    """The same of any model."""
    workload, profile = row.workload, profile_from_datasheet(rates)
    predictor = Predictor([spec], profile, plan_variant(spec, profile, workload))
    return predictor.prefill(workload.prompt), ANSWER / predictor.decode(ANSWER, depth=workload.prompt)


def predict_rows() -> Iterator[dict[str, Any]]:
    """Every row with its predictions."""
    for row in list_rows():
        yield describe_row(MODEL, row, predict(row))


def describe_row(model: str, row: ExpertRow, own: tuple[float, float]) -> dict[str, Any]:
    """A row of a model, beside what is predicted of it, as files hold it."""
    return {
        "model": model, "row": row.name, "vram_mib": row.vram_mib, "context": row.context,
        "first_token": [row.first_token, round(own[0], 2)], "rate": [row.rate, round(own[1], 3)],
    }  # fmt: skip


def compare_table(rows: Iterable[dict[str, Any]], names: tuple[str, ...] = ("row",), letters: str = LETTERS) -> str:
    """The table of rows as published and predicted; what is too far off is bold. names: of the columns that say which
    row it is."""
    head = [*names, *(f"{what}, {of}" for what in ("TTFT s", "tok/s") for of in COLUMNS), "why"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for r in rows:
        cells = [r[name] for name in names]
        for published, predicted in (r["first_token"], r["rate"]):
            ratio = predicted / published
            cells += [f"{published:g}", f"{predicted:.3g}", f"**{ratio:.2f}**" if is_far(ratio) else f"{ratio:.2f}"]
        cells.append(", ".join(find_reasons(r, letters)))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def find_reasons(row: dict[str, Any], letters: str = LETTERS) -> list[str]:
    """Letters of docs/published.md: one for prompts that are predicted faster, one for answers that are."""
    (ttft, own_ttft), (rate, own_rate) = row["first_token"], row["rate"]
    faster = own_ttft < ttft and is_far(own_ttft / ttft), own_rate > rate and is_far(own_rate / rate)
    return [letter for letter, far in zip(letters, faster) if far]


def print_rows(
    description: str | None, rows: Callable[[], Iterable[dict[str, Any]]], table: Callable[[list[dict[str, Any]]], str]
) -> None:
    """What such a script does: prints JSON of all rows, or with --table the table of a file of them."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the table of this file's rows")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.table.read_text(encoding="utf-8"))))
        return
    print("[\n" + ",\n".join(" " + json.dumps(row) for row in rows()) + "\n]")


if __name__ == "__main__":
    print_rows(__doc__, predict_rows, compare_table)
