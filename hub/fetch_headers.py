"""Brings the headers of a repository's models here, by a few range requests each, as files that can be opened.

A header's copy is as long as its file, with a hole where the weights would be: sizes are true, and the disk holds a few
MiB. All quantisations of a model have one vocabulary, nearly all of the header: it is fetched once.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pshard.errors import UserError
from pshard.hub.gguf_outline import NotEnough, Outline, outline_gguf, outline_spliced
from pshard.hub.read_range import read_bytes
from pshard.hub.repository import HubFile, HubModel, Repository
from pshard.hub.tell_errors import tell_errors

CONNECTIONS = 8
FIRST = 2 << 20  # bytes of a header that are asked for at first, then twice as many
MOST = 1 << 28  # no header is longer
HEAD, SLACK = 1 << 16, 1 << 16  # bytes: before the vocabulary; beyond what the tensors' entries took elsewhere
_NEEDED_TEXTS = ("config.json", "model.safetensors.index.json")


@dataclass(frozen=True)
class _Header:
    """Bytes of a GGUF file from its beginning, at least its header."""

    of: HubFile
    data: bytes
    outline: Outline


Headers = Mapping[str, Path | UserError]  # by a model's label: what `open_model` opens, or why there is nothing


def fetch_headers(repository: Repository, models: Sequence[HubModel], folder: Path) -> Headers:
    """Headers of these models below `folder`. The first of them lends its vocabulary to the others.

    Raises UserError as tell_errors.py says for the first model; a file of the others that is none leaves its error.
    """
    first, *others = models
    with tell_errors(repository.name):
        lender = _read_whole(repository, first.files[0]) if not first.is_folder else None
        with ThreadPoolExecutor(CONNECTIONS) as pool:

            def fetch(model: HubModel) -> Path | UserError:
                try:
                    with tell_errors(repository.name):
                        return _fetch_one(repository, model, folder / str(models.index(model)), lender)
                except UserError as error:
                    if model is first:
                        raise
                    return error

            return dict(zip((m.label for m in models), pool.map(fetch, [first, *others])))


def _fetch_one(repository: Repository, model: HubModel, folder: Path, lender: _Header | None) -> Path:
    folder.mkdir(parents=True)
    if model.is_folder:
        for file in model.files:
            if file.name in _NEEDED_TEXTS:
                whole = read_bytes(repository.name, repository.commit, file.name, 0, file.nbytes)
                (folder / file.name).write_bytes(whole)
            elif file.name.endswith(".safetensors"):
                _write_sparse(folder / file.name, file.nbytes, {0: _safetensors_header(repository, file)})
        return folder
    for file in model.fetched:
        header = _read_gguf(repository, file, lender)
        pieces = {0: header.data[: header.outline.end]}
        for offset, nbytes in header.outline.tables:
            start = header.outline.data + offset
            pieces[start] = read_bytes(repository.name, repository.commit, file.name, start, start + nbytes)
        _write_sparse(folder / Path(file.name).name, file.nbytes, pieces)
    return folder / Path(model.files[0].name).name


def _write_sparse(path: Path, nbytes: int, pieces: Mapping[int, bytes]) -> None:
    with open(path, "wb") as out:
        out.truncate(nbytes)
        for at, piece in pieces.items():
            out.seek(at)
            out.write(piece)


def _read_gguf(repository: Repository, file: HubFile, lender: _Header | None) -> _Header:
    if lender and lender.of == file:
        return lender
    if lender and lender.outline.shared[1]:
        borrowed = _borrow(repository, file, lender)
        if borrowed:
            return borrowed
    return _read_whole(repository, file)


def _read_whole(repository: Repository, file: HubFile) -> _Header:
    """The header, asked for in growing pieces until it is whole."""
    data, wanted = b"", FIRST
    while True:
        end = min(wanted, file.nbytes)
        data += read_bytes(repository.name, repository.commit, file.name, len(data), end)
        try:
            return _Header(file, data, outline_gguf(data))
        except NotEnough:
            if len(data) >= min(file.nbytes, MOST):
                what = f"{repository.name}: {file.name} ends inside its header: it is damaged"
                raise UserError(f"{what}; take another file or repository") from None
        except ValueError as error:
            what = f"{repository.name}: {file.name} is no GGUF file that can be read: {error}"
            raise UserError(f"{what}; take another file or repository") from None
        if len(data) < end:
            raise UserError(f"{repository.name}: {file.name} was cut inside its header; run the same command again")
        wanted *= 2


def _borrow(repository: Repository, file: HubFile, lender: _Header) -> _Header | None:
    """The header with the lender's long arrays in the place of its own; None where it has others, or is another."""
    start, end = lender.outline.shared
    head = read_bytes(repository.name, repository.commit, file.name, 0, min(HEAD, file.nbytes))
    try:
        return _Header(file, head, outline_gguf(head))  # a later part of a split model has only tensors
    except NotEnough:
        pass
    except ValueError:
        return None
    try:
        own = outline_spliced(head, lender.data, (start, end))
        behind = own + end - start
        most = min(file.nbytes, behind + lender.outline.end - end + SLACK)
        tail = read_bytes(repository.name, repository.commit, file.name, behind, most)
        data = head[:own] + lender.data[start:end] + tail
        return _Header(file, data, outline_gguf(data))
    except (NotEnough, ValueError):
        return None


def _safetensors_header(repository: Repository, file: HubFile) -> bytes:
    """The length and the JSON that a safetensors file begins with."""
    data = read_bytes(repository.name, repository.commit, file.name, 0, min(HEAD, file.nbytes))
    end = min(8 + int.from_bytes(data[:8], "little"), file.nbytes, MOST)
    if end > len(data):
        data += read_bytes(repository.name, repository.commit, file.name, len(data), end)
    return data[:end]
