"""Mutants of JSON files: values of another type or size, fields that are gone, too many or elsewhere, and bytes."""

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from fuzz.mutate_bytes import Mutant, mutate_bytes

_ODD_VALUES = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    0.5,
    -0.0,
    1e-320,
    1e308,
    -1e308,
    2**31,
    2**63,
    10**30,
    10**400,
    "",
    "0",
    "x" * 999,
)
_ODD_TEXTS = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-1e999",
    "9" * 5000,
    "0x1",
    '"\\ud800"',
    "[" * 10**5,
    "[]",
    "{}",
)
_MARK = "a place for text that json.dumps would not write"

Path = tuple[Any, ...]


def mutate_json(rng: random.Random, text: str, write: Callable[[Any], str] = json.dumps) -> Mutant:
    """Change one or two places of the data, or bytes of the text. `write`: how data becomes the file's text."""
    data = text.encode()
    if rng.random() < 0.25:
        return mutate_bytes(rng, data, len(data))
    changed, what = json.loads(text), []
    raw = rng.choice(_ODD_TEXTS) if rng.random() < 0.2 else None
    for _ in range(rng.choice((1, 1, 1, 2))):
        what.append(_change_place(rng, changed, raw))
    if raw is None:
        return Mutant("; ".join(what), write(changed).encode("utf-8", "surrogatepass"))
    return Mutant("; ".join(what), write(changed).replace(json.dumps(_MARK), raw).encode())


def _change_place(rng: random.Random, data: Any, raw: str | None) -> str:
    paths = _pick_paths(rng, data)
    if not paths:  # the first change left nothing
        return "nothing"
    path, holder = rng.choice(paths), data
    for step in path[:-1]:
        holder = holder[step]
    key, name = path[-1], "/".join(map(str, path))
    if raw is not None:
        holder[key] = _MARK
        return f"{name} = {raw[:20]}"
    how = rng.random()
    if how < 0.15:
        del holder[key]
        return f"{name} is gone"
    if how < 0.3 and isinstance(holder, list):
        other = rng.randrange(len(holder))
        holder[key], holder[other] = holder[other], holder[key]
        return f"{name} exchanged with item {other}"
    if how < 0.3:
        holder[rng.choice((f"{key}x", "", "version"))] = holder.pop(key)
        return f"{name} renamed"
    if how < 0.4:
        other_path = rng.choice(_pick_paths(rng, data))
        value = data
        for step in other_path:
            value = value[step]
        holder[key] = copy.deepcopy(value)
        return f"{name} = what stands at {'/'.join(map(str, other_path))}"
    holder[key] = _other_value(rng, holder[key])
    return f"{name} = {str(holder[key])[:40]}"


def _other_value(rng: random.Random, old: Any) -> Any:
    if isinstance(old, bool) or rng.random() < 0.4:
        return rng.choice((*_ODD_VALUES, [], {}, [old], {"a": old}))
    if isinstance(old, int | float):
        return rng.choice((old + 1, old - 1, -old, 2 * old, old / 2, old * 1000, old * 10**9, old / 10**9, str(old)))
    if isinstance(old, str):
        return rng.choice((old + "x", old[:-1], old.upper(), old[::-1], old + "\0", old + "\ud800", [old]))
    if isinstance(old, list):
        return rng.choice((old * 2, old[1:], old[::-1], old + old[:1]))
    return rng.choice((list(old or ()), old and dict(list(old.items())[1:]), [old]))


def _pick_paths(rng: random.Random, data: Any) -> list[Path]:
    """Paths to choose from. Every depth counts alike: a profile has hundreds of numbers in tables, and few names."""
    by_depth: dict[int, list[Path]] = {}
    for path in _paths(data):
        by_depth.setdefault(len(path), []).append(path)
    return by_depth[rng.choice(sorted(by_depth))] if by_depth else []


def _paths(data: Any, path: Path = ()) -> Iterator[Path]:
    children: Any = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in children:
        yield (*path, key)
        yield from _paths(value, (*path, key))
