"""What each quantisation of a repository would do on this machine, by the planner and before anything is fetched."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pshard.errors import UserError
from pshard.homes import DISK
from pshard.hub.fetch_headers import Headers
from pshard.hub.repository import HubModel
from pshard.machine import MachineProfile
from pshard.model import ModelSpec
from pshard.on_host import list_beyond, list_on_host
from pshard.plan import Variant
from pshard.predicted_times import decode_rate, first_token_seconds
from pshard.workload import MIB, Workload

if TYPE_CHECKING:
    from pshard.models import ModelFile

READING_PACE = 10.0  # tokens per second: faster than people read
FEWEST_BITS, MOST_BITS = 4.0, 9.0  # a weight: below, answers get worse; above, nobody tells the difference
QUICK_SECONDS = 2.0  # of the solver, for one quantisation


@dataclass(frozen=True)
class QuantOutlook:
    """One quantisation here. bits: of the file, a weight. prompt_rate, decode_rate: predicted tokens per second;
    first_token: seconds for the expected prompt. vram_mib: what the plan takes of the budget; host_mib: weights that
    stay in host memory; disk_mib: on disk. why_not: why it cannot run here; the figures are then 0."""

    label: str
    nbytes: int
    bits: float = 0.0
    prompt_rate: float = 0.0
    first_token: float = 0.0
    decode_rate: float = 0.0
    vram_mib: int = 0
    host_mib: int = 0
    disk_mib: int = 0
    why_not: str = ""


def compare_quants(
    models: Sequence[HubModel],
    headers: Headers,
    ask: Callable[["ModelFile"], tuple[MachineProfile, Workload]],
    known: Mapping[str, Variant],
) -> Iterator[QuantOutlook]:
    """An outlook for each model, one after another. `ask`: the machine, and what is planned for. `known`: plans that
    were made already, by label; the others are planned quickly, without refining unit by unit."""
    from pshard.models import open_model

    for model in models:
        header = headers[model.label]
        try:
            if isinstance(header, UserError):
                raise header
            with open_model(header) as file:
                machine = ask(file) if model.label not in known else None
                spec = file.spec
            variant = _plan_quickly(spec, *machine) if machine else known[model.label]
        except UserError as error:
            yield QuantOutlook(model.label, model.nbytes, why_not=_strip_paths(str(error), header))
            continue
        yield describe_quant(model, spec, variant)


def _plan_quickly(spec: ModelSpec, profile: MachineProfile, workload: Workload) -> Variant:
    from pshard.planner.make_plan import plan_roughly
    from pshard.planner.routing.plan_disk_slots import lives_on_disk, plan_disk_slots

    variant = plan_roughly(spec, profile, workload, QUICK_SECONDS).variant
    return plan_disk_slots(spec, profile, workload, variant, None) if lives_on_disk(spec, variant) else variant


def describe_quant(model: HubModel, spec: ModelSpec, variant: Variant) -> QuantOutlook:
    """What a plan promises of a model."""
    work, first = variant.workload, first_token_seconds(variant)
    kept = [sum(portion.nbytes for portion in list_on_host(spec, rank)) for rank in variant.ranks]
    return QuantOutlook(
        model.label,
        model.nbytes,
        8 * model.nbytes / spec.count_weights().total(),
        work.prompt_tokens / first,
        first,
        decode_rate(variant),
        sum(max(t.buffers.total for t in rank.tiers) for rank in variant.ranks) // MIB,
        host_mib=max(kept) // MIB,
        disk_mib=sum(portion.nbytes for portion in list_beyond(spec, variant.ranks[0], DISK)) // MIB,
    )


def choose_quant(outlooks: Sequence[QuantOutlook]) -> tuple[QuantOutlook | None, str]:
    """The one that we would take, and why: of those of FEWEST_BITS or more that write at a reader's pace the one of
    most bits up to MOST_BITS, or where all have more the one of the fewest; where none does, the fastest of these; else
    the fastest. None where none runs."""
    running = [o for o in outlooks if not o.why_not]
    good = [o for o in running if o.bits >= FEWEST_BITS]
    brisk = [o for o in good if o.decode_rate >= READING_PACE]
    usual = [o for o in brisk if o.bits <= MOST_BITS]
    those = f"bits a weight of those that write {READING_PACE:.0f} tokens/s or more"
    if usual:
        return max(usual, key=lambda o: (o.bits, o.decode_rate)), f"it has the most {those}, up to {MOST_BITS:.0f}"
    if brisk:
        return min(
            brisk, key=lambda o: (o.bits, -o.decode_rate)
        ), f"it has the fewest {those}, all above {MOST_BITS:.0f}"
    if good:
        why = f"none of {FEWEST_BITS:.0f} bits a weight or more writes {READING_PACE:.0f} tokens/s; it is the fastest"
        return max(good, key=lambda o: o.decode_rate), why
    if running:
        return max(running, key=lambda o: o.decode_rate), "it is the fastest of those that run here"
    return None, "none of them runs here"


def _strip_paths(message: str, header: Path | UserError) -> str:
    """An error of a header's copy, without where the copy lies."""
    if isinstance(header, UserError):
        return message
    folder = header if header.is_dir() else header.parent
    return message.replace(f"{folder}/", "").removeprefix(f"{folder}: ").removeprefix(f"{header.name}: ")
