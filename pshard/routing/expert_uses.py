"""What share of a layer's experts tokens use, and how often those at some places are: the one formula of both.

Without a record all experts are chosen alike. With one, `uses` has the probability that a token uses the expert at each
place of the order of popularity (`Popularity.uses`); then the first n of E experts take more than n/E of the choices.
"""

from functools import lru_cache

from pshard.model_config import ModelConfig
from pshard.units.divide_unit import divide_unit
from pshard.units.operations import ExpertProducts, used_share
from pshard.units.share import Share
from pshard.units.unit import Unit

Uses = tuple[float, ...]  # empty: all alike


def used_experts(places: range, chosen: int, of: int, tokens: float, uses: Uses, hits: Uses = ()) -> float:
    """How many of the experts at those places of a layer so many tokens are expected to use. hits: and not to find in a
    slot, by what share of uses of the expert at each place finds it there; what is there is there for all of them."""
    if not uses and not hits:
        return len(places) * used_share(chosen, of, tokens)
    chances = _find_chances(uses, tokens) if uses else (used_share(chosen, of, tokens),) * len(hits)
    if hits:
        chances = tuple(chance * (1 - hit) for chance, hit in zip(chances, hits, strict=True))
    return sum(chances[places.start : places.stop])


@lru_cache(256)
def _find_chances(uses: Uses, tokens: float) -> tuple[float, ...]:
    """How likely so many tokens use the expert at each place: a plan asks for few numbers of tokens very often."""
    return tuple(1 - (1 - use) ** tokens for use in uses)


def chosen_share(places: range, of: int, uses: Uses) -> float:
    """The share of a token's choices that are at those places."""
    if not uses:
        return len(places) / of
    return sum(uses[place] for place in places) / sum(uses)


def used_spread(weights: tuple[tuple[range, float], ...], chosen: int, of: int, tokens: float, uses: Uses) -> float:
    """The standard deviation of a sum over the experts that so many tokens use, each with the weight of its places.

    Two experts are not used independently: every token takes `chosen` of them. With popularity that is counted as if
    all were alike.
    """
    alike = used_share(chosen, of, tokens)
    neither = ((of - chosen) * (of - chosen - 1) / (of * max(1, of - 1))) ** tokens
    together = neither - (1 - alike) ** 2  # covariance of two experts' being used
    total = sum(weight * len(places) for places, weight in weights)
    squares = sum(weight**2 * len(places) for places, weight in weights)
    varied = 0.0
    for places, weight in weights:
        chances = _find_chances(uses, tokens)[places.start : places.stop] if uses else (alike,) * len(places)
        varied += weight**2 * sum(chance * (1 - chance) for chance in chances)
    return max(0.0, varied + together * (total**2 - squares)) ** 0.5


def count_last(shares: tuple[float, ...], uses: Uses) -> tuple[int, ...]:
    """How many experts at the last places are chosen as often, all together, as these shares of all choices say."""
    left = [chosen_share(range(first, len(uses)), len(uses), uses) for first in range(1, len(uses))]
    return tuple(len(uses) - 1 - min(range(len(left)), key=lambda i: abs(left[i] - share)) for share in shares)


def work_share(products: ExpertProducts, tokens: float, reads: bool, uses: Uses) -> float:
    """What the experts that are here take of a layer that was timed with all chosen alike: of the bytes that are read,
    where reading limits, else of the arithmetic."""
    here, chosen, of = products.places, products.chosen, products.of
    if not uses or not reads:
        return chosen_share(here, of, uses)
    return used_experts(here, chosen, of, tokens, uses) / used_experts(range(of), chosen, of, tokens, ())


@lru_cache(256)
def count_apart(tokens: int, chosen: int, of: int, uses: Uses, overlaps: tuple[float, ...]) -> float:
    """How many unrelated tokens are expected to use as many of a layer's experts as so many that follow each other in a
    text, and never more than these. overlaps: of a token's experts, the shares that any of the one, two, ... tokens
    before it used too, the last one of all further ones; each token adds what is left. None: as unrelated ones."""
    if not overlaps or tokens == 1:
        return float(tokens)
    shared = (overlaps[min(before, len(overlaps)) - 1] for before in range(1, tokens))
    found = chosen * (tokens - sum(shared))
    low, high = 1.0, float(tokens)
    if used_experts(range(of), chosen, of, high, uses) <= found:
        return high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if used_experts(range(of), chosen, of, middle, uses) < found else (low, middle)
    return high


def used_nbytes(
    unit: Unit, config: ModelConfig, tokens: float, uses: Uses = (), first: int = 0, hits: Uses = ()
) -> int:
    """Bytes of a unit's weights, or of what one place has of it from part `first` on, that so many tokens are expected
    to use, and not to find in a slot: see `used_experts`."""
    stacks = [t for t in unit.tensors if t.parts]
    if unit.kind.parts is None or not stacks:
        return unit.packed_nbytes
    chosen, of = unit.kind.parts(config)
    here = range(first, first + stacks[0].parts)
    unused = 1 - used_experts(here, chosen, of, tokens, uses, hits) / len(here)
    return unit.packed_nbytes - round(unused * sum(t.packed_nbytes for t in stacks))


def missed_nbytes(unit: Unit, config: ModelConfig, tokens: float, uses: Uses, hits: Uses) -> int:
    """Bytes of a unit's experts that so many tokens are expected to use and not to find in a slot: see `used_experts`.
    What all experts share is always in memory."""
    shared = unit.packed_nbytes - sum(t.packed_nbytes for t in unit.tensors if t.parts)
    return used_nbytes(unit, config, tokens, uses, hits=hits) - shared


def read_nbytes(unit: Unit, share: Share, config: ModelConfig, tokens: float, uses: Uses = (), hits: Uses = ()) -> int:
    """Bytes that so many tokens are expected to read in place of what the accelerator streams of a unit, but for what
    they find in slots: see `used_experts`."""
    brought = divide_unit(unit, share).brought
    return used_nbytes(brought.unit, config, tokens, uses, brought.first, hits)
