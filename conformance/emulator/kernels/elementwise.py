"""b = 2 a, and a variant that takes the output by address."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int64, cute

from . import compile_kernel, fake, stream

THREADS = 128


@cute.kernel
def scale_kernel(a: cute.Tensor, b: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * THREADS + thread
    if i < cute.size(a):
        b[i] = a[i] * 2.0


@cute.jit
def scale(a: cute.Tensor, b: cute.Tensor, stream):
    blocks = cute.ceil_div(cute.size(a), THREADS)
    scale_kernel(a, b).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream)


@cute.jit
def scale_to_address(a: cute.Tensor, address: Int64, stream):
    pointer = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4)
    b = cute.make_tensor(pointer, cute.make_layout(cute.size(a)))
    blocks = cute.ceil_div(cute.size(a), THREADS)
    scale_kernel(a, b).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream)


def build() -> Any:
    """Compiled f(a, b): float32 vectors of one length."""
    n = cute.sym_int()
    return compile_kernel(scale, fake(cutlass.Float32, n), fake(cutlass.Float32, n), stream())


def build_by_address() -> Any:
    """Compiled f(a, address of b)."""
    n = cute.sym_int()
    return compile_kernel(scale_to_address, fake(cutlass.Float32, n), Int64(0), stream())
