"""What is said of a plan: first how fast it is and how much memory it takes, in words that fit the machine."""

from dataclasses import replace
from io import StringIO

import pytest
from planner_cases import DESKTOP, OWN, make_model
from rich.console import Console

from pshard.commands.plan_output import Planned, list_tight, print_plans
from pshard.cuts.rank_parts import cut_ranks
from pshard.machine import MachineProfile
from pshard.planner.check_plan import count_host_bytes
from pshard.planner.explain import explain_gains
from pshard.planner.make_plan import plan_baseline, plan_variant
from pshard.planner.price import host_limits
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.planner.price.host_limits import binds_host
from pshard.planner.remedies.better_machine import double_cores, double_host_rate
from pshard.planner.show_plan import print_explanation, print_variant
from pshard.planner.shown.machine_words import words_for
from pshard.planner.shown.memory_use import measure_use, show_bytes
from pshard.predicted_times import round_seconds
from pshard.workload import Workload

PROFILE = profile_from_datasheet(DESKTOP)
ON_CPU = profile_from_datasheet(replace(DESKTOP, kind="cpu", link=20e9, acc_memory=45e9, acc_flops=0.5e12))
SPEC = make_model(12, d_ffn=2048, vocab=4096)
WORK = Workload((OWN + 40,), context=2048, prompt=1024, generated=64, max_ubatch=1024)
MIB, GIB = 1 << 20, 1 << 30


def with_memory(profile: MachineProfile, nbytes: int) -> MachineProfile:
    return replace(profile, host=replace(profile.host, memory_bytes=nbytes))


def made(profile: MachineProfile, *workloads: Workload) -> Planned:
    variants = tuple(plan_variant(SPEC, profile, w, 2.0) for w in workloads)
    return Planned(SPEC, profile, (), workloads[0], variants, ((),) * len(variants))


def test_a_plan_begins_with_rate_and_memory_and_fits_80_columns(capsys: pytest.CaptureFixture) -> None:
    planned = made(PROFILE, WORK)
    print_plans(planned, None)
    lines = capsys.readouterr().out.splitlines()
    use = measure_use(SPEC, PROFILE, planned.variants[0])
    assert lines[0].startswith("Predicted ") and lines[0].endswith(" tok/s")
    assert lines[2].split() == ["VRAM", str(use.vram_mib[0]), "of", str(OWN + 40), "MiB"]
    assert lines[3].split() == ["Host", "memory", f"{-(-use.host_bytes // MIB)}", "MiB", "of", "64", "GiB"]
    assert replace(use, host_bytes=59 * GIB).host == "59.0 GiB of 64 GiB"
    assert replace(use, host_bytes=4 * MIB, host_memory_bytes=452 * MIB).host == "4 MiB of 452 MiB"
    assert use.vram_mib[0] <= OWN + 40 and max(len(line.rstrip()) for line in lines) <= 80
    specs = cut_ranks(SPEC, planned.variants[0].split)
    assert use.host_bytes == count_host_bytes(specs, planned.variants[0], "cuda") > 0


def test_host_memory_under_ram_counts_what_the_program_itself_takes(capsys: pytest.CaptureFixture) -> None:
    """A plan for the least --ram that works said '4 MiB of 452 MiB', with weights on disk."""
    own, limited = host_limits.PROCESS["cpu"], replace(ON_CPU, ram_bytes=GIB)
    planned = made(limited, replace(WORK, vram_mib=(100,), ram_mib=1024))
    print_plans(planned, None)
    use = measure_use(SPEC, limited, planned.variants[0])
    assert use.own_bytes == own and use.host_bytes + own <= GIB
    said = f"{show_bytes(use.host_bytes + own)} of 1 GiB, of which the program itself takes {own // MIB} MiB"
    assert f"Host memory  {said}" in capsys.readouterr().out.splitlines()
    assert not measure_use(SPEC, ON_CPU, planned.variants[0]).own  # without --ram a plan leaves a margin instead


def test_a_plan_that_is_not_needed_names_what_the_cpu_looks_up() -> None:
    whole = made(PROFILE, replace(WORK, vram_mib=(4000,))).variants[0]
    (rank,) = whole.ranks
    first = rank.tiers[0].placements[0].unit
    assert first == rank.pin_order[0] == "embedding"
    tiers = tuple(
        replace(tier, placements=(replace(tier.placements[0], where="cpu"), *tier.placements[1:]))
        for tier in rank.tiers
    )
    looked_up, said = replace(whole, ranks=(replace(rank, tiers=tiers, pin_order=rank.pin_order[1:]),)), []
    for variant in (whole, looked_up):
        out = StringIO()
        print_variant(variant, Console(file=out, width=80))
        said.append(out.getvalue().splitlines()[-1])
    assert said == [
        "Everything is in VRAM: no plan is needed, and all tiers are alike.",
        "Everything is in VRAM but embedding (the CPU looks its rows up): no plan is needed, and all tiers are alike.",
    ]


@pytest.mark.parametrize("profile", (PROFILE, ON_CPU), ids=("gpu", "cpu"))
def test_what_is_in_use_kept_and_left_add_up_to_the_budget(profile: MachineProfile) -> None:
    planned, out = made(profile, WORK), StringIO()
    (variant,), rank = planned.variants, planned.variants[0].ranks[0]
    variant = replace(variant, workload=replace(WORK, drafter_mib=3), drafter=rank)
    print_variant(variant, Console(file=out, width=80), words_for(profile))
    lines = out.getvalue().splitlines()
    first = next(i for i, line in enumerate(lines) if " in use " in line)
    names = lines[first].replace("in use", "in_use").split()
    rows = [line.replace(" x ", "x").split() for line in lines[first + 2 : first + 2 + len(rank.tiers)]]
    kept = ("reserve", "drafter") if profile is PROFILE else ("drafter",)
    assert tuple(names[names.index("in_use") + 1 : -1]) == kept
    ends = [[int(cell) for cell in row[names.index("in_use") :]] for row in rows]
    assert {sum(row) for row in ends} == {OWN + 40}
    (takes,) = measure_use(SPEC, profile, variant).vram_mib
    assert max(sum(row[:-1]) for row in ends) == takes


def test_tables_of_large_figures_fit_80_columns() -> None:
    """As of a model of 100 layers that takes minutes for a micro-batch."""
    variant, out = made(PROFILE, WORK).variants[0], StringIO()
    rank = variant.ranks[0]
    tiers = tuple(
        replace(
            t,
            placements=t.placements * 9,
            prediction=replace(t.prediction, seconds=234.567891, bound_seconds=123.456789),
        )
        for t in rank.tiers
    )
    print_variant(replace(variant, ranks=(replace(rank, tiers=tiers),)), Console(file=out, width=80))
    assert "108/108" in out.getvalue() or "/108" in out.getvalue()
    assert max(len(line.rstrip()) for line in out.getvalue().splitlines()) <= 80


def test_tables_in_a_file_have_no_spaces_at_the_ends_of_lines(capsys: pytest.CaptureFixture) -> None:
    planned = made(PROFILE, WORK, replace(WORK, vram_mib=(OWN + 48,)))
    print_plans(planned, None)
    lines = capsys.readouterr().out.split("\n")
    assert [line for line in lines if line != line.rstrip()] == []
    assert sum(line.startswith("MiB of the budget") for line in lines) == 2


def test_a_sweep_ends_with_a_line_for_each_budget(capsys: pytest.CaptureFixture) -> None:
    budgets = (OWN + 40, OWN + 48)
    print_plans(made(PROFILE, *(replace(WORK, vram_mib=(mib,)) for mib in budgets)), None)
    last = capsys.readouterr().out.rstrip().splitlines()[-2:]
    assert [int(line.split()[0]) for line in last] == list(budgets)
    assert all(len(line.split()) == 4 for line in last)
    planned = replace(made(PROFILE, WORK), skipped=((OWN + 1,),))
    print_plans(planned, None)
    last = capsys.readouterr().out.rstrip().splitlines()[-2:]
    assert last[0].split() == [str(OWN + 1), "-", "-", "-"] and last[1].split()[0] == str(OWN + 40)


def test_a_plan_that_fills_host_memory_is_noted() -> None:
    """Of 64 GiB 59 were accepted without a word."""
    planned = made(PROFILE, WORK)
    taken = measure_use(SPEC, PROFILE, planned.variants[0]).host_bytes
    full = replace(planned, profile=with_memory(PROFILE, taken * 64 // 59))
    (line,) = list_tight(full, None)
    assert line.startswith(f"the plan keeps {taken / GIB:.1f} GiB in host memory, which leaves ")
    roomy = replace(planned, profile=with_memory(PROFILE, taken * 64 // 50))
    assert list_tight(roomy, None) == [] == list_tight(roomy, taken)
    (line,) = list_tight(roomy, taken - 1)  # other programs have the rest
    assert "are free now" in line


def test_words_of_a_gpu_are_not_said_of_a_machine_without_one(capsys: pytest.CaptureFixture) -> None:
    planned = made(ON_CPU, replace(WORK, vram_mib=(40,)))
    print_plans(planned, None)
    out, words, variant = StringIO(), words_for(ON_CPU), planned.variants[0]
    gains = explain_gains(SPEC, ON_CPU, variant.workload, variant, time_limit=1.0)
    print_explanation(variant, gains, (), Console(file=out, width=200), words=words)
    said = capsys.readouterr().out + out.getvalue()
    assert "The budget   " in said and "a budget of 1 GiB more" in said
    out.write(words.say("4 in VRAM, 2 read over the link; 3 MB over the link; the accelerator's part streamed"))
    said += out.getvalue()
    assert not any(word in said for word in ("VRAM", "link", "GPU", "accelerator"))


def test_a_better_machine_is_faster_in_what_is_better_and_in_nothing_else() -> None:
    reading, computing = ("host", "F16", 1), ("host", "F16", 4096)  # tokens: what takes the time
    times = [
        {(m.device, m.qtype, m.tokens): m.seconds for m in profile.matmuls if m.rows == 25600}
        for profile in (PROFILE, double_host_rate(PROFILE), double_cores(PROFILE))
    ]
    before, faster_memory, more_cores = times
    assert faster_memory[reading] == pytest.approx(before[reading] / 2, rel=0.02)
    assert faster_memory[computing] == pytest.approx(before[computing], rel=0.02)
    assert more_cores[reading] == pytest.approx(before[reading], rel=0.02)
    assert more_cores[computing] == pytest.approx(before[computing] / 2, rel=0.02)
    for after in times[1:]:
        assert all(seconds <= before[row] for row, seconds in after.items())
        assert all(seconds == before[row] for row, seconds in after.items() if row[0] == "acc")


def test_what_is_better_may_be_used_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    variant = plan_variant(SPEC, PROFILE, WORK, 2.0)
    slow = plan_baseline("layer-stream", SPEC, PROFILE, WORK)
    assert round_seconds(slow) > 1.01 * round_seconds(variant)
    monkeypatch.setattr("pshard.planner.explain.plan_variant", lambda *_, **__: slow)
    assert {gain.of_round for gain in explain_gains(SPEC, PROFILE, variant.workload, variant)} == {1.0}


def test_the_hosts_memory_limits_a_plan_that_needs_more_of_it() -> None:
    assert binds_host(SPEC, with_memory(PROFILE, 92 << 20), WORK)
    assert not binds_host(SPEC, PROFILE, WORK)  # there more of it changes nothing


@pytest.mark.slow
def test_what_more_host_memory_would_bring_is_planned_where_it_limits() -> None:
    profile = with_memory(PROFILE, 92 << 20)
    variant = plan_variant(SPEC, profile, replace(WORK, vram_mib=(OWN + 56,)), 2.0)
    gains = dict((g.change, dict(g.speedups)) for g in explain_gains(SPEC, profile, variant.workload, variant))
    assert max(gains["twice the host memory"].values()) > 1.01
