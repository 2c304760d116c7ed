"""Costs: what the profile timed comes back, what it did not is scaled from the nearest, and gaps are named."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from golden.shapes import make_shape
from planner_cases import DESKTOP, make_model

from pshard.batch import VERIFY, Batch
from pshard.cuts.rank_parts import cut_ranks
from pshard.errors import UserError
from pshard.machine import (
    AttentionTiming,
    CollectiveTiming,
    Contention,
    ElementwiseTiming,
    InPlaceTiming,
    MachineProfile,
    MatmulTiming,
    ShareTiming,
)
from pshard.plan import Correction, Factor
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.planner.price.host_limits import usable_bytes
from pshard.planner.price.price_operations import OneSide, price_operations
from pshard.planner.price.profile_tables import Tables, find_tables
from pshard.planner.price.tier_costs import tier_costs
from pshard.planner.price.tier_loads import TierLoad
from pshard.planner.price.unit_costs import Setting, divided_cost, unit_cost
from pshard.planner.remedies.better_machine import double_link
from pshard.steps.step import AllReduce, Gather
from pshard.tensor import TensorSpec
from pshard.units.ffn import FFN
from pshard.units.operands import BRANCH, STREAM, Rows
from pshard.units.operations import Norm, Product, Take
from pshard.units.quantised import find_runs
from pshard.units.share import Share
from pshard.workload import Split, Workload

PROFILE = profile_from_datasheet(DESKTOP)
WORKLOAD = Workload((1000,), context=4096)
DECODE = TierLoad(Batch.even(1, 1, 1000))
ROUTED = make_shape("qwen3-30b-a3b")
TAUGHT = Correction(tuple(Factor("acc", "experts", batch, 2.0) for batch in ("small", "large")))


def with_matmuls(*rows: MatmulTiming) -> MachineProfile:
    return replace(PROFILE, matmuls=rows)


def test_a_timed_matrix_costs_what_was_timed():
    tables = Tables(PROFILE)
    for m in PROFILE.matmuls[::37]:
        assert tables.matmul(m.device, m.qtype, m.rows, m.cols, m.tokens) == pytest.approx(m.seconds)


def test_a_matrix_between_timed_sizes_takes_their_rate():
    tables = Tables(
        with_matmuls(
            MatmulTiming("acc", "Q4_0", 1000, 1000, 1, 1e-5),
            MatmulTiming("acc", "Q4_0", 4000, 4000, 1, 1.6e-4),
        )
    )
    assert tables.matmul("acc", "Q4_0", 2000, 2000, 1) == pytest.approx(4e-5)
    assert tables.matmul("acc", "Q4_0", 8000, 8000, 1) == pytest.approx(6.4e-4)


def test_an_untimed_quant_type_is_scaled_by_bytes_in_small_batches_only():
    tables = Tables(
        with_matmuls(*(MatmulTiming("acc", "Q8_0", 4096, 4096, tokens, 1e-4 * tokens) for tokens in (1, 128)))
    )
    assert tables.matmul("acc", "Q4_0", 4096, 4096, 1) == pytest.approx(1e-4 * 18 / 34, rel=0.02)
    assert tables.matmul("acc", "Q4_0", 4096, 4096, 128) == pytest.approx(1e-4 * 128)


def test_products_of_one_input_are_one_launch_in_small_batches():
    """1 us a launch and 1 ps an element: what is launched together saves launches, and gate and up no activation."""
    spec = make_model(layers=1, d_model=1024, heads=8, kv_heads=2, d_ffn=4096)
    shapes = {(m.rows, m.cols) for u in spec.units[1:3] for m in u.matrices} | {(1536, 1024), (8192, 1024)}
    profile = with_matmuls(
        *(
            MatmulTiming(side, "Q4_0", rows, cols, tokens, 1e-6 + rows * cols * 1e-12)
            for side in ("acc", "host")
            for rows, cols in shapes
            for tokens in (1, 64, 65)
        )
    )
    profile = replace(profile, elementwise=(ElementwiseTiming("acc", "silu_mul", 1, 4096, 5e-6),))
    bias = TensorSpec("blk.0.ffn_gate.bias", "F32", (4096,))
    units = *spec.units[:3], replace(spec.units[2], tensors=(*spec.units[2].tensors, bias))

    def seconds(unit: int, tokens: int, kind: str = "cuda") -> float:
        accelerators = (replace(profile.accelerators[0], kind=kind),)
        tables, load = Tables(replace(profile, accelerators=accelerators)), TierLoad(Batch.even(tokens, 1))
        cost = unit_cost(units[unit], Setting(spec, tables, load, WORKLOAD)).acc
        attention = tables.attention("acc", spec.config, "bf16", tokens, tokens)
        return cost - (attention if unit == 1 else 0.0)

    elements = [sum(m.rows * m.cols for m in u.matrices) * 1e-12 for u in spec.units[:3]]
    assert seconds(1, 1) == pytest.approx(elements[1] + 2e-6, rel=1e-3)
    assert seconds(2, 1) == pytest.approx(elements[2] + 2e-6, rel=1e-3)
    # a bias comes before the product of both, which nobody leaves quantised then; only one has it, so they go apart
    assert seconds(3, 1) == pytest.approx(elements[2] + 3e-6 + 2 * 5e-6, rel=1e-3)
    assert seconds(2, 1, "cpu") == pytest.approx(elements[2] + 3e-6 + 5e-6, rel=1e-3)
    assert seconds(2, 64) == pytest.approx(elements[2] + 2e-6, rel=1e-3)
    assert seconds(2, 65) == pytest.approx(elements[2] + 3e-6 + 65 * 5e-6, rel=1e-3)
    # on a CPU q, k and v only, as far as its vectors are the fastest
    assert seconds(1, 16, "cpu") == pytest.approx(elements[1] + 2e-6, rel=1e-3)
    assert seconds(1, 65, "cpu") == pytest.approx(elements[1] + 4e-6, rel=1e-3)
    profile = replace(profile, host=replace(profile.host, isa="avx512_vnni+amx"))
    assert seconds(1, 16, "cpu") == pytest.approx(elements[1] + 2e-6, rel=1e-3)
    assert seconds(1, 17, "cpu") == pytest.approx(elements[1] + 4e-6, rel=1e-3)


def test_what_nobody_left_quantised_takes_a_launch_more_of_a_gpus_small_batches():
    """Behind a copy; behind a norm, and above 64 tokens, products take what is there."""
    copied = Take(STREAM, 1024), Product(TensorSpec("blk.0.a", "Q4_0", (64, 1024)))
    normed = Norm(TensorSpec("blk.0.n", "F32", (1024,)), 1024), *copied[1:]
    rows = tuple(ElementwiseTiming("acc", what, 1, 1024, s) for what, s in (("norm", 1e-6), ("silu_mul", 2e-6)))
    timed = ElementwiseTiming("acc", "quantise", 1, 1024, 4e-6)

    def more(tokens: int, *own: ElementwiseTiming, side: str = "acc") -> float:
        tables, load = Tables(replace(PROFILE, elementwise=own)), TierLoad(Batch.even(tokens, 1))
        by = OneSide(side, tables, load, tokens, "bf16")
        return price_operations(copied, by) - price_operations(normed, by)

    assert more(1, *rows) == pytest.approx(2e-6) and more(1, *rows, timed) == pytest.approx(4e-6)
    assert more(65, *rows, timed) == pytest.approx(0.0, abs=1e-12)
    assert more(1, *rows, timed, side="host") == pytest.approx(0.0, abs=1e-12)


def test_a_gpu_makes_norms_by_which_units_end_with_the_norm_that_follows():
    """What two norms take together is the price of the last of the one unit and the first of the next; of further norms
    at the end, what they take beyond a launch. Where that was not timed, all are apart."""
    width, weight = 1024, TensorSpec("blk.0.n", "F32", (1024,))
    first, last = Norm(weight, width), Norm(weight, width, adds=True, x=BRANCH, out=STREAM)
    parts = Norm(weight, width, x=Rows("a"), out=BRANCH), Norm(weight, width, adds=True, x=Rows("b"), out=BRANCH)
    rows = [ElementwiseTiming("acc", what, n, width, n * s)
            for what, s in (("norm", 2e-6), ("residual", 5e-7)) for n in (1, 100)]  # fmt: skip
    timed = [ElementwiseTiming("acc", "two norms", n, width, n * 3e-6) for n in (1, 100)]

    def seconds(operations: Sequence[Norm], tokens: int, own: list[ElementwiseTiming], side: str = "acc") -> float:
        tables, load = Tables(replace(PROFILE, elementwise=tuple(own))), TierLoad(Batch.even(tokens, 1))
        behind = operations[0] is first
        return price_operations(operations, OneSide(side, tables, load, tokens, "bf16", behind_norms=behind))

    both = (last,), (first,)
    assert sum(seconds(one, 1, rows) for one in both) == pytest.approx(4.5e-6)
    assert sum(seconds(one, 1, rows + timed) for one in both) == pytest.approx(3e-6)
    assert sum(seconds(one, 100, rows + timed) for one in both) == pytest.approx(3e-4)
    assert seconds((*parts, last), 1, rows) == pytest.approx(7e-6)
    assert seconds((*parts, last), 1, rows + timed) == pytest.approx(3e-6)
    assert seconds((*parts, last), 100, rows + timed) == pytest.approx(7e-4 - 2 * 2e-6)
    on_host = [replace(row, device="host") for row in rows + timed]
    assert sum(seconds(one, 1, on_host, "host") for one in both) == pytest.approx(4.5e-6)


@pytest.mark.parametrize(("types", "launches"), [
    (("Q4_0",) * 3, [3]), (("Q4_0",) * 5, [3, 2]), (("Q4_0", "Q6_K", "Q4_0"), [1, 1, 1]), (("F32", "F32"), [1, 1]),
])  # fmt: skip
def test_matrices_of_one_input_go_together_by_three_of_a_packed_type(types: tuple[str, ...], launches: list[int]):
    assert [len(run) for run in find_runs([(q, 32, False) for q in types])] == launches
    assert len(find_runs([("Q4_0", 32, n == 1) for n in range(3)])) == 3  # a bias or none
    assert len(find_runs([("Q4_0", 24, False)] * 2)) == 2  # which are no whole records


def test_attention_grows_with_context_and_heads_read():
    tables, config = Tables(PROFILE), make_model(heads=8, kv_heads=8).config
    near, far = (tables.attention("acc", config, "bf16", 1, context) for context in (8192, 65536))
    assert far == pytest.approx(8 * near, rel=0.1)
    few, fourth = replace(config, n_kv_heads=2), tables.attention("acc", config, "bf16", 1, 16384)
    assert tables.attention("acc", few, "bf16", 1, 65536) == pytest.approx(fourth)  # with its launch
    on_host = [tables.attention("host", heads, "bf16", 1, 65536) for heads in (config, few)]
    assert on_host[1] == pytest.approx(on_host[0] / 4)
    assert tables.attention("acc", config, "bf16", 512, 8192) > tables.attention("acc", config, "bf16", 512, 1024)


def test_few_heads_take_what_as_many_bytes_of_more_take_and_no_launch_less():
    config = replace(make_model(heads=32, kv_heads=8).config, head_dim=128)
    curve = {128: 5e-6, 1024: 6e-6, 16384: 24e-6}
    rows = tuple(AttentionTiming("acc", 32, 8, 128, "bf16", 1, context, s) for context, s in curve.items())
    tables = Tables(replace(PROFILE, attention=(*(a for a in PROFILE.attention if a.device == "host"), *rows)))
    half = replace(config, n_heads=16, n_kv_heads=4)
    assert tables.attention("acc", half, "bf16", 1, 2048) == pytest.approx(6e-6)
    assert tables.attention("acc", half, "bf16", 1, 32768) == pytest.approx(24e-6)
    assert tables.attention("acc", half, "bf16", 1, 128) == pytest.approx(5e-6)


def test_sequences_that_decode_together_read_all_their_cells():
    spec, tables = make_model(), Tables(PROFILE)
    one = unit_cost(spec.units[1], Setting(spec, tables, TierLoad(Batch.even(1, 1, 4000)), WORKLOAD))
    four = unit_cost(spec.units[1], Setting(spec, tables, TierLoad(Batch.even(4, 4, 4000)), WORKLOAD))
    assert four.kv_fetch_bytes == 4 * one.kv_fetch_bytes
    assert one.acc < four.acc < 4 * one.acc


def test_sequences_that_were_timed_together_cost_that():
    config = replace(make_model(heads=32, kv_heads=8).config, head_dim=128)
    rows = tuple(
        AttentionTiming("host", 32, 8, 128, "bf16", 1, context, 4e-3 * context / 1024 * n / 16, n)
        for n in (16, 64)
        for context in (128, 1024)
    )
    alone, tables = Tables(PROFILE), Tables(replace(PROFILE, attention=PROFILE.attention + rows))

    def seconds(n: int, context: int) -> float:
        return tables.decode_attention("host", config, "bf16", n, context)

    assert seconds(16, 1024) == pytest.approx(4e-3) and seconds(64, 512) == pytest.approx(8e-3)
    assert seconds(128, 1024) == pytest.approx(32e-3)  # as fast as 64
    assert seconds(1, 4096) == alone.attention("host", config, "bf16", 1, 4096)
    assert seconds(1, 4 * 1024) < seconds(4, 1024) < seconds(16, 256)
    half = replace(config, n_kv_heads=4, n_heads=16)
    assert tables.decode_attention("host", half, "bf16", 16, 1024) == pytest.approx(2e-3)
    assert alone.decode_attention("host", config, "bf16", 16, 1024) == alone.attention(
        "host", config, "bf16", 1, 16 * 1024
    )


def test_only_the_wanted_rows_of_logits_are_computed():
    spec, tables = make_model(vocab=32768), Tables(PROFILE)
    head = spec.output
    prefill = unit_cost(head, Setting(spec, tables, TierLoad(Batch.even(512, 1)), WORKLOAD))
    assert prefill.acc == pytest.approx(unit_cost(head, Setting(spec, tables, DECODE, WORKLOAD)).acc)


def test_a_verify_batch_is_priced_as_a_prompt_of_its_size_with_logits_of_all_its_tokens():
    spec, tables = make_model(vocab=32768), Tables(PROFILE)
    for unit in spec.units:
        verify, prompt, wide, decode = (
            unit_cost(unit, Setting(spec, tables, TierLoad(batch), WORKLOAD))
            for batch in (
                Batch.even(32, 4, 1000, VERIFY),
                Batch.even(32, 4, 1000),
                Batch.even(32, 32, 0),
                Batch.even(4, 4, 1000),
            )
        )
        if unit is spec.output:
            assert verify.acc == wide.acc and verify.cpu == wide.cpu > prompt.cpu
        elif unit.kind.state:  # a text's cells are read once for its rows, which takes as long as for one at least
            assert replace(verify, acc=0, cpu=0) == replace(prompt, acc=0, cpu=0)
            assert verify.acc >= decode.acc and verify.cpu >= decode.cpu
        else:
            assert verify == prompt


def test_a_rank_that_holds_nothing_of_a_unit_spends_nothing_on_it():
    spec = cut_ranks(make_model(), Split("tensor", (1.0, 0.0)))[1]
    costs = tier_costs(spec, Tables(PROFILE), DECODE, WORKLOAD, ranks=2).units
    assert all(costs[u.name].acc == costs[u.name].link == 0 for u in spec.units if u.ports.adds)


def test_ranks_of_one_host_share_its_cores_and_memory():
    whole, tables = make_model(d_model=4096, d_ffn=14336), Tables(PROFILE)
    part = cut_ranks(whole, Split("tensor", (1.0, 1.0)))[0]
    ffn = next(u.name for u in whole.units if u.kind is FFN)
    alone = tier_costs(whole, tables, DECODE, WORKLOAD)
    both = tier_costs(part, tables, DECODE, WORKLOAD, ranks=2)
    assert both.units[ffn].cpu == pytest.approx(alone.units[ffn].cpu, rel=0.2)
    assert both.units[ffn].acc < 0.8 * alone.units[ffn].acc  # each has an accelerator of its own
    assert both.contended[ffn] == pytest.approx(alone.contended[ffn], rel=0.1)


def test_a_rank_costs_what_ranks_were_measured_to_have_of_the_host():
    whole = make_model()
    part = cut_ranks(whole, Split("tensor", (1.0, 1.0)))[0]
    name = next(u.name for u in part.units if u.kind is FFN)
    shares = (
        ShareTiming(2, "matmul", 1, 1.0, 1.2, 1.6),
        ShareTiming(2, "matmul", 64, 1.0, 1.9, 2.0),
        ShareTiming(2, "copy", 1 << 20, 1.0, 1.0, 1.5),
    )
    timed, untimed = (Tables(replace(PROFILE, shares=rows)) for rows in (shares, ()))
    prefill = TierLoad(Batch.even(64, 1))
    for mode, load, on_cpu, untimed_cpu in (
        ("tensor", DECODE, 1.6, 2.0),
        ("layer", DECODE, 1.2, 2.0),  # layers take turns at decode
        ("tensor", prefill, 2.0, 2.0),
        ("layer", prefill, 2.0, 2.0),
    ):
        workload = replace(WORKLOAD, split_mode=mode)
        one, two, old = (
            tier_costs(part, tables, load, workload, ranks).units[name]
            for tables, ranks in ((untimed, 1), (timed, 2), (untimed, 2))
        )
        step = untimed.elementwise("host", "step", 1, 1)
        assert two.cpu - step == pytest.approx(on_cpu * (one.cpu - step))
        assert old.cpu - step == pytest.approx(untimed_cpu * (one.cpu - step))
        assert two.link == pytest.approx(1.5 * one.link) and old.link == one.link
        assert two.acc == one.acc  # a GPU each
    assert timed.share("matmul", 4, 1, at_once=True) == pytest.approx(3.2)  # half of what two have, each
    assert timed.share("matmul", 2, 8, at_once=True) == pytest.approx((1.6 * 2.0) ** 0.5)
    assert timed.share("matmul", 1, 1, at_once=True) == 1.0
    noisy = Tables(replace(PROFILE, shares=(ShareTiming(2, "matmul", 1, 1.0, 0.8, 1.6),)))
    assert noisy.share("matmul", 2, 1, at_once=False) == 1.0  # no part of a host is faster than the whole


def test_contention_slows_reading_not_arithmetic():
    tables = Tables(PROFILE)
    link, cpu = tables.slowdown(10**9, 10**9 / DESKTOP.host_memory)  # reads as fast as the memory gives
    assert link < 1 and cpu < 1
    link, cpu = tables.slowdown(10**9, 100.0)
    assert link == pytest.approx(1.0, abs=0.01) and cpu == 1


def test_links_that_copy_at_once_share_the_memory_that_one_and_the_cpu_filled():
    link = Tables(PROFILE).link_rate

    def speeds(links: int, left: float = 0.8, shares: tuple[ShareTiming, ...] = ()) -> tuple[float, float]:
        rates = replace(
            PROFILE.contention, link_with_cpu=left * link, cpu_with_link=left * 3 * link, cpu_alone=3 * link
        )
        return Tables(replace(PROFILE, contention=rates, shares=shares)).slowdown(int(3e9 * link), 1e9, links)

    assert speeds(1) == pytest.approx((0.8, 0.8))  # asked for four links' worth, got 3.2
    assert speeds(2) == pytest.approx((0.64, 0.64))  # of five
    assert speeds(4) == pytest.approx((3.2 / 7, 3.2 / 7))
    hindered = (ShareTiming(2, "copy", 1 << 20, 1.0, 1.0, 2.0),)  # two links carry what one does
    assert speeds(2, shares=hindered) == pytest.approx((0.8, 0.8))
    assert speeds(2, left=1.0) == (1.0, 1.0)  # one link and the CPU had all that they wanted


def test_a_byte_that_is_read_beside_copies_takes_longer_by_the_same_time():
    rates = replace(PROFILE.contention, cpu_with_link=60e9, cpu_alone=90e9)
    tables = Tables(replace(PROFILE, contention=rates))
    added = 1e9 / 60e9 - 1e9 / 90e9
    for seconds in (1e9 / 90e9, 1e9 / 30e9, 1.0):
        _, cpu = tables.slowdown(10**9, seconds)
        assert seconds / cpu == pytest.approx(seconds + added)


def test_ranks_of_several_hosts_share_no_host_and_sum_as_was_timed_between_them():
    alike = (ShareTiming(2, "matmul", 1, 1.0, 2.0, 2.0), ShareTiming(2, "copy", 1 << 20, 1.0, 1.0, 2.0))
    timed = tuple(CollectiveTiming(way, n, 1 << 20, s) for way, n, s in (("shm", 2, 1e-5), ("gloo", 4, 1e-2)))
    busy = Contention(link_with_cpu=20e9, cpu_with_link=20e9, cpu_alone=40e9)
    profile = replace(PROFILE, collectives=timed, shares=alike, contention=busy)
    one, two = (Tables(replace(profile, ranks_per_host=n)) for n in (0, 2))
    four = Tables(replace(profile, ranks_per_host=1, collectives=timed[1:]))
    assert [t.collective(2, 1 << 20) for t in (one, two, four)] == [1e-5, 1e-5, 1e-2]
    assert [t.collective(4, 1 << 20) for t in (one, two)] == [1e-2, 1e-2]
    assert [t.hand_over(4, 1 << 20) for t in (one, two)] == [1e-5, 1e-2]  # hosts' borders are the slowest
    assert [t.share("matmul", 4, 1, True) for t in (one, two, four)] == [4.0, 2.0, 1.0]
    assert [t.share("copy", 2, 1, True) for t in (one, two, four)] == [2.0, 2.0, 1.0]
    load, spec = TierLoad(Batch.even(1, 1)), make_model(layers=1)
    alone = tier_costs(spec, one, load, WORKLOAD, ranks=1)
    assert tier_costs(spec, four, load, WORKLOAD, ranks=4).contended == alone.contended
    assert tier_costs(spec, one, load, WORKLOAD, ranks=4).contended != alone.contended
    memory = usable_bytes(PROFILE, 1)
    assert [usable_bytes(t.profile, 4) // memory for t in (two, four)] == [2, 4]


def test_all_reduces_without_measurements_go_through_host_memory():
    tables = Tables(PROFILE)
    assert tables.collective(1, 1 << 20) == 0
    assert tables.collective(4, 1 << 20) > 4 * tables.copy("h2d", 1 << 20)


@pytest.mark.parametrize(
    ("tokens", "chosen", "on_gpu", "seconds"),
    [(512, "auto", True, 1e-3), (1, "auto", True, 2e-3), (512, "auto", False, 2e-3), (512, "f32", True, 2e-3)],
)
def test_sums_are_priced_in_the_type_that_the_run_takes(tokens: int, chosen: str, on_gpu: bool, seconds: float):
    timed = tuple(CollectiveTiming("nccl", 2, 1 << 20, s, dtype) for s, dtype in ((2e-3, "f32"), (1e-3, "bf16")))
    profile = replace(PROFILE, collectives=timed)
    if not on_gpu:
        profile = replace(profile, accelerators=tuple(replace(a, kind="cpu") for a in profile.accelerators))
    workload = replace(WORKLOAD, reduce_dtype=chosen)
    costs = tier_costs(make_model(layers=1), Tables(profile), TierLoad(Batch.even(tokens, 1)), workload, ranks=2)
    assert costs.all_reduce(1 << 20) == pytest.approx(seconds)
    assert costs.meeting(AllReduce("blk.0.ffn", 1 << 20)) == pytest.approx(seconds)
    assert costs.meeting(Gather("output", 1 << 20)) == pytest.approx(2e-3)  # logits are not rounded


@pytest.mark.parametrize(("table", "what"), [("matmuls", "matmul"), ("attention", "attention"), ("copies", "copy")])
def test_a_profile_without_a_table_is_named(table, what):
    with pytest.raises(UserError, match=f"no {what} timings; run pshard-profile"):
        Tables(replace(PROFILE, **{table: ()}))


def test_a_profile_without_host_matmuls_is_named():
    tables = Tables(with_matmuls(MatmulTiming("acc", "Q4_0", 64, 64, 1, 1e-6)))
    with pytest.raises(UserError, match="no matmul timings of the host"):
        tables.matmul("host", "Q4_0", 64, 64, 1)


def test_a_link_twice_as_fast_halves_copies():
    profile = profile_from_datasheet(replace(DESKTOP, host_memory=200e9))
    before, after = Tables(profile), Tables(double_link(profile))
    assert after.copy("h2d", 1 << 26) == pytest.approx(before.copy("h2d", 1 << 26) / 2)
    assert after.link_rate == pytest.approx(2 * before.link_rate)
    assert double_link(profile).contention.link_with_cpu == 2 * profile.contention.link_with_cpu
    in_place = InPlaceTiming("acc", 1 << 20, 1, 8 << 20, 1.0)
    assert double_link(replace(profile, in_place=(in_place,))).in_place == (replace(in_place, seconds=0.5),)


@pytest.mark.parametrize("host_memory", [20e9, 30e9, 45e9, 60e9, 90e9])
def test_a_faster_link_reads_no_more_of_host_memory_than_there_is(host_memory):
    profile = profile_from_datasheet(replace(DESKTOP, link=25e9, host_memory=host_memory))
    faster = double_link(profile)
    before, after, both = profile.contention, Tables(faster), faster.contention
    assert Tables(profile).link_rate <= after.link_rate <= host_memory * (1 + 1e-9)
    assert both.link_with_cpu >= before.link_with_cpu and both.cpu_with_link <= before.cpu_with_link
    most = max(host_memory, before.link_with_cpu + before.cpu_with_link)
    assert both.link_with_cpu + both.cpu_with_link <= most * (1 + 1e-9)
    assert all(new.seconds <= old.seconds for new, old in zip(faster.copies, profile.copies))


@pytest.mark.parametrize(("tokens", "sequences"), [(1, 1), (4, 4), (128, 1), (128, 2)])
def test_divided_units_cost_the_same_in_every_plan_of_a_profile(tokens: int, sequences: int) -> None:
    """What one plan has worked out the next one takes, whatever it has in its context; not another correction's."""
    workload, tables = Workload((1000,), context=4096), find_tables(PROFILE)
    first, second = (
        tier_costs(ROUTED, tables, TierLoad(Batch.even(tokens, sequences, past)), workload) for past in (0, 900)
    )
    assert tables is find_tables(PROFILE) is not find_tables(PROFILE, TAUGHT)
    taught = tier_costs(ROUTED, find_tables(PROFILE, TAUGHT), first.load, workload)
    for share in (Share(cpu=3), Share(kept=2), Share(cpu=1, kept=2)):
        cost = first.divided("blk.0.experts", share)
        assert second.divided("blk.0.experts", share) is cost
        for priced in (first, second):
            assert divided_cost(ROUTED.unit("blk.0.experts"), share, priced.setting) == cost
        assert taught.divided("blk.0.experts", share).acc == pytest.approx(2 * cost.acc)
    assert tables.corrected(TAUGHT).divided == {}
