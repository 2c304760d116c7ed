"""Fetches a model of the Hub into the Hub's own cache: what was fetched once is never fetched again, by any program."""

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pshard.errors import UserError
from pshard.file_lock import wait_for_lock
from pshard.hub.cached import find_cached, open_at
from pshard.hub.read_range import read_steadily
from pshard.hub.reference import HubReference, parse_reference
from pshard.hub.repository import HubFile, HubModel, list_repository, pick_model
from pshard.hub.tell_errors import tell_errors

if TYPE_CHECKING:
    from rich.progress import Progress

SPARE = 1 << 30  # bytes left free beside a download, for whatever else writes to the disk


def fetch_model(reference: str | HubReference) -> Path:
    """The path of a model of the Hub, which is fetched when the cache has it not: `org/repo`, `org/repo:Q4_K_M`, or
    `org/repo:FILE.gguf`.

    Of a split model that is its first part, of a safetensors model its folder. A download that was cut goes on where
    it ended, in this run or a later one; files are checked (length, SHA-256) before the cache has them.

    Raises UserError in one line: no such repository or quantisation, gated, offline, too little disk, cut for good.
    """
    asked = parse_reference(reference) if isinstance(reference, str) else reference
    if asked is None:
        raise UserError(f"{reference} is no model of the Hub; name one as ORG/REPO or ORG/REPO:QUANTISATION")
    found = find_cached(asked)
    if found:
        return found
    repository = list_repository(asked.repo)
    model = pick_model(asked.repo, repository.models, asked.wanted)
    blobs = _blobs_folder(asked.repo)
    check_disk(asked.repo, model, blobs)
    with tell_errors(asked.repo):
        folder = _fetch_files(asked.repo, repository.commit, model, blobs)
    return open_at(folder, model)


def check_disk(repo: str, model: HubModel, blobs: Path) -> None:
    """Raise UserError when the disk has too little room for what is still to be fetched."""
    missing = sum(file.nbytes - _have(file, blobs) for file in model.fetched)
    place = next(folder for folder in (blobs, *blobs.parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if missing + SPARE > free:
        raise UserError(
            f"{repo}:{model.label} takes {missing / 2**30:.1f} GiB more, and {place} has {free / 2**30:.1f} GiB free "
            f"({SPARE >> 30} GiB stay free); free some space, set HF_HOME to a folder on another disk, or take a "
            "smaller quantisation"
        )


def _have(file: HubFile, blobs: Path) -> int:
    for path in (blobs / file.etag, _incomplete(file, blobs)):
        if file.etag and path.is_file():
            return min(path.stat().st_size, file.nbytes)
    return 0


def _incomplete(file: HubFile, blobs: Path) -> Path:
    return blobs / f"{file.etag}.incomplete"  # as the Hub's library names them


def _blobs_folder(repo: str) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}" / "blobs"


def _fetch_files(repo: str, commit: str, model: HubModel, blobs: Path) -> Path:
    """The folder of the cache that has all files of the model."""
    from huggingface_hub import hf_hub_download
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TransferSpeedColumn())
    if not console.is_terminal:
        head = f", with its multi-token head {model.head.nbytes / 2**30:.2f} GiB more" if model.head else ""
        console.print(f"fetching {repo}:{model.label} ({model.nbytes / 2**30:.2f} GiB{head})", highlight=False)
    folder: Path | None = None
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as bar:
        for file in model.fetched:
            if file.sha256:
                _fetch_blob(repo, commit, file, blobs, bar)
            with _quiet_library():  # it links what lies in the cache, and fetches small files itself
                path = Path(hf_hub_download(repo, file.name))
            _check_length(repo, path, file)
            place = path.parents[file.name.count("/")]
            if folder not in (None, place):
                raise UserError(f"{repo} was changed while it was fetched; run the same command again")
            folder = place
    assert folder is not None
    return folder


@contextmanager
def _quiet_library() -> Iterator[None]:
    """Without the library's own bars, which it shows on pipes too."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    quiet = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not quiet:
            enable_progress_bars()


def _fetch_blob(repo: str, commit: str, file: HubFile, blobs: Path, bar: "Progress") -> None:
    """Put a file's bytes into the cache, whole and checked, or raise. What came of it stays for the next try."""
    lock = blobs.parents[1] / ".locks" / blobs.parent.name / f"{file.etag}.lock"  # the library's own
    for folder in (blobs, lock.parent):
        folder.mkdir(parents=True, exist_ok=True)
    task = bar.add_task(Path(file.name).name, total=file.nbytes)
    with wait_for_lock(lock, f"{repo}/{file.name}"):
        if (blobs / file.etag).exists():
            return
        part = _incomplete(file, blobs)
        if part.exists() and part.stat().st_size > file.nbytes:
            part.unlink()
        with open(part, "ab") as out:
            bar.update(task, completed=out.tell())

            def take(piece: bytes) -> None:
                out.write(piece)
                bar.update(task, advance=len(piece))

            read_steadily(repo, commit, file.name, out.tell(), file.nbytes, take)
        bar.update(task, description=f"checking {Path(file.name).name}")
        with open(part, "rb") as whole:
            digest = hashlib.file_digest(whole, "sha256").hexdigest()
        if digest != file.sha256:
            part.unlink()
            raise UserError(f"{repo}: {file.name} came with other bytes than the Hub's checksum says; fetch it again")
        os.replace(part, blobs / file.etag)


def _check_length(repo: str, path: Path, file: HubFile) -> None:
    """Raise UserError, and take the file out of the cache, unless it is as long as the Hub says."""
    if path.stat().st_size == file.nbytes:
        return
    found = path.stat().st_size
    path.resolve().unlink()
    path.unlink(missing_ok=True)
    raise UserError(f"{repo}: {file.name} has {found} bytes and not {file.nbytes} as the Hub says; fetch it again")
