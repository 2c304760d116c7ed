"""Makes `import pshard` work in the folder above a clone named pshard, where Python finds the clone before the package.

Without this file Python would take the clone for a package with nothing in it.
"""

import importlib.util
import os
import sys


def _import_installed() -> None:
    """Put the installed package in this module's place. Raises ImportError when there is none."""
    clone = os.path.dirname(os.path.abspath(__file__))
    no_clones = [path for path in sys.path if not os.path.exists(os.path.join(path, "pshard", "pshard", "__init__.py"))]
    found = (finder.find_spec("pshard", no_clones) for finder in sys.meta_path)
    spec = next((spec for spec in found if spec is not None and spec.loader is not None and spec.origin), None)
    if spec is None or spec.loader is None:
        raise ImportError(
            f"{clone} is a clone of pshard, and this Python ({sys.executable}) has no pshard installed: run "
            f"{clone}/scripts/setup and use {clone}/.venv/bin/python, or install it with pip install -e {clone}"
        )
    sys.modules["pshard"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


if __name__ == "pshard":
    _import_installed()
