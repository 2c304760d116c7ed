"""The C++ kernels of routed experts against plain torch, and against the products that they are made of."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from test_native_kernels import TYPES, matrix

from pshard.model_config import Chunks, Experts
from pshard.runtime.kernels.api import ExpertWeights, Packed, Routes
from pshard.runtime.kernels.cpu import native
from pshard.runtime.kernels.cpu.host import HostKernels
from pshard.runtime.kernels.cpu.recording import record
from pshard.runtime.kernels.plain import PlainKernels
from pshard.runtime.kernels.plain_experts import activate
from pshard.runtime.kernels.unpack import PLAIN as PLAIN_DTYPES
from pshard.runtime.kernels.unpack import unpack

pytestmark = pytest.mark.skipif(not native.is_available(), reason=f"CPU kernels: {native.why_missing()}")

KERNELS, PLAIN = HostKernels(), PlainKernels()
COUNT, USED = 12, 3
ABSENT = (0, 7)


@pytest.fixture(autouse=True)
def two_threads() -> None:
    if native.threads() != 2:
        native.set_threads(2)


@pytest.fixture(params=["", "emulated"])
def tiles(request: pytest.FixtureRequest) -> Iterator[str]:
    best = native.tiles()
    try:
        native.set_tiles(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    yield request.param
    native.set_tiles(best)


@dataclass(frozen=True)
class Case:
    """A layer's experts, and room for what `experts` makes of so many tokens."""

    rule: Experts
    weights: ExpertWeights
    hidden: int
    scratch: dict[str, torch.Tensor]

    def run(self, x: torch.Tensor, routes: Routes, start: torch.Tensor, accumulate: bool) -> torch.Tensor:
        """What is written beside `start`, whose rows have gaps between them."""
        out = torch.full((x.shape[0], self.hidden + 5), torch.nan)
        out[:, : self.hidden] = start
        KERNELS.experts(x, routes, self.weights, self.rule, out[:, : self.hidden], self.scratch, accumulate)
        assert out[:, self.hidden :].isnan().all()
        return out[:, : self.hidden]


@cache
def pack(qtype: str, rows: int, cols: int, seed: int) -> Packed:
    """A matrix of random weights by which inputs of order 1 give outputs of order 1."""
    packed, weights = matrix(qtype, rows, cols, seed)
    if qtype in PLAIN_DTYPES:
        plain = torch.from_numpy(weights / np.sqrt(cols)).to(PLAIN_DTYPES[qtype])
        return Packed(plain.view(torch.uint8).flatten(), qtype, rows, cols)
    return Packed(torch.from_numpy(packed.data.ravel()), qtype, rows, cols)


def make_case(
    qtypes: tuple[str, str, str], tokens: int, *, activation: str = "silu", biases: bool = False, hidden: int = 256,
    inner: int = 256, absent: tuple[int, ...] = (), count: int = COUNT, used: int = USED,
) -> Case:  # fmt: skip
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    stacks = [
        tuple(None if e in absent else pack(qtype, *shape, 10 * e + i) for e in range(count))
        for i, (qtype, shape) in enumerate(zip(qtypes, shapes))
    ]
    addresses = torch.tensor([[0 if m is None else m.data.data_ptr() for m in stack] for stack in stacks])
    added = tuple(torch.randn(count, rows) for rows, _ in shapes) if biases else None
    gate, up, down = stacks
    pairs = tokens * used
    scratch = {
        "gated": torch.full((pairs, inner), torch.nan),
        "picked": torch.full((pairs, hidden), torch.nan),
        "order": torch.full((4 * (pairs + count) + 64,), -1, dtype=torch.int32),
    }
    weights = ExpertWeights(gate, up, down, addresses, added)
    return Case(Experts(count, used, inner, activation=activation, biases=biases), weights, hidden, scratch)


def make_routes(tokens: int, skewed: bool, count: int = COUNT, used: int = USED) -> Routes:
    """Every token's experts; skewed: most tokens take the same few."""
    chance = torch.rand(tokens, count) + (torch.arange(count) < used if skewed else 0.0) * 0.9
    ids = chance.argsort(1, descending=True)[:, :used].int().contiguous()
    return Routes(ids, torch.rand(tokens, used))


def expect(case: Case, x: torch.Tensor, routes: Routes, start: torch.Tensor, accumulate: bool) -> torch.Tensor:
    out = start.clone()
    PLAIN.experts(x, routes, case.weights, case.rule, out, case.scratch, accumulate)
    return out


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    assert torch.isfinite(got).all()
    return float((got - want).pow(2).mean().sqrt() / want.pow(2).mean().sqrt())


def scaled_input(case: Case, tokens: int) -> torch.Tensor:
    """Inputs whose products with the gates are of order 2, where activations bend; rows have gaps between them."""
    x = torch.randn(tokens, case.hidden + 3)[:, : case.hidden]
    gate = next(g for g in case.weights.gate if g is not None)
    return x.mul_(2 / (x @ unpack(gate).T).std())


UNLIKE = ["Q4_0", "Q5_K", "BF16", "MXFP4", "IQ2_S", "NVFP4"]  # in how blocks are laid out and read


@pytest.mark.parametrize(  # few tokens take no tiles; products of tiles in every type are in test_native_kernels.py
    ("qtype", "tokens", "tiles"),
    [
        *((qtype, 1, "") for qtype in TYPES),
        *((qtype, 64, tiles) for qtype in UNLIKE for tiles in ("", "emulated")),
        *(pytest.param(qtype, n, "", marks=pytest.mark.slow) for qtype in UNLIKE for n in (2, 5, 16)),
    ],
    indirect=["tiles"],
)
def test_experts_are_those_of_plain_torch(qtype: str, tokens: int, tiles: str) -> None:
    torch.manual_seed(tokens)
    case = make_case((qtype, qtype, qtype), tokens, absent=ABSENT)
    x, start = scaled_input(case, tokens), torch.full((tokens, case.hidden), torch.nan)
    for skewed in (True, False):
        routes = make_routes(tokens, skewed)
        got = case.run(x, routes, start, False)
        assert relative(got, expect(case, x, routes, start, False)) < 0.03


SOME = [
    ("Q4_0", "Q4_0", "Q6_K"), ("Q4_K", "Q6_K", "Q8_0"), ("BF16", "Q4_1", "BF16"), ("MXFP4",) * 3, ("F32",) * 3,
    ("FP8",) * 3,
]  # fmt: skip


@pytest.mark.parametrize(  # every type with every activation, every activation with both ways to add
    ("activation", "accumulate", "qtypes"),
    [(a, (i + n) % 2 == 0, q) for i, a in enumerate(("silu", "clamped", "gelu")) for n, q in enumerate(SOME)],
)
@pytest.mark.parametrize(("tokens", "tiles"), [(1, ""), (90, ""), (90, "emulated")], indirect=["tiles"])
def test_biases_activations_and_sums_are_those_of_plain_torch(
    activation: str, accumulate: bool, qtypes: tuple[str, str, str], tokens: int, tiles: str
) -> None:
    torch.manual_seed(tokens)
    case = make_case(qtypes, tokens, activation=activation, biases=True, absent=ABSENT, inner=512)
    x, start = scaled_input(case, tokens), torch.randn(tokens, case.hidden)
    routes = make_routes(tokens, True)
    got = case.run(x, routes, start, accumulate)
    exact = qtypes == ("F32",) * 3
    assert relative(got, expect(case, x, routes, start, accumulate)) < (1e-5 if exact else 0.03)


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512_vnni"])
@pytest.mark.parametrize("activation", ["silu", "clamped", "gelu", "relu", "silu<0.5"])
def test_rows_that_no_record_fills(isa: str, activation: str) -> None:
    best = native.isa()
    try:
        native.set_isa(isa)
    except ValueError as error:
        pytest.skip(str(error))
    torch.manual_seed(1)
    case = make_case(("F32",) * 3, 9, activation=activation, biases=True, hidden=37, inner=21)
    x, start, routes = 9 * scaled_input(case, 9), torch.zeros(9, 37), make_routes(9, False)
    got = case.run(x, routes, start, False)
    native.set_isa(best)
    assert relative(got, expect(case, x, routes, start, False)) < 1e-5


def by_products(case: Case, x: torch.Tensor, routes: Routes, start: torch.Tensor) -> torch.Tensor:
    """Each expert by `gate_up` and `linear`, tokens summed in the order of their experts."""
    picked = torch.zeros(*routes.ids.shape, case.hidden)
    empty = torch.empty(0, dtype=torch.uint8)
    for number, (gate, up, down) in enumerate(zip(case.weights.gate, case.weights.up, case.weights.down)):
        rows, place = (routes.ids == number).nonzero(as_tuple=True)
        if gate is None or up is None or down is None or not rows.numel():
            continue
        both, result = torch.empty(len(rows), 2 * gate.rows), torch.empty(len(rows), case.hidden)
        KERNELS.gate_up(x[rows], gate, up, both[:, : gate.rows], both, empty)
        KERNELS.linear(both[:, : gate.rows], down, result, empty)
        picked[rows, place] = result
    total = torch.zeros(start.shape)
    for place in range(routes.ids.shape[1]):
        total += routes.weights[:, place, None] * picked[:, place]
    return start + total


MIXES = [("Q4_0", "Q4_0", "Q4_0"), ("Q5_K", "Q8_0", "Q6_K"), ("MXFP4",) * 3]


@pytest.mark.parametrize(
    ("tokens", "qtypes"),
    [
        *((tokens, mix) for tokens in (1, 16, 300) for mix in MIXES),
        *((tokens, MIXES[0]) for tokens in (4, 64)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1200, MIXES[1]), (4096, MIXES[0]))),
    ],
)
@pytest.mark.parametrize("skewed", [False, True])
def test_the_bits_are_those_of_each_experts_products(
    tokens: int, qtypes: tuple[str, str, str], skewed: bool, tiles: str
) -> None:
    torch.manual_seed(tokens)
    case = make_case(qtypes, tokens, absent=ABSENT)
    x, start, routes = scaled_input(case, tokens), torch.randn(tokens, case.hidden), make_routes(tokens, skewed)
    got = case.run(x, routes, start, True)
    few = (torch.bincount(routes.ids.flatten().long(), minlength=COUNT) <= 512).all() or tiles
    if few:  # beyond, HostKernels leaves products to torch
        assert torch.equal(got, by_products(case, x, routes, start))
    native.set_threads(1)
    assert torch.equal(case.run(x, routes, start, True), got)


@pytest.mark.parametrize("tokens", [1, 40])
def test_a_ranks_rows_may_be_fewer_than_scratch_has_room_for_and_another_may_add_downs_bias(
    tokens: int, tiles: str
) -> None:
    case = make_case(("Q8_0",) * 3, tokens, biases=True, inner=64)
    assert case.weights.biases is not None
    weights = replace(case.weights, biases=(*case.weights.biases[:2], None))
    wide = case.scratch | {"gated": torch.full((tokens * USED, 96), torch.nan)}
    case = replace(case, weights=weights, scratch=wide)
    x, start, routes = scaled_input(case, tokens), torch.randn(tokens, case.hidden), make_routes(tokens, False)
    got = case.run(x, routes, start, True)
    assert relative(got, expect(case, x, routes, start, True)) < 0.03


def test_none_of_the_experts_is_here() -> None:
    case = make_case(("Q4_0",) * 3, 4, absent=tuple(range(COUNT)))
    x, start, routes = torch.randn(4, case.hidden), torch.randn(4, case.hidden), make_routes(4, False)
    assert torch.equal(case.run(x, routes, start, True), start)
    assert not case.run(x, routes, torch.full_like(start, torch.nan), False).any()


def test_a_rank_that_has_no_rows_of_the_experts_adds_nothing(tiles: str) -> None:
    tokens, room = 40, torch.empty(1, dtype=torch.uint8)
    nothing = (Packed(room, "Q4_0", 0, 256),) * COUNT, (Packed(room, "Q4_0", 256, 0),) * COUNT
    addresses = torch.full((3, COUNT), room.data_ptr())
    scratch = {
        "gated": torch.empty(tokens * USED, 0),
        "picked": torch.full((tokens * USED, 256), torch.nan),
        "order": torch.empty(4 * (tokens * USED + COUNT) + 64, dtype=torch.int32),
    }
    weights = ExpertWeights(nothing[0], nothing[0], nothing[1], addresses)
    case = Case(Experts(COUNT, USED, 0), weights, 256, scratch)
    assert not case.run(torch.randn(tokens, 256), make_routes(tokens, True), torch.ones(tokens, 256), False).any()


def test_a_nan_among_the_activations_or_the_weights_reaches_its_token_only(tiles: str) -> None:
    torch.manual_seed(1)
    case, x, routes = make_case(("Q4_0",) * 3, 80), torch.randn(80, 256), make_routes(80, True)
    x[7, 40] = torch.nan
    routes.weights[30] = torch.nan
    got = case.run(x, routes, torch.zeros(80, 256), False)
    broken = got.isnan().all(1)
    assert broken[[7, 30]].all() and broken.sum() == 2 and got[~broken].isfinite().all()


@pytest.mark.parametrize("tokens", [1, 60])
def test_a_replay_takes_the_routes_and_experts_of_its_time(tokens: int) -> None:
    torch.manual_seed(2)
    case = make_case(("Q4_0", "Q4_0", "Q6_K"), tokens)
    rule = replace(case.rule, normed=True)
    x, out = torch.randn(tokens, case.hidden), torch.zeros(tokens, case.hidden)
    router = Packed(torch.randn(COUNT, case.hidden).view(torch.uint8).flatten(), "F32", COUNT, case.hidden)
    routes = make_routes(tokens, False)

    def work() -> None:
        KERNELS.route(x, router, rule, routes)
        KERNELS.experts(x, routes, case.weights, rule, out, case.scratch, False)

    calls = record(work)
    assert calls is not None
    for turn in range(3):
        x.copy_(torch.randn(tokens, case.hidden))
        case.weights.addresses[:, turn] = 0  # somebody else's now
        before = routes.ids.clone()
        calls.replay()
        got = out.clone(), routes.ids.clone()
        assert not torch.equal(before, got[1])
        work()
        assert torch.equal(out, got[0]) and torch.equal(routes.ids, got[1])


RULES = {
    "softmax": Experts(64, 6, 0),
    "as they are": Experts(64, 6, 0, normed=False),
    "sigmoid": Experts(64, 6, 0, scores="sigmoid", scale=2.5),
    "chosen": Experts(64, 6, 0, scores="chosen"),
    "groups": Experts(64, 6, 0, scores="sigmoid", groups=8, groups_used=3, scale=2.5),
    "all": Experts(5, 5, 0),
}


def make_router(rule: Experts, qtype: str, cols: int) -> Packed:
    rows = (torch.randn(rule.count, cols) / cols**0.5).to(PLAIN_DTYPES[qtype])
    return Packed(rows.view(torch.uint8).flatten(), qtype, rule.count, cols)


def empty_routes(tokens: int, used: int) -> Routes:
    return Routes(torch.full((tokens, used), -1, dtype=torch.int32), torch.full((tokens, used), torch.nan))


@pytest.mark.parametrize(
    ("name", "qtype", "biased"),
    [(name, q, (i + n) % 2 == 0) for i, name in enumerate(RULES) for n, q in enumerate(("F32", "F16", "BF16"))],
)
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_routes_are_those_of_plain_torch(name: str, qtype: str, biased: bool, tokens: int) -> None:
    torch.manual_seed(tokens)
    rule, cols = RULES[name], 200
    x, router = torch.randn(tokens, cols + 4)[:, :cols], make_router(rule, qtype, cols)
    biases = (torch.randn(rule.count), torch.randn(rule.count)) if biased else (None, None)
    got, want = empty_routes(tokens, rule.used), empty_routes(tokens, rule.used)
    factors = torch.rand(rule.count) + 0.5 if tokens == 5 else None
    KERNELS.route(x, router, rule, got, *biases, factors=factors)
    PLAIN.route(x, router, rule, want, *biases, factors=factors)
    assert torch.equal(got.ids, want.ids)
    torch.testing.assert_close(got.weights, want.weights, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_ranks_with_more_threads_choose_the_same_experts_to_the_last_bit(tokens: int) -> None:
    torch.manual_seed(tokens)
    rule, cols = RULES["softmax"], 1000
    hidden, weight, router = torch.randn(tokens, cols), torch.randn(cols), make_router(rule, "F32", cols)
    found = []
    for threads in (1, 2, 3):
        native.set_threads(threads)
        x, routes = torch.full_like(hidden, torch.nan), empty_routes(tokens, rule.used)
        KERNELS.rms_norm(hidden, weight, 1e-6, x)
        KERNELS.route(x, router, rule, routes)
        found.append((x, routes.ids, routes.weights))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other))


@pytest.mark.parametrize("kernels", [KERNELS, PLAIN], ids=["native", "plain"])
@pytest.mark.parametrize("name", RULES)
def test_of_equal_scores_the_lowest_numbers_are_taken(name: str, kernels: HostKernels | PlainKernels) -> None:
    rule = RULES[name]
    x, router, got = torch.randn(3, 64), make_router(rule, "F32", 64), empty_routes(3, rule.used)
    router.data.zero_()
    kernels.route(x, router, rule, got)
    assert torch.equal(got.ids, torch.arange(rule.used, dtype=torch.int32).expand(3, -1))


def test_the_plain_gate_of_gpt_oss_is_its_formula_beyond_what_is_clamped() -> None:
    """The gate is clamped above alone, the other factor on both sides."""
    gate, up = (torch.linspace(-20, 20, 41).repeat(n, 1).double() for n in (1, 41))
    up = up.T
    g, u = np.minimum(gate.numpy(), 7), np.clip(up.numpy(), -7, 7)
    expected = g / (1 + np.exp(-1.702 * g)) * (u + 1)
    torch.testing.assert_close(activate(gate, up, "clamped"), torch.from_numpy(expected))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_scores_that_are_no_numbers_break_their_token_only(name: str, bad: float) -> None:
    torch.manual_seed(3)
    rule, cols = RULES[name], 64
    x, router, got = torch.randn(4, cols), make_router(rule, "F32", cols), empty_routes(4, rule.used)
    x[2, 5] = bad
    bias = torch.zeros(rule.count)
    KERNELS.route(x, router, rule, got, bias)
    assert ((got.ids >= 0) & (got.ids < rule.count)).all() and all(len(row.unique()) == rule.used for row in got.ids)
    assert got.weights[[0, 1, 3]].isfinite().all()
    assert got.weights[2].isnan().all() or (bad == torch.inf and rule.scores == "sigmoid")
    bias[rule.count - 1] = torch.nan
    KERNELS.route(x, router, rule, got, bias)
    assert got.weights.isnan().all() and ((got.ids >= 0) & (got.ids < rule.count)).all()


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("rule", [
    Experts(20, 8, 64, scale=1.5, chunks=Chunks(2, 32, 0.05)), Experts(12, 6, 64, chunks=Chunks(3, 32, 0.5)),
], ids=["more chunks", "fewer"])  # fmt: skip
def test_chunks_are_those_of_plain_torch(rule: Experts, tokens: int) -> None:
    """Of one token their scores are nearly nothing, which is not divided by; another one takes none."""
    logits = 4 * torch.randn(tokens, rule.count)
    logits[0, : rule.of_chunks().count] -= 30
    found = logits.softmax(-1).sort(dim=1, descending=True)
    scored = Routes(found.indices.int(), found.values.contiguous())
    scored.ids[4:] = -1
    used = rule.of_chunks().used
    got, want = (Routes(torch.zeros(tokens, used).int(), torch.zeros(tokens, used)) for _ in range(2))
    HostKernels().choose_chunks(scored, rule, got)
    PlainKernels().choose_chunks(scored, rule, want)
    assert torch.equal(got.ids, want.ids) and (got.ids[4:] == -1).all()
    torch.testing.assert_close(got.weights[:4], want.weights[:4], rtol=1e-6, atol=0)
