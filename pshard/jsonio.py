"""Frozen dataclasses to JSON and back, and files that are written whole or not at all."""

import contextlib
import dataclasses
import errno
import io
import json
import os
import stat
import sys
import tempfile
import time
import types
import typing
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, TypeVar

T = TypeVar("T")
Where: TypeAlias = "str | tuple[Where, str | int]"  # a place in data: the root's name, or a place and what in it
Maker = Callable[[Any, Where], Any]  # of what is at a place
FULL = (errno.ENOSPC, errno.EDQUOT)  # errors of a full disk
STALE_SECONDS = 600  # a temporary file that is older was left by a process that is gone
_SCALARS = frozenset((str, int, float, bool, type(None)))


def parse_json(text: str | bytes) -> Any:
    """What a JSON text says. Raises ValueError, also for one that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def to_json(value: Any) -> Any:
    """A dataclass tree as dicts, lists and scalars."""
    kind: Any = type(value)
    if kind in _SCALARS:
        return value
    if (names := _field_names(kind)) is not None:
        return {name: to_json(getattr(value, name)) for name in names}
    if isinstance(value, list | tuple):
        return [to_json(v) for v in value]
    if isinstance(value, dict):
        return {k: to_json(v) for k, v in value.items()}
    return value


@cache
def _field_names(kind: type) -> tuple[str, ...] | None:
    """Of a dataclass; None for anything else."""
    return tuple(f.name for f in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else None


def from_json(kind: type[T], data: Any) -> T:
    """Build the dataclass `kind` from JSON data. Raises ValueError that names the field at fault."""
    wanted: Any = kind
    return _maker(wanted)(data, kind.__name__)


def name_place(where: Where) -> str:
    """A place in JSON data in words: Profile.copies[3].seconds."""
    if isinstance(where, str):
        return where
    within, at = where
    return f"{name_place(within)}[{at}]" if isinstance(at, int) else f"{name_place(within)}.{at}"


@cache
def _maker(kind: Any) -> Maker:
    """What builds data that the annotation `kind` describes: a profile has a thousand rows of one kind."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _optional_maker(_maker(next(a for a in args if a is not type(None))), type(None) in args)
    if origin is tuple:
        return _tuple_maker(args)
    if dataclasses.is_dataclass(kind):
        return _dataclass_maker(kind)
    return _scalar_maker(kind) if kind in (int, float, str, bool) else lambda data, where: data


def _optional_maker(make: Maker, may_lack: bool) -> Maker:
    return lambda data, where: None if data is None and may_lack else make(data, where)


def _scalar_maker(kind: type) -> Maker:
    def make_scalar(data: Any, where: Where) -> Any:
        if type(data) is kind:
            return data
        if kind is float and type(data) is int and abs(data) <= sys.float_info.max:
            return float(data)
        raise ValueError(f"{name_place(where)} is {_show(data)}, not {kind.__name__}")

    return make_scalar


def _show(data: Any) -> str:
    """A value in words: thousands of digits cannot be written, and tell nothing."""
    return "a number beyond all use" if type(data) is int and abs(data) >= 1 << 1024 else repr(data)


def _tuple_maker(kinds: tuple[Any, ...]) -> Maker:
    alike = _maker(kinds[0]) if len(kinds) == 2 and kinds[1] is Ellipsis else None
    each = () if alike else tuple(map(_maker, kinds))

    def make_tuple(data: Any, where: Where) -> tuple:
        if not isinstance(data, list):
            raise ValueError(f"{name_place(where)} is not a list")
        if alike:
            return tuple([alike(item, (where, i)) for i, item in enumerate(data)])
        if len(data) != len(each):
            raise ValueError(f"{name_place(where)} has {len(data)} items, not {len(each)}")
        return tuple([make(item, (where, i)) for i, (make, item) in enumerate(zip(each, data))])

    return make_tuple


def _dataclass_maker(kind: Any) -> Maker:
    def make_dataclass(data: Any, where: Where) -> Any:
        if not isinstance(data, dict):
            raise ValueError(f"{name_place(where)} is not an object")
        makers = _field_makers(kind)
        if not data.keys() <= makers.keys():
            raise ValueError(f"{name_place(where)} has an unknown field {min(data.keys() - makers.keys())!r}")
        made = {}
        for name, (make, is_needed) in makers.items():
            if name in data:
                made[name] = make(data[name], (where, name))
            elif is_needed:
                raise ValueError(f"{name_place(where)} lacks the field {name!r}")
        try:
            return kind(**made)
        except ValueError as error:  # a noun that checks what its fields say together
            raise ValueError(f"{name_place(where)}: {error}") from None

    return make_dataclass


@cache
def _field_makers(kind: Any) -> dict[str, tuple[Maker, bool]]:
    """By field, what builds it, and whether it has no default."""
    hints, none = typing.get_type_hints(kind), dataclasses.MISSING
    return {
        f.name: (_maker(hints[f.name]), f.default is none and f.default_factory is none)
        for f in dataclasses.fields(kind)
    }


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read its bytes. Raises OSError, also for what is no file: a pipe would wait for a writer."""
    try:
        opened = io.FileIO(str(path), opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0)))
    except ValueError:  # of letters that the system does not have
        raise OSError(errno.EINVAL, "No file can have that name", str(path)) from None
    file = io.BufferedReader(opened)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EEXIST, "It is no regular file", str(path))
    return file


def read_regular(path: Path) -> str:
    """The text of a file. Raises OSError as `open_regular`, UnicodeDecodeError for what is no UTF-8."""
    with open_regular(path) as file:
        return file.read().decode("utf-8")


def resolve_place(path: Path) -> Path:
    """The path without symbolic links. Raises OSError for links that lead in a circle."""
    try:
        return path.resolve()
    except RuntimeError:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from None


def check_regular(path: Path) -> None:
    """Raises OSError for a place that holds something else than a file: renaming onto /dev/null would replace it."""
    if path.exists() and not path.is_file():
        what = os.strerror(errno.EISDIR) if path.is_dir() else "It is no regular file"
        raise OSError(errno.EEXIST, what, str(path))


PROBED = 1 << 20  # bytes that a disk must have left: what is written is smaller


def check_place(path: Path) -> None:
    """Raise OSError where `write_bytes_atomically` would, without a trace: a file is tried in the nearest folder that
    there is."""
    path = resolve_place(path)
    check_regular(path)
    folder = next(p for p in path.parents if p.exists())
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(PROBED))
        file.flush()
        os.fsync(file.fileno())


def remove_leftovers(path: Path) -> None:
    """Remove temporary files of `write_bytes_atomically` beside a file that no one has written to for STALE_SECONDS:
    whoever wrote them was killed. What cannot be removed stays."""
    with contextlib.suppress(OSError):
        path = resolve_place(path)
        for found in os.scandir(path.parent):
            if found.name.startswith(f".{path.name}.") and found.name.endswith(".tmp"):
                with contextlib.suppress(OSError):
                    if time.time() - found.stat(follow_symlinks=False).st_mtime > STALE_SECONDS:
                        os.unlink(found.path)


def write_text_atomically(path: Path, text: str) -> None:
    """Write a text in UTF-8 as `write_bytes_atomically` does; what killed writers left beside it is removed."""
    remove_leftovers(path)
    write_bytes_atomically(path, text.encode("utf-8"))


def write_bytes_atomically(path: Path, data: bytes) -> None:
    """Write a file through a temporary one beside it: readers see the old or the new one, never half of it.

    A symbolic link keeps pointing to the file that is written. Raises OSError (read-only folder, full disk, a place
    that holds something else than a file) and leaves nothing behind.
    """
    path = resolve_place(path)
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
