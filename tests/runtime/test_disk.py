"""Weights that live on disk: read from the model's file for every micro-batch, with the logits of VRAM."""

import ctypes
import mmap
import os
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import converse, open_engine, pinned_everywhere
from model_files import write_gguf
from plan_samples import make_tier

from pshard.errors import StepFailed, UserError
from pshard.machine import DiskTiming
from pshard.model import ModelSpec
from pshard.models import open_model
from pshard.plan import TierPlan
from pshard.profile.timed import time_disk
from pshard.runtime.memory.disk.fake_disk import read_fake_disk
from pshard.runtime.memory.disk.reader import DiskReader, Piece, PieceList
from pshard.units.unit import Unit, places_of

FAST = "fake:rate=20G,jitter=1ms"  # pieces arrive in random order


def on_disk(spec: ModelSpec, tokens=(1, 64), context: int = 256) -> tuple[TierPlan, ...]:
    """Tiers with all that may live on disk there, and two slots."""
    places = {}
    for unit in spec.units:
        far = [place for place in places_of(unit.kind, False) if place[0] == "disk"]
        places[unit.name] = far[-1] if far else ("pinned", "vram" if unit.kind.state else None)
    return tuple(make_tier(spec, n, places, 2, context, 1, batch=tokens[-1]) for n in tokens)


def count_read(spec: ModelSpec, tier: TierPlan) -> int:
    """Bytes of the file that a micro-batch of a tier reads."""
    units = [spec.unit(p.unit) for p in tier.placements if p.site.is_beyond_host]
    return sum(t.file_nbytes for u in units for t in u.tensors if len(t.shape) == 2)


@pytest.mark.quick("gpt-oss-shape1")
@pytest.mark.parametrize(
    ("arch", "shape"),
    [
        ("llama", {"qtype": "Q4_0", "qtypes": {"ffn_down.weight": "Q6_K", "attn_k.weight": "BF16"}}),
        ("gpt-oss", {"qtype": "F32", "qtypes": {"ffn_up_exps.weight": "MXFP4"}}),
    ],
)
def test_logits_are_those_of_vram_whatever_order_pieces_arrive_in(
    arch: str, shape: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PSHARD_DISK", FAST)
    path = write_gguf(tmp_path / "m.gguf", arch, **shape)
    spec = open_model(path).spec
    tiers = on_disk(spec)
    with open_engine(path, tiers, context=256) as engine:
        assert engine.rank_plan.beyond_host
        found = converse(engine)
        assert engine.memory().read >= 8 * count_read(spec, tiers[0]) > 0
    with open_engine(path, pinned_everywhere(spec, context=256), context=256) as engine:
        assert torch.equal(found, converse(engine))


def speak_from(path: Path, tokens: int = 3) -> torch.Tensor:
    """Logits of a model on disk: of a prompt and of tokens one by one."""
    with open_engine(path, on_disk(open_model(path).spec), context=256) as engine:
        rows = [engine.forward(list(range(70)))]
        return torch.stack(rows + [engine.forward([n]) for n in range(tokens)])


def test_a_read_that_fails_once_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "m.gguf", qtype="Q4_0")
    monkeypatch.setenv("PSHARD_DISK", FAST)
    right = speak_from(path)
    monkeypatch.setenv("PSHARD_DISK", FAST + ",fault=eio@5")
    assert torch.equal(speak_from(path), right)


@pytest.mark.parametrize(
    ("fault", "why"),
    [("dead@40", "Input/output error"), ("short@40", "was cut while in use"), ("hang@40", "does not answer")],
)
def test_a_disk_that_fails_ends_the_step_and_names_file_and_place(
    fault: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PSHARD_DISK", f"{FAST},fault={fault}")
    monkeypatch.setattr("pshard.runtime.memory.disk.disk_store.DiskReader", lambda n: DiskReader(n, patience=0.5))
    path = write_gguf(tmp_path / "m.gguf", qtype="Q4_0")
    with pytest.raises(StepFailed, match=rf"m\.gguf at byte \d+.*{why}|{why}.*m\.gguf at byte \d+"):
        speak_from(path, 30)


def test_a_file_that_is_cut_while_in_use_is_named_and_no_signal_ends_the_process(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", qtype="Q4_0")
    with open_engine(path, on_disk(open_model(path).spec), context=256) as engine:
        engine.forward([1, 2, 3])
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(StepFailed, match=r"m\.gguf at byte \d+: was cut while in use"):
            for n in range(5):
                engine.forward([n])


@pytest.mark.parametrize(
    "text", ["fake", "nvme:rate=1G", "fake:rate=fast", "fake:rate=1G,fault=flood", "fake:speed=1G"]
)
def test_a_made_up_disk_that_makes_no_sense_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSHARD_DISK", text)
    with pytest.raises(UserError, match="is no disk; give one such as"):
        DiskReader()


def test_a_made_up_disk_takes_as_long_as_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 MiB at 20 MB/s; pieces wait for each other, their latencies do not add up."""
    monkeypatch.setenv("PSHARD_DISK", "fake:rate=20M,latency=100ms")
    path = tmp_path / "f"
    path.write_bytes(bytes(1 << 20))
    with closing(DiskReader()) as reader:
        number, begun = reader.add_file(path), time.perf_counter()
        reader.read([PieceList([Piece(number, at, 1 << 16) for at in range(0, 1 << 20, 1 << 16)])])
        assert 0.15 < time.perf_counter() - begun < 16 * 0.1
        assert reader.read_bytes == 1 << 20


def test_time_counts_as_waited_only_while_something_asked_for_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PSHARD_DISK", "fake:rate=20M,latency=100ms")
    path = tmp_path / "f"
    path.write_bytes(bytes(1 << 20))
    with closing(DiskReader()) as reader:
        pieces, counted = PieceList([Piece(reader.add_file(path), 0, 1 << 20)]), list[tuple[int, float]]()
        ahead = reader.submit(pieces, 0)
        time.sleep(0.2)  # read ahead: nobody waits
        counted.append(reader.waited)
        reader.run(ahead)
        asked = reader.ask(pieces, 0)
        reader.wait(asked)
        counted.append(reader.waited)
        time.sleep(0.05)
        counted.append(reader.waited)
    assert counted[0] == (0, 0.0) and counted[1] == counted[2]
    nbytes, seconds = counted[1]
    assert nbytes == 1 << 20 and seconds >= 0.15  # 52 ms at that rate, 100 ms later


def test_profiles_know_made_up_disks_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set[str]()
    for more in ("", ",latency=1ms", ",latency=2ms", ",jitter=1ms"):
        monkeypatch.setenv("PSHARD_DISK", f"fake:rate=1G{more}")
        fake = read_fake_disk()
        assert fake and {row.disk for row in fake.timings} == {fake.name}
        names.add(fake.name)
    assert len(names) == 4


def test_a_disk_is_timed_with_the_cores_that_pack_and_again_while_others_have_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fastest of those, each of other units, or the first that was not disturbed."""
    monkeypatch.setenv("PSHARD_DISK", "fake:rate=50M")
    file = open_model(write_gguf(tmp_path / "m.gguf", qtype="Q4_0", n_layers=8))
    timed = list[list[str]]()
    time_units = time_disk._time_units

    def time_some(file: time_disk.ReadModel, disk: str, units: list[Unit]) -> DiskTiming:
        timed.append([unit.name for unit in units])
        return replace(time_units(file, disk, units), seconds=(3.0, 1.0, 2.0, 4.0)[len(timed) - 1])

    monkeypatch.setattr(time_disk, "disturbed_share", lambda *_: 0.5)
    monkeypatch.setattr(time_disk, "_time_units", time_some)
    monkeypatch.setattr(time_disk, "UNIT_BYTES", 1)
    ffns = [unit for unit in file.spec.units if unit.name.endswith("ffn")]
    row = time_disk._time_quietly(file, "drive", ffns)
    assert row.seconds == 1.0 and row.disturbed == 0.5 and [len(names) for names in timed] == [2, 2, 2, 2]
    assert len({name for names in timed for name in names}) == 8
    assert row.nbytes == ffns[0].packed_nbytes and 0 < row.cpu_seconds < 1
    timed.clear()
    monkeypatch.setattr(time_disk, "disturbed_share", lambda *_: 0.0)
    row = time_disk._time_quietly(file, "drive", ffns)
    assert row.seconds == 3.0 and not row.disturbed and len(timed) == 1


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_step_reads_what_its_tier_has_on_disk_once(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What slots keep across a step's end was read before it: so many steps read so many times the whole."""
    monkeypatch.setenv("PSHARD_DISK", FAST)
    path = write_gguf(tmp_path / "m.gguf", qtype="Q4_0", n_layers=4)
    spec = open_model(path).spec
    tiers = on_disk(spec)
    with open_engine(path, tiers, context=256, device=device) as engine:
        engine.forward([1])
        engine.device.synchronize()
        before = engine.memory().read
        rows = [engine.forward([n]) for n in range(4)]
        engine.device.synchronize()
        assert engine.memory().read - before == 4 * count_read(spec, tiers[0])
    with open_engine(path, pinned_everywhere(spec, context=256), context=256, device=device) as engine:
        engine.forward([1])
        assert torch.equal(torch.stack(rows), torch.stack([engine.forward([n]) for n in range(4)]))


def test_loading_under_ram_leaves_nothing_of_the_file_in_the_page_cache(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", qtype="Q4_0", d_ffn=1024)
    os.sync()
    for leaves in (True, False):
        with open_model(path) as file:
            if not leaves:
                file.leave_no_cache()
            file.map_files(lambda *_: None, lambda _: None)
            for tensor in (t for unit in file.spec.units for t in unit.matrices):
                file.tensor_bytes(tensor.name).sum()
                file.forget_tensor(tensor.name)
        assert (count_cached(path) > 0.1) == leaves


def count_cached(path: Path) -> float:
    """The share of a file's pages in the page cache, but for its header, which reading it again brings."""
    size = path.stat().st_size
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
        pages = -(-size // mmap.PAGESIZE)
        found = (ctypes.c_ubyte * pages)()
        address = np.frombuffer(view, np.uint8).ctypes.data
        if ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), found):
            pytest.skip("the system does not say what is cached")
        return sum(page & 1 for page in found) / pages
