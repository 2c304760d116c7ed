"""Where machine profiles are kept: one JSON file under the platform's cache folder, or wherever the user says.

Beside it lies what runs have met: how much memory this machine lets a process page-lock.
"""

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Any

from pshard.errors import CannotWrite, UserError
from pshard.jsonio import (
    FULL,
    Where,
    check_place,
    from_json,
    name_place,
    parse_json,
    read_regular,
    write_json_atomically,
)
from pshard.machine import PROFILE_VERSION, MachineProfile, emulated_capability
from pshard.paths import cache_dir
from pshard.registries.check_profile import check_timings

# What was timed has some size: rates are divided by it.
_SIZES = {
    "rows",
    "cols",
    "tokens",
    "width",
    "nbytes",
    "n_heads",
    "n_kv_heads",
    "head_dim",
    "context",
    "sequences",
    "ranks",
}
_SIZES |= {"experts", "used", "d_expert", "d_model", "key_heads", "value_heads", "head", "expert_nbytes"}
KEPT = 4  # profiles that this process remembers as they were read
NO_JSON = "not a JSON file"
_LARGEST = 1 << 48  # beyond it sums of floats lose what they add


def default_profile_path() -> Path:
    """The profile of this machine: `profile.json` in the cache folder; another where its GPU is taken for another."""
    emulated = emulated_capability()
    return cache_dir() / (f"profile-as-{emulated}.json" if emulated else "profile.json")


def load_profile(path: Path | None = None) -> MachineProfile:
    """Read a profile, by default this machine's, with the limit of page-locking that runs have met here.

    Raises UserError: missing, unreadable, damaged, of another version.
    """
    place = path or default_profile_path()
    try:
        profile = _understand(read_regular(place))
    except FileNotFoundError:
        raise UserError(f"no machine profile at {place}; run pshard-profile") from None
    except OSError as error:
        raise UserError(f"{place} cannot be read: {error.strerror}; give another with --profile") from None
    except UnicodeDecodeError:
        raise UserError(f"{place} is {NO_JSON}; run pshard-profile again") from None
    except ValueError as error:
        raise UserError(f"{place} is {error}; run pshard-profile again") from None
    met = recall_lockable() if path is None else None
    return profile if met is None else replace(profile, lockable_bytes=met)


@lru_cache(KEPT)  # thousands of rows take longer to check than the rest of many commands
def _understand(text: str) -> MachineProfile:
    """The profile that a file says. Raises ValueError: what the file is instead."""
    try:
        data = parse_json(text)
    except ValueError:
        raise ValueError(NO_JSON) from None
    version = data.get("version") if isinstance(data, dict) else None
    if version != PROFILE_VERSION:
        raise ValueError(f"no machine profile of version {PROFILE_VERSION}")
    try:
        profile = from_json(MachineProfile, data)
        _check_figures(data)
        check_timings(profile)
    except ValueError as error:
        raise ValueError(f"damaged: {error}") from None
    return profile


def _check_figures(data: dict) -> None:
    """Raise ValueError for what no machine has: no accelerator, or a figure that is negative or no number."""
    if not data["accelerators"]:
        raise ValueError("MachineProfile.accelerators is empty")
    left: list[tuple[Where, Any]] = [("MachineProfile", data)]
    while left:
        where, value = left.pop()
        if isinstance(value, dict):
            left += [((where, name), item) for name, item in value.items()]
        elif isinstance(value, list):
            left += [((where, i), item) for i, item in enumerate(value)]
        elif isinstance(value, int | float) and not 0 <= value < inf:
            raise ValueError(f"{name_place(where)} is {value}, not a number of 0 or more")
        elif where[-1] in _SIZES and not 1 <= value <= _LARGEST:
            raise ValueError(f"{name_place(where)} is {value}, not 1 or more, and at most {_LARGEST}")


def save_profile(profile: MachineProfile, path: Path | None = None) -> Path:
    """Write a profile whole or not at all and return where. Raises UserError when that place cannot be written."""
    place = path or default_profile_path()
    with _report_write_errors(place):
        write_json_atomically(place, profile)
    return place


def check_profile_place(path: Path | None = None) -> Path:
    """Where a profile will be written. Raises CannotWrite, before minutes of measuring, where it cannot be."""
    place = path or default_profile_path()
    with _report_write_errors(place):
        check_place(place)
    return place


@contextmanager
def _report_write_errors(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        advice = "free some space" if error.errno in FULL else "choose another place with -o, or with PSHARD_CACHE"
        raise CannotWrite(f"the profile {place} cannot be written: {error.strerror}; {advice}") from None


def note_page_locks(nbytes: int, refused: bool) -> bool:
    """Remember how much memory a process could page-lock here before more was `refused`, for the next planning.

    A limit that a later process got beyond is forgotten. A folder that cannot be written to remembers nothing. Returns
    whether plans were made with another limit.
    """
    known = recall_lockable()
    if nbytes == known or (not refused and (known is None or nbytes <= known)):
        return False
    place = _page_locks()
    try:
        if refused:
            write_json_atomically(place, {"machine": platform.node(), "lockable_bytes": nbytes})
        else:
            place.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def recall_lockable() -> int | None:
    """Bytes that could be page-locked on this machine when a process last met a limit; None when none did."""
    try:
        data = parse_json(read_regular(_page_locks()))
        nbytes = data["lockable_bytes"] if data["machine"] == platform.node() else None
    except (OSError, ValueError, TypeError, KeyError):  # what cannot be read is not known
        return None
    return nbytes if type(nbytes) is int and nbytes >= 0 else None


def _page_locks() -> Path:
    """A cache folder may be shared by machines: the file names its own."""
    return cache_dir() / "page-locks.json"
