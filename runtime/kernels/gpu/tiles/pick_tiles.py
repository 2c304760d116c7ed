"""Which tile every launch takes: what a profile chose for this card, else the first of its limits that works."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from pshard.errors import KernelRefused
from pshard.runtime.kernels.gpu.card_limits import CardLimits
from pshard.runtime.kernels.gpu.default_tiles import INT8_WAYS, candidate_tiles, default_tile, grouped_tiles
from pshard.runtime.kernels.gpu.tiles.kernel_failures import describe_failure, is_kernel_failure, name_card, refuse
from pshard.times.gpu_tiles import INT8_EXPERTS, INT8_GATED, INT8_KERNEL, LIBRARY, Tile, TileChoice, choose_bucket

Made = TypeVar("Made")
Key = tuple[str, str, int]  # kernel, quant type or that of cells, bucket of tokens; as of a `TileChoice`


class TilePicker:
    """Tiles of one card's kernels.

    Attributes:
        passed_over: one line for every tile that was wanted and does not work here; another took its place.
    """

    def __init__(self, limits: CardLimits, choices: Iterable[TileChoice] = ()) -> None:
        self.limits = limits
        self.passed_over: list[str] = []
        self._ways: dict[Key, tuple[Tile, ...]] = {}
        self._of_32: dict[Key, tuple[Tile, ...]] = {}
        self.use(choices)

    def use(self, choices: Iterable[TileChoice]) -> None:
        """See `TiledKernels.use_tiles`."""
        choices = tuple(choices)
        self._chosen = {(c.kernel, c.qtype, c.tokens): c.tile for c in choices}
        self._counts: dict[tuple[str, str], list[int]] = {}
        for choice in choices:
            if choice.is_int8:
                self._counts.setdefault((choice.kernel, choice.qtype), []).append(choice.tokens)
        self._only: Key | None = None
        self._ways.clear()
        self._of_32.clear()

    def try_tile(self, choice: TileChoice) -> None:
        """See `TiledKernels.try_tile`."""
        self.use((choice,))
        self._only = choice.kernel, choice.qtype, choice.tokens
        self._chosen = {self._only: choice.tile}

    def few_rows(self, kernel: str, qtype: str, tokens: int) -> tuple[Tile, ...]:
        """Tiles of a product of up to `tokens`, a power of two; the first is to be tried first."""
        return self.ways((kernel, qtype, tokens), lambda: candidate_tiles(kernel, qtype, tokens, self.limits))

    def few_rows_of_32(self, kernel: str, qtype: str, tokens: int) -> tuple[Tile, ...]:
        """Of these the first and the default, where their programs complete 32 results: one of 16 rows that is followed
        by a norm saves less than a launch for the norm takes."""
        key = kernel, qtype, tokens
        found = self._of_32.get(key)
        if found is None:
            ways = self.few_rows(*key)
            some = dict.fromkeys((*ways[:1], default_tile(*key, self.limits)))
            found = tuple(tile for tile in some if tile.rows == 32 and tile in ways)
            self._of_32[key] = found
        return found

    def grouped(self, kernel: str, qtype: str, together: int) -> tuple[Tile, ...]:
        """Tiles of "grouped gate" or "grouped down" with so many pairs; the first is to be tried first."""
        return self.ways((kernel, qtype, together), lambda: grouped_tiles(kernel, qtype, together, self.limits))

    def many_rows(self, qtype: str, tokens: int) -> tuple[Key, tuple[Tile, ...]]:
        """Ways of a product of more than SMALL_BATCH rows, and what to launch it by: tiles in int8, LIBRARY the last.

        As a profile found for the largest batch of up to `tokens`, or for the smallest one.
        """
        return self._int8_or_library(INT8_KERNEL, qtype, tokens)

    def many_rows_gated(self, qtype: str, tokens: int) -> tuple[Key, tuple[Tile, ...]]:
        """The same for gate and up of an FFN at once."""
        return self._int8_or_library(INT8_GATED, qtype, tokens)

    def many_pairs(self, qtype: str, together: int) -> tuple[Key, tuple[Tile, ...]]:
        """The same for experts of many tokens, by their type and pairs of a tile in bfloat16."""
        key = INT8_EXPERTS, qtype, together
        return key, self.ways(key, lambda: (LIBRARY,))

    def _int8_or_library(self, kernel: str, qtype: str, tokens: int) -> tuple[Key, tuple[Tile, ...]]:
        key = kernel, qtype, choose_bucket(self._counts.get((kernel, qtype), ()), tokens)
        return key, self.ways(key, lambda: (LIBRARY,))

    def fixed(self, kernel: str, qtype: str, tokens: int) -> Tile:
        """The tile of a kernel that has one."""
        return default_tile(kernel, qtype, tokens, self.limits)

    def known(self, kernel: str, qtype: str, tokens: int) -> tuple[Tile, ...]:
        """See `TiledKernels.tiles_of`."""
        if kernel.startswith(("matvec", "gated")):
            return self.few_rows(kernel, qtype, tokens)
        if kernel in INT8_WAYS:
            return LIBRARY, *INT8_WAYS[kernel]
        return self._ways.get((kernel, qtype, tokens), ())

    def ways(self, key: Key, tiles: Callable[[], Sequence[Tile]]) -> tuple[Tile, ...]:
        """The tiles that are left for a kernel: the chosen one and, behind it, `tiles`."""
        found = self._ways.get(key)
        if found is None:
            chosen = (self._chosen[key],) if key in self._chosen else ()
            found = chosen if self._only == key else tuple(dict.fromkeys((*chosen, *tiles())))
            self._ways[key] = found
        return found

    def launch(self, key: Key, ways: tuple[Tile, ...], start: Callable[[Tile], Made]) -> Made:
        """start(tile) with the first of these that works; one that does not is not tried again. Raises KernelRefused
        when there is none."""
        for tile in ways:
            try:
                return start(tile)
            except Exception as error:
                if not is_kernel_failure(error):
                    raise
                if tile == ways[-1]:
                    raise refuse(error, self.limits) from error
                self.passed_over.append(f"{describe_failure(error)} with {tile}: another tile is used")
                self._ways[key] = tuple(t for t in self._ways[key] if t != tile)
                self._of_32.pop(key, None)
        raise KernelRefused(
            f"no tile of {key[0]} {key[1]} fits {name_card(self.limits)}: it has {self.limits.shared_block} bytes of "
            "shared memory a block; use --kernels plain (slow)"
        )
