"""Sweeps: several micro-batches of a prompt go through a model together. All of them pass what lies in a slot before
the next unit comes there, so a unit that is streamed is brought once for all of them. No torch.

What a micro-batch computes needs no more than the micro-batches before it in the same layer: their cells and states.
While others have their turn its rows wait in the arena.
"""

from collections.abc import Collection, Iterator, Sequence

from pshard.buffers import shared_index_words
from pshard.model import ModelSpec
from pshard.plan import TierPlan
from pshard.quant import TENSOR_ALIGN, align
from pshard.steps.emit import size_ports
from pshard.steps.move import Activations, Move, NewExperts, UnitState, Weights, put_aside
from pshard.steps.step import Compute, Free, Step, StepList, Turns
from pshard.units.ports import BESIDE, HIDDEN
from pshard.units.state import StateShape

INDEX = "index"  # waits too: it says where the rows stand


def list_moving(tier: TierPlan) -> frozenset[str]:
    """The units of a tier that are streamed."""
    return frozenset(p.unit for p in tier.placements if p.moves_each_step)


def waiting_bytes(
    spec: ModelSpec, tokens: int, shape: StateShape, moving: Collection[str], batches: int
) -> dict[str, int]:
    """Bytes, by buffer, that wait of each of so many micro-batches; nothing where there is only one. moving: the units
    that are streamed."""
    if batches < 2:
        return {}
    sizes, live = size_ports(spec.config, tokens), set[str]()
    found = set[str]()
    for unit in reversed(spec.units):
        if unit.name in moving:
            found |= live
        live = (live - set(unit.ports.writes)) | (set(unit.ports.reads) & set(BESIDE))
    words = {INDEX: 4 * shared_index_words(spec, tokens, shape), HIDDEN: sizes[HIDDEN]}
    return {name: align(n, TENSOR_ALIGN) for name, n in (words | {p: sizes[p] for p in sorted(found)}).items()}


def sweep_steps(spec: ModelSpec, once: StepList, tokens: int, batches: int) -> StepList:
    """The steps of so many micro-batches in one sweep, of those of one. Raises ValueError where the host keeps
    something of a micro-batch between two slots: that has no room to wait."""
    body = tuple(_fetch_late(once.body))
    live, sizes, sides = _list_live(spec, body), size_ports(spec.config, tokens), dict[str, set[str]]()
    found, turn, waiting = list[Step](), list[Step](), frozenset[str]()

    def aside(names: Collection[str], returns: bool) -> Move:
        ports = (HIDDEN, *sorted(names))
        return put_aside(ports, sum(sizes[port] for port in ports), returns)

    begun = False
    for i, step in enumerate(body):
        if isinstance(step, Free):
            if any(sides.get(port, {"acc"}) != {"acc"} for port in (*live[i], HIDDEN)):
                raise ValueError(f"{sorted(live[i])} stand on the host between two slots")
            reads, writes = _list_ports(spec, turn)
            taken = [aside(waiting & (reads | writes), True)] if begun else []
            found += [Turns((*taken, *turn, aside(live[i] & writes, False)), batches), step]
            begun, waiting, turn = True, live[i], []
        elif isinstance(step, Move) and isinstance(step.portion, Weights | NewExperts):
            found.append(step)
        else:
            _follow(spec, step, sides)
            turn.append(step)
    taken = [aside(waiting & frozenset().union(*_list_ports(spec, turn)), True)] if begun else []
    return StepList(once.enter, (*found, Turns((*taken, *turn), batches)))


def _fetch_late(body: Sequence[Step]) -> Iterator[Step]:
    """The steps with each state fetched right before the unit that it is of: it may be that unit's turn before."""
    fetches = dict[str, Move]()
    for step in body:
        if isinstance(step, Move) and step.brings(UnitState):
            fetches[step.unit] = step
            continue
        if isinstance(step, Compute) and step.unit in fetches:
            yield fetches.pop(step.unit)
        yield step


def _list_ports(spec: ModelSpec, steps: Sequence[Step]) -> tuple[frozenset[str], frozenset[str]]:
    """What units read, and what they write, of what stands beside the residual stream."""
    ports = [spec.unit(step.unit).ports for step in steps if isinstance(step, Compute)]
    beside = frozenset(BESIDE)
    return beside & {name for p in ports for name in p.reads}, beside & {name for p in ports for name in p.writes}


def _list_live(spec: ModelSpec, body: Sequence[Step]) -> list[frozenset[str]]:
    """By step, what stands beside the residual stream that a later unit reads."""
    live, found = frozenset[str](), list[frozenset[str]]()
    for step in reversed(body):
        found.append(live)
        if isinstance(step, Compute):
            reads, writes = _list_ports(spec, (step,))
            live = (live - writes) | reads
    return found[::-1]


def _follow(spec: ModelSpec, step: Step, sides: dict[str, set[str]]) -> None:
    """On which sides a step leaves what it makes or hands over."""
    if isinstance(step, Move) and isinstance(step.portion, Activations):
        for name in step.portion.names:
            sides.setdefault(name, set()).add("acc" if step.is_to_acc else "cpu")
        if HIDDEN in step.portion.names:
            sides[HIDDEN] = {"acc" if step.is_to_acc else "cpu"}
    elif isinstance(step, Compute):
        ports = spec.unit(step.unit).ports
        for name in ports.writes:
            sides[name] = {step.on}
        if step.part != "share" and (ports.adds or HIDDEN in ports.reads):
            sides[HIDDEN] = {step.on}
