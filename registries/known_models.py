"""Which models were run or planned on this machine: a list of places in the cache folder."""

import os
from pathlib import Path

from pshard.jsonio import parse_json, read_regular, write_json_atomically
from pshard.paths import cache_dir

MOST = 200  # models that are remembered, the latest first


def note_model(model: Path) -> None:
    """Remember where a model lies. A folder that cannot be written to remembers nothing."""
    place, known = os.path.abspath(model), [str(path) for path in list_known()]
    if known[:1] == [place]:
        return
    try:
        write_json_atomically(_list_path(), {"models": [place, *(p for p in known if p != place)][:MOST]})
    except OSError:
        return


def list_known() -> list[Path]:
    """Models that are remembered, the latest first; none where the list cannot be read."""
    try:
        places = parse_json(read_regular(_list_path()))["models"]
        return [Path(place) for place in places if isinstance(place, str)]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def _list_path() -> Path:
    return cache_dir() / "models.json"
