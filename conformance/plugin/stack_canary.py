"""Kernels with a planted fault each, compiled without a GPU.

``indexed`` reads a register array at an index known only at run time: it must live in local
memory (a stack frame, LDL and STL), although nothing is spilled. ``unbounded`` asks for registers
with setmaxnreg but does not state how many of its CTAs share an SM: ptxas ignores the request.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream


@cute.kernel
def indexed_kernel(source: cute.Tensor, target: cute.Tensor, index: cute.Tensor) -> None:
    thread, _, _ = cute.arch.thread_idx()
    held = cute.make_rmem_tensor(cute.make_layout(64), cutlass.Float32)
    for j in cutlass.range(64, unroll_full=True):
        held[j] = source[thread * 64 + j]
    total = cutlass.Float32(0.0)
    for j in cutlass.range_constexpr(8):
        total = total + held[index[j]]
    target[thread] = total


@cute.jit
def indexed(source: cute.Tensor, target: cute.Tensor, index: cute.Tensor, stream: Any) -> None:
    indexed_kernel(source, target, index).launch(grid=[1, 1, 1], block=[128, 1, 1], stream=stream)


@cute.kernel
def greedy_kernel(values: cute.Tensor) -> None:
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp < 4:
        cute.arch.setmaxregister_decrease(40)
        values[thread] = values[thread] + 1.0
    else:
        cute.arch.setmaxregister_increase(232)
        values[thread] = values[thread] * 2.0


@cute.jit
def greedy(values: cute.Tensor, min_blocks: cutlass.Constexpr, stream: Any) -> None:
    greedy_kernel(values).launch(
        grid=(1, 1, 1), block=(384, 1, 1), min_blocks_per_mp=min_blocks, stream=stream
    )


def _fake(dtype: Any, elements: int) -> Any:
    return make_fake_compact_tensor(dtype, (elements,), assumed_align=16)


def _compile(folder: Path, *arguments: Any) -> tuple[bytes, str]:
    options = f"--gpu-arch sm_90a --keep-cubin --keep-ptx --dump-dir {folder}"
    artifacts = cute.compile(*arguments, make_fake_stream(), options=options).artifacts
    return artifacts.CUBIN, artifacts.PTX


def compile_indexed(folder: Path) -> tuple[bytes, str]:
    """Cubin and PTX of the kernel that must use local memory."""
    floats = _fake(cutlass.Float32, 8192), _fake(cutlass.Float32, 128)
    return _compile(folder, indexed, *floats, _fake(cutlass.Int32, 8))


def compile_greedy(folder: Path, min_blocks: int) -> tuple[bytes, str]:
    """Cubin and PTX of the kernel whose setmaxnreg is honoured only with ``min_blocks`` 1."""
    return _compile(folder, greedy, _fake(cutlass.Float32, 384), min_blocks)
