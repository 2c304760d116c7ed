"""Fields of a request: what each may hold, said once, for reading and for the published document."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pshard.server.api.faults import bad_field

Schema = dict[str, Any]
NOTHING: tuple[Any, ...] = (False, 0, "", [], {})  # values that ask for nothing


class Kind(Protocol):
    """What a value may be."""

    def read(self, value: Any, where: str) -> Any:
        """The value as the program uses it. Raises Fault 400 that names the field `where`."""

    def schema(self) -> Schema:
        """The same as JSON schema."""


@dataclass(frozen=True)
class Flag:
    """true or false."""

    def read(self, value: Any, where: str) -> bool:
        if not isinstance(value, bool):
            raise bad_field(where, "is true or false")
        return value

    def schema(self) -> Schema:
        return {"type": "boolean"}


@dataclass(frozen=True)
class Whole:
    """A whole number from `least` to `most`."""

    least: int
    most: int

    def read(self, value: Any, where: str) -> int:
        if isinstance(value, float) and value.is_integer():  # 16.0, as some languages write 16
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not self.least <= value <= self.most:
            raise bad_field(where, f"is a whole number from {self.least} to {self.most}")
        return value

    def schema(self) -> Schema:
        return {"type": "integer", "minimum": self.least, "maximum": self.most}


@dataclass(frozen=True)
class Number:
    """A number from `least` to `most`; `above`: the least one itself is none."""

    least: float
    most: float
    above: bool = False

    def read(self, value: Any, where: str) -> float:
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not (self.least < value if self.above else self.least <= value) or not value <= self.most:
            begin = f"above {self.least:g} and at most" if self.above else f"from {self.least:g} to"
            raise bad_field(where, f"is a number {begin} {self.most:g}")
        return float(value)

    def schema(self) -> Schema:
        return {"type": "number", "exclusiveMinimum" if self.above else "minimum": self.least, "maximum": self.most}


@dataclass(frozen=True)
class Text:
    """Text of `least` to `most` letters."""

    most: int
    least: int = 0

    def read(self, value: Any, where: str) -> str:
        if not isinstance(value, str):
            raise bad_field(where, "is a text")
        if not self.least <= len(value) <= self.most:
            raise bad_field(where, f"is a text of {self.least} to {self.most} letters, and has {len(value)}")
        return value

    def schema(self) -> Schema:
        return {"type": "string", "minLength": self.least, "maxLength": self.most}


@dataclass(frozen=True)
class OneOf:
    """One of these words."""

    words: tuple[str, ...]

    def read(self, value: Any, where: str) -> str:
        if not isinstance(value, str) or value not in self.words:
            raise bad_field(where, f"is one of {', '.join(self.words)}")
        return value

    def schema(self) -> Schema:
        return {"type": "string", "enum": list(self.words)}


@dataclass(frozen=True)
class Items:
    """A list of `least` to `most` values of one kind, as a tuple."""

    kind: Kind
    most: int
    least: int = 0

    def read(self, value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise bad_field(where, "is a list")
        if not self.least <= len(value) <= self.most:
            raise bad_field(where, f"has {self.least} to {self.most} entries, and there are {len(value)}")
        return tuple(self.kind.read(item, f"{where}[{i}]") for i, item in enumerate(value))

    def schema(self) -> Schema:
        return {"type": "array", "items": self.kind.schema(), "minItems": self.least, "maxItems": self.most}


@dataclass(frozen=True)
class Object:
    """Any JSON object with at most so many keys: what is in it is read elsewhere."""

    most: int = 1 << 20

    def read(self, value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise bad_field(where, "is an object")
        if len(value) > self.most:
            raise bad_field(where, f"has at most {self.most} keys, and there are {len(value)}")
        return value

    def schema(self) -> Schema:
        return {"type": "object", "maxProperties": self.most}


@dataclass(frozen=True)
class ByType:
    """Kinds for the JSON types "string", "array", "object", "boolean" and "number"; `told` says what it may be."""

    kinds: tuple[tuple[str, Kind], ...]
    told: str

    def read(self, value: Any, where: str) -> Any:
        for name, kind in self.kinds:
            if name == _json_type(value):
                return kind.read(value, where)
        raise bad_field(where, f"is {self.told}")

    def schema(self) -> Schema:
        return {"anyOf": [kind.schema() for _, kind in self.kinds]}


@dataclass(frozen=True)
class Refused:
    """A field that asks for what this server does not do: refused unless it is one of the values that ask nothing."""

    why: str
    harmless: tuple[Any, ...] = NOTHING

    def read(self, value: Any, where: str) -> None:
        if not any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in self.harmless):
            raise bad_field(where, self.why)

    def schema(self) -> Schema:
        return {"enum": [None, *self.harmless]}


@dataclass(frozen=True)
class Field:
    """A field of a request. default: its value where it is absent or null; `needed`: it may not be."""

    name: str
    kind: Kind
    default: Any = None
    about: str = ""
    needed: bool = False


Table = tuple[Field, ...]


@dataclass(frozen=True)
class Fields:
    """An object whose fields a table names; others are ignored, as clients send many."""

    table: Table

    def read(self, value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise bad_field(where, "is an object")
        return read_fields(value, self.table, f"{where}.")

    def schema(self) -> Schema:
        return schema_of(self.table)


def read_fields(body: Mapping[str, Any], table: Table, before: str = "") -> dict[str, Any]:
    """The values of all fields of a table, the default where one is absent or null. Raises Fault 400 by the field's
    name, to which `before` leads."""
    read = {}
    for field in table:
        value = body.get(field.name)
        if value is None and field.needed:
            raise bad_field(f"{before}{field.name}", "is missing")
        read[field.name] = field.default if value is None else field.kind.read(value, f"{before}{field.name}")
    return read


def schema_of(table: Table) -> Schema:
    """A table as JSON schema. Optional fields may be null."""
    properties = {}
    for field in table:
        schema = field.kind.schema()
        if not field.needed and "enum" not in schema:
            schema = {"anyOf": [schema, {"type": "null"}]}
        elif not field.needed:
            schema = {"enum": [word for word in schema["enum"] if word is not None] + [None]}
        properties[field.name] = schema | ({"description": field.about} if field.about else {})
    needed = [field.name for field in table if field.needed]
    return {"type": "object", "properties": properties} | ({"required": needed} if needed else {})


def _json_type(value: Any) -> str:
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")
