"""pshard run: generate text. What is missing for that, a profile or a plan, is made first."""

import os
import sys
import time
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pshard.commands.command_line import check_writable, new_parser, run_cli
from pshard.commands.parsing.model_flags import check_model_place
from pshard.commands.parsing.sampling_flags import add_sampling_flags, make_sampling, read_grammar
from pshard.commands.parsing.spec_flags import add_spec_flags, read_spec_flags
from pshard.commands.parsing.text_flags import (
    add_text_flags,
    check_text_flags,
    most_tokens,
    read_prompt,
    read_thinking,
    sized_for,
)
from pshard.commands.run_flags import add_batch_flags, add_plan_flags, make_request, planned_flags
from pshard.errors import UserError
from pshard.print_table import count_mib
from pshard.speculation import NONE

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from pshard.models import ModelFile
    from pshard.routing.follow_use import RankHits
    from pshard.runtime.engine import Engine, MemoryReport
    from pshard.runtime.speculation.speculator import DraftSettings
    from pshard.session.open_plan import Opened


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command."""
    return run_cli(_main, argv)


def make_parser() -> ArgumentParser:
    """The flags of pshard run."""
    description = "Run a model; profile this machine and plan the model first, where that was not done."
    parser = new_parser("pshard-run", description, takes_model=True)
    add_plan_flags(parser)
    add_batch_flags(parser)
    add_text_flags(parser)
    cache = parser.add_argument_group("prompt cache")
    cache.add_argument(
        "--prompt-cache", type=Path, metavar="FILE",
        help="take what FILE has of the prompt's KV cache and save the prompt's there; any number of ranks loads it",
    )  # fmt: skip
    cache.add_argument("--prompt-cache-all", action="store_true", help="save what is generated too")
    cache.add_argument("--prompt-cache-ro", action="store_true", help="use the prompt cache but do not write it")
    parser.add_argument(
        "--record-routing", type=Path, metavar="FILE",
        help="record which experts every token of the run uses, for pshard plan --routing",
    )  # fmt: skip
    parser.add_argument(
        "--record-acceptance", action="store_true",
        help="count which drafts held, beside the plan registry, for pshard plan --spec",
    )  # fmt: skip
    parser.add_argument(
        "--deterministic", action="store_true",
        help="experts in VRAM stay those that the plan begins with: earlier text moves no bit of what follows",
    )  # fmt: skip
    out = parser.add_argument_group("what is printed")
    out.add_argument("--json", action="store_true", help="print one JSON object: text, tokens, times, the plan")
    out.add_argument("--stream", action="store_true", help="with --json: an object for each token before it")
    add_sampling_flags(parser)
    add_spec_flags(parser)
    return parser


def _main(argv: list[str]) -> int:
    args = _parse_flags(argv)
    grammar, sampling, ask = read_grammar(args), make_sampling(args), read_spec_flags(args)
    check_model_place(args)  # first: without a terminal a word that is no model looks like a lacking prompt
    prompt = read_prompt(args)
    request = make_request(args, plans=True)
    if prompt is None or (args.conversation and isinstance(prompt, str)):
        from pshard.commands.everyday.chat_session import run_chat

        return run_chat(request, args, prompt, ("pshard.commands.cli_run", argv))
    ids, doubts, most = _encode_prompt(request.model, prompt, args)
    _check_length(len(ids), args, most)
    request = replace(request, needed=sized_for(len(ids), args.predict, most))  # a plan of at least that is chosen

    from pshard.routing.followed import keep_slots
    from pshard.runtime.kernels.gpu.count_compiled import count_compiled
    from pshard.runtime.ranks.started import started_ranks
    from pshard.session.choose_drafts import choose_drafts
    from pshard.session.lead_ranks import follow_rank_0, lead_ranks, load_on_ranks
    from pshard.session.open_plan import open_plan, settle_plan, tell_once
    from pshard.session.readiness.fill_ahead import fill_ahead
    from pshard.session.readiness.first_profile import ensure_profile
    from pshard.session.start_engine import open_group

    if not started_ranks():
        request = ensure_profile(request, tell_once)
    filled = fill_ahead(request)  # before anything here imports torch
    request, ranks = settle_plan(request)
    if ranks > 1 and not started_ranks():
        from pshard.runtime.ranks.start_ranks import start_ranks

        given = [] if args.prompt is not None or args.file else [f"--prompt={prompt}"]  # ranks read no standard input
        words = [*planned_flags(argv, request), *given, "-m", str(request.model)]
        return start_ranks(ranks, "pshard.commands.cli_run", words)
    opened = open_plan(request)
    if args.record_routing and opened.file.spec.config.experts is None:
        raise UserError("the model has no routed experts; leave out --record-routing")
    drafts, why = choose_drafts(ask, opened.variant, ranks=not args.reverse_prompt)
    group = open_group(opened, ranks)
    if group.rank:
        return follow_rank_0(opened, group)
    records, variant = args.record_routing is not None, opened.variant
    variant = keep_slots(variant) if args.deterministic else variant
    how = {"kernels": args.kernels, "records": records}
    with lead_ranks(group), load_on_ranks(opened, group, variant, filled, **how) as engine:
        for note in (*opened.file.notes, *doubts, *engine.notes, *filter(None, [why])):
            print(f"note: {note}", file=sys.stderr)
        compiled = count_compiled() if engine.device.kind == "cuda" else None
        _generate(engine, ids, args, sampling, grammar, drafts)
        if compiled and (line := compiled.describe()):
            print(f"note: {line}", file=sys.stderr)
        if args.record_acceptance and drafts:
            _record_acceptance(opened, drafts)
        if records:
            _record_routing(engine, opened.file, args.record_routing)
    return 0


def _parse_flags(argv: list[str]) -> Namespace:
    """The flags of pshard run. Raises UserError for those that do not go together."""
    args = make_parser().parse_args(argv)
    check_text_flags(args)
    if args.stream and not args.json:
        raise UserError("--stream is for --json, as text comes as it is made; add --json, or leave it out")
    if args.prompt_cache is None and (args.prompt_cache_all or args.prompt_cache_ro):
        raise UserError("--prompt-cache-all and --prompt-cache-ro need a file: give --prompt-cache FILE")
    if args.record_acceptance and (args.spec_synth_rates or read_spec_flags(args).kind == NONE):
        raise UserError("--record-acceptance counts which drafts hold: add --spec lookup, without --spec-synth-rates")
    if "RANK" not in os.environ:  # who starts ranks has looked
        if args.record_routing:
            check_writable(args.record_routing, "--record-routing", needs_folder=True)
        if args.prompt_cache and not args.prompt_cache_ro:
            check_writable(args.prompt_cache, "--prompt-cache", needs_folder=True)
    return args


def _encode_prompt(model: Path, prompt: str | list[int], args: Any) -> tuple[list[int], list[str], int]:
    """Token ids of the prompt, in the model's chat template when that is wanted; notes on what may be wrong there, and
    the model's context (0: not known)."""
    from pshard.models import open_model
    from pshard.models.text.chat import render_chat

    if args.reasoning_budget == 0 and not args.chat:
        raise UserError("--reasoning-budget is for chats, and -p is continued as text; add --chat, or -cnv")
    with open_model(model) as file:
        most = file.spec.config.context
        if isinstance(prompt, list):
            return prompt, [], most
        tokenizer, template = file.tokenizer(), file.chat_template
    if not args.chat:
        return tokenizer.encode(prompt, parse_special=not args.no_parse_special), [], most
    if template is None:
        raise UserError("the model has no chat template; run without --chat")
    messages = [{"role": "system", "content": args.system}] if args.system else []
    messages.append({"role": "user", "content": prompt})
    thinking = read_thinking(args, template)
    text = render_chat(template, messages, tokenizer.bos_text, tokenizer.eos_text, variables=thinking)
    doubtful = ", ".join(tokenizer.doubtful_specials(text))
    why = "the chat template works on messages in a way that hides what it wrote itself"
    return tokenizer.encode_chat(text), [f"{why}: {doubtful} in it is plain text"] if doubtful else [], most


def _check_length(tokens: int, args: Any, most: int) -> None:
    """Raise UserError for a prompt that leaves no token of context to an answer. most: what the model has (0: not
    known)."""
    what = f"the prompt file {args.file}" if args.file is not None else "the prompt"
    if most and tokens >= most:
        raise UserError(f"{what} has {tokens} tokens, and the model's context is {most}; give a shorter one")
    if args.ctx_size is not None and tokens > args.ctx_size:
        raise UserError(f"{what} has {tokens} tokens, more than -c {args.ctx_size}; give a larger -c or less text")


def _take_cached(engine: "Engine", prompt: list[int], args: Any) -> list[int]:
    """Load the prompt cache; returns what of the prompt is still to be computed, at least its last token."""
    from pshard.session.lead_ranks import lead

    if args.prompt_cache is None or not args.prompt_cache.exists():
        return prompt
    cached = lead(engine, "load", args.prompt_cache)
    same = next((i for i, (a, b) in enumerate(zip(cached, prompt)) if a != b), min(len(cached), len(prompt)))
    again = lead(engine, "reset", length=min(same, len(prompt) - 1))
    lacks = "it lacks what layers with a window or a state of fixed size keep of a text that ends there"
    why = f"; {again} are computed again: {lacks}" if again else ""
    taken = engine.lengths[0] - again
    print(f"prompt cache: {taken} of {len(prompt)} tokens are taken from it{why}", file=sys.stderr)
    return prompt[engine.lengths[0] :]


def _end_line(tokens: "Iterator[int]") -> "Iterator[int]":
    """The tokens; where an error ends them, what is printed of them ends its line before the error has one."""
    begun = False
    try:
        for token in tokens:
            yield token
            begun = True
    except GeneratorExit:
        raise
    except BaseException:
        if begun:
            print(flush=True)
        raise


def _generate(
    engine: "Engine", prompt: Any, args: Any, sampling: Any, grammar: Any, drafts: "DraftSettings | None"
) -> None:
    from contextlib import closing

    from pshard.commands.show_answer import Ran, ShownAnswer
    from pshard.session.generate_text import save_prompt
    from pshard.session.lead_ranks import lead

    if engine.tokenizer is None and not args.tokens:
        raise UserError("the model file has no tokenizer, which its prompt was read with: start again")
    start = time.perf_counter()
    first, asked = start, len(prompt)
    prompt, cache = _take_cached(engine, prompt, args), None if args.prompt_cache_ro else args.prompt_cache
    most = most_tokens(args.predict)
    shown = ShownAnswer(args, most, engine.tokenizer, lambda text: print(text, end="", flush=True))
    with closing(_draw(engine, prompt, most, args, sampling, grammar, drafts)) as made:
        for token in made if args.json else _end_line(made):
            first = first if shown.ids else time.perf_counter()
            shown.push(token)
            if shown.stopped:
                break
    end, n = time.perf_counter(), len(shown.ids)
    if cache and (args.prompt_cache_all or n == 0):
        lead(engine, save_prompt, cache)
    ranks, hits = lead(engine, "memory_by_rank"), lead(engine, "hits_by_rank")
    shown.finish()  # before what stderr says, where both go to one place
    full = engine.lengths[0] + 1 > engine.longest
    ran = Ran(asked, asked - len(prompt), first - start, end - first, full)
    shown.show_end(ran, engine.plan, ranks)
    if grammar and (cut := shown.describe_cut(ran, grammar[0])):
        print(cut, file=sys.stderr)
    rate = f", then {ran.rate(n):.1f} tok/s" if n > 1 else ""
    place = "on the accelerator" if engine.device.kind == "cuda" else "of the budget"
    used, budget = map(count_mib, (ranks[0].accelerator, ranks[0].budget))
    print(
        f"{n} tokens; first after {ran.first:.3f} s{rate}; {used} of {budget} MiB {place}, "
        f"{engine.switches} plan switch{'' if engine.switches == 1 else 'es'}",
        file=sys.stderr,
    )
    _tell_more(ranks, hits, drafts)


def _draw(
    engine: "Engine",
    prompt: Any,
    most: int,
    args: Any,
    sampling: Any,
    grammar: Any,
    drafts: "DraftSettings | None",
) -> "Generator[int]":
    """The tokens of the answer. Where a text may end it rank 0 draws alone, step by step: the others read no text."""
    from pshard.session.generate_text import fix_seed, generate_text
    from pshard.session.lead_ranks import LedEngine, lead

    saved = None if args.prompt_cache_all or args.prompt_cache_ro else args.prompt_cache
    if not args.reverse_prompt:
        return lead(engine, generate_text, prompt, most, fix_seed(sampling), grammar, drafts, saved)
    return generate_text(LedEngine(engine), prompt, most, sampling, grammar, drafts, saved)


def _tell_more(ranks: Any, hits: Any, drafts: "DraftSettings | None") -> None:
    """What drafts, slots and ranks did, on stderr."""
    if drafts:
        from pshard.session.choose_drafts import describe_drafts

        print(describe_drafts(drafts), file=sys.stderr)
    for number, slots in enumerate(hits):
        if slots.found.chosen:
            print(_describe_hits(slots, f" of rank {number}" if len(hits) > 1 else ""), file=sys.stderr)
    if len(ranks) > 1:
        print(_tabulate_ranks(ranks), end="", file=sys.stderr)


def _describe_hits(slots: "RankHits", whose: str) -> str:
    """What slots for experts did while single tokens were decoded, beside what the plan expects."""
    found, beside = slots.found, f" ({slots.expected:.1%} expected)" if slots.expected is not None else ""
    return (
        f"slots{whose}: {found.share:.1%} of the choices found their expert there{beside}, {found.admitted} were "
        "brought in"
    )


def _record_routing(engine: "Engine", file: "ModelFile", path: Path) -> None:
    """Write which experts the run's tokens have used, and tell of it."""
    from pshard.planner.routing.measure_hits import measure_hits
    from pshard.registries.routing_file import fingerprint_routers, write_routing
    from pshard.routing.expert_map import map_experts
    from pshard.session.lead_ranks import lead

    record, spec = lead(engine, "record_routing", fingerprint_routers(file)), file.spec
    write_routing(path, record)
    maps, served = map_experts(spec, engine.plan), []
    for experts in maps:
        tier, whose = experts.tiers[0], f" of rank {experts.rank}" if len(engine.plan.ranks) > 1 else ""
        if (hits := measure_hits(record, spec, tier)) is not None:
            served.append(f"experts in VRAM{whose} served {hits:.1%} of what tokens used")
            served[-1] += f" ({tier.served[0]:.1%} expected)"
    beside = f"; while decoding, {', '.join(served)}" if served else ""
    print(f"routing record: {record.tokens} tokens in {path}{beside}", file=sys.stderr)


def _record_acceptance(opened: "Opened", drafts: "DraftSettings") -> None:
    """Add what became of a run's drafts to what is recorded beside the registry, and tell of it."""
    from pshard.registries.acceptance_file import keep_acceptance

    place = keep_acceptance(opened.registry, opened.file.fingerprint_inputs(), drafts.record)
    print(f"acceptance record: {drafts.record.steps} steps in {place}", file=sys.stderr)


def _tabulate_ranks(ranks: "Sequence[MemoryReport]") -> str:
    """What every rank holds, and the processors that it keeps to."""
    from pshard.reports.tables.markdown_table import draw_table
    from pshard.runtime.devices.numa import format_list

    headings = ("", "budget MiB", "accelerator MiB", "host weights MiB", "page-locked", "cores")
    rows = []
    for number, rank in enumerate(ranks):
        sizes = [f"{n / (1 << 20):.0f}" for n in (rank.budget, rank.accelerator, rank.host_weights)]
        rows.append([f"rank {number}", *sizes, "yes" if rank.page_locked else "no", format_list(rank.cores)])
    return draw_table(headings, rows, [False, True, True, True, False, False])


if __name__ == "__main__":
    raise SystemExit(main())
