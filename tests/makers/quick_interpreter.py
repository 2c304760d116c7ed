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
    _convert_bfloat16_by_bits(interpreter)
    _keep_types_and_shapes(core)
    _quicken_semantic(interpreter.interpreter_semantic, core)
    _quicken_operations(interpreter)
    _multiply_by_numpy(core, interpreter)
    unwrap = core._unwrap_if_constexpr
    plain = (core.tensor, int, float, bool, str, type(None), core.dtype, core.block_type, core.pointer_type)
    as_they_are = frozenset(plain)
    core._unwrap_if_constexpr = lambda value: value if type(value) in as_they_are else unwrap(value)


def _convert_bfloat16_by_bits(interpreter: Any) -> None:
    """bfloat16 is the upper half of a float32's bits; the interpreter cuts the others off too."""
    convert = interpreter._convert_float

    def convert_bits(given: np.ndarray, kind: Any, wanted: Any, rounding: Any) -> np.ndarray:
        if rounding is None and (kind.name, wanted.name) == ("bf16", "fp32"):
            return given.view(np.uint16).astype(np.uint32) << 16
        if rounding is None and (kind.name, wanted.name) == ("fp32", "bf16"):
            return (given.view(np.uint32) >> 16).astype(np.uint16)
        return convert(given, kind, wanted, rounding)

    interpreter._convert_float = convert_bits


def _multiply_by_numpy(core: Any, interpreter: Any) -> None:
    """The products of small matrices: one of NumPy's each, where `triton_mma` has some thirty operations. As float32
    the sums of bytes are exact, which stay below 16 * 255 * 128."""
    from pshard.runtime.kernels.gpu.products import triton_mma

    def make(data: np.ndarray, kind: Any) -> Any:
        return core.tensor(interpreter.TensorHandle(data, kind), core.block_type(kind, list(data.shape)))

    def multiply_bytes(a: Any, b: Any, BITS: int = -1) -> Any:
        left = a.handle.data.view(np.uint8 if BITS == 255 else np.int8).reshape(-1, 8, 16).astype(np.float32)
        right = b.handle.data.view(np.int8).reshape(-1, 8, 16).astype(np.float32)
        return make(np.matmul(left, right.swapaxes(1, 2)).astype(np.int32), core.int32)

    def spread(low: Any, high: Any) -> tuple[Any, ...]:
        pairs = (side.handle.data.reshape(-1, 2) for side in (low, high))
        return tuple(make(np.ascontiguousarray(pair[:, i]), low.dtype) for pair in pairs for i in (0, 1))

    triton_mma._products, triton_mma._spread = multiply_bytes, spread


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
    check, check_bits = semantic.binary_op_type_checking_impl, semantic.bitwise_op_type_checking_impl
    kept = _keep_numbers(semantic, core)
    constants: dict[Any, Any] = {}
    promoted: dict[Any, Any] = {}

    def promote(lhs: Any, rhs: Any, how: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        """The types that two tensors' types become are worked out once."""
        key = lhs.dtype.name, rhs.dtype.name, how, *named.items()
        if key not in promoted:
            left, right = check(lhs, rhs, *how, **named)
            promoted[key] = [None if new.dtype == old.dtype else new.dtype for new, old in ((left, lhs), (right, rhs))]
            return left, right
        one, other = promoted[key]
        return semantic.broadcast_impl_value(
            lhs if one is None else semantic.cast(lhs, one), rhs if other is None else semantic.cast(rhs, other)
        )

    def check_operands(lhs: Any, rhs: Any, *rest: Any, **named: Any) -> tuple[Any, Any]:
        divides = named.get("div_or_mod", rest[3:4] == (True,))
        if type(lhs) is core.tensor and type(rhs) is core.tensor:
            alike = lhs.shape is rhs.shape and lhs.dtype is rhs.dtype
            if alike and not divides and not lhs.dtype.is_ptr():
                return lhs, rhs
        number = (type(rhs), rhs) if type(rhs) in (int, float) else id(rhs) if id(rhs) in kept else None
        if number is not None and type(lhs) is core.tensor:
            key = id(lhs.shape), lhs.dtype.name, number, rest, *named.items()
            if key in constants:
                return lhs, constants[key]
            left, right = check(lhs, rhs, *rest, **named)
            if left is lhs:  # the number alone was converted: always to the same block, which nobody writes to
                right.handle.data.flags.writeable = False
                constants[key] = right
            return left, right
        if type(lhs) is core.tensor and type(rhs) is core.tensor:
            return promote(lhs, rhs, rest, named)
        return check(lhs, rhs, *rest, **named)

    def check_bit_operands(lhs: Any, rhs: Any) -> tuple[Any, Any]:
        left, right = check_operands(lhs, rhs)
        alike = left.dtype is right.dtype and left.dtype.is_int()
        return (left, right) if alike else check_bits(left, right)

    semantic.binary_op_type_checking_impl, semantic.bitwise_op_type_checking_impl = check_operands, check_bit_operands
    semantic.binary_op_sanitize_overflow_impl = lambda *_: None
    _keep_broadcasts(semantic, core, kept)


def _keep_numbers(semantic: Any, core: Any) -> set[int]:
    """Each number becomes a tensor once, which nobody writes to. Returns the ids of those tensors, as they are made."""
    make, made, kept = semantic.to_tensor, dict[Any, Any](), set[int]()

    def make_once(given: Any, check_type: bool = True) -> Any:
        number = given.value if type(given) is core.constexpr else given
        if type(number) not in (int, float):
            return make(given, check_type)
        key = type(number), number
        if key not in made:
            made[key] = make(number)
            made[key].handle.data.flags.writeable = False
            kept.add(id(made[key]))
        return made[key]

    semantic.to_tensor = make_once
    return kept


def _keep_broadcasts(semantic: Any, core: Any, kept: set[int]) -> None:
    """The types of two blocks that fit one another are found once for each pair of types, a block of a kept number is
    made once."""
    broadcast, found, blocks = semantic.broadcast_impl_value, dict[tuple[int, int], list[Any]](), dict[Any, Any]()

    def broadcast_once(lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        if id(rhs) in kept and lhs.type.is_block():
            key = id(lhs.shape), id(rhs)
            if key not in blocks:
                blocks[key] = broadcast(lhs, rhs)[1]
                blocks[key].handle.data.flags.writeable = False
            return lhs, blocks[key]
        if not (lhs.type.is_block() and rhs.type.is_block()):
            return broadcast(lhs, rhs)
        key = id(lhs.shape), id(rhs.shape)  # of the kept types of blocks, which have their numbers' type too
        if key not in found:
            made = broadcast(lhs, rhs)
            if len(lhs.shape) == len(rhs.shape):
                found[key] = [None if new is old else new.type for new, old in zip(made, (lhs, rhs))]
            return made
        made = [
            one if kind is None else core.tensor(semantic.builder.create_broadcast(one.handle, kind.shape), kind)
            for one, kind in zip((lhs, rhs), found[key])
        ]
        return made[0], made[1]

    semantic.broadcast_impl_value = broadcast_once


def _quicken_operations(interpreter: Any) -> None:
    """A result of the numbers' own type needs no check of its size: its operand has had one. Functions of the language
    are called without detours."""
    operate, handle = interpreter.InterpreterBuilder.binary_op, interpreter.TensorHandle

    def operate_on_own_type(self: Any, lhs: Any, rhs: Any, act: Any) -> Any:
        out = act(lhs.data, rhs.data)
        if out.dtype is not lhs.data.dtype:
            return operate(self, lhs, rhs, act)
        made = handle.__new__(handle)
        made.data, made.dtype, made.attr = out, lhs.dtype.scalar, {}
        return made

    def patch_directly(holder: Any, name: str, member: Any, _builder: Any, scope: Any) -> None:
        """Without Triton's own wrapper, which asks again if it is inside a kernel."""
        act, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

        def act_in_interpreter(*arguments: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return act(*arguments, **named)

        scope.set_attr(holder, name, act_in_interpreter)

    interpreter.InterpreterBuilder.binary_op, interpreter._patch_attr = operate_on_own_type, patch_directly
