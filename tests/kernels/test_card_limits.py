"""What a card's limits are read from, and which cards are known without being there."""

import platform
from types import SimpleNamespace

import pytest
import torch

from pshard.machine import AS_CARD
from pshard.runtime.kernels.gpu.card_limits import INTERPRETED, KNOWN_CARDS, _read_limits, card_limits


def test_limits_of_a_card_are_what_the_driver_says_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    said = SimpleNamespace(
        name="A card", major=8, minor=6, shared_memory_per_block_optin=101376,
        shared_memory_per_multiprocessor=102400, regs_per_multiprocessor=65536, max_threads_per_multi_processor=1536,
        multi_processor_count=28, L2_cache_size=2359296,
    )  # fmt: skip
    monkeypatch.delenv(AS_CARD, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: said)
    monkeypatch.setattr(platform, "release", lambda: "6.6.87.2-microsoft-standard-WSL2")
    _read_limits.cache_clear()
    try:
        limits = card_limits("cuda:3")
    finally:
        _read_limits.cache_clear()
    assert (limits.name, limits.capability, limits.processors, limits.l2) == ("A card", 86, 28, 2359296)
    assert (limits.shared_block, limits.shared_processor, limits.threads) == (101376, 102400, 1536)
    assert limits.bf16 and limits.wddm and limits.runs_kernels
    assert limits.shared_block == KNOWN_CARDS[86].shared_block


def test_cards_before_the_tensor_cores_of_bfloat16_run_no_kernels() -> None:
    assert [card.capability for card in KNOWN_CARDS.values() if not card.runs_kernels] == [75]


def test_a_cpu_is_taken_for_a_known_card() -> None:
    assert card_limits("cpu") is INTERPRETED and not INTERPRETED.wddm


@pytest.mark.gpu
def test_the_card_that_is_here_has_what_is_known_of_its_kind() -> None:
    limits = card_limits("cuda")
    known = KNOWN_CARDS.get(limits.capability)
    assert known is None or (known.shared_block, known.shared_processor, known.registers, known.threads) == (
        limits.shared_block, limits.shared_processor, limits.registers, limits.threads,
    )  # fmt: skip
    assert limits.processors > 0 and limits.l2 > 0 and limits.shared_block <= limits.shared_processor
