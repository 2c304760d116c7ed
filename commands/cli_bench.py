"""pshard-bench: measured rates beside predicted ones, for the plan and for baselines, in the manner of llama-bench."""

import os
import shlex
import sys
import time
from argparse import ArgumentParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pshard.commands.command_line import check_writable, new_parser, parse_count, parse_counts, parse_ints, run_cli
from pshard.commands.everyday.cli_serve_bench import main as bench_server
from pshard.commands.everyday.cli_serve_bench import wants_server
from pshard.commands.parsing.spec_flags import add_spec_flags, read_spec_flags
from pshard.commands.run_flags import add_plan_flags, make_request, planned_flags
from pshard.errors import UserError, name_cause

if TYPE_CHECKING:
    from pshard.model import ModelSpec
    from pshard.runtime.ranks.group import Group
    from pshard.session.bench_engine import BenchSetting, BenchTest
    from pshard.session.open_plan import Opened
    from pshard.session.run_request import RunRequest
    from pshard.times.measurement import Measurement

BASELINES = ("fit", "accelerate")


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command."""
    return run_cli(_main, argv)


def make_parser() -> ArgumentParser:
    """The flags of pshard-bench."""
    description = "Measure prompt processing and decoding under a plan, beside its prediction."
    parser = new_parser("pshard-bench", description, takes_model=True)
    add_plan_flags(parser)
    parser.add_argument(
        "--serve", metavar="URL", help="drive an OpenAI server instead; --serve URL --help lists the flags of that"
    )
    tests = parser.add_argument_group("tests")
    tests.add_argument("-p", "--n-prompt", type=parse_ints, default=(512,), help="prompt tokens, as 512,4096 (0: none)")
    tests.add_argument("-n", "--n-gen", type=parse_ints, default=(128,), help="tokens to decode (0: none)")
    tests.add_argument("-d", "--n-depth", type=parse_ints, default=(0,), help="tokens cached before the test")
    tests.add_argument("-npl", "--n-parallel", type=parse_counts, default=(1,), help="sequences at once, as 1,4,16")
    tests.add_argument("-r", "--repetitions", type=parse_count, default=5, help="samples of each test (default 5)")
    tests.add_argument("--strategy", action="append", default=[], metavar="NAME", help="also run a published strategy")
    tests.add_argument("--baseline", action="append", default=[], choices=BASELINES, help="also run a baseline")
    tests.add_argument("--perplexity", type=Path, metavar="FILE", help="perplexity of a text instead of the tests")
    tests.add_argument("--ppl-window", type=parse_count, default=512, help="tokens in a window of it (default 512)")
    parser.add_argument(
        "-o",
        "--output",
        choices=("md", "batched", "csv", "json", "jsonl"),
        default="md",
        help="format on stdout; batched: each prompt and the decoding after it as one row",
    )
    parser.add_argument("-of", "--output-file", type=Path, help="also write JSON to this file")
    add_spec_flags(parser)
    return parser


def _main(argv: list[str]) -> int:
    if wants_server(argv):
        return bench_server(argv)
    args = make_parser().parse_args(argv)
    request, text = _make_request(args), _read_text(args.perplexity)

    from pshard.runtime.ranks.started import started_ranks
    from pshard.session.choose_drafts import choose_drafts
    from pshard.session.lead_ranks import follow_rank_0, lead_ranks
    from pshard.session.open_plan import open_plan, settle_plan
    from pshard.session.start_engine import open_group

    request, ranks = settle_plan(request)
    if ranks > 1 and not started_ranks():
        from pshard.runtime.ranks.start_ranks import start_ranks

        words = [*planned_flags(argv, request), "-m", str(request.model)]
        return start_ranks(ranks, "pshard.commands.cli_bench", words)
    opened = open_plan(request)
    _check_strategies(args.strategy, opened.file.spec)
    choose_drafts(read_spec_flags(args), opened.variant, ranks=True)  # what it refuses, ranks say before they meet
    group = open_group(opened, ranks)
    if group.rank:
        return follow_rank_0(opened, group)
    with lead_ranks(group):
        if text is not None:
            return _run_perplexity(opened, args, group, text)
        found = _run_all(opened, args, group, shlex.join(["pshard-bench", *argv]))
    _write(found, args)
    return 0


def _make_request(args: Any) -> "RunRequest":
    """What the tests need of a plan. Raises UserError for what would come to light only after measuring."""
    from dataclasses import replace

    from pshard.planner.published.strategies import NAMES

    for name in args.strategy:
        if name not in NAMES:
            raise UserError(f"--strategy {name} is unknown; choose from {', '.join(NAMES)}")
    if args.ppl_window < 2:
        raise UserError(f"--ppl-window is {args.ppl_window}; give 2 tokens or more")
    read_spec_flags(args)
    if args.output_file is not None:
        check_writable(args.output_file, "-of")
    if args.perplexity is not None:
        return make_request(args, 1)
    tests = _tests(args)
    request = make_request(args, max(test.n_sequences for test in tests))
    return replace(request, needed=max(test.cells * test.n_sequences for test in tests))


def _check_strategies(names: list[str], spec: "ModelSpec") -> None:
    """Raise UserError, before anything is measured, for a strategy that there is not for the model."""
    from pshard.planner.published.strategies import check_strategy

    for name in names:
        check_strategy(name, spec)


def _tests(args: Any) -> "list[BenchTest]":
    from pshard.session.bench_engine import BenchTest

    tests: list[BenchTest] = []
    for depth in args.n_depth:
        for parallel in args.n_parallel:
            if args.output == "batched":
                for n_prompt in filter(None, args.n_prompt):
                    after = [BenchTest(0, n, depth + n_prompt, parallel) for n in args.n_gen if n]
                    tests += [BenchTest(n_prompt, 0, depth, parallel), *after] if after else []
                continue
            tests += [BenchTest(n, 0, depth, parallel) for n in args.n_prompt if n]
            tests += [BenchTest(0, n, depth, parallel) for n in args.n_gen if n]
    if not tests:
        both = "both -p and -n" if args.output == "batched" else "-p or -n"
        raise UserError(f"no tests: give {both} above 0")
    return tests


def _run_all(opened: "Opened", args: Any, group: "Group", command: str) -> "list[Measurement]":
    from pshard.session.this_machine import environment_of

    tests, found = _tests(args), []
    if note := _describe_published(opened.variant.ranks[0].tiers[0].solve.strategy):
        print(f"note: the registry's plan is {note}; its rows are called ilp", file=sys.stderr)
    setting = _setting(opened, "ilp", environment_of(opened.profile), command)
    found += _run_strategy(opened, opened.variant, "ilp", tests, args, group, setting)
    names = [*args.strategy, *(["fit"] if "fit" in args.baseline else [])]
    for name in dict.fromkeys(names):
        found += _run_baseline(opened, name, tests, args, group, setting)
    if "accelerate" in args.baseline:
        from pshard.session.accelerate_baseline import run_accelerate

        path, kind = Path(opened.file.spec.path), opened.profile.accelerators[0].kind
        found += run_accelerate(path, opened.variant, kind, tests, args.repetitions, setting)
    return found


def _describe_published(made: str) -> str:
    """Which published strategy a plan is, or was before it was improved; empty for the planner's own."""
    from pshard.planner.published.strategies import IMPROVED, NAMES

    name = made.removeprefix(IMPROVED)
    return f"the published strategy {name!r}" + ", improved" * (name != made) if name in NAMES else ""


def _setting(opened: "Opened", strategy: str, environment: Any, command: str) -> "BenchSetting":
    from pshard.session.bench_engine import BenchSetting

    spec = opened.file.spec
    size = sum(t.file_nbytes for u in spec.units for t in u.tensors)
    return BenchSetting(spec.name, size, strategy, environment, command)


def _run_baseline(
    opened: "Opened", name: str, tests: list, args: Any, group: "Group", setting: "BenchSetting"
) -> "list[Measurement]":
    from dataclasses import replace

    from pshard.planner.make_plan import plan_baseline
    from pshard.session.same_work import do_same_work

    v = opened.variant
    try:
        variant = plan_baseline(name, opened.file.spec, opened.profile, v.workload, v.correction)
    except UserError as error:
        print(f"note: baseline {name} is left out: {error}", file=sys.stderr)
        return []
    same = do_same_work(variant, v, opened.profile.accelerators[0].kind)
    if same:
        print(f"note: {name} does the same work as the plan here: their rates differ by noise alone", file=sys.stderr)
    setting = replace(setting, strategy=name, same_as=setting.strategy if same else "")
    return _run_strategy(opened, variant, name, tests, args, group, setting)


def _run_strategy(
    opened: "Opened", variant: Any, name: str, tests: list, args: Any, group: "Group", setting: "BenchSetting"
) -> "list[Measurement]":
    from pshard.cuts.rank_parts import cut_ranks
    from pshard.planner.price.predict_published import Predictor
    from pshard.session.bench_drafts import check_drafted, run_drafted
    from pshard.session.bench_engine import run_test
    from pshard.session.choose_drafts import choose_drafts
    from pshard.session.lead_ranks import load_on_ranks

    drafts, why = choose_drafts(read_spec_flags(args), variant, ranks=True)
    drafted = [test for test in tests if drafts and check_drafted(test)]
    predictor = Predictor(cut_ranks(opened.file.spec, variant.split), opened.profile, variant)
    found = []
    with (
        load_on_ranks(opened, group, variant, kernels=args.kernels, checkpoints=drafts is not None) as engine,
        _bar(name, len(tests), args) as progress,
    ):
        for note in (*opened.file.notes, *engine.notes, *filter(None, [why])):
            print(f"note: {note}", file=sys.stderr)
        for test in tests:
            found.append(run_test(engine, predictor, test, args.repetitions, setting, progress))
            if drafts and test in drafted:
                found.append(run_drafted(engine, predictor, test, args.repetitions, drafts, found[-1], progress))
    return found


def _bar(name: str, tests: int, args: Any) -> Any:
    """Context manager that gives a function to call after each sample."""
    from contextlib import contextmanager

    from rich.console import Console
    from rich.progress import Progress

    @contextmanager
    def bar() -> Any:
        console = Console(stderr=True)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task(f"measuring {name}", total=tests * args.repetitions)
            yield lambda: progress.advance(task)

    return bar()


def _read_text(path: Path | None) -> str | None:
    """What a file says, if there is one. Raises UserError."""
    try:
        return path.read_text(encoding="utf-8") if path else None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {name_cause(error)}; give a text file in UTF-8") from None


def _run_perplexity(opened: "Opened", args: Any, group: "Group", text: str) -> int:
    from pshard.session.bench_engine import measure_perplexity
    from pshard.session.lead_ranks import lead, load_on_ranks

    with load_on_ranks(opened, group, opened.variant, kernels=args.kernels, checkpoints=False) as engine:
        if engine.tokenizer is None:
            raise UserError("the model file has no tokenizer, which perplexity needs; take another file of the model")
        ids = engine.tokenizer.encode(text)
        window = min(args.ppl_window, engine.plan.workload.context)
        value = lead(engine, measure_perplexity, ids, window)
        if window < args.ppl_window:
            print(f"note: windows of {window} tokens, the plan's context, not {args.ppl_window}", file=sys.stderr)
    if args.output in ("json", "jsonl"):
        import json

        print(json.dumps({"perplexity": value, "tokens": len(ids), "window": window, "file": args.perplexity.name}))
    else:
        print(f"perplexity {value:.4f} over {len(ids)} tokens in windows of {window}")
    return 0


def _write(found: "list[Measurement]", args: Any) -> None:
    """Print what was measured and write it to the file that was asked for. What cannot be printed is kept in a file of
    the cache folder instead. Raises UserError."""
    from pshard.paths import cache_dir
    from pshard.reports.tables.bench_formats import format_measurements
    from pshard.times.stolen_time import describe_disturbed

    if note := describe_disturbed({f"{m.strategy} {m.test}": m.disturbed for m in found}):
        print(f"note: {note}", file=sys.stderr)
    data, kept, problems = format_measurements(found, "json"), args.output_file, []
    if kept is not None and (why := _write_file(kept, data)):
        problems, kept = [f"cannot write {kept}: {why}; choose another place with -of"], None
    try:
        print(format_measurements(found, args.output), end="", flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python tries once more at its end
        kept = kept or cache_dir() / f"bench-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.json"
        lost = _write_file(kept, data) if kept != args.output_file else None
        where = f"nor keep what was measured: {lost}" if lost else f"what was measured is in {kept}"
        problems.append(f"cannot write to standard output: {error.strerror}; {where}")
    if problems:
        raise UserError("; ".join(problems))


def _write_file(path: Path, text: str) -> str | None:
    """Why it cannot be written; None when it is."""
    from pshard.jsonio import write_text_atomically

    try:
        write_text_atomically(path, text)
    except OSError as error:
        return error.strerror
    return None


if __name__ == "__main__":
    raise SystemExit(main())
