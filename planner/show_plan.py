"""A plan as tables for people."""

from collections import Counter
from typing import TYPE_CHECKING

from pshard.collectives import describe_sums
from pshard.homes import DIVIDED, ON_CPU, PINNED, STREAMED, list_sorts
from pshard.plan import Placement, RankPlan, TierPlan, Trial, Variant
from pshard.planner.explain import WhatIf
from pshard.planner.published.strategies import IMPROVED
from pshard.planner.serving.show_promise import show_rate
from pshard.planner.shown.machine_words import WITH_GPU, Words
from pshard.planner.tier_alone import NOTABLE, TierAlone
from pshard.print_table import count_mib, new_table, print_whole
from pshard.routing.expert_map import ExpertMap, LayerExperts, Slots, TierExperts, group_layers
from pshard.times.outlook import Outlook
from pshard.units.moe.expert_cache import DEMAND

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.table import Table

LETTERS = {PINNED: "P", STREAMED: "s", ON_CPU: "c", DIVIDED: "x"}
WHERE_EXPERTS = ("in VRAM", STREAMED, "read over the link", "on the CPU", "from disk")  # as expert_map.PLACES


def print_variant(variant: Variant, out: "Console", words: Words = WITH_GPU) -> None:
    """One table per rank: counts, time, what binds, memory, solver. words: what things are called on the machine."""
    for rank in variant.ranks:
        for table in (_time_table(variant, rank, words), _memory_table(variant, rank, words)):
            out.print()
            print_whole(table, out)
    out.print()
    if not variant.plan_needed:
        text = f"Everything is in {words.arena}{variant.but_for}: no plan is needed, and all tiers are alike."
        out.print(text, highlight=False, soft_wrap=True)
    w = variant.workload
    if w.split_mode == "tensor":
        out.print(f"Ranks' parts are summed in {describe_sums(w.reduce_dtype)}.", highlight=False, soft_wrap=True)
    if variant.considered:
        print_whole(_ways_table(variant), out)
        out.print()


def _ways_table(variant: Variant) -> "Table":
    """What the plan was chosen from, itself first."""
    columns = ("way", "round s", "more", "first token s", "tok/s", "why")
    table = new_table("Ways to use the devices that were predicted, the chosen one first", columns)
    decoded = variant.workload.answer_tokens
    for way in variant.considered:
        if way.seconds is None or way.first_token is None:
            table.add_row(way.way, "-", "", "", "", "does not fit")
            continue
        more = way.seconds / (variant.considered[0].seconds or way.seconds) - 1
        pace = decoded / (way.seconds - variant.workload.rounds_of_prompts * way.first_token)
        table.add_row(way.way, f"{way.seconds:.4g}", f"{more:+.1%}", f"{way.first_token:.3g}", show_rate(pace), way.why)
    return table


def _time_table(variant: Variant, rank: RankPlan, words: Words) -> "Table":
    """What each tier does and how long it takes."""
    share = f", rank {rank.rank} ({rank.share:.0%} of the model)" if len(variant.ranks) > 1 else ""
    solve = rank.tiers[0].solve
    w = variant.workload
    users = f" for {w.sequences} sequences" if w.sequences > 1 else ""
    title = f"{rank.budget_mib} MiB{share}, context {w.context}{users}; "
    title += f"{words.say(solve.strategy)}: {solve.status}"
    if solve.solver:
        spent = sum(t.solve.seconds for t in rank.tiers)
        title += f" ({solve.solver}, {spent:.2f} s)"
    sorts = list_sorts({place.sort for tier in rank.tiers for place in tier.placements})
    table = new_table(title, ("tokens", *sorts, "KV", "ms", "bound", "tok/s", "binds"))
    for tier in rank.tiers:
        count = {w: sum(p.sort == w for p in tier.placements) for w in sorts}
        layers = sum(p.kv is not None for p in tier.placements)
        in_vram = sum(p.has_state_in_vram for p in tier.placements)
        p = tier.prediction
        table.add_row(
            str(tier.tokens), *(str(n) for n in count.values()), f"{in_vram}/{layers}", show_rate(p.seconds * 1e3),
            show_rate(p.bound_seconds * 1e3), show_rate(tier.tokens / p.seconds), words.lanes.get(p.binds, p.binds),
        )  # fmt: skip
    return table


def _memory_table(variant: Variant, rank: RankPlan, words: Words) -> "Table":
    """What the arena holds in each tier, and what of the budget is kept for others, in MiB: in use, what is kept and
    what is left are the budget."""
    cached = ("following",) if rank.caches else ()
    kept = {"reserve": rank.reserve_mib} if words.has_gpu else {}
    kept |= {"drafter": variant.workload.drafter_mib} if variant.drafter_on(rank.rank) else {}
    columns = ("tokens", "pinned", *cached, "scratch", "slots", "KV", "in use", *kept, "left")
    title = "MiB of the budget" + "; following: experts that follow use" * bool(cached)
    table = new_table(title, columns)
    for tier in rank.tiers:
        b = tier.buffers
        slots = f"{b.slots} x {count_mib(b.slot_bytes)}" if b.slots else "0"
        sizes = [count_mib(n) for n in (b.pinned, *((b.cached,) if cached else ()), b.scratch)]
        used = count_mib(b.total)
        ends = (count_mib(b.kv), used, *kept.values(), rank.budget_mib - used - sum(kept.values()))
        table.add_row(str(tier.tokens), *map(str, sizes), slots, *map(str, ends))
    return table


def print_trials(trials: "Sequence[Trial]", out: "Console", words: Words = WITH_GPU) -> None:
    """Measured beside predicted time of every tier that was run, one row per plan and tier; the first was chosen."""
    if not trials:
        return
    fitted = any(t.refitted is not t.variant for t in trials)
    columns = ("plan", "tokens", "predicted", "measured", "off", *(["refitted"] if fitted else []), "round s")
    table = new_table("Plans that were run (ms), the chosen one first", columns)
    for trial in trials:
        name, total = words.say(trial.name), f"{trial.seconds:.4g}"
        for tier, again in zip(trial.variant.ranks[0].tiers, trial.refitted.ranks[0].tiers):
            p = tier.prediction
            if p.measured_seconds is None:
                continue
            cells = [f"{s * 1e3:.2f}" for s in (p.seconds, p.measured_seconds)]
            cells.append(f"{p.seconds / p.measured_seconds - 1:+.0%}")
            cells += [f"{again.prediction.seconds * 1e3:.2f}"] if fitted else []
            table.add_row(name, str(tier.tokens), *cells, total)
            name = total = ""
    out.print()
    print_whole(table, out)


def print_explanation(
    variant: Variant,
    gains: tuple[WhatIf, ...],
    alone: tuple[TierAlone, ...],
    out: "Console",
    maps: tuple[ExpertMap, ...] = (),
    words: Words = WITH_GPU,
) -> None:
    """Units of every tier, layer by layer, with the places of routed experts by the `maps` of the ranks that have some,
    then what binds each tier, what a better machine would bring, and why a tier is slower than it could be."""
    of_rank = {each.rank: each for each in maps}
    for rank in variant.ranks:
        far = "".join(f", {home.name[0]} on {home}" for home in {*rank.beyond_host.values()})
        out.print(
            f"\nUnits of rank {rank.rank} by layer: P pinned, s streamed, c cpu, x divided{far}; "
            f"KV: V in {words.arena}, h on the host",
            highlight=False,
            soft_wrap=True,
        )
        own = of_rank.get(rank.rank)
        for i, tier in enumerate(rank.tiers):
            out.print(f"  tier {tier.tokens}", highlight=False)
            lines = _rows(tier)
            lines += [("divided", way) for way in _describe_divided(tier, own.units if own else ())]
            lines += _describe_experts(own.tiers[i], own) if own else []
            for label, text in lines:
                out.print(f"    {label:10} {words.say(text)}", highlight=False, soft_wrap=True)
    out.print()
    for i, tier in enumerate(variant.ranks[0].tiers):
        slowest = max((r.tiers[i] for r in variant.ranks), key=lambda t: t.prediction.seconds)
        whole = slowest.prediction.seconds
        busy = ", ".join(f"{words.lanes.get(lane, lane)} {s / whole:.0%}" for lane, s in slowest.prediction.busy if s)
        worth = "; ".join(
            f"{gain.change}: {_show_gain(dict(gain.speedups)[tier.tokens])}"
            for gain in gains
            if tier.tokens in dict(gain.speedups)
        )
        text = f"tier {tier.tokens}: {words.binds[slowest.prediction.binds]} (busy: {busy})"
        out.print(text + (f"; {worth}" if worth else ""), highlight=False, soft_wrap=True)
    if gains:
        worth = "; ".join(f"{gain.change}: {_show_gain(gain.of_round)}{_show_pace(gain)}" for gain in gains)
        text = f"a round of prompts and answers, which plans minimise: {worth}; a tier may lose where the round gains"
        out.print(text, highlight=False, soft_wrap=True)
    for tier_alone in alone:
        if tier_alone.over > NOTABLE:
            text = f"tier {tier_alone.tokens} shares {words.arena} with the other tiers: {tier_alone.in_words()}"
            out.print(text, highlight=False, soft_wrap=True)


def _show_gain(speedup: float) -> str:
    """How much faster, or slower, in percent."""
    return f"{round(speedup - 1, 2) + 0.0:+.0%}"  # -0.0 + 0.0 is 0.0


def _show_pace(gain: WhatIf) -> str:
    """The rate of answers, where it was planned."""
    return f", {show_rate(gain.decode_rate)} tok/s" if gain.decode_rate else ""


def print_outlook(outlook: Outlook, out: "Console", strategy: str = "") -> None:
    """The plan and the published strategies, by prediction. strategy: that the plan's solve names, which is said of an
    improved one: it has other figures than the strategy's own row."""
    title = f"\nThis plan beside published strategies, predicted, not run, on {outlook.machine}"
    out.print(title, highlight=False, soft_wrap=True)
    table = new_table("", ("plan", "first token s", "tok/s", "round s", "more"))
    own, *others = outlook.forecasts
    own_name = f"this plan, {strategy}" if strategy.startswith(IMPROVED) else "this plan"
    for name, each in ((own_name, own), *((other.strategy, other) for other in others)):
        more = each.round_seconds / own.round_seconds - 1
        table.add_row(
            name, f"{each.first_token:.3g}", show_rate(each.rate), f"{each.round_seconds:.4g}", f"{more:+.1%}"
        )
    print_whole(table, out)
    for other in outlook.left_out:
        which = "" if repr(other.strategy) in other.why else f"strategy {other.strategy!r}: "
        out.print(f"  left out: {which}{other.why}", highlight=False, soft_wrap=True, markup=False)


def _rows(tier: TierPlan) -> list[tuple[str, str]]:
    """Letters of the tier's units: a row for each kind in the layers, one for the states, one for each other unit."""
    kinds: dict[str, list[Placement]] = {}
    for place in tier.placements:
        kinds.setdefault(_kind_of(place.unit), []).append(place)
    rows, others = list[tuple[str, str]](), list[tuple[str, str]]()
    for kind, places in kinds.items():
        letters = "".join(LETTERS.get(p.sort, p.sort[0]) for p in places)
        (rows if "." in places[0].unit else others).append((kind, letters))
        if places[0].kv is not None:
            rows.append(("KV", "".join("V" if p.has_state_in_vram else "h" for p in places)))
    return rows + others


def _kind_of(unit: str) -> str:
    """ "blk.3.ffn" and "ffn.3" are of one kind with "ffn.4"; units outside layers are called as their kind."""
    return next(part for part in unit.removeprefix("blk.").split(".") if not part.isdigit())


def _describe_experts(tier: TierExperts, of: ExpertMap) -> list[tuple[str, str]]:
    """Lines about where experts are, layers with the same together, and what a token takes from where."""
    lines = [
        ("experts", f"layer{'s' * (not layers.isdigit())} {layers}: {_count_experts(each)}")
        for layers, each in group_layers(tier.layers)
    ]
    takes = ", ".join(f"{of.used * s:.2g} {where}" for s, where in zip(tier.served, WHERE_EXPERTS) if s)
    if tier.found:
        takes = f"{of.used * tier.found:.2g} in slots, {takes}"
        lines += [("slots", _describe_slots(slots)) for slots in of.slots]
    link = f"{tier.link_nbytes / tier.tokens / 1e6:.3g} MB"
    return [*lines, ("a token", f"of its {of.used} experts in a layer {takes}; {link} over the link")]


def _describe_slots(slots: Slots) -> str:
    if slots.policy == DEMAND:
        likely = f" if all are used alike, {slots.likely:.0%} are likely" if slots.likely is not None else ""
        return (
            f"{slots.count} in host memory for experts of {slots.layers} layers on disk, the longest unused goes; "
            f"{slots.found:.0%} of their choices are expected there{likely}; {slots.admitted:.2g} experts, "
            f"{slots.nbytes / 1e6:.3g} MB, are read for each token"
        )
    stays = "the least used of late goes" if slots.policy == "frequency" else "the longest unused goes"
    return (
        f"{slots.count} in VRAM for experts of {slots.layers} layers, {stays}; {slots.found:.0%} of their choices are "
        f"expected there; {slots.admitted:.2g} experts, {slots.nbytes / 1e6:.3g} MB, are brought in for each token, at "
        f"most {slots.admits}"
    )


def _count_experts(layer: LayerExperts) -> str:
    there = [f"{n} {where}" for n, where in zip(layer.counts, WHERE_EXPERTS) if n]
    if layer.pinned and layer.hits is not None:
        there[0] += f" for {layer.hits:.0%} of the choices"
    return ", ".join(there)


def _describe_divided(tier: TierPlan, experts: "Sequence[str]") -> list[str]:
    """How units are divided that are no experts, one line for each way."""
    divided = [p for p in tier.placements if p.share and p.unit not in experts]
    ways = Counter((p.where, *p.share) for p in divided if p.cpu_rows and not p.kept_parts)
    lines = [
        f"{n} FFN{'s' * (n > 1)}: {rows} rows of gate and up on the CPU, the accelerator's part {where}"
        for (where, rows, _), n in sorted(ways.items())
    ]
    kept = Counter(p.share for p in divided if p.kept_parts)
    return lines + [
        f"{n} unit{'s' * (n > 1)}: {f'{share.cpu} parts on the CPU, ' if share.cpu else ''}the first {share.kept} "
        f"{'parts' if share.cpu else 'rows or parts'} in VRAM, the others streamed"
        for share, n in sorted(kept.items())
    ]
