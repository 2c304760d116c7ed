"""Files given to a report, recognised by what they hold: measurements, plans, profiles, timelines, outlooks, places of
experts, loads of servers."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pshard.errors import UserError
from pshard.jsonio import from_json, read_regular
from pshard.machine import MachineProfile
from pshard.plan import OlderFormat, PlanSet, Registry, Variant, to_newest_format
from pshard.routing.expert_map import ExpertMap
from pshard.routing.hits_over_time import HitCourse
from pshard.times.measurement import Measurement, Timeline
from pshard.times.outlook import Outlook
from pshard.times.server_load import ServerLoad

T = TypeVar("T")

# Two fields that tell each kind of object from the others
KINDS: tuple[tuple[type, frozenset[str]], ...] = (
    (Measurement, frozenset({"samples_ts", "strategy"})),
    (Registry, frozenset({"sets", "version"})),
    (Registry, frozenset({"fingerprint", "variants"})),  # of an older format version
    (Variant, frozenset({"workload", "ranks"})),
    (MachineProfile, frozenset({"host", "matmuls"})),
    (Timeline, frozenset({"title", "events"})),
    (Outlook, frozenset({"machine", "forecasts"})),
    (ExpertMap, frozenset({"used", "tiers"})),
    (ServerLoad, frozenset({"server", "points"})),
)

GIVE = "give the JSON of pshard-bench -o json, pshard-plan --json or pshard-profile, or a registry"


@dataclass(frozen=True)
class ReportInputs:
    """What the files hold, without repetitions. `plans` are (name, variant), where the name is the model's, with the
    machine's where a registry has plans of several; `sets` are the registries'."""

    sources: tuple[str, ...]
    measurements: tuple[Measurement, ...]
    plans: tuple[tuple[str, Variant], ...]
    profiles: tuple[MachineProfile, ...]
    timelines: tuple[Timeline, ...]
    sets: tuple[PlanSet, ...] = ()
    outlooks: tuple[Outlook, ...] = ()
    experts: tuple[ExpertMap, ...] = ()
    loads: tuple[ServerLoad, ...] = ()
    courses: tuple[HitCourse, ...] = ()


def read_inputs(paths: Iterable[Path]) -> ReportInputs:
    """Read JSON and JSON-lines files. Raises UserError for a file that is missing, broken, or holds nothing known."""
    sources, nouns = [], []
    for path in paths:
        found = read_nouns(path)
        if not found:
            raise UserError(f"{path} holds no measurement, plan, profile or timeline; {GIVE}")
        sources.append(str(path))
        nouns += [(path.stem, noun) for noun in found]
    plans = [(origin, noun) for origin, noun in nouns if isinstance(noun, Variant)]
    registries = _pick(Registry, nouns)
    plans += [(_name_set(s, r), variant) for r in registries for s in r.sets for variant in s.variants]
    return ReportInputs(
        tuple(sources),
        _pick(Measurement, nouns),
        tuple(dict.fromkeys(plans)),
        _pick(MachineProfile, nouns),
        _pick(Timeline, nouns),
        sets=tuple(dict.fromkeys(plans for registry in registries for plans in registry.sets)),
        outlooks=_pick(Outlook, nouns),
        experts=_pick(ExpertMap, nouns),
        loads=_pick(ServerLoad, nouns),
    )


def read_nouns(path: Path) -> list[Any]:
    """Every known object in a file, in order, however deep it lies."""
    try:
        text = read_regular(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; {GIVE}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not a JSON text; {GIVE}") from None
    try:
        return _find_nouns(_parse(text))
    except RecursionError:
        raise UserError(f"{path} is nested too deeply; {GIVE}") from None
    except OlderFormat as error:
        raise UserError(f"{path} has {error}; write it again") from None
    except ValueError as error:
        raise UserError(f"{path} is broken: {error}; write it again") from None


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        if error.msg != "Extra data" or len(lines) < 2:
            raise ValueError(f"not JSON at line {error.lineno}: {error.msg}") from None
        return [_parse_line(number, line) for number, line in lines]


def _parse_line(number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON at line {number}: {error.msg}") from None


def _find_nouns(data: Any) -> list[Any]:
    if isinstance(data, list):
        return [noun for item in data for noun in _find_nouns(item)]
    if not isinstance(data, dict):
        return []
    for kind, marks in KINDS:
        if marks <= data.keys():
            return [from_json(kind, to_newest_format(data) if kind is Registry else data)]
    return [noun for value in data.values() for noun in _find_nouns(value)]


def _name_set(plans: PlanSet, registry: Registry) -> str:
    """The model, and of several sets of plans also the machine and the profile's date that one was made for."""
    if len(registry.sets) == 1:
        return plans.model
    inputs = dict(plans.inputs)
    device = inputs.get("accelerator 0", "another machine").split(",")[0]
    date = " ".join(inputs.get("profile", "").split()[:-1])
    return f"{plans.model} on {device}" + (f", profile {date}" if date else "")


def _pick(kind: type[T], nouns: Iterable[tuple[str, Any]]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(noun for _, noun in nouns if isinstance(noun, kind)))
