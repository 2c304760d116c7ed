"""What following use costs the host, timed on a small mixture whose experts come to slots."""

import numpy as np
import pytest

from pshard.profile.timed import slot_cost
from pshard.runtime.build_executor import choose_kernels
from pshard.runtime.devices.device import open_device
from pshard.runtime.memory.expert_slots import SlotPool


def test_as_many_experts_come_after_each_step_as_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of choices at random each step misses enough; where none shall come, none does."""
    turns, bring = list[int](), SlotPool.begin

    def count(self: SlotPool, tokens: int) -> None:
        before = self.follower.counts.admitted
        bring(self, tokens)
        turns.append(before)

    monkeypatch.setattr(SlotPool, "begin", count)
    device = open_device("cpu")
    fast = choose_kernels(device, "plain", 64)[:2]
    rows = slot_cost.time_slots("acc", device, fast, None)  # type: ignore[arg-type]
    assert [(row.device, row.what, row.seconds > 0) for row in rows] == [("acc", "slots", True), ("acc", "admit", True)]
    half = len(turns) // 2
    assert set(turns[:half]) == {0}
    assert set(np.diff(turns[half + 1 :])) == {slot_cost.ADMITS}
