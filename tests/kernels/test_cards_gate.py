"""The gate that compiles kernels for cards that are not there: what it finds out, and when it fails."""

import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from cards import compile_launch as compiling
from cards import run
from cards.compile_launch import Needs, assemble_launch, digest_launch, lay_out_launch

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


def line(needs: Needs, decodes: bool = False, default: bool = True) -> run.Line:
    """A row about a launch on a card with 101376 bytes."""
    launch: Any = SimpleNamespace(
        label="attention", tile="default", default=default, request=SimpleNamespace(kernel="prefill_kernel")
    )
    return run.Line(86, launch, needs, 101376, decodes)


def test_what_a_card_cannot_run_as_it_should_is_a_fault() -> None:
    assert line(Needs(98304, 198, 0)).fault == "" == line(Needs(1, 255, 64), decodes=True).fault
    assert "102400 bytes of shared memory" in line(Needs(102400)).fault
    assert line(Needs(error="PTXASError: mma.sync needs sm_80")).fault.startswith("PTXASError")
    assert "spills 72 bytes" in line(Needs(1, 255, 72), decodes=True).fault
    assert line(Needs(1, 255, 72)).fault == line(Needs(1, 255, 72), True, default=False).fault == ""
    row = ("prefill", "attention", "default", "sm_86", "98304", "101376", "198", "0")
    assert line(Needs(98304, 198, 0)).cells == row


def test_the_gate_fails_by_its_faults_and_without_triton(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [line(Needs(98304))]
    asked: list[object] = []
    monkeypatch.setattr(run, "KEPT", tmp_path / "needs.json")
    monkeypatch.setattr(run, "find_spec", lambda name: object())
    monkeypatch.setattr(run, "list_lines", lambda parts, processes: asked.append(parts) or found)
    assert run.main([]) == 0 and run.main(["--if-changed"]) == 0 and asked == [run.QUICK]
    monkeypatch.setattr(run, "digest_sources", lambda: "others")
    found.append(line(Needs(163840)))
    assert run.main(["--if-changed"]) == 1 and run.main(["--if-changed", "--faults"]) == 1 and len(asked) == 3
    assert "sm_86 cannot run prefill of attention" in capsys.readouterr().out
    monkeypatch.setattr(run, "find_spec", lambda name: None)
    assert run.main([]) == 1
    assert "Triton is not installed" in capsys.readouterr().err


@needs_triton
def test_shared_memory_of_a_card_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention of a prompt on an RTX 3060: its default tile fits, an H100's would not."""
    from functools import partial

    from cards.launches import Collector
    from triton.runtime import driver

    from pshard.profile.timed.time_kernels import time_attention
    from pshard.runtime.kernels.gpu.card_limits import KNOWN_CARDS
    from pshard.runtime.kernels.gpu.triton_attention import prefill_kernel
    from pshard.times.gpu_tiles import ANY_BATCH, Tile, TileChoice
    from pshard.units.operations import Attend

    monkeypatch.setattr(driver, "_active", None)
    collector = Collector(KNOWN_CARDS[86])
    call = partial(time_attention, collector.bench, Attend(2, 1, 128), "bf16", 128, [128])
    try:
        collector.call("fits", call)
        collector.kernels.try_tile(TileChoice("acc", "prompt 128", "bf16", ANY_BATCH, Tile(128, 128, 8, 3), 1.0, 1.0))
        collector._note("does not", call, "large")
    finally:
        prefill_kernel.device_caches.clear()
    found = {launch.label: lay_out_launch(launch.request, 86) for launch in collector.found.values()}
    assert found == {"fits": Needs(49152), "does not": Needs(163840)}
    request = next(iter(collector.found))
    laid_out, assembled = ([digest_launch(request, card, whole) for card in (80, 86, 90)] for whole in (False, True))
    assert laid_out[0] == laid_out[1] and len({*laid_out, *assembled}) == 5  # laid out once, assembled for each
    monkeypatch.setattr(compiling, "LAID_OUT_AS", {})
    assert lay_out_launch(request, 80) == found["fits"] != lay_out_launch(request, 90)


@needs_triton
def test_kernels_without_dots_are_laid_out_once_for_cards_of_any_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    from functools import partial

    from cards.launches import Collector
    from triton.runtime import driver

    from pshard.profile.timed.time_kernels import time_embedding
    from pshard.runtime.kernels.gpu.card_limits import KNOWN_CARDS
    from pshard.runtime.kernels.gpu.products.triton_dequant import look_up_kernel

    monkeypatch.setattr(driver, "_active", None)
    collector = Collector(KNOWN_CARDS[86])
    try:
        collector.call("rows", partial(time_embedding, collector.bench, "Q4_0", 64, [1]))
    finally:
        look_up_kernel.device_caches.clear()
    (request,) = collector.found
    one, other, assembled = (digest_launch(request, *of) for of in ((86, False), (90, False), (90, True)))
    assert request.kernel in compiling.WITHOUT_DOTS and one == other != assembled
    monkeypatch.setattr(compiling, "ANY_GENERATION", {})
    assert digest_launch(request, 90, False) != one
    assert lay_out_launch(request, 86) == lay_out_launch(request, 90) == Needs(0)


@needs_triton
@pytest.mark.slow
def test_text_that_is_written_once_is_what_each_card_would_get(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup, a product of one row on the tensor cores, and attention, whose product is the compiler's."""
    from functools import partial

    from cards.launches import Collector
    from triton.runtime import driver

    from pshard.profile.timed.time_kernels import time_attention, time_embedding, time_matmul
    from pshard.runtime.kernels.gpu.card_limits import KNOWN_CARDS
    from pshard.units.operations import Attend

    monkeypatch.setattr(driver, "_active", None)
    collector, written = Collector(KNOWN_CARDS[86]), list[str]()
    try:
        collector.call("rows", partial(time_embedding, collector.bench, "Q4_0", 64, [1]))
        collector.call("product", partial(time_matmul, collector.bench, "IQ2_S", 128, 256, [1]))
        collector.call("attention", partial(time_attention, collector.bench, Attend(2, 1, 64), "bf16", 128, [128]))
    finally:
        for request in collector.found:
            compiling._kernel(request).device_caches.clear()
    real, cards = compiling.triton_compile, (86, 89, 90)

    def note(source: Any, target: Any, options: dict[str, Any]) -> Any:
        written.append(source.fn.__name__)
        return real(source, target, options)

    monkeypatch.setattr(compiling, "triton_compile", note)
    for request in collector.found:
        written.clear()
        together = assemble_launch(request, cards)
        assert len(written) == (2 if request.kernel == "prefill_kernel" else 1)
        assert together == [needs for card in cards for needs in assemble_launch(request, (card,))]
        assert all(needs.registers and not needs.error for needs in together)
