"""Reads the headers of a Hugging Face folder's safetensors files. Tensor data is not touched.

Format: https://huggingface.co/docs/safetensors (u64 length, JSON of dtype, shape and offsets, data). Read by hand
because the library's NumPy interface has no bf16 and no view of the raw bytes.
"""

from contextlib import closing
from operator import index
from pathlib import Path
from typing import Any

from pshard.errors import UserError
from pshard.jsonio import parse_json
from pshard.models.stored import FETCH_AGAIN, RAW, MappedFile, StoredTensor, check_layout

_SIZED = ("F32", "F16", "BF16", *RAW)  # types whose bytes are known
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_SINGLE_PART = "model-00001-of-00001.safetensors"  # which some write without an index


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises UserError."""
    file = MappedFile(path, "fetch it too, or give a GGUF file")
    with closing(file):
        file.check_pointer()
        text = file.copy(0, file.nbytes)
    try:
        data = parse_json(text.decode("utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error}); {FETCH_AGAIN}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: not a JSON object; {FETCH_AGAIN}")
    return data


def read_safetensors(folder: Path) -> tuple[tuple[MappedFile, ...], dict[str, StoredTensor]]:
    """The folder's files and their tensors by Hugging Face name. Raises UserError."""
    files = tuple(MappedFile(path, "fetch it too") for path in list_shards(folder))
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for tensor in _read_file(file):
            if tensor.name in tensors:
                tensor.fail("is there twice")
            tensors[tensor.name] = tensor
    return files, tensors


def list_shards(folder: Path) -> list[Path]:
    """The files with weights of a folder, whether or not they are there. Raises UserError."""
    if (folder / _INDEX).exists():
        names = read_json(folder / _INDEX).get("weight_map")
        if not isinstance(names, dict) or not names or not all(isinstance(n, str) for n in names.values()):
            raise UserError(f"{folder / _INDEX}: has no weight_map; {FETCH_AGAIN}")
        return [folder / Path(name).name for name in sorted(set(names.values()))]
    for name in (_SINGLE, _SINGLE_PART):
        if (folder / name).exists():
            return [folder / name]
    raise UserError(f"{folder}: has neither {_SINGLE} nor {_INDEX}; give a GGUF file or a safetensors folder")


def _read_file(file: MappedFile) -> list[StoredTensor]:
    file.check_pointer()
    length = int.from_bytes(file.copy(0, 8), "little")
    start = 8 + length
    if file.nbytes < 8 or start > file.nbytes:
        raise UserError(f"{file.path}: ends inside its header: it is truncated or damaged; {FETCH_AGAIN}")
    try:
        header = parse_json(file.copy(8, length))
        header.pop("__metadata__", None)
        extents = [_stored(file, start, name, entry) for name, entry in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{file.path}: not a safetensors file, or its header is damaged; {FETCH_AGAIN}") from None
    extents.sort(key=lambda extent: (extent[0].offset, extent[1]))  # the header lists tensors in any order
    check_layout(file, start, extents)
    return [tensor for tensor, _ in extents]


def _stored(file: MappedFile, start: int, name: str, entry: dict[str, Any]) -> tuple[StoredTensor, int]:
    """A tensor and how many bytes its offsets leave it."""
    first, last = (index(n) for n in entry["data_offsets"])
    shape = tuple(index(n) for n in entry["shape"])
    tensor = StoredTensor(name, str(entry["dtype"]), shape or (1,), file, start + first)
    if last < first or (tensor.qtype in _SIZED and tensor.nbytes != last - first):
        wanted = f", not the {tensor.nbytes} that its shape needs" if tensor.qtype in _SIZED else ""
        tensor.fail(f"has {last - first} bytes{wanted}: the header is damaged", FETCH_AGAIN)
    return tensor, last - first
