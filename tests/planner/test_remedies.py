"""What a machine with too little of everything is told."""

import re
from dataclasses import replace

import pytest
from planner_cases import DESKTOP, make_model

from pshard.errors import UserError
from pshard.planner.make_plan import plan_variant
from pshard.planner.price.datasheet import profile_from_datasheet
from pshard.workload import Workload


def refuse(memory: int, context: int, **machine: object) -> str:
    """What planning says on a machine with so many bytes of host memory."""
    spec = make_model(layers=8, d_model=2048, heads=16, d_ffn=8192)
    profile = profile_from_datasheet(replace(DESKTOP, **machine))
    profile = replace(profile, host=replace(profile.host, memory_bytes=memory))
    with pytest.raises(UserError) as caught:
        plan_variant(spec, profile, Workload((330,), context=context, prompt=64, generated=16))
    return str(caught.value)


def packed() -> int:
    return make_model(layers=8, d_model=2048, heads=16, d_ffn=8192).packed_nbytes


def test_a_shorter_context_is_named_where_one_fits() -> None:
    told = refuse(int(1.2 * packed()), 65536)
    shorter = int(re.search(r"-c (\d+)", told).group(1))  # type: ignore[union-attr]
    assert 512 <= shorter < 65536 and "what may work: --vram " in told


def test_a_smaller_file_is_named_by_its_size_and_quantisation() -> None:
    told = refuse(packed(), 512, kind="cpu")
    assert re.search(r"what may work: a file of at most [\d.]+ GiB, as Q\d\w* makes$", told), told


def test_no_way_is_said_too() -> None:
    assert "a smaller model is needed, or a larger machine" in refuse(packed() // 20, 512, kind="cpu")
