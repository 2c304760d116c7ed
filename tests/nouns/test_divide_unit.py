"""Where a unit is divided, and what each side gets of its bytes."""

import pytest
import torch
from planner_cases import make_model

from pshard.quant import TENSOR_ALIGN, packed_nbytes
from pshard.runtime.kernels.unpack import unpack
from pshard.runtime.memory.weights import view_portion, view_unit
from pshard.units.divide_unit import count_shares, divide_unit, share_sixteenths
from pshard.units.share import Share


@pytest.mark.parametrize("qtype", ["Q4_0", "Q8_0", "Q6_K", "BF16"])
@pytest.mark.parametrize("sixteenths", [1, 4, 15])
def test_both_parts_together_are_the_whole_ffn(qtype: str, sixteenths: int) -> None:
    unit = make_model(layers=1, d_model=256, d_ffn=768, heads=2, qtype=qtype).units[2]
    rows = share_sixteenths(unit, sixteenths)
    assert rows == 48 * sixteenths
    cut = divide_unit(unit, Share(rows))
    assert cut.on_cpu
    blob = torch.randint(0, 100, (unit.packed_nbytes,), dtype=torch.uint8)  # no NaN among these
    there = torch.zeros(cut.on_acc.packed_nbytes, dtype=torch.uint8)
    for piece in cut.brought.pieces:
        there[piece.to : piece.to + piece.nbytes] = blob[piece.start : piece.start + piece.nbytes]
    whole, acc, cpu = view_unit(unit, blob), view_unit(cut.on_acc, there), view_portion(cut.on_cpu, blob)
    for role in ("ffn_gate.weight", "ffn_up.weight"):
        both = torch.cat([unpack(acc.matrices[role]), unpack(cpu.matrices[role])])
        assert torch.equal(both, unpack(whole.matrices[role]))
    assert torch.equal(acc.matrices["ffn_down.weight"].data, whole.matrices["ffn_down.weight"].data)
    assert torch.equal(acc.vectors["ffn_norm.weight"], whole.vectors["ffn_norm.weight"])
    assert torch.equal(cpu.vectors["ffn_norm.weight"], whole.vectors["ffn_norm.weight"])
    saved = unit.packed_nbytes - cut.on_acc.packed_nbytes
    assert 0 <= 2 * packed_nbytes(qtype, rows, 256) - saved < 2 * TENSOR_ALIGN
    assert sum(p.nbytes for p in cut.brought.pieces) == cut.on_acc.packed_nbytes


@pytest.mark.parametrize("qtype", ["Q4_0", "Q6_K", "BF16"])
def test_rows_that_are_kept_and_those_that_are_copied_are_the_whole_ffn(qtype: str) -> None:
    unit = make_model(layers=1, d_model=256, d_ffn=768, heads=2, qtype=qtype).units[2]
    cut = divide_unit(unit, Share(kept=576))
    assert cut.kept and cut.on_cpu is None and cut.on_acc == unit
    assert cut.kept == divide_unit(unit, Share(768 - 576)).brought  # what a tier has that leaves the rest to the CPU
    blob = torch.randint(0, 100, (unit.packed_nbytes,), dtype=torch.uint8)
    whole, held = view_unit(unit, blob), []
    for portion in (cut.kept, cut.brought):
        there = torch.zeros(portion.nbytes, dtype=torch.uint8)
        for piece in portion.pieces:
            there[piece.to : piece.to + piece.nbytes] = blob[piece.start : piece.start + piece.nbytes]
        held.append(view_unit(portion.unit, there))
    for role in ("ffn_gate.weight", "ffn_up.weight"):
        both = torch.cat([unpack(part.matrices[role]) for part in held])
        assert torch.equal(both, unpack(whole.matrices[role]))
    assert torch.equal(held[0].matrices["ffn_down.weight"].data, whole.matrices["ffn_down.weight"].data)
    assert set(held[1].matrices) == {"ffn_gate.weight", "ffn_up.weight"} and not held[1].vectors
    for share in (Share(kept=8), Share(kept=768), Share(64, 64)):
        with pytest.raises(ValueError, match="of 768 cannot"):
            divide_unit(unit, share)


def test_a_cut_leaves_rows_on_both_sides_and_whole_records() -> None:
    unit = make_model(layers=1, d_model=256, d_ffn=256, heads=2).units[2]
    for rows in (256, 300, -16, 8):
        with pytest.raises(ValueError, match="of 256 cannot"):
            divide_unit(unit, Share(rows))
    assert {share_sixteenths(unit, n) for n in (0, 16)} == {0}
    attention = make_model(layers=1).units[1]
    assert count_shares(attention) == share_sixteenths(attention, 8) == 0
