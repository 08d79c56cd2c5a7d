"""A kernel that only takes a TMA descriptor: what the host code writes can be looked at."""

from __future__ import annotations

import math
from typing import Any

from cutlass import cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_tensor

from . import compile_kernel, stream


@cute.kernel
def touch(atom: cute.CopyAtom, t: cute.Tensor):
    lane, _, _ = cute.arch.thread_idx()
    if lane == 0:
        cpasync.prefetch_descriptor(atom)


def build(dtype: Any, box: tuple[int, ...], swizzle: int, store: bool) -> Any:
    """Compiled f(tensor): dimension 0 contiguous, the others with free strides."""

    def swizzled(inner):
        return cute.make_composed_layout(cute.make_swizzle(swizzle, 4, 3), 0, inner)

    @cute.jit
    def host(a: cute.Tensor, stream):
        strides = tuple(math.prod(box[:i]) for i in range(len(box)))
        inner = cute.make_layout(box, stride=strides)
        layout = swizzled(inner) if swizzle else inner
        op = cpasync.CopyBulkTensorTileS2GOp() if store else cpasync.CopyBulkTensorTileG2SOp()
        atom, t = cpasync.make_tiled_tma_atom(op, a, layout, box)
        touch(atom, t).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

    shape = tuple(cute.sym_int() for _ in box)
    divisor = 128 // dtype.width
    strides = (1, *(cute.sym_int64(divisibility=divisor) for _ in box[1:]))
    return compile_kernel(
        host, make_fake_tensor(dtype, shape, stride=strides, assumed_align=16), stream()
    )
