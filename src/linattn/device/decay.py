"""The decay factor ``exp(-s * n)``: one polynomial, one evaluation order, used by every operator.

The product ``s * n`` is kept as an unevaluated sum of two floats, so the error of the factor does
not grow with the distance ``n``. The exponential is range-reduced by ``ln 2`` and evaluated by its
Taylor polynomial of degree 7 in Horner form (truncation error below 6e-9 for |r| <= ln(2) / 2).
Results below 2^-126 are +0, so no subnormal number is ever made or used.

``linattn.reference.decay`` evaluates the same operations on the host, bit for bit.
"""

import cutlass
from cutlass import Float32, Int32, cute

from linattn.device import ptx

LOG2_E = 1.4426950408889634
LN2_HIGH = 0.693145751953125
"""Upper 15 bits of ln 2: its product with an integer of up to 8 bits is exact."""
LN2_LOW = 1.42860682030941723212e-6
ROUND_TO_INTEGER = 12582912.0
"""1.5 * 2^23: adding it rounds a float of magnitude below 2^22 to an integer."""
UNDERFLOW = 88.0
"""Above this exponent the result is below 2^-126 whatever the rounding."""
TAYLOR = tuple(1.0 / factorial for factorial in (5040.0, 720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0))
SMALLEST_NORMAL_BITS = 0x00800000


@cute.jit
def decay_factor(slope: Float32, distance: Int32) -> Float32:
    """``exp(-slope * distance)`` for ``slope >= 0`` and ``0 <= distance < 2**24``."""
    n = Float32(distance)
    product = ptx.mul_rn(slope, n)
    residue = ptx.fma_rn(slope, n, -product)
    shifted = ptx.fma_rn(product, Float32(-LOG2_E), Float32(ROUND_TO_INTEGER))
    exponent = ptx.add_rn(shifted, Float32(-ROUND_TO_INTEGER))
    r = ptx.fma_rn(exponent, Float32(-LN2_HIGH), -product)
    r = ptx.fma_rn(exponent, Float32(-LN2_LOW), r)
    r = ptx.add_rn(r, -residue)
    value = Float32(TAYLOR[0])
    for coefficient in cutlass.const_expr(TAYLOR[1:]):
        value = ptx.fma_rn(value, r, Float32(coefficient))
    power = ptx.bits_of(shifted) - ptx.bits_of(Float32(ROUND_TO_INTEGER))
    bits = ptx.bits_of(value) + (power << 23)
    if bits < SMALLEST_NORMAL_BITS:
        bits = Int32(0)
    result = ptx.float_of(bits)
    if product > UNDERFLOW:
        result = Float32(0.0)
    if product != product:
        result = product  # a NaN slope must not turn into a number
    return result
