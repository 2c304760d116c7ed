"""How large a server is planned for a load: texts at once, and KV cells for them."""

from dataclasses import dataclass

from pshard.errors import UserError
from pshard.quant import align
from pshard.times.running_requests import covered_requests, suggest_slots
from pshard.units.kv_cells import KV_BLOCK
from pshard.workload import Workload


@dataclass(frozen=True)
class LoadSizes:
    """KV cells of all texts, texts at once, and expected lengths of each."""

    context: int
    sequences: int
    prompt: int
    generated: int


def size_load(
    concurrency: int,
    longest: int | None,
    sequences: int | None = None,
    context: int | None = None,
    prompt: int | None = None,
    generated: int | None = None,
) -> LoadSizes:
    """Sizes for `concurrency` requests on average; what is None is chosen.

    longest: tokens that the model's text can have, where that is known. By itself the cache holds whole blocks for as
    many requests of the expected lengths as run nearly always at most, and one long text; no beginning is assumed to be
    shared. Raises UserError for sizes that do not go together.
    """
    slots = sequences or suggest_slots(concurrency)
    check_slots(slots, concurrency)
    most = min(n for n in (longest, context, 1 << 62) if n)
    asks = prompt or max(1, min(Workload.prompt, most // 2))
    answers = generated or max(1, min(Workload.generated, most - asks))
    if longest and asks + answers > longest:
        raise UserError(
            f"--prompt {asks} and --generated {answers} are more than the model's context of {longest}; give less"
        )
    if context and asks + answers > context:
        raise UserError(
            f"--prompt {asks} and --generated {answers} do not fit the context of {context}; give -c {asks + answers}"
        )
    cells = min(slots, covered_requests(concurrency)) * align(asks + answers, KV_BLOCK)
    context = context or max(cells, min(Workload.context, longest or Workload.context))
    check_cells(context, slots)
    return LoadSizes(context, slots, asks, answers)


def check_slots(slots: int, concurrency: int) -> None:
    """Raise UserError for fewer texts at once than run on average."""
    if slots < concurrency:
        raise UserError(f"-np {slots} texts at once are fewer than --concurrency {concurrency}; give -np {concurrency}")


def check_cells(context: int, sequences: int, each: int = 1) -> None:
    """Raise UserError for a context that has not so many cells for each text."""
    if context < each * sequences:
        raise UserError(
            f"-c {context} is too little for -np {sequences} texts at once; give a smaller -np, or "
            f"-c {each * sequences} or more"
        )
