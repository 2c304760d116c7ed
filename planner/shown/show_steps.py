"""Tables of `pshard-plan --steps` and `--why`."""

from math import ceil
from typing import TYPE_CHECKING

from pshard.plan import Placement
from pshard.planner.other_places import OtherPlace, WhyThere
from pshard.planner.shown.machine_words import Words
from pshard.planner.time_steps import TimedSteps
from pshard.print_table import new_table, print_whole
from pshard.workload import MIB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console


STATES = {"vram": "VRAM", "host": "host memory"}


def print_steps(timed: "Sequence[TimedSteps]", out: "Console", words: Words) -> None:
    """The steps of a tier on each rank, in the order of issue."""
    for sheet in timed:
        rank = f", rank {sheet.rank}" if len(timed) > 1 else ""
        title = (
            f"Steps of {sheet.tokens} token{'s' * (sheet.tokens > 1)}{rank}, simulated: {1e3 * sheet.seconds:.4g} ms"
        )
        table = new_table(
            title, ("step", "of", "from", "MiB", "lane", "start ms", "end ms"), ("step", "of", "from", "lane")
        )
        for step in sheet.steps:
            times = [f"{1e3 * t:.3f}" if t is not None else "" for t in (step.start, step.end)]
            size = f"{step.nbytes / MIB:.2f}" if step.nbytes else ""
            lane = words.lanes.get(step.lane, step.lane) if step.lane else ""
            table.add_row(step.step, step.what, step.source, size, lane, *times)
        out.print()
        print_whole(table, out)


def print_why(found: "Sequence[WhyThere]", out: "Console", words: Words) -> None:
    """Each unit's place in each tier beside the next best one. more MiB: that this takes of VRAM."""
    title = "Where else: the tier with only this unit elsewhere"
    columns = ("unit", "tokens", "is", "ms", "next best place", "ms there", "more MiB", "faster, without room")
    table = new_table(title, columns, ("unit", "is", "next best place", "faster, without room"))

    def name(place: Placement) -> str:
        return words.say(_name(place))

    for why in found:
        best = why.next_best
        told = (name(best.place), _beside(best, why), f"{best.arena / MIB:+.0f}") if best else ("none fits", "", "")
        larger = why.too_large
        lacks = f"{name(larger.place)}: {_beside(larger, why)}, lacks {ceil(larger.lacks / MIB)} MiB" if larger else ""
        table.add_row(why.unit, str(why.tokens), name(why.place), f"{1e3 * why.seconds:.4g}", *told, lacks)
    out.print()
    print_whole(table, out)


def _beside(other: OtherPlace, why: WhyThere) -> str:
    """Its time and how much more that is."""
    return f"{1e3 * other.seconds:.4g} ({other.seconds / why.seconds - 1:+.1%})"


def _name(place: Placement) -> str:
    """A placement in a few words."""
    text = f"{place.where}, {place.share.in_words}" if place.share else place.where
    return f"{text}, state in {STATES[place.kv]}" if place.kv else text
