# mypy: ignore-errors
"""The reduction: `dst[i] = op(src_0[i], src_1[i], ...)`, in the order of the sources, in one pass.

Owns the arithmetic on the device, bit for bit that of `native/reduce_kernels.cpp`: 8- and 16-bit floats are combined
in fp32 and rounded once, integers wrap, an integer average truncates towards zero, a NaN wins MIN and MAX. Sums and
products give the NaN that x86 gives: the first operand that is one, made quiet, or the negative default NaN when two
numbers make it (inf - inf, 0 * inf). Where both operands are NaN the CPU's choice hangs on how a compiler vectorised
it, so there only "a NaN" is promised. Formats without a conversion that is the same everywhere (bf16, the 8-bit
floats) are decoded and encoded with integer operations. Which elements go where is the launcher's to say.

Legend: ELEMENT, the unsigned or signed integer an element is kept as; KIND, its format ("int", "float16", ...);
OP, "sum" ... "bxor"; NUM, the number of sources, 0 if they stand in a table; VEC, elements in 16 bytes.
Loops with a bound from an argument are `while` loops: Triton 3.6's interpreter can't run the others on NumPy 2.4.
"""

import triton
import triton.language as tl

#: Sources that travel as plain arguments; more stand in a table.
MOST_SCALARS = 8

_ADDRESSES = ("dst", "s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7", "table")
_COUNTS = ("num_sources", "head", "body_vectors", "rest")


# --- formats: an element as it is kept, and the value it is computed in ----------------------------------------------


@triton.jit
def _decode_tiny(raw, E: tl.constexpr, M: tl.constexpr, FNUZ: tl.constexpr, INF: tl.constexpr):
    """8-bit float to fp32. e4m3fn 0x38 -> 1.0; e5m2 0x01 -> 2**-16."""
    BIAS: tl.constexpr = (1 << (E - 1)) - (0 if FNUZ else 1)
    TINIEST: tl.constexpr = 2.0 ** (1 - BIAS - M)
    wide = raw.to(tl.uint32)
    magnitude = wide & 0x7F
    normal = (magnitude << (23 - M)) + ((127 - BIAS) << 23)
    subnormal = (magnitude.to(tl.float32) * TINIEST).to(tl.uint32, bitcast=True)
    bits = tl.where(magnitude < (1 << M), subnormal, normal)
    if INF:
        TOP: tl.constexpr = ((1 << E) - 1) << M
        bits = tl.where(magnitude == TOP, 0x7F800000, bits)
        bits = tl.where(magnitude > TOP, 0x7FC00000, bits)
    elif not FNUZ:
        bits = tl.where(magnitude == 0x7F, 0x7FC00000, bits)
    bits = bits | ((wide & 0x80) << 24)
    if FNUZ:
        bits = tl.where(wide == 0x80, 0x7FC00000, bits)
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def _encode_tiny(value, E: tl.constexpr, M: tl.constexpr, FNUZ: tl.constexpr, INF: tl.constexpr):
    """fp32 to 8-bit float, to nearest, ties to even. Too large: NaN for FNUZ, infinity where INF, else the largest."""
    BIAS: tl.constexpr = (1 << (E - 1)) - (0 if FNUZ else 1)
    LARGEST: tl.constexpr = 0x7F if FNUZ else ((((1 << E) - 1) << M) - 1 if INF else 0x7E)
    bits = value.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    a = (bits & 0x7FFFFFFF).to(tl.int32)
    exponent = (a >> 23) - 127
    scale = tl.maximum(exponent, 1 - BIAS)
    # `mantissa` is 24 bits of value; those below 2**shift are rounded off. 25 rounds everything to zero.
    mantissa = (a & 0x7FFFFF) | 0x800000
    shift = tl.minimum(23 - M + scale - exponent, 25)
    half = (tl.full(a.shape, 1, tl.int32) << (shift - 1)) - 1
    units = (mantissa + half + ((mantissa >> shift) & 1)) >> shift
    code = units + ((scale + BIAS - 1) << M)
    if FNUZ:
        out = tl.where(code == 0, 0, sign | code.to(tl.uint32))
        out = tl.where((code > LARGEST) | (a > 0x7F800000), 0x80, out)
    else:
        OVERFLOW: tl.constexpr = LARGEST + 1 if INF else LARGEST
        code = tl.where(code > LARGEST, OVERFLOW, code)
        code = tl.where(a > 0x7F800000, 0x7F, code)
        out = sign | code.to(tl.uint32)
    return out.to(tl.uint8)


@triton.jit
def _decode_half(raw):
    """fp16 to fp32; a NaN keeps its sign and payload and becomes quiet."""
    value = raw.to(tl.float16, bitcast=True).to(tl.float32)
    wide = raw.to(tl.uint32)
    nan = ((wide & 0x8000) << 16) | ((wide & 0x3FF) << 13) | 0x7FC00000
    is_nan = (wide & 0x7FFF) > 0x7C00
    return tl.where(is_nan, nan, value.to(tl.uint32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def _encode_half(value):
    bits = value.to(tl.uint32, bitcast=True)
    nan = ((bits >> 16) & 0x8000) | ((bits >> 13) & 0x3FF) | 0x7E00
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return tl.where(is_nan, nan.to(tl.uint16), value.to(tl.float16).to(tl.uint16, bitcast=True))


@triton.jit
def _encode_bfloat(value):
    bits = value.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded).to(tl.uint16)


@triton.jit
def decode(raw, KIND: tl.constexpr):
    """The value that an element is computed in: itself for integers, fp32 for floats of up to 32 bits."""
    if KIND == "int":
        return raw
    elif KIND == "float64":
        return raw.to(tl.float64, bitcast=True)
    elif KIND == "float32":
        return raw.to(tl.float32, bitcast=True)
    elif KIND == "float16":
        return _decode_half(raw)
    elif KIND == "bfloat16":
        return (raw.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif KIND == "float8_e4m3fn":
        return _decode_tiny(raw, 4, 3, False, False)
    elif KIND == "float8_e5m2":
        return _decode_tiny(raw, 5, 2, False, True)
    elif KIND == "float8_e4m3fnuz":
        return _decode_tiny(raw, 4, 3, True, False)
    else:
        tl.static_assert(KIND == "float8_e5m2fnuz")
        return _decode_tiny(raw, 5, 2, True, False)


@triton.jit
def encode(value, KIND: tl.constexpr):
    """What is kept of a value: rounded once, to nearest, ties to even."""
    if KIND == "int":
        return value
    elif KIND == "float64":
        return value.to(tl.uint64, bitcast=True)
    elif KIND == "float32":
        return value.to(tl.uint32, bitcast=True)
    elif KIND == "float16":
        return _encode_half(value)
    elif KIND == "bfloat16":
        return _encode_bfloat(value)
    elif KIND == "float8_e4m3fn":
        return _encode_tiny(value, 4, 3, False, False)
    elif KIND == "float8_e5m2":
        return _encode_tiny(value, 5, 2, False, True)
    elif KIND == "float8_e4m3fnuz":
        return _encode_tiny(value, 4, 3, True, False)
    else:
        tl.static_assert(KIND == "float8_e5m2fnuz")
        return _encode_tiny(value, 5, 2, True, False)


# --- operations ------------------------------------------------------------------------------------------------------


@triton.jit
def _as_x86(value, a, b):
    """`value` = a op b, with the NaN that x86 gives: GPUs keep no payload and have another default."""
    if value.dtype == tl.float64:
        x, y = a.to(tl.uint64, bitcast=True), b.to(tl.uint64, bitcast=True)
        nan = tl.where(b != b, y | 0x0008000000000000, 0xFFF8000000000000)
        nan = tl.where(a != a, x | 0x0008000000000000, nan)
        return tl.where(value != value, nan, value.to(tl.uint64, bitcast=True)).to(tl.float64, bitcast=True)
    else:
        x, y = a.to(tl.uint32, bitcast=True), b.to(tl.uint32, bitcast=True)
        nan = tl.where(b != b, y | 0x00400000, 0xFFC00000)
        nan = tl.where(a != a, x | 0x00400000, nan)
        return tl.where(value != value, nan, value.to(tl.uint32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def combine(a, b, OP: tl.constexpr, FLOAT: tl.constexpr):
    """One more source; `a` is what the earlier ones gave."""
    if OP == "sum" or OP == "avg":
        return _as_x86(a + b, a, b) if FLOAT else a + b
    elif OP == "product":
        return _as_x86(a * b, a, b) if FLOAT else a * b
    elif OP == "min":
        return tl.where((b < a) | (b != b), b, a) if FLOAT else tl.where(b < a, b, a)
    elif OP == "max":
        return tl.where((b > a) | (b != b), b, a) if FLOAT else tl.where(b > a, b, a)
    elif OP == "band":
        return a & b
    elif OP == "bor":
        return a | b
    else:
        tl.static_assert(OP == "bxor")
        return a ^ b


@triton.jit
def average(total, num_sources, FLOAT: tl.constexpr):
    """Exact division; integers truncate towards zero, a NaN stays what it is."""
    if FLOAT:
        if total.dtype == tl.float64:
            return tl.where(total != total, total, total / num_sources.to(tl.float64))
        else:
            return tl.where(total != total, total, tl.div_rn(total, num_sources.to(tl.float32)))
    elif total.dtype.primitive_bitwidth < 32:
        return (total.to(tl.int32) // num_sources).to(total.dtype)
    else:
        return total // num_sources.to(total.dtype)


# --- the kernel ------------------------------------------------------------------------------------------------------


@triton.jit
def _at(address, first, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer to element `first` of the array at `address`; ALIGNED promises 16 bytes."""
    pointer = (address + first * (ELEMENT.primitive_bitwidth // 8)).to(tl.pointer_type(ELEMENT))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _piece(
    dst, sources, table, num_sources, first, lanes, mask,
    ELEMENT: tl.constexpr, KIND: tl.constexpr, OP: tl.constexpr, NUM: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Reduces the elements `first + lanes` where `mask`. Every load stands before the store: dst may be a source."""
    FLOAT: tl.constexpr = KIND != "int"
    if NUM == 0:
        words = table.to(tl.pointer_type(tl.int64))
        acc = decode(tl.load(_at(tl.load(words), first, ELEMENT, ALIGNED) + lanes, mask=mask, other=0), KIND)
        k = 1
        while k < num_sources:
            raw = tl.load(_at(tl.load(words + k), first, ELEMENT, ALIGNED) + lanes, mask=mask, other=0)
            acc = combine(acc, decode(raw, KIND), OP, FLOAT)
            k += 1
    else:
        acc = decode(tl.load(_at(sources[0], first, ELEMENT, ALIGNED) + lanes, mask=mask, other=0), KIND)
        for k in tl.static_range(1, NUM):
            raw = tl.load(_at(sources[k], first, ELEMENT, ALIGNED) + lanes, mask=mask, other=0)
            acc = combine(acc, decode(raw, KIND), OP, FLOAT)
    if OP == "avg":
        acc = average(acc, num_sources, FLOAT)
    tl.store(_at(dst, first, ELEMENT, ALIGNED) + lanes, encode(acc, KIND), mask=mask)


@triton.jit(do_not_specialize=[*_ADDRESSES, *_COUNTS])
def reduce_kernel(
    dst: tl.int64,
    s0: tl.int64,
    s1: tl.int64,
    s2: tl.int64,
    s3: tl.int64,
    s4: tl.int64,
    s5: tl.int64,
    s6: tl.int64,
    s7: tl.int64,
    table: tl.int64,
    num_sources: tl.int32,
    head: tl.int64,
    body_vectors: tl.int64,
    rest: tl.int64,
    ELEMENT: tl.constexpr,
    KIND: tl.constexpr,
    OP: tl.constexpr,
    NUM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`dst[i] = op(s0[i], s1[i], ...)`; dst may be one of the sources, at the same address.

    Addresses are plain numbers. Elements lie as [head | body | tail]: the body is `body_vectors` times 16 bytes and
    begins, in every array, at a multiple of 16 bytes; head and tail together are `rest` elements and go one by one.
    Arrays that no common head aligns have an empty body. Any number of programs share the work.

    fp16, addresses that end in 0xA, 20 elements: head 3, body_vectors 2 (16 elements), rest 4 (3 and a tail of 1).
    """
    VEC: tl.constexpr = 128 // ELEMENT.primitive_bitwidth
    VECTORS: tl.constexpr = BLOCK // VEC
    sources = (s0, s1, s2, s3, s4, s5, s6, s7)
    lanes = tl.arange(0, BLOCK)
    program, num_programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    tile = program
    while tile * VECTORS < body_vectors:
        # A limit that is visibly a multiple of VEC keeps the masked accesses whole vectors.
        left = tl.minimum(body_vectors - tile * VECTORS, VECTORS).to(tl.int32) * VEC
        _piece(
            dst, sources, table, num_sources, head + tile * BLOCK, lanes, lanes < left,
            ELEMENT, KIND, OP, NUM, True,
        )  # fmt: skip
        tile += num_programs
    SMALL: tl.constexpr = 1024
    small = tl.arange(0, SMALL)
    tile = program
    while tile * SMALL < rest:
        index = tile * SMALL + small
        where = tl.where(index < head, index, index + body_vectors * VEC)
        _piece(
            dst, sources, table, num_sources, 0, where, index < rest,
            ELEMENT, KIND, OP, NUM, False,
        )  # fmt: skip
        tile += num_programs
