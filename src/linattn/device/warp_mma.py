"""Warp-level products of an FP32 state with bf16 tokens: the fragments of mma.sync m16n8k16.

Lane ``4 * g + t`` of a warp that owns 16 rows of the state holds rows ``2 g`` and ``2 g + 1``, and
of every 16 columns the four from ``4 t`` on: one 16-byte read each, and four lanes cover 64
adjacent bytes. As operands, those are rows ``g`` and ``g + 8`` and columns ``2 t``, ``2 t + 1``,
``2 t + 8``, ``2 t + 9``; the tokens are read with the same permutation of columns, which changes no
sum, because a product of 16 columns is one sum. Tokens are the columns of the result:

    result register 2 * h + p: row 2 g + h of the state, token 2 t + p

An FP32 number is the sum of three bf16 numbers exactly (each takes the next eight bits, truncated),
and a bf16 token is exact, so three products have no error but that of the tensor core's sums.
Exceptions: a state below 2^-110 loses bits that no result keeps, an infinite one gives NaN.
"""

from cutlass import Float32, Int32, Int64, cute

from linattn.device import memory, ptx
from linattn.spec.tiling import HEAD_DIM

ROWS = 16
"""Rows of the state that a warp owns."""
STEPS = 8
"""Products over 16 columns that make 128."""
MASK = -65536
TOKEN_WORDS = HEAD_DIM // 2 + 8
"""Words from one bf16 token to the next in shared memory: fragments then meet no bank twice."""


def lane_position(lane):
    """``(g, t)`` of a lane."""
    return lane // 4, lane % 4


def state_registers() -> cute.Tensor:
    """Uninitialised rows of a lane: (columns, 2); column register ``4 * c + j``."""
    return cute.make_rmem_tensor(cute.make_layout((4 * STEPS, 2)), Float32)


def state_at(address: Int64, offset: Int64, row, g, t) -> cute.Tensor:
    """A lane's part of the 16 rows from ``row`` on, of the state at ``offset`` elements."""
    layout = cute.make_layout(((4, STEPS), 2), stride=((1, 16), HEAD_DIM))
    return memory.floats(
        address, offset + (memory.extended(row + 2 * g) * HEAD_DIM + 4 * t), layout
    )


def load(source: cute.Tensor, state: cute.Tensor) -> None:
    """A lane's rows from memory: sixteen 16-byte reads that do not wait for one another."""
    cute.autovec_copy(source, _as_rows(state))


def store(state: cute.Tensor, target: cute.Tensor) -> None:
    """A lane's rows to memory, as 16-byte writes."""
    cute.autovec_copy(_as_rows(state), target)


def _as_rows(state: cute.Tensor) -> cute.Tensor:
    return cute.make_tensor(state.iterator, cute.make_layout(((4, STEPS), 2)))


def split(state: cute.Tensor, c: int) -> tuple:
    """The three A operands of columns ``16 c .. 16 c + 15``: high, middle and low bf16 parts."""
    parts = []
    rest = [[state[4 * c + j, h] for j in range(4)] for h in range(2)]
    for level in range(3):
        operand = [ptx.upper_halves(rest[h][2 * p], rest[h][2 * p + 1]) for p, h in FRAGMENT]
        parts.append(tuple(operand))
        if level < 2:
            rest = [
                [ptx.add_rn(x, -ptx.float_of(ptx.bits_of(x) & MASK)) for x in row] for row in rest
            ]
    return tuple(parts)


FRAGMENT = ((0, 0), (0, 1), (1, 0), (1, 1))
"""(pair of columns, row) of each register of an A operand."""


def token_registers() -> cute.Tensor:
    """Uninitialised bf16 pairs of one token: (pair, step)."""
    return cute.make_rmem_tensor(cute.make_layout((2, STEPS)), Int32)


def token_at(rows: memory.Rows, token, t) -> cute.Tensor:
    """A lane's columns of one token."""
    at = rows.at(token) + 4 * t
    return memory.pairs(rows.address, at, cute.make_layout((2, STEPS), stride=(1, 8)), 8)


def shared_token(shared: cute.Tensor, token, t) -> cute.Tensor:
    """The counterpart of ``token_at`` for tokens ``TOKEN_WORDS`` apart in shared memory."""
    layout = cute.make_layout((2, STEPS), stride=(1, 8))
    return cute.make_tensor((shared.iterator + (token * TOKEN_WORDS + 2 * t)).align(8), layout)


def columns_of(shared: cute.Tensor, row, t, part: int, factors: cute.Tensor) -> None:
    """A lane's columns of one row of a shared FP32 [token, column] table: half ``part`` of them."""
    layout = cute.make_layout((4, STEPS // 2), stride=(1, 16))
    at = row * HEAD_DIM + (HEAD_DIM // 2 * part + 4 * t)
    source = cute.make_tensor((shared.iterator + at).align(16), layout)
    target = cute.make_tensor(factors.iterator, cute.make_layout((4, STEPS // 2)))
    cute.autovec_copy(source, target)


def products(state: cute.Tensor, keys: cute.Tensor, queries: cute.Tensor) -> tuple:
    """``k_g . q_(2 t + p)`` for p = 0, 1, and ``state . q`` for every row of the warp and every
    token: four sums in result order.

    Tokens of the keys are rows of their product, padded with zeros. The three parts of the state
    have an accumulator each; their sum is ``(low + middle) + high``. One walk over the columns, so
    that the four chains of products overlap.
    """
    scores, zero = (Float32(0.0),) * 4, Int32(0)
    sums = [(Float32(0.0),) * 4 for _ in range(3)]
    for c in range(STEPS):
        b = (queries[0, c], queries[1, c])
        scores = ptx.mma_bf16(scores, (keys[0, c], zero, keys[1, c], zero), b)
        sums = [ptx.mma_bf16(acc, a, b) for acc, a in zip(sums, split(state, c))]
    high, middle, low = sums
    inter = [ptx.add_rn(ptx.add_rn(z, y), x) for x, y, z in zip(high, middle, low)]
    return scores[:2], inter
