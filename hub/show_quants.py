"""The quantisations of a repository as a table for people, whose rows come as they are planned."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

from pshard.hub.compare_quants import QuantOutlook, choose_quant
from pshard.hub.repository import HubModel

Waiting = Callable[[str], AbstractContextManager[None]]  # told what is waited for
QUALITY = (
    "Quality by bits a weight, as a rule: from 6 on nobody tells it from the original; 4 to 6 cost little; 3 to 4 show "
    "in long answers; below 3 answers get worse, of small models first. IQ types lose less than others of their bits."
)
COLUMNS = ("file GiB", "bits", "prompt tok/s", "first token s", "decode tok/s", "budget MiB", "host MiB", "disk MiB")


def print_quants(
    offered: tuple[str, str],
    models: Sequence[HubModel],
    outlooks: Iterator[QuantOutlook],
    terms: str,
    wait: Waiting,
    advise: Callable[[str], str] | None = None,
) -> None:
    """One row a quantisation as soon as it is known, what bits do to quality, then which one we would take.

    offered: the repository or folder, and the quantisation that was asked for. outlooks: one for each model. wait: what
    is around the wait for each of them. advise: what to do with a model by its label; without it, to fetch and run it.
    """
    from rich.console import Console

    (repo, asked), found = offered, list[QuantOutlook]()
    out = Console(soft_wrap=True, highlight=False, markup=False)
    names = {m.label: f"{m.label} (asked for)" if m.label == asked else m.label for m in models}
    width = max(map(len, names.values()))
    out.print(f"What {repo} offers, predicted for this machine: {terms}", style="italic")
    out.print(" " * width + "".join(f"  {heading}" for heading in COLUMNS), style="bold")
    for i, model in enumerate(models, 1):
        with wait(f"planning {model.label}, {i} of {len(models)}"):  # gone before the row is printed
            found.append(next(outlooks))
        cells = (f"  {cell:>{len(heading)}}" for cell, heading in zip(_cells(found[-1]), COLUMNS))
        out.print(f"{names[model.label]:<{width}}" + "".join(cells))
    for o in found:
        if o.why_not:
            out.print(f"{o.label} does not run here: {o.why_not}")
    if any(not o.why_not for o in found):
        out.print(QUALITY)
    chosen, why = choose_quant(found)
    if chosen is None:
        out.print(f"We would take none: {why}.")
        return
    what = advise(chosen.label) if advise else f"Fetch and run it: pshard run {repo}:{chosen.label}"
    out.print(f"We would take {chosen.label}: {why}. {what}")


def _cells(o: QuantOutlook) -> tuple[str, ...]:
    size = f"{o.nbytes / 2**30:.2f}"
    if o.why_not:
        return (size, *("-",) * (len(COLUMNS) - 1))
    rates = (f"{o.prompt_rate:.4g}", f"{o.first_token:.3g}", f"{o.decode_rate:.4g}")
    return size, f"{o.bits:.1f}", *rates, str(o.vram_mib), str(o.host_mib), str(o.disk_mib)
