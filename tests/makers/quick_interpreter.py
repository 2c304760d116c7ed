"""Triton 3.6's interpreter in a third of the time: what it works out again for every operation is kept. Numbers, types
and checks stay the same.

Its own code makes a type, a shape and a table of number types for each operation on some hundred numbers, and follows
each sum and product of integers with five operations whose result nobody reads.
"""

from typing import Any

import numpy as np


def quicken_interpreter() -> None:
    """Call it once, where the interpreter is in use."""
    from triton.language import core
    from triton.runtime import interpreter

    find_number_type = interpreter._get_np_dtype
    number_types: dict[str, np.dtype] = {}

    def keep_number_types(kind: Any) -> np.dtype:
        name = kind.scalar.name
        if name not in number_types:
            number_types[name] = find_number_type(kind)
        return number_types[name]

    interpreter._get_np_dtype = keep_number_types
    _keep_types_and_shapes(core)
    _quicken_semantic(interpreter.interpreter_semantic, core)
    unwrap = core._unwrap_if_constexpr
    plain = (core.tensor, int, float, bool, str, type(None), core.dtype, core.block_type, core.pointer_type)
    as_they_are = frozenset(plain)
    core._unwrap_if_constexpr = lambda value: value if type(value) in as_they_are else unwrap(value)


def _keep_types_and_shapes(core: Any) -> None:
    """One object for each type of blocks; a tensor's shape comes with its type."""
    make_block_type = core.block_type.__init__
    of_scalars = core.tuple([]), core.constexpr(1)

    def with_element_type(self: Any, scalar: Any) -> Any:
        kept = self.like
        key = scalar.name
        if key not in kept:
            kept[key] = self if key == self.element_ty.name else core.block_type(scalar, self.shape)
        return kept[key]

    known: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}

    def make_known_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, tuple(size if type(size) is int else core._unwrap_if_constexpr(size) for size in shape)
        if key not in known:
            make_block_type(self, element_ty, shape)
            sizes = core.tuple([core.constexpr(size) for size in self.shape])
            self.__dict__ |= {"like": {}, "of_tensors": (sizes, core.constexpr(self.numel))}
            known[key] = dict(self.__dict__)
        self.__dict__.update(known[key])

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensors if type.is_block() else of_scalars

    core.block_type.with_element_ty, core.block_type.__init__ = with_element_type, make_known_block_type
    core.tensor.__init__ = make_tensor

    make_tuple, find_field = core.tuple.__init__, core.tuple.__getattr__

    def make_untyped_tuple(self: Any, args: Any, type: Any = None) -> None:
        if type is None:
            self.values = list(args)
        else:
            make_tuple(self, args, type)

    def find_type_or_field(self: Any, name: str) -> Any:
        if name != "type":
            return find_field(self, name)
        self.type = core._type_for_tuple_values(self.values)
        return self.type

    core.tuple.__init__, core.tuple.__getattr__ = make_untyped_tuple, find_type_or_field


def _quicken_semantic(semantic: Any, core: Any) -> None:
    """Operands that are alike need no conversion. What is worked out about overflow is thrown away: without its option
    `debug` the interpreter asserts nothing about it."""
    assert not semantic.builder.options.debug
    check = semantic.binary_op_type_checking_impl

    def check_operands(lhs: Any, rhs: Any, *rest: Any, **named: Any) -> tuple[Any, Any]:
        divides = named.get("div_or_mod", rest[3:4] == (True,))
        alike = type(lhs) is core.tensor and type(rhs) is core.tensor and lhs.shape is rhs.shape
        if alike and not divides and lhs.dtype is rhs.dtype and not lhs.dtype.is_ptr():
            return lhs, rhs
        return check(lhs, rhs, *rest, **named)

    semantic.binary_op_type_checking_impl = check_operands
    semantic.binary_op_sanitize_overflow_impl = lambda *_: None
