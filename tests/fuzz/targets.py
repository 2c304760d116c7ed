"""What is fuzzed, and what must come of it: the numbers of the file that was not changed, or a UserError.

Some changes cannot be told from a right file, as another right file has just that value; those count as "untold":
- RoPE base, scaling and norm epsilon (and a key of them that is gone: then its default holds): every model has its own.
- By what embeddings, scores, logits, queries and values are multiplied, how long windows are, and how layers with them
  rotate.
- At what scores, logits, gates, queries, keys and values are capped, if at all.
- That a model has no windows, where some of its architecture have none and no list says which layers have one.
- How a router weighs the experts that it chose, and how many it chooses: no tensor has a size by these.
- A tensor's type, changed to one of the same size (F16 and BF16, Q4_0 and Q4_K): no byte of the file says more.
- Whether the head is the embedding, in a folder that has both: config.json decides, as for transformers.
- A routing record's layers, experts of a layer, micro-batches and fingerprint, changed to others that are possible.
- The tokens of a KV file or of a block of a prefix, changed to others of as many cells.
- A plan's placements and times, a profile's figures and the limit of page-locking, changed to others that are possible.
  A changed plan must still give the right numbers.
Bits of weights, and texts of a vocabulary, are not looked at at all.
"""

import json
import random
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from cli_world import World
from engines import open_engine
from fuzz.bases import cached_world, plan_world, write_family_bases, write_folder, write_gguf_bases, write_hybrid_bases
from fuzz.mutate_bytes import Mutant, mutate_bytes
from fuzz.mutate_gguf import GgufFields, mutate_gguf
from fuzz.mutate_json import mutate_json
from routing_samples import make_record

from pshard.errors import UserError, as_line
from pshard.model_config import ModelConfig
from pshard.models import ModelFile, open_model
from pshard.models.text.chat import render_chat
from pshard.planner.make_plan import plan_variant
from pshard.registries.profile_store import load_profile, note_page_locks, recall_lockable
from pshard.registries.routing_file import read_routing, write_routing
from pshard.routing.measure_popularity import measure_popularity
from pshard.session.open_plan import Opened, check_plan, open_plan
from pshard.session.run_request import RunRequest
from pshard.session.start_engine import start_engine
from pshard.units.moe.popularity import check_popularity
from pshard.workload import Workload

IDS = [5, 77, 200, 3]
UNTOLD_NUMBERS = ("rope", "window_rope", "norm_eps", "context", "score_scale", "embedding_scale", "logit_scale",
                  "value_scale", "temperature", "sliding_window", "clamp", "score_cap", "logit_cap",
                  "ffn_limits")  # fmt: skip
UNTOLD_WITHOUT_WINDOWS = ("full_every", "still_every")  # see Architecture.of_windows
UNTOLD_OF_EXPERTS = ("used", "scores", "normed", "scale", "groups", "groups_used", "limits")
RIGHT, REFUSED, UNTOLD = "right", "refused", "cannot be told"


class WrongOutcome(AssertionError):
    """A mutant gave wrong numbers, or an error that is no line for a user."""


@dataclass(frozen=True)
class Target:
    """A kind of file: `mutate` changes one, `judge` opens it and says RIGHT, REFUSED or UNTOLD, or raises."""

    name: str
    folder: Path
    mutate: Callable[[random.Random], Mutant]
    judge: Callable[[Mutant], str]


def make_targets(folder: Path) -> dict[str, Callable[[], Target]]:
    """Makers of all targets, by name; each keeps its files in a folder of its own."""
    from fuzz.kept_texts import fuzz_blocks, fuzz_kv_files
    from fuzz.packed_files import fuzz_packed_files

    makers = {
        "gguf": partial(fuzz_gguf, write_gguf_bases),
        "families": partial(fuzz_gguf, write_family_bases),
        "hybrids": partial(fuzz_gguf, write_hybrid_bases),
        "safetensors": fuzz_safetensors,
        "folder": fuzz_folder_json,
        "experts": partial(fuzz_safetensors, routed=True),
        "experts-folder": partial(fuzz_folder_json, routed=True),
        "registry": partial(fuzz_registry, plan_world),
        "caches": partial(fuzz_registry, cached_world),
        "profile": fuzz_profile,
        "page-locks": fuzz_page_locks,
        "routing": fuzz_routing,
        "kv-files": fuzz_kv_files,
        "blocks": fuzz_blocks,
        "packed-files": fuzz_packed_files,
    }

    def bind(name: str, make: Callable[[str, Path], Target]) -> Callable[[], Target]:
        def made() -> Target:
            (folder / name).mkdir(parents=True)
            return make(name, folder / name)

        return made

    return {name: bind(name, make) for name, make in makers.items()}


def fuzz_gguf(write: Callable[[Path], list[Path]], name: str, folder: Path) -> Target:
    """Headers of GGUF files."""
    bases = write(folder)
    contents = [path.read_bytes() for path in bases]
    headers = [GgufFields(data) for data in contents]
    right = [read_contents(path) for path in bases]
    path = folder / "mutant.gguf"

    def mutate(rng: random.Random) -> Mutant:
        which = rng.randrange(len(bases))
        mutant = mutate_gguf(rng, contents[which], headers[which])
        return replace(mutant, what=f"{bases[which].name}: {mutant.what}")

    def judge(mutant: Mutant) -> str:
        path.write_bytes(mutant.data)
        return judge_model(path, right[[base.name for base in bases].index(mutant.what.split(":")[0])])

    return Target(name, folder, mutate, judge)


def fuzz_safetensors(name: str, folder: Path, routed: bool = False) -> Target:
    """Headers of a safetensors file: its JSON, its length, its bytes."""
    base = write_folder(folder / "model", 1, routed)
    path = base / "model.safetensors"
    data, right = path.read_bytes(), read_contents(base)
    end = 8 + int.from_bytes(data[:8], "little")
    text, weights = data[8:end].decode(), data[end:]

    def mutate(rng: random.Random) -> Mutant:
        if rng.random() < 0.4:
            return mutate_bytes(rng, data, end)
        header = mutate_json(rng, text)
        return replace(header, data=struct.pack("<Q", len(header.data)) + header.data + weights)

    def judge(mutant: Mutant) -> str:
        path.write_bytes(mutant.data)
        return judge_model(base, right)

    return Target(name, folder, mutate, judge)


def fuzz_folder_json(name: str, folder: Path, routed: bool = False) -> Target:
    """The JSON files beside the weights of a Hugging Face folder."""
    base = write_folder(folder / "model", 2, routed)
    names = ("config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json",
             "generation_config.json")  # fmt: skip
    texts, right = {n: (base / n).read_text() for n in names}, read_contents(base)

    def mutate(rng: random.Random) -> Mutant:
        which = rng.choice((names[0], *names))
        mutant = mutate_json(rng, texts[which])
        return replace(mutant, what=f"{which}: {mutant.what}")

    def judge(mutant: Mutant) -> str:
        which = mutant.what.split(":")[0]
        (base / which).write_bytes(mutant.data)
        try:
            return judge_model(base, right)
        finally:
            (base / which).write_text(texts[which])

    return Target(name, folder, mutate, judge)


def fuzz_registry(make: Callable[[Path], tuple[World, RunRequest]], name: str, folder: Path) -> Target:
    """A registry that a run is to take a plan from."""
    world, request = make(folder)
    text = world.registry.read_text()
    right = run_plan(open_plan(request))

    def judge(mutant: Mutant) -> str:
        world.registry.write_bytes(mutant.data)
        try:
            opened = open_plan(request)
            logits = run_plan(opened)
        except UserError as error:
            return check_line(error)
        if not torch.allclose(logits, right, rtol=1e-4, atol=1e-4):
            raise WrongOutcome(f"logits differ by {(logits - right).abs().max():.3g}")
        return RIGHT if json.loads(mutant.data) == json.loads(text) else UNTOLD

    return Target(name, folder, lambda rng: mutate_json(rng, text), judge)


def fuzz_profile(name: str, folder: Path) -> Target:
    """A profile: a run under a plan that was made by the right one refuses it; what plans by it makes a sound plan."""
    world, request = plan_world(folder)
    text, right = world.profile.read_text(), open_plan(request).variant
    workload = Workload((1,), 64, prompt=16, generated=8)

    def judge(mutant: Mutant) -> str:
        world.profile.write_bytes(mutant.data)
        try:
            profile = load_profile(world.profile)
        except UserError as error:
            return check_line(error)
        try:
            if open_plan(request).variant == right:
                return RIGHT
            raise WrongOutcome("another plan was taken")
        except UserError as error:
            check_line(error)
        with open_model(world.model) as file:
            try:
                check_plan(file.spec, plan_variant(file.spec, profile, workload, 1.0), profile)
            except UserError as error:
                return check_line(error)
        return UNTOLD

    return Target(name, folder, lambda rng: mutate_json(rng, text), judge)


def fuzz_page_locks(name: str, folder: Path) -> Target:
    """What runs remember of page-locking: what cannot be read is not known."""
    path = folder / "cache" / "page-locks.json"
    note_page_locks(123 << 20, refused=True)
    text, right = path.read_text(), recall_lockable()
    assert right == 123 << 20

    def judge(mutant: Mutant) -> str:
        path.write_bytes(mutant.data)
        found = recall_lockable()
        if found is not None and (type(found) is not int or found < 0):
            raise WrongOutcome(f"{found!r} bytes can be page-locked")
        assert note_page_locks(124 << 20, refused=True) == (found != 124 << 20)  # and the next run writes it anew
        return RIGHT if found in (None, right) else UNTOLD

    return Target(name, folder, lambda rng: mutate_json(rng, text), judge)


def fuzz_routing(name: str, folder: Path) -> Target:
    """A routing record: its bytes, and its header with checksums that match."""
    path, right = folder / "mutant.routing", make_record(40)
    write_routing(path, right)
    data = path.read_bytes()
    magic, version, length, _, of_ids = struct.unpack_from("<8sIIII", data)
    text, ids = data[24 : 24 + length].decode(), data[24 + length :]

    def mutate(rng: random.Random) -> Mutant:
        if rng.random() < 0.5:
            return mutate_bytes(rng, data, len(data))
        header = mutate_json(rng, text)
        fixed = struct.pack("<8sIIII", magic, version, len(header.data), zlib.crc32(header.data), of_ids)
        return replace(header, data=fixed + header.data + ids)

    def judge(mutant: Mutant) -> str:
        path.write_bytes(mutant.data)
        try:
            found = read_routing(path)
        except UserError as error:
            return check_line(error)
        if sum(found.batches) != len(found.ids) or found.ids.max() >= found.experts:
            raise WrongOutcome(f"a record of {found.experts} experts and {found.batches} tokens has {found.ids}")
        check_popularity(measure_popularity(found), "it")
        same = (found.fingerprint, found.layers, found.experts) == (right.fingerprint, right.layers, right.experts)
        return RIGHT if same and np.array_equal(found.ids, right.ids) else UNTOLD

    return Target(name, folder, mutate, judge)


@dataclass(frozen=True)
class Contents:
    """What a model computes from, and what comes of it."""

    config: ModelConfig
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]]  # type, shape, bytes
    logits: torch.Tensor


def read_contents(path: Path) -> Contents:
    """Open a model, with all that commands want of it. Raises UserError."""
    with open_model(path) as file:
        _use_texts(file)
        named = {t.name: t for unit in file.spec.units for t in unit.tensors}
        tensors = {n: (t.qtype, t.shape, file.tensor_bytes(n).tobytes()) for n, t in named.items()}
        config = file.spec.config
    with open_engine(path, tokens=(1, 16), context=16) as engine:
        return Contents(config, tensors, engine.forward(IDS, all_logits=True))


def _use_texts(file: ModelFile) -> None:
    tokenizer, template = file.tokenizer(), file.chat_template
    ids = tokenizer.encode("Hello, w\u00f6rld 12")
    tokenizer.decode(ids)
    if template is not None:
        render_chat(template, [{"role": "user", "content": "hi"}], tokenizer.bos_text, tokenizer.eos_text)


def judge_model(path: Path, right: Contents) -> str:
    """Whether a model's numbers are the right ones."""
    try:
        found = read_contents(path)
    except UserError as error:
        return check_line(error)
    if torch.equal(found.logits, right.logits):
        return RIGHT
    if not found.logits.isfinite().all():
        raise WrongOutcome(f"logits that are no numbers; configuration {found.config}")
    bare = not (found.config.sliding_window or found.config.full_every)
    untold = (*UNTOLD_NUMBERS, *(UNTOLD_WITHOUT_WINDOWS if bare else ()))
    told = replace(found.config, **{name: getattr(right.config, name) for name in untold})
    if told.experts and right.config.experts:
        same = {name: getattr(right.config.experts, name) for name in UNTOLD_OF_EXPERTS}
        told = replace(told, experts=replace(told.experts, **same))
    moved = [n for n, (_, shape, data) in found.tensors.items() if (shape, data) != right.tensors.get(n, ())[1:]]
    if told != right.config or moved:
        raise WrongOutcome(f"logits differ; configuration {told}, tensors {moved}")
    return UNTOLD


def check_line(error: UserError) -> str:
    """An error for a user says what to do, or what is wrong, in words."""
    line = as_line(error)
    line.encode()  # a terminal cannot print what is no Unicode
    if not line or "Traceback" in line:
        raise WrongOutcome(f"no line for a user: {line}")
    return REFUSED


def run_plan(opened: Opened) -> torch.Tensor:
    """The logits that a plan gives."""
    with opened.file, start_engine(opened, opened.variant, "plain") as engine:
        return engine.forward(IDS, all_logits=True)
