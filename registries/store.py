"""Where a registry lies, reading it, and writing variants so that concurrent writers don't lose each other's."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from pshard.errors import CannotWrite, NotPlanned, StaleRegistry, UserError
from pshard.file_lock import hold_lock
from pshard.jsonio import FULL, check_place, read_regular, resolve_place, write_text_atomically
from pshard.paths import bundled_model, cache_dir, name_in_hub_cache
from pshard.plan import NewerFormat, OlderFormat, PlanSet, Registry, Variant
from pshard.registries.codec import decode_registry, encode_registry
from pshard.registries.fingerprint import PAGE_LOCKS, Inputs, digest, explain_difference, stand_under
from pshard.units.moe.popularity import Popularity

SUFFIX = ".pshard.json"
MOST_SETS = 8  # of plans in one registry, each for other inputs: every run reads them all


def registry_path(model_path: Path, override: Path | None = None) -> Path:
    """Where the registry of a model lies: `override`, else beside the model, else in the cache folder.

    A model folder holds its own registry. The cache is used when the folder cannot be written, for models in the
    Hub's cache, where every file belongs to the Hub's library, and for the bundled model, which lies among the files
    of an installed package.
    """
    if override is not None:
        return Path(override)
    hub = name_in_hub_cache(model_path)
    if hub:
        return cache_dir() / "registries" / f"{hub.replace('/', '--')}{SUFFIX}"
    try:
        model = resolve_place(Path(model_path))
    except OSError as error:
        raise UserError(f"{model_path}: {error.strerror}; give another model") from None
    folder = model if model.is_dir() else model.parent
    if model != bundled_model() and os.access(folder, os.W_OK | os.X_OK):
        return folder / f"{model.name}{SUFFIX}"
    return cache_dir() / "registries" / f"{model.name}-{hashlib.sha256(bytes(model)).hexdigest()[:8]}{SUFFIX}"


def load_registry(path: Path, plan_command: str = "pshard-plan again") -> Registry:
    """Read a registry file. `plan_command` is what the user is told to run when there is none.

    Raises UserError when it is missing, unreadable, corrupt (naming the place) or of a newer format, StaleRegistry
    when it is of an older one.
    """
    try:
        return decode_registry(read_regular(path))
    except FileNotFoundError:
        raise NotPlanned(f"no plan for this model: {path} does not exist; run: {plan_command}") from None
    except OSError as error:
        raise UserError(f"cannot read the registry {path}: {error.strerror}; give another with --registry") from None
    except NewerFormat as error:
        raise UserError(f"the registry {path} has {error}; update pshard or keep another with --registry") from None
    except OlderFormat as error:
        message = f"the plans in {path} are stale, as it has {error}; run: {plan_command}"
        raise StaleRegistry(message, error.plans) from None
    except ValueError as error:
        raise UserError(
            f"the registry {path} is corrupt: {error}; delete it and run: {plan_command}, or keep it and give another "
            "with --registry"
        ) from None


def recall_popularity(path: Path, inputs: Inputs) -> Popularity | None:
    """The popularity of experts by which plans of this model were made, on whatever machine, of several the one of most
    tokens; None where there are none. Raises UserError as `load_registry` does."""
    stored, _ = _read_stored(path)
    own = (v.popularity for plans in stored if _are_of_one_model(plans.inputs, inputs) for v in plans.variants)
    return max((found for found in own if found), key=lambda found: found.tokens, default=None)


def _are_of_one_model(one: Inputs, other: Inputs) -> bool:
    model, same = ([pair for pair in inputs if pair[0].startswith("model ")] for inputs in (one, other))
    return model == same


@dataclass(frozen=True)
class Saved:
    """What writing variants took out of a registry: how many plans of an older format, how many of the sets that were
    written the longest ago, and which, though they had been run, gave way to one that was only predicted."""

    older: int = 0
    oldest: int = 0
    unproven: tuple[Variant, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """A line on each."""
        lines = [f"dropped from the registry, as in an older format: {self.older} plan(s)"] if self.older else []
        if self.oldest:
            lines.append(
                f"dropped from the registry, which keeps plans of {MOST_SETS} machines or profiles, the oldest: "
                f"{self.oldest} plan(s)"
            )
        for v in self.unproven:
            budgets = ",".join(map(str, v.workload.vram_mib))
            what = f"{budgets} MiB, -c {v.workload.context}, {v.way}"
            lines.append(
                f"the plan for {what} had been run before it was written; the one in its place is predicted only"
            )
        return tuple(lines)


def save_variants(path: Path, model: str, inputs: Inputs, variants: Sequence[Variant]) -> Saved:
    """Add variants to the registry at `path`, to those of the same `inputs`; one with the same key is replaced, and one
    with drafts by one of which drafts were asked, and none were better.

    Plans of other inputs (another machine, another profile) stay, up to MOST_SETS sets; beyond them the one that was
    written the longest ago is dropped, and so are plans of a format that is not read any more. Raises UserError and
    leaves the old file as it was when the folder cannot be written, the disk is full, or the file at hand is no
    registry, or of a newer format; of them CannotWrite for a place that cannot be written.
    """
    path = Path(path)
    with _report_write_errors(path):
        check_place(path)  # a lock that cannot be made there looks like one that is held
        path.parent.mkdir(parents=True, exist_ok=True)
        with hold_lock(path):
            stored, older = _read_stored(path)
            kept = next((plans.variants for plans in stored if plans.fingerprint == digest(inputs)), ())
            replaced = {key for v in variants for key in _list_replaced(v)}
            proven = {variant_key(v) for v in kept if v.validated}
            merged = [v for v in kept if variant_key(v) not in replaced] + list(variants)
            merged.sort(key=lambda v: (variant_key(v)[1:], v.workload.vram_mib))
            created = datetime.now(UTC).isoformat(timespec="seconds")
            own = PlanSet(digest(inputs), tuple(inputs), model, created, tuple(merged))
            sets = (own, *(plans for plans in stored if plans.fingerprint != own.fingerprint))
            write_text_atomically(path, encode_registry(Registry(sets[:MOST_SETS])))
    oldest = sum(len(plans.variants) for plans in sets[MOST_SETS:])
    return Saved(older, oldest, tuple(v for v in variants if variant_key(v) in proven and not v.validated))


def check_registry_place(path: Path) -> None:
    """Raise UserError where a registry cannot be written: before minutes of planning, not after them."""
    with _report_write_errors(path):
        check_place(path)


def _read_stored(path: Path) -> tuple[tuple[PlanSet, ...], int]:
    """The sets of plans in the file, and how many plans it has in a format that is not read any more."""
    if not path.exists():
        return (), 0
    try:
        return load_registry(path).sets, 0
    except StaleRegistry as error:
        return (), error.plans


def variant_key(variant: Variant, drafts: bool | None = None) -> tuple:
    """What makes two variants the same one: planning it again replaces it. drafts: whether it has some, where another
    one is meant than this."""
    w = variant.workload
    split = (w.split_mode, w.tensor_split, w.max_tp, w.device)
    load = (w.sequences, w.concurrency, w.drafting.drafts > 0 if drafts is None else drafts)
    return (w.vram_mib, w.context, load, w.type_k, w.type_v, w.max_ubatch, *split, w.ram_mib, w.prompt_math)


def _list_replaced(variant: Variant) -> tuple[tuple, ...]:
    """Keys of variants that are not to be chosen any more."""
    chose_none = variant.speculation is not None and not variant.workload.drafting.drafts
    return (variant_key(variant), *((variant_key(variant, drafts=True),) if chose_none else ()))


def _asked_key(variant: Variant) -> tuple:
    return variant_key(replace(variant, workload=replace(variant.workload, max_ubatch=0)))


def own_plans(registry: Registry, current: Inputs, replan_command: str) -> PlanSet:
    """The plans that were made for these inputs, and behind them those for another limit of page-locking, as a run that
    meets the limit must not end the next one, and those that were made without the disk.

    Raises StaleRegistry where there are none: it names the inputs in which the nearest set of plans differs, the one
    with the fewest, and the command to plan.
    """
    serving = [plans for plans in registry.sets if stand_under(plans.inputs, current)]
    if serving:
        serving.sort(key=lambda plans: plans.fingerprint != digest(current))
        first, *others = serving
        there = {_asked_key(v) for v in first.variants}  # another limit makes another micro-batch the best
        found: dict[tuple, Variant] = {variant_key(v): v for v in first.variants}
        for variant in (v for plans in others for v in plans.variants if _asked_key(v) not in there):
            found.setdefault(variant_key(variant), variant)
        return replace(serving[0], variants=tuple(found.values())) if len(serving) > 1 else serving[0]
    if not registry.sets:
        raise StaleRegistry(f"the registry has no plans; run: {replan_command}")
    changes = sorted((explain_difference(plans.inputs, current) for plans in registry.sets), key=len)
    nearest = "; ".join(changes[0]) or "the order of the inputs"
    made = "the plan was made for other inputs"
    if len(changes) > 1:
        made = f"no plan was made for these inputs; the nearest of {len(changes)} sets of plans differs"
    raise StaleRegistry(f"{made} ({nearest}); run: {replan_command}")


def describe_other_locks(registry: Registry, variant: Variant, current: Inputs) -> str | None:
    """In what limit of page-locking these inputs differ from those of the registry's variant; None where in none."""
    made_for = next(plans.inputs for plans in registry.sets if any(v is variant for v in plans.variants))
    locks = ([pair for pair in inputs if pair[0] == PAGE_LOCKS] for inputs in (made_for, current))
    return "; ".join(explain_difference(*locks)) or None


@contextmanager
def _report_write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        advice = "free some space" if error.errno in FULL else "choose another place with --registry"
        raise CannotWrite(f"cannot write the registry {path}: {error.strerror or error}; {advice}") from None
