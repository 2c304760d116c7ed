"""Experts on disk beside a CUDA GPU: the CPU computes from slots in host memory, prompts read what these lack.
Skipped without one."""

import random
from pathlib import Path

import pytest
import torch
from engines import open_engine
from model_files import write_gguf
from plan_samples import make_tier
from test_experts_on_disk import FAST, FOLLOW, list_experts, plan_by_hand, stream_attention

from pshard.models import open_model
from pshard.reserve import TORCH_RESERVE_MIB
from pshard.routing.followed import follow_plan
from pshard.routing.replay_slots import replay_run
from pshard.runtime.build_engine import build_engine
from pshard.runtime.devices.device import open_device

pytestmark = pytest.mark.gpu
CONTEXT = 256


def talk(engine) -> torch.Tensor:
    """Prompts and single tokens, a prompt between answers too: logits of every position."""
    rng = random.Random(1)
    prompts = [[rng.randrange(320) for _ in range(n)] for n in (70, 9, 1, 1, 4, 1, 1, 70, 1, 1)]
    return torch.cat([engine.forward(p, all_logits=True) for p in prompts])


@pytest.mark.parametrize(  # slots: beyond the least
    ("slots", "follow", "crowded"),
    [*((0, FOLLOW, False), (5, FOLLOW, False), (0, 16, False), (5, 16, False)), *((0, FOLLOW, True), (0, 16, True))],
)
@pytest.mark.parametrize("arch", ["qwen3moe", "gpt-oss"])
def test_logits_are_those_of_experts_in_host_memory_and_hits_those_of_a_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str, slots: int, follow: int, crowded: bool
) -> None:
    monkeypatch.setenv("PSHARD_DISK", FAST)
    shape = {"qtype": "Q4_0"} if arch == "qwen3moe" else {"qtype": "F32", "qtypes": {"ffn_up_exps.weight": "MXFP4"}}
    path = write_gguf(tmp_path / "m.gguf", arch, n_layers=4 if crowded else 2, **shape)
    with open_model(path) as file:
        spec = file.spec
    pinned: dict[str, tuple] = {u.name: ("pinned", "vram" if u.kind.state else None) for u in spec.units}
    if crowded:  # streamed here too: a norm that a pinned unit leaves to the next one is rounded otherwise
        pinned |= stream_attention(spec)
    experts = list_experts(spec)
    far = experts[1:] if crowded else experts
    prompts = pinned | {u.name: ("streamed", None) for u in experts}
    answers = pinned | {u.name: ("cpu", None) for u in far}
    on_host = tuple(
        make_tier(spec, n, answers if n <= follow else prompts, 2, CONTEXT, 1, batch=64) for n in (1, follow, 64)
    )
    with open_engine(path, on_host, "fast", CONTEXT, device="cuda") as engine:
        right = talk(engine)
    rule = spec.config.experts
    assert rule is not None
    least = max(rule.used * len(far), min(rule.count, rule.used * follow))
    own = {"reserve_mib": TORCH_RESERVE_MIB, "follow": follow, "crowded": crowded}
    variant = plan_by_hand(spec, least + slots, on_host=True, **own)
    with open_model(path) as file, build_engine(file, variant, open_device("cuda"), records=True) as engine:
        assert torch.isfinite(right).all() and torch.equal(talk(engine), right)
        (cache,) = engine.rank_plan.caches
        counts = replay_run(
            engine.record_routing(""), [u.layer for u in far], follow_plan(spec, engine.rank_plan, cache), follow
        )
        assert counts == engine.expert_hits and counts.hits and counts.admitted
        assert engine.memory().read > cache.nbytes * 0.9
