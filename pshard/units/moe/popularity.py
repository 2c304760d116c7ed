"""Popularity: in which order a layer's experts lie when places in VRAM go to those that texts use most. No torch."""

import base64
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

STEPS = 255  # of the square root of a probability, which fits a byte: seldom used experts keep two figures


@dataclass(frozen=True)
class LayerPopularity:
    """A layer's experts by place, as base64. order: their numbers, the most popular first, one byte each (two,
    little-endian, of more than 256 experts). uses: how likely a token uses the expert at each place, one byte each: the
    square root of the probability in 255ths."""

    layer: int
    order: str
    uses: str


@dataclass(frozen=True)
class Popularity:
    """What a routing record says of a model's experts. tokens: how many were recorded; each takes `used` of the
    `experts` of a layer. overlap: the share of these that the token before it used too; None where that was not
    counted; further: that any of the two, three, ... tokens before it used."""

    layers: tuple[LayerPopularity, ...]
    experts: int
    used: int
    tokens: int
    overlap: float | None = None
    further: tuple[float, ...] = ()

    @property
    def overlaps(self) -> tuple[float, ...]:
        """Of a token's experts, the shares that any of the one, two, ... tokens before it used; none where that was not
        counted."""
        return () if self.overlap is None else (self.overlap, *self.further)

    def order_of(self, layer: int) -> tuple[int, ...]:
        """Numbers of a layer's experts by place. Raises KeyError for a layer that was not recorded."""
        return self._orders[layer]

    def uses_of(self, layer: int) -> tuple[float, ...]:
        """Probability that a token uses the expert at each place of a layer; they sum up to `used`."""
        return self._uses[layer]

    @cached_property
    def uses(self) -> tuple[float, ...]:
        """The same, the mean of all layers: what plans price by, as layers that are alike are counted, not told
        apart."""
        return tuple(sum(each) / len(each) for each in zip(*self._uses.values()))

    @cached_property
    def _orders(self) -> dict[int, tuple[int, ...]]:
        return {found.layer: unpack_numbers(found.order, self.experts) for found in self.layers}

    @cached_property
    def _uses(self) -> dict[int, tuple[float, ...]]:
        return {found.layer: unpack_uses(found.uses, self.experts, self.used) for found in self.layers}


def number_format(experts: int) -> str:
    """How numbers of so many experts are stored, as `struct` says it: in a byte where that does, else in two."""
    return "B" if experts <= 256 else "H"


def pack_numbers(numbers: Sequence[int]) -> str:
    """All of a layer's experts as `LayerPopularity.order` has them."""
    return base64.b64encode(struct.pack(f"<{len(numbers)}{number_format(len(numbers))}", *numbers)).decode()


def unpack_numbers(order: str, experts: int) -> tuple[int, ...]:
    """What `pack_numbers` has packed. Raises ValueError for text that is nothing of so many experts."""
    return _unpack(order, f"<{experts}{number_format(experts)}")


def pack_uses(uses: Sequence[float]) -> str:
    """Probabilities above 0 by place as `LayerPopularity.uses` has them."""
    return base64.b64encode(bytes(max(1, round(STEPS * p**0.5)) for p in uses)).decode()


def unpack_uses(uses: str, experts: int, used: int) -> tuple[float, ...]:
    """What `pack_uses` has packed, so that it sums up to `used`. Raises ValueError as `unpack_numbers` does."""
    squares = [step * step for step in _unpack(uses, f"<{experts}B")]
    if not min(squares):
        raise ValueError("an expert is never used")
    return tuple(min(1.0, used * square / sum(squares)) for square in squares)


def _unpack(text: str, layout: str) -> tuple[int, ...]:
    packed = base64.b64decode(text, validate=True)
    if len(packed) != struct.calcsize(layout):
        raise ValueError(f"{len(packed)} bytes are no {layout}")
    return struct.unpack(layout, packed)


def check_popularity(popularity: Popularity, where: str) -> None:
    """Raise ValueError, which names the field, for what no record gives."""
    experts, layers = popularity.experts, [found.layer for found in popularity.layers]
    if not layers or popularity.tokens < 1 or not 1 <= popularity.used <= experts <= 1 << 16:
        raise ValueError(f"{where} has no layers, no tokens, or takes more experts than there are")
    if layers != sorted(set(layers)):
        raise ValueError(f"{where}.layers do not ascend")
    if popularity.overlap is not None and not 0 <= popularity.overlap <= 1:
        raise ValueError(f"{where}.overlap is {popularity.overlap}, no share of a token's experts")
    shares = popularity.overlaps
    if not all(0 <= share <= 1 for share in popularity.further) or list(shares) != sorted(shares):
        raise ValueError(f"{where}.further is {popularity.further}, no shares of a token's experts that rise")
    for i, found in enumerate(popularity.layers):
        try:
            numbers = sorted(unpack_numbers(found.order, experts))
            unpack_uses(found.uses, experts, popularity.used)
        except ValueError:
            numbers = []
        if numbers != list(range(experts)):
            raise ValueError(f"{where}.layers[{i}] does not name each of {experts} experts once, with its uses")
