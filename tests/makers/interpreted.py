"""Tests of Triton kernels on a machine without a GPU: run again in Triton's interpreter, which must be chosen before
anything imports Triton, and so in a process of their own."""

import os
import sys
from typing import Any

import numpy as np
from quick_interpreter import quicken_interpreter
from warm_python import run_warm


def expect_interpreted_to_pass(file: str, named: str = "") -> None:
    """Run the tests of a file with Triton's interpreter, or those of them that have this in their names."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", file, "-k", named, "-p", "no:cacheprovider"]
    done = run_warm(command, environment, timeout=600)  # which has imported torch, and not Triton
    assert done.returncode == 0, done.stdout[-4000:]
    assert "passed" in done.stdout


def mend_interpreter() -> None:
    """Corrects what Triton 3.6 gets wrong when it interprets. Call it where the interpreter is in use."""
    import triton
    from triton.runtime import interpreter

    patch_tensor, multiply = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patch_tensor_for_new_numpy(tensor: type, scope: Any) -> None:
        """Triton 3.6 keeps scalars as arrays of shape (1,), which numpy no longer turns into an int by itself."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def multiply_bfloat16(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        """Triton 3.6 multiplies the bit patterns of bfloat16 as if they were integers."""
        wide = [
            interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), triton.language.float32)
            if x.dtype.scalar == triton.language.bfloat16
            else x
            for x in (a, b)
        ]
        return multiply(self, *wide, *rest)

    interpreter._patch_lang_tensor = patch_tensor_for_new_numpy
    interpreter.InterpreterBuilder.create_dot = multiply_bfloat16

    language, used = triton.language, dict[Any, list[Any]]()

    def call_patching_once(self: Any, *arguments: Any, **named: Any) -> Any:
        """Triton 3.6 goes through its whole language in every call of a function, to patch what has been patched."""
        if self.fn not in used:
            values = self.fn.__globals__.values()
            used[self.fn] = [m for m in (language, language.core) if any(value is m for value in values)]
        if any(language.core.is_builtin(module.load) for module in used[self.fn]):
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*arguments, **named)

    interpreter.InterpretedFunction.__call__ = call_patching_once
    quicken_interpreter()
