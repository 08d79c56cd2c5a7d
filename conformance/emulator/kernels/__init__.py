"""Small CuTe DSL kernels that the emulator is tried on; each module builds one."""

from __future__ import annotations

import tempfile
from typing import Any


def compile_kernel(function: Any, *fakes: Any, target: str = "sm_90a") -> Any:
    """`cute.compile` with what the emulator needs. Arguments are fake tensors, as for shipping."""
    from cutlass import cute

    options = f"--gpu-arch {target} --enable-tvm-ffi --keep-ptx --generate-line-info"
    with tempfile.TemporaryDirectory() as folder:
        return cute.compile(function, *fakes, options=f"{options} --dump-dir {folder}")


def fake(dtype: Any, *shape: Any) -> Any:
    """Row-major fake tensor, 16-byte aligned."""
    from cutlass.cute.runtime import make_fake_compact_tensor

    order = tuple(reversed(range(len(shape))))
    return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)


def stream() -> Any:
    """TVM-FFI's stream of the environment."""
    from cutlass.cute.runtime import make_fake_stream

    return make_fake_stream(use_tvm_ffi_env_stream=True)
