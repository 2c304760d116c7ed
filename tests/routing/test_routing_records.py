"""Files of routing records: what is written is read back, and what is no record of this model is refused in a line."""

import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from experts_file import RULES, ExpertsFile, skew_routers
from routing_samples import make_record

from pshard.errors import UserError
from pshard.registries.routing_file import check_routing, fingerprint_routers, read_routing, write_routing
from pshard.routing.record import RoutingRecord


@pytest.mark.parametrize("experts", [8, 256, 300])
def test_a_record_comes_back_as_it_was_written_in_a_byte_or_two_for_each_choice(tmp_path: Path, experts: int) -> None:
    record = make_record(40, experts=experts, used=4)
    write_routing(tmp_path / "a.routing", record)
    found = read_routing(tmp_path / "a.routing")
    assert (found.ids == record.ids).all() and found.ids.dtype == record.ids.dtype
    assert replace(found, ids=record.ids).__dict__ == record.__dict__
    choices = 40 * 3 * 4
    assert choices * (1 + (experts > 256)) < (tmp_path / "a.routing").stat().st_size < 500 + 2 * choices
    assert [p.name for p in tmp_path.iterdir()] == ["a.routing"]


def edit(data: bytes, old: bytes, new: bytes) -> bytes:
    """A header with right checksums that says something else."""
    magic, version, length, _, of_ids = struct.unpack_from("<8sIIII", data)
    header, rest = data[24 : 24 + length], data[24 + length :]
    assert old in header
    header = header.replace(old, new, 1)
    return struct.pack("<8sIIII", magic, version, len(header), zlib.crc32(header), of_ids) + header + rest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"", "no routing record"),
        (lambda data: b"GGUF" + data[4:], "no routing record"),
        (lambda data: data[:8] + b"\x07" + data[9:], "format 7"),
        (lambda data: data[:-1], "checksums"),
        (lambda data: data + b"\0", "checksums"),
        (lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:], "checksums"),
        (lambda data: edit(data, b'"experts": 16', b'"experts": 6'), "chose expert"),
        (lambda data: edit(data, b'"used": 2', b'"used": 17'), "more experts than there are"),
        (lambda data: edit(data, b'"used": 2', b'"used": 4'), "another number"),
        (lambda data: edit(data, b'"tokens": 40', b'"tokens": 41'), "not its tokens"),
        (lambda data: edit(data, b"[[20, 1], [1, 20]]", b"[[20, 2], [0, 20]]"), "has no tokens"),
        (lambda data: edit(data, b"[1, 2, 3]", b"[1, 3, 2]"), "no tokens or layers"),
        (lambda data: edit(data, b'"layers"', b'"lairs"'), "lairs"),
        (lambda data: edit(data, b'"tokens": 40', b'"tokens": true'), "not int"),
        (lambda data: edit(data, b'"fingerprint"', b"[" * 2000 + b'"'), "damaged"),
    ],
)
def test_what_is_no_record_is_refused_in_one_line(tmp_path: Path, change, message: str) -> None:
    path = tmp_path / "a.routing"
    write_routing(path, make_record(40))
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError, match=message) as caught:
        read_routing(path)
    assert "\n" not in str(caught.value)


def test_a_record_that_is_not_there_or_cannot_be_written_is_an_error_of_input(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        read_routing(tmp_path / "none")
    with pytest.raises(UserError, match="cannot read"):
        read_routing(tmp_path)
    with pytest.raises(UserError, match="cannot write"):
        write_routing(tmp_path, make_record(10))


def record_of(file: ExpertsFile) -> RoutingRecord:
    rule = file.spec.config.experts
    assert rule is not None
    made = make_record(10, len(file.spec.units) // 3, rule.count, rule.used)
    layers = tuple(unit.layer for unit in file.spec.units if unit.kind.routes)
    return replace(made, fingerprint=fingerprint_routers(file), layers=layers, ids=made.ids[:, : len(layers)])


def test_a_record_fits_its_model_however_experts_are_encoded_and_no_other_model(tmp_path: Path) -> None:
    file = ExpertsFile()
    record = record_of(file)
    check_routing(record, file, tmp_path)
    name = next(t.name for unit in file.spec.units for t in unit.tensors if t.parts)
    file.values[name] = file.values[name] + np.float32(1)  # another encoding
    check_routing(record, file, tmp_path)
    others = [ExpertsFile(layers=2), ExpertsFile(RULES["sigmoid in groups"]), ExpertsFile(seed=1)]
    for other in (*others, skew_routers(ExpertsFile(), 0.5)):
        with pytest.raises(UserError, match="of another model"):
            check_routing(record, other, tmp_path)


def test_a_record_is_refused_for_a_model_without_experts(tmp_path: Path) -> None:
    file = ExpertsFile()
    record = record_of(file)
    file.spec = replace(file.spec, config=replace(file.spec.config, experts=None))
    with pytest.raises(UserError, match="leave out --routing"):
        check_routing(record, file, tmp_path)
