"""A chat from its flags to its end: the engine, the lines that come in, the answers that go out."""

import argparse
import os
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from pshard.commands.everyday.chat_commands import fit_status, run_command
from pshard.commands.everyday.chat_terminal import Terminal
from pshard.commands.parsing.sampling_flags import make_sampling, read_grammar
from pshard.commands.parsing.spec_flags import read_spec_flags
from pshard.commands.parsing.text_flags import ANSWER, read_thinking
from pshard.commands.run_flags import planned_flags
from pshard.errors import UserError
from pshard.server.text.stop_finder import StopFinder

if TYPE_CHECKING:
    from pshard.runtime.engine import Engine
    from pshard.runtime.sampling import Sampling
    from pshard.session.chat.conversation import Conversation
    from pshard.session.open_plan import Opened
    from pshard.session.run_request import RunRequest

UNTAUGHT = "the model has no chat template: it continues what you write, {} tokens at a time (-n changes that)"


def run_chat(request: "RunRequest", args: argparse.Namespace, first: str | None, command: tuple[str, list[str]]) -> int:
    """Chat until the lines end; returns the exit code. first: a message that is said before any line is read. command:
    the module and the words that the other ranks of a chat over several devices are started with.

    Raises UserError for what cannot be run; on the way a line says it, and the chat goes on.
    """
    sampling, grammar, ask = make_sampling(args), read_grammar(args), read_spec_flags(args)
    _refuse_for_one_prompt(args)

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

        module, argv = command
        words = [*planned_flags(argv, request), "-cnv", "-m", str(request.model)]
        return start_ranks(ranks, module, words, rank_0_interrupted=True)
    if started_ranks() and os.environ["RANK"] != "0":
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 says what it means
    opened = open_plan(request)
    drafts, why = choose_drafts(ask, opened.variant)
    group = open_group(opened, ranks)
    if group.rank:
        return follow_rank_0(opened, group)
    with lead_ranks(group), load_on_ranks(opened, group, opened.variant, filled, kernels=args.kernels) as engine:
        for note in (*opened.file.notes, *engine.notes, *filter(None, [why])):
            tell_once(f"note: {note}")
        _hold(engine, opened, sampling, grammar, drafts, args, first)
    return 0


def _refuse_for_one_prompt(args: argparse.Namespace) -> None:
    """Raise UserError for flags of pshard run that a chat would ignore."""
    for name in ("prompt_cache", "record_routing", "record_acceptance", "deterministic", "json"):
        if getattr(args, name, None):
            flag = "--" + name.replace("_", "-")
            raise UserError(f"{flag} is for one prompt, and this is a chat; leave it out, or give -p without -cnv")


def _hold(
    engine: "Engine",
    opened: "Opened",
    sampling: "Sampling",
    grammar: Any,
    drafts: Any,
    args: argparse.Namespace,
    first: str | None,
) -> None:
    """Hold the conversation on this rank, which leads the others if there are any."""
    from pshard.session.chat.conversation import Conversation
    from pshard.session.generate_text import make_constraint
    from pshard.session.lead_ranks import LedEngine
    from pshard.session.open_plan import tell_once

    template = opened.file.chat_template
    most = sys.maxsize if args.predict == -1 or (args.predict is None and template) else args.predict or ANSWER
    if template is None:
        tell_once(f"note: {UNTAUGHT.format(most)}")

    constrain = partial(make_constraint, engine, grammar)
    constrain()  # a grammar that cannot be read is told before the first message
    thinking = read_thinking(args, template)
    chat = Conversation(LedEngine(engine), template, sampling, args.system, most, constrain, drafts, thinking)
    _talk(chat, Terminal(opened.file.spec.name), first, args)


class _Interrupt:
    """Notes Ctrl-C while it is entered, and raises nothing then."""

    def __init__(self) -> None:
        self.pressed = False
        self._before: Any = None

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGINT, self._note)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _note(self, *_: object) -> None:
        self.pressed = True


def _talk(chat: "Conversation", terminal: Terminal, first: str | None, args: argparse.Namespace) -> None:
    said, interrupt = first, _Interrupt()
    with interrupt if terminal.typed else nullcontext():  # who types means the answer, also between two lines
        while True:
            line = said if said is not None else terminal.read_line(lambda: fit_status(chat, terminal.width))
            if line is None:
                return
            if said is None and line.startswith("/"):
                found = run_command(chat, line, terminal.tell, terminal.confirm)
                if not found:
                    return
                if isinstance(found, str):
                    said = found
                    continue
            elif line.strip():
                interrupt.pressed = False
                with nullcontext() if terminal.typed else interrupt:
                    _answer(chat, line, terminal, lambda: interrupt.pressed, tuple(args.reverse_prompt))
                if args.single_turn:
                    return
            said = None


def _answer(
    chat: "Conversation", line: str, terminal: Terminal, stopped: Callable[[], bool], ends: tuple[str, ...]
) -> None:
    """Show the answer as it comes, and what is to be said of it. ends: texts that end it, and are its last words."""
    said = StopFinder(ends)
    try:
        for piece in chat.answer(line, lambda: bool(said.found) or stopped()):
            terminal.show(piece)
            said.push("" if piece.aside else piece.text)
    except UserError as error:
        terminal.end_answer()
        terminal.tell(f"error: {error}")
        return
    terminal.end_answer()
    if chat.last.dropped:
        turns = f"{chat.last.dropped} oldest turn{'s' * (chat.last.dropped > 1)}"
        terminal.tell(f"the context was full: the {turns} of the chat went, so that this one had room")
    if chat.last.full:
        terminal.tell("the context is full, so the answer ends here; the next message drops the oldest turns")
    if stopped():
        terminal.tell("(stopped)")
