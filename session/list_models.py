"""Models that there are: those that were planned or run, those in folders, and those in the Hub's cache."""

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from pshard.errors import UserError
from pshard.predicted_times import decode_rate, first_token_seconds
from pshard.registries.known_models import list_known
from pshard.registries.store import load_registry, registry_path
from pshard.session.packed_models import list_kept

LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")


@dataclass(frozen=True)
class PlannedRate:
    """What a plan is predicted to reach, in tokens per second: of a prompt, and of an answer. `measured`: it was run
    before it was written."""

    vram_mib: tuple[int, ...]
    context: int
    prompt: float
    decode: float
    measured: bool


@dataclass(frozen=True)
class FoundModel:
    """A model on disk, or a packed file of one. `name` is what a command takes; `problem`: why its plans cannot be
    read, or why it cannot be used."""

    name: str
    path: Path
    nbytes: int
    plans: tuple[PlannedRate, ...] = ()
    problem: str = ""
    packed_of: str = ""


def list_models(folders: Iterable[Path]) -> list[FoundModel]:
    """Every model once: in the folders, remembered, in the Hub's cache. Reads no model."""
    found: dict[Path, str] = {}
    for folder in folders:
        found |= {path: str(path) for path in _models_in(folder)}
    for path in list_known():
        if path.exists() and path not in {p.absolute() for p in found}:
            found[path] = str(path)
    for path, name in _models_of_hub():
        found.pop(path.absolute(), None)
        found[path] = name
    return [_describe(path, name) for path, name in found.items()]


def find_damage(model: FoundModel) -> FoundModel:
    """The model with what is wrong with its files. Reads the header of a GGUF file that has no plans: where there are
    some it was whole."""
    if model.plans or model.problem or model.path.is_dir():
        return model
    from pshard.models.gguf_header import read_gguf

    try:
        for file in read_gguf(model.path).files:
            file.close()
    except UserError as error:
        return replace(model, problem=str(error).removeprefix(f"{model.path}: "))
    return model


def list_packed_as_found(folder: Path) -> list[FoundModel]:
    """The packed files of a folder."""
    return [
        FoundModel(str(kept.path), kept.path, kept.nbytes, problem=kept.problem, packed_of=kept.model)
        for kept in list_kept(folder)
    ]


def hub_cache() -> Path:
    """Where huggingface_hub keeps repositories: HF_HUB_CACHE, or `hub` in HF_HOME, or in the user's cache folder."""
    if given := os.environ.get("HF_HUB_CACHE"):
        return Path(given).expanduser()
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home).expanduser() / "hub"


def _models_of_hub() -> Iterator[tuple[Path, str]]:
    """Models in the Hub's cache, with the names of their repositories; of several snapshots the latest."""
    for repository in sorted(hub_cache().glob("models--*")):
        snapshots = sorted((repository / "snapshots").glob("*"), key=lambda p: p.stat().st_mtime)
        name = repository.name.removeprefix("models--").replace("--", "/", 1)
        for folder in (snapshots[-1], *filter(Path.is_dir, sorted(snapshots[-1].iterdir()))) if snapshots else ():
            for path in _models_in(folder):
                yield path, name if path.is_dir() else f"{name}:{path.relative_to(snapshots[-1])}"


def _models_in(folder: Path) -> Iterator[Path]:
    """GGUF files of a folder, of parts the first, and the folder itself where it is a model."""
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        yield folder
    for path in sorted(folder.glob("*.gguf")):
        if path.is_file() and not LATER_PART.search(path.name):
            yield path


def _describe(path: Path, name: str) -> FoundModel:
    nbytes, place = _size(path), registry_path(path)
    if not place.is_file():
        return FoundModel(name, path, nbytes)
    try:
        sets = load_registry(place).sets
    except UserError as error:
        return FoundModel(name, path, nbytes, problem=str(error))
    rates = [
        PlannedRate(
            v.workload.vram_mib, v.workload.context, v.workload.prompt_tokens / first_token_seconds(v),
            decode_rate(v), v.validated,
        )
        for v in (sets[0].variants if sets else ())
    ]  # fmt: skip
    return FoundModel(name, path, nbytes, tuple(sorted(rates, key=lambda rate: (rate.vram_mib, rate.context))))


def _size(path: Path) -> int:
    if path.is_dir():
        return sum(part.stat().st_size for part in path.glob("*.safetensors"))
    return sum(part.stat().st_size for part in list_parts(path))


def list_parts(path: Path) -> list[Path]:
    """All parts of a GGUF file by the path of the first, or the only, one."""
    parts = re.sub(r"-00001(-of-\d{5}\.gguf)$", r"-*\1", path.name)
    return sorted(path.parent.glob(parts)) if parts != path.name else [path]
