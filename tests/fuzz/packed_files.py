"""Packed files of a model that lives on disk: one that was changed anywhere is not used, or gives the right logits, or
ends the step with a line."""

import random
import zlib
from dataclasses import replace
from pathlib import Path

import torch
from engines import open_engine
from fuzz.mutate_bytes import Mutant, mutate_bytes
from fuzz.mutate_json import mutate_json
from fuzz.targets import IDS, REFUSED, RIGHT, Target, WrongOutcome
from model_files import write_gguf
from plan_samples import make_tier, make_variant, with_workload

from pshard.errors import StepFailed
from pshard.models import ModelFile, open_model
from pshard.packed_file import HEAD, find_packed
from pshard.plan import TierPlan
from pshard.runtime.build_engine import build_engine
from pshard.runtime.devices.device import open_device
from pshard.session.packed_models import pack_model
from pshard.units.unit import places_of


def fuzz_packed_files(name: str, folder: Path) -> Target:
    """Its bytes, and what it says of its contents with a checksum that matches."""
    model = write_gguf(folder / "m.gguf", "qwen3moe", n_layers=1, qtype="Q8_0")
    with open_model(model) as file:
        place = pack_model(file, folder, lambda _: None)
        tiers = _on_disk(file)
    data = place.read_bytes()
    magic, at, length, *_ = HEAD.unpack_from(data)
    text, checks = data[at : at + length].decode(), data[at + length :]
    with open_engine(model, tokens=(1, 16), context=16) as engine:
        right = engine.forward(IDS, all_logits=True)

    def mutate(rng: random.Random) -> Mutant:
        how = rng.random()
        if how < 0.4:
            return mutate_bytes(rng, data, len(data))
        if how < 0.7:
            return mutate_bytes(rng, data, HEAD.size)
        said = mutate_json(rng, text)
        end = said.data + checks
        head = HEAD.pack(magic, at, len(said.data), len(end), zlib.crc32(end))
        return replace(said, data=head + data[HEAD.size : at] + end)

    def judge(mutant: Mutant) -> str:
        place.write_bytes(mutant.data)
        with open_model(model) as file:
            file.packed, why = find_packed(file, folder)
            if file.packed is None:
                assert why and "\n" not in why
                return REFUSED
            variant = with_workload(make_variant(file.spec, tiers, 16, 1), type_k="f32", type_v="f32")
            try:
                with build_engine(file, variant, open_device("cpu"), kernels="plain") as engine:
                    found = engine.forward(IDS, all_logits=True)
            except StepFailed as error:
                assert "not those that were packed" in str(error)
                return REFUSED
        if not torch.equal(found, right):
            raise WrongOutcome("logits of a packed file that was changed")
        return RIGHT

    return Target(name, folder, mutate, judge)


def _on_disk(file: ModelFile) -> tuple[TierPlan, ...]:
    """All that may live on disk there."""
    places = {}
    for unit in file.spec.units:
        far = [place for place in places_of(unit.kind, False) if place[0] == "disk"]
        places[unit.name] = far[-1] if far else ("pinned", "vram" if unit.kind.state else None)
    return tuple(make_tier(file.spec, n, places, 2, 16, 1, batch=16) for n in (1, 16))
