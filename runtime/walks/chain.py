"""Tokens of one text in a row, each the likeliest one behind the one before.

The accelerator looks a token up, computes it, chooses the next one and counts the place in the text on: the host
launches one graph a token, and waits for the last one only. Where the CPU has a part, the accelerator asks it for that,
as in a walk that runs ahead. A walk a token waits for each, and takes the host 0.3 to 0.5 ms beside what the
accelerator takes. Ranks that sum their parts each have a chain, and choose the same tokens: of logits that are nowhere
whole each rank offers the largest of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import dropwhile
from math import inf

import numpy as np
import torch

from pshard.buffers import STATES
from pshard.homes import ACC, CPU
from pshard.runtime.blocks.block import ALONE, Work
from pshard.runtime.devices.relay import Relay
from pshard.runtime.kernels.api import RowIndex, Segment
from pshard.runtime.kernels.cpu.recording import CallList
from pshard.runtime.logits import Logits
from pshard.runtime.residents import Residents
from pshard.runtime.tier_in_force import BoundUnit, IndexView, RunContext, TierInForce
from pshard.runtime.walks.crossings import Crossings
from pshard.runtime.walks.program import Await, Program, Stretch, Tell, Units
from pshard.runtime.walks.unit_runs import UnitRuns
from pshard.runtime.walks.walk import key_of_calls
from pshard.speculation import MOST_DRAFTS
from pshard.steps.move import Activations, Move, Part
from pshard.steps.step import Compute, Gather
from pshard.units.ports import PRIOR


@dataclass(frozen=True)
class ChainParts:
    """What is done for each token. looked_up: tables of which the accelerator reads a row where they are; body: what it
    is given then, moves to and from the CPU among it; runs: what the CPU computes when `body` asks for it."""

    looked_up: tuple[BoundUnit, ...]
    body: tuple[Units | Move | Tell | Await, ...]
    runs: tuple[Units, ...]

    @cached_property
    def brings(self) -> tuple[Move, ...]:
        """What comes from the CPU."""
        return tuple(part for part in self.body if isinstance(part, Move) and part.is_to_acc)


class Chain:
    """That of a program whose units, but for tables, are all in VRAM, or on the CPU where they keep nothing of a text.
    Everything is called in `computing()`, by all ranks."""

    def __init__(
        self,
        context: RunContext,
        residents: Residents,
        tier: TierInForce,
        parts: ChainParts,
        columns: Sequence[int],
        relay: Relay | None,
    ) -> None:
        """columns: of the logits that each rank computes; relay: by which the CPU is asked for what it has."""
        self._context, self._residents, self._tier = context, residents, tier
        self._parts, self._relay, self._crossings = parts, relay, Crossings(context, tier, 1)
        self._crossings.relay = relay
        device = context.device.torch_device
        self._ids = torch.zeros(1, dtype=torch.int64, device=device)  # the next token
        self._logit = torch.zeros(1, device=device)
        self._best = torch.zeros(1, 2, device=device)
        self._found = torch.zeros(MOST_DRAFTS, 2, device=device)
        rank = context.group.rank
        self._first, self._own = sum(columns[:rank]), columns[rank]
        self._offers = torch.zeros(len(columns), 2, device=device)  # by rank, its largest logit and whose that is

    def run(self, token: int, segment: Segment, count: int, bound: int, lists: Sequence[CallList] = ()) -> np.ndarray:
        """Compute a token, and the likeliest behind it, so many in all: float32 [count, 2], the largest logit behind
        each and its id, a NaN where a logit is none.

        segment: of the first token, with blocks for all; bound: cells that none of them exceeds, for launch sizes. What
        a head takes of the model's state before the first token is in place. The last micro-batch was waited for.
        lists: see `find_lists`.
        """
        if self._relay is None or not lists:
            return self._launch(token, segment, count, bound)
        try:
            self._relay.start(lists, count)
            found = self._launch(token, segment, count, bound)
            self._relay.finish()
        except BaseException:
            self._relay.give_up()
            raise
        self._context.transfers.link_bytes += count * sum(map(self._crossings.count_sent, self._parts.brings))
        return found

    def find_lists(self) -> list[CallList] | None:
        """The calls of what the CPU computes of a token; None where a walk of one must come first, which writes them
        down."""
        keys = [key_of_calls(run, self._tier, 1, 1, 0) for run in self._parts.runs]
        lists = [calls for calls in map(self._tier.on_host.find, keys) if calls is not None]
        return lists if len(lists) == len(keys) else None

    def _launch(self, token: int, segment: Segment, count: int, bound: int) -> np.ndarray:
        context, device = self._context, self._context.device
        written, here, there = self._tier.index_rows(context.host.index, (segment,), [0], (1, 1))
        here.numbers[:] = written.numbers
        context.host.ids.numpy()[0] = token
        device.send(there.memory, here.memory)
        device.send(self._ids, context.host.ids[:1])
        key = "chain", self, bound  # itself, as graphs know addresses of its own tensors
        for at in range(count):
            own = replace(segment, past=segment.past + at)
            device.repeat(key, True, partial(self._issue, there, own, bound))
            self._found[at : at + 1].copy_(self._best)
        return self._found[:count].cpu().numpy()

    def _issue(self, index: IndexView, segment: Segment, bound: int) -> None:
        """One token's kernels, and nothing else: a graph may hold them."""
        side = self._tier.side
        side.kernels.forget()
        rows = RowIndex(index.begin, index.position, index.blocks, (segment,), bound, filled=1)
        logits = Logits(self._context, self._tier, (index.wanted, index.wanted), 1)
        work = Work(side, rows, self._ids, logits, self._context.group.peers if self._context.sums else None)
        for unit in self._parts.looked_up:
            unit.run(work, ALONE)
        units = UnitRuns(self._context, self._residents, self._tier, {ACC: work})
        for part in self._parts.body:
            if isinstance(part, Units):
                units.run_all(part.steps)
            else:
                self._crossings.issue(part)
        self._choose(logits)
        tensors = side.space.tensors
        if PRIOR in tensors:
            tensors[PRIOR][:1].copy_(tensors[STATES][:1])
        index.position.add_(1)

    def _choose(self, logits: Logits) -> None:
        """The likeliest next token, the same on all ranks."""
        if self._context.group.size == 1 or logits.gathered:
            torch.max(logits.on_device, 1, out=(self._logit, self._ids))
            self._best[:, 0].copy_(self._logit)
            self._best[:, 1].copy_(self._ids)
            return
        own = self._offers.zero_()[self._context.group.rank]
        if self._own:
            torch.max(logits.on_device, 1, out=(self._logit, self._ids))
            own[:1].copy_(self._logit)
            own[1:].copy_(self._ids + self._first)
        else:
            own[:1].fill_(-inf)
        self._context.group.all_reduce(self._offers, exact=True)
        self._best.copy_(self._offers.index_select(0, self._offers[:, 0].argmax().view(1)))
        self._ids.copy_(self._best[0, 1:])


def make_chain(
    context: RunContext,
    residents: Residents,
    tier: TierInForce,
    programs: tuple[Program, Program | None],
    relay: Relay | None,
) -> Chain | None:
    """The chain of a program, which may be one that runs ahead by the relay; None where its kernels do not repeat,
    where the CPU computes anything but rows of tables and what the accelerator may ask it for, weights or states move,
    or the accelerator cannot read a table. Of several ranks all have one, or none; these ask no CPU."""
    if not tier.side.kernels.repeatable or context.spec.neighbours is not None:
        return None
    plain, ahead = programs
    program = ahead if ahead and relay and context.group.size == 1 else plain
    found, columns = _find_parts(context, residents, tier, program), sum(t.rows for t in context.spec.output.matrices)
    told = context.group.gather((found is not None, columns))
    if found is None or not all(has for has, _ in told):
        return None
    return Chain(context, residents, tier, found, [own for _, own in told], relay)


def _find_parts(context: RunContext, residents: Residents, tier: TierInForce, program: Program) -> ChainParts | None:
    """What a chain does for each token; None where it cannot be one."""
    side, spec = tier.side, context.spec
    if side.config.window or tier.sequences or context.host.picks is not None or tier.arriving:
        return None
    steps, stretches = list[Compute](), list[Stretch]()
    for item in program.body:
        if isinstance(item, Units) and item.on == CPU and not stretches:
            steps += item.computes
        elif isinstance(item, Stretch) and item.waits_for is None:
            stretches.append(item)
        elif not (isinstance(item, Gather) or (isinstance(item, Move) and isinstance(item.portion, Activations))):
            return None
    if len(stretches) != 1 or not stretches[0].gives_logits or not _is_plain(stretches[0]):
        return None
    if not all(spec.unit(step.unit).kind.is_looked_up for step in steps):
        return None
    if any(spec.unit(step.unit).kind.state for run in program.runs for step in run.computes):
        return None
    on_acc = [replace(step, on=ACC) for step in steps]
    tables = [m.data for step in on_acc for m in residents.weights_of(step, tier.carved).matrices.values()]
    if context.device.kind != "cpu" and not all(data.is_cuda or data.is_pinned() for data in tables):
        return None
    looked_up = tuple(residents.bind(step, tier.carved, tier.tokens, context) for step in on_acc)
    behind = dropwhile(lambda part: isinstance(part, Move), stretches[0].parts)  # rows of tables come by no move
    return ChainParts(looked_up, tuple(behind), program.runs)


def _is_plain(stretch: Stretch) -> bool:
    """Whether it is units, and activations, or parts of them, that go to and fro."""
    return not any(
        isinstance(part, Move) and not isinstance(part.portion, Activations | Part) for part in stretch.parts
    )
