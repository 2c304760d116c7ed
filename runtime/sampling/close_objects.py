"""JSON schemas whose objects take the keys that they name, and no others unless they ask for them.

In a schema everything is allowed that is not forbidden. Nobody who lists properties means that, and a weak model that
may go on writing keys does so for ever.
"""

from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]
SINGLE = ("items", "additionalItems", "additionalProperties", "contains", "not")
LISTS = ("prefixItems", "items", "allOf", "anyOf", "oneOf")
TABLES = ("properties", "patternProperties", "$defs", "definitions")
CHOICES = ("anyOf", "oneOf")
OTHERS = ("additionalProperties", "unevaluatedProperties")  # either says itself what other keys may come
MOST_NAMES = 1 << 12  # keys written into choices


def close_objects(schema: Schema) -> Schema:
    """The schema, closed: an object that names properties takes others only where the schema says so. One that names
    none stays free. What is said of an object in parts (`allOf`, `anyOf`, `oneOf`, `$ref` beside any) is taken
    together: each part alone would forbid the keys of the others."""
    closer = _Closer(schema)
    closed = closer.close(schema)
    if closer.opened:
        closed = closed | {"$defs": closed.get("$defs", {}) | closer.opened}
    return closed


class _Closer:
    """`opened`: definitions that are parts of larger objects somewhere, as they are there, by new names."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self.opened: dict[str, Schema] = {}
        self._names: dict[str, str] = {}  # of them, by the reference

    def close(self, schema: Any, more: frozenset[str] = frozenset()) -> Any:
        """The schema of a value, and all that is in it. more: keys that other parts of the same object name."""
        if not isinstance(schema, dict):
            return schema if schema is not True or not more else _add_names({}, more)
        choices = [word for word in CHOICES if isinstance(schema.get(word), list)]
        parts = [*_list_of(schema, "allOf"), *([{"$ref": schema["$ref"]}] if "$ref" in schema else [])]
        own = frozenset(_table_of(schema, "properties"))
        alone = not more and not own and len(parts) + len(choices) == 1  # the one part is the object
        if alone or _is_other(schema) or not (own or parts or choices or more):
            return self._go_in(schema)
        if not parts and not choices:
            asks = any(word in schema for word in OTHERS)
            return self._go_in(schema) if asks else _add_names(self._go_in(schema), own | more)
        return self._join(schema, own | more, choices)

    def _join(self, schema: Schema, names: frozenset[str], choices: list[str]) -> Schema:
        """An object of several parts."""
        without = {key: value for key, value in schema.items() if key not in CHOICES}
        if self._asks(without, set()):
            return self._open(schema)
        names |= self._find_names(without, set())
        if (
            len(choices) == 1
            and len(schema[choices[0]]) * len(names) <= MOST_NAMES
            and not self._chooses(without, set())
        ):
            branches = [self.close(branch, names) for branch in schema[choices[0]]]
            return self._open(without) | {choices[0]: branches}
        names |= self._find_names(schema, set())
        closes = names and not self._asks(schema, set())
        return _add_names(self._open(schema), names) if closes else self._open(schema)

    def _go_in(self, schema: Schema) -> Schema:
        """The schema with what is in it closed, and itself as it is."""
        made = dict(schema)
        for key in SINGLE:
            if isinstance(made.get(key), dict):
                made[key] = self.close(made[key])
        for key in LISTS:
            if isinstance(made.get(key), list):
                made[key] = [self.close(part) for part in made[key]]
        for key in TABLES:
            if isinstance(made.get(key), dict):
                made[key] = {name: self.close(inner) for name, inner in made[key].items()}
        return made

    def _open(self, schema: Any) -> Any:
        """A part of an object: what its properties are is closed, and it takes other keys."""
        if not isinstance(schema, dict):
            return schema
        made = self._go_in({key: value for key, value in schema.items() if key not in ("allOf", *CHOICES)})
        for key in ("allOf", *CHOICES):
            if isinstance(schema.get(key), list):
                made[key] = [self._open(part) for part in schema[key]]
        target = self._find(schema.get("$ref"))
        if target is not None:
            made["$ref"] = f"#/$defs/{self._open_target(schema['$ref'], target)}"
        return made

    def _open_target(self, reference: str, target: Schema) -> str:
        if reference not in self._names:
            taken = _table_of(self._root, "$defs").keys() | self.opened.keys()
            name = next(f"part{n}" for n in range(len(taken) + 1) if f"part{n}" not in taken)
            self._names[reference] = name
            self.opened[name] = {}  # it may refer to itself
            self.opened[name] = self._open(target)
        return self._names[reference]

    def _find(self, reference: Any) -> Schema | None:
        """What a reference within the schema leads to."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        found: Any = self._root
        for step in reference[1:].split("/")[1:]:
            step = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and step.isascii() and step.isdigit() and int(step) < len(found):
                found = found[int(step)]
            elif isinstance(found, dict) and step in found:
                found = found[step]
            else:
                return None
        return found if isinstance(found, dict) else None

    def _parts(self, schema: Schema, seen: set[str]) -> list[Schema]:
        """What else is said of the same object, in all its branches; each reference is followed once."""
        parts = [part for key in ("allOf", *CHOICES) for part in _list_of(schema, key)]
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            parts.append(self._find(reference))
        return [part for part in parts if isinstance(part, dict)]

    def _find_names(self, schema: Schema, seen: set[str]) -> frozenset[str]:
        names = frozenset(_table_of(schema, "properties"))
        return names.union(*(self._find_names(part, seen) for part in self._parts(schema, seen)))

    def _asks(self, schema: Schema, seen: set[str]) -> bool:
        """Whether some part says itself what other keys may come."""
        own = any(word in schema for word in OTHERS)
        return own or any(self._asks(part, seen) for part in self._parts(schema, seen))

    def _chooses(self, schema: Schema, seen: set[str]) -> bool:
        """Whether there are choices among the parts."""
        chooses = any(word in schema for word in CHOICES)
        return chooses or any(self._chooses(part, seen) for part in self._parts(schema, seen))


def _is_other(schema: Schema) -> bool:
    """Whether it is the schema of something that is no object."""
    kinds = schema.get("type", "object")
    return "object" not in (kinds if isinstance(kinds, list) else [kinds])


def _add_names(schema: Schema, names: frozenset[str]) -> Schema:
    own = _table_of(schema, "properties")
    more = {name: True for name in sorted(names) if name not in own}
    return schema | {"properties": {**own, **more}, "additionalProperties": False}


def _table_of(schema: Schema, key: str) -> Schema:
    table = schema.get(key)
    return table if isinstance(table, dict) else {}


def _list_of(schema: Schema, key: str) -> list[Any]:
    parts = schema.get(key)
    return parts if isinstance(parts, list) else []
