"""The integer program against enumeration of all counts."""

import itertools
import random
import re
from collections import OrderedDict
from dataclasses import replace

import pytest
from planner_cases import DESKTOP, OWN, make_model

from pshard.planner.prepare_ranks import prepare_ranks
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.planner.program import fluid
from pshard.planner.program import solve_tiers as solving
from pshard.planner.program.coefficients import tier_problem
from pshard.planner.program.counts import Counts
from pshard.planner.program.fluid import fluid_seconds, takes_at_least
from pshard.planner.program.joint_program import Question, write_program
from pshard.planner.program.solve_tiers import NEARLY_OPTIMAL, relaxation_bound, solve_tiers
from pshard.planner.program.tier_problems import TierProblem, contending_groups
from pshard.planner.search.program_starts import affordable_slots as affordable
from pshard.planner.search.residency_order import assign_cpu, order_residency, spread
from pshard.planner.solver import solvers
from pshard.planner.solver.linear import Linear
from pshard.planner.solver.lp_text import lp_text
from pshard.units.embedding import EMBEDDING
from pshard.units.ffn import FFN
from pshard.workload import Workload


def problems(mib: int, link: float = 25e9, slots: int = 2, layers: int = 4, kind: str = "cuda", **rates: float):
    workload = Workload((mib + (OWN if kind == "cuda" else 0),), context=512, max_ubatch=16, prompt=256, generated=64)
    profile = profile_from_datasheet(replace(DESKTOP, link=link, kind=kind, **rates))
    (task,) = prepare_ranks(make_model(layers=layers), profile, workload)
    return tuple(tier_problem(task.room, task.classes, c, affordable(task.room, c, slots)) for c in task.costs), task


def all_counts(problem):
    """Every legal count of units that fits."""
    ways = [list(class_counts(c)) for c in problem.classes]
    for counts in itertools.product(*ways):
        if held_bytes(problem, counts) <= problem.room:
            yield counts


def held_bytes(problem: TierProblem, counts: tuple[Counts, ...]) -> int:
    """Bytes of the arena (without scratch) that given counts take."""
    pins = kv = slot = row_stage = 0
    for cost, n in zip(problem.classes, counts):
        pins += cost.nbytes * n.pin_whole
        kv += cost.kv_nbytes * n.kv
        if cost.kind is not EMBEDDING and cost.size > n.pin + n.cpu + sum(streamed for _, streamed in n.divided):
            slot = max(slot, cost.nbytes)
        for part, (pinned, streamed) in zip(cost.divided, n.divided):
            pins += part.nbytes * pinned
            slot = max(slot, part.nbytes if streamed else 0)
            row_stage = max(row_stage, part.row_nbytes if pinned + streamed else 0)
    staged = any(cost.kv_nbytes and cost.size > n.cpu + n.kv for cost, n in zip(problem.classes, counts))
    return pins + kv + problem.slots * slot + row_stage + (problem.stage_nbytes if staged else 0)


def class_counts(c):
    for pin, cpu, kv in itertools.product(range(c.size + 1), repeat=3):
        if pin + cpu > c.size or (kv + cpu > c.size if c.kv_nbytes else kv) or (c.kind is EMBEDDING and pin + cpu < 1):
            continue
        for divided in itertools.product(range(c.size + 1), repeat=2 * len(c.divided)):
            pinned, streamed = divided[::2], divided[1::2]
            if sum(pinned) <= pin and sum(streamed) <= c.size - pin - cpu:
                yield Counts(pin, cpu, kv, tuple(zip(pinned, streamed)))


@pytest.mark.quick("39-2-cuda")
@pytest.mark.parametrize(("mib", "slots", "kind"), [(19, 1, "cuda"), (39, 2, "cuda"), (19, 2, "cpu"), (39, 1, "cpu")])
def test_the_program_equals_enumeration(mib, slots, kind):
    tier = replace(problems(mib, slots=slots, layers=2, kind=kind)[0][0], weight=1.0)
    best = min(fluid_seconds(tier, counts, relaxed=True) for counts in all_counts(tier))
    solution = solve_tiers(Question((tier,), relaxed=True))
    assert solution.status == "optimal"
    assert solution.objective == pytest.approx(best, rel=2 * NEARLY_OPTIMAL)
    assert solution.bound <= best * (1 + 1e-9)
    assert held_bytes(tier, solution.counts[0]) <= tier.room


@pytest.mark.quick("15-2-400000000000.0")
@pytest.mark.parametrize(("mib", "slots", "acc_memory"), [(15, 1, 60e9), (21, 2, 60e9), (15, 2, 400e9)])
def test_the_program_with_divided_ffns_equals_enumeration(mib, slots, acc_memory):
    task = problems(mib, slots=slots, layers=2, acc_memory=acc_memory)[1]
    tier = replace(tier_problem(task.room, task.classes, task.costs[0], slots, divide=True), weight=1.0)
    assert [len(c.divided) for c in tier.classes if c.kind is FFN] == [3]
    best, counts = min(((fluid_seconds(tier, n, relaxed=True), n) for n in all_counts(tier)), key=lambda x: x[0])
    solution = solve_tiers(Question((tier,), relaxed=True))
    assert solution.objective == pytest.approx(best, rel=2 * NEARLY_OPTIMAL)
    assert solution.bound <= best * (1 + 1e-9)
    assert held_bytes(tier, solution.counts[0]) <= tier.room
    assert any(n.n_divided for n in counts)


def test_pins_of_larger_tiers_are_nested_in_those_of_smaller_ones():
    tiers, _ = problems(29)
    counts = solve_tiers(Question(tiers, 1e-9)).counts
    for smaller, larger in itertools.pairwise(counts):
        assert all(s.pin >= n.pin for s, n in zip(smaller, larger))


def tier_of_groups(groups: int, slots: int, kind: str) -> TierProblem:
    """A tier of boundless room whose units contend in so many groups."""
    _, task = problems(21, slots=slots, kind=kind)
    tier = replace(tier_problem(task.room, task.classes, task.costs[0], slots, divide=True), room=1 << 50, weight=1.0)
    kinds = [replace(c.kind, contends=c.kind.contends and f"group{i % groups}") for i, c in enumerate(tier.classes)]
    tier = replace(tier, classes=tuple(replace(c, kind=k) for c, k in zip(tier.classes, kinds)))
    assert len(contending_groups(tier)) == groups
    return tier


@pytest.mark.parametrize(
    ("kind", "groups"), [("cuda", 2), ("cpu", 1), ("cpu", 2), pytest.param("cuda", 3, marks=pytest.mark.slow)]
)
def test_counts_reach_the_seconds_that_they_take_and_no_more(kind, groups, monkeypatch):
    rng = random.Random(groups)
    evaluated, whole = [0], fluid._least_from

    def count(*of):
        evaluated[0] += 1
        return whole(*of)

    monkeypatch.setattr(fluid, "_least_from", count)
    searched = asked = 0
    for slots in (1, 2):
        tier = tier_of_groups(groups, slots, kind)
        for _ in range(40):
            counts = tuple(draw_counts(rng, c) for c in tier.classes)
            evaluated[0] = 0
            takes = fluid_seconds(tier, counts, relaxed=True)
            searched += evaluated[0]
            for near in (1e-6, 1e-3, 0.05, 0.5):
                evaluated[0] = 0
                assert takes_at_least(tier, counts, takes * (1 - near))
                asked += evaluated[0] / 4
                assert not takes_at_least(tier, counts, takes * (1 + near))
    if groups == 2:
        assert asked < searched / 3  # what is far from the goal is told apart by a few points


@pytest.mark.quick("cuda-1")
@pytest.mark.parametrize(("kind", "groups"), [("cuda", 1), ("cpu", 2), ("cuda", 3)])
def test_counts_take_the_same_time_with_and_without_a_solver(kind, groups):
    rng = random.Random(groups)
    for slots in (1, 2):
        tier = tier_of_groups(groups, slots, kind)
        for relaxed in (True, False):
            joint = write_program(Question((tier,), relaxed=relaxed))
            total = joint.program.names.index(f"ms(t{tier.tokens})")
            joint.program.goal = Linear({total: 1.0})
            for _ in range(6):
                counts = tuple(draw_counts(rng, c) for c in tier.classes)
                for n, columns in zip(counts, joint.counts[0]):
                    fixed = (n.pin, n.cpu, n.kv, *(count for pair in n.divided for count in pair))
                    for column, count in zip(columns.flatten(), fixed, strict=True):
                        joint.program.low[column.at] = joint.program.high[column.at] = count
                found = solvers.solve(joint.program, 10, 1e-9)
                assert found.status == "optimal"
                assert found.values[total] / 1e3 == pytest.approx(fluid_seconds(tier, counts, relaxed), rel=1e-6)


def draw_counts(rng, c):
    """Any legal counts of a class."""
    cpu = rng.randrange(c.size + 1)
    pin = c.size - cpu if c.kind.is_looked_up else rng.randrange(c.size - cpu + 1)
    pinned, streamed, divided = pin, c.size - cpu - pin, []
    for _ in c.divided:
        divided.append((rng.randrange(pinned + 1), rng.randrange(streamed + 1)))
        pinned, streamed = pinned - divided[-1][0], streamed - divided[-1][1]
    return Counts(pin, cpu, rng.randrange(c.size - cpu + 1) if c.kv_nbytes else 0, tuple(divided))


def test_layers_may_have_several_followers():
    (tier, *_), _ = problems(21)
    ffn = next(c for c in tier.classes if c.kind is FFN)
    assert tier.followers == 1 and replace(tier, classes=(*tier.classes, ffn)).followers == 2


@pytest.mark.quick("none")
@pytest.mark.parametrize("host_kv", ["stalls", "none"])
def test_the_written_program_is_read_back_with_the_same_optimum(tmp_path, host_kv):
    highspy = pytest.importorskip("highspy")
    _, task = problems(21, acc_memory=80e9)
    tiers = tuple(tier_problem(task.room, task.classes, c, 2, divide=True) for c in task.costs)
    tiers = (replace(tiers[0], host_room=task.room.spec.packed_nbytes), *tiers[1:])
    asked = Question(tiers, 1e-9, tuple(1e-3 for _ in task.classes), host_kv=host_kv)
    file = tmp_path / "program.lp"
    file.write_text(lp_text(write_program(asked).program), encoding="utf-8")
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    solver.setOptionValue("mip_rel_gap", 1e-6)
    assert solver.readModel(str(file)) == highspy.HighsStatus.kOk
    solver.run()
    solution = solve_tiers(asked, gap=1e-6)
    assert solution.status == "optimal"
    assert solver.getObjectiveValue() == pytest.approx(1e3 * solution.objective, rel=1e-5)


def test_every_row_and_column_has_a_name_of_its_own_that_the_lp_format_allows():
    _, task = problems(21)
    tiers = tuple(tier_problem(task.room, task.classes, c, 1, divide=True) for c in task.costs)
    tiers = (replace(tiers[0], host_room=task.room.spec.packed_nbytes), *tiers[1:])
    program = write_program(Question(tiers, 1e-9, tuple(1e-3 for _ in task.classes), host_kv="none")).program
    names = [*(row.name for row in program.rows), *program.names]
    assert len(set(names)) == len(names) and len(set(program.keys)) == len(program.keys)
    assert all(re.fullmatch(r"[a-df-z][a-z0-9_]*(\([a-z0-9_,]+\))?", name) for name in names)


def test_an_impossible_room_is_called_infeasible():
    tiers, _ = problems(29)
    nothing = replace(tiers[0], room=-1)
    assert solve_tiers(Question((nothing,))).status == "infeasible"


def test_every_call_of_highs_asks_for_the_same_number_of_threads(monkeypatch):
    highspy = pytest.importorskip("highspy")
    asked = []

    class Asked(highspy.Highs):
        def setOptionValue(self, name, value):
            asked.append((name, value))
            return super().setOptionValue(name, value)

    monkeypatch.setattr(highspy, "Highs", Asked)
    monkeypatch.setattr(solvers, "_known", OrderedDict())
    tiers, _ = problems(29)
    solve_tiers(Question(tiers))
    relaxation_bound.__wrapped__(tiers)
    threads = [value for name, value in asked if name == "threads"]
    assert len(threads) >= 2 and set(threads) == {1}


def test_a_program_is_solved_once_and_every_number_of_it_makes_another(monkeypatch):
    pytest.importorskip("highspy")
    asked, solved, whole = Question(problems(29)[0]), [], solvers._with_highs
    monkeypatch.setattr(solvers, "_known", OrderedDict())
    monkeypatch.setattr(solvers, "_with_highs", lambda *of: solved.append(of) or whole(*of))
    program = write_program(asked).program
    found = solvers.solve(program, 10, 0.01)
    assert solvers.solve(write_program(asked).program, 10, 0.01) is found and len(solved) == 1
    at = max(program.goal.terms)
    for change in (
        lambda made: made.low.__setitem__(at, 0.5),
        lambda made: made.high.__setitem__(at, 1e6),
        lambda made: made.whole.__setitem__(at, not made.whole[at]),
        lambda made: made.goal.terms.__setitem__(at, 2.0),
        lambda made: made.rows[0].terms.update({at: 1e-12}),
        lambda made: made.rows.__setitem__(0, made.rows[0]._replace(high=1e9)),
        lambda made: made.keys.__setitem__(at, "zz"),
    ):
        change(made := write_program(asked).program)
        before = len(solved)
        solvers.solve(made, 10, 0.01)
        assert len(solved) == before + 1
    before = len(solved)
    solvers.solve(program, 10, 0.02)
    assert len(solved) == before + 1
    assert solvers.solve(program, 1e-6, 1e-9).late and not solvers.solve(program, 10, 1e-9).late


def test_options_of_highs_are_ones_that_it_knows():
    highspy = pytest.importorskip("highspy")
    for name, value in solvers.SMALL_TREES.items():
        assert highspy.Highs().setOptionValue(name, value) == highspy.HighsStatus.kOk, name


def test_what_else_a_machine_does_changes_no_solution(monkeypatch):
    """The wall's clock runs, and the solver hardly gets the processor: it gets more time, and what it says counts."""
    pytest.importorskip("highspy")
    tiers, _ = problems(29)
    program = write_program(Question(tiers)).program
    assert solvers.solve(program, 1e-6, 1e-9).status != "optimal"
    quiet = solve_tiers(Question(tiers))
    monkeypatch.setattr(solvers, "cpu_seconds", lambda: 0.0)
    assert solvers.solve(program, 1e-6, 1e-9).status == "optimal"
    ticks = itertools.count(0, 100)
    monkeypatch.setattr(solving.time, "perf_counter", lambda: float(next(ticks)))
    busy = solve_tiers(Question(tiers))
    assert (busy.status, busy.counts) == (quiet.status, quiet.counts) == ("optimal", quiet.counts)


def test_cbc_finds_what_highs_finds(monkeypatch):
    pytest.importorskip("highspy")
    tiers, _ = problems(29)
    found = {}
    for name in ("HiGHS", "CBC"):
        monkeypatch.setattr(solvers, "solver_name", lambda name=name: name)
        monkeypatch.setattr(solving, "solver_name", lambda name=name: name)
        solution = solve_tiers(Question(tiers, 1e-9))
        assert (solution.solver, solution.status) == (name, "optimal")
        nothing = solve_tiers(Question((replace(tiers[0], room=-1),)))
        found[name] = solution.objective, relaxation_bound.__wrapped__(tiers), nothing.status
    assert found["CBC"][0] == pytest.approx(found["HiGHS"][0], rel=2 * NEARLY_OPTIMAL)
    assert found["CBC"][1] == pytest.approx(found["HiGHS"][1], rel=1e-6)
    assert found["CBC"][2] == found["HiGHS"][2] == "infeasible"


def test_a_solver_that_gives_up_is_no_reason_for_a_worse_plan(monkeypatch):
    tiers, _ = problems(29)
    monkeypatch.setattr(solving, "solve", lambda *_: solvers.Outcome("unsolved", []))
    with pytest.raises(RuntimeError, match="gave up"):
        solve_tiers(Question(tiers))


def test_every_tier_is_a_prefix_of_the_order_and_what_is_left_out_is_spread():
    tiers, task = problems(29, layers=8)
    counts = [tuple(Counts(n if c.kind.ports.adds else 0, 0, 0) for c in task.classes) for n in (6, 4, 1)]
    order = order_residency(task.classes, counts, even=True).pin_order
    for n in (6, 4, 1):
        held = set(order[: 2 * n])
        assert len([u for u in held if u.startswith("ffn")]) == n
    left = sorted(int(u.split(".")[1]) for u in {f"ffn.{i}" for i in range(8)} - set(order[:12]))
    assert left[1] - left[0] >= 3


def test_cpu_units_form_as_many_runs_as_asked_for():
    _, task = problems(29, layers=12)
    for runs in (1, 2, 3):
        counts = tuple(6 if c.kind is FFN else 0 for c in task.classes)
        layers = sorted(int(n.split(".")[1]) for n in assign_cpu(task.classes, counts, frozenset(), runs))
        assert len(layers) == 6
        assert sum(b - a > 1 for a, b in itertools.pairwise(layers)) == runs - 1
    assert spread(8, 2) == [2, 6]
