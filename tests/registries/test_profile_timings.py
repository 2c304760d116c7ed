"""Profiles whose timings no machine has are refused with the field's name; honest ones, noisy too, are read."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from pshard.errors import UserError
from pshard.machine import CollectiveTiming, MachineProfile, ShareTiming
from pshard.planner.price.datasheet import Rates, profile_from_datasheet
from pshard.registries.check_profile import check_timings
from pshard.registries.profile_store import load_profile, save_profile

ROOT = Path(__file__).resolve().parents[2]
MEASURED = [*ROOT.glob("registries/examples/*.json"), *ROOT.glob("benchmarks/results/*-profile-*.json")]
RATES = Rates(
    link=25e9, acc_memory=400e9, acc_flops=40e12, host_memory=45e9, host_flops=0.5e12, collective_rate=5e9, ranks=2
)


def made_up() -> MachineProfile:
    return replace(profile_from_datasheet(RATES), shares=(ShareTiming(2, "matmul", 1, 1e-3, 2e-3, 2e-3),))


def with_row(table: str, place: int, **fields: object) -> MachineProfile:
    profile = made_up()
    rows = [*getattr(profile, table)]
    rows[place] = replace(rows[place], **fields)
    return replace(profile, **{table: tuple(rows)})


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_every_profile_that_was_kept_is_valid(path: Path) -> None:
    load_profile(path)


@pytest.mark.parametrize(
    ("table", "field"),
    [
        ("matmuls", "seconds"),
        ("attention", "seconds"),
        ("copies", "seconds"),
        ("collectives", "seconds"),
        ("reads", "rate"),
        ("shares", "whole"),
        ("shares", "together"),
        ("accelerators", "memory_bytes"),
    ],
)
@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan])
def test_what_takes_no_time_or_no_number_is_refused_by_its_field(
    tmp_path: Path, table: str, field: str, value: float
) -> None:
    path = save_profile(made_up(), tmp_path / "p.json")
    data = json.loads(path.read_text())
    data[table][0][field] = value
    path.write_text(json.dumps(data))
    with pytest.raises(UserError, match=rf"is damaged: MachineProfile\.{table}\[0\]\.{field} is .*again"):
        load_profile(path)


@pytest.mark.parametrize(
    ("table", "place", "seconds", "told"),
    [
        ("copies", 4, 1e-6, r"copies\[4\]\.seconds is 1e-06 for a size of 268435456, which does not go with"),
        ("copies", 0, 1e-12, r"copies\[0\]\.seconds is 1e-12 for a size of 4096, which"),
        ("copies", 2, 3.0, r"copies\[2\]\.seconds is 3 for a size of 1048576, which"),
        ("matmuls", 7, 1e-7, r"matmuls\[7\]\.seconds is 1e-07 for a size of 4096, which"),
        ("attention", 3, 80.0, r"attention\[3\]\.seconds is 80 for a size of 65536, which"),
        ("collectives", 4, 1e-7, r"collectives\[4\]\.seconds is 1e-07 for a size of 268435456, which"),
    ],
)
def test_a_timing_that_falls_or_soars_with_size_is_refused_by_its_field(
    table: str, place: int, seconds: float, told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        check_timings(with_row(table, place, seconds=seconds))


def test_noise_is_no_reason_to_refuse() -> None:
    check_timings(made_up())
    check_timings(with_row("copies", 1, seconds=made_up().copies[1].seconds + 0.015))  # a core stood still
    check_timings(with_row("matmuls", 4, seconds=made_up().matmuls[4].seconds * 8))  # another kernel from here on
    check_timings(with_row("elementwise", 0, seconds=0.0))  # a difference of two timings
    sums = tuple(CollectiveTiming("rows", 2, n, s) for n, s in ((4096, 2.3e-6), (16384, 0.98e-6)))
    check_timings(replace(made_up(), collectives=sums))
