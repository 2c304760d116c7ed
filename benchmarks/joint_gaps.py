"""How far plans are from the best for all tiers at once: `python benchmarks/joint_gaps.py [cases]`. Prints JSON.

Random models of one to four layers on random machines, decoding and prompts, budgets that do not hold the model. The
oracle (joint_oracle.py) enumerates every placement of every tier and every combination of tiers; it shares no code with
the planner, and times the plan itself too. Cases with more placements than MOST are left out and counted.
"""

import json
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from random import Random

from joint_oracle import Residency, Switch, Tier, Way, joint_optimum, time_tier

from pshard.buffers import row_stage_bytes
from pshard.model import ModelSpec
from pshard.model_config import ModelConfig, Rope
from pshard.plan import Placement, TierPlan
from pshard.planner.make_plan import plan_variant
from pshard.planner.prepare_ranks import prepare_ranks
from pshard.planner.price.datasheet import Rates, profile_from_datasheet
from pshard.planner.price.tier_costs import TierCosts
from pshard.planner.rank_task import RankTask
from pshard.reserve import TORCH_RESERVE_MIB
from pshard.tensor import TensorSpec
from pshard.units.attention import ATTENTION
from pshard.units.divide_unit import count_shares, divide_unit, joined_width
from pshard.units.embedding import EMBEDDING
from pshard.units.ffn import FFN
from pshard.units.output import OUTPUT
from pshard.units.share import WHOLE, Share
from pshard.units.unit import Unit
from pshard.workload import Workload

MOST = 20_000  # timed placements of a tier, about a second
LAYERS = (1, 2, 1, 2, 3, 2, 2, 1, 1, 2, 1, 2, 1, 2, 2, 4)  # of every sixteen cases; few of four can be enumerated
SMALL = 64  # tokens up to which the CPU may have rows of an FFN
WITHIN = 0.01


def random_case(seed: int) -> tuple[ModelSpec, Rates, Workload]:
    """One to four layers; a laptop to a server; a budget between a few units and nearly all of them."""
    rng = Random(f"joint {seed}")

    def between(low: float, high: float) -> float:
        return low * (high / low) ** rng.random()

    layers = LAYERS[seed % len(LAYERS)]
    spec = _make_model(
        layers, 256 * rng.randint(4, 16), rng.choice((512, 4096, 16384)), rng.choice((1, 2, 8)), rng.random() < 0.5
    )
    rates = Rates(
        link=between(4e9, 60e9),
        acc_memory=between(80e9, 1e12),
        acc_flops=between(1e13, 3e14),
        host_memory=between(15e9, 100e9),
        host_flops=between(2e11, 2e12),
        handoff_seconds=between(5e-6, 1e-4),
    )
    context, most = rng.choice((512, 2048)), rng.choice((16, 16, 128))
    arena_mib = 4 + rng.randint(0, max(1, int(0.9 * spec.packed_nbytes) >> 20))
    generated = rng.choice((4, 32, context // 16))
    workload = Workload((TORCH_RESERVE_MIB + arena_mib,), context, max_ubatch=most, prompt=context // 2,
                        generated=generated)  # fmt: skip
    return spec, rates, workload


def _make_model(layers: int, d_ffn: int, vocab: int, kv_heads: int, odd: bool) -> ModelSpec:
    """A dense decoder of 1024 in Q4_0; with `odd`, every other layer's FFN is Q6_K."""
    d, config = 1024, ModelConfig(
        "qwen3", layers, 1024, 8, kv_heads, 128, d_ffn, vocab, 1e-6, 32768, Rope(128, 1e6, "halves")
    )  # fmt: skip
    units = [Unit("embedding", EMBEDDING, -1, (TensorSpec("token_embd.weight", "Q4_0", (vocab, d)),))]
    for i in range(layers):
        kv = kv_heads * 128
        shapes = {"attn_q": (1024, d), "attn_k": (kv, d), "attn_v": (kv, d), "attn_output": (d, 1024)}
        norm = TensorSpec(f"blk.{i}.attn_norm.weight", "F32", (d,))
        named = (TensorSpec(f"blk.{i}.{n}.weight", "Q4_0", shape) for n, shape in shapes.items())
        units.append(Unit(f"attention.{i}", ATTENTION, i, (norm, *named)))
        shapes = {"ffn_gate": (d_ffn, d), "ffn_up": (d_ffn, d), "ffn_down": (d, d_ffn)}
        qtype = "Q6_K" if odd and i % 2 else "Q4_0"
        norm = TensorSpec(f"blk.{i}.ffn_norm.weight", "F32", (d,))
        named = (TensorSpec(f"blk.{i}.{n}.weight", qtype, shape) for n, shape in shapes.items())
        units.append(Unit(f"ffn.{i}", FFN, i, (norm, *named)))
    head = (TensorSpec("output_norm.weight", "F32", (d,)), TensorSpec("output.weight", "Q6_K", (vocab, d)))
    return ModelSpec("made", "", config, (*units, Unit("output", OUTPUT, -1, head)))


Bits = dict[tuple[str, int], int]  # (unit, rows of it in VRAM; 0: all) -> number of its bit


def number_bits(task: RankTask) -> Bits:
    """A bit for every unit as a whole, and for each number of rows of it that the arena may have instead."""
    held = [(u.name, 0) for u in task.room.spec.units]
    for unit, shares in _shares(task):
        held += [(unit.name, count_shares(unit) - share.cpu) for share in shares]
    return {what: i for i, what in enumerate(held)}


def _shares(task: RankTask) -> list[tuple[Unit, tuple[Share, ...]]]:
    return [(u, cls.shares) for cls in task.classes for u in cls.units]


def make_switch(task: RankTask, bits: Bits) -> Switch:
    """What moving each thing costs."""
    units, cost = task.room.spec.units, task.costs[0]
    sizes = {u.name: u for u in units}
    pins = [
        (divide_unit(sizes[name], Share(kept=rows)).kept.nbytes if rows else sizes[name].packed_nbytes)  # type: ignore[union-attr]
        / cost.tables.link_rate
        for name, rows in bits
    ]
    return Switch(tuple(pins), tuple(cost.units[u.name].kv_fetch for u in units))


def list_ways(unit: Unit, shares: tuple[Share, ...], cost: TierCosts, task: RankTask, bits: Bits) -> list[Way]:
    """Every way to place a unit in one tier, as numbers."""
    is_table, c = unit.kind is EMBEDDING, cost.units[unit.name]
    whole, size, state = 1 << bits[unit.name, 0], unit.packed_nbytes, task.room.states[unit.name]
    launch = 0.0 if is_table else cost.launch
    speeds = cost.contended[unit.name]
    ways = [Way("cpu", "cpu", c.cpu, speeds=speeds, looked_up=is_table)]
    for at in ("pinned",) if is_table else ("pinned", "streamed"):
        held, slot, pins = (size, 0, whole) if at == "pinned" else (0, size, 0)
        way = Way(at, "acc", c.acc, pins, held, slot, c.link, c.issue + launch, looked_up=is_table)
        if unit.kind is ATTENTION:
            ways.append(way._replace(label=f"{at} vram", state="vram", held=held + state))
            ways.append(way._replace(label=f"{at} host", state="host", fetch=c.kv_fetch, write=c.kv_write))
        else:
            ways.append(way)
    for share in shares:
        rows = count_shares(unit) - share.cpu
        bit = 1 << bits[unit.name, rows]
        if cost.load.tokens <= SMALL:
            d = cost.divided(unit.name, share)
            both = (d.acc, d.cpu, d.join, d.rest)
            stage = row_stage_bytes(cost.load.tokens, joined_width(unit, share, cost.spec.config))
            way = Way(f"pinned -{share.cpu}", "both", 0.0, bit, d.nbytes, 0, 0.0, d.issue, rows=stage, both=both,
                      speeds=cost.divided_speeds(unit.name, share))  # fmt: skip
            ways += [way, way._replace(label=f"streamed -{share.cpu}", pins=0, held=0, slot=d.nbytes, link=d.link)]
        d = cost.divided(unit.name, Share(kept=rows))
        ways.append(Way(f"kept {rows}", "acc", d.acc, bit, d.kept, d.nbytes, d.link, c.issue + launch))
    return ways


def make_tier(task: RankTask, cost: TierCosts, bits: Bits) -> Tier:
    """One tier as numbers."""
    load, config, room = cost.load, cost.spec.config, task.room
    hidden, logits = load.tokens * config.d_model * 4, load.logit_rows * config.vocab * 4
    ways = {u.name: tuple(list_ways(u, shares, cost, task, bits)) for u, shares in _shares(task)}
    return Tier(
        load.tokens, load.weight, not load.rare, tuple(ways[u.name] for u in room.spec.units),
        room.arena - room.scratch(load.tokens), room.state_stage,
        cost.handoff("acc", hidden), cost.handoff("cpu", hidden), cost.handoff("cpu", logits),
        cost.copy_issue, cost.run_issue,
    )  # fmt: skip


def read_tier(tier: Tier, plan: TierPlan) -> tuple[float, Residency]:
    """Seconds of a planned tier by the oracle's clock, and what it has in VRAM."""
    placed = [next(w for w in ways if w.label == _label(p)) for ways, p in zip(tier.ways, plan.placements)]
    states = sum(1 << i for i, way in enumerate(placed) if way.state == "vram")
    return time_tier(tier, placed, plan.buffers.slots), Residency(sum(way.pins for way in placed), states)


def _label(place: Placement) -> str:
    if place.share == WHOLE:
        return f"{place.where} {place.kv}" if place.kv and place.where != "cpu" else place.where
    return f"kept {place.kept_parts}" if place.kept_parts else f"{place.where} -{place.cpu_rows}"


def measure_case(seed: int, most: int = MOST) -> dict | None:
    """The case's figures; None where everything fits. `over`: the plan's round over the optimum, None where there are
    too many placements."""
    spec, rates, workload = random_case(seed)
    profile = profile_from_datasheet(rates)
    variant = plan_variant(spec, profile, workload)
    if not variant.plan_needed:
        return None
    began = time.process_time()
    (task,) = prepare_ranks(spec, profile, workload)
    bits = number_bits(task)
    costs = task.costs
    tiers = [make_tier(task, cost, bits) for cost in costs]
    planned = [read_tier(tier, plan) for tier, plan in zip(tiers, variant.ranks[0].tiers, strict=True)]
    off = max(abs(s / p.prediction.seconds - 1) for (s, _), p in zip(planned, variant.ranks[0].tiers))
    switch = make_switch(task, bits)
    entered = [where for tier, (_, where) in zip(tiers, planned) if tier.entered]
    total = sum(t.weight * s for t, (s, _) in zip(tiers, planned)) + switch.seconds(entered[0], entered[-1])
    best = joint_optimum(tiers, total, switch, most)
    return {
        "seed": seed,
        "layers": spec.config.n_layers,
        "tiers": [t.tokens for t in tiers],
        "clock_off": off,
        "over": None if best is None else total / best - 1,
        "oracle_seconds": round(time.process_time() - began, 1),
    }


def main(cases: int) -> None:
    """A line for each case that is off, then one for each number of layers and one for all."""
    rows = []
    with ProcessPoolExecutor() as pool:
        for row in pool.map(measure_case, range(cases)):
            if row:
                rows.append(row)
                if row["over"] is not None and row["over"] > WITHIN:
                    print(json.dumps(row), flush=True)
    for layers in (1, 2, 3, 4, None):
        print(json.dumps(summarise([row for row in rows if layers in (None, row["layers"])], layers)), flush=True)


def summarise(rows: list[dict], layers: int | None) -> dict:
    """The figures of so many cases."""
    over = [row["over"] for row in rows if row["over"] is not None]
    return {
        "layers": layers or "all",
        "cases": len(rows),
        "enumerated": len(over),
        "worst": round(max(over, default=0.0), 4),
        "median": round(statistics.median(over or [0.0]), 6),
        "over_1_percent": sum(x > WITHIN for x in over),
        "clocks_differ_at_most": max((row["clock_off"] for row in rows), default=0.0),
    }


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 400)
