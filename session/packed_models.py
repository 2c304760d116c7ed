"""Packed files of models: written once, found by runs, listed and removed."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pshard.errors import UserError, name_cause
from pshard.file_lock import wait_for_lock
from pshard.jsonio import FULL
from pshard.packed_file import (
    Contents,
    describe_contents,
    find_packed,
    list_packed,
    packed_folder,
    packed_place,
    read_packed,
)
from pshard.print_table import show_size
from pshard.session.byte_bar import byte_bar

if TYPE_CHECKING:
    from pshard.models import ModelFile

Tell = Callable[[str], None]
SPARE = 1 << 30  # bytes that stay free


def use_packed(file: "ModelFile", folder: Path | None, needed: bool, say: Tell) -> None:
    """Have what lives on disk read from the model's packed file, where there is one that is right. Where it is needed
    and a folder was named, it is written first; what is wrong with one that is there is said."""
    if needed and folder is not None:
        pack_model(file, folder, say)
    packed, why = find_packed(file, packed_folder(folder))
    file.packed = packed
    if needed and why:
        say(f"note: {why}; pshard pack {file.spec.path} writes it anew")
    elif needed and packed and folder is None:
        say(f"note: what is on disk is read from {packed.path}")


def pack_model(file: "ModelFile", folder: Path, say: Tell) -> Path:
    """The model's packed file in a folder, written where there is none that is right. Another process that writes it is
    waited for. Raises UserError, before anything is written, without room; and where it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        place = packed_place(file, folder)
        with wait_for_lock(place.with_name(f".{place.name}.lock"), str(place)):
            if find_packed(file, folder)[0]:
                return place
            for left in _list_left(place):
                left.unlink()
            from pshard.runtime.memory.disk.write_packed import write_packed  # with torch

            contents = describe_contents(file)
            _check_room(file, contents, folder)
            say(f"packing {file.spec.name} into {place} ({show_size(contents.nbytes)})")
            with byte_bar(f"packing {file.spec.name}", contents.end) as progress:
                write_packed(file, contents, place, progress)
    except OSError as error:
        advice = "free some space" if error.errno in FULL else "name another folder with --disk-cache"
        raise UserError(f"{folder}: the packed file cannot be written: {error.strerror}; {advice}") from None
    except RuntimeError as error:
        raise UserError(f"{file.spec.path} cannot be packed: {error}; try again, or fetch it again") from None
    return place


def _list_left(place: Path) -> list[Path]:
    """A packed file that is not right, and what writers that were killed left of it."""
    return [path for path in list_packed(place.parent) if path == place or path.name.startswith(f".{place.name}.")]


def _check_room(file: "ModelFile", contents: Contents, folder: Path) -> None:
    if not contents.tensors:
        raise UserError(f"{file.spec.path}: nothing of it can be used from disk as it lies there; give a GGUF file")
    free = shutil.disk_usage(folder).free
    if contents.nbytes + SPARE > free:
        raise UserError(
            f"{folder} has {free / 2**30:.1f} GiB free, and the packed file takes {contents.nbytes / 2**30:.1f} "
            f"({SPARE >> 30} GiB stay free); free some space, or name another folder with --disk-cache"
        )


@dataclass(frozen=True)
class KeptFile:
    """A packed file. problem: why it is not used, if it is not."""

    path: Path
    model: str
    nbytes: int
    problem: str = ""


def list_kept(folder: Path) -> list[KeptFile]:
    """The packed files of a folder; models are not opened, so one may be of another state of its model."""
    return [_describe_kept(path) for path in list_packed(folder)]


def _describe_kept(path: Path) -> KeptFile:
    nbytes = path.stat().st_size
    if path.name.startswith("."):
        return KeptFile(path, "", nbytes, "left by a process that was ended, or is writing it")
    try:
        contents = read_packed(path).contents
    except (OSError, ValueError) as error:
        return KeptFile(path, "", nbytes, name_cause(error))
    gone = "" if Path(contents.model).exists() else "its model is gone"
    return KeptFile(path, contents.model, nbytes, gone)


def remove_kept(name: str, folder: Path) -> list[KeptFile]:
    """Delete a model's packed file, or one by its name; "all": every one. Raises UserError for one that there is
    not."""
    found = [kept for kept in list_kept(folder) if _is_meant(kept, name)]
    if not found:
        raise UserError(f"{folder} has no packed file of {name}; name one that pshard models lists")
    for kept in found:
        kept.path.unlink(missing_ok=True)
    return found


def remove_packed(model: Path, folder: Path) -> int:
    """Delete a model's packed file, if there is one; returns the bytes that were freed."""
    found = [kept for kept in list_kept(folder) if kept.model and _is_meant(kept, str(model))]
    for kept in found:
        kept.path.unlink(missing_ok=True)
    return sum(kept.nbytes for kept in found)


def _is_meant(kept: KeptFile, name: str) -> bool:
    if name in ("all", str(kept.path), kept.path.name):
        return True
    return bool(kept.model) and Path(kept.model).resolve() == Path(name).expanduser().resolve()
