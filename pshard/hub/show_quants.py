"""The quantisations of a repository as a table for people."""

from collections.abc import Sequence

from pshard.hub.compare_quants import QuantOutlook, choose_quant
from pshard.print_table import print_whole


def print_quants(repo: str, asked: str, outlooks: Sequence[QuantOutlook], terms: str) -> None:
    """One row a quantisation, which one we would take, and how to fetch it. `asked`: the one that was named."""
    from rich.console import Console
    from rich.table import Table

    out = Console()
    columns = ("", "file GiB", "bits", "prompt tok/s", "first token s", "decode tok/s", "VRAM MiB", "host MiB")
    table = Table(title=f"What {repo} offers, predicted for this machine: {terms}", title_justify="left", box=None)
    for i, heading in enumerate(columns):
        table.add_column(heading, justify="right" if i else "left")
    for o in outlooks:
        name = f"{o.label} (asked for)" if o.label == asked else o.label
        size = f"{o.nbytes / 2**30:.2f}"
        if o.why_not:
            table.add_row(name, size, *("-",) * (len(columns) - 2))
            continue
        rates = (f"{o.prompt_rate:.4g}", f"{o.first_token:.3g}", f"{o.decode_rate:.4g}")
        table.add_row(name, size, f"{o.bits:.1f}", *rates, str(o.vram_mib), str(o.host_mib))
    print_whole(table, out)
    for o in outlooks:
        if o.why_not:
            out.print(f"{o.label} does not run here: {o.why_not}", highlight=False, soft_wrap=True, markup=False)
    chosen, why = choose_quant(outlooks)
    if chosen is None:
        out.print(f"We would take none: {why}.", highlight=False, soft_wrap=True)
        return
    advice = f"We would take {chosen.label}: {why}. Fetch and run it: pshard run {repo}:{chosen.label}"
    out.print(advice, highlight=False, soft_wrap=True, markup=False)
