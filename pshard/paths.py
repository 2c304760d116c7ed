"""Where pshard keeps what it writes for itself."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """Folder for profiles and registries that cannot stand beside their model. PSHARD_CACHE overrides."""
    if os.environ.get("PSHARD_CACHE"):
        return Path(os.environ["PSHARD_CACHE"])
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("pshard", appauthor=False))
