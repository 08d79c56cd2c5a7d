"""The bit models behind the chunked reference, against rational arithmetic and the exponential."""

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch

from linattn.reference.arithmetic import fma, mma
from linattn.reference.decay import kernel_decay_factor, nearest_decay_factor

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.claim(
        "LA-REF-3",
        "the bit models agree with rational arithmetic, the decay factor with exp to 2 ulp",
    ),
]


def awkward(*shape: int, generator: torch.Generator, spread: int) -> torch.Tensor:
    """bf16 values in float32: exponents over ``spread`` binades, some zeros and some subnormals."""
    x = torch.randn(shape, generator=generator)
    x = x * 2.0 ** torch.randint(-spread, spread + 1, shape, generator=generator)
    x[torch.rand(shape, generator=generator) < 0.1] = 0.0
    x[torch.rand(shape, generator=generator) < 0.05] *= 2.0**-120
    return x.bfloat16().float()


def exponent(x: Fraction) -> int:
    """floor(log2 |x|), at least -126; -126 for zero."""
    if x == 0:
        return -126
    guess = abs(x).numerator.bit_length() - x.denominator.bit_length()
    while Fraction(2) ** guess > abs(x):
        guess -= 1
    while Fraction(2) ** (guess + 1) <= abs(x):
        guess += 1
    return max(guess, -126)


def truncated(x: Fraction, unit: Fraction) -> Fraction:
    return math.trunc(x / unit) * unit


def rational_step(acc: Fraction, a: list[Fraction], b: list[Fraction]) -> Fraction:
    """One instruction of the published model, in rational numbers."""
    tops = [exponent(x) + exponent(y) for x, y in zip(a, b)]
    unit = Fraction(2) ** (max([exponent(acc), *tops]) - 25)
    total = truncated(acc, unit) + sum(truncated(x * y, unit) for x, y in zip(a, b))
    return truncated(total, Fraction(2) ** (exponent(total) - 23))


@pytest.mark.parametrize("spread", [0, 3, 20, 60])
@pytest.mark.parametrize("k", [1, 16, 37])
def test_mma_follows_the_rational_model(k: int, spread: int) -> None:
    generator = torch.Generator().manual_seed(k + spread)
    a = awkward(6, k, generator=generator, spread=spread)
    b = awkward(k, 5, generator=generator, spread=spread)
    acc = torch.randn(6, 5, generator=generator) * 2.0**spread
    got = mma(acc, a, b)
    for i in range(6):
        for j in range(5):
            total = Fraction(acc[i, j].item())
            for start in range(0, k, 16):
                row, column = (
                    [Fraction(x) for x in y[start : start + 16].tolist()] for y in (a[i], b[:, j])
                )
                total = rational_step(total, row, column)
            assert Fraction(got[i, j].item()) == total


def test_mma_truncates_where_float32_would_round() -> None:
    ones = torch.ones(1, 1)
    tiny = torch.full((1, 1), 2.0**-24)
    assert mma(ones, tiny * 1.5, ones).item() == 1.0
    assert mma(-ones, -tiny * 1.5, ones).item() == -1.0
    assert (ones + tiny * 1.5).item() > 1.0


def test_mma_keeps_nan_infinity_and_positive_zero() -> None:
    zero, one = torch.zeros(1, 1), torch.ones(1, 1)
    inf = torch.full((1, 1), math.inf)
    largest = torch.full((1, 1), torch.finfo(torch.bfloat16).max)
    assert mma(inf, one, one).item() == math.inf
    assert mma(one, inf, -one).item() == -math.inf
    assert mma(one, inf, zero).isnan().item()
    assert mma(zero, largest, largest).item() == math.inf
    assert math.copysign(1.0, mma(-zero, -one, zero).item()) == 1.0


def test_mma_broadcasts_its_accumulator() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (awkward(2, 4, 4, generator=generator, spread=2) for _ in range(2))
    assert torch.equal(mma(torch.zeros(()), a, b), mma(torch.zeros(2, 4, 4), a, b))


def test_fma_rounds_once() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(4000, generator=generator) for _ in range(3))
    # A product on a float32 tie and an addend that decides it: two roundings go wrong here.
    a[:2000] = 1 + 2.0**-12
    b[:2000] = 1 + 2.0**-12
    c[:2000] *= 2.0**-60
    got = fma(a, b, c)
    twice = (a.double() * b.double() + c.double()).float()
    for x, y, z, result in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist()):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        below, above = (math.nextafter(result, side * math.inf) for side in (-1, 1))
        step = Fraction(2) ** (exponent(Fraction(result)) - 23)
        assert abs(exact - Fraction(result)) <= step / 2
        assert below < result < above
    assert not torch.equal(got, twice)


def ulps(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Distance of positive float32 values in units of the last place."""
    return (got.view(torch.int32) - expected.view(torch.int32)).abs()


def test_kernel_decay_factor_is_the_exponential() -> None:
    slopes = torch.cat((torch.linspace(0, 8, 1601), torch.logspace(-12, 1, 400)))[:, None]
    distances = torch.arange(65)
    got, expected = kernel_decay_factor(slopes, distances), nearest_decay_factor(slopes, distances)
    normal = expected > 0
    assert ulps(got, expected)[normal].max() <= 2
    # Only next to 2^-126 may one be flushed and the other not.
    assert got[~normal].max() <= 2.0**-126 * (1 + 2.0**-22)


@pytest.mark.parametrize("factor", [kernel_decay_factor, nearest_decay_factor])
def test_decay_factor_at_its_ends(
    factor: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    slopes = torch.tensor([0.0, 1.0, 87.0, 87.3, 87.4, 88.5, 1e4, 3e38])
    assert factor(slopes, torch.tensor(0)).tolist() == [1.0] * 8
    once = factor(slopes, torch.tensor(1))
    assert once[0] == 1.0
    assert (once[1:4] > 0).all()
    assert once[4:].tolist() == [0.0] * 4
    assert not once[4:].signbit().any()
    assert factor(torch.tensor(math.nan), torch.tensor(3)).isnan().item()
