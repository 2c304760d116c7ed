"""Hit rates and places of experts as text for people."""

from typing import TYPE_CHECKING

from pshard.cuts.rank_parts import cut_ranks
from pshard.model import ModelSpec
from pshard.plan import Variant
from pshard.planner.routing.expert_places import ExpertPlaces, list_expert_places
from pshard.print_table import print_whole
from pshard.routing.order_experts import order_experts
from pshard.routing.replay import Replay

if TYPE_CHECKING:
    from rich.console import Console


def print_replay(replay: Replay, out: "Console") -> None:
    """One row for each policy, with its hit rate at each size."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    title = f"Choices that find their expert in VRAM, by replay of {replay.tokens} tokens"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1))
    table.add_column("experts of each layer in VRAM", no_wrap=True)
    for places in replay.places:
        table.add_column(f"{places} of {replay.experts}", justify="right", no_wrap=True)
    for policy in replay.policies:
        table.add_row(policy.policy, *(f"{share:.1%}" for share in policy.shares))
    print_whole(table, out)


def print_expert_places(spec: ModelSpec, variant: Variant, out: "Console") -> None:
    """By tier how many experts of a layer are where, and the share of choices that they are expected to serve."""
    known = f"a record of {variant.popularity.tokens} tokens" if variant.popularity else "all chosen alike"
    parts = cut_ranks(order_experts(spec, variant.popularity), variant.split)
    for part, rank in zip(parts, variant.ranks):
        title = f"\nExperts of rank {rank.rank} by layer, and the share of choices that each place serves ({known})"
        out.print(title, highlight=False, soft_wrap=True)
        for tier in rank.tiers:
            for found in list_expert_places(part, tier):
                out.print(f"  tier {tier.tokens:<6} {describe_places(found)}", highlight=False, soft_wrap=True)


def describe_places(found: ExpertPlaces) -> str:
    """As "20 layers: 48 in VRAM (61%), 80 on the CPU (39%)"."""
    names = ("in VRAM", "over the link", "on the CPU")
    there = [f"{n} {name} ({share:.0%})" for n, name, share in zip(found.counts, names, found.shares) if n]
    return f"{found.layers} layer{'s' * (found.layers > 1)}: {', '.join(there)}"
