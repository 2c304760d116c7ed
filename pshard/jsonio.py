"""Frozen dataclasses to JSON and back, and files that are written whole or not at all."""

import dataclasses
import errno
import json
import os
import tempfile
import types
import typing
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def parse_json(text: str | bytes) -> Any:
    """What a JSON text says. Raises ValueError, also for one that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def to_json(value: Any) -> Any:
    """A dataclass tree as dicts, lists and scalars."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return [to_json(v) for v in value]
    if isinstance(value, dict):
        return {k: to_json(v) for k, v in value.items()}
    return value


def from_json(kind: type[T], data: Any) -> T:
    """Build the dataclass `kind` from JSON data. Raises ValueError that names the field at fault."""
    return _build(kind, data, kind.__name__)


def _build(kind: Any, data: Any, where: str) -> Any:
    """`data` as what the annotation `kind` says; `where`: how errors name it."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if data is None and type(None) in args:
            return None
        return _build(next(a for a in args if a is not type(None)), data, where)
    if origin is tuple:
        return _build_tuple(args, data, where)
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(kind, data, where)
    if kind is float and type(data) is int:
        return float(data)
    if kind in (int, float, str, bool) and type(data) is not kind:
        raise ValueError(f"{where} is {data!r}, not {kind.__name__}")
    return data


def _build_tuple(kinds: tuple[Any, ...], data: Any, where: str) -> tuple:
    if not isinstance(data, list):
        raise ValueError(f"{where} is not a list")
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        kinds = (kinds[0],) * len(data)
    if len(data) != len(kinds):
        raise ValueError(f"{where} has {len(data)} items, not {len(kinds)}")
    return tuple(_build(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(kinds, data)))


def _build_dataclass(kind: Any, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise ValueError(f"{where} is not an object")
    hints, fields = _hints(kind), dataclasses.fields(kind)
    if extra := sorted(set(data) - {f.name for f in fields}):
        raise ValueError(f"{where} has an unknown field {extra[0]!r}")
    made = {}
    for f in fields:
        if f.name in data:
            made[f.name] = _build(hints[f.name], data[f.name], f"{where}.{f.name}")
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise ValueError(f"{where} lacks the field {f.name!r}")
    return kind(**made)


@cache
def _hints(kind: type) -> dict[str, Any]:
    """Looked up once: a profile has a thousand rows of one kind."""
    return typing.get_type_hints(kind)


def check_regular(path: Path) -> None:
    """Raises OSError for a place that holds something else than a file: renaming onto /dev/null would replace it."""
    if path.exists() and not path.is_file():
        what = os.strerror(errno.EISDIR) if path.is_dir() else "It is no regular file"
        raise OSError(errno.EEXIST, what, str(path))


def write_text_atomically(path: Path, text: str) -> None:
    """Write a text in UTF-8 as `write_bytes_atomically` does."""
    write_bytes_atomically(path, text.encode("utf-8"))


def write_bytes_atomically(path: Path, data: bytes) -> None:
    """Write a file through a temporary one beside it: readers see the old or the new one, never half of it.

    A symbolic link keeps pointing to the file that is written. Raises OSError (read-only folder, full disk, a place
    that holds something else than a file) and leaves nothing behind.
    """
    path = path.resolve()
    check_regular(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json_atomically(path: Path, data: Any) -> None:
    """Write JSON (or a dataclass tree) as `write_text_atomically` does."""
    write_text_atomically(path, json.dumps(to_json(data), indent=1) + "\n")
