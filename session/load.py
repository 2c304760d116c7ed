"""`pshard.load`: a model as an engine, in one call."""

from collections.abc import Iterable, Sequence
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, SupportsIndex

from pshard.errors import UserError
from pshard.session.find_model import resolve_model
from pshard.session.open_plan import open_plan, tell_once
from pshard.session.run_request import RunRequest
from pshard.session.start_engine import KERNELS, start_engine

if TYPE_CHECKING:
    from pshard.runtime.engine import Engine


def load(
    model: str | Path,
    vram: int | Sequence[int] | None = None,
    *,
    context: int | None = None,
    sequences: int | None = None,
    type_k: str = "bf16",
    type_v: str = "bf16",
    registry: str | Path | None = None,
    kernels: str = "fast",
    replan: bool = False,
    plan: bool = True,
    ram: int | None = None,
    disk_cache: str | Path | None = None,
) -> "Engine":
    """Load a model and return its engine; profile this machine and plan the model first, where that was not done.

    Args:
        model: GGUF file or safetensors folder, or a model of the Hub (`org/repo:Q4_K_M`), fetched if it is not here.
        vram: budget in MiB, or one for each device; the largest planned variant that fits is taken. None: what is free.
        context: cells of the KV cache that are needed; sequences: how many share them. None: whatever is planned.
        type_k, type_v: types of the KV cache: "bf16", "f16", "f32", "q8_0" or "q4_0".
        registry: plan file, when it does not lie in its usual place.
        kernels: "fast", or "plain" for torch in float32.
        replan: plan now (needs vram) instead of using the stored plan.
        plan: make what is missing, a profile or a plan that fits, as `pshard run` does, and say so on stderr; False: it
            is an error, as where what runs is to be what was planned.
        ram: MiB of host memory for all that runs; the rest of the model stays on disk. None: all there is.
        disk_cache: folder where what stays on disk is packed once, and read from then on.

    Returns:
        Engine with `generate`, `forward`, `plan`, `memory()`, `reset` and `close`.

    Raises:
        UserError: one line saying what is missing, stale or out of range, and the command that mends it.
    """
    for name, value in (("context", context), ("sequences", sequences), ("ram", ram)):
        if value is not None and not (isinstance(value, SupportsIndex) and index(value) >= 1):
            raise UserError(f"{name} is {value!r}; it is a whole number of 1 or more, or None for what is there")
    if kernels not in KERNELS:
        raise UserError(f"kernels is {kernels!r}; choose from {', '.join(KERNELS)}")
    budgets = _read_budgets(vram)
    place = Path(registry) if registry else None
    request = RunRequest(
        resolve_model(str(model)),
        budgets,
        context,
        sequences,
        type_k,
        type_v,
        registry=place,
        replan=replan,
        plans=plan,
        ram_mib=ram or 0,
        disk_cache=Path(disk_cache) if disk_cache else None,
    )
    if plan:
        from pshard.session.readiness.first_profile import ensure_profile

        request = ensure_profile(request, tell_once)
    opened = open_plan(request)
    if plan and opened.why:
        tell_once(f"note: {opened.why}")
    return start_engine(opened, opened.variant, kernels, on_close=opened.file.close)


def _read_budgets(vram: int | Sequence[int] | None) -> tuple[int, ...] | None:
    """MiB of each device; None: what is free. Raises UserError for what is none."""
    given = tuple(vram) if isinstance(vram, Iterable) and not isinstance(vram, str) else (vram,)
    if vram is None or not given:
        return None
    whole = tuple(index(mib) for mib in given if isinstance(mib, SupportsIndex))
    if len(whole) < len(given):
        raise UserError(f"vram is {vram!r}; it is a whole number of MiB, or one for each device")
    return whole
