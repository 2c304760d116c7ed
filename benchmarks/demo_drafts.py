"""The bundled model with what was trained to draft for it: how many drafts hold, and the rate over that without any.

    python benchmarks/demo_drafts.py --text tinyshakespeare.txt -o demo-drafts.json

For each drafter the model goes on from beginnings of the text's last tenth, which it was not trained on; it is counted
which drafts hold, greedily and at temperature 0.8. The number of drafts is planned by the greedy counts. Then each
number is measured under a plan of its own: answers with drafts and without, in turns. Ratios are medians of rounds.
Needs a profile of this machine (pshard profile).
"""

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpu_kernels import write_json

from pshard.commands import cli_plan
from pshard.commands.command_line import new_parser, parse_ints, run_cli
from pshard.errors import UserError
from pshard.models.attach_draft import open_drafted
from pshard.paths import bundled_model
from pshard.registries.acceptance_file import keep_acceptance
from pshard.registries.store import load_registry
from pshard.runtime.build_engine import build_engine
from pshard.runtime.devices.device import open_device
from pshard.runtime.sampling import Sampling
from pshard.runtime.speculation.speculator import DraftSettings
from pshard.speculation import DRAFT, LOOKUP, MTP, AcceptanceRecord

if TYPE_CHECKING:
    from pshard.plan import Variant
    from pshard.runtime.engine import Engine

BEGINNING, TOLD = 32, 60  # tokens of a text that are given, and that the model goes on with
COUNTED = 4  # drafts of a step, where it is counted how many hold
GREEDY = Sampling(temperature=0)
DRAWN = Sampling(temperature=0.8, top_k=0, top_p=1.0, min_p=0.0, seed=1)


def main(argv: list[str]) -> int:
    """Measure and print; with -o also write JSON."""
    parser = new_parser("demo_drafts.py", str(__doc__).splitlines()[0])
    parser.add_argument("--text", type=Path, required=True, help="that of scripts/train_demo_model.py")
    parser.add_argument("--vram", type=int, default=64, help="MiB of the plans")
    parser.add_argument("--texts", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--numbers", type=parse_ints, default=(1, 2, 3, 5, 7), help="of drafts that are measured")
    parser.add_argument("-o", "--output", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    model = bundled_model()
    if model is None:
        raise UserError("the bundled model is not installed; run this from a clone")
    draft = model.with_name(f"{model.stem}-draft.gguf")
    results = [measure(args, model, draft if kind == DRAFT else None, kind) for kind in (MTP, DRAFT, LOOKUP)]
    for found in results:
        show(found)
    if args.output:
        write_json(args.output, "demo_drafts", results, argv)
    return 0


def measure(args: argparse.Namespace, model: Path, draft: Path | None, kind: str) -> dict[str, Any]:
    """Acceptance, the planned number of drafts, and the rates of each number over that without."""
    text = args.text.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder, open_drafted(model, draft) as file:
        words = ["-m", str(model), "--vram", str(args.vram), "-c", "256", "--prompt", "32", "--generated", str(TOLD)]
        asked = [*words, "--spec", kind, *(["-md", str(draft)] if draft else [])]
        ids = file.tokenizer().encode(text[len(text) * 9 // 10 :])
        texts = [ids[at : at + BEGINNING] for at in range(0, len(ids) - BEGINNING, len(ids) // args.texts)][
            : args.texts
        ]
        counted = plan([*asked, "--spec-n", str(COUNTED)], Path(folder) / "counted.json")
        with open_engine(model, draft, counted) as engine:
            records = {name: count(engine, texts, kind, how) for name, how in (("greedy", GREEDY), ("drawn", DRAWN))}
        registry = Path(folder) / "plans.json"
        keep_acceptance(registry, file.fingerprint_inputs(), records["greedy"])
        chosen = plan(asked, registry)
        alone = plan(words, Path(folder) / "alone.json")
        with open_engine(model, None, alone) as base:
            rows = []
            for number in args.numbers:
                registry = Path(folder) / f"{number}.json"
                keep_acceptance(registry, file.fingerprint_inputs(), records["greedy"])
                variant = plan([*asked, "--spec-n", str(number)], registry)
                with open_engine(model, draft, variant) as engine:
                    rows.append(compare(args.rounds, base, engine, texts, DraftSettings(kind, number, fixed=True)))
                rows[-1] |= {"drafts": number, "planned": predict_ratio(variant)}
    return {
        "drafter": kind,
        "texts": len(texts),
        "told": TOLD,
        **{name: describe(record) for name, record in records.items()},
        "chosen": choose(chosen),
        "numbers": rows,
    }


def plan(words: list[str], registry: Path) -> "Variant":
    """What pshard plan makes of these words; what it prints goes to stderr."""
    with contextlib.redirect_stdout(sys.stderr):
        if cli_plan.main([*words, "--registry", str(registry)]):
            raise UserError(f"pshard plan {' '.join(words)} has failed")
    return load_registry(registry).variants[0]


@contextlib.contextmanager
def open_engine(model: Path, draft: Path | None, variant: "Variant") -> "Iterator[Engine]":
    """An engine of the plan, warm."""
    with open_drafted(model, draft) as file, build_engine(file, variant, open_device("cpu"), kernels="fast") as engine:
        yield engine


def count(engine: "Engine", texts: list[list[int]], kind: str, how: Sampling) -> AcceptanceRecord:
    """What becomes of COUNTED drafts a step behind each beginning."""
    settings = DraftSettings(kind, COUNTED, fixed=True, record=AcceptanceRecord(kind))
    for ids in texts:
        tell(engine, ids, how, settings)
    return settings.record


def tell(engine: "Engine", ids: list[int], how: Sampling, settings: DraftSettings | None) -> float:
    """Seconds of an answer behind its first token, which the prompt gives."""
    engine.reset()
    made = engine.generate(ids, TOLD, how, False, None, settings)
    next(made)
    start = time.perf_counter()
    for _ in made:
        pass
    return time.perf_counter() - start


def compare(
    rounds: int, base: "Engine", engine: "Engine", texts: list[list[int]], settings: DraftSettings
) -> dict[str, Any]:
    """Rates with drafts and without, in turns."""
    tell(base, texts[0], GREEDY, None), tell(engine, texts[0], GREEDY, settings)
    ratios, rates = list[float](), list[float]()
    for _ in range(rounds):
        alone = drafting = 0.0
        for ids in texts:
            alone += tell(base, ids, GREEDY, None)
            drafting += tell(engine, ids, GREEDY, settings)
        ratios.append(alone / drafting)
        rates.append(len(texts) * (TOLD - 1) / alone)
    return {"ratio": statistics.median(ratios), "ratios": ratios, "without_ts": statistics.median(rates)}


def choose(variant: "Variant") -> int:
    """The number of drafts with the highest planned rate, none included."""
    said = variant.speculation
    assert said is not None
    return max(said.planned, key=lambda row: row.rate(said.acceptance)).drafts


def predict_ratio(variant: "Variant") -> float:
    """The planned rate over the planned one without."""
    said = variant.speculation
    assert said is not None
    rates = {row.drafts: row.rate(said.acceptance) for row in said.planned}
    return rates[variant.workload.drafting.drafts] / rates[0]


def describe(record: AcceptanceRecord) -> dict[str, Any]:
    """Chances of the first, the first two, ... drafts over all steps, and tokens a step with 1, 2, ... drafts."""
    held = record.acceptance
    assert held is not None
    tokens = [held.mean_tokens(drafts) for drafts in range(1, COUNTED + 1)]
    return {"steps": record.steps, "share": held.share, "rates": held.rates, "tokens": tokens}


def show(found: dict[str, Any]) -> None:
    """One drafter's table."""
    print(f"\n{found['drafter']}: chosen {found['chosen']} drafts a step")
    for how in ("greedy", "drawn"):
        tokens = ", ".join(f"{x:.2f}" for x in found[how]["tokens"])
        print(f"{how}: {tokens} tokens a step with 1 to {COUNTED} drafts; drafts in {found[how]['share']:.0%} of steps")
    print("| drafts | tok/s over without | planned |\n|---|---|---|")
    for row in found["numbers"]:
        print(f"| {row['drafts']} | {row['ratio']:.2f} | {row['planned']:.2f} |")


if __name__ == "__main__":
    sys.exit(run_cli(main))
