"""Where a model lies that a user names: here, or on the Hub, which it is fetched from."""

from pathlib import Path

from pshard.hub.fetch_model import fetch_model
from pshard.hub.reference import parse_reference


def resolve_model(reference: str) -> Path:
    """The path of a model: of a file or folder of this machine as it was given, and of one of the Hub (`org/repo`,
    `org/repo:Q4_K_M`) in the Hub's cache, which gets it first when it has it not.

    Raises UserError for what the Hub does not give; a path that is not there is an error of whoever opens it.
    """
    hub = parse_reference(reference)
    return fetch_model(hub) if hub else Path(reference)
