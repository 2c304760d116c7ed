"""What one thread of a warp does with the tensor cores: 16-byte loads and the products of small integer matrices.

Tensors here are one number per thread: [32 * warps], thread after thread. Rows g = lane // 4 and g + 8 of the left
matrix and column g of the right one are in the registers of the four threads q = lane % 4 of that g (PTX ISA, "Matrix
Fragments for mma.m16n8k32" and "for mma.m16n8k8"): thread q holds columns 4q..4q+3 and 16 + 4q..16 + 4q + 3.
"""

import triton
import triton.language as tl

MAGIC: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 * 2^23: as a float32 its last bits count in ones
MAGIC_BITS: tl.constexpr = tl.constexpr(0x4B400000)  # an integer sum that starts here is the bits of MAGIC + the sum

if triton.knobs.runtime.interpret:  # the interpreter has no inline assembly

    @triton.jit
    def and_xor(a, b, c):
        """(a & b) ^ c."""
        return (a & b) ^ c

    @triton.jit
    def turn(word, places):
        """The word rotated left by `places` modulo 32."""
        bits = word.to(tl.uint32, bitcast=True)
        left = (places & 31).to(tl.uint32)
        right = (-places & 31).to(tl.uint32)
        return ((bits << left) | (bits >> right)).to(tl.int32, bitcast=True)

    @triton.jit
    def permute(low, high, selector):
        """The bytes of high:low, 0 to 7, that the selector's four nibbles name; 8 more: all bits as its highest."""
        none = low * 0 + high * 0 + selector * 0
        value = none
        for t in tl.static_range(4):
            nibble = (none + selector) >> (4 * t)
            byte = (tl.where((nibble & 4) == 0, none + low, none + high) >> (8 * (nibble & 3))) & 255
            value |= tl.where((nibble & 8) == 0, byte, (byte >> 7) * 255) << (8 * t)
        return value

    @triton.jit
    def multiply_add(a, b, c):
        """a * b + c, int32."""
        return a * b + c

    @triton.jit
    def count_bits(word):
        """How many bits are set."""
        bits = word - ((word >> 1) & 0x55555555)
        bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
        bits = (bits + (bits >> 4)) & 0x0F0F0F0F
        return ((bits * 0x01010101) >> 24) & 255

    @triton.jit
    def byte_of(word, at: tl.constexpr):
        """Byte number `at`, unsigned."""
        return (word >> (8 * at)) & 255

    @triton.jit
    def signed_byte_of(word, at: tl.constexpr):
        """Byte number `at`, signed."""
        return (word << (24 - 8 * at)) >> 24

    @triton.jit
    def load1(pointer):
        """An int32, whatever the pointer is of."""
        return tl.load(pointer.to(tl.pointer_type(tl.int32), bitcast=True))

    @triton.jit
    def load_long(pointer):
        """An int64, whatever the pointer is of."""
        return tl.load(pointer.to(tl.pointer_type(tl.int64), bitcast=True))

    @triton.jit
    def load4(pointer, KEEP: tl.constexpr):
        """Four consecutive int32 at a multiple of 16 bytes. KEEP: worth a place in L1."""
        return tl.load(pointer), tl.load(pointer + 1), tl.load(pointer + 2), tl.load(pointer + 3)

    @triton.jit
    def gather(table, index):
        """Numbers of a table in memory; of int16 ones only the lowest 16 bits count."""
        return tl.load(table + index).to(tl.int32)

    @triton.jit
    def fetch_line(pointer, mask):
        """Have the memory at `pointer` brought into L2, where `mask`; a hint."""
        pass

    @triton.jit
    def _products(a, b, BITS: tl.constexpr = -1):
        """[groups of 8, 8 rows, 8 columns]: sums over the four threads of a row of a's bytes times b's.

        Bytes are signed; those of a as unsigned ones with BITS = 255.
        """
        place = (tl.arange(0, 4) * 8)[None, :]
        left = tl.reshape(((a[:, None] << place) >> 24) & BITS, (a.shape[0] // 32, 8, 1, 16))
        right = tl.reshape((b[:, None] << place) >> 24, (a.shape[0] // 32, 1, 8, 16))
        return tl.sum(left * right, axis=3)

    @triton.jit
    def _spread(low, high):
        """Rows g and g + 8 of a product -> the four numbers of each thread: columns 2q and 2q + 1 of both."""
        low0, low1 = tl.split(tl.reshape(low, (low.shape[0], 8, 4, 2)))
        high0, high1 = tl.split(tl.reshape(high, (low.shape[0], 8, 4, 2)))
        count: tl.constexpr = low.shape[0] * 32
        return (tl.reshape(low0, (count,)), tl.reshape(low1, (count,)),
                tl.reshape(high0, (count,)), tl.reshape(high1, (count,)))  # fmt: skip

    @triton.jit
    def fused(a, b, c):
        """a * b + c, rounded once."""
        return (a.to(tl.float64) * b + c).to(tl.float32)

    @triton.jit
    def _raised(d0, d1, d2, d3):
        return (d0.to(tl.float32) + MAGIC, d1.to(tl.float32) + MAGIC, d2.to(tl.float32) + MAGIC,
                d3.to(tl.float32) + MAGIC)  # fmt: skip

    @triton.jit
    def raised_dot32(a0, a1, a2, a3, b0, b1):
        """Four float32: MAGIC plus the int8 product over 32 columns, exact below 2^22. a2, a3, b1: columns 16..31."""
        d0, d1, d2, d3 = _spread(_products(a0, b0) + _products(a2, b1), _products(a1, b0) + _products(a3, b1))
        return _raised(d0, d1, d2, d3)

    @triton.jit
    def raised_dot16(a0, a1, b0):
        """As `raised_dot32`, over 16 columns."""
        d0, d1, d2, d3 = _spread(_products(a0, b0), _products(a1, b0))
        return _raised(d0, d1, d2, d3)

    @triton.jit
    def dot16(a0, a1, b0):
        """Four int32: the int8 product over 16 columns."""
        return _spread(_products(a0, b0), _products(a1, b0))

    @triton.jit
    def start_less(excess: tl.constexpr, b0, b1):
        """Four int32 to start `dot_unsigned` with: MAGIC_BITS less `excess` times the sum of the int8 of a column."""
        a = tl.full(b0.shape, (-excess & 255) * 0x01010101 - (1 << 32), tl.int32)
        sums = _products(a, b0) + _products(a, b1)
        d0, d1, d2, d3 = _spread(sums, sums)
        return d0 + MAGIC_BITS, d1 + MAGIC_BITS, d2 + MAGIC_BITS, d3 + MAGIC_BITS

    @triton.jit
    def add_dot(a0, a1, a2, a3, b0, b1, c, UNSIGNED: tl.constexpr):
        """Four int32: c plus the product of int8, or of uint8 (a) and int8 (b), over 32 columns."""
        BITS: tl.constexpr = 255 if UNSIGNED else -1
        d0, d1, d2, d3 = _spread(
            _products(a0, b0, BITS) + _products(a2, b1, BITS), _products(a1, b0, BITS) + _products(a3, b1, BITS)
        )
        return c[0] + d0, c[1] + d1, c[2] + d2, c[3] + d3

    @triton.jit
    def dot_unsigned(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
        """Four float32, whose bits are c plus the product of uint8 (a) and int8 (b) over 32 columns."""
        d0, d1, d2, d3 = _spread(
            _products(a0, b0, 255) + _products(a2, b1, 255), _products(a1, b0, 255) + _products(a3, b1, 255)
        )
        return ((c0 + d0).to(tl.float32, bitcast=True), (c1 + d1).to(tl.float32, bitcast=True),
                (c2 + d2).to(tl.float32, bitcast=True), (c3 + d3).to(tl.float32, bitcast=True))  # fmt: skip

    @triton.jit
    def _outer(a, b):
        left = tl.reshape(a, (a.shape[0] // 32, 8, 1, 4))
        return tl.sum(left * tl.reshape(b, (a.shape[0] // 32, 1, 8, 4)), axis=3)

    @triton.jit
    def add_products(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
        """Four float32: c plus the product over 8 columns; thread q holds columns q (a0, a1, b0) and q + 4."""
        d0, d1, d2, d3 = _spread(_outer(a0, b0) + _outer(a2, b1), _outer(a1, b0) + _outer(a3, b1))
        return c0 + d0, c1 + d1, c2 + d2, c3 + d3

else:
    _PLACE = "{ .reg .b64 place; mul.wide.u32 place, $2, %d; add.s64 place, place, $1; ld.global.nc.%s $0, [place]; }"
    _GATHER2: tl.constexpr = tl.constexpr(_PLACE % (2, "u16"))
    _GATHER4: tl.constexpr = tl.constexpr(_PLACE % (4, "b32"))

    @triton.jit
    def and_xor(a, b, c):
        """(a & b) ^ c, one instruction also where b and c are constants."""
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0x6A;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
        )

    @triton.jit
    def turn(word, places):
        """The word rotated left by `places` modulo 32: one instruction, where the compiler makes it two shifts."""
        return tl.inline_asm_elementwise(
            "shf.l.wrap.b32 $0, $1, $1, $2;", "=r,r,r", [word, places], dtype=tl.int32, is_pure=True, pack=1
        )

    @triton.jit
    def permute(low, high, selector):
        """The bytes of high:low, 0 to 7, that the selector's four nibbles name; 8 more: all bits as its highest."""
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, selector], dtype=tl.int32, is_pure=True, pack=1
        )

    @triton.jit
    def multiply_add(a, b, c):
        """a * b + c, int32: one instruction, where the compiler makes shifts and sums, of which there are more."""
        return tl.inline_asm_elementwise(
            "mad.lo.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
        )

    @triton.jit
    def count_bits(word):
        """How many bits are set."""
        return tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1)

    @triton.jit
    def byte_of(word, at: tl.constexpr):
        """Byte number `at`, unsigned."""
        return permute(word, 0, 0x4440 + at)

    @triton.jit
    def signed_byte_of(word, at: tl.constexpr):
        """Byte number `at`, signed."""
        return permute(word, 0, 0x8880 + 0x1111 * at)

    # For each of the compiler's own loads it walks the whole kernel for every operation of it, to find a layout. That
    # was most of what compiling took. Numbers of one thread have but one layout, which a single load of its own, of a
    # row's scales, holds to the end: without any the tile is put together another way. Not pure, as those are: so the
    # machine code is the same.

    @triton.jit
    def load1(pointer):
        """An int32, whatever the pointer is of."""
        return tl.inline_asm_elementwise(
            "ld.global.b32 $0, [$1];", "=r,l", [pointer.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )

    @triton.jit
    def load_long(pointer):
        """An int64, whatever the pointer is of."""
        return tl.inline_asm_elementwise(
            "ld.global.b64 $0, [$1];", "=l,l", [pointer.to(tl.int64)], dtype=tl.int64, is_pure=False, pack=1
        )

    @triton.jit
    def load4(pointer, KEEP: tl.constexpr):
        """Four consecutive int32 at a multiple of 16 bytes. KEEP: worth a place in L1."""
        how: tl.constexpr = "ld.global.nc.v4.b32" if KEEP else "ld.global.nc.L1::no_allocate.v4.b32"
        kinds: tl.constexpr = (tl.int32, tl.int32, tl.int32, tl.int32)
        plain: tl.constexpr = how + " {$0, $1, $2, $3}, [$4];"
        return tl.inline_asm_elementwise(
            plain, "=r,=r,=r,=r,l", [pointer.to(tl.int64)], dtype=kinds, is_pure=True, pack=1
        )

    @triton.jit
    def gather(table, index):
        """Numbers of a table in memory; of int16 ones only the lowest 16 bits count.

        Addresses take one instruction, where the compiler's own way with an index takes two.
        """
        asm: tl.constexpr = _GATHER4 if table.dtype.element_ty == tl.int32 else _GATHER2
        return tl.inline_asm_elementwise(
            asm, "=r,l,r", [table.to(tl.int64), index], dtype=tl.int32, is_pure=True, pack=1
        )

    @triton.jit
    def fetch_line(pointer, mask):
        """Have the memory at `pointer` brought into L2, where `mask`; a hint."""
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
            "=r,l,r", [pointer.to(tl.int64), mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip

    @triton.jit
    def fused(a, b, c):
        """a * b + c, rounded once."""
        return tl.fma(a, b, c)

    @triton.jit
    def raised_dot32(a0, a1, a2, a3, b0, b1):
        """Four float32: MAGIC plus the int8 product over 32 columns, exact below 2^22. a2, a3 and b1: columns 16..31.

        The integer sums start at the bits of MAGIC, so they are the bits of that plus the sum as a float32.
        """
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 start;
            mov.b32 start, 0x4B400000;
            mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32
                {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {start, start, start, start};
            }""",
            "=f,=f,=f,=f,r,r,r,r,r,r",
            [a0, a1, a2, a3, b0, b1],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )

    @triton.jit
    def raised_dot16(a0, a1, b0):
        """As `raised_dot32`, over 16 columns."""
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 start;
            mov.b32 start, 0x4B400000;
            mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32
                {$0, $1, $2, $3}, {$4, $5}, {$6}, {start, start, start, start};
            }""",
            "=f,=f,=f,=f,r,r,r",
            [a0, a1, b0],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )

    @triton.jit
    def dot16(a0, a1, b0):
        """Four int32: the int8 product over 16 columns."""
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 zero;
            mov.b32 zero, 0;
            mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32
                {$0, $1, $2, $3}, {$4, $5}, {$6}, {zero, zero, zero, zero};
            }""",
            "=r,=r,=r,=r,r,r,r",
            [a0, a1, b0],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )

    @triton.jit
    def add_dot(a0, a1, a2, a3, b0, b1, c, UNSIGNED: tl.constexpr):
        """Four int32: c plus the product of int8, or of uint8 (a) and int8 (b), over 32 columns."""
        kinds: tl.constexpr = "u8.s8" if UNSIGNED else "s8.s8"
        what: tl.constexpr = "mma.sync.aligned.m16n8k32.row.col.s32." + kinds + ".s32 "
        asm: tl.constexpr = what + "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
        return tl.inline_asm_elementwise(
            asm,
            "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
            [a0, a1, a2, a3, b0, b1, c[0], c[1], c[2], c[3]],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )

    @triton.jit
    def start_less(excess: tl.constexpr, b0, b1):
        """Four int32 to start `dot_unsigned` with: MAGIC_BITS less `excess` times the sum of the int8 of a column."""
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 start;
            mov.b32 start, 0x4B400000;
            mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32
                {$0, $1, $2, $3}, {$4, $4, $4, $4}, {$5, $6}, {start, start, start, start};
            }""",
            "=r,=r,=r,=r,r,r,r",
            [(-excess & 255) * 0x01010101 - (1 << 32), b0, b1],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )

    @triton.jit
    def dot_unsigned(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
        """Four float32, whose bits are c plus the product of uint8 (a) and int8 (b) over 32 columns."""
        return tl.inline_asm_elementwise(
            """mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32
                {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};""",
            "=f,=f,=f,=f,r,r,r,r,r,r,r,r,r,r",
            [a0, a1, a2, a3, b0, b1, c0, c1, c2, c3],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )

    @triton.jit
    def add_products(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
        """Four float32: c plus the product over 8 columns; thread q holds columns q (a0, a1, b0) and q + 4.

        The tensor cores read the first 10 bits of a mantissa: those of a must be all, b is rounded to them.
        """
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 p, q;
            add.s32 p, $8, 0x1000;
            add.s32 q, $9, 0x1000;
            mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32
                {$0, $1, $2, $3}, {$4, $5, $6, $7}, {p, q}, {$10, $11, $12, $13};
            }""",
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
            [a0.to(tl.int32, bitcast=True), a1.to(tl.int32, bitcast=True), a2.to(tl.int32, bitcast=True),
             a3.to(tl.int32, bitcast=True), b0.to(tl.int32, bitcast=True), b1.to(tl.int32, bitcast=True),
             c0, c1, c2, c3],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )  # fmt: skip


@triton.jit
def dot32(a0, a1, a2, a3, b0, b1):
    """`raised_dot32` less MAGIC."""
    d0, d1, d2, d3 = raised_dot32(a0, a1, a2, a3, b0, b1)
    return d0 - MAGIC, d1 - MAGIC, d2 - MAGIC, d3 - MAGIC
