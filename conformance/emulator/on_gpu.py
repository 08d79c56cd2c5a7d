"""Runs hand-written PTX on a CUDA device through the driver, in torch's context."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


def _check(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"{what} failed with CUDA driver error {status}")


def launch(
    ptx: str,
    name: str,
    arguments: Sequence[Any],
    *,
    grid: int,
    block: int,
    shared: int = 0,
) -> None:
    """Compile and run one kernel on the current device and wait for it.

    Tensors are passed as their addresses, integers as 64-bit values.
    """
    torch.cuda.current_stream().synchronize()
    driver = ctypes.CDLL("libcuda.so.1")
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _check(driver.cuModuleLoadData(ctypes.byref(module), ptx.encode()), "cuModuleLoadData")
    try:
        found = driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode())
        _check(found, "cuModuleGetFunction")
        if shared > 48 * 1024:
            _check(
                driver.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared),
                "cuFuncSetAttribute",
            )
        values = [
            ctypes.c_uint64(a.data_ptr() if isinstance(a, torch.Tensor) else int(a))
            for a in arguments
        ]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        status = driver.cuLaunchKernel(
            function, grid, 1, 1, block, 1, 1, shared, stream, pointers, None
        )
        _check(status, "cuLaunchKernel")
        torch.cuda.synchronize()
    finally:
        driver.cuModuleUnload(module)
