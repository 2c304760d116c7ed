"""The command that installs pshard again, in the way in which it was installed."""

import json
import shlex
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlparse


def name_reinstall(prefix: Path = Path(sys.prefix)) -> str:
    """By where Python's environment `prefix` lies, and what the installer has written down beside the package."""
    if (prefix / ".installed").exists():  # by the clone's own scripts
        return f"bash {shlex.quote(str(prefix.parent / 'scripts' / 'setup'))}"
    if prefix.parts[-3:-1] == ("pipx", "venvs"):
        return f"pipx reinstall {prefix.name}"
    given = _read_source()
    if prefix.parts[-3:-1] == ("uv", "tools"):
        return f"uv tool install --reinstall {given or prefix.name}"
    return f"pip install --force-reinstall --no-deps --no-cache-dir {given or 'pshard'}"


def _read_source() -> str:
    """What the installer was given: a folder, as with -e, or an archive; "" where it is not known."""
    try:
        written = json.loads(distribution("pshard").read_text("direct_url.json") or "{}")
        address, editable = written["url"], written.get("dir_info", {}).get("editable")
    except (PackageNotFoundError, ValueError, KeyError):
        return ""
    url = urlparse(address)
    place = unquote(url.path) if url.scheme == "file" else address
    return ("-e " if editable else "") + shlex.quote(place)
