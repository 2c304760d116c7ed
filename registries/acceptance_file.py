"""What became of drafts, counted beside a registry (format: registries/FORMAT.md#acceptance-records)."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from pshard.errors import UserError
from pshard.file_lock import hold_lock
from pshard.jsonio import from_json, open_regular, parse_json, remove_leftovers, to_json, write_text_atomically
from pshard.speculation import PROGRAMS, Acceptance, AcceptanceRecord

VERSION = 1

ModelInputs = tuple[tuple[str, str], ...]  # what a model file says of itself


@dataclass(frozen=True)
class _Stored:
    """The file: drafts of one model, a record for each drafter."""

    version: int
    model: ModelInputs
    records: tuple[AcceptanceRecord, ...]


def keep_acceptance(registry: Path, model: ModelInputs, record: AcceptanceRecord) -> Path:
    """Add a run's counts to those that are kept beside a registry; returns the file. Counts of another model there give
    way. Raises UserError for a place that cannot be written, or a file there that cannot be read."""
    place = _place_beside(registry)
    try:
        with hold_lock(place):
            before = _read(place) if place.exists() else None
            records = {r.kind: r for r in before.records} if before and before.model == model else {}
            if record.kind in records:
                records[record.kind].join(record)
            else:
                records[record.kind] = replace(record)
            stored = _Stored(VERSION, model, tuple(records[kind] for kind in sorted(records)))
            remove_leftovers(place)
            write_text_atomically(place, json.dumps(to_json(stored), indent=1) + "\n")
    except OSError as error:
        raise UserError(
            f"cannot write the acceptance record {place}: {error.strerror}; choose another --registry"
        ) from None
    return place


def recall_acceptance(registry: Path, model: ModelInputs, kind: str) -> Acceptance | None:
    """How likely drafts of such a drafter were accepted in recorded runs, or of its program alone; None where none were
    recorded of this model. Raises UserError for a file that cannot be read."""
    place = _place_beside(registry)
    if not place.exists():
        return None
    stored = _read(place)
    own = {record.kind: record for record in stored.records} if stored.model == model else {}
    found = own.get(kind) or own.get(PROGRAMS.get(kind, kind))
    return found.acceptance if found else None


def _read(place: Path) -> _Stored:
    try:
        with open_regular(place) as file:
            stored = from_json(_Stored, parse_json(file.read()))
    except OSError as error:
        raise UserError(f"cannot read the acceptance record {place}: {error.strerror}; delete it") from None
    except ValueError as error:
        raise UserError(f"the acceptance record {place} is damaged ({error}); delete it and record again") from None
    kinds = [record.kind for record in stored.records]
    if stored.version != VERSION or len(set(kinds)) != len(kinds):
        raise UserError(
            f"the acceptance record {place} has format {stored.version}, or a drafter twice; this pshard reads "
            f"{VERSION}: delete it and record again"
        )
    return stored


def _place_beside(registry: Path) -> Path:
    return registry.with_name(f"{registry.name}.acceptance")
