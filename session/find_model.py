"""From what people call a model to the place where it lies: here, or on the Hub, which it is fetched from."""

from pathlib import Path

from pshard.hub.fetch_model import fetch_model
from pshard.hub.reference import parse_reference


def resolve_model(reference: str) -> Path:
    """The file or folder that a reference names: a path, with ~ for the home folder, or a model of the Hub (`org/repo`,
    `org/repo:Q4_K_M`) in the Hub's cache, which gets it first when it has it not.

    Raises UserError for what the Hub does not give. A path that does not exist is returned: who opens it says so.
    """
    hub = parse_reference(reference)
    return fetch_model(hub) if hub else Path(reference).expanduser()
