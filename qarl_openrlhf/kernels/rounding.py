"""Rounding steps that the kernels share, each bit-equal with what torch does on a CPU.

*Quotients of weights.* The reference rounds w / scale to float32 and then to BF16. Both operands have 8-bit significands, so
a quotient is never closer than 2^-17 (relative) to the middle of two BF16 numbers, and never on it (the middle has a 9-bit
odd significand T; T * scale = w would need a 9-bit w). Hence w * (1 / scale), whose error is below 2^-21, rounds to the
same BF16 number, and one division a group replaces one a weight. The same holds for amax * (1 / 7.5). Tested over all pairs
of significands. Denormal scales are lifted by 2^96 first, as their reciprocal would overflow.

*The interpreter* (TRITON_INTERPRET=1, used by tests on a CPU) truncates casts to BF16 and gets casts to e4m3 wrong without
an error, so there both are done on the bits.

*Integers.* Adding 1.5 * 2^23 to a small float32 rounds it half-to-even, and leaves the integer in its low bits.
"""

import triton
import triton.language as tl

from qarl_openrlhf.kernels.library import INTERPRETED

NATIVE = tl.constexpr(not INTERPRETED)
MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2**23, bits 0x4B400000


@triton.jit
def larger(a, b):
    """The larger of two, or NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def absmax(x, axis: tl.constexpr):
    """Largest magnitude along an axis; a NaN anywhere makes it NaN."""
    if NATIVE:
        return tl.reduce(tl.abs(x), axis, larger)
    return tl.max(tl.abs(x).to(tl.int32, bitcast=True), axis).to(tl.float32, bitcast=True)  # orders NaN last, too


@triton.jit
def widen(x):
    """float32 value of a BF16 x."""
    if NATIVE:
        return x.to(tl.float32)
    return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def narrow(x):
    """bf16(x) of a float32 x, rounding half to even."""
    if NATIVE:
        return x.to(tl.bfloat16)
    bits = x.to(tl.uint32, bitcast=True)
    bits = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), bits)
    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def round_bf16(x):
    """float32 value of bf16(x), x float32."""
    if NATIVE:  # two to an instruction; the compiler's own single conversions run at an eighth of that rate
        return tl.inline_asm_elementwise(
            "{.reg .b32 t; cvt.rn.bf16x2.f32 t, $3, $2; shl.b32 $0, t, 16; and.b32 $1, t, 0xffff0000;}",
            "=r,=r,r,r", [x], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    return widen(narrow(x))


@triton.jit
def weight_scale(amax, RECIPROCAL: tl.constexpr):
    """float32 value of bf16(amax / half_range), the eps of BF16 for zero; RECIPROCAL = 1 / half_range."""
    scale = widen(narrow(amax * RECIPROCAL))
    return tl.where(scale == 0.0, 0.0078125, scale)


@triton.jit
def quotient(w, scale):
    """float32 value of bf16(w / scale); w [A, B] BF16 values, scale [A, 1] (BF16 values)."""
    lift = tl.where(scale < 7.8886e-31, 79228162514264337593543950336.0, 1.0)  # below 2^-100: times 2^96
    return round_bf16((w * lift) * (1.0 / (scale * lift)))


@triton.jit
def to_e4m3(x):
    """Bits (uint8) and float32 value of the saturating e4m3fn cast of a float32 x."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(tl.abs(x), 448.0)
    coarse = magnitude.to(tl.int32, bitcast=True)
    coarse = (coarse + 0x7FFFF + ((coarse >> 20) & 1)) & -0x100000  # 3 fraction bits, half to even
    fine = (magnitude + 24576.0) - 24576.0  # 1.5 * 2^14: multiples of 2^-9, the spacing of e4m3's denormals
    small = magnitude < 0.015625
    value = tl.where(small, fine, coarse.to(tl.float32, bitcast=True))
    if NATIVE:
        # The value is not read back from the code: ptxas 12.8 miscompiles e4m3 -> f16 right after f32 -> e4m3.
        code = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        code = tl.where(small, (fine * 512.0).to(tl.int32), (coarse - 0x3C000000) >> 20)
        code = (code | ((bits >> 24) & 0x80)).to(tl.uint8)
    return code, (value.to(tl.int32, bitcast=True) | (bits & -0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def round_e4m3(x):
    """float32 value of e4m3fn(x) for float32 x within +-448; the sign of a zero is lost."""
    bits = x.to(tl.int32, bitcast=True)
    coarse = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    fine = (x + 24576.0) - 24576.0
    return tl.where(tl.abs(x) < 0.015625, fine, coarse.to(tl.float32, bitcast=True))


@triton.jit
def divide_bf16(x, scale):
    """x / scale, correctly rounded, for BF16 values x [A] and the fp8 scale (a scalar) of such a row.

    A reciprocal, a product and one correction, in place of ten instructions: equal to the division for all 128 * 128
    pairs of significands (tested).
    """
    if NATIVE:
        inverse = tl.div_rn(1.0, scale)
        estimate = x * inverse
        remainder = tl.fma(-estimate, scale + tl.zeros_like(x), x)
        return tl.where(x == 0.0, x, tl.fma(remainder, inverse + tl.zeros_like(x), estimate))  # keeps -0.0
    return tl.div_rn(x, scale + tl.zeros_like(x))
