"""A tiny file of each family, whose matrices are packed."""

from pathlib import Path

from family_files import RECIPES, write_family
from gemma4_files import GEMMAS, make_gemma4, write_gemma4
from hybrid_files import random_hybrid, write_hybrid_gguf
from latent_files import random_tensors, write_latent_gguf
from model_files import write_gguf
from qwen4exp_files import RECIPES as SEVERAL_STREAMS
from qwen4exp_files import make_weights, write_qwen4exp

LIKE = ("qwen3", "gpt-oss", *GEMMAS, "next", "delta dense", "qwen4exp", "v3", "lite", *RECIPES)


def write_like(path: Path, like: str, qtype: str = "Q4_0") -> None:
    """The file of one of LIKE."""
    if like in ("qwen3", "gpt-oss"):
        write_gguf(path, like, qtype=qtype)
    elif like in GEMMAS:
        write_gemma4(path, GEMMAS[like], make_gemma4(GEMMAS[like]), qtype=qtype)
    elif like in ("next", "delta dense"):
        write_hybrid_gguf(path, like.split()[-1], random_hybrid(like.split()[-1]), qtype=qtype)
    elif like == "qwen4exp":
        write_qwen4exp(path, SEVERAL_STREAMS["plain"], make_weights(SEVERAL_STREAMS["plain"]), qtype=qtype)
    elif like in RECIPES:
        write_family(path, like, qtype)
    else:
        write_latent_gguf(path, like, random_tensors(like), qtype=qtype)
