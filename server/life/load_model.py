"""Loads the model of a server under one of its plans: here, or in a process for each rank."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from pshard.errors import KernelRefused, NotPlanned, StepFailed, UserError, as_line
from pshard.plan import Variant
from pshard.registries.choose import keeps_ram
from pshard.registries.fingerprint import fingerprint_inputs
from pshard.registries.store import load_registry, own_plans
from pshard.routing.followed import keep_slots
from pshard.server.life.how_to_run import HowToRun
from pshard.server.life.local_machine import LocalMachine
from pshard.server.life.plan_beside import plan_beside
from pshard.server.life.rank_machine import RankMachine
from pshard.server.life.rank_program import RankTask
from pshard.server.life.read_facts import add_promise, keep_one_tier, plan_drafts, rate_budgets, read_facts
from pshard.server.life.rehearse_steps import compiles_kernels, rehearse_steps
from pshard.server.scheduling.served_machine import Machine
from pshard.session.choose_drafts import choose_drafts
from pshard.session.open_plan import Opened, check_plan, replan_command
from pshard.session.run_request import RunRequest
from pshard.session.start_engine import start_engine

if TYPE_CHECKING:
    from pshard.runtime.engine import Engine


class ModelLoader:
    """Loads an opened model: a `Loader`."""

    def __init__(self, opened: Opened, request: RunRequest, how: HowToRun, gap: float) -> None:
        """gap: seconds between tokens that the server promises."""
        self._opened, self._request, self._how, self._gap = opened, request, how, gap
        self._variants = find_budgets(opened)
        self._planning = threading.Lock()
        self._rehearsed = False

    @property
    def budgets(self) -> tuple[int, ...]:
        """MiB of all plans that serve the same, each a sum over ranks."""
        return tuple(sorted(self._variants))

    def look_again(self, budget: int, plan: bool, stopped: Callable[[], bool]) -> None:
        """As `Loader.look_again`: plans of the registry as it is now."""
        self._variants = find_budgets(self._opened)
        if budget in self._variants:
            return
        chosen = self._opened.variant.workload
        command = replan_command(self._request, replace(chosen, vram_mib=share_budget(budget, chosen.vram_mib)))
        if not plan:
            there = ", ".join(map(str, self.budgets))
            raise NotPlanned(
                f'no plan has a budget of {budget} MiB; there are {there}; ask with "plan": true, or run: {command}'
            )
        if not self._planning.acquire(blocking=False):
            raise UserError("another plan is being made; ask again when it is there")
        try:
            plan_beside(command, stopped)
        finally:
            self._planning.release()
        self._variants = find_budgets(self._opened)
        if budget not in self._variants:
            raise NotPlanned(
                f"a plan of {budget} MiB was made, from another model file or profile than this server has; start it "
                "again"
            )

    def load(self, budget: int | None) -> Machine:
        """The model under the plan of a budget; None: under the one that was chosen. Raises UserError, StepFailed."""
        opened = self._opened
        variant = opened.variant if budget is None else self._variants[budget]
        if self._how.deterministic:
            variant = keep_slots(variant)
        spec = opened.file.spec
        drafts, why = choose_drafts(self._how.drafts, variant, ranks=True)

        def facts(notes: tuple[str, ...]):  # type: ignore[no-untyped-def]
            told = (*opened.file.notes, *notes, *filter(None, [why]))
            found = read_facts(spec, opened.profile, variant, self.budgets, told)
            found = replace(found, shown=replace(found.shown, rates=rate_budgets(self._variants)))
            found = keep_one_tier(found) if self._how.deterministic else found
            found = plan_drafts(found, drafts) if drafts else found
            return add_promise(found, variant.workload, self._gap)

        if len(variant.ranks) > 1:
            request, most = self._request, drafts.most if drafts else 0
            task = RankTask(request.model, opened.profile, variant, self._how, most, request.draft_model)
            return RankMachine.start(task, facts)
        check_fits(opened, variant)
        engine, notes = self._start_engine(variant, drafts.most if drafts else 0)
        return LocalMachine(engine, facts((*engine.notes, *notes)), self._how.prefixes)

    def _start_engine(self, variant: Variant, drafts: int) -> tuple["Engine", tuple[str, ...]]:
        """An engine that has run a step of every size, where that compiles something and none of this process has; and
        what is to be told of it."""
        start = partial(start_engine, self._opened, variant, self._how.kernels, exact=self._how.deterministic)
        engine = start()
        if self._rehearsed or not compiles_kernels(self._opened.profile):
            return engine, ()
        self._rehearsed = True
        try:
            rehearse_steps(engine, self._how.deterministic, drafts)
        except (StepFailed, UserError) as error:
            engine.close()
            if isinstance(error, KernelRefused):  # it would refuse again
                raise
            why = f"no step of each size was run before the start, so the first may take seconds: {as_line(error)}"
            return start(), (why,)
        except BaseException:
            engine.close()
            raise
        return engine, ()


def share_budget(budget: int, now: Sequence[int]) -> tuple[int, ...]:
    """A sum in MiB over ranks, in the shares that they have now."""
    ends = [budget * sum(now[:i]) // sum(now) for i in range(len(now) + 1)]
    return tuple(end - begin for begin, end in pairwise(ends))


def check_fits(opened: Opened, variant: Variant) -> None:
    """Raise UserError for a plan that a GPU has no room for now: others use it."""
    from pshard.session.this_machine import free_vram_mib

    free, wanted = free_vram_mib(opened.profile), sum(variant.workload.vram_mib)
    if opened.profile.accelerators[0].kind == "cuda" and variant.workload.device == 0 and free < wanted:
        raise UserError(f"the plan takes {wanted} MiB of VRAM and {free} MiB are free; end other programs on the GPU")


def find_budgets(opened: Opened) -> dict[int, Variant]:
    """Plans of the registry that serve what the chosen one serves, by their budgets; of equal ones the chosen one, or
    one for as many requests on average, then the one with the least context beyond it."""
    inputs = fingerprint_inputs(opened.file.fingerprint_inputs(), opened.profile)
    chosen = opened.variant
    found = {sum(chosen.workload.vram_mib): chosen}
    plans = own_plans(load_registry(opened.registry), inputs, "pshard plan").variants
    load = chosen.workload.concurrency
    for variant in sorted(plans, key=lambda v: (_distance(v, load), v.workload.context, v.workload.sequences)):
        if _serves_alike(variant, chosen) and _runs(opened, variant):
            made = replace(variant.workload, reduce_dtype=chosen.workload.reduce_dtype)
            found.setdefault(sum(variant.workload.vram_mib), replace(variant, workload=made))
    return found


def _distance(variant: Variant, load: int) -> int:
    return abs(variant.workload.concurrency - load)


def _serves_alike(variant: Variant, chosen: Variant) -> bool:
    one, other = variant.workload, chosen.workload
    same: Callable = lambda w: (w.type_k, w.type_v, w.split_mode, w.device, len(w.vram_mib), w.prompt_math)  # noqa: E731
    is_wide = one.context >= other.context and one.sequences >= other.sequences
    return same(one) == same(other) and is_wide and keeps_ram(one, other)


def _runs(opened: Opened, variant: Variant) -> bool:
    try:
        check_plan(opened.file.spec, variant, opened.profile)
    except ValueError:
        return False
    return True
