#!/usr/bin/env python3
"""Train the small demonstration model on one text file and write it as a quantised GGUF; then what drafts for it.

The model has the llama architecture and is large enough to be worth planning (8 layers, about 7 MB in Q8_0) and small
enough to be trained in minutes and to be kept beside the code. The last tenth of the text is held out; a JSON report
beside the GGUF says how well the float weights and the weights in the file predict it.

    python scripts/train_demo_model.py --text tinyshakespeare.txt --out examples/demo.gguf
    python scripts/train_demo_model.py --text tinyshakespeare.txt --out examples/demo.gguf --drafters-only

Beside OUT it writes two drafters (docs/speculation.md), which learn the model's distribution: a multi-token head
(mtp-OUT, 1 MB) and a draft model of two layers (OUT-draft, 0.7 MB), with a report of their own (OUT-drafters.json).

Needs torch, tokenizers and gguf. One seed repeats a run up to the order of float additions on the device and up to BPE
dropout, whose random numbers the tokenizers library does not let us seed. Drafters have no BPE dropout.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import gguf
import numpy as np
import tokenizers
import torch
from torch import Tensor, nn
from torch.nn import functional as F

END_OF_TEXT = "<|endoftext|>"
QUANT_TYPES = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")  # what the gguf package can quantise to


@dataclass(frozen=True)
class Shape:
    """Shape of the model; widths are multiples of 256, so that every GGUF quant type fits its rows."""

    vocab_size: int = 1024
    context: int = 512
    layers: int = 8
    width: int = 256
    ffn_width: int = 768
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    rope_base: float = 10000.0
    norm_eps: float = 1e-5


@dataclass(frozen=True)
class Recipe:
    """How the model is trained: a small text read many times, so nearly everything here works against overfitting."""

    batch: int = 32
    learning_rate: float = 1e-3
    warmup_steps: int = 100
    final_rate: float = 0.05  # of learning_rate, where the cosine ends
    weight_decay: float = 0.5
    gradient_clip: float = 1.0
    dropout: float = 0.2
    # Held-out perplexity of a 1/6-size trial on 1/6 of the text: none 98.6, 0.1 75.2, 0.2 below 71.
    bpe_dropout: float = 0.2
    bpe_variants: int = 32  # re-encodings of the text with BPE dropout, beside as many plain copies
    average_decay: float = 0.995  # of the moving average of the weights, which is what is evaluated and kept
    evaluate_every: int = 100
    patience: int = 12  # evaluations without a better one


@dataclass(frozen=True)
class DraftRecipe:
    """How drafters are trained, on what the model computes of crops of the training text."""

    crops: int = 1024
    crop: int = 128  # tokens
    batch: int = 8
    weight_decay: float = 0.05
    warmup_steps: int = 30
    dropout: float = 0.1  # of the head
    head_steps: int = 360
    head_rate: float = 2e-3
    chain: tuple[float, ...] = (1.0, 0.6)  # weights of the losses of the first and second draft
    draft_steps: int = 600
    draft_rate: float = 4e-3


DRAFT_SHAPE = {"layers": 2, "width": 128, "ffn_width": 384, "heads": 4, "kv_heads": 2}  # of the draft model
MEASURED = 64  # crops of held-out text behind which first drafts are compared


@dataclass(frozen=True)
class HeldOut:
    """How well a model predicts the held-out text."""

    perplexity_per_token: float
    bits_per_byte: float


class Block(nn.Module):
    """One decoder layer; its sub-modules bear the GGUF tensor names."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.shape = shape
        self.attn_norm = nn.RMSNorm(shape.width, eps=shape.norm_eps)
        self.attn_q = nn.Linear(shape.width, shape.heads * shape.head_dim, bias=False)
        self.attn_k = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, bias=False)
        self.attn_v = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, bias=False)
        self.attn_output = nn.Linear(shape.heads * shape.head_dim, shape.width, bias=False)
        self.ffn_norm = nn.RMSNorm(shape.width, eps=shape.norm_eps)
        self.ffn_gate = nn.Linear(shape.width, shape.ffn_width, bias=False)
        self.ffn_up = nn.Linear(shape.width, shape.ffn_width, bias=False)
        self.ffn_down = nn.Linear(shape.ffn_width, shape.width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [batch, tokens, width]; cos and sin [tokens, head_dim / 2]."""
        x = x + self.dropout(self.attend(self.attn_norm(x), cos, sin))
        h = self.ffn_norm(x)
        return x + self.dropout(self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h)))

    def attend(self, h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, _ = h.shape
        q, k, v = (
            project(h).view(batch, tokens, -1, self.shape.head_dim).transpose(1, 2)
            for project in (self.attn_q, self.attn_k, self.attn_v)
        )
        group = self.shape.heads // self.shape.kv_heads
        k, v = (rows.repeat_interleave(group, dim=1) for rows in (rotate_pairs(k, cos, sin), v))
        # No dropout inside: it costs the fused kernel on some devices (4x per step on a CPU); the output has its own.
        mixed = F.scaled_dot_product_attention(rotate_pairs(q, cos, sin), k, v, is_causal=True)
        return self.attn_output(mixed.transpose(1, 2).reshape(batch, tokens, -1))


class Llama(nn.Module):
    """The whole model; the names in its state_dict are the tensor names in the GGUF."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.shape = shape
        self.token_embd = nn.Embedding(shape.vocab_size, shape.width)
        self.blk = nn.ModuleList(Block(shape, dropout) for _ in range(shape.layers))
        self.output_norm = nn.RMSNorm(shape.width, eps=shape.norm_eps)
        self.output = nn.Linear(shape.width, shape.vocab_size, bias=False)
        self.dropout = nn.Dropout(dropout)
        frequencies = shape.rope_base ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angles = torch.outer(torch.arange(shape.context), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                into_residual = name.endswith(("attn_output.weight", "ffn_down.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * shape.layers) if into_residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids [batch, tokens] -> logits [batch, tokens, vocab_size]."""
        return self.output(self.states(tokens))

    def states(self, tokens: Tensor) -> Tensor:
        """Token ids [batch, tokens] -> what the output multiplies, [batch, tokens, width]."""
        x = self.dropout(self.token_embd(tokens))
        for block in self.blk:
            x = block(x, *self.angles(tokens.shape[1]))
        return self.output_norm(x)

    def angles(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the first positions, [tokens, head_dim / 2]."""
        return self.get_buffer("cos")[:tokens], self.get_buffer("sin")[:tokens]


class Head(nn.Module):
    """A multi-token head of a model (docs/speculation.md has its formulas), which begins as the model's last layer."""

    def __init__(self, model: Llama, dropout: float) -> None:
        super().__init__()
        width, eps = model.shape.width, model.shape.norm_eps
        self.block = Block(model.shape, dropout)
        self.nextn = nn.ModuleDict({name: nn.RMSNorm(width, eps=eps) for name in ("enorm", "hnorm")})
        self.nextn["shared_head_norm"] = nn.RMSNorm(width, eps=eps)
        self.nextn["eh_proj"] = nn.Linear(2 * width, width, bias=False)
        self.block.load_state_dict(model.blk[-1].state_dict())
        self.nextn["shared_head_norm"].load_state_dict(model.output_norm.state_dict())
        with torch.no_grad():
            self.nextn["eh_proj"].weight.copy_(torch.cat((torch.eye(width) / 2, torch.eye(width)), dim=1))

    def forward(self, embedded: Tensor, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Embeddings of the tokens and the states behind them, both [batch, tokens, width] -> states from which the
        output tells the token after the next, or the head the one after that."""
        before = F.pad(states, (0, 0, 1, 0))[:, :-1]  # of the position before; zeros before the first
        joint = torch.cat((self.nextn["enorm"](embedded), self.nextn["hnorm"](before)), dim=-1)
        return self.nextn["shared_head_norm"](self.block(self.nextn["eh_proj"](joint), cos, sin))

    def named(self, layer: int) -> dict[str, Tensor]:
        """Its weights by the names of GGUF, as that layer of the model."""
        return {f"blk.{layer}.{name.removeprefix('block.')}": weight for name, weight in self.state_dict().items()}


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on neighbouring pairs (2i, 2i + 1) of x [batch, heads, tokens, head_dim].

    GGUF's llama architecture rotates neighbours; training that way, q and k need no row permutation on export.
    """
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).type_as(x)


def train_tokenizer(text: str, vocab_size: int) -> tokenizers.Tokenizer:
    """Byte-level BPE with GPT-2's pre-tokenizer, what GGUF calls model "gpt2" with pre "gpt-2"."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the text yields only {tokenizer.get_vocab_size()} of {vocab_size} tokens; give a longer one")
    return tokenizer


def end_of_text(tokenizer: tokenizers.Tokenizer) -> int:
    """Id of the one special token, which is both bos and eos."""
    return tokenizer.get_vocab()[END_OF_TEXT]


def encode_with_dropout(tokenizer: tokenizers.Tokenizer, text: str, recipe: Recipe) -> Tensor:
    """Concatenate plain encodings and BPE-dropout ones (Provilkov et al. 2020), each after an end-of-text token."""
    start = end_of_text(tokenizer)
    plain = [start, *tokenizer.encode(text).ids]
    tokenizer.model.dropout = recipe.bpe_dropout
    varied = [[start, *encoding.ids] for encoding in tokenizer.encode_batch([text] * recipe.bpe_variants)]
    tokenizer.model.dropout = None
    return torch.cat([torch.tensor(ids) for variant in varied for ids in (plain, variant)])


@dataclass(frozen=True)
class Corpus:
    """A text, of which the last tenth is held out, and the tokenizer that the rest was given."""

    whole: str
    training: str
    heldout: str
    tokenizer: tokenizers.Tokenizer

    @property
    def heldout_tokens(self) -> Tensor:
        """Token ids behind one that ends a text."""
        return torch.tensor([end_of_text(self.tokenizer), *self.tokenizer.encode(self.heldout).ids])


def read_corpus(path: Path, vocab_size: int) -> Corpus:
    text = path.read_text(encoding="utf-8")
    cut = len(text) * 9 // 10
    return Corpus(text, text[:cut], text[cut:], train_tokenizer(text[:cut], vocab_size))


@torch.inference_mode()
def measure_heldout(model: nn.Module, tokens: Tensor, context: int, byte_count: int) -> HeldOut:
    """Score every token after the first, in float32, in windows of `context` that do not overlap."""
    nats, whole = 0.0, (len(tokens) - 1) // context * context
    inputs = [*tokens[:whole].view(-1, context).split(16), tokens[None, whole:-1]]
    targets = [*tokens[1 : whole + 1].view(-1, context).split(16), tokens[None, whole + 1 :]]
    for x, y in zip(inputs, targets, strict=True):
        if x.numel():
            nats += F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum").item()
    return HeldOut(math.exp(nats / (len(tokens) - 1)), nats / math.log(2) / byte_count)


def build_optimizer(model: nn.Module, recipe: Recipe, device: torch.device) -> torch.optim.Optimizer:
    """AdamW that decays matrices and leaves norms alone."""
    matrices = [weight for weight in model.parameters() if weight.dim() == 2]
    norms = [weight for weight in model.parameters() if weight.dim() == 1]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.99), fused=device.type == "cuda")


@torch.no_grad()
def update_average(average: nn.Module, model: nn.Module, weight: float) -> None:
    """Move every averaged parameter by the fraction `weight` towards the model's."""
    for mean, new in zip(average.parameters(), model.parameters(), strict=True):
        mean.lerp_(new, weight)


def train(
    model: Llama, data: Tensor, evaluate: Callable[[nn.Module], HeldOut], recipe: Recipe, steps: int, max_seconds: float
) -> tuple[dict[str, Tensor], int, int]:
    """Train on random crops of data; return the best averaged weights, their step, and the number of steps done."""
    device, context, began = data.device, model.shape.context, time.monotonic()
    optimizer = build_optimizer(model, recipe, device)
    average = copy.deepcopy(model).eval()
    best, best_step, best_weights = math.inf, 0, average.state_dict()
    step, horizon, printed = 0, steps, began
    while step < horizon:
        cosine = recipe.final_rate + (1 - recipe.final_rate) * (1 + math.cos(math.pi * step / horizon)) / 2
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * min(cosine, (step + 1) / recipe.warmup_steps)
        starts = torch.randint(len(data) - context, (recipe.batch, 1), device=device)
        crops = data[starts + torch.arange(context + 1, device=device)]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(crops[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), crops[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.gradient_clip)
        optimizer.step()
        step += 1
        update_average(average, model, max(1 - recipe.average_decay, 10 / (10 + step)))
        elapsed = time.monotonic() - began
        if step % recipe.evaluate_every == 0 or elapsed > max_seconds:
            # Too slow for all steps: bring the end forward, so that the rate still decays fully.
            horizon = min(steps, max(step, int(step * max_seconds / elapsed)))
        if step % recipe.evaluate_every == 0 or step == horizon:
            found = evaluate(average).perplexity_per_token
            if found < best:
                best, best_step = found, step
                best_weights = {name: weight.clone() for name, weight in average.state_dict().items()}
            print(f"step {step}/{horizon}  held-out perplexity {found:.3f}, best {best:.3f} at {best_step}", flush=True)
            if step - best_step >= recipe.patience * recipe.evaluate_every:
                break
        if step % recipe.evaluate_every == 0 or time.monotonic() - printed > 10:
            printed = time.monotonic()
            print(f"step {step}/{horizon}  train loss {loss.item():.3f}  {printed - began:.1f} s", flush=True)
    if math.isinf(best):
        raise ValueError("the training diverged: no evaluation was finite")
    return best_weights, best_step, step


def minimise(module: nn.Module, loss: Callable[[], Tensor], steps: int, rate: float, recipe: DraftRecipe) -> None:
    """Take so many steps; the rate falls to a twentieth along a cosine."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=recipe.weight_decay)
    module.train()
    for step in range(steps):
        cosine = 0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2
        for group in optimizer.param_groups:
            group["lr"] = rate * min(cosine, (step + 1) / recipe.warmup_steps)
        found = loss()
        optimizer.zero_grad(set_to_none=True)
        found.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 49 or step == steps - 1:
            print(f"step {step + 1}/{steps}  loss {found.item():.3f}", flush=True)
    module.eval()


def compare(logits: Tensor, right: Tensor) -> Tensor:
    """The mean divergence (Kullback-Leibler) of what is drafted from what the model says, in nats a token."""
    found, wanted = (x.log_softmax(-1).flatten(0, 1) for x in (logits, right))
    return F.kl_div(found, wanted, log_target=True, reduction="batchmean")


def train_head(model: Llama, crops: Tensor, states: Tensor, recipe: DraftRecipe) -> Head:
    """A head that drafts as the model tells. crops: token ids [crops, tokens]; states: the model's of them."""
    head = Head(model, recipe.dropout)

    def loss() -> Tensor:
        at = torch.randint(len(crops), (recipe.batch,))
        embedded, found, right = model.token_embd(crops[at]), states[at], model.output(states[at])
        total = torch.zeros(())
        for weight in recipe.chain:  # each pass drafts one token more, from its own states
            found = head(embedded, found, *model.angles(crops.shape[1]))
            total = total + weight * compare(model.output(found), right)
        return total

    minimise(head, loss, recipe.head_steps, recipe.head_rate, recipe)
    return head


def train_draft(model: Llama, crops: Tensor, states: Tensor, recipe: DraftRecipe) -> Llama:
    """A smaller model that tells as the model does; arguments as in `train_head`."""
    small = Llama(replace(model.shape, **DRAFT_SHAPE), recipe.dropout / 2)

    def loss() -> Tensor:
        at = torch.randint(len(crops), (recipe.batch,))
        return compare(small(crops[at]), model.output(states[at]))

    minimise(small, loss, recipe.draft_steps, recipe.draft_rate, recipe)
    return small


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; when the block succeeds, sync what it wrote and rename it to `path`."""
    temporary = path.with_name(path.name + ".part")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def pick_type(array: np.ndarray, quant: str) -> gguf.GGMLQuantizationType:
    """Matrices take the chosen type, norms stay F32."""
    return gguf.GGMLQuantizationType[quant if array.ndim == 2 else "F32"]


def write_gguf(
    path: Path,
    shape: Shape,
    tokenizer: tokenizers.Tokenizer,
    weights: dict[str, Tensor],
    quant: str,
    name: str = "pshard demo",
    heads: int = 0,
) -> None:
    """Write header, tokenizer and quantised tensors to `path`. heads: layers behind the model's that draft."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(name)
    writer.add_author("pshard contributors")
    writer.add_description("Small Shakespeare-like model for demonstrations, trained on public-domain text only.")
    writer.add_license_name("trained on public-domain text")
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{quant}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(shape.vocab_size)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers + heads)
    if heads:
        writer.add_nextn_predict_layers(heads)
    writer.add_feed_forward_length(shape.ffn_width)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    end, vocab = end_of_text(tokenizer), tokenizer.get_vocab()
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(vocab, key=vocab.__getitem__))
    writer.add_token_types([gguf.TokenType.CONTROL if i == end else gguf.TokenType.NORMAL for i in range(len(vocab))])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(end)
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)
    for tensor, weight in weights.items():
        array = weight.float().cpu().numpy()
        kind = pick_type(array, quant)
        writer.add_tensor(tensor, gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_weights(path: Path) -> dict[str, Tensor]:
    """Dequantise every tensor of a GGUF file to float32."""
    tensors = gguf.GGUFReader(path).tensors
    return {t.name: torch.from_numpy(np.array(gguf.dequantize(t.data, t.tensor_type))) for t in tensors}


def read_model(path: Path, corpus: Corpus, shape: Shape) -> Llama:
    """The model of a file that was trained on this text; raises ValueError for one with other tokens."""
    field, vocab = gguf.GGUFReader(path).fields["tokenizer.ggml.tokens"], corpus.tokenizer.get_vocab()
    if field.contents() != sorted(vocab, key=vocab.__getitem__):
        raise ValueError(f"{path} has other tokens than a model of this text; leave out --drafters-only")
    model = Llama(shape, dropout=0.0)
    model.load_state_dict(read_weights(path))
    return model


@torch.inference_mode()
def sample_text(model: Llama, tokenizer: tokenizers.Tokenizer, prompt: str, count: int, temperature: float) -> str:
    """Continue `prompt` by `count` tokens drawn at `temperature`."""
    device = model.token_embd.weight.device
    ids = torch.tensor([[end_of_text(tokenizer), *tokenizer.encode(prompt).ids]], device=device)
    for _ in range(count):
        logits = model(ids[:, -model.shape.context :])[:, -1]
        ids = torch.cat((ids, torch.multinomial((logits / temperature).softmax(-1), 1)), dim=1)
    return tokenizer.decode(ids[0].tolist())


def open_device(name: str) -> torch.device:
    """The named device, or for "auto" a CUDA GPU if there is one; raises ValueError when it cannot hold a tensor."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.zeros(1, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"cannot use --device {name}: {str(error).splitlines()[0]}") from error


def name_device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 text; its last tenth is held out")
    parser.add_argument("--out", type=Path, required=True, help="GGUF file to write")
    parser.add_argument("--report", type=Path, help="JSON report to write (default: OUT with suffix .json)")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--max-seconds", type=float, default=240.0, help="training ends by then with the best so far")
    parser.add_argument("--quant", choices=QUANT_TYPES, default="Q8_0", help="type of all matrices; norms stay F32")
    parser.add_argument("--device", default="auto", help='"auto", "cpu", "cuda", "cuda:1", ...')
    parser.add_argument("-s", "--seed", type=int, default=0)
    parser.add_argument("--drafters-only", action="store_true", help="keep the model that OUT has")
    return parser.parse_args(argv)


@torch.inference_mode()
def collect_states(model: Llama, crops: Tensor) -> Tensor:
    """The model's states of these crops, [crops, tokens, width]."""
    return torch.cat([model.states(part) for part in crops.split(16)])


def write_drafters(args: argparse.Namespace, model: Llama, corpus: Corpus) -> None:
    """Train on the CPU what drafts for the model, and write it beside OUT, with a report."""
    recipe, shape, began = DraftRecipe(), model.shape, time.monotonic()
    torch.manual_seed(args.seed)
    ids = torch.tensor(corpus.tokenizer.encode(corpus.training).ids)
    crops = ids[torch.randint(len(ids) - recipe.crop, (recipe.crops, 1)) + torch.arange(recipe.crop)]
    states = collect_states(model, crops).clone()
    print(f"{crops.numel()} tokens to draft from after {time.monotonic() - began:.1f} s", flush=True)
    head, small = train_head(model, crops, states, recipe), train_draft(model, crops, states, recipe)
    seconds = time.monotonic() - began
    of_head, of_small = args.out.with_name(f"mtp-{args.out.name}"), args.out.with_name(f"{args.out.stem}-draft.gguf")
    with replacing(of_head) as temporary:
        named = head.named(shape.layers)
        write_gguf(temporary, shape, corpus.tokenizer, named, args.quant, "pshard demo head", heads=1)
    with replacing(of_small) as temporary:
        write_gguf(temporary, small.shape, corpus.tokenizer, small.state_dict(), args.quant, "pshard demo draft")
    report = {
        "model": {"file": args.out.name, **describe_file(args.out)},
        "head": {"file": of_head.name, **describe_file(of_head), "parameters": count_parameters(head)},
        "draft_model": {"file": of_small.name, **describe_file(of_small), "parameters": count_parameters(small)},
        "draft_shape": asdict(small.shape),
        "quant_type": args.quant,
        "heldout_first_drafts": measure_first_drafts(model, head, small, corpus.heldout_tokens, recipe.crop),
        "heldout_protocol": f"share of held-out tokens behind which the drafter's likeliest token is the model's, "
        f"{MEASURED} windows of {recipe.crop} tokens, float32",
        "recipe": asdict(recipe),
        "seconds": round(seconds, 1),
        **describe_run(args, corpus),
    }
    write_report(args.out.with_name(f"{args.out.stem}-drafters.json"), report)
    print(f"first drafts as the model tells, of held-out text: {report['heldout_first_drafts']}")
    print(f"wrote {of_head} and {of_small} after {seconds:.1f} s")


@torch.inference_mode()
def measure_first_drafts(model: Llama, head: Head, small: Llama, tokens: Tensor, crop: int) -> dict[str, float]:
    """By drafter: behind which share of these tokens its likeliest one is the model's."""
    crops = tokens[: MEASURED * crop].view(-1, crop)
    states = collect_states(model, crops)
    right = model.output(states).argmax(-1)
    drafted = model.output(head(model.token_embd(crops), states, *model.angles(crop)))
    found = {"head": drafted, "draft_model": small(crops)}
    return {name: round((logits.argmax(-1) == right).float().mean().item(), 4) for name, logits in found.items()}


def count_parameters(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def describe_file(path: Path) -> dict[str, object]:
    return {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def describe_run(args: argparse.Namespace, corpus: Corpus) -> dict[str, object]:
    """What a report says of the seed, the text, the programs and the command."""
    return {
        "seed": args.seed,
        "text": {"name": args.text.name, "sha256": hashlib.sha256(corpus.whole.encode()).hexdigest()},
        "torch": torch.__version__,
        "tokenizers": tokenizers.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": re.sub(r"[^\s='\"]*/", "", shlex.join(sys.argv)),  # folders mean nothing to another reader
    }


def write_report(path: Path, report: dict[str, object]) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def write_model(args: argparse.Namespace, corpus: Corpus, shape: Shape) -> Llama:
    """Train the model and write it to OUT, with a report; returns it with the weights that the file has."""
    recipe, began, device = Recipe(), time.monotonic(), open_device(args.device)
    report_path: Path = args.report or args.out.with_suffix(".json")
    report_path.parent.mkdir(parents=True, exist_ok=True)
    data = encode_with_dropout(corpus.tokenizer, corpus.training, recipe).to(device)
    heldout_tokens, heldout_bytes = corpus.heldout_tokens.to(device), len(corpus.heldout.encode())
    print(f"{len(data)} training tokens (all encodings), {len(heldout_tokens) - 1} held out", flush=True)

    def evaluate(model: nn.Module) -> HeldOut:
        return measure_heldout(model, heldout_tokens, shape.context, heldout_bytes)

    model = Llama(shape, recipe.dropout).to(device)
    parameters = count_parameters(model)
    print(f"{parameters} parameters on {name_device(device)}", flush=True)
    weights, best_step, steps_done = train(model, data, evaluate, recipe, args.steps, args.max_seconds)
    seconds = time.monotonic() - began
    model.eval().load_state_dict(weights)
    float_result = evaluate(model)
    with replacing(args.out) as temporary:
        write_gguf(temporary, shape, corpus.tokenizer, weights, args.quant)
    model.load_state_dict(read_weights(args.out))
    file_result = evaluate(model)
    sample = sample_text(model, corpus.tokenizer, "ROMEO:\n", count=200, temperature=0.8)
    report = {
        "model": args.out.name,
        **describe_file(args.out),
        "parameters": parameters,
        "shape": asdict(shape),
        "quant_type": args.quant,
        "heldout_float32": asdict(float_result),
        "heldout_quantised": asdict(file_result),
        "heldout_bytes": heldout_bytes,
        "heldout_tokens": len(heldout_tokens) - 1,
        "heldout_protocol": f"last tenth of the text after one {END_OF_TEXT}, windows of {shape.context} tokens, no "
        "overlap, every token scored, float32; the best step was chosen on the same held-out text",
        "recipe": asdict(recipe),
        "best_step": best_step,
        "steps_done": steps_done,
        "steps": args.steps,
        "seconds": round(seconds, 1),
        "device": name_device(device),
        **describe_run(args, corpus),
        "sample": sample,
    }
    write_report(report_path, report)
    print(sample)
    print(f"held-out perplexity per token: float32 {float_result.perplexity_per_token:.4f}, ", end="")
    print(f"{args.quant} {file_result.perplexity_per_token:.4f} ({file_result.bits_per_byte:.4f} bits per byte)")
    print(f"wrote {args.out} ({report['bytes']} bytes) and {report_path} after {seconds:.1f} s")
    return model


def train_and_write(args: argparse.Namespace) -> None:
    """Do what the command line asks for; raises ValueError or OSError with a sentence for the user."""
    if args.steps < 1:
        raise ValueError(f"--steps is {args.steps}; give at least 1")
    shape = Shape()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    corpus = read_corpus(args.text, shape.vocab_size)
    model = read_model(args.out, corpus, shape) if args.drafters_only else write_model(args, corpus, shape)
    write_drafters(args, model.cpu().eval().requires_grad_(False), corpus)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    try:
        train_and_write(args)
    except (ValueError, OSError) as error:
        print(f"train_demo_model: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("train_demo_model: interrupted, nothing written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
