"""What models larger than memory are predicted to reach: `python benchmarks/disk_forecasts.py FILE:RAM:VRAM...`.

FILE is a GGUF file, of which the header is enough; RAM and VRAM are GB. Prints JSON: for each and for drives that bring
3.5, 7 and 12.5 GB of weights a second, what the plan promises of answers, and of prompts of 4096 and 16384 tokens, and
which part that is of a bound that no plan beats. Nothing is run. `--table FILE` prints the table of docs/disk.md.

The bound: what memory and compute take at least, or the bytes that VRAM and host memory cannot hold, by the drive's
rate; of experts that part of these bytes that a token uses, as if all were chosen alike. Which these are is known when
their layer is reached, so the accelerator's other units are not beside that. A prompt reads all these bytes once.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pshard.homes import READ
from pshard.machine import MachineProfile
from pshard.model import ModelSpec
from pshard.models import open_model
from pshard.on_disk import mark_made
from pshard.plan import TierPlan, Variant
from pshard.planner.make_plan import plan_variant
from pshard.planner.prepare_ranks import prepare_ranks
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.planner.price.draft import Room
from pshard.planner.price.example_sheets import MACHINES
from pshard.planner.price.host_limits import usable_bytes
from pshard.planner.rank_task import RankTask
from pshard.planner.routing.plan_disk_slots import lives_on_disk, plan_disk_slots
from pshard.predicted_times import decode_rate, first_token_seconds
from pshard.routing.expert_map import LIKELY
from pshard.runtime.memory.disk.fake_disk import FakeDisk
from pshard.units.moe.experts import EXPERTS
from pshard.workload import Workload

RATES = (3.5e9, 7e9, 12.5e9)
LATENCY = 1e-4
PROMPTS = (4096, 16384)
DESKTOP, LARGE_CARD = MACHINES["rtx4060-ryzen-7700"], MACHINES["rtx5080-xeon-w5-3425"]
CARD = ("acc_memory", "acc_flops", "acc_attention", "acc_unpack", "card", "accelerator")


def make_machine(ram: int, vram: int, rate: float) -> MachineProfile:
    """A desktop with so many GB: two channels of DDR5, an RTX 5080 from 16 GB on, else an RTX 4060, and a drive."""
    own = {name: getattr(LARGE_CARD, name) for name in CARD} if vram >= 16 else {}
    rates = replace(DESKTOP, **own, heads=LARGE_CARD.heads, acc_memory_bytes=vram << 30, host_memory_bytes=ram << 30)
    return replace(profile_from_datasheet(rates), disks=FakeDisk(rate, LATENCY).timings, ram_bytes=ram << 30)


def forecast(spec: ModelSpec, ram: int, vram: int, rate: float) -> dict[str, Any]:
    """What plans promise, one for each length of prompts, and which parts of the bounds that is."""
    machine, found = make_machine(ram, vram, rate), dict[str, Any]()
    for prompt in PROMPTS:
        workload = Workload((vram * 1000,), prompt + 4096, max_ubatch=prompt, prompt=prompt, ram_mib=ram << 10)
        variant = plan_variant(spec, machine, workload)
        if lives_on_disk(spec, variant):
            variant = plan_disk_slots(spec, machine, workload, variant, None)
        (task,) = prepare_ranks(spec, machine, variant.workload)
        tiers, seconds = variant.ranks[0].tiers, first_token_seconds(variant)
        outside = count_outside(task.room, tiers[-1].tokens, machine)
        found[f"passes_{prompt}"] = -(-prompt // (variant.workload.max_ubatch * tiers[-1].most_swept))
        found[f"first_token_{prompt}"] = round(seconds, 2)
        found[f"first_token_share_{prompt}"] = round(max(outside / rate, _least_first_token(variant)) / seconds, 2)
        if prompt != PROMPTS[0]:
            continue
        answer, least = tiers[0].prediction, count_read(spec, count_outside(task.room, 1, machine))
        found["disk_gb"] = round(sum(spec.unit(n).packed_nbytes for n in variant.ranks[0].beyond_host) / 1e9, 1)
        found["token_gb"] = round(dict(answer.busy).get(READ.name, 0.0) * rate / 1e9, 2)
        found["least_token_gb"] = round(least / 1e9, 2)
        found["decode_rate"] = round(decode_rate(variant), 3)
        found["likely_rate"] = round(1 / _likely_seconds(variant), 3)
        reading = least / rate + _chain_seconds(task) * (spec.config.experts is not None)
        found["decode_share"] = round(decode_rate(variant) * max(reading, answer.bound_seconds), 2)
    return found


def count_outside(room: Room, tokens: int, machine: MachineProfile) -> int:
    """Bytes of weights that VRAM and host memory do not hold, beside states and the scratch of so many tokens. Of
    tables rows are read, which take no time beside that."""
    room_for_all = usable_bytes(machine, 1) + room.arena - room.scratch(tokens)
    weights = sum(unit.packed_nbytes for unit in room.spec.units if not unit.kind.is_looked_up)
    return max(0, weights + sum(room.states.values()) - room_for_all)


def count_read(spec: ModelSpec, outside: int) -> float:
    """Bytes that a token needs of those outside, were these experts first: the part of them that it uses."""
    experts, rule = sum(u.packed_nbytes for u in spec.units if u.kind is EXPERTS), spec.config.experts
    used = rule.used / rule.count if rule else 1.0
    return max(0, outside - experts) + min(outside, experts) * used


def _chain_seconds(task: RankTask) -> float:
    """Seconds that a token's units take on the accelerator, from VRAM, but for its experts."""
    units = (unit for unit in task.room.spec.units if unit.kind is not EXPERTS and not unit.kind.is_looked_up)
    return sum(task.costs[0].units[unit.name].acc for unit in units)


def _likely_seconds(variant: Variant) -> float:
    """Seconds of a token, were slots for experts to find what published engines find."""
    answer = variant.ranks[0].tiers[0].prediction
    chosen = sum(len(cache.units) for cache in variant.ranks[0].caches)
    if not chosen:
        return answer.seconds
    found = sum(cache.found * len(cache.units) for cache in variant.ranks[0].caches) / chosen
    saved = 1 - (1 - found**LIKELY) / (1 - found)
    return answer.seconds - saved * dict(answer.busy)[READ.name]


def _least_first_token(variant: Variant) -> float:
    """Seconds to the first token, did every tier take no more than its bound without a disk; sweeps no more than the
    accelerator computes, as bounds have the link bring everything to each micro-batch."""
    (rank,), tiers = variant.ranks, list[TierPlan]()
    for tier in rank.tiers:
        least = tier.prediction.bound_seconds
        swept = min(least, dict(tier.prediction.busy)["acc"])
        sweep = replace(tier.sweep, seconds=swept) if tier.sweep else None
        tiers.append(replace(tier, prediction=replace(tier.prediction, seconds=least), sweep=sweep))
    return first_token_seconds(replace(variant, ranks=(replace(rank, tiers=tuple(tiers)),)))


def forecast_all(cases: list[str]) -> Iterator[dict[str, Any]]:
    """Rows of all models, drive by drive."""
    for case in cases:
        file, ram, vram = case.rsplit(":", 2)
        with open_model(Path(file)) as model:
            spec = mark_made(model)
        for rate in RATES:
            head = {"model": Path(file).stem, "gb": round(spec.packed_nbytes / 1e9, 1), "ram": int(ram)}
            yield head | {"vram": int(vram), "drive": rate / 1e9} | forecast(spec, int(ram), int(vram), rate)


def make_table(rows: list[dict[str, Any]]) -> str:
    """The table of docs/disk.md."""
    head = "model, RAM + VRAM", "drive GB/s", "on disk GB", "a token reads GB", "tok/s", "of bound", "likely tok/s"
    head += tuple(text for prompt in PROMPTS for text in (f"TTFT {prompt} s", "of bound"))
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for r in rows:
        cells = [f"{r['model']} ({r['gb']:g} GB), {r['ram']} + {r['vram']}", f"{r['drive']:g}", f"{r['disk_gb']:g}"]
        cells += [f"{r['token_gb']:g}", f"{r['decode_rate']:.3g}", f"{r['decode_share']:.2f}"]
        cells.append(f"{r['likely_rate']:.3g}")
        for prompt in PROMPTS:
            cells += [f"{r[f'first_token_{prompt}']:.3g}", f"{r[f'first_token_share_{prompt}']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Print JSON of the cases that are given, or the table of a file of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="FILE:RAM:VRAM")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the table of this file's rows")
    args = parser.parse_args()
    if args.table:
        print(make_table(json.loads(args.table.read_text(encoding="utf-8"))))
        return
    print("[")
    for i, row in enumerate(forecast_all(args.cases)):
        print((",\n " if i else " ") + json.dumps(row), end="", flush=True)
    print("\n]")


if __name__ == "__main__":
    main()
