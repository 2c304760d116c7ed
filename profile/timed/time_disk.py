"""Reads of a model's file from disk, cold: as runs make them, and by block and depth."""

import os
import random
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from pshard.errors import UserError
from pshard.machine import DiskTiming
from pshard.model import ModelSpec
from pshard.on_disk import lies_as_used, may_move
from pshard.runtime.devices.device import CpuDevice
from pshard.runtime.memory.disk.disk_store import DiskStore
from pshard.runtime.memory.disk.fake_disk import read_fake_disk
from pshard.runtime.memory.disk.reader import DiskReader, Piece, PieceList
from pshard.runtime.memory.weights import WeightSource
from pshard.times.stolen_time import DISTURBED, disturbed_share, read_core_time
from pshard.units.divide_unit import whole_unit
from pshard.units.unit import Unit

BLOCKS = (4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
DEPTHS = (1, 4, 16)
GRID_BYTES = 64 << 20  # of one block and depth
GRID_SECONDS = 0.25  # of one at depth 1, about: what a slow disk is spared
GRID_READS = 1024  # of one block and depth, at most
SPREAD = 4  # times as many bytes of the file as reads of small blocks have are what these are chosen from
UNIT_BYTES = 256 << 20  # of units of one size
MOST_UNITS = 16
MOST_TIMES = 5  # that units of one size are timed, others each time, while other programs have cores


class ReadModel(WeightSource, Protocol):
    """A model's file whose tensors can be found on disk."""

    spec: ModelSpec


def name_source(file: ReadModel) -> str:
    """What holds what is read of a model: the disk of its packed file, which needs no packing, or of its own."""
    return f"{name_disk(file.packed.path)}, packed" if file.packed else name_disk(Path(file.spec.path))


def name_disk(path: Path) -> str:
    """What holds a file: device, file system and mount, or what PSHARD_DISK makes up."""
    if fake := read_fake_disk():
        return fake.name
    number = os.stat(path).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return device
    for line in reversed(lines):  # proc_pid_mountinfo(5)
        left, _, right = line.partition(" - ")
        if left.split()[2] == device:
            kind, source = right.split()[:2]
            return f"{source} ({kind}) at {left.split()[4]}"
    return device


def time_disk(file: ReadModel) -> tuple[DiskTiming, ...]:
    """Timings of the disk that holds a model, a second or two: units of some sizes as runs bring them, then reads by
    block and depth all over the file. No byte is read twice, as drives keep what was read. Raises UserError for a file
    that cannot be read so."""
    units = [unit for unit in file.spec.units if may_move(unit) and unit.matrices and lies_as_used(file, unit)]
    if not units:
        return ()
    path = file.packed.path if file.packed else _find_path(file, units[0])
    disk, rows = name_source(file), list[DiskTiming]()
    by_size: dict[int, list[Unit]] = {}
    for unit in units:
        by_size.setdefault(unit.packed_nbytes, []).append(unit)
    sizes = sorted(by_size)
    try:
        for size in sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]}):
            rows.append(_time_quietly(file, disk, by_size[size]))
        rows += _time_grid(disk, path)
    except RuntimeError as error:  # a read that failed
        raise UserError(f"{disk} cannot be timed: {error}; try again, or keep the model on another disk") from None
    return tuple(rows)


def _time_quietly(file: ReadModel, disk: str, units: list[Unit]) -> DiskTiming:
    """Of units of one size some; while other programs have cores others too, of which the fastest count, as these
    programs only hold them up. What those may have lost is kept with them."""
    found, each = list[DiskTiming](), max(2, min(MOST_UNITS, UNIT_BYTES // units[0].packed_nbytes))
    for some in (units[at : at + each] for at in range(0, MOST_TIMES * each, each)):
        if len(some) < min(2, len(units)):
            break
        began = read_core_time()
        row = _time_units(file, disk, some)
        found.append(replace(row, disturbed=round(disturbed_share(began, read_core_time()), 4)))
        if found[-1].disturbed < DISTURBED:
            return found[-1]
    return min(found, key=lambda row: row.seconds)


def _find_path(file: ReadModel, unit: Unit) -> Path:
    tensor = unit.matrices[0]
    found = file.locate(tensor.name, 0 if tensor.parts else None)
    assert found is not None
    return found[0]


def _time_units(file: ReadModel, disk: str, units: list[Unit]) -> DiskTiming:
    """How long each of these units takes behind the others. The first one, if there are others, shows the system where
    the file lies."""
    device = CpuDevice()
    with closing(device), closing(DiskStore(device, tuple(map(whole_unit, units)))) as store:
        store.load(file, None, lambda _: None)
        place = torch.empty(store.least, dtype=torch.uint8)
        blobs = [store.blob(unit.name) for unit in units]
        for some in (blobs[:1], blobs[1:] or blobs):
            sources = [part for blob in some for part in blob.split(store.split(blob))]
            started, worked = time.perf_counter(), time.process_time()
            for source in sources:
                store.fill(place[: source.numel()], source)
            device.synchronize()
        seconds, cpu = time.perf_counter() - started, time.process_time() - worked
        store.check()
        return DiskTiming(disk, store.is_direct, 0, 0, units[0].packed_nbytes, seconds / len(some), cpu / len(some))


def _time_grid(disk: str, path: Path) -> Iterator[DiskTiming]:
    """Reads at random places of a file."""
    places = list(range(path.stat().st_size // max(BLOCKS)))
    random.Random(1).shuffle(places)
    for block in BLOCKS:
        rate = 0.0
        for depth in DEPTHS:
            most = GRID_BYTES if not rate else min(GRID_BYTES, int(rate * depth * GRID_SECONDS))
            few = min(len(places) // len(DEPTHS), SPREAD * GRID_READS * block // max(BLOCKS))
            count = min(len(places), max(1, min(few, most // max(BLOCKS))))
            if not count:
                return
            taken, places = places[:count], places[count:]
            with closing(DiskReader(block, depth)) as reader:
                number = reader.add_file(path)
                starts = [place * max(BLOCKS) + at for place in taken for at in range(0, max(BLOCKS), block)]
                starts = random.Random(block + depth).sample(starts, min(len(starts), GRID_READS))
                pieces = PieceList([Piece(number, start, block) for start in starts])
                started = time.perf_counter()
                reader.read([pieces])
                seconds = time.perf_counter() - started
                rate = rate or len(starts) * block / seconds
                yield DiskTiming(disk, reader.is_direct, block, depth, len(starts) * block, seconds)
