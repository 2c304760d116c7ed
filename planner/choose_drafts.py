"""How many drafts a step has: each number is planned with places of its own, and the shortest round is taken."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from pshard.batch import VERIFY, Batch
from pshard.cuts.layer_cuts import join_seconds
from pshard.cuts.rank_parts import cut_ranks
from pshard.errors import NoPlan, UserError
from pshard.machine import MachineProfile
from pshard.model import ModelSpec
from pshard.plan import RankPlan, Variant
from pshard.planner.place_head import HeadPlan, plan_head, settle_head
from pshard.planner.price.predict_published import Predictor
from pshard.planner.price.profile_tables import find_tables
from pshard.planner.price.tier_loads import tier_loads
from pshard.predicted_times import round_seconds, step_bound, step_seconds
from pshard.routing.followed import under_plan
from pshard.speculation import NO_DRAFTS, PROGRAMS, Drafting, DraftQuestion, PlannedDrafts, Speculation
from pshard.units.operations import AddGrams, Convolve, DeltaNet
from pshard.workload import Workload


def choose_drafts(
    plan: Callable[[Workload], Variant],
    spec: ModelSpec,
    profile: MachineProfile,
    workload: Workload,
    question: DraftQuestion,
) -> Variant:
    """What `plan` makes of the workload with the number of drafts that gives the shortest round, of equal ones the
    fewest; its `speculation` has all that were planned. What drafts is planned for one way to spread the model, which
    is the fastest without drafts where the workload leaves it open. Raises as `plan` does where none fits, UserError
    where an allowed number has too many rows."""
    made, refused, head = list[Variant](), list[NoPlan](), None
    if question.kind in PROGRAMS and len(workload.vram_mib) > 1:
        workload = _settle_split(plan, workload)
    for head in _list_heads(spec, profile, workload, question):
        made, refused = _plan_each(plan, workload, question, head)
        if any(v.workload.drafting.drafts for v in made):
            break
    allowed = [v for v in made if v.workload.drafting.drafts in question.allowed]
    if not allowed:
        if refused:
            raise refused[-1]
        rows = workload.sequences * (min(question.allowed) + 1)
        raise UserError(
            f"{min(question.allowed)} drafts need steps of {rows} rows for -np {workload.sequences}, and micro-batches "
            f"have {workload.largest} at most; give fewer drafts, or a larger -ub"
        )
    settling = _settle_seconds(spec, profile)
    planned = tuple(_describe_steps(v, settling, head) for v in made)
    texts = workload.answer_tokens / workload.generated
    said = Speculation(question.kind, question.acceptance, texts, planned)
    rounds = (round_seconds(replace(v, speculation=said)) for v in made)
    said = replace(said, planned=tuple(replace(p, round_seconds=s) for p, s in zip(planned, rounds)))
    best = min((replace(v, speculation=said) for v in allowed), key=round_seconds)
    return _give_plans(best, head.plans) if head and best.workload.drafting.drafts else best


def _give_plans(variant: Variant, plans: Sequence[RankPlan]) -> Variant:
    """The variant with these plans of what drafts."""
    return replace(variant, drafter=plans[0], drafter_parts=tuple(plans[1:]))


def _settle_split(plan: Callable[[Workload], Variant], workload: Workload) -> Workload:
    """The workload under the split of its plan without drafts."""
    chosen = plan(replace(workload, drafting=NO_DRAFTS, acceptance=None, drafter_mib=0)).workload
    settled = {name: getattr(chosen, name) for name in ("vram_mib", "split_mode", "tensor_split", "max_tp", "device")}
    return replace(workload, **settled)


def _list_heads(
    spec: ModelSpec, profile: MachineProfile, workload: Workload, question: DraftQuestion
) -> Iterator[HeadPlan | None]:
    """Plans of the head that drafts, the likely best first; None where drafts are others'."""
    if question.kind not in PROGRAMS:
        yield None
        return
    for in_vram in (True, False):
        yield plan_head(spec, profile, workload, in_vram)


def _plan_each(
    plan: Callable[[Workload], Variant], workload: Workload, question: DraftQuestion, head: HeadPlan | None
) -> tuple[list[Variant], list[NoPlan]]:
    """Plans of each number of drafts, and why others have none."""
    made, refused = list[Variant](), list[NoPlan]()
    for asked in _list_workloads(workload, question, head.budget_mib if head else 0):
        try:
            made.append(plan(asked))
        except NoPlan as error:
            refused.append(error)
    return made, refused


def _list_workloads(workload: Workload, question: DraftQuestion, drafter_mib: int) -> Iterator[Workload]:
    """The workload with each number of drafts, without any first; none whose steps are larger than micro-batches may
    be."""
    for drafts in sorted({0, *question.allowed}):
        drafting = Drafting(question.kind, drafts) if drafts else NO_DRAFTS
        asked = replace(workload, drafting=drafting, acceptance=question.acceptance if drafts else None)
        asked = replace(asked, drafter_mib=drafter_mib if drafts else 0)
        if asked.answer_rows <= asked.largest:
            yield asked


def _describe_steps(variant: Variant, settling: float, head: HeadPlan | None) -> PlannedDrafts:
    """settling: seconds of taking rows that hold into states; head: who drafts, where that takes time."""
    work = variant.workload
    drafts, rows = work.drafting.drafts, work.drafting.rows
    step, alone, bound = step_seconds(variant, rows), step_seconds(variant, 1), step_bound(variant, rows)
    drafting = head.drafting(drafts) if head else 0.0
    return PlannedDrafts(drafts, alone, step, bound, drafting, settling * (drafts > 0))


def _settle_seconds(spec: ModelSpec, profile: MachineProfile) -> float:
    """Seconds by which a step that verifies is longer: the host's part, and taking rows that hold into a text's states
    that cannot be cut back. Each of these is read and written once, as one token does."""
    tables = find_tables(profile)

    def settle(net: DeltaNet | Convolve | AddGrams) -> float:
        timed = tables.deltas.seconds("acc", net, 1, 1) if isinstance(net, DeltaNet) else None
        numbers = net.kept_nbytes // 4  # moved twice; a norm moves eight bytes for each number
        return tables.elementwise("acc", "norm", 1, numbers) if timed is None else timed

    operations = (operation for unit in spec.units for operation in unit.operations(spec.config))
    settling = sum(settle(net) for net in operations if isinstance(net, DeltaNet | Convolve | AddGrams))
    return settling + tables.elementwise("acc", "verify", 1, 1)


def keep_drafts(spec: ModelSpec, profile: MachineProfile, variant: Variant, chosen: Variant) -> Variant:
    """A variant of the workload that was chosen with what was chosen of drafts, and what steps of its rows take. spec:
    the whole model."""
    parts, settled = cut_ranks(spec, variant.split), replace(variant, speculation=chosen.speculation)
    if chosen.drafters:
        heads = ((parts[plan.rank].head, plan) for plan in chosen.drafters)
        settled = _give_plans(settled, [settle_head(head, plan, variant) for head, plan in heads if head])
    return time_rows(spec, profile, settled)


def time_rows(spec: ModelSpec, profile: MachineProfile, variant: Variant) -> Variant:
    """The variant with what a step of one text takes under it with each number of rows up to those of all drafts, after
    as many cells as its tier expects; unchanged where it has no drafts. spec: the whole model."""
    drafting, said = variant.workload.drafting, variant.speculation
    if said is None or not drafting.drafts:
        return variant
    specs = cut_ranks(under_plan(spec, variant), variant.split)
    predictor, mode = Predictor(specs, profile, variant), variant.workload.split_mode
    past = next(load.past for load in tier_loads(variant.workload) if load.tokens == drafting.rows)
    steps = (Batch.even(rows, 1, past, VERIFY if rows > 1 else "") for rows in range(1, drafting.rows + 1))
    rows = tuple(join_seconds(mode, [predictor.rank_seconds(step)]) for step in steps)
    return replace(variant, speculation=replace(said, rows=rows))
