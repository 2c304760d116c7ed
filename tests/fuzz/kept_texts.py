"""Targets: what runs and servers keep of texts, KV files and blocks of prefixes. Checksums are set right, so that
what they protect is damaged too."""

import random
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from draft_engines import open_with
from engines import open_engine
from fuzz.bases import TINY, write_hybrid_bases
from fuzz.mutate_bytes import Mutant, mutate_bytes
from fuzz.mutate_json import mutate_json
from fuzz.targets import REFUSED, RIGHT, UNTOLD, Target, WrongOutcome, check_line
from model_files import write_gguf

from pshard.errors import UserError
from pshard.runtime.texts.block_record import PARTS, BlockRecord, encode_record
from pshard.runtime.texts.prefix_files import PrefixFiles

IDS = [5, 77, 200, 3]


FIXED = 20  # bytes before the header


def _mutate_header(data: bytes) -> Callable[[random.Random], Mutant]:
    """Changes of a KV file, which has the length of its JSON header at byte 12 and its CRC at 16."""
    end = FIXED + struct.unpack_from("<I", data, 12)[0]

    def mutate(rng: random.Random) -> Mutant:
        if rng.random() < 0.3:
            return mutate_bytes(rng, data, len(data))
        header = mutate_json(rng, data[FIXED:end].decode())
        told = struct.pack("<II", len(header.data), zlib.crc32(header.data))
        return replace(header, data=data[:12] + told + header.data + data[end:])

    return mutate


def fuzz_kv_files(name: str, folder: Path) -> Target:
    """KV files of a model with cells only, of one with states that do not grow too, and of one with a draft model."""
    plain, drafted = (write_gguf(folder / f"{name}.gguf", **TINY) for name in "ab")
    models = [plain, write_hybrid_bases(folder)[0], drafted]
    engines = [open_engine(model, tokens=(1, 16), context=16) for model in models[:2]]
    engines.append(open_with(drafted, drafted, context=64))
    path, files, right = folder / "mutant", list[bytes](), list[torch.Tensor]()
    for engine in engines:
        engine.forward(IDS)
        engine.save(path)
        files.append(path.read_bytes())
        right.append(engine.forward([7]))
    mutations = [_mutate_header(data) for data in files]

    def mutate(rng: random.Random) -> Mutant:
        which = rng.randrange(len(files))
        mutant = mutations[which](rng)
        return replace(mutant, what=f"{models[which].name}: {mutant.what}")

    def judge(mutant: Mutant) -> str:
        which = [model.name for model in models].index(mutant.what.split(":")[0])
        engine = engines[which]
        path.write_bytes(mutant.data)
        engine.reset()
        try:
            ids = engine.load(path)
            found = engine.forward([7])
        except UserError as error:
            return check_line(error)
        if list(ids) != IDS:  # nobody can tell of which tokens cells are
            return UNTOLD
        if not torch.equal(found, right[which]):
            raise WrongOutcome("the text goes on otherwise")
        return RIGHT

    return Target(name, folder, mutate, judge)


def fuzz_blocks(name: str, folder: Path) -> Target:
    """Blocks of prefixes: one that is damaged is not there, and is removed."""
    key, parts = bytes(range(32)), {part: part.encode() * 9 for part in PARTS}
    right = BlockRecord(key, bytes(32), tuple(range(64)), parts)
    files = PrefixFiles(folder / "blocks", 1 << 20, 1 << 20)
    path = folder / "blocks" / f"{key.hex()}.block"

    def judge(mutant: Mutant) -> str:
        path.write_bytes(mutant.data)
        names, found = files.names(key), files.get(key)
        if found is None:
            assert not path.exists()
            return REFUSED
        if names != found.parts.keys() or not names <= set(PARTS):
            raise WrongOutcome(f"{names} are in the file, {found.parts.keys()} were read")
        if found == right:
            return RIGHT
        if found.key != key or b"".join(found.parts.values()) != b"".join(parts.values()):
            raise WrongOutcome(f"{found} was read")
        encode_record(found)
        return UNTOLD  # other ids, which whoever asks compares, or other names

    return Target(name, folder, _mutate_header(encode_record(right)), judge)
