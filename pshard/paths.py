"""Where pshard keeps what it writes for itself."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """Folder for profiles and registries that cannot stand beside their model. PSHARD_CACHE overrides."""
    if os.environ.get("PSHARD_CACHE"):
        return Path(os.environ["PSHARD_CACHE"])
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("pshard", appauthor=False))


def bundled_model() -> Path | None:
    """The model that comes with pshard, in the package or the clone that it is used from; None where it is left out."""
    places = Path(__file__).resolve().parents[:2]
    return next((p / "examples" / "demo.gguf" for p in places if (p / "examples" / "demo.gguf").is_file()), None)


def name_in_hub_cache(path: Path) -> str | None:
    """What the Hub calls a file or folder of the Hugging Face Hub's cache: `org/repo`, or `org/repo/file`; None for any
    other path.

    There a model is `models--org--repo/snapshots/COMMIT[/file]`: a folder named by a number, or a link to a checksum.
    """
    parts = Path(os.path.abspath(path)).parts
    for i in range(len(parts) - 3, 0, -1):
        if parts[i + 1] == "snapshots" and parts[i].startswith("models--"):
            return "/".join([parts[i].removeprefix("models--").replace("--", "/", 1), *parts[i + 3 :]])
    return None
