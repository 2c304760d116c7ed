"""Compiles a launch for a card that is not there: as far as shared memory is known, or to machine code. No torch."""

import json
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

from pshard.profile.tuning.compile_ahead import Request, become

ASKED = ("num_warps", "num_stages", "maxnreg")  # of the compiler
LAID_OUT_AS = {80: 86}  # up to shared memory the compiler looks at a card's generation alone
WITHOUT_DOTS = {"gate_up_pairs_kernel", "down_pairs_kernel", "dequantise_kernel", "look_up_kernel"}
WRITTEN_AS = {80: 86, 89: 86}  # cards for which the compiler writes the same text: it is assembled for each
WRITTEN_WITHOUT_DOTS = WRITTEN_AS | {90: 86}  # sm_100 has reductions that sm_120 lacks
ANY_GENERATION = LAID_OUT_AS | {90: 86}  # for these kernels, in which nothing is multiplied by `tl.dot`


@dataclass(frozen=True)
class Needs:
    """What a kernel needs of a card: bytes of shared memory a block, registers of a thread and bytes that it spills
    (None where it was not assembled); error: why it cannot be compiled."""

    shared: int = 0
    registers: int | None = None
    spilled: int | None = None
    error: str = ""


def digest_launch(request: Request, capability: int, assembled: bool) -> str:
    """Names what comes of a launch: another source of the kernel, or of what it calls, is another name."""
    import triton

    card = capability if assembled else card_laid_out(request, capability)
    hinted = assembled or request.kernel not in WITHOUT_DOTS  # else these lead to other instructions only
    key = triton.__version__, ask_compiler(request, hinted), card, assembled
    return sha256(json.dumps(key).encode()).hexdigest()


def ask_compiler(request: Request, hinted: bool = True) -> str:
    """What the compiler is asked for, whatever the card: the kernel's source, types, constants and, where hinted, what
    is known of addresses."""
    said = json.loads(request.words)
    asked = [said[name] for name in ("signature", "constant_keys", "constant_vals")]
    if hinted:
        asked += [said["attrs_keys"], said["attrs_vals"]]
    options = [said["options"].get(name) for name in ASKED]
    return json.dumps(((request.module, request.kernel, _kernel(request).cache_key), asked, options))


def card_laid_out(request: Request, capability: int) -> int:
    """The card whose layout of a launch is that of this one too."""
    alike = ANY_GENERATION if request.kernel in WITHOUT_DOTS else LAID_OUT_AS
    return alike.get(capability, capability)


def lay_out_launch(request: Request, capability: int) -> Needs:
    """Shared memory that a launch needs; its error where it cannot be compiled."""
    target = become(card_laid_out(request, capability))
    try:
        source, options = _read_words(request)
        return Needs(_allocate(source, target, options))
    except Exception as error:
        return Needs(error=_tell(error))


def assemble_launch(request: Request, capabilities: Sequence[int]) -> list[Needs]:
    """What a launch needs of each of these cards; its error where it cannot be compiled. Four fifths of the work are
    the compiler's text, which is written once for cards that get the same."""
    written, found = dict[int, Any](), list[Needs]()
    for capability in capabilities:
        target = become(capability)
        try:
            source, options = _read_words(request)
            alike = next((card for card in written if _is_alike(written[card], card, capability)), None)
            if alike is None:
                written[capability] = kernel = triton_compile(source, target, options)
                machine_code = kernel.asm["cubin"]
            else:
                kernel = written[alike]
                machine_code = _assemble(kernel.asm["ptx"], source, target, options)
            found.append(_read_usage(machine_code, int(kernel.metadata.shared)))
        except Exception as error:
            found.append(Needs(error=_tell(error)))
    return found


def triton_compile(source: Any, target: Any, options: dict[str, Any]) -> Any:
    """The compiler's kernel for a target."""
    import triton

    return triton.compile(source, target=target, options=options)


def _is_alike(kernel: Any, card: int, other: int) -> bool:
    """Whether the kernel's text for a card is that for another."""
    alike = WRITTEN_AS if "tt.dot" in kernel.asm["ttir"] else WRITTEN_WITHOUT_DOTS
    return alike.get(card, card) == alike.get(other, other)


def _tell(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "")
    return f"{type(error).__name__}: {told}"[:300]


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


def _assemble(text: str, source: Any, target: Any, asked: dict[str, Any]) -> bytes:
    """Machine code for a card of a text that was written for one like it."""
    from triton.backends.nvidia.compiler import sm_arch_from_capability
    from triton.compiler.compiler import make_backend

    backend = make_backend(target)
    options = backend.parse_options({**asked, **source.parse_options()})
    mine = re.sub(r"\.target sm_\w+", f".target {sm_arch_from_capability(target.arch)}", text)
    return bytes(backend.make_cubin(mine, {}, options, target.arch))


def _read_usage(machine_code: bytes, shared: int) -> Needs:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(machine_code)
        file.flush()
        said = subprocess.run([_reader(), "-res-usage", file.name], capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", said)
    if found is None:
        raise RuntimeError("error: cuobjdump does not say what the kernel uses")
    registers, stack, local = map(int, found.groups())
    return Needs(shared, registers, stack + local)


@cache
def _reader() -> str:
    import triton

    return str(Path(triton.__path__[0]) / "backends/nvidia/bin/cuobjdump")
