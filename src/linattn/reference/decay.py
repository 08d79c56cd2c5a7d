"""The decay factor ``exp(-s * n)`` in float32: the nearest one, and that of the kernels."""

import torch

from linattn.reference.arithmetic import fma

SMALLEST_NORMAL = 2.0**-126
LOG2_E = 1.4426950408889634
LN2_HIGH = 0.693145751953125
LN2_LOW = 1.42860682030941723212e-6
ROUND_TO_INTEGER = 12582912.0
UNDERFLOW = 88.0
TAYLOR = tuple(1.0 / factorial for factorial in (5040.0, 720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0))


def nearest_decay_factor(slope: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
    """float32 next to ``exp(-slope * distance)``, evaluated in float64; +0 below 2^-126.

    ``slope`` float32, ``distance`` of any integer dtype; they broadcast.
    """
    factor = torch.exp(-slope.double() * distance.double()).float()
    return torch.where(factor < SMALLEST_NORMAL, 0.0, factor)


def kernel_decay_factor(slope: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
    """The bits of ``linattn.device.decay.decay_factor``: the same operations in the same order.

    ``slope`` float32 and at least 0, ``distance`` integer in ``0 .. 2^24 - 1``; they broadcast.
    """
    n = distance.float() + torch.zeros_like(slope)
    slope = slope + torch.zeros_like(n)
    constants = (-LOG2_E, ROUND_TO_INTEGER, -LN2_HIGH, -LN2_LOW)
    log2_e, magic, ln2_high, ln2_low = (torch.full_like(slope, c) for c in constants)
    product = slope * n
    residue = fma(slope, n, -product)
    shifted = fma(product, log2_e, magic)
    exponent = shifted - magic
    r = fma(exponent, ln2_high, -product)
    r = fma(exponent, ln2_low, r) - residue
    value = torch.full_like(slope, TAYLOR[0])
    for coefficient in TAYLOR[1:]:
        value = fma(value, r, torch.full_like(slope, coefficient))
    power = shifted.view(torch.int32) - magic.view(torch.int32)
    bits = value.view(torch.int32) + (power << 23)
    result = bits.view(torch.float32)
    # Bits below those of the smallest normal number, negative ones included, are an underflow.
    result = torch.where(bits < 0x00800000, 0.0, result)
    result = torch.where(product > UNDERFLOW, 0.0, result)
    return torch.where(product.isnan(), product, result)
