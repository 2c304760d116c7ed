"""The first profile of a machine: a short one, made when a model is to run and there is none."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

from pshard.errors import UserError
from pshard.session.planning_bar import stage_bar

if TYPE_CHECKING:
    from collections.abc import Callable

    from pshard.machine import MachineProfile


def ensure_profile(model: Path, say: "Callable[[str], None]") -> None:
    """Measure this machine briefly, with the model's own shapes, unless it has a profile; `say` hears what was done.

    Raises UserError for a model that cannot be read, and where the profile cannot be written.
    """
    from pshard.registries.profile_store import default_profile_path, save_profile

    place = default_profile_path()
    if place.exists():
        return
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"no folder for the machine profile: {place.parent}: {error.strerror}; set PSHARD_CACHE to another"
        ) from None
    started = time.monotonic()
    with stage_bar("measuring this machine") as show:
        profile = measure_briefly(model, show)
    save_profile(profile, place)
    say(f"profile: this machine was measured, briefly, in {time.monotonic() - started:.1f} s; kept in {place}")
    say("         when there is time, a longer look makes better plans: pshard profile")


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
