"""What the Hub's cache on this machine holds. The network is not asked."""

from pathlib import Path

from pshard.errors import UserError
from pshard.hub.reference import HubReference
from pshard.hub.repository import HubFile, HubModel, pick_model, sort_files


def find_cached(reference: HubReference) -> Path | None:
    """The path of a model that lies whole in the cache; None when it does not.

    Without a quantisation a model that was fetched before is taken, not one that the Hub would offer.
    """
    folder = snapshot_folder(reference.repo)
    if folder is None:
        return None
    models = sort_files(_list_files(folder))
    try:
        model = pick_model(reference.repo, models, reference.wanted)
    except UserError:
        return None
    return open_at(folder, model) if _is_complete(folder, model) else None


def snapshot_folder(repo: str) -> Path | None:
    """Where the cache has the files of a repository's main branch, as it was last fetched."""
    from huggingface_hub import constants

    root = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    try:
        folder = root / "snapshots" / (root / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return folder if folder.is_dir() else None


def open_at(folder: Path, model: HubModel) -> Path:
    """The path that a fetched model is opened by."""
    return folder if model.is_folder else folder / model.files[0].name


def _list_files(folder: Path) -> list[HubFile]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return [HubFile(path.relative_to(folder).as_posix(), path.stat().st_size) for path in paths]


def _is_complete(folder: Path, model: HubModel) -> bool:
    """Whether every shard of a folder is there; parts of GGUF files are counted by their names."""
    if not model.is_folder:
        return True
    from pshard.models.safetensors_header import list_shards

    try:
        return all(path.exists() for path in list_shards(folder))
    except UserError:
        return False
