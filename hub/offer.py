"""A model of the Hub that is not on this machine, as far as its header tells: what planning needs."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pshard.errors import UserError
from pshard.hub.cached import find_cached
from pshard.hub.fetch_headers import Headers, fetch_headers
from pshard.hub.reference import HubReference, parse_reference
from pshard.hub.repository import HubFile, HubModel, list_repository, pick_model, sort_files


@dataclass(frozen=True)
class Offer:
    """The model that was asked for, and all models of its repository with their headers."""

    model: HubModel
    models: tuple[HubModel, ...]
    headers: Headers

    @property
    def path(self) -> Path:
        """The header of the model that was asked for."""
        header = self.headers[self.model.label]
        assert isinstance(header, Path)  # or its error was raised
        return header


def find_offered(model: str | None) -> HubReference | None:
    """The model that a user names, if it is one of the Hub's and not on this machine."""
    reference = parse_reference(model) if model else None
    return None if reference is None or find_cached(reference) else reference


def find_quants(folder: Path) -> tuple[HubModel, ...]:
    """The models among the GGUF files of a folder, from small to large; none where it is a model itself."""
    if (folder / "config.json").exists() or not folder.is_dir():
        return ()
    files = sorted(p for p in folder.glob("*.gguf") if p.is_file())
    return sort_files(HubFile(p.name, p.stat().st_size) for p in files)


@contextmanager
def open_offer(reference: HubReference) -> Iterator[Offer]:
    """Headers of a repository's models, in a folder that goes when the block ends. Raises UserError; errors that come
    of opening a header name the repository, not the folder."""
    repository = list_repository(reference.repo)
    asked = pick_model(reference.repo, repository.models, reference.wanted)
    models = (asked, *(model for model in repository.models if model is not asked))
    with tempfile.TemporaryDirectory(prefix="pshard-") as folder:
        headers = fetch_headers(repository, models, Path(folder))
        offer = Offer(asked, repository.models, headers)
        try:
            yield offer
        except UserError as error:
            place = offer.path
            place = place if asked.is_folder else place.parent
            if str(place) not in str(error):
                raise
            raise UserError(str(error).replace(str(place), reference.repo)) from None
