"""Which sources the C++ library is built from: the build (setup.py) and the loader (native.py) compare this number."""

import zlib
from pathlib import Path


def digest_sources(folder: Path) -> int:
    """A checksum of the C++ files in a folder and their names; 0 where there are none, as in an installed package."""
    digest = 0
    for path in sorted((*folder.rglob("*.cpp"), *folder.rglob("*.h"))):
        digest = zlib.crc32(path.read_bytes(), zlib.crc32(path.name.encode(), digest))
    return digest
