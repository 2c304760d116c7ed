"""The one part of the build that pyproject.toml cannot say: the optional C++ library of CPU kernels."""

import runpy
import sys
from pathlib import Path

from setuptools import Extension, setup

SOURCES = Path("runtime/kernels/cpu/csrc")
DIGEST = runpy.run_path("runtime/kernels/cpu/sources.py")["digest_sources"](SOURCES)

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
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fvisibility=hidden",
        "-w",
        "-pthread",
    ],
    # bound at once: a thread that is recalled must not be in the linker (csrc/threads/recall.h)
    extra_link_args=["-pthread", "-Wl,-z,now"] if sys.platform.startswith("linux") else [],
    optional=True,  # without a compiler the package installs, and runs on its torch kernels
)

setup(ext_modules=[cpu_kernels])
