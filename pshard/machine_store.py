"""Where machine profiles are kept: one JSON file under the platform's cache folder, or wherever the user says."""

import json
from pathlib import Path

from pshard.cli_support import cache_dir
from pshard.errors import UserError
from pshard.jsonio import from_json, write_json_atomically
from pshard.machine import PROFILE_VERSION, MachineProfile


def default_profile_path() -> Path:
    """The profile of this machine: `profile.json` in the cache folder."""
    return cache_dir() / "profile.json"


def load_profile(path: Path | None = None) -> MachineProfile:
    """Read a profile, by default this machine's. Raises UserError: missing, unreadable, damaged, of another version."""
    place = path or default_profile_path()
    try:
        data = json.loads(place.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"no machine profile at {place}; run pshard-profile") from None
    except OSError as error:
        raise UserError(f"{place} cannot be read: {error.strerror}") from None
    except ValueError:
        raise UserError(f"{place} is not a JSON file; run pshard-profile again") from None
    version = data.get("version") if isinstance(data, dict) else None
    if version != PROFILE_VERSION:
        raise UserError(f"{place} is no machine profile of version {PROFILE_VERSION}; run pshard-profile again")
    try:
        return from_json(MachineProfile, data)
    except ValueError as error:
        raise UserError(f"{place} is damaged: {error}; run pshard-profile again") from None


def save_profile(profile: MachineProfile, path: Path | None = None) -> Path:
    """Write a profile whole or not at all and return where. Raises UserError when that place cannot be written."""
    place = path or default_profile_path()
    try:
        write_json_atomically(place, profile)
    except OSError as error:
        raise UserError(f"{place} cannot be written: {error.strerror}; choose another place with -o") from None
    return place
