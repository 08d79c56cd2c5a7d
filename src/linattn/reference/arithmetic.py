"""Bit models of the arithmetic that kernels use, vectorised and exact on any device.

``mma`` follows the published model of NVIDIA's tensor cores (arXiv 2511.10909) for bf16 operands
and float32 accumulators on Hopper and Blackwell. Every float64 operation that decides
a finite result is exact, so results do not depend on the machine that evaluates them.
"""

import torch

K_STEP = 16
"""Products that one bf16 instruction sums into an accumulator."""
FRACTION_BITS = 25
"""Bits kept below the largest exponent of a sum."""
SMALLEST_EXPONENT = -126


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """``a * b + c`` of float32 tensors with one rounding, to nearest even.

    The product is exact in float64. Their sum is rounded to odd, which makes the second rounding,
    to float32, the same as a single one.
    """
    product = a.double() * b.double()
    addend = c.double()
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(torch.int64)
    inexact_even = (error != 0) & (bits & 1 == 0) & total.isfinite()
    step = torch.where((error > 0) == (total > 0), 1, -1)
    return torch.where(inexact_even, bits + step, bits).view(torch.float64).float()


def mma(acc: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``acc + a @ b`` as bf16 tensor-core instructions chained over K compute it.

    ``acc`` float32, broadcast to ``[.., M, N]``; ``a [.., M, K]`` and ``b [.., K, N]`` float32
    holding bf16 values, with equal batch dimensions. K is cut into steps of 16 in ascending order;
    a shorter last step is as if padded with zeros. Returns a new float32 ``[.., M, N]``.

    In one step, the 16 products and the accumulator are aligned to the largest exponent among them
    (that of a product is the sum of its operands' exponents), truncated toward zero 25 bits below
    it, and added exactly; the sum is truncated toward zero to float32. NaN and infinity are those
    of an ordinary sum.
    """
    for start in range(0, a.shape[-1], K_STEP):
        step = slice(start, start + K_STEP)
        acc = _instruction(acc, a[..., step], b[..., step, :])
    return acc


def _instruction(acc: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """One fused sum per output element, over the whole K of the operands."""
    exponent_a, exponent_b = _exponent(a).transpose(-1, -2), _exponent(b)
    a64, b64, acc64 = a.double().transpose(-1, -2), b.double(), acc.double()
    top = _exponent(acc)
    for k in range(b.shape[-2]):
        row = exponent_a[..., k, :].unsqueeze(-1)
        top = torch.maximum(top, row + exponent_b[..., k, :].unsqueeze(-2))
    scale = _power_of_two(FRACTION_BITS - top)
    total = torch.trunc(acc64 * scale)
    for k in range(b.shape[-2]):
        product = a64[..., k, :].unsqueeze(-1) * b64[..., k, :].unsqueeze(-2)
        total += product.mul_(scale).trunc_()
    result = _toward_zero(total * _power_of_two(top - FRACTION_BITS))
    ordinary = acc64 + a.double() @ b64
    return torch.where(ordinary.isfinite(), result, ordinary.float())


def _exponent(x: torch.Tensor) -> torch.Tensor:
    """Binary exponent, at least -126; zero counts as -126."""
    exponent = torch.frexp(x).exponent - 1
    return torch.where(x == 0, SMALLEST_EXPONENT, exponent.clamp(min=SMALLEST_EXPONENT))


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """``2.0 ** exponent`` in float64, built from bits because ``pow`` may be inexact on a GPU."""
    return (exponent.to(torch.int64) + 1023).bitwise_left_shift(52).view(torch.float64)


def _toward_zero(x: torch.Tensor) -> torch.Tensor:
    """float64 to float32, truncated; magnitudes of 2^128 and more become infinite; zero is +0."""
    nearest = x.float()
    away = (nearest.double().abs() > x.abs()) & (x.abs() < 2.0**128)
    bits = nearest.view(torch.int32)
    return torch.where(away, bits - 1, bits).view(torch.float32) + 0.0
