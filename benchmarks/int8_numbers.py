"""What prompts in int8 cost in numbers beside bfloat16: of the bundled model, and of two tiny ones trained here.

    python benchmarks/int8_numbers.py -o epyc-int8-numbers.json

A mixture (qwen3-moe) and a hybrid (qwen3.5, three gated delta nets in four layers) learn this project's pages, 200
steps each; their weights become values of Q8_0. Windows of README.md, which they have not seen, are computed with
exact products and with products rounded as a GPU's (tests/makers/rounded_products.py). No GPU takes part.
"""

import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from cpu_kernels import write_json

from pshard.commands.command_line import new_parser, run_cli
from pshard.errors import UserError
from pshard.models import ModelFile, open_model
from pshard.paths import bundled_model
from pshard.runtime import build_executor
from pshard.runtime.kernels.plain import PlainKernels

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "makers"))
from engines import open_engine  # noqa: E402
from rounded_products import RoundedProducts  # noqa: E402

WINDOW = 512
SIZES = {
    "num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "intermediate_size": 256, "max_position_embeddings": WINDOW, "tie_word_embeddings": False,
}  # fmt: skip
MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
HYBRID = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
                        "mrope_section": [3, 3, 2], "mrope_interleaved": True},
}  # fmt: skip
MODELS = ("bundled", "mixture", "hybrid")
LENGTH, BATCH = 256, 8  # of a step of training


def make_model(kind: str, vocab: int) -> torch.nn.Module:
    """A random mixture or hybrid."""
    import transformers
    from transformers.models.qwen3_5 import configuration_qwen3_5, modeling_qwen3_5

    torch.manual_seed(1)
    if kind == "mixture":
        return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(vocab_size=vocab, **SIZES, **MIXTURE))
    settings = configuration_qwen3_5.Qwen3_5TextConfig(vocab_size=vocab, **SIZES, **HYBRID)
    return modeling_qwen3_5.Qwen3_5ForCausalLM(settings)


def train(model: torch.nn.Module, ids: torch.Tensor, steps: int) -> float:
    """Trains on random windows of the ids: the loss of the last 20 steps."""
    generator = torch.Generator().manual_seed(2)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    losses = list[float]()
    for step in range(steps):
        at = torch.randint(0, len(ids) - LENGTH - 1, (BATCH,), generator=generator)
        taken = torch.stack([ids[i : i + LENGTH + 1] for i in at.tolist()])
        logits = model(taken[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), taken[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimiser.param_groups:
            group["lr"] = 2e-3 * min(1.0, (10 * step + 1) / steps) * (1 - step / steps)
        optimiser.step()
        losses.append(float(loss.detach()))
    return sum(losses[-20:]) / len(losses[-20:])


def round_weights(model: torch.nn.Module) -> None:
    """Matrices become values of Q8_0: 32 columns of a row share a scale in float16."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2 and weight.shape[-1] % 32 == 0 and "conv" not in name and "embed" not in name:
                blocks = weight.unflatten(-1, (-1, 32))
                scale = (blocks.abs().amax(-1, keepdim=True) / 127).half().float().clamp_min(1e-8)
                weight.copy_(((blocks / scale).round() * scale).flatten(-2))


def read_logits(path: Path, ids: list[int], way: str | None) -> torch.Tensor:
    """Of each whole window, with products rounded a way or exact: float64 [tokens, vocabulary]."""
    made = PlainKernels if way is None else partial(RoundedProducts, way, open_model(path).spec.config.vocab)
    found = []
    with (
        patch.object(build_executor, "PlainKernels", made),
        open_engine(path, tokens=(1, WINDOW), context=WINDOW) as engine,
    ):
        for begin in range(0, len(ids) // WINDOW * WINDOW, WINDOW):
            engine.reset(0)
            found.append(engine.forward(ids[begin : begin + WINDOW], all_logits=True).double())
    return torch.cat(found)


def compare(path: Path, ids: list[int]) -> dict[str, Any]:
    """Mean KL divergence a token, share of tokens with the same first choice, and normalised error of logits."""
    exact = read_logits(path, ids, None)
    p = exact.log_softmax(1)
    told: dict[str, Any] = {"tokens": len(exact)}
    after = torch.tensor([ids[i + 1] for i in range(len(exact)) if (i + 1) % WINDOW])
    before = torch.arange(len(exact)) % WINDOW != WINDOW - 1
    told["loss"] = float(F.nll_loss(p[before], after))
    for way in ("bf16", "int8"):
        got = read_logits(path, ids, way)
        told[way] = {
            "kl": float((p.exp() * (p - got.log_softmax(1))).sum(1).mean()),
            "same_first": float((got.argmax(1) == exact.argmax(1)).double().mean()),
            "error": float((got - exact).norm() / exact.norm()),
        }
    return told | {"ratio": told["int8"]["error"] / told["bf16"]["error"]}


def main(argv: list[str]) -> int:
    """Measure and print; with -o also write JSON."""
    parser = new_parser("int8_numbers.py", str(__doc__).splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS), help="of these, which: %(default)s")
    parser.add_argument("--steps", type=int, default=200, help="that a model is trained for, each of 2048 tokens")
    parser.add_argument("--windows", type=int, default=12, help="of README.md, of 512 tokens")
    parser.add_argument("-o", "--output", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    bundled = bundled_model()
    if bundled is None:
        raise UserError("the bundled model is not installed; run this from a clone")
    file = open_model(bundled)
    ids = file.tokenizer().encode((ROOT / "README.md").read_text(encoding="utf-8"))[: args.windows * WINDOW]
    results = []
    for kind in args.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            trained = {} if kind == "bundled" else make_folder(kind, file, args.steps, Path(folder))
            results.append({"model": kind} | trained | compare(Path(folder) if trained else bundled, ids))
        print(results[-1], flush=True)
    if args.output:
        write_json(args.output, "int8_numbers", results, argv)
    return 0


def make_folder(kind: str, file: ModelFile, steps: int, folder: Path) -> dict[str, Any]:
    """Train a model with the file's tokenizer on this project's pages and save it: its last loss."""
    pages = "\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md")))
    model = make_model(kind, file.spec.config.vocab)
    loss = train(model, torch.tensor(file.tokenizer().encode(pages)), steps)
    round_weights(model)
    model.eval().save_pretrained(folder)
    return {"trained_to": loss}


if __name__ == "__main__":
    raise SystemExit(run_cli(main))
