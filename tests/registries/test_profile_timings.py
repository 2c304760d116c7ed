"""Profiles whose timings no machine has are refused with the field's name; honest ones, noisy too, are read."""

import hashlib
import json
import math
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
from cli_world import edit_json

from pshard.errors import UserError
from pshard.machine import CollectiveTiming, CopyTiming, MachineProfile, ShareTiming
from pshard.planner.price.datasheet import Rates, profile_from_datasheet
from pshard.registries.check_profile import check_timings
from pshard.registries.fingerprint import digest_profile
from pshard.registries.profile_store import load_profile, save_profile

ROOT = Path(__file__).resolve().parents[2]
MEASURED = [*ROOT.glob("registries/examples/*.json"), *ROOT.glob("benchmarks/results/*-profile-*.json")]
RATES = Rates(
    link=25e9, acc_memory=400e9, acc_flops=40e12, host_memory=45e9, host_flops=0.5e12, collective_rate=5e9, ranks=2
)


def made_up() -> MachineProfile:
    return replace(profile_from_datasheet(RATES), shares=(ShareTiming(2, "matmul", 1, 1e-3, 2e-3, 2e-3),))


def made_short() -> MachineProfile:
    """The same with one row a table."""
    profile = made_up()
    tables = {f.name: rows[:1] for f in fields(profile) if isinstance(rows := getattr(profile, f.name), tuple)}
    return replace(profile, **tables)


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
        ("experts", "seconds"),
        ("routes", "seconds"),
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
    path = save_profile(made_short(), tmp_path / "p.json")
    data = json.loads(path.read_text())
    data[table][0][field] = value
    path.write_text(json.dumps(data))
    with pytest.raises(UserError, match=rf"is damaged: MachineProfile\.{table}\[0\]\.{field} is .*again"):
        load_profile(path)


@pytest.mark.parametrize(
    ("table", "place", "seconds", "told"),
    [
        ("copies", 4, 1e-6, r"copies\[4\]\.seconds would be 2.68e\+14 a second"),
        ("copies", 0, 1e-12, r"copies\[0\]\.seconds is 1e-12; on every machine it is 1e-08 or more"),
        ("copies", 2, 3.0, r"copies\[2\]\.seconds is 3 for a size of 1048576, which does not go with"),
        ("matmuls", 7, 2e-8, r"matmuls\[7\]\.seconds would be 4.29e\+17 a second; no machine comes near 1e\+17"),
        ("matmuls", 2, 9.0, r"matmuls\[2\]\.seconds is 9 for a size of 16, which does not go with"),
        ("attention", 3, 80.0, r"attention\[3\]\.seconds is 80 for a size of 65536, which does not go with"),
        ("experts", 5, 1e-7, r"experts\[5\]\.seconds would be 7.73e\+17 a second"),
        ("experts", 2, 9.0, r"experts\[2\]\.seconds is 9 for a size of 16, which does not go with"),
        ("routes", 0, 1e-12, r"routes\[0\]\.seconds is 1e-12; on every machine"),
        ("collectives", 4, 1e-7, r"collectives\[4\]\.seconds would be 2.68e\+15 a second"),
    ],
)
def test_a_timing_that_no_machine_comes_near_or_that_soars_is_refused_by_its_field(
    table: str, place: int, seconds: float, told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        check_timings(with_row(table, place, seconds=seconds))


@pytest.mark.parametrize(
    ("where", "value", "told"),
    [
        (("host", "threads"), 10**30, "host.threads is 1000000000000000000000000000000, not a number from 1 to 8"),
        (("host", "threads"), 9, "host.threads is 9, not a number from 1 to 8"),
        (("host", "threads"), 0, "host.threads is 0, not a number from 1 to 8"),
        (("host", "cores"), 2**31, "host.cores is 2147483648, not a number from 1 to 16384"),
        (("ranks_per_host",), 10**6, "ranks_per_host is 1000000, not a number from 1 to 16384"),
        (("contention", "h2d_with_d2h"), 1e30, "contention.h2d_with_d2h would be 1e+30 a second"),
    ],
)
def test_numbers_that_no_host_has_are_refused_by_their_field(
    tmp_path: Path, where: tuple[str, ...], value: float, told: str
) -> None:
    path = save_profile(made_short(), tmp_path / "p.json")
    edit_json(path, *where, value=value)
    with pytest.raises(UserError, match=re.escape(f"is damaged: MachineProfile.{told}")):
        load_profile(path)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"used": 129}, r"experts\[0\]\.used is 129, more than its 128 experts"),
        ({"used": 0}, r"experts\[0\]\.used is 0, not 1 or more"),
        ({"down_qtype": "Q9_9"}, r"experts\[0\]\.down_qtype is 'Q9_9', which is no type of weights"),
    ],
)
def test_experts_that_no_model_has_are_refused_by_their_field(tmp_path: Path, changed: dict, told: str) -> None:
    path = save_profile(with_row("experts", 0, **changed), tmp_path / "p.json")
    with pytest.raises(UserError, match=rf"is damaged: MachineProfile\.{told}"):
        load_profile(path)


def test_profiles_of_before_experts_were_timed_load_as_the_profiles_that_they_were(tmp_path: Path) -> None:
    before = replace(made_up(), experts=(), routes=())
    path = save_profile(before, tmp_path / "p.json")
    data = json.loads(path.read_text())
    for later in ("experts", "routes", "deltas", "in_place", "refused", "reserves", "disks", "ram_bytes"):
        del data[later]
    del data["prompt_math"]
    del data["provenance"]["short"]
    path.write_text(json.dumps(data))
    assert load_profile(path) == before
    unread = {"lockable_bytes", "ranks_per_host"}  # that digests leave out
    old = {key: value for key, value in data.items() if key not in unread}
    assert digest_profile(before) == hashlib.sha256(json.dumps(old, sort_keys=True).encode()).hexdigest()
    assert digest_profile(before) != digest_profile(made_up())


def curve(make: type, rows: dict[int, float], *before: object, **after: object) -> tuple:
    return tuple(make(*before, n, seconds, **after) for n, seconds in rows.items())


def test_noise_is_no_reason_to_refuse() -> None:
    """Rows of profiles that were taken while other programs kept the cores busy."""
    made = made_up()
    check_timings(made)
    check_timings(with_row("matmuls", 4, seconds=made.matmuls[4].seconds * 8))  # another kernel from here on
    check_timings(with_row("elementwise", 0, seconds=0.0))  # a difference of two timings
    staged = {4096: 2.7e-5, 1 << 18: 1.1e-4, 1 << 20: 1.5e-4, 1 << 22: 6.8e-4, 1 << 24: 0.16, 1 << 26: 0.023}
    check_timings(replace(made, copies=(*made.copies, *curve(CopyTiming, staged, "h2d", "staged"))))
    for sums in (
        {4096: 2.3e-6, 16384: 0.98e-6},
        {4096: 2.96e-3, 16384: 1.4e-5, 65536: 4.1e-5, 1 << 24: 0.15},
        {16384: 5.3e-3, 65536: 4.07e-5, 1 << 20: 0.03},
    ):
        check_timings(replace(made, collectives=curve(CollectiveTiming, sums, "shm", 2)))
