"""The part of the build that pyproject.toml cannot say: the optional C++ library of CPU kernels, what a wheel of it is
called, and the commit that it is made from.

The library has a plain C interface and is loaded by ctypes: it knows nothing of Python, so one wheel serves all
versions of it on a platform.
"""

import contextlib
import os
import runpy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

SOURCES = Path("runtime/kernels/cpu/csrc")
DIGEST = runpy.run_path("runtime/kernels/cpu/sources.py")["digest_sources"](SOURCES)
COMMIT = Path("pshard/commit.txt")  # in wheels and source packages, for pshard --version
SLOW = (
    "pshard: the CPU kernels were not compiled, so torch computes on the CPU, some ten times slower. Install a C++20 "
    "compiler (g++ 11 or newer, or clang) and then pshard again; `pshard doctor` names the command."
)
LINUX = sys.platform.startswith("linux")

# No instruction set is named here: isa_*.cpp choose theirs, and the library picks one when it runs.
# Contracting a * b + c would break the bit equality of dequantisation with the file format's reference.
cpu_kernels = Extension(
    "pshard.runtime.kernels.cpu._native",
    sources=sorted(str(p) for p in SOURCES.rglob("*.cpp")),
    depends=sorted(str(p) for p in SOURCES.rglob("*.h")),
    include_dirs=[str(SOURCES)],
    language="c++",
    define_macros=[("PSHARD_SOURCES", f"{DIGEST}u")],
    extra_compile_args=[
        "-std=c++20",
        "-O3",
        "-g0",  # Python's own flags ask for symbols, nine tenths of the library
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fvisibility=hidden",
        "-w",
        "-pthread",
    ],
    # bound at once: a thread that is recalled must not be in the linker (csrc/threads/recall.h)
    extra_link_args=["-pthread", "-Wl,-z,now"],
    optional=True,  # without a compiler the package installs, and runs on its torch kernels
)


def tell_installer(line: str) -> None:
    """Say a line, also on the terminal: of a build that succeeds pip shows nothing, and without a compiler one does."""
    print(line, file=sys.stderr)
    if not sys.stderr.isatty():
        with contextlib.suppress(OSError), open("/dev/tty", "w") as terminal:
            print(line, file=terminal)


class PlainLibrary(build_ext):
    """Builds `_native.so`: a name without the version of the Python that built it. Compiles on all cores."""

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except Exception:
            tell_installer(SLOW)
            raise  # the extension is optional: the build goes on without it

    def build_extensions(self) -> None:
        compile_one_by_one = self.compiler.compile

        def compile_at_once(sources: list[str], **how: Any) -> list[str]:
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                made = pool.map(lambda source: compile_one_by_one([source], **how), sources)
                return [path for paths in made for path in paths]

        self.compiler.compile = compile_at_once
        super().build_extensions()

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"


class AnyPython(bdist_wheel):
    """Calls the wheel py3-none-PLATFORM: it is of a platform, and of no version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class NotesCommit(build_py):
    """Writes the commit into what is installed; an editable install asks its clone."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            note_commit(Path(self.build_lib))


class SourcesWithCommit(sdist):
    """Writes the commit into the source package, of which a wheel may be made later."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        note_commit(Path(base_dir))


def note_commit(folder: Path) -> None:
    """Write which commit these sources are below `folder`, if they are a clone or a package of one."""
    text = COMMIT.read_text() if COMMIT.exists() else ""
    if Path(".git").exists():
        command = ["git", "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
        try:
            text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
        except (OSError, subprocess.SubprocessError):
            text = ""
    if text.strip():
        (folder / COMMIT).write_text(text)


if not LINUX:
    print(f"pshard: no CPU kernels for {sys.platform}, as they need Linux: torch kernels run", file=sys.stderr)

setup(
    ext_modules=[cpu_kernels] if LINUX else [],
    cmdclass={
        "build_ext": PlainLibrary,
        "bdist_wheel": AnyPython,
        "build_py": NotesCommit,
        "sdist": SourcesWithCommit,
    },
)
