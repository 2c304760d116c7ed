"""Compiles a launch for a card that is not there: as far as shared memory is known, or to machine code. No torch."""

import json
import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

from pshard.profile.tuning.compile_ahead import OnlyTarget, Request

ASKED = ("num_warps", "num_stages", "maxnreg")  # of the compiler
LAID_OUT_AS = {80: 86}  # up to shared memory the compiler looks at a card's generation alone
WITHOUT_DOTS = {"gate_up_pairs_kernel", "down_pairs_kernel", "dequantise_kernel", "look_up_kernel"}
ANY_GENERATION = LAID_OUT_AS | {90: 86}  # for these kernels, in which nothing is multiplied by `tl.dot`


@dataclass(frozen=True)
class Needs:
    """What a kernel needs of a card: bytes of shared memory a block, registers of a thread and bytes that it spills
    (None where it was not assembled); error: why it cannot be compiled."""

    shared: int = 0
    registers: int | None = None
    spilled: int | None = None
    error: str = ""


def become(capability: int) -> Any:
    """Make this process compile for a capability (86 for 8.6); Triton's name of it."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    target = GPUTarget("cuda", capability, 32)
    driver.set_active(OnlyTarget(target))
    return target


def digest_launch(request: Request, capability: int, assembled: bool) -> str:
    """Names what comes of a launch: another source of the kernel, or of what it calls, is another name."""
    import triton

    said = json.loads(request.words)
    asked = [said[name] for name in ("signature", "constant_keys", "constant_vals")]
    if assembled or request.kernel not in WITHOUT_DOTS:  # what is known of addresses leads to other instructions only
        asked += [said["attrs_keys"], said["attrs_vals"]]
    options = [said["options"].get(name) for name in ASKED]
    card = capability if assembled else card_laid_out(request, capability)
    kernel = request.module, request.kernel, _kernel(request).cache_key
    key = triton.__version__, kernel, asked, options, card, assembled
    return sha256(json.dumps(key).encode()).hexdigest()


def card_laid_out(request: Request, capability: int) -> int:
    """The card whose layout of a launch is that of this one too."""
    alike = ANY_GENERATION if request.kernel in WITHOUT_DOTS else LAID_OUT_AS
    return alike.get(capability, capability)


def compile_launch(request: Request, capability: int, assembled: bool) -> Needs:
    """What a launch needs; its error where it cannot be compiled."""
    target = become(capability if assembled else card_laid_out(request, capability))
    try:
        source, options = _read_words(request)
        return _assemble(source, target, options) if assembled else Needs(_allocate(source, target, options))
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        told = next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "")
        return Needs(error=f"{type(error).__name__}: {told}"[:300])


def _kernel(request: Request) -> Any:
    return getattr(import_module(request.module), request.kernel)


def _read_words(request: Request) -> tuple[Any, dict[str, Any]]:
    """The kernel with what it is specialised for, and what was asked of the compiler."""
    from triton import language
    from triton.compiler import ASTSource

    said = json.loads(request.words)

    def read(value: Any) -> Any:
        if isinstance(value, dict):
            return language.constexpr(value["constexpr"])
        if isinstance(value, str) and language.dtype.is_dtype(value):
            return language.dtype(value)
        return tuple(map(read, value)) if isinstance(value, list) else value

    def as_tuples(value: Any) -> Any:
        return tuple(map(as_tuples, value)) if isinstance(value, list) else value

    constants = {tuple(place): read(value) for place, value in zip(said["constant_keys"], said["constant_vals"])}
    hints = {tuple(place): value for place, value in zip(said["attrs_keys"], said["attrs_vals"])}
    types = {name: as_tuples(kind) for name, kind in said["signature"].items()}
    asked = {name: said["options"].get(name) for name in ASKED}
    source = ASTSource(_kernel(request), types, constants, hints)
    return source, {name: value for name, value in asked.items() if value is not None}


def _allocate(source: Any, target: Any, asked: dict[str, Any]) -> int:
    """Bytes of shared memory: the compiler's own passes up to where it lays that out, a third of the work."""
    from triton._C.libtriton import ir, nvidia, passes
    from triton.backends.nvidia.compiler import get_ptx_version_from_options
    from triton.compiler.compiler import make_backend

    backend = make_backend(target)
    options = backend.parse_options({**asked, **source.parse_options()})
    context, stages = ir.context(), dict[str, Any]()
    ir.load_dialects(context)
    backend.load_dialects(context)
    backend.add_stages(stages, options, source.language)
    codegen = backend.get_codegen_implementation(options)
    module = source.make_ir(target, options, codegen, backend.get_module_map(), context)
    about = {**options.__dict__, "target": target, "hash": ""}
    for stage in ("ttir", "ttgir"):
        module = stages[stage](module, about)
    manager = ir.pass_manager(module.context)
    passes.ttgpuir.add_combine_tensor_select_and_if(manager)
    passes.ttgpuir.add_allocate_warp_groups(manager)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    version = get_ptx_version_from_options(options, target.arch)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, target.arch, version)
    manager.run(module, "allocate")
    return int(module.get_int_attr("ttg.shared"))


def _assemble(source: Any, target: Any, asked: dict[str, Any]) -> Needs:
    import triton

    kernel = triton.compile(source, target=target, options=asked)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        said = subprocess.run([_reader(), "-res-usage", file.name], capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", said)
    if found is None:
        raise RuntimeError("error: cuobjdump does not say what the kernel uses")
    registers, stack, local = map(int, found.groups())
    return Needs(int(kernel.metadata.shared), registers, stack + local)


@cache
def _reader() -> str:
    import triton

    return str(Path(triton.__path__[0]) / "backends/nvidia/bin/cuobjdump")
