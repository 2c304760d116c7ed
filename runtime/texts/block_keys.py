"""Keys of KV blocks: equal where all tokens up to a block's end are, of one model, type of cells and salt."""

import hashlib
from array import array
from collections.abc import Iterator, Sequence

from pshard.units.kv_cells import KV_BLOCK


def root_key(fingerprint: str, type_k: str, type_v: str, salt: str) -> bytes:
    """What the first block of a text follows."""
    said = "\0".join((fingerprint, type_k, type_v, str(KV_BLOCK), salt))
    return hashlib.sha256(said.encode("utf-8", "surrogatepass")).digest()


def next_key(parent: bytes, ids: Sequence[int]) -> bytes:
    """The key of a block of these KV_BLOCK tokens after one with the key `parent`."""
    return hashlib.sha256(parent + array("q", ids).tobytes()).digest()


def list_keys(root: bytes, ids: Sequence[int], cells: int) -> Iterator[bytes]:
    """Keys of the full blocks of the first `cells` tokens, made as they are asked for."""
    key = root
    for start in range(0, cells // KV_BLOCK * KV_BLOCK, KV_BLOCK):
        key = next_key(key, ids[start : start + KV_BLOCK])
        yield key
