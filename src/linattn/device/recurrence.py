"""The recurrence on a register tile of the state, in one place for every operator that steps it.

    S' = lam * S + v k^T

An element costs two roundings at most: the product of two bf16 numbers is exact in FP32 (but for
underflow and overflow), so ``S' = fma(S, lam, k * v)`` rounds once. The elements do not meet, so
neither the shape of the tile nor the lane that holds an element changes a bit.

Blackwell has two-wide FP32 arithmetic with the rounding of the scalar instructions: ``packed``
selects it.
"""

from cutlass import Float32, cute

from linattn.device import ptx


def advance(state, lam: Float32, keys, values, packed: bool, first: int = 0) -> None:
    """One token, in the columns that ``keys`` has: ``S[e, r] = fma(S[e, r], lam, k[e] * v[r])``.

    ``state`` is a register tensor of (columns, rows), ``keys`` (for the columns from ``first`` on)
    and ``values`` hold Float32.
    """
    for r in range(cute.size(state, mode=[1])):
        value = values[r]
        for i in range(0, cute.size(keys), 2):
            e = first + i
            pair = (state[e, r], state[e + 1, r])
            added = mul2((keys[i], keys[i + 1]), (value, value), packed)
            state[e, r], state[e + 1, r] = fma2(pair, (lam, lam), added, packed)


def fma2(a: tuple, b: tuple, c: tuple, packed: bool) -> tuple:
    """Two fused multiply-adds, rounded to nearest even."""
    if packed:
        return cute.arch.fma_packed_f32x2(a, b, c, rnd="rn", ftz=False)
    return tuple(ptx.fma_rn(x, y, z) for x, y, z in zip(a, b, c))


def mul2(a: tuple, b: tuple, packed: bool) -> tuple:
    """Two products, rounded to nearest even."""
    if packed:
        return cute.arch.mul_packed_f32x2(a, b, rnd="rn", ftz=False)
    return tuple(ptx.mul_rn(x, y) for x, y in zip(a, b))
