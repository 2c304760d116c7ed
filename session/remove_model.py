"""Deleting models of the Hub's cache."""

import shutil
from pathlib import Path

from pshard.errors import UserError
from pshard.packed_file import packed_folder
from pshard.registries.store import registry_path
from pshard.session.list_models import FoundModel, hub_cache, list_models, list_parts
from pshard.session.packed_models import remove_packed


def find_removable(name: str) -> FoundModel:
    """The model of the Hub's cache with that name, or the only one whose name begins so or names that quantisation
    (`org/repo`, `org/repo:Q4_K_M`). Raises UserError for none, for several, and for a file that lies elsewhere."""
    if Path(name).expanduser().exists():
        raise UserError(f"{name} is no model of the Hub's cache, and is left alone; delete the file yourself")
    cache = hub_cache().absolute()
    there = [model for model in list_models([]) if model.path.absolute().is_relative_to(cache)]
    repo, _, wanted = name.partition(":")
    found = [model for model in there if model.name == name] or [
        model
        for model in there
        if model.name.partition(":")[0] == repo and wanted.lower() in model.name.partition(":")[2].lower()
    ]
    if not found:
        raise UserError(f"the Hub's cache has no model {name}; name one that pshard models lists")
    if len(found) > 1:
        names = ", ".join(model.name for model in found)
        raise UserError(f"{name} may be {names}; name one")
    return found[0]


def remove_model(model: FoundModel) -> int:
    """Delete a model's files, the bytes that no other one shares, its plans and its packed file; returns the bytes that
    were freed."""
    freed = remove_packed(model.path, packed_folder())
    repository = next(folder for folder in model.path.parents if folder.name.startswith("models--"))
    files = _files_of(model.path)
    registry_path(model.path).unlink(missing_ok=True)
    blobs = {file.resolve() for file in files}
    for file in files:
        file.unlink()
    kept = {link.resolve() for link in repository.glob("snapshots/**/*") if link.is_file()}
    for blob in blobs - kept:
        if blob.exists():
            freed += blob.stat().st_size
            blob.unlink()
    if not any(_is_model(file) for file in repository.glob("snapshots/**/*")):
        shutil.rmtree(repository)
    return freed


def _files_of(path: Path) -> list[Path]:
    """All parts of a GGUF file, or what a folder has."""
    return [file for file in path.iterdir() if file.is_file()] if path.is_dir() else list_parts(path)


def _is_model(path: Path) -> bool:
    return path.suffix in (".gguf", ".safetensors")
