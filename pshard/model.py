"""ModelSpec: what a model is made of, in units that are placed one by one. No torch.

`pshard.models` builds it from a file's header; the planner, the registry and the runtime share it.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod

from pshard.model_config import ModelConfig
from pshard.units.divide_unit import count_shares
from pshard.units.moe.expert_cache import ExpertCache
from pshard.units.moe.in_place import ways_to_read
from pshard.units.moe.popularity import Popularity
from pshard.units.ports import HIDDEN, IDS, LOGITS, PRIOR
from pshard.units.rewrites import end_norms
from pshard.units.state import State, StateShape
from pshard.units.unit import Unit, goes_on


@dataclass(frozen=True)
class Neighbours:
    """Where a run of layers stands in a pipeline over ranks: hidden states come from rank `source` and go to `target`.

    None: it begins with the embedding, it ends with the output; both where the rank has no layers at all. brought,
    handed: other ports that come with them, and that go with them.
    """

    source: int | None
    target: int | None
    brought: tuple[str, ...] = ()
    handed: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelSpec:
    """A model as the planner sees it: a program of `units` in execution order, each with its ports.

    `neighbours`: what a rank holds is a run of layers (cuts/layer_cuts.py); None: a whole model, or a slice of every
    unit. popularity: of experts, by which these are ordered and priced (routing/order_experts.py); None: all are chosen
    alike. caches: slots for experts that follow use, by which they are priced too. rank_caches: of a whole model that
    several ranks will hold, each one's own, which become the `caches` of what it holds (cuts/rank_parts.py). sum_norms:
    units of a rank's slice whose sum over the ranks is normalised before it is added to the residual stream, each with
    the name of the tensor that does so. head: a program that drafts further tokens (multi-token prediction), or what a
    rank has of it (cuts/drafter_cuts.py); what its units lend of others are tensors of this one. keeps_states: the
    output leaves the state of every token, as normalised, for a program that drafts.
    """

    name: str
    path: str
    config: ModelConfig
    units: tuple[Unit, ...]
    neighbours: Neighbours | None = None
    popularity: Popularity | None = None
    caches: tuple[ExpertCache, ...] = ()
    sum_norms: tuple[tuple[str, str], ...] = ()
    rank_caches: tuple[tuple[ExpertCache, ...], ...] = ()
    head: "ModelSpec | None" = None
    keeps_states: bool = False

    @property
    def takes_states(self) -> bool:
        """Whether it takes the states of another program, as a multi-token head does; a model of its own does not."""
        return any(PRIOR in unit.ports.reads for unit in self.units)

    @property
    def uses(self) -> tuple[float, ...]:
        """How likely a token uses the expert at each place, in the mean of the layers; empty: all alike."""
        return self.popularity.uses if self.popularity else ()

    def hits_of(self, unit: str, tier: int, tokens: int) -> tuple[float, ...]:
        """How likely the expert at each place of a unit is in a slot when micro-batches of so many tokens use it, under
        a tier for `tier` tokens; empty: it uses no slots. On demand wider micro-batches find less, and narrower ones
        more: as many times as much as where all experts are used alike."""
        cache = next((cache for cache in self.caches if unit in cache.units), None)
        if cache is None or tier > self.follow_tokens:
            return ()
        hits, rule = cache.hits_by_place, self.config.experts
        if not hits or not rule or not cache.is_on_demand or tokens == cache.width:
            return hits
        there, here = (cache.find_alike(rule.used, len(hits), n) for n in (cache.width, tokens))
        return tuple(min(1.0, hit * here / there) for hit in hits) if there else hits

    @property
    def follow_tokens(self) -> int:
        """Tokens of the largest tier that may use slots; 0 without any."""
        return max((cache.tokens for cache in self.caches), default=0)

    def demanded(self, tokens: int) -> frozenset[str]:
        """Units of which a tier for so many tokens brings experts on demand, where they live beyond host memory."""
        return frozenset(u for c in self.caches if c.is_on_demand and tokens <= c.tokens for u in c.units)

    def held_share(self, unit: str) -> float:
        """What part of a unit on disk lies in slots in memory, where prompts find it; they leave the slots alone."""
        return self._held.get(unit, 0.0)

    @cached_property
    def _held(self) -> dict[str, float]:
        found = dict[str, float]()
        for cache in self.caches:
            if cache.is_on_demand:
                share = cache.slots / sum(count_shares(self.unit(name)) for name in cache.units)
                found |= dict.fromkeys(cache.units, min(1.0, share))
        return found

    def ways_to_read(self, tokens: int) -> tuple[bool, ...]:
        """Whether streamed experts are read in place in tiers of so many tokens, as each tier may choose; the likely
        way first. Tiers that use slots do, but where the CPU computes from these beside an accelerator."""
        follows = any(tokens <= cache.tokens and not cache.on_host for cache in self.caches)
        return (True,) if follows else ways_to_read(self.config, tokens)

    def unit(self, name: str) -> Unit:
        """The unit of that name. Raises KeyError."""
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, Unit]:
        return {u.name: u for u in self.units}

    @cached_property
    def embedding(self) -> Unit:
        """The unit that makes the residual stream of token ids."""
        return next(u for u in self.units if IDS in u.ports.reads and HIDDEN in u.ports.writes)

    @cached_property
    def outputs(self) -> tuple[Unit, ...]:
        """Units that give logits, the model's own first."""
        return tuple(u for u in self.units if LOGITS in u.ports.writes)

    @property
    def output(self) -> Unit:
        """The unit that gives the model's own logits."""
        return self.outputs[0]

    @cached_property
    def alike(self) -> tuple[tuple[Unit, ...], ...]:
        """Units of equal likeness together, in order of first appearance."""
        groups: dict[tuple, list[Unit]] = {}
        for unit in self.units:
            groups.setdefault(unit.likeness, []).append(unit)
        return tuple(map(tuple, groups.values()))

    @cached_property
    def onto_parts(self) -> dict[str, str]:
        """Units that add what a rank has of them to its part of the unit before, whose name that is: one sum is for
        both."""
        return {after.name: before.name for before, after in pairwise(self.units) if goes_on(before, after)}

    @cached_property
    def behind_routers(self) -> frozenset[str]:
        """Units that come right behind a router, whose result nothing has touched yet."""
        return frozenset(after.name for before, after in pairwise(self.units) if before.kind.routes)

    @cached_property
    def behind_norms(self) -> frozenset[str]:
        """Units whose first norm comes right behind norms by which the unit before ends, of what it adds."""
        one_each = [units[0] for units in self.alike]
        ending = {u.likeness for u in one_each if end_norms(u.operations(self.config))}
        opening = {u.likeness for u in one_each if u.opens_with_norm(self.config)}
        pairs = pairwise(self.units)
        return frozenset(b.name for a, b in pairs if a.likeness in ending and b.likeness in opening)

    def states(self, shape: StateShape) -> dict[str, State]:
        """The laws of the states that units keep, also of those that stand, by unit; looked up once for each shape."""
        if shape not in self._states:
            laws = ((unit.name, unit.state(self.config, shape)) for unit in self.units)
            self._states[shape] = {name: law for name, law in laws if law}
        return self._states[shape]

    def state_sizes(self, shape: StateShape) -> dict[str, int]:
        """Bytes of every unit's state for all sequences of `shape`; 0 for units that keep none where a plan says."""
        if shape not in self._state_sizes:
            self._state_sizes[shape] = {
                u.name: u.state_nbytes(self.config, shape) if u.kind.state else 0 for u in self.units
            }
        return self._state_sizes[shape]

    def standing_nbytes(self, shape: StateShape) -> int:
        """Bytes of the states that stand in VRAM in every tier, for all sequences of `shape`.

        Whoever reads a state that stands computes on the accelerator. So it is read where it is, and a plan has nothing
        to say of it.
        """
        return sum(self.states(shape)[u.name].nbytes(shape) for u in self.units if u.kind.stands)

    @cached_property
    def _state_sizes(self) -> dict[StateShape, dict[str, int]]:
        return {}

    @cached_property
    def _states(self) -> dict[StateShape, dict[str, State]]:
        return {}

    @cached_property
    def largest_matrix(self) -> tuple[int, int]:
        """Most elements and most columns of any matrix that is multiplied; 0 where a rank holds none."""
        shapes = {t.shape for u in self.units if not u.kind.is_looked_up for t in u.matrices}
        return max((rows * cols for rows, cols in shapes), default=0), max((cols for _, cols in shapes), default=0)

    @cached_property
    def packed_nbytes(self) -> int:
        """Bytes of all units in the packed layout."""
        return sum(u.packed_nbytes for u in self.units)

    def count_weights(self) -> Counter[str]:
        """How many weights of all units have which type."""
        counts = Counter[str]()
        for tensor in (tensor for unit in self.units for tensor in unit.tensors):
            counts[tensor.qtype] += prod(tensor.shape)
        return counts
