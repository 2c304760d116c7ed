"""The quantisations of a repository as a table for people, whose rows come as they are planned."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

from pshard.hub.compare_quants import QuantOutlook, choose_quant
from pshard.hub.repository import HubModel

Waiting = Callable[[str], AbstractContextManager[None]]  # told what is waited for
COLUMNS = ("file GiB", "bits", "prompt tok/s", "first token s", "decode tok/s", "budget MiB", "host MiB")


def print_quants(
    offered: tuple[str, str], models: Sequence[HubModel], outlooks: Iterator[QuantOutlook], terms: str, wait: Waiting
) -> None:
    """One row a quantisation as soon as it is known, then which one we would take, and how to fetch it.

    offered: the repository, and the quantisation that was asked for. outlooks: one for each model. wait: what is around
    the wait for each of them.
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
    chosen, why = choose_quant(found)
    if chosen is None:
        out.print(f"We would take none: {why}.")
        return
    out.print(f"We would take {chosen.label}: {why}. Fetch and run it: pshard run {repo}:{chosen.label}")


def _cells(o: QuantOutlook) -> tuple[str, ...]:
    size = f"{o.nbytes / 2**30:.2f}"
    if o.why_not:
        return (size, *("-",) * (len(COLUMNS) - 1))
    rates = (f"{o.prompt_rate:.4g}", f"{o.first_token:.3g}", f"{o.decode_rate:.4g}")
    return size, f"{o.bits:.1f}", *rates, str(o.vram_mib), str(o.host_mib)
