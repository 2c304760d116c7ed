"""Starts of one tier of a small model: units of a kind that are not in VRAM all go the same way."""

from collections.abc import Iterator, Sequence
from itertools import islice, product

from pshard.homes import PINNED
from pshard.planner.search.places import Place
from pshard.planner.search.small.moves import State
from pshard.planner.search.small.space import Space

MOST = 400  # combinations of kinds' ways


def list_starts(space: Space, i: int, allowed: Sequence[Sequence[int]]) -> Iterator[list[State]]:
    """For each combination of the kinds' ways states of a tier, with one and two slots: nothing more in VRAM, then as
    much as fits, what gains most for its bytes first, in seconds of computing or of the link too.

    allowed: by unit, the ways that it may go.
    """
    ways, kinds = space.tiers[i].all, dict[str, list[int]]()
    for at, unit in enumerate(space.units):
        kinds.setdefault(unit.kind.name, []).append(at)
    choices: list[list[Place | None]] = [
        [*sorted({ways[w].place for at in units for w in allowed[at] if not _is_pinned(ways[w].place)})] or [None]
        for units in kinds.values()
    ]
    for combination in islice(product(*choices), MOST):
        places = dict(zip(kinds, combination))
        base = [
            next((w for w in of if ways[w].place == places[unit.kind.name]), min(of, key=lambda w: ways[w].fixed))
            for unit, of in zip(space.units, allowed)
        ]
        numbers = (1, 2) if sum(ways[w].copied for w in base) > 1 else (1,)
        yield [_make(base, slots) for slots in numbers]
        yield [_make(_fill(space, i, base, allowed, n, by_link), n) for n in numbers for by_link in (False, True)]


def _make(row: Sequence[int], slots: int) -> State:
    return State(tuple((w,) for w in row), (slots,))


def _is_pinned(place: Place) -> bool:
    return place[0] == PINNED and not place[2]


def _fill(
    space: Space, i: int, base: Sequence[int], allowed: Sequence[Sequence[int]], slots: int, by_link: bool
) -> list[int]:
    """Ways that hold more in VRAM, those first that gain most for their bytes, as long as they fit."""
    tier = space.tiers[i]
    ways, row = tier.all, list(base)

    def cost(w: int) -> float:
        return ways[w].busy + (ways[w].copy + ways[w].fetch if by_link else 0.0)

    gains = sorted(
        ((cost(w) - cost(now)) / (ways[w].fixed - ways[now].fixed), at, w)
        for at, (now, of) in enumerate(zip(base, allowed))
        for w in of
        if ways[w].fixed > ways[now].fixed and cost(w) < cost(now)
    )
    room, is_exact = space.room.arena - tier.count_bytes(row, slots), True
    for _, at, w in gains:
        now, new = row[at], ways[w]
        more = new.fixed - ways[now].fixed
        if more <= 0 or cost(w) >= cost(now):
            continue
        if more > room and not is_exact:  # slots may have become fewer or smaller
            room, is_exact = space.room.arena - tier.count_bytes(row, slots), True
        if more <= room:
            row[at] = w
            left = space.room.arena - tier.count_bytes(row, slots) if new.stage or new.joined else room - more
            row[at], room = (w, left) if left >= 0 else (now, room)
            is_exact = bool(new.stage or new.joined)
    return row
