"""Shared test setup: few threads, own cache folder, GPU tests skipped without a GPU, makers of test data importable."""

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from pshard.machine import AS_CARD

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).with_name("makers")))
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell starts jobs in the background: Ctrl-C is tested too
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folders that are not there yet, for tests that ask for none: to make one for each costs as much as most tests."""
    folder = tmp_path_factory.mktemp("caches")
    return (folder / str(i) for i in count())


@pytest.fixture(autouse=True)
def own_cache(request: pytest.FixtureRequest, caches: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's cache, or is steered by the user's environment."""
    asks = "tmp_path" in request.fixturenames
    folder: Path = request.getfixturevalue("tmp_path") / "cache" if asks else next(caches)
    for name in list(os.environ):
        if name.startswith("PSHARD_") and name not in (AS_CARD, "PSHARD_CARD_HERE"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PSHARD_VALIDATE", "0")  # plans are run before they are written where a test asks for it
    monkeypatch.setenv("PSHARD_CACHE", str(folder))


def is_quick(config: pytest.Config) -> bool:
    """Slow tests are left out, as `scripts/test` does and `.ci/run` does not: what repeats is done less often too."""
    return "not slow" in config.option.markexpr


@pytest.fixture(scope="session", autouse=True)
def searches_of_the_run() -> Iterator[None]:
    """Plans of small models take a tenth of their time: most tests ask what is done with a plan."""
    from short_searches import shorten_searches

    with pytest.MonkeyPatch.context() as patch:
        shorten_searches(patch)
        yield


@pytest.fixture(scope="session", autouse=True)
def warm_ups_of_the_run() -> Iterator[None]:
    """Benches warm up by two runs only: no test asks how steady a rate is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pshard.session.bench_engine.WARM_SECONDS", 0.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def sizes_of_the_run() -> Iterator[None]:
    """To look through a large process's pages takes longer than to start most engines."""
    from warm_python import read_size_quickly

    with pytest.MonkeyPatch.context() as patch:
        read_size_quickly(patch)
        yield


@pytest.fixture(scope="session", autouse=True)
def ranks_of_the_run() -> Iterator[None]:
    """Ranks that commands start in the tests' process are forked from one that has imported torch."""
    from warm_python import warm_ranks

    with pytest.MonkeyPatch.context() as patch:
        warm_ranks(patch)
        yield


@pytest.fixture(scope="session")
def share(request: pytest.FixtureRequest) -> float:
    """Of the cases that a test tries one after the other: a quarter in a quick run, else all."""
    return 0.25 if is_quick(request.config) else 1.0


@pytest.fixture
def whole_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test plans with the whole search in every run: where what it finds is what matters."""
    from short_searches import lengthen_searches

    lengthen_searches(monkeypatch)


@pytest.fixture
def vectors_only() -> Iterator[None]:
    """No matrix unit: above 16 tokens it multiplies numbers cut to bf16, so company changes bits (docs/serving.md)."""
    from tiles_in_use import tiles_in_use

    with tiles_in_use(""):
        yield


@pytest.fixture(scope="module")
def exact_gelu() -> Iterator[None]:
    """GGUF files whose GELU is computed as folders' is, so that rounding is as of other models."""
    from pshard.models.families import read_numbers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read_numbers, "GGUF_GELU", "gelu")
        yield


@pytest.fixture(scope="module")
def few_to_collect() -> None:
    """What earlier tests left is not walked through by a module that collects garbage again and again."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--as-card", metavar="86", help="take the GPU for a card of this capability: see docs/cards.md")


def pytest_configure(config: pytest.Config) -> None:
    """Examples of hypothesis are the same in every run, and have no deadline: where others use the machine too, any of
    them may be late."""
    from hypothesis import settings
    from hypothesis.internal.conjecture import providers

    gc.set_threshold(100_000, 20, 100)  # nearly all that collecting tests makes lives to the end

    if config.getoption("--as-card"):  # before anything has imported a kernel
        os.environ[AS_CARD] = config.getoption("--as-card")

    settings.register_profile("alike", deadline=None, derandomize=True)
    settings.load_profile("alike")
    # else numbers that stand in the code are among the examples, and which do goes by what other tests have imported
    providers._get_local_constants = providers.Constants


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """Cases of a test that `quick` does not name are slow."""
    made = yield
    cases = {i.callspec.id: i for i in made if hasattr(i, "callspec")} if isinstance(made, list) else {}
    quick = {name for item in cases.values() for mark in item.iter_markers("quick") for name in mark.args}
    if unknown := quick - set(cases):
        raise collector.CollectError(f"{made[0].originalname} has no case {', '.join(sorted(unknown))}")
    for name, item in cases.items():
        if quick and name not in quick:
            item.add_marker(pytest.mark.slow)
    return made


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before the five minutes begin in which a test must end
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """What the driver says of a GPU's memory is of all processes: a test that asks has the GPU for itself."""
    if not item.get_closest_marker("gpu") or item.get_closest_marker("skip"):
        return (yield)
    from gpu_turns import take_turn

    with take_turn(item.get_closest_marker("alone") is not None):
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """torch, whose own seed differs from process to process, draws the same numbers whatever ran before."""
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(0)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(0)


def pytest_collection_finish() -> None:
    """Modules and test items live to the end: the collector need not walk through them at every turn."""
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if is_quick(config):
        _draw_fewer_examples(items)
    else:
        contained = [item for item in items if item.get_closest_marker("stand_in")]
        items[:] = [item for item in items if not item.get_closest_marker("stand_in")]
        config.hook.pytest_deselected(items=contained)
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu:
        return
    from pshard.runtime.devices.usable_gpus import count_usable, describe_unused

    if not count_usable():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="; ".join(describe_unused()) or "no CUDA GPU"))


def _draw_fewer_examples(items: list[pytest.Item]) -> None:
    """A quarter of hypothesis's examples but six at least: the first of a whole run's."""
    from hypothesis import settings

    tests = {id(test): test for item in items if hasattr(test := getattr(item, "obj", None), "hypothesis")}
    for test in tests.values():
        whole = test._hypothesis_internal_use_settings
        few = min(whole.max_examples, max(6, whole.max_examples // 4))
        test._hypothesis_internal_use_settings = settings(whole, max_examples=few)
