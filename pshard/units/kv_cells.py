"""Cells of the KV cache: their types, their bytes, and the blocks in which sequences take them. No torch."""

from pshard.errors import UserError
from pshard.model_config import ModelConfig
from pshard.quant import QUANT_TYPES, file_nbytes

KV_TYPES = ("f32", "bf16", "f16", "q8_0", "q4_0")  # names in small letters of the quant types whose sizes they have
CODED = ("q8_0", "q4_0")  # of these a cell is codes and scales, and takes a row of bytes
KV_BLOCK = 64  # cells that a sequence takes from the KV cache at once; a tile of attention lies in one or in whole ones


def kv_nbytes(kind: str, n: int) -> int:
    """Bytes of n numbers of a KV type; n is a multiple of its block."""
    return file_nbytes(kind.upper(), 1, n)


def kv_blocks(context: int, sequences: int) -> int:
    """Blocks of a KV cache of `context` cells that `sequences` share: equal shares of it have whole blocks."""
    return sequences * -(-context // (sequences * KV_BLOCK))


def window_start(past: int, window: int) -> int:
    """The first cell of the block where what a token after `past` others sees begins, by its window (0: all)."""
    return max(0, past + 1 - window) // KV_BLOCK * KV_BLOCK if window else 0


def window_blocks(window: int, context: int, sequences: int, batch: int) -> int:
    """Blocks of a layer whose tokens see `window` cells: what all sequences see, and a micro-batch of `batch` tokens
    more, each sequence's part of both in whole blocks; never more than `kv_blocks`."""
    # n new tokens of a sequence see window - 1 + n cells, which lie in (window - 3 + n) // KV_BLOCK + 2 blocks at most
    each = (window - 3) // KV_BLOCK + 3
    return min(sequences * each + batch // KV_BLOCK, kv_blocks(context, sequences))


def longest_sequence(config: ModelConfig, context: int) -> int:
    """Cells that one sequence may have in a KV cache of `context` cells."""
    return min(context, config.context or context)


def check_kv_types(config: ModelConfig, type_k: str, type_v: str) -> None:
    """Raise UserError for an unknown KV type, or one whose blocks do not divide the model's heads."""
    for flag, kind in (("-ctk", type_k), ("-ctv", type_v)):
        if kind not in KV_TYPES:
            raise UserError(f"unknown KV cache type {kind!r}; {flag} is one of {', '.join(KV_TYPES)}")
        block = QUANT_TYPES[kind.upper()].block
        latent = config.latent
        widths = (latent.rank, latent.rope) if latent else (config.head_dim, config.windowed.head_dim)
        if wrong := [width for width in widths if width % block]:
            held = f"latents have {latent.rank} and {latent.rope}" if latent else f"heads have {wrong[0]}"
            raise UserError(
                f"{kind} keeps the KV cache in blocks of {block}, and this model's {held} numbers; give {flag} bf16"
            )
    if config.latent and "q4_0" in (type_k, type_v):
        raise UserError("latents are not kept as q4_0, which is not supported yet; give -ctk and -ctv bf16 or q8_0")
    if config.latent and type_k != type_v:
        raise UserError(
            f"this model keeps one latent of each token, which is key and value at once, and -ctk {type_k} and "
            f"-ctv {type_v} differ; give both the same type"
        )
