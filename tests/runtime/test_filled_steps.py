"""Small micro-batches on an accelerator are filled up to few sizes, with rows that nobody sees: the plain kernels play
an accelerator whose launches are captured."""

import random
from pathlib import Path

import pytest
import torch
from engines import open_engine
from hybrid_files import random_hybrid, write_hybrid_gguf
from latent_files import random_tensors, write_latent_gguf
from model_files import write_gguf
from plan_samples import make_tier, random_places, shrink_places

from pshard.batch_sizes import RUNGS, SMALL_BATCH
from pshard.models import open_model
from pshard.runtime.kernels.api import Kernels
from pshard.runtime.kernels.cpu.host import HostKernels
from pshard.runtime.kernels.plain import PlainKernels
from pshard.runtime.walks.step_sizes import fill_rows
from pshard.units.moe.experts import EXPERTS
from pshard.units.moe.router import ROUTER

CONTEXT, SEQUENCES, VOCAB = 256, 24, 320
MODELS = ("gpt-oss", "qwen2moe", "hybrid", "latent")


class Captured(PlainKernels):
    """Plain kernels whose launches may be repeated, and what is left of rows that only fill is poison."""

    repeatable = True

    def attention(self, qkv, heads, kv, rows, scale, out, *rest, **named):
        out[rows.begin < 0] = float("nan")
        super().attention(qkv, heads, kv, rows, scale, out, *rest, **named)

    def delta_net(self, *arguments, out, offsets, **rest):
        out[int(offsets[-1]) :] = float("nan")
        super().delta_net(*arguments, out=out, offsets=offsets, **rest)

    def experts(self, x, routes, weights, rule, *rest):
        assert routes.ids.min() >= -1 and routes.ids.max() < rule.count  # a GPU would read an address from anywhere
        super().experts(x, routes, weights, rule, *rest)


def write_model(folder: Path, what: str) -> Path:
    path = folder / "m.gguf"
    if what == "hybrid":
        return write_hybrid_gguf(path, "moe", random_hybrid("moe"))
    if what == "latent":
        return write_latent_gguf(path, "v3", random_tensors("v3"))
    return write_gguf(path, what)


def talk(engine, sizes: list[int] | None = None) -> torch.Tensor:
    """Texts that come and go, of unequal lengths: logits of every new token."""
    rng, found, most = random.Random(1), [], SEQUENCES
    for width in sizes or (3, 5, most, 9, 1, 13, 17, most, 2):
        chosen = sorted(rng.sample(range(most), width))
        new = [
            [rng.randrange(VOCAB) for _ in range(rng.choice((1, 1, 1, 2, 4)))] if i in chosen else []
            for i in range(most)
        ]
        found += [logits for logits in engine.forward(new, all_logits=True) if logits.numel()]
        if width == 9:
            engine.reset(chosen[0])
            engine.reset(chosen[1], 1)
    return torch.cat(found)


def captured(monkeypatch: pytest.MonkeyPatch, host: Kernels | None = None) -> list[int]:
    """Have engines compute by `Captured`, and on the CPU by `host`; returns the rows of every norm, as they come."""
    rows: list[int] = []

    def counted(self, hidden, *rest, **named):
        rows.append(hidden.shape[0])
        PlainKernels.rms_norm(self, hidden, *rest, **named)

    monkeypatch.setattr(Captured, "rms_norm", counted, raising=False)
    chosen = Captured(), host or PlainKernels(), ()
    monkeypatch.setattr("pshard.runtime.build_engine.choose_kernels", lambda *_: chosen)
    return rows


@pytest.mark.quick("hybrid")
@pytest.mark.parametrize("what", MODELS)
def test_rows_that_fill_a_step_change_nothing_and_are_of_few_numbers(tmp_path: Path, monkeypatch, what: str) -> None:
    path, options = write_model(tmp_path, what), {"context": CONTEXT * SEQUENCES, "sequences": SEQUENCES}
    with open_engine(path, tokens=(4, 40, 100), **options) as engine:
        expected = talk(engine)
    rows = captured(monkeypatch)
    with open_engine(path, tokens=(4, 40, 100), **options) as engine:
        got = talk(engine)
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
    assert {n for n in rows if n <= SMALL_BATCH} <= {*RUNGS, 40}
    assert {12, 24, 40} <= set(rows)


@pytest.mark.quick("hybrid-1")
@pytest.mark.parametrize(("what", "seed"), [("qwen2moe", 1), ("hybrid", 1)])
def test_units_on_the_cpu_and_states_in_host_memory_never_see_them(
    tmp_path: Path, monkeypatch, what: str, seed: int
) -> None:
    path, rng = write_model(tmp_path, what), random.Random(seed)
    with open_model(path) as file:
        spec = file.spec
    shape = CONTEXT * SEQUENCES, SEQUENCES
    small = random_places(spec, rng)
    large = shrink_places(spec, small, rng)
    for unit in spec.units:
        if unit.kind is EXPERTS:
            small[unit.name] = large[unit.name] = rng.choice((("streamed", None, 3), ("cpu", None), ("streamed", None)))
    tiers = tuple(make_tier(spec, n, p, 2, *shape, batch=100) for n, p in ((4, small), (30, small), (100, large)))
    with open_engine(path, tiers, "plain", *shape) as engine:
        expected = talk(engine)
    made = captured(monkeypatch)
    with open_engine(path, tiers, "plain", *shape) as engine:
        got = talk(engine)
    assert {n for n in made if n <= SMALL_BATCH} <= {*RUNGS, 30}
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.quick("True-False")
@pytest.mark.parametrize(("native", "ahead"), [(False, True), (True, False)])
def test_rows_that_fill_take_no_expert_where_the_cpu_routes(
    tmp_path: Path, monkeypatch, native: bool, ahead: bool
) -> None:
    path = write_model(tmp_path, "qwen2moe")
    with open_model(path) as file:
        spec = file.spec
    places: dict[str, tuple] = {u.name: ("pinned", "vram" if u.kind.state else None) for u in spec.units}
    places |= {u.name: ("cpu", None) for u in spec.units if u.kind is ROUTER}
    shape = CONTEXT * SEQUENCES, SEQUENCES
    tiers = tuple(make_tier(spec, n, places, 2, *shape, batch=100, in_place=ahead) for n in (4, 40, 100))
    with open_engine(path, tiers, "plain", *shape) as engine:
        expected = talk(engine)
    captured(monkeypatch, HostKernels() if native else PlainKernels())
    with open_engine(path, tiers, "plain", *shape) as engine:
        got = talk(engine)
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)


def test_steps_have_the_rows_of_a_rung_or_of_the_tier() -> None:
    assert [fill_rows(n, 64, False) for n in (0, 1, 3, 9, 33, 64)] == [0, 1, 4, 12, 48, 64]
    assert [fill_rows(n, 20, False) for n in (0, 2, 17, 20)] == [0, 2, 20, 20]
    assert [fill_rows(n, 20, True) for n in (0, 1, 20)] == [0, 20, 20]
    assert fill_rows(1, 512, True) == SMALL_BATCH
    for n in range(1, SMALL_BATCH + 1):  # kernels are compiled for powers of two
        rung = fill_rows(n, 64, False)
        assert n <= rung <= 1 << (n - 1).bit_length()


def test_exact_steps_have_one_size_and_name_neither_context_nor_longest_text(tmp_path: Path, monkeypatch) -> None:
    path, options = write_model(tmp_path, "hybrid"), {"context": 2048 * SEQUENCES, "sequences": SEQUENCES}
    seen, delta_net = set[int](), Captured.delta_net

    def watched(self, *arguments, longest, **rest):
        seen.add(longest)
        delta_net(self, *arguments, longest=longest, **rest)

    with open_engine(path, tokens=(4, 40, 100), **options) as engine:
        expected = talk(engine, [3, 9, 5])
    rows = captured(monkeypatch)
    monkeypatch.setattr(Captured, "delta_net", watched)
    with open_engine(path, tokens=(4, 40, 100), exact=True, **options) as engine:
        engine.texts.keep_tier(40)
        prepare, cells = engine._executor.walks.prepare, set[int]()

        def noted(*given):
            ready = prepare(*given)
            cells.add(ready.walk.batch.acc_rows.cells)
            return ready

        monkeypatch.setattr(engine._executor.walks, "prepare", noted)
        got = talk(engine, [3, 9, 5])
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
    assert set(rows) == {40} and seen == {0} and cells == {2048 * SEQUENCES}
