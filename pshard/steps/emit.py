"""Steps: the flat list that the planner simulates and the executor runs for one micro-batch. No torch.

Copies of streamed units run ahead: whenever a staging slot becomes free, the next unit that uses that slot is copied
into it, across the end of the micro-batch too (weights don't depend on tokens). So a micro-batch begins with the
first `slots` streamed units already loaded or on their way; `enter` lists those copies for the first one of a tier.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

from pshard.model import ModelSpec
from pshard.model_config import ModelConfig
from pshard.on_disk import rows_nbytes
from pshard.plan import Placement, RankPlan, TierPlan
from pshard.routing.expert_uses import missed_nbytes, read_nbytes
from pshard.steps.move import (
    Move,
    bring_experts,
    bring_pins,
    bring_weights,
    fetch_state,
    hand_over,
    join_part,
    write_state,
)
from pshard.steps.step import (
    AFTER,
    BEFORE,
    DEMAND,
    AllReduce,
    Compute,
    Free,
    Gather,
    Receive,
    Send,
    Step,
    StepList,
    StepShape,
)
from pshard.units.divide_unit import count_waves, divided_sizes, find_wave, joined_width
from pshard.units.moe.routed import routed_words
from pshard.units.ports import AS_WIDE, BESIDE, HIDDEN, LAYERED, ROUTED, SQUARES, STREAMS, Ports
from pshard.units.share import Share, Wave
from pshard.units.streams import streams_width
from pshard.units.unit import Unit

# a search emits the same few steps thousands of times: equal ones are one object
_bring_weights = lru_cache(1 << 14)(bring_weights)
_fetch_state = lru_cache(1 << 14)(fetch_state)
_compute = lru_cache(1 << 14)(Compute)
_write_state = lru_cache(1 << 14)(write_state)
_all_reduce = lru_cache(1 << 14)(AllReduce)
_join = lru_cache(1 << 14)(join_part)
_free = lru_cache(1 << 14)(Free)
_hand_over = lru_cache(1 << 14)(hand_over)
_gather = lru_cache(1 << 14)(Gather)
_expect_read = lru_cache(1 << 14)(read_nbytes)
_expect_missed = lru_cache(1 << 14)(missed_nbytes)

PART = "branch"  # the buffer of a rank's part of a sum
_unit_of = attrgetter("unit")
Placed = tuple[Unit, Placement]


@lru_cache(1 << 14)
def _in_wave(compute: Compute, slot: int, wave: Wave) -> Compute:
    return replace(compute, slot=slot, wave=wave)


def emit_steps(spec: ModelSpec, tier: TierPlan, shape: StepShape) -> StepList:
    """The steps of one micro-batch of `shape` under `tier`, in issue order.

    A unit that both sides compute begins with a hand-off to the side that lacks its input. Of ranks that sum on the
    accelerator the residual stream stays there: CPU units get a copy of it, and hand over their part of the sum. A part
    to which the next unit adds is where that one runs.
    """
    return StepEmitter(spec, shape).emit(tier)


class _At(NamedTuple):
    """On which sides activations are: the residual stream on one, the ports beside it on those that have them, and a
    rank's part of a sum that is not whole yet."""

    hidden: str = "cpu"  # token ids start on the host
    beside: frozenset[tuple[str, str]] = frozenset()  # port and side
    part: str = ""


class _Form(NamedTuple):
    """A unit and where it is: units of which one stands for the others have the same forms."""

    unit: Unit
    place: Placement

    @property
    def share(self) -> Share:
        """How the unit is divided."""
        return self.place.share

    def is_copied(self, in_place: bool) -> bool:
        """Whether it is streamed through a slot."""
        is_read = in_place and self.unit.kind.parts and self.place.weights_home.is_readable
        return self.place.moves_each_step and not is_read

    def is_demanded(self, demanded: Collection[str]) -> bool:
        """Whether its experts come on demand; demanded: units of which they do where they live beyond host memory."""
        return self.place.site.is_beyond_host and self.unit.name in demanded

    def find_source(self, slot: int | None) -> str:
        """Where whoever computes the unit finds its weights; see Compute."""
        if self.place.moves_each_step:
            none = DEMAND if self.place.site.is_beyond_host else "link"
            return none if slot is None else "slot"
        if self.place.site.is_beyond_host:
            return DEMAND
        return "arena" if self.place.site.in_arena else "host"


class _Piece(NamedTuple):
    """What a unit adds to the list but for its slot's next copy and the next state's fetch, and where activations are
    then."""

    steps: tuple[Step, ...]
    after: _At


class StepEmitter:
    """`emit_steps` for many tiers of one model: what a unit adds is worked out once for each way to place it.

    stand_ins: by unit, one that is like it, by whose name its steps are called; for those who only ask how long they
    take. None: all steps have their own names.
    """

    def __init__(self, spec: ModelSpec, shape: StepShape, stand_ins: Mapping[str, str] | None = None) -> None:
        links = spec.neighbours
        self.spec, self.shape, self._hidden = spec, shape, shape.tokens * spec.config.d_model * 4
        # another rank of a pipeline may have the embedding or the output
        self._names = [unit.name for unit in spec.units if unit.tensors or not links]
        called = stand_ins or {name: name for name in self._names}
        self._units = {name: spec.unit(called[name]) for name in self._names}
        self._sums = shape.ranks > 1 and not links
        self._growing = set(spec.onto_parts.values()) if self._sums else set[str]()
        self._forms: list[_Form] = []
        self._numbers: dict[tuple, int] = {}  # of forms, by what tells them apart
        self._moving: set[int] = set()  # forms whose state passes through the stage
        # those that are streamed through a slot, where streamed parts are copied too, and where they are read in place
        self._copied: tuple[set[int], set[int]] = set(), set()
        # forms by the identities of their placements, which are no others': each is kept
        self._known: dict[int, int] = {}
        self._kept: list[Placement] = []
        self._pieces: dict[tuple[int, bool], dict[tuple[int, int | None, _At], _Piece]] = {}
        self._copies: dict[tuple[int, int, Wave], Move] = {}
        self._moves: dict[str, tuple[tuple[Step, ...], Move]] = {}

    def emit(self, tier: TierPlan) -> StepList:
        """The steps of one micro-batch under a tier."""
        slots, links, forms = tier.buffers.slots, self.spec.neighbours, self._number_forms(tier)
        copied, moving = self._copied[tier.in_place], self._moving
        if demanded := self.spec.demanded(tier.tokens):
            copied = {form for form in copied if not self._forms[form].is_demanded(demanded)}
        waves = {i: count_waves(self._forms[i].unit, self._forms[i].share, tier.waves) for i in copied}
        coming = [(form, Wave(i, waves[form])) for form in forms if form in copied for i in range(waves[form])]
        copies = self._copy_streamed(coming, slots)
        following = _next_in_slot(copies, slots)
        # fetches of states that pass through the stage
        staged = iter([self._move_state(self._forms[form].unit.name)[0] for form in forms if form in moving])
        body: list[Step] = [*_refill_slots(self.spec, tier, self.shape.tokens), *next(staged, ())]
        at, n_copied = _At(), 0
        if links and links.source is not None:
            nbytes = handed_nbytes(self.spec, self.shape.tokens, links.brought)
            body.append(Receive(links.source, nbytes, (HIDDEN, *links.brought)))
            at = _At("acc", frozenset((port, "acc") for port in links.brought))
        pieces = self._pieces.setdefault((tier.tokens, tier.in_place), {})
        for form in forms:
            slot = n_copied % slots if form in copied else None
            piece = pieces.get((form, slot, at))
            if piece is None:
                piece = pieces[form, slot, at] = self._emit_unit(self._forms[form], tier, slot, at)
            steps = piece.steps
            for wave in range(waves.get(form, 1) - 1):  # before the last
                compute = steps[-1]
                assert isinstance(compute, Compute)
                body += (*steps[:-1], _in_wave(compute, n_copied % slots, Wave(wave, waves[form])))
                body += (_free(n_copied % slots), *following[n_copied])
                n_copied += 1
                steps = (_in_wave(compute, n_copied % slots, Wave(wave + 1, waves[form])),)
            body += steps
            at = piece.after
            if form in moving:
                body += next(staged, ())
            if slot is not None:
                body += (_free(n_copied % slots), *following[n_copied])
                n_copied += 1
        body += _deliver(self.spec, at, self.shape)
        return StepList(tuple(copies[:slots]), tuple(body))

    def _number_forms(self, tier: TierPlan) -> list[int]:
        """The units' forms in order, by their numbers."""
        known, placed = self._known, tier.placements
        if list(map(_unit_of, placed)) != self._names:
            places = {place.unit: place for place in placed}
            placed = tuple(places[name] for name in self._names)
        try:
            return list(map(known.__getitem__, map(id, placed)))
        except KeyError:
            for place in placed:
                if id(place) not in known:
                    known[id(place)] = self._number(place)
                    self._kept.append(place)
            return [known[id(place)] for place in placed]

    def _number(self, place: Placement) -> int:
        unit = self._units[place.unit]
        number = self._numbers.setdefault((unit.name, place.where, place.kv, place.share), len(self._forms))
        if number == len(self._forms):
            form = _Form(unit, place)
            self._forms.append(form)
            if place.stages_state:
                self._moving.add(number)
            for in_place in (False, True):
                if form.is_copied(in_place):
                    self._copied[in_place].add(number)
        return number

    def _emit_unit(self, form: _Form, tier: TierPlan, slot: int | None, at: _At) -> _Piece:
        unit, place, share = form.unit, form.place, form.share
        name, kind, tokens, stays = unit.name, unit.kind, self.shape.tokens, self._sums and not self.shape.sums_on_host
        on, source, reads = place.site.computer, form.find_source(slot), 0
        now = _Whereabouts(self.spec, tokens, stays, at)
        hits = self.spec.hits_of(name, tier.tokens, tokens)
        if source == "link":
            reads = _expect_read(unit, share, self.spec.config, self.shape.unrelated, self.spec.uses, hits)
        elif source == DEMAND and kind.is_looked_up:
            reads = rows_nbytes(unit, self.spec.config, tokens)
        elif source == DEMAND:
            reads = _expect_missed(unit, self.spec.config, self.shape.unrelated, self.spec.uses, hits)
        steps: list[Step] = []
        if share.cpu:
            steps += [*now.bring("acc", unit.ports), *now.bring("cpu", unit.ports, share=True)]
            steps.extend(_compute_on_both(unit, share, (source, slot, reads), 4 * tokens, self.spec))
        else:
            steps += now.bring(on, unit.ports)
            kept, part = {"kept_parts": share.kept} if share.kept else {}, ""
            if self._sums and (port := unit.ports.between):
                steps.append(_compute(name, on, source, slot, BEFORE, 0, kind.position, None))
                steps += now.sum_between(name, port, on)
                part = AFTER
            if reads:
                kept["reads"] = reads
            reads_rows = source == DEMAND and kind.is_looked_up  # which the C++ library does not do by itself
            position = "first" if reads_rows else kind.position
            steps.append(_compute(name, on, source, slot, part, 0, position, place.kv, **kept))
        grows = name in self._growing
        now.leave(on, unit.ports, grows)
        if stays and on == "cpu" and not kind.gives_logits and not grows:
            if unit.ports.adds or HIDDEN in unit.ports.writes:  # else it had a copy
                steps.append(_hand_over("acc", self._hidden))
            now.hidden = "acc"
        if self._sums and unit.ports.adds and not grows:
            steps.append(_all_reduce(name, self._hidden))
        for port in unit.summed if self._sums else ():
            steps += now.take_back(port) if stays and on == "cpu" else []
            steps.append(_all_reduce(name, self._hidden, port))
        if place.stages_state:
            steps.append(self._move_state(name)[1])
        return _Piece(tuple(steps), now.at)

    def _copy_streamed(self, coming: list[tuple[int, Wave]], slots: int) -> list[Move]:
        """The copy of every unit that is streamed through a slot, or of each of its waves, in turn into every slot."""
        if coming and slots < 1:
            raise ValueError("a tier that streams needs at least one staging slot")
        copies, known = [], self._copies
        for n, (form, wave) in enumerate(coming):
            key = form, n % slots, wave
            if key not in known:
                known[key] = self._copy_unit(self._forms[form], n % slots, wave)
            copies.append(known[key])
        return copies

    def _copy_unit(self, form: _Form, slot: int, wave: Wave) -> Move:
        unit, share, home = form.unit, form.share, form.place.weights_home
        nbytes = divided_sizes(unit, share).copied if share else find_wave(unit, *wave).nbytes
        held = round(self.spec.held_share(unit.name) * nbytes) if form.place.site.is_beyond_host else 0
        return _bring_weights(unit.name, slot, nbytes, share, home, held, wave)

    def _move_state(self, name: str) -> tuple[tuple[Step, ...], Move]:
        """Of a unit whose state passes through the stage: its fetch, if there is one, and its write-back."""
        if name not in self._moves:
            shape = self.shape
            law = self.spec.states(shape.states).get(name)
            if law is None:
                raise ValueError(f"{name} keeps no state that could be on the host")
            fetched = shape.past or not law.grows  # a sequence's zeros, too, are on the host
            nbytes = law.fetched(shape.past, shape.sequences)
            write = _write_state(name, law.written(shape.tokens, shape.sequences))
            self._moves[name] = (_fetch_state(name, nbytes),) if fetched else (), write
        return self._moves[name]


class _Whereabouts:
    """Activations on their way through a unit.

    stays: the residual stream is on the accelerator for good, and units that only add to it do without it.
    """

    def __init__(self, spec: ModelSpec, tokens: int, stays: bool, at: _At) -> None:
        self.hidden, beside, self._part = at
        self._beside = set(beside)
        self._stays, self._nbytes = stays, size_ports(spec.config, tokens)

    @property
    def at(self) -> _At:
        """Where they are now."""
        return _At(self.hidden, frozenset(self._beside), self._part)

    def bring(self, on: str, ports: Ports, share: bool = False) -> list[Step]:
        """The hand-off of what a unit lacks on a side; share: it computes its part of one that is divided, which is
        added to the residual stream elsewhere."""
        carries = []
        meets = HIDDEN in ports.reads or (ports.adds and not share and not self._stays)
        if on != self.hidden and meets:
            carries.append(HIDDEN)
        for port in BESIDE:
            if port in ports.reads and (port, on) not in self._beside:
                carries.append(port)
                self._beside.add((port, on))
        if self._part not in ("", on) and not share:
            carries.append(PART)
        if not carries:
            return []
        if carries == [HIDDEN]:
            return [_hand_over(on, self._nbytes[HIDDEN])]
        return [_hand_over(on, sum(self._nbytes[name] for name in carries), tuple(carries))]

    def take_back(self, port: str) -> list[Step]:
        """The hand-off of what the CPU has left in a port, for the accelerators to sum it."""
        self._beside -= {(port, "cpu")}
        self._beside.add((port, "acc"))
        return [_hand_over("acc", self._nbytes[port], (port,))]

    def sum_between(self, unit: str, port: str, on: str) -> list[Step]:
        """The sum over the ranks of what a unit has left in a port, from which it goes on where it is."""
        nbytes = self._nbytes[port]
        summed: list[Step] = [_all_reduce(unit, nbytes, port)]
        if not self._stays or on == "acc":
            return summed
        return [_hand_over("acc", nbytes, (port,)), *summed, _hand_over(on, nbytes, (port,))]

    def leave(self, on: str, ports: Ports, part_grows: bool) -> None:
        """A unit has run there; of a divided one the accelerator has all. part_grows: the next one adds to its part."""
        has_stream = ports.adds or HIDDEN in (*ports.reads, *ports.writes)
        if has_stream and not (self._stays and ports.adds):
            self.hidden = on
        self._part = on if part_grows else ""
        written = [port for port in BESIDE if port in ports.writes]
        if written:
            self._beside = {(port, side) for port, side in self._beside if port not in written}
            self._beside.update((port, on) for port in written)


def list_residents(spec: ModelSpec, plan: RankPlan, tier: TierPlan) -> tuple[Move, ...]:
    """Moves of the weights and states that a tier of the plan holds in VRAM, in the order of need."""
    found = []
    for unit, place in _placed(spec, tier):
        if place.in_arena:
            found.append(bring_pins(unit.name, place.share, plan.home_of(unit.name)))
        if place.has_state_in_vram:
            found.append(fetch_state(unit.name))
    return tuple(found)


def _refill_slots(spec: ModelSpec, tier: TierPlan, tokens: int) -> list[Step]:
    """Slots for experts that follow use come first: their copies run under all that follows."""
    if tier.tokens > spec.follow_tokens:
        return []
    return [bring_experts(sum(round(cache.refill(tokens) * cache.slot_bytes) for cache in spec.caches))]


def _placed(spec: ModelSpec, tier: TierPlan) -> list[Placed]:
    """Units and their placements; another rank of a pipeline may have the embedding or the output."""
    places, links = {p.unit: p for p in tier.placements}, spec.neighbours
    return [(unit, places[unit.name]) for unit in spec.units if unit.tensors or not links]


def handed_nbytes(spec: ModelSpec, tokens: int, ports: tuple[str, ...]) -> int:
    """Bytes that a rank of a pipeline hands on, of so many tokens: the residual stream, and these ports."""
    sizes = size_ports(spec.config, tokens)
    return sum(sizes[port] for port in (HIDDEN, *ports))


def size_ports(config: ModelConfig, tokens: int) -> dict[str, int]:
    """Bytes of what stands between units, of so many tokens."""
    sizes = dict.fromkeys((HIDDEN, PART, *AS_WIDE), 4 * tokens * config.d_model)
    sizes[SQUARES] = 8 * tokens
    sizes[LAYERED] = 4 * tokens * config.rows_width
    sizes[STREAMS] = 4 * tokens * streams_width(config) if config.streams else 0
    if config.experts:
        sizes[ROUTED] = 4 * tokens * routed_words(config)
    return sizes


def _deliver(spec: ModelSpec, at: _At, shape: StepShape) -> list[Step]:
    """What follows the units: logits to the host, or hidden states and what stands beside them to the next rank of a
    pipeline, all of it from the accelerator."""
    links, logits = spec.neighbours, shape.logit_rows * spec.config.vocab * 4
    steps: list[Step] = []
    if links and not spec.output.tensors:
        logits = 0
        if links.target is not None:
            sizes, ports = size_ports(spec.config, shape.tokens), (HIDDEN, *links.handed)
            lacking = tuple(port for port in links.handed if (port, "acc") not in at.beside)
            carries = (HIDDEN, *lacking) if at.hidden == "cpu" else lacking
            if carries == (HIDDEN,):
                steps.append(_hand_over("acc", sizes[HIDDEN]))
            elif carries:
                steps.append(_hand_over("acc", sum(sizes[port] for port in carries), carries))
            steps.append(Send(links.target, handed_nbytes(spec, shape.tokens, links.handed), ports))
    elif at.hidden == "acc":
        steps.append(_hand_over("cpu", logits))
    if shape.ranks > 1:
        steps.append(_gather(spec.output.name, logits))
    return steps


def _compute_on_both(
    unit: Unit, share: Share, found: tuple[str, int | None, int], column: int, spec: ModelSpec
) -> tuple[Step, ...]:
    """Both sides compute what they have, the accelerator without holding the host up; then it has all. found: source
    and slot of what the accelerator has, and the bytes that it reads over the link. column: bytes of one element of
    every token."""
    (source, slot, reads), (rows, kept) = found, share
    more = {"reads": reads} if reads else {}
    width = joined_width(unit, share, spec.config)
    return (
        _compute(unit.name, "acc", source, slot, "share", rows, kept_parts=kept, **more),
        _compute(unit.name, "cpu", "host", None, "share", rows, kept_parts=kept),
        _join(unit.name, column * width, width),
        _compute(unit.name, "acc", source, slot, "rest", rows, kept_parts=kept),
    )


def _next_in_slot(copies: list[Move], slots: int) -> list[tuple[Move, ...]]:
    """By copy, the one into its slot after it, of the next micro-batch too; none when the slot keeps its only unit."""
    after = [i + slots if i + slots < len(copies) else i % slots for i in range(len(copies))]
    return [() if j == i else (copies[j],) for i, j in enumerate(after)]
