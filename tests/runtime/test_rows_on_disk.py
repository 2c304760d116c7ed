"""Tables on disk: rows are read from the model's file as they are looked up, with the logits of memory."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import open_engine
from gemma4_files import GEMMAS, make_gemma4, write_gemma4
from model_files import write_gguf
from plan_samples import make_tier
from qwen4exp_files import RECIPES, make_weights, write_qwen4exp
from qwen4exp_folder import spread_folder

from pshard.errors import StepFailed
from pshard.homes import ON_CPU, ON_DEMAND, PINNED
from pshard.model import ModelSpec
from pshard.models import open_model
from pshard.on_disk import mark_made, rows_nbytes
from pshard.plan import TierPlan
from pshard.runtime.engine import Engine
from pshard.runtime.memory.disk import far_table

FAST = "fake:rate=20G,jitter=1ms"  # rows arrive in random order
PROMPT = [(7 * n) % 50 for n in range(60)]  # some tokens twice


def look_up_from(spec: ModelSpec, site: str, tokens: tuple[int, ...] = (1, 64)) -> tuple[TierPlan, ...]:
    """Tiers with all tables in one place, and all else pinned."""
    where = {
        u.name: (site, None) if u.kind.is_looked_up else ("pinned", "vram" if u.kind.state else None)
        for u in spec.units
    }
    return tuple(make_tier(spec, n, where, 0, 256, 1, batch=tokens[-1]) for n in tokens)


def write_model(folder: Path, name: str) -> Path:
    """A file of one of the models that look rows up, of one or of two tables."""
    path = folder / "m.gguf"
    if name.startswith("pieces"):  # in files of their own
        kind = np.float16 if name.endswith("F16") else np.float32
        return spread_folder(folder / "hf", RECIPES["plain"], make_weights(RECIPES["plain"]), (1, 100, 0), kind)
    if name == "gemma4":
        return write_gemma4(path, GEMMAS["small"], make_gemma4(GEMMAS["small"]), "Q8_0")
    if name == "qwen4exp":
        return write_qwen4exp(path, RECIPES["plain"], make_weights(RECIPES["plain"]), "Q8_0")
    return write_gguf(path, qtype="Q4_0", qtypes={"token_embd.weight": name})


def speak(engine: Engine) -> torch.Tensor:
    return torch.cat([engine.forward(PROMPT, all_logits=True), *(engine.forward([n], all_logits=True) for n in (3, 9))])


@pytest.mark.quick(
    "fast-Q6_K", "plain-Q8_0", "fast-BF16", "plain-F32", "fast-gemma4", "plain-qwen4exp", "fast-pieces",
    "plain-pieces F16",
)  # fmt: skip
@pytest.mark.parametrize("name", ["Q6_K", "Q8_0", "BF16", "F32", "gemma4", "qwen4exp", "pieces", "pieces F16"])
@pytest.mark.parametrize("kernels", ["fast", "plain"])
def test_rows_from_disk_give_the_logits_of_tables_in_memory(
    kernels: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a micro-batch looks up more rows than are read at once."""
    monkeypatch.setenv("PSHARD_DISK", FAST)
    monkeypatch.setattr(far_table, "BUFFER", 4096)
    path = write_model(tmp_path, name)
    spec = open_model(path).spec
    found = list[torch.Tensor]()
    for site in (ON_CPU, ON_DEMAND):
        with open_engine(path, look_up_from(spec, site), context=256, kernels=kernels) as engine:
            assert bool(engine.rank_plan.beyond_host) == (site == ON_DEMAND)
            found.append(speak(engine))
    assert torch.equal(*found)


def look_up_by_tier(spec: ModelSpec, *sites: str) -> tuple[TierPlan, ...]:
    """Tiers that have all tables in these places, and all else pinned."""
    each = [look_up_from(spec, site) for site in sites]
    return tuple(own[i] for i, own in enumerate(each))


@pytest.mark.quick(
    "answers-Q6_K", "prompts-Q8_0", "answers-gemma4", "prompts-qwen4exp", "answers-pieces", "prompts-pieces F16"
)
@pytest.mark.parametrize("name", ["Q6_K", "Q8_0", "BF16", "F32", "gemma4", "qwen4exp", "pieces", "pieces F16"])
@pytest.mark.parametrize("sites", [(PINNED, ON_DEMAND), (ON_DEMAND, PINNED)], ids=["answers", "prompts"])
def test_a_table_that_one_tier_has_in_vram_is_read_whole_as_that_is_entered(
    sites: tuple[str, str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PSHARD_DISK", FAST)
    path = write_model(tmp_path, name)
    spec, found, read = mark_made(open_model(path)), list[torch.Tensor](), 0
    tables = sum(t.file_nbytes for unit in spec.units if unit.kind.is_looked_up for t in unit.tensors)
    for tiers in (look_up_from(spec, ON_CPU), look_up_by_tier(spec, *sites)):
        with open_engine(path, tiers, context=256) as engine:
            found.append(torch.cat([speak(engine), speak(engine)]))
            read = engine.memory().read
    assert torch.equal(*found)
    assert read >= 2 * tables  # each time


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", ["never", "answers", "prompts"])
@pytest.mark.parametrize("name", ["Q6_K", "gemma4"])
def test_a_gpu_gets_the_rows_that_it_gets_of_tables_in_memory(
    name: str, pinned: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PSHARD_DISK", FAST)
    path = write_model(tmp_path, name)
    spec, found = open_model(path).spec, list[torch.Tensor]()
    for site in (ON_CPU, ON_DEMAND):
        tiers = look_up_by_tier(spec, *(PINNED if pinned == tier else site for tier in ("answers", "prompts")))
        with open_engine(path, tiers, context=256, kernels="fast", device="cuda") as engine:
            found.append(torch.cat([speak(engine), speak(engine)]))  # launched, and by graphs
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["Q6_K", "gemma4", "qwen4exp", "pieces"])
def test_a_token_reads_the_rows_that_are_planned_and_a_prompt_none_twice(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PSHARD_DISK", FAST)
    path = write_model(tmp_path, name)
    spec = mark_made(open_model(path))
    assert not any(unit.stays_in_memory for unit in spec.units if unit.kind.is_looked_up)
    with open_engine(path, look_up_from(spec, ON_DEMAND), context=256) as engine:
        planned = sum(rows_nbytes(unit, spec.config, 1) for unit in spec.units)
        tables = sum(unit.packed_nbytes for unit in spec.units if unit.kind.is_looked_up)
        assert planned and engine.memory().host_weights < tables
        before = engine.memory().read
        engine.forward([5])
        assert engine.memory().read - before == planned
        before = engine.memory().read
        engine.forward([5, 6] * 20)
        assert planned < engine.memory().read - before < 40 * planned


def test_rows_that_cannot_be_read_end_the_step_with_file_and_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path, "Q6_K")
    tiers = look_up_from(open_model(path).spec, ON_DEMAND)
    monkeypatch.setenv("PSHARD_DISK", f"{FAST},fault=eio@2")
    with open_engine(path, tiers, context=256) as engine:
        engine.forward([1, 2, 3])  # it is tried again
    monkeypatch.setenv("PSHARD_DISK", f"{FAST},fault=dead@2")
    with (
        open_engine(path, tiers, context=256) as engine,
        pytest.raises(StepFailed, match=r"m\.gguf at byte \d+: Input"),
    ):
        engine.forward([1, 2, 3])
    monkeypatch.delenv("PSHARD_DISK")
    with open_engine(path, tiers, context=256) as engine:
        engine.forward([1, 2, 3])
        os.truncate(path, 4096)
        with pytest.raises(StepFailed, match=r"m\.gguf at byte \d+: was cut while in use"):
            engine.forward([300, 301])
