"""A program with one planted fault for each tool of compute-sanitizer.

``python -m pytest_kernel_claims.planted memcheck`` launches one small kernel that does what the
tool is there to find. ``sanitizer`` runs it before the first test, in the same environment and
under the same command line as the tests: a tool that does not name the kernel sees nothing here,
and its "0 errors" for a test would mean nothing.

The kernels are PTX for any GPU since Volta, assembled by the driver; the memory is torch's, so
that a caching allocator which hides stray accesses is noticed as well.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence

THREADS = 64
BYTES = 400
"""Size of the one buffer; the stray store goes to ten times that."""

HEADER = """
.version 7.0
.target sm_70
.address_size 64
"""

MEMCHECK = """
.visible .entry planted_memcheck(.param .u64 buffer)
{
    .reg .u64 %address;
    .reg .u32 %value;
    ld.param.u64 %address, [buffer];
    cvta.to.global.u64 %address, %address;
    mov.u32 %value, 1;
    st.global.u32 [%address + 4000], %value;
    ret;
}
"""

# Every thread arrives at a barrier, the halves of a warp at two different ones: an error that a
# GPU without the tool survives.
SYNCCHECK = """
.visible .entry planted_synccheck(.param .u64 buffer)
{
    .reg .u64 %address;
    .reg .u32 %thread, %half;
    .reg .pred %upper;
    ld.param.u64 %address, [buffer];
    cvta.to.global.u64 %address, %address;
    mov.u32 %thread, %tid.x;
    and.b32 %half, %thread, 16;
    setp.ne.u32 %upper, %half, 0;
    @%upper bra UPPER;
    st.global.u32 [%address], %thread;
    bar.sync 0;
    st.global.u32 [%address + 8], %thread;
    bra END;
UPPER:
    st.global.u32 [%address + 4], %thread;
    bar.sync 0;
    st.global.u32 [%address + 12], %thread;
END:
    ret;
}
"""

RACECHECK = """
.visible .entry planted_racecheck(.param .u64 buffer)
{
    .shared .align 4 .b8 row[256];
    .reg .u64 %address, %offset;
    .reg .u32 %thread, %mine, %other, %base, %value;
    ld.param.u64 %address, [buffer];
    cvta.to.global.u64 %address, %address;
    mov.u32 %thread, %tid.x;
    mov.u32 %base, row;
    shl.b32 %mine, %thread, 2;
    xor.b32 %other, %mine, 128;
    add.u32 %mine, %mine, %base;
    add.u32 %other, %other, %base;
    st.shared.u32 [%mine], %thread;
    ld.volatile.shared.u32 %value, [%other];
    mul.wide.u32 %offset, %thread, 4;
    add.u64 %address, %address, %offset;
    st.global.u32 [%address], %value;
    ret;
}
"""

INITCHECK = """
.visible .entry planted_initcheck(.param .u64 buffer)
{
    .reg .u64 %address;
    .reg .u32 %value;
    ld.param.u64 %address, [buffer];
    cvta.to.global.u64 %address, %address;
    ld.global.u32 %value, [%address];
    add.u32 %value, %value, 1;
    st.global.u32 [%address + 4], %value;
    ret;
}
"""

KERNELS = {
    "memcheck": MEMCHECK,
    "synccheck": SYNCCHECK,
    "racecheck": RACECHECK,
    "initcheck": INITCHECK,
}


def entry(tool: str) -> str:
    """Name of the kernel, which a report of the fault contains."""
    return f"planted_{tool}"


def main(arguments: Sequence[str]) -> int:
    """Launch the kernel of one tool; the launch may fail, because the tool may end it."""
    import torch

    (tool,) = arguments
    buffer = torch.empty(BYTES // 4, dtype=torch.float32, device="cuda")
    driver = ctypes.CDLL("libcuda.so.1")
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    text = (HEADER + KERNELS[tool]).encode() + b"\0"
    _check(driver.cuModuleLoadData(ctypes.byref(module), text), "loading the kernel")
    name = entry(tool).encode()
    _check(driver.cuModuleGetFunction(ctypes.byref(function), module, name), "finding the kernel")
    address = ctypes.c_uint64(buffer.data_ptr())
    parameters = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(address), ctypes.c_void_p))
    shape = (1, 1, 1, THREADS, 1, 1)
    launched = driver.cuLaunchKernel(function, *shape, 0, None, parameters, None)
    _check(launched, "launching the kernel")
    driver.cuCtxSynchronize()
    return 0


def _check(code: int, what: str) -> None:
    if code:
        raise RuntimeError(f"{what}: got CUDA driver error {code}, expected 0")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
