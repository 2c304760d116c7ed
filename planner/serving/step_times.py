"""Seconds of any step of a server under a plan, and of switches between its tiers: looked up, nothing is planned."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pshard.batch import VERIFY, Batch
from pshard.cuts.layer_cuts import join_seconds
from pshard.cuts.rank_parts import cut_ranks
from pshard.homes import Home
from pshard.machine import MachineProfile
from pshard.model import ModelSpec
from pshard.plan import Variant
from pshard.planner.price.predict_published import Predictor
from pshard.planner.price.profile_tables import Tables, seconds_from
from pshard.planner.price.tier_loads import TierLoad, tier_loads
from pshard.planner.search.round_times import held_nbytes
from pshard.predicted_times import tier_seconds
from pshard.speculation import PROGRAMS

Line = tuple[tuple[float, float], ...]  # (x, y), ascending in x


@dataclass(frozen=True)
class TierSteps:
    """Seconds of micro-batches of one tier.

    empty: by number of tokens, without cached cells. decoding: by cells of all texts that decode, what attending to
    them takes more. prompt: by cells that a prompt has already, what a whole micro-batch of it takes more; () in tiers
    of decoding, where a few tokens of a prompt read its cells as one that decodes does; so do drafts that are verified.
    """

    tokens: int
    empty: Line
    decoding: Line
    prompt: Line

    def seconds(self, decodes: int, cells: int, prompt: int, past: int) -> float:
        """Seconds of `decodes` tokens, drafts among them, of texts with `cells` cached cells in all, and of `prompt`
        tokens after `past` cells of their own."""
        return _at(self.empty, decodes + prompt) + self.attended(cells, prompt, past)

    def attended(self, cells: int, prompt: int, past: int) -> float:
        """How much more a step takes by cells of texts that decode, and by those that a prompt has already."""
        if self.prompt:
            return _at(self.decoding, cells) + _at(self.prompt, past) * prompt / self.tokens
        return _at(self.decoding, cells + past)


@dataclass(frozen=True)
class StepTimes:
    """What `time_steps` returns. switches: by tier before and tier after, seconds of what changes hands. sweep: by
    tokens of several micro-batches of the largest tier that go through the model together, without cached cells; () in
    plans without sweeps."""

    tiers: tuple[TierSteps, ...]
    switches: tuple[tuple[float, ...], ...]
    sweep: Line = ()

    @property
    def largest(self) -> int:
        """Tokens that a step can have."""
        return round(self.sweep[-1][0]) if self.sweep else self.tiers[-1].tokens

    def seconds(self, decodes: int, cells: int = 0, prompt: int = 0, past: int = 0) -> float:
        """Predicted seconds of one step.

        decodes: texts that decode, a token each, with `cells` cached cells of all of them together. prompt: tokens of
        prompts beside them, after `past` cells that these prompts have already. It runs under the smallest tier that
        covers all its tokens, more than the largest one's in a sweep. Raises ValueError for no tokens, or more than a
        step can have.
        """
        if self.tiers[-1].tokens < decodes + prompt <= self.largest:
            return self._swept(decodes, cells, prompt, past)
        return self.tiers[self._covering(decodes + prompt)].seconds(decodes, cells, prompt, past)

    def _swept(self, decodes: int, cells: int, prompt: int, past: int) -> float:
        """The same of a sweep: those that decode are in its first micro-batch."""
        last, seconds = self.tiers[-1], _at(self.sweep, decodes + prompt)
        room, done = last.tokens - decodes, 0
        while done < prompt:
            take = min(room, prompt - done)
            seconds += last.attended(cells, take, past + done)
            cells, room, done = 0, last.tokens, done + take
        return seconds

    def switch_seconds(self, before: int, after: int) -> float:
        """Seconds that a micro-batch of `after` tokens takes more when the one before it had `before` tokens: weights
        and KV cells that change places. 0 within a tier. Raises ValueError as `seconds` does."""
        return self.switches[self._covering(before)][self._covering(after)]

    def _covering(self, tokens: int) -> int:
        for i, tier in enumerate(self.tiers):
            if 1 <= tokens <= tier.tokens:
                return i
        raise ValueError(f"no tier covers {tokens} tokens; the largest is {self.tiers[-1].tokens}")


def time_steps(spec: ModelSpec, profile: MachineProfile, variant: Variant) -> StepTimes:
    """Simulate some micro-batches of every tier of a plan as it is stored, a few hundredths of a second each.

    spec: the whole model, its experts in the order of the plan (`order_experts`). Each tier's times are in proportion
    to the seconds that are stored with it, which is what its expected micro-batch gets here.
    """
    specs = cut_ranks(spec, variant.split)
    timer = _Timer(specs, profile, variant)
    tokens = tuple(tier.tokens for tier in variant.ranks[0].tiers)
    tiers = [timer.time_tier(load, below) for load, below in zip(tier_loads(variant.workload, tokens), (0, *tokens))]
    return StepTimes(tuple(tiers), _time_switches(specs, profile, variant), timer.time_sweep())


class _Timer:
    """Times tiers of one variant."""

    def __init__(self, specs: Sequence[ModelSpec], profile: MachineProfile, variant: Variant) -> None:
        self._predictor, self._workload = Predictor(specs, profile, variant), variant.workload
        self._stored, self._last = tier_seconds(variant), variant.ranks[0].tiers[-1]

    def time_tier(self, load: TierLoad, below: int) -> TierSteps:
        """below: tokens of the tier before, 0 for the first."""
        w, tier = self._workload, load.tokens
        if w.count_verifying(tier):
            return self._time_verifying(load, below)
        decodes = min(tier, w.sequences)
        expected = self._simulate(tier, load.sequences, load.past, tier)
        scale = self._stored[tier] / expected
        texts = tier if load.is_decode else 1
        full, few = self._simulate(tier, texts, 0, tier), below + 1
        fewest = min(full, self._simulate(few, min(few, texts), 0, tier)) if few < tier else full
        usual, most = min(load.past if load.is_decode else w.prompt, w.context // decodes), w.context // decodes
        decoding = [(n * decodes, scale * self._simulate(decodes, decodes, n, tier)) for n in sorted({0, usual, most})]
        prompt: Line = ()
        if not load.is_decode:
            usual, most = load.past if load.sequences == 1 else 0, w.context - tier
            pasts = sorted({0, usual, most // 2, most})
            prompt = _rise([(n, scale * self._simulate(tier, 1, n, tier)) for n in pasts])
        empty = ((float(few), scale * fewest), (float(tier), scale * full))
        return TierSteps(tier, empty[few == tier :], _rise(decoding), prompt)

    def time_sweep(self) -> Line:
        """By tokens: of one micro-batch of the largest tier, of twice as many and so on."""
        tier = self._last
        if tier.most_swept < 2 or self._workload.drafting.kind in PROGRAMS:
            return ()
        batch, counts = Batch.even(tier.tokens, 1, 0), [1]
        while counts[-1] < tier.most_swept:
            counts.append(min(2 * counts[-1], tier.most_swept))
        alone = self._simulate(tier.tokens, 1, 0, tier.tokens)
        taken = [(n * tier.tokens, self._predictor.sweep_seconds(batch, n)) for n in counts[1:]]
        (load,) = tier_loads(self._workload, (tier.tokens,))
        scale = self._stored[tier.tokens] / self._simulate(tier.tokens, load.sequences, load.past, tier.tokens)
        rising = _rise([(tier.tokens, alone), *taken])
        return tuple((tokens, scale * (alone + more)) for tokens, more in rising)

    def _time_verifying(self, load: TierLoad, below: int) -> TierSteps:
        """The same of a tier in which texts verify drafts: `decoding` by cells of all of them."""
        tier, texts, few = load.tokens, load.sequences, below + 1
        scale = self._stored[tier] / self._simulate(tier, texts, load.past, tier, VERIFY)
        full = self._simulate(tier, texts, 0, tier, VERIFY)
        fewest = min(full, self._simulate(few, min(few, texts), 0, tier, VERIFY)) if few < tier else full
        pasts = sorted({0, load.past, self._workload.context // texts - self._workload.drafting.rows})
        decoding = [(n * texts, scale * self._simulate(tier, texts, n, tier, VERIFY)) for n in pasts]
        empty = ((float(few), scale * fewest), (float(tier), scale * full))
        return TierSteps(tier, empty[few == tier :], _rise(decoding), ())

    def _simulate(self, tokens: int, texts: int, past: int, under: int, kind: str = "") -> float:
        batch = Batch.even(tokens, texts, past, kind)
        return join_seconds(self._workload.split_mode, [self._predictor.rank_seconds(batch, under)])


def _rise(points: Sequence[tuple[float, float]]) -> Line:
    """How much more than the first point the later ones are, never less than one before."""
    line, most = list[tuple[float, float]](), 0.0
    for x, y in points:
        most = max(most, y - points[0][1])
        line.append((float(x), most))
    return tuple(line)


def _at(line: Line, x: float) -> float:
    """Between points on straight lines, before the first as there, behind the last on as between the last two."""
    if x <= line[0][0] or len(line) == 1:
        return line[0][1]
    i = next((i for i in range(1, len(line)) if x <= line[i][0]), len(line) - 1)
    (x0, y0), (x1, y1) = line[i - 1], line[i]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def _time_switches(
    specs: Sequence[ModelSpec], profile: MachineProfile, variant: Variant
) -> tuple[tuple[float, ...], ...]:
    """By tier before and after: of the rank that takes longest, as ranks switch at once."""
    movers = [_Mover(spec, profile, variant, rank) for rank, spec in enumerate(specs)]
    tiers = range(len(variant.ranks[0].tiers))
    return tuple(tuple(max(m.seconds(a, b) for m in movers) for b in tiers) for a in tiers)


class _Mover:
    """What one rank brings in when it goes from tier to tier. Copies one after the other, none under computing."""

    def __init__(self, spec: ModelSpec, profile: MachineProfile, variant: Variant, rank: int) -> None:
        w, self._tiers = variant.workload, variant.ranks[rank].tiers
        self._tables = Tables(profile, variant.correction).of_accelerator(w.device + rank)
        self._units = [spec.unit(place.unit) for place in self._tiers[0].placements]
        cells = min(w.context, w.sequences * (w.prompt + w.generated // 2))
        states = [unit.state(spec.config, w.state_shape) for unit in self._units]
        self._kept = [state.fetched(cells, w.sequences) if state else 0 for state in states]

    def seconds(self, before: int, after: int) -> float:
        """From the tier at one place of the list to that at another."""
        there, here = self._tiers[before].placements, self._tiers[after].placements
        moved, far = 0, Counter[Home]()
        for unit, state, old, new in zip(self._units, self._kept, there, here):
            if old == new:
                continue
            brought = max(0, held_nbytes(unit, new) - held_nbytes(unit, old))
            if old.site.is_beyond_host:
                far[old.weights_home] += brought
            else:
                moved += brought
            moved += state if old.kv != new.kv else 0
        return moved / self._tables.link_rate + sum(seconds_from(self._tables, home, n) for home, n in far.items())
