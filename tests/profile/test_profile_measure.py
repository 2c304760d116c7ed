"""A profile of tiny sizes, measured for real: what is in it, how it is stored, and what a second one is compared by."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from experts_file import RULES, ExpertsFile
from manual_clock import ManualClock

from pshard.commands import cli_profile
from pshard.commands.cli_plan import list_gaps
from pshard.errors import KernelRefused, NoRoom, UserError
from pshard.jsonio import from_json, to_json
from pshard.machine import (
    ACCELERATOR_TABLES,
    AcceleratorInfo,
    DiskTiming,
    MachineProfile,
    MatmulTiming,
    RefusedKernel,
    describe_busy,
)
from pshard.model import ModelSpec
from pshard.model_config import Experts, ModelConfig, Rope
from pshard.profile.compare_profiles import compare_profiles
from pshard.profile.effort import Effort, Shapes, full_effort, join_shapes, model_shapes, quick_effort
from pshard.profile.identify import identify_host, unlike_accelerators, unlike_links
from pshard.profile.measure import (
    ProfileRequest,
    expected_seconds,
    measure_accelerator,
    measure_machine,
    run_jobs,
    time_collectives,
    time_shares,
)
from pshard.profile.timed import draft_cost
from pshard.profile.timed.draft_cost import time_drafts
from pshard.profile.timed.kernel_jobs import Job, attention_points, list_jobs
from pshard.profile.timed.operands import OperandPool
from pshard.profile.timed.rank_shares import COPY_BYTES, TOKENS
from pshard.profile.timed.step_cost import WALKS, make_small_model, time_launch, time_steps
from pshard.profile.timed.time_kernels import KernelBench, time_attention
from pshard.profile.timing_loop import Pace
from pshard.runtime.devices.device import CpuDevice
from pshard.runtime.engine import Engine
from pshard.runtime.kernels.plain import PlainKernels
from pshard.tensor import TensorSpec
from pshard.units.attention import ATTENTION
from pshard.units.embedding import EMBEDDING
from pshard.units.ffn import FFN
from pshard.units.operations import Attend
from pshard.units.output import OUTPUT
from pshard.units.unit import Unit

KIB = 1 << 10
RULE = Experts(4, 2, 32)
ROUTED = ((("Q4_0", "Q8_0", 64, RULE),), (("F32", 64, RULE),))
MATMULS = (("Q4_0", 64, 64), ("BF16", 32, 64))
GRID = Shapes(MATMULS, (), (Attend(2, 1, 32),), ((64, 128),), (("Q8_0", 64),), 64, *ROUTED)
TINY = Effort(
    quick=True,
    pace=Pace(0.001),
    slow=0.5,
    rotation=1024 * KIB,
    limit=30.0,
    grid=GRID,
    host_tokens=(1, 16, 128),
    acc_tokens=(1, 16, 128),
    copy_sizes=(4 * KIB, 64 * KIB),
    contention_seconds=0.05,
    sums=(),
)


def request(model: Shapes | None = None) -> ProfileRequest:
    return ProfileRequest(accelerator="cpu", effort=TINY, model=model, threads=1, command="pshard-profile --quick")


@pytest.fixture(scope="module")
def profile() -> MachineProfile:
    labels: list[tuple[str, float]] = []
    measured = measure_machine(request(), lambda label, share: labels.append((label, share)))
    shares = [share for _, share in labels]
    assert shares == sorted(shares) and shares[0] >= 0 and shares[-1] <= 1
    return measured


def test_the_stage_in_which_kernels_are_compiled_ends_before_steps_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first run says how long that stage took."""

    def stop(*arguments: Any) -> None:
        raise KeyboardInterrupt

    labels = list[str]()
    monkeypatch.setattr("pshard.profile.measure.time_steps", stop)
    with pytest.raises(KeyboardInterrupt):
        measure_machine(request(), lambda label, share: labels.append(label))
    assert labels[-2:] == ["tiles", "steps between kernels"]


def test_every_table_that_a_plan_needs_is_there(profile):
    assert {(m.device, m.qtype, m.tokens) for m in profile.matmuls} == {
        (device, qtype, tokens)
        for device in ("host", "acc")
        for qtype in ("Q4_0", "BF16")
        for tokens in TINY.host_tokens
    }
    attention = {(a.sequences, a.tokens, a.context, a.device) for a in profile.attention}
    assert attention == {
        (*row, device)
        for device in ("host", "acc")
        for row in ((1, 1, 64), (1, 16, 16), (1, 16, 64), (16, 1, 64), (64, 1, 64))
    }
    kinds = {"norm", "residual", "rope", "silu_mul", "embed", "step"}
    drafts = {("acc", what) for what in ("verify", "draft", "follow")}
    assert {(e.device, e.what) for e in profile.elementwise} == {
        (d, k) for d in ("host", "acc") for k in kinds
    } | drafts
    assert {(c.direction, c.memory, c.nbytes) for c in profile.copies} == {
        (*way, nbytes)
        for way in (*((d, m) for d in ("h2d", "d2h") for m in ("pinned", "pageable")), ("h2d", "staged"))
        for nbytes in TINY.copy_sizes
    }


def test_routers_and_experts_are_timed_on_both_sides(profile):
    experts = {
        (e.device, e.gate_qtype, e.down_qtype, e.experts, e.used, e.d_expert, e.d_model) for e in profile.experts
    }
    assert experts == {(device, "Q4_0", "Q8_0", 4, 2, 32, 64) for device in ("host", "acc")}
    routers = {(r.device, r.qtype, r.experts, r.used, r.d_model) for r in profile.routes}
    assert routers == {(device, "F32", 4, 2, 64) for device in ("host", "acc")}
    for table in (profile.experts, profile.routes):
        assert {row.tokens for row in table} == {1, 4, 16, 64} and all(row.seconds > 0 for row in table)


def test_figures_are_positive_and_plausible(profile):
    for row in (*profile.matmuls, *profile.attention, *profile.copies):
        assert 0 < row.seconds < 5
    assert all(e.seconds >= 0 for e in profile.elementwise)
    assert all(e.seconds > 0 for e in profile.elementwise if e.what in ("norm", "rope", "embed", "step"))
    assert all(1e8 < read.rate < 1e13 for read in profile.reads)
    both = profile.contention
    assert min(both.link_with_cpu, both.cpu_with_link, both.h2d_with_d2h, both.d2h_with_h2d) > 0
    assert 0 < profile.handoff_seconds < 0.1


def test_it_says_where_the_figures_come_from(profile):
    origin = profile.provenance
    assert origin.source == "measured" and origin.quick and origin.command == "pshard-profile --quick"
    assert origin.date and origin.torch and origin.python and origin.os
    assert any("accelerator is the CPU" in note for note in origin.notes)
    assert profile.host == identify_host(threads=1)


def test_json_round_trip(profile):
    assert from_json(MachineProfile, json.loads(json.dumps(to_json(profile)))) == profile


def test_the_same_profile_has_not_changed(profile):
    assert compare_profiles(profile, profile) == ()


def test_changes_name_the_field_and_the_rates_that_moved(profile):
    slower = replace(
        profile,
        host=replace(profile.host, threads=2),
        matmuls=tuple(replace(m, seconds=2 * m.seconds) if m.qtype == "Q4_0" else m for m in profile.matmuls),
        experts=tuple(replace(e, seconds=2 * e.seconds) for e in profile.experts),
        copies=tuple(replace(c, seconds=1.05 * c.seconds) for c in profile.copies),
        handoff_seconds=profile.handoff_seconds / 2,
    )
    changes = {c.what: c for c in compare_profiles(profile, slower)}
    assert set(changes) == {
        "host threads",
        "host matmul Q4_0, few tokens",
        "host matmul Q4_0, many tokens",
        "host experts Q4_0, few tokens",
        "host experts Q4_0, many tokens",
        "hand-off",
    }
    assert (changes["host threads"].before, changes["host threads"].after) == ("1", "2")
    assert changes["host matmul Q4_0, few tokens"].ratio == pytest.approx(0.5)
    assert changes["hand-off"].ratio == pytest.approx(2.0)


def small_spec() -> ModelSpec:
    rope = Rope(dims=32, base=10000.0, pairing="halves")
    config = ModelConfig("llama", 1, 64, 2, 1, 32, 96, 320, 1e-6, 128, rope)
    heads = (("q", 64), ("k", 32), ("v", 32), ("output", 64))
    attention = tuple(TensorSpec(f"blk.0.attn_{p}.weight", "Q8_0", (r, 64)) for p, r in heads)
    wide = tuple(TensorSpec(f"blk.0.ffn_{p}.weight", "Q4_0", (96, 64)) for p in ("gate", "up"))
    ffn = (
        *wide,
        TensorSpec("blk.0.ffn_down.weight", "Q4_0", (64, 96)),
        TensorSpec("blk.0.ffn_norm.weight", "F32", (64,)),
    )
    units = (
        Unit("embedding", EMBEDDING, -1, (TensorSpec("token_embd.weight", "Q8_0", (320, 64)),)),
        Unit("attention.0", ATTENTION, 0, attention),
        Unit("ffn.0", FFN, 0, ffn),
        Unit("output", OUTPUT, -1, (TensorSpec("output.weight", "Q8_0", (320, 64)),)),
    )
    return ModelSpec("small", "", config, units)


def test_a_model_adds_exactly_its_own_shapes():
    shapes = model_shapes(small_spec())
    assert set(shapes.matmuls) == {("Q8_0", 64, 64), ("Q8_0", 32, 64), ("Q4_0", 96, 64), ("Q4_0", 64, 96)}
    assert shapes.heads == (("Q8_0", 320, 64),)
    assert shapes.embedding == (("Q8_0", 64),)
    assert shapes.attention == (Attend(2, 1, 32),)
    assert shapes.widths == ((64, 96),)
    jobs = list_jobs("host", TINY, shapes)
    matmuls = [job for job in jobs if "matmul" in job.label]
    assert [job.optional for job in matmuls] == sorted(job.optional for job in matmuls)
    assert sum(not job.optional for job in matmuls) == 5
    assert len({job.label for job in matmuls}) == len(matmuls) == 7


def test_a_model_of_many_types_adds_one_shape_of_each_type_but_the_four_with_most_bytes():
    spec = small_spec()
    types = ("Q8_0", "Q4_0", "IQ4_NL", "Q5_0", "MXFP4", "Q5_1", "Q4_1")
    units = []
    for layer, qtype in enumerate(types):
        for unit in spec.units[1:-1]:
            sizes = [replace(t, qtype=qtype) if len(t.shape) == 2 else t for t in unit.tensors]
            units.append(replace(unit, name=f"{unit.name} {qtype}", layer=layer, tensors=tuple(sizes)))
    found = model_shapes(replace(spec, units=(spec.units[0], *units, spec.units[-1]))).matmuls
    counts = Counter(qtype for qtype, *_ in found)
    assert set(counts) == set(types)
    whole = len({(rows, cols) for _, rows, cols in found})
    assert sorted(counts.values()) == [1, 1, 1] + [whole] * 4 and counts["Q8_0"] == whole > 1


def test_one_profile_times_the_shapes_of_several_models_each_once():
    small, experts = model_shapes(small_spec()), model_shapes(ExpertsFile(RULES["of the chosen"]).spec)
    wide = replace(small, attention=small.attention[:0], widths=((128, 192),), matmuls=(("Q4_0", 192, 128),), context=9)
    joined = join_shapes([small, experts, wide])
    assert joined.context == max(small.context, experts.context)
    assert joined.widths == tuple(dict.fromkeys((*small.widths, *experts.widths, *wide.widths)))
    jobs = {job.label for job in list_jobs("host", TINY, joined) if not job.optional}
    for one in (small, experts):
        assert {job.label for job in list_jobs("host", TINY, one) if not job.optional} <= jobs
    assert any("192x128" in label for label in jobs)
    norms = [job for job in list_jobs("host", TINY, joined) if "norm" in job.label]
    grid = [job for job in list_jobs("host", TINY, None) if "norm" in job.label]
    assert len(norms) == len(joined.widths) + len(grid)  # of every width, whoever has attention


def test_a_model_with_experts_adds_these_and_its_router_and_no_stack_as_a_matrix():
    rule = RULES["of the chosen"]
    shapes = model_shapes(ExpertsFile(rule).spec)
    assert shapes.experts == (("F32", "F32", 64, rule),)
    assert shapes.routers == (("F32", 64, rule),)
    assert not {rows for _, rows, _ in shapes.matmuls} & {rule.count, rule.count * rule.d_expert, rule.count * 64}
    jobs = [job for job in list_jobs("host", TINY, shapes) if "router" in job.label or "experts" in job.label]
    assert [job.optional for job in jobs] == [False, False, True, True]  # the grid's are the last
    alike = replace(shapes, experts=(("Q4_0", "Q8_0", 64, replace(RULE, scale=2.5)),))
    assert len([job for job in list_jobs("host", TINY, alike) if "experts" in job.label]) == 1


def pairs_timed(pairs: Sequence[tuple[str, str]], ranks: int = 1) -> set[tuple[str, str, int]]:
    """Types and rows of the experts that are timed of a model with these types of gates and downs."""
    spec = ExpertsFile(Experts(8, 2, 256), d_model=256).spec
    (experts,) = [unit for unit in spec.units if unit.kind.parts][:1]
    units = []
    for number, (gate, down) in enumerate(pairs):
        tensors = (
            replace(t, qtype=down if "down_exps" in t.name else gate if t.parts else t.qtype) for t in experts.tensors
        )
        units.append(replace(experts, name=f"experts.{number}", layer=number, tensors=tuple(tensors)))
    shapes = model_shapes(replace(spec, units=(spec.units[0], *units, spec.units[-1])), ranks)
    return {(gate, down, rule.d_expert) for gate, down, _, rule in shapes.experts}


@pytest.mark.parametrize("layers", [6, 7])
def test_types_of_experts_are_timed_in_pairs_or_each_with_itself_where_pairs_are_many(layers: int) -> None:
    types = ("Q8_0", "Q4_0", "IQ4_NL", "Q5_0", "MXFP4", "Q5_1", "Q4_1", "Q8_0")[: layers + 1]
    timed = {(gate, down) for gate, down, _ in pairs_timed(list(pairwise(types)))}
    assert timed == (set(pairwise(types)) if layers == 6 else {(t, t) for t in types})


def test_pairs_of_types_stay_where_each_type_with_itself_would_be_more() -> None:
    pairs = [("Q8_0", "Q4_0"), ("IQ4_NL", "Q5_0"), ("MXFP4", "Q5_1"), ("Q4_1", "Q4_K"), ("Q5_K", "Q6_K")]
    pairs += [("Q2_K", "Q3_K"), ("IQ2_XXS", "IQ3_S")]
    assert {(gate, down) for gate, down, _ in pairs_timed(pairs)} == set(pairs)


def test_slices_that_end_within_a_block_keep_their_pairs_and_no_others_do() -> None:
    gates, downs = ("Q4_K", "Q5_K", "Q6_K", "Q3_K"), ("Q8_0", "Q5_0")
    timed = pairs_timed([*product(gates, downs)], ranks=2)
    assert {each for each in timed if each[2] == 256} == {(t, t, 256) for t in (*gates, *downs)}
    assert {each for each in timed if each[2] == 128} == {(*pair, 128) for pair in product(gates, downs)}


def test_slices_of_experts_are_timed_where_several_devices_may_share_them():
    spec = ExpertsFile(Experts(8, 2, 96)).spec
    assert [rule.d_expert for *_, rule in model_shapes(spec).experts] == [96]
    assert [rule.d_expert for *_, rule in model_shapes(spec, 2).experts] == [48, 96]
    assert [rule.d_expert for *_, rule in model_shapes(spec, 4).experts] == [32, 48, 96]  # of two of four


def test_only_the_grid_is_skipped_for_lack_of_time(monkeypatch):
    monkeypatch.setattr("pshard.profile.measure.disturbed_share", lambda before, after: 0.0)
    ran: list[str] = []
    jobs = [
        replace(job, run=lambda bench, label=job.label: ran.append(label) or [])
        for job in list_jobs("host", TINY, model_shapes(small_spec()))
    ]
    rows, skipped = run_jobs(jobs, deadline=0.0, benches={"host": None}, progress=lambda label, share: None, notes=[])
    assert rows == [] and skipped == 4
    assert ran == [job.label for job in jobs if not job.optional]


def test_without_a_model_one_of_each_sort_is_timed_however_busy_the_machine_is():
    """A profile without a product could not plan anything."""
    jobs = list_jobs("host", TINY, None)
    needed = {job.run.func for job in jobs if not job.optional}
    assert needed == {job.run.func for job in jobs} and any(job.optional for job in jobs)


def test_what_the_card_cannot_run_is_left_out_with_a_note():
    """A kernel that no tile makes run, one that lacks shared memory as Triton tells it; any other error ends."""
    row = MatmulTiming("acc", "Q4_0", 64, 64, 1, 1.0)

    def refuse(bench: object) -> list[MatmulTiming]:
        why = "prefill_kernel needs 163840 of shared memory: A card (sm_86) cannot run this"
        raise KernelRefused(f"{why}; use --kernels plain (slow)")

    def lack_room(bench: object) -> list[MatmulTiming]:
        raise NoRoom("operands of 2000 MiB do not fit the GPU's free memory; end other programs on it")

    def lack(bench: object) -> list[MatmulTiming]:
        from triton.runtime.errors import OutOfResources

        raise OutOfResources(163840, 101376, "shared memory")

    def break_down(bench: object) -> list[MatmulTiming]:
        raise ValueError("a shape")

    notes: list[str] = []
    runs = {"attention": refuse, "products": lambda bench: [row]} | ({"norms": lack} if find_spec("triton") else {})
    jobs = [Job("acc", label, 1.0, False, run) for label, run in runs.items()]
    assert run_jobs(jobs, {"acc": None}, 0.0, lambda label, share: None, notes) == ([row], 0)
    assert notes[0].startswith("attention was left out: prefill_kernel needs") and len(notes) == len(jobs) - 1
    assert all("163840 of shared memory" in note for note in notes)
    jobs = [replace(job, kernel=f"{job.label} of a kind") for job in jobs] * 2
    rows, _ = run_jobs(jobs, {"acc": None}, 0.0, lambda label, share: None, [])
    why = "prefill_kernel needs 163840 of shared memory: A card (sm_86) cannot run this"
    assert rows[:2] == [row, RefusedKernel("acc", "attention of a kind", why)] and len(rows) == len(runs)
    full = Job("acc", "attention", 1.0, False, lack_room, "attention of a kind")  # it may well run
    assert run_jobs([full], {"acc": None}, 0.0, lambda label, share: None, []) == ([], 0)
    with pytest.raises(ValueError, match="a shape"):
        run_jobs([Job("acc", "rows", 1.0, False, break_down)], {"acc": None}, 0.0, lambda label, share: None, notes)


@pytest.mark.parametrize(("allowed", "again"), [(1.0, ["two", "one"]), (0.1, ["two"])])
def test_what_others_disturbed_on_the_host_is_timed_again_the_worst_first(monkeypatch, allowed, again):
    clock, ran = ManualClock(), []
    lost = {"one": 0.1, "two": 0.3, "three": 0.01, "four": 0.9}
    monkeypatch.setattr("pshard.profile.measure.time", clock)
    monkeypatch.setattr("pshard.profile.measure.AGAIN", allowed)
    monkeypatch.setattr("pshard.profile.measure.disturbed_share", lambda before, after: lost[ran[-1]])

    def job(name: str, side: str) -> Job:
        def run(bench: object) -> list[MatmulTiming]:
            clock.sleep(1.0)
            ran.append(name)
            times = {1: 5.0, 4: 2.0} if ran.count(name) == 1 else {1: 3.0, 4: 7.0, 16: 9.0}  # the first stopped early
            return [MatmulTiming(side, name, 1, 1, tokens, seconds) for tokens, seconds in times.items()]

        return Job(side, name, 1.0, False, run)

    jobs = [job("one", "host"), job("two", "host"), job("three", "host"), job("four", "acc")]
    rows, _ = run_jobs(jobs, {"host": None, "acc": None}, 0.0, lambda label, share: None, [])
    assert ran == ["one", "two", "three", "four", *again]
    found = {name: {r.tokens: r.seconds for r in rows if r.qtype == name} for name in lost}
    assert found == {name: {1: 3.0, 4: 2.0, 16: 9.0} if name in again else {1: 5.0, 4: 2.0} for name in lost}


def test_all_reduces_need_two_devices_and_a_failure_is_a_note(monkeypatch):
    asked: list[tuple] = []

    def fail(device, ranks, sizes):
        asked.append((device, list(ranks), sizes))
        raise UserError("no group")

    monkeypatch.setattr("pshard.profile.measure.measure_collectives", fail)
    wanted = replace(request(), accelerator="cuda", effort=replace(TINY, sums=(4096,)))
    notes: list[str] = []
    assert time_collectives(wanted, devices=1, notes=notes) == () and not asked
    assert time_collectives(wanted, devices=4, notes=notes) == () and notes == ["no group"]
    time_collectives(replace(wanted, effort=replace(wanted.effort, quick=False)), devices=4, notes=notes)
    assert asked == [("cuda", [2, 4], (4096,)), ("cuda", [2, 3, 4], (4096,))]


def kinds(*names: str) -> tuple[AcceleratorInfo, ...]:
    return tuple(AcceleratorInfo("cpu", i, name, 1 << 30) for i, name in enumerate(names))


@pytest.mark.slow
def test_every_unlike_accelerator_is_measured_once(monkeypatch):
    monkeypatch.setattr("pshard.profile.measure.identify_accelerators", lambda kind: kinds("A", "A", "B", "B", "C"))
    asked, real = [], measure_accelerator

    def measure(request, accelerator, *rest):
        asked.append(accelerator.index)
        return real(request, accelerator, *rest)

    shares: list[float] = []
    monkeypatch.setattr("pshard.profile.measure.measure_accelerator", measure)
    profile = measure_machine(request(), lambda label, share: shares.append(share))
    assert asked == [2, 4] and shares == sorted(shares) and shares[-1] <= 1
    assert not profile.deltas and not profile.in_place  # which only models, and GPUs, that have them bring
    for table in set(ACCELERATOR_TABLES) - {"deltas", "in_place"}:
        rows = getattr(profile, table)
        assert {row.device for row in rows} - {"host"} == {"acc", "acc2", "acc4"}
        own, first = (
            {replace(row, device="", seconds=0.0) for row in rows if row.device == d} for d in ("acc2", "acc")
        )
        assert own == first
    assert [profile.sources(i)[0] for i in range(6)] == ["acc", "acc", "acc2", "acc2", "acc4", "acc"]
    assert profile.of_accelerator(1) is profile
    assert profile.of_accelerator(2) == profile.of_accelerator(3) != profile


def test_launching_a_prompts_kernels_is_timed_over_real_steps():
    device = CpuDevice()
    try:
        kernels = PlainKernels(), PlainKernels()
        launch = time_launch("acc", device, kernels)
        step = next(r for r in time_steps("acc", device, kernels, Reads()).rows if r.device == "acc")
    finally:
        device.close()
    assert (launch.what, launch.device, launch.tokens, launch.width) == ("launch", "acc", 1, 1)
    assert step.seconds < launch.seconds < 0.1


@pytest.mark.parametrize("kind", ["cpu", "lanes"])
def test_drafts_are_timed_beside_steps_without(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Further drafts where the host makes them. Steps run, and take what this says of them."""
    took = {("none", 0): 1.0, ("lookup", 1): 1.5, ("draft", 1): 3.0, ("draft", 7): 9.0}
    time_step, device, kernels = draft_cost._time_step, CapturingDevice(), PlainKernels()

    def told(engine: Engine, who: str, most: int) -> float:
        assert time_step(engine, who, most) > 0
        return took[who, most]

    monkeypatch.setattr(draft_cost, "_time_step", told)
    device.kind, unit = kind, 1e-3
    try:
        rows = {row.what: row.seconds for row in time_drafts("acc", device, (kernels, kernels), unit)}
    finally:
        device.close()
    units = unit * len(make_small_model(1).units)
    on_host = {"verify": 0.5, "draft": 1.5 - units, "follow": 1.0 - units}
    assert rows == pytest.approx(on_host if kind == "cpu" else {"verify": 0.5, "draft": 1.5})


class Reads:
    """Takes so many seconds of a clock with each call."""

    def __init__(self, clock: Any = None, each: float = 0.0) -> None:
        self.calls, self._clock, self._each = 0, clock, each

    @property
    def seconds(self) -> float:
        return self.calls * self._each

    def __call__(self) -> None:
        self.calls += 1
        if self._clock is not None:
            self._clock.sleep(self._each)


class CapturingDevice(CpuDevice):
    """Keeps what is to be repeated, as CudaDevice does."""

    kind = "lanes"

    def __init__(self) -> None:
        super().__init__()
        self.graphs: dict[tuple, Callable[[], Any]] = {}
        self.left: list[int] = []  # of each executor that was closed: how much it had captured

    def repeat(self, key: tuple, worth_it: bool, work: Callable[[], Any]) -> None:
        self.graphs[key] = work
        work()

    def forget_repeats(self) -> None:
        self.left.append(len(self.graphs))
        self.graphs.clear()


@pytest.fixture
def quick_fills(monkeypatch):
    """A CPU takes long to fill what keeps a GPU busy."""
    monkeypatch.setattr("pshard.profile.timed.step_cost.FILLED", 1 << 12)


@pytest.mark.usefixtures("quick_fills")
def test_walks_on_one_device_share_no_graphs():
    device, kernels = CapturingDevice(), PlainKernels()
    kernels.repeatable = True
    try:
        figures = time_steps("acc", device, (kernels, kernels), Reads())
        acc, host, turns, step, streamed, pairs, *others = device.left
        assert not device.graphs and (acc, host, turns, step, streamed, pairs) == (1, 0, 9, 1, 9, 13)
        assert others == [1, 1, 1]  # of fewer layers, and where the accelerator is busy
        assert {(r.device, r.what) for r in figures.rows} == {
            ("acc", "step"), ("acc", "turn"), ("host", "step"), ("acc", "copy"), ("acc", "run")
        }  # fmt: skip
        assert figures.handoff > 0 and all(0 < r.seconds < 0.1 for r in figures.rows)
    finally:
        device.close()


class SlowLanes(CapturingDevice):
    """Beginning a walk, starting a copy and starting what is repeated take the host a known time, nothing else any."""

    BEGIN, COPY, LAUNCH = 0.005, 0.002, 0.003

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()

    def computing(self) -> Any:
        self.clock.sleep(self.BEGIN)
        return super().computing()

    def copy_in(self, dst: Any, src: Any, after: Any = ()) -> Any:
        self.clock.sleep(self.COPY)
        return super().copy_in(dst, src, after)

    def repeat(self, key: tuple, worth_it: bool, work: Callable[[], Any]) -> None:
        self.clock.sleep(self.LAUNCH)
        super().repeat(key, worth_it, work)


@pytest.mark.usefixtures("quick_fills")
def test_a_step_pays_for_copies_runs_and_hand_offs_and_not_for_what_cpu_units_take(monkeypatch):
    device, kernels = SlowLanes(), PlainKernels()
    reads = Reads(device.clock, 0.004)
    kernels.repeatable = True
    monkeypatch.setattr("pshard.profile.timed.step_cost.time", device.clock)
    try:
        figures = time_steps("acc", device, (kernels, kernels), reads)
    finally:
        device.close()
    assert reads.calls == (16 + 8 + 8 + 4) * WALKS  # units of the walks on the CPU, by turns, streamed, in pairs
    rows = {(r.device, r.what): r.seconds for r in figures.rows}
    assert rows["acc", "copy"] == pytest.approx(SlowLanes.COPY)
    assert rows["acc", "run"] == pytest.approx(SlowLanes.LAUNCH, abs=1e-6)
    assert rows["acc", "turn"] == pytest.approx(SlowLanes.BEGIN, abs=1e-6)
    assert figures.handoff == pytest.approx(SlowLanes.LAUNCH, abs=1e-6)
    assert rows["acc", "step"] == pytest.approx(1e-7) and rows["host", "step"] == pytest.approx(1e-7)  # one graph


def test_units_of_the_host_that_cost_less_by_turns_make_no_walk_by_turns_dearer_than_it_is(monkeypatch):
    walks = {"pinned": 60e-6, "cpu": 18 * 24e-6, "turns": 150e-6}
    monkeypatch.setattr("pshard.profile.timed.step_cost._time_walk", lambda where, *_: walks[where])
    figures = time_steps("acc", CpuDevice(), (PlainKernels(), PlainKernels()), Reads())
    (host,) = (r.seconds for r in figures.rows if r.device == "host")
    acc = (walks["pinned"] - host - figures.handoff / 2) / 17
    assert 9 * host + 9 * acc + 8.5 * figures.handoff == pytest.approx(walks["turns"], rel=0.01)
    assert figures.handoff == 1e-7 and host < 24e-6


def test_with_the_cpu_as_accelerator_both_sides_are_timed_alike():
    device, reads = CpuDevice(), Reads()
    try:
        figures = time_steps("acc", device, (PlainKernels(), PlainKernels()), reads)
    finally:
        device.close()
    assert not reads.calls
    assert {(r.device, r.what) for r in figures.rows} == {("acc", "step"), ("host", "step")}  # copies are threads' work


def test_gpus_differ_by_name_capability_or_memory():
    gpu = AcceleratorInfo("cuda", 0, "G", 80 << 30, 5, 16, "1.0", "9.0")
    others = (
        replace(gpu, index=1, pcie_width=8),
        replace(gpu, index=2, capability="10.0"),
        replace(gpu, index=3, memory_bytes=40 << 30),
        replace(gpu, index=4, name="H"),
        replace(gpu, index=5, name="H", driver="2.0"),
    )
    assert [a.index for a in unlike_accelerators((gpu, *others))] == [0, 2, 3, 4]
    assert [a.index for a in unlike_links((gpu, *others))] == [1]


@pytest.fixture(scope="module")
def disturbed() -> MachineProfile:
    """Of a machine whose second accelerator has another link, and whose cores others had."""
    slow = [replace(a, pcie_width=4) if i % 2 else a for i, a in enumerate(kinds("A", "A", "A", "A"))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pshard.profile.measure.identify_accelerators", lambda kind: tuple(slow))
        patch.setattr("pshard.profile.measure.disturbed_share", lambda before, after: 0.3)
        return measure_machine(request(), lambda label, share: None)


def test_a_profile_says_that_others_had_the_cores(disturbed):
    assert sum("30%" in note for note in disturbed.provenance.notes) == 1
    assert disturbed.busy in disturbed.provenance.notes and not describe_busy("kernels were", 0.04)


def test_a_profile_says_beside_which_load_a_disk_was_timed(disturbed):
    """Of the units that a run reads; in a line with what it says of kernels."""
    rows = [DiskTiming(disk, True, 0, 0, 1 << 20, 1e-3, 0.0, lost) for disk, lost in (("quiet", 0.04), ("nvme", 0.4))]
    said = "other programs or machines had cores while nvme was timed, which may have cost 40% of the time"
    busy = replace(disturbed, disks=tuple(rows)).busy
    assert busy.count("kernels were timed") == 1 and f"; {said}: profile again" in busy and "quiet" not in busy
    calm = replace(disturbed, provenance=replace(disturbed.provenance, notes=()), disks=tuple(rows))
    assert calm.busy.startswith(said) and calm.of_disk("quiet").busy is None
    assert list_gaps(calm, False, False)[0].startswith(f"the profile is of a busy machine: {said}")


def test_like_accelerators_with_another_link_have_their_own_copies(disturbed):
    assert {c.device for c in disturbed.copies} == {"acc", "acc1"}
    assert {m.device for m in disturbed.matmuls} == {"host", "acc"}
    assert [disturbed.sources(i) for i in range(4)] == [
        ("acc",) * 8,
        ("acc", "acc", "acc", "acc1", "acc", "acc", "acc", "acc"),
    ] * 2


@pytest.mark.slow
def test_shares_of_two_ranks_are_measured_in_real_processes(monkeypatch):
    monkeypatch.setattr("pshard.profile.measure.count_cores", lambda: 2)
    effort = replace(TINY, sums=(4096,), copy_sizes=(64 * KIB, 1024 * KIB), share_seconds=0.02)
    profile = measure_machine(replace(request(), effort=effort), lambda label, share: None)
    assert {(s.ranks, s.what, s.size) for s in profile.shares} == {
        *((2, "matmul", tokens) for tokens in TOKENS),
        (2, "copy", COPY_BYTES),
    }
    assert all(min(s.whole, s.alone, s.together) > 0 for s in profile.shares)
    assert {c.ranks for c in profile.collectives} == {2}
    assert from_json(MachineProfile, json.loads(json.dumps(to_json(profile)))) == profile


def test_a_group_that_cannot_start_is_a_note(monkeypatch):
    def fail(*arguments):
        raise UserError("no group")

    monkeypatch.setattr("pshard.profile.measure.measure_shares", fail)
    notes: list[str] = []
    wanted = replace(request(), effort=replace(TINY, sums=(4096,)))
    assert time_shares(wanted, 2, None, notes) == () and notes == ["no group"]


def test_attention_is_timed_up_to_the_context():
    points = dict(attention_points((1, 16, 512, 4096), context=8192))
    assert points[1] == (128, 1024, 4096, 8192)
    assert points[512] == (512, 4096, 8192)
    assert points[4096] == (4096, 8192)


def test_sequences_that_are_timed_together_have_cells_of_their_own():
    seen = []

    class Recorder(PlainKernels):
        def attention(self, qkv, heads, kv, rows, scale, out, partial):
            seen.append((qkv.shape, tuple(kv.k.shape), rows))
            out.zero_()

    cpu = torch.device("cpu")
    bench = KernelBench("host", Recorder(), cpu, OperandPool(1024 * KIB, cpu), Pace(0.001), slow=0.5)
    shape = Attend(2, 1, 32)
    rows = time_attention(bench, shape, "bf16", 1, (100, 4096), sequences=16)
    assert [(r.sequences, r.tokens, r.context) for r in rows] == [(16, 1, 100)]  # 8 MiB are more than the pool has
    (width, cells, index) = seen[0]
    assert width == (16, 4 * 32) and cells == (32, 64, 1, 32)
    assert sorted(b for s in index.segments for b in s.blocks) == list(range(32))
    assert {(s.tokens, s.past) for s in index.segments} == {(1, 99)}


def test_a_full_run_expects_to_take_longer_than_a_quick_one():
    quick, full = (replace(request(), effort=effort(32 << 20, 16 << 30)) for effort in (quick_effort, full_effort))
    assert expected_seconds(quick) <= 60 < expected_seconds(full) < 1200


def test_command_prints_json_alone_and_compares_with_the_last_profile(tmp_path, monkeypatch, capsys, profile):
    asked: list[ProfileRequest] = []
    monkeypatch.setattr("pshard.profile.effort.quick_effort", lambda cache, memory: TINY)
    monkeypatch.setattr("pshard.profile.measure.measure_machine", lambda want, _: asked.append(want) or profile)
    path = tmp_path / "deep" / "machine.json"
    assert cli_profile.main(["--quick", "--device", "cpu", "-t", "1", "--json", "-o", str(path)]) == 0
    out = capsys.readouterr().out
    assert json.loads(out) == json.loads(path.read_text())
    assert cli_profile.main(["--quick", "--device", "cpu", "-t", "1", "-o", str(path)]) == 0
    out = capsys.readouterr().out
    assert "Matmuls on the CPU" in out and "since 20" in out and "…" not in out
    assert "Q4_0/Q8_0, 2 of 4, 32x64, CPU" in out
    assert [p.name for p in path.parent.iterdir()] == ["machine.json"]
    assert [(want.accelerator, want.effort, want.threads) for want in asked] == [("cpu", TINY, 1)] * 2


@pytest.mark.parametrize(
    "argv, complaint",
    [
        (["--quik"], "--quik"),
        (["-t", "0"], "number of threads"),
        (["-t", "100000"], "cores"),
        (["--device", "tpu"], "tpu"),
        (["-o", "."], "folder"),
        (["-m", "no-such-model.gguf"], "no-such-model.gguf"),
    ],
)
def test_bad_flags_are_one_line_and_exit_code_two(argv, complaint, capsys):
    assert cli_profile.main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and complaint in captured.err


def test_interrupting_leaves_no_file(tmp_path, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("pshard.profile.measure.measure_machine", interrupt)
    assert cli_profile.main(["--quick", "--device", "cpu", "-o", str(tmp_path / "p.json")]) == 130
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
def test_a_gpu_has_figures_of_its_own():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    profile = measure_machine(replace(request(), accelerator="cuda"), lambda label, share: None)
    assert profile.accelerators[0].kind == "cuda" and profile.accelerators[0].memory_bytes > 1 << 30
    sides = {side: {m.seconds for m in profile.matmuls if m.device == side} for side in ("host", "acc")}
    decode = next(m for m in profile.matmuls if (m.device, m.qtype, m.tokens) == ("acc", "Q4_0", 1))
    assert decode.seconds < 20e-6  # a launch takes longer: it was timed in a graph
    assert sides["acc"] and sides["acc"] != sides["host"]
    costs = {e.what: e.seconds for e in profile.elementwise if e.device == "acc" and e.width == 1}
    assert 20e-6 < costs["launch"] < 2e-3  # ten launches
    assert costs["step"] < costs["launch"]
    assert 1e-7 <= costs["copy"] < 5e-4 and 1e-7 <= costs["run"] < 5e-4
    assert {c.memory for c in profile.copies} == {"pinned", "staged", "pageable"}
    assert 1e-5 < costs["draft"] < 5e-3 and costs["verify"] < 5e-3 and "follow" not in costs
    assert 1e-7 <= profile.handoff_seconds < 1e-2  # the least, where a unit itself has it all
