"""From what people call a model to the place where it lies."""

import re
from pathlib import Path

from pshard.errors import UserError

REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")


def resolve_model(reference: str) -> Path:
    """The file or folder that a reference names: a path, with ~ for the home folder.

    Raises UserError for what is no path here but reads like `org/repo[:quant]` of the Hub. A path that does not exist
    is returned: who opens it says so.
    """
    path = Path(reference).expanduser()
    if not path.exists() and path.suffix not in (".gguf", ".safetensors") and REPOSITORY.fullmatch(reference):
        raise UserError(
            f"{reference} is no file or folder here, and repositories of the Hub are not fetched yet: download its "
            "GGUF file, and give that file"
        )
    return path
