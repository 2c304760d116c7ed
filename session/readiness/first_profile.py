"""The first profile of a machine: a short one, made when a model is to run and there is none."""

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pshard.errors import CannotWrite, UserError
from pshard.session.planning_bar import stage_bar
from pshard.session.readiness.unsaved import is_unsaved, place_unsaved
from pshard.session.run_request import RunRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from pshard.machine import MachineProfile


def ensure_profile(request: RunRequest, say: "Callable[[str], None]") -> RunRequest:
    """Measure this machine briefly, with the model's own shapes, unless it has a profile; `say` hears what was done.

    Where a profile cannot be kept the run goes on with it, and with a plan that is not kept either: it fits no later
    profile. Returns the request with their places then. Raises UserError for a model that cannot be read, and for a
    cache folder that is none.
    """
    from pshard.profile.effort import SHORT_GPU_SECONDS, SHORT_SECONDS
    from pshard.registries.profile_store import check_profile_place, default_profile_path, save_profile

    place = default_profile_path()
    if request.profile is not None or place.exists():
        return request
    file = next((p for p in place.parents if p.exists() and not p.is_dir()), None)
    if file is not None:
        raise UserError(f"no folder for the machine profile: {file} is a file; set PSHARD_CACHE to a folder")
    try:
        check_profile_place()
    except CannotWrite as error:
        say(f"note: this run's profile and plan are for this run only: {error}")
        place = place_unsaved(place.name)
        registry = request.registry or place_unsaved("registry.json")
        request = replace(request, profile=place, registry=registry)
    started = time.monotonic()
    with stage_bar("measuring this machine") as show:
        stages = _Stages(show)
        profile = measure_briefly(request.model, stages.begin)
    save_profile(profile, place)
    kept = "" if is_unsaved(place) else f"; kept in {place}"
    seconds = time.monotonic() - started
    compiling = f", of which GPU kernels were compiled for {stages.compiling:.1f} s" if stages.compiling >= 1.0 else ""
    say(f"profile: this machine was measured, briefly, in {seconds:.1f} s{compiling}{kept}")
    usual = SHORT_SECONDS if profile.accelerators[0].kind == "cpu" else SHORT_GPU_SECONDS
    if profile.busy:
        say(f"note: the machine is busy: {profile.busy}")
    elif seconds - stages.compiling > usual:
        say(f"note: this machine is slow or busy, elsewhere it takes {usual:.0f} s; profile again when it rests")
    say("         when there is time, a longer look makes better plans: pshard profile")
    return request


class _Stages:
    """Hears what begins for a bar, and how long kernels were compiled."""

    def __init__(self, show: "Callable[[str, float], None]") -> None:
        self._show, self._began, self.compiling = show, 0.0, 0.0

    def begin(self, label: str, share: float) -> None:
        from pshard.profile.measure import COMPILING

        if self._began:
            self.compiling += time.monotonic() - self._began
        self._began = time.monotonic() if label == COMPILING else 0.0
        self._show(label, share)


def measure_briefly(model: Path, show: "Callable[[str, float], None]") -> "MachineProfile":
    """A short profile with a model's shapes. `show` hears what begins, and the share that is done."""
    from pshard.models import open_model
    from pshard.profile.effort import model_shapes, short_effort
    from pshard.profile.identify import (
        default_accelerator,
        identify_accelerators,
        last_cache_bytes,
        usable_memory,
    )
    from pshard.profile.measure import ProfileRequest, measure_machine

    with open_model(model) as file:
        spec = file.spec
    kind = default_accelerator()
    request = ProfileRequest(
        accelerator=kind,
        effort=short_effort(last_cache_bytes(), usable_memory()),
        model=model_shapes(spec, len(identify_accelerators(kind))),
        threads=None,
        command="pshard run",
    )
    return measure_machine(request, show)
