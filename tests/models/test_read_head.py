"""Multi-token heads of files: read with their model or alone beside it, and left out with a reason."""

from pathlib import Path

import numpy as np
import pytest
from head_files import HEADED, write_headed
from hybrid_files import random_hybrid, write_hybrid_gguf

from pshard.errors import UserError
from pshard.models import open_model


@pytest.mark.parametrize("like", HEADED)
def test_a_head_is_a_program_that_is_lent_what_it_shares(tmp_path: Path, like: str) -> None:
    write_headed(tmp_path / "m.gguf", like)
    write_headed(tmp_path / "own.gguf", like, own=True)
    with open_model(tmp_path / "m.gguf") as lent, open_model(tmp_path / "own.gguf") as own:
        assert lent.notes == own.notes == ()
        for file, shares in ((lent, True), (own, False)):
            head = file.spec.head
            assert head is not None and head.units[0].kind is file.spec.units[0].kind
            assert bool(head.embedding.lent) == bool(head.output.lent) == shares
            assert {u.layer for u in head.units} == {-1, file.spec.config.n_layers}
            for tensor in (t for unit in head.units for t in unit.tensors):
                assert file.of_head().tensor_bytes(tensor.name).nbytes == tensor.file_nbytes


def write_alone(path: Path, tensors: dict[str, np.ndarray], blocks: int = 5) -> Path:
    """A file of a head alone, with copies of what it shares."""
    kept = {n: t for n, t in tensors.items() if n.startswith("blk.4.") or not n.startswith("blk.")}
    return write_hybrid_gguf(path, "dense", kept, metadata={"qwen35.block_count": blocks})


def test_a_head_may_lie_alone_beside_its_model(tmp_path: Path) -> None:
    tensors = write_headed(tmp_path / "whole.gguf", "dense")
    with open_model(tmp_path / "whole.gguf") as whole:
        expected = whole.spec.head
    folder = tmp_path / "apart"
    folder.mkdir()
    path = write_hybrid_gguf(folder / "m.gguf", "dense", {n: t for n, t in tensors.items() if "blk.4." not in n})
    with open_model(path) as file:
        assert file.spec.head is None and file.notes == ()
        inputs = file.fingerprint_inputs()
        with pytest.raises(UserError, match=r"there is no multi-token head to draft with: the file has none"):
            file.of_head()
    write_alone(folder / "mtp-m.gguf", tensors)
    with open_model(path) as file:
        assert file.notes == () and file.fingerprint_inputs() == inputs
        assert expected is not None and file.spec.head is not None
        assert [u.tensors for u in file.spec.head.units] == [u.tensors for u in expected.units]
        name = "blk.4.nextn.eh_proj.weight"
        raw = file.of_head().tensor_bytes(name)
        assert np.array_equal(raw.view(np.float32).reshape(tensors[name].shape), tensors[name])


def test_a_head_of_another_model_is_left_out_with_a_reason(tmp_path: Path) -> None:
    tensors = write_headed(tmp_path / "whole.gguf", "dense")
    model = write_hybrid_gguf(tmp_path / "m.gguf", "dense", random_hybrid("dense"))
    write_alone(tmp_path / "mtp-m.gguf", tensors, blocks=9)
    with open_model(model) as file:
        assert file.spec.head is None and "is no multi-token head of this model" in file.notes[0]
    narrow = tensors | {"blk.4.nextn.eh_proj.weight": np.zeros((256, 256), np.float32)}
    write_alone(tmp_path / "mtp-m.gguf", narrow)
    with open_model(model) as file:
        assert file.spec.head is None and "nextn.eh_proj.weight has shape" in file.notes[0]
    (tmp_path / "mtp-m.gguf").write_bytes(b"GGUF")
    with open_model(model) as file:
        assert file.spec.head is None and "is left out" in file.notes[0]


def test_several_heads_are_left_out(tmp_path: Path) -> None:
    tensors = write_headed(tmp_path / "m.gguf", "dense")
    more = {n.replace("blk.4.", "blk.5."): t for n, t in tensors.items() if n.startswith("blk.4.")}
    keys = {"qwen35.block_count": 6, "qwen35.nextn_predict_layers": 2}
    path = write_hybrid_gguf(tmp_path / "two.gguf", "dense", tensors | more, metadata=keys)
    with open_model(path) as file:
        assert file.spec.head is None and "there are several" in file.notes[0]
