"""The host side: symbols of exported objects, the link step, descriptors, the library face."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ptx_emulator
from ptx_emulator import EmulatedFunction, NoCompiler, link, tma
from ptx_emulator.state import Launch

from .bare_ptx import text

pytestmark = pytest.mark.claim(
    "EMU-10", "the exported host code runs unchanged over the launch shim"
)

EXPECTED = {
    "CuteDSLRT_TVMFFISetRaisedCudaError",
    "_cuKernelGetAttribute",
    "_cudaDeviceGetAttribute",
    "_cudaFuncSetAttribute",
    "_cudaGetDevice",
    "_cudaKernelSetAttributeForDevice",
    "_cudaLaunchKernelEx",
    "_cudaLibraryGetKernel",
    "_cudaLibraryLoadData",
    "_cudaSetDevice",
    "cuda_dialect_init_library_once",
    "cuda_dialect_unload_library_once",
}


def exported(compiled: Any, folder: Path) -> bytes:
    path = folder / "kernel.o"
    compiled.export_to_c(str(path), function_name="emulated")
    return path.read_bytes()


def test_symbols_of_a_fresh_object(tmp_path: Path) -> None:
    """A DSL version that calls anything else, or stops calling something, fails here."""
    from .kernels import elementwise

    wanted = link.undefined_symbols(exported(elementwise.build(), tmp_path))
    wanted -= {"_GLOBAL_OFFSET_TABLE_"}
    assert wanted - link.FROM_TVM_FFI == EXPECTED
    assert wanted >= link.FROM_TVM_FFI
    assert link.shim_symbols() >= EXPECTED


def test_object_and_ptx_are_enough(tmp_path: Path) -> None:
    from .kernels import elementwise

    compiled = elementwise.build()
    f = ptx_emulator.load(exported(compiled, tmp_path), compiled.__ptx__, "emulated")
    a, b = torch.randn(300), torch.zeros(300)
    f(a, b)
    assert torch.equal(b, 2 * a)
    other = ptx_emulator.load(exported(compiled, tmp_path), compiled.__ptx__, "emulated")
    other(b, a)
    assert torch.equal(a, 2 * b)


def test_launch_facts(emulated: Callable[..., EmulatedFunction]) -> None:
    """Grid, block, shared memory and attributes are those that the host code asked for."""
    bf16 = torch.bfloat16
    a, b, c = (torch.zeros(s, dtype=bf16) for s in ((128, 64), (64, 64), (128, 64)))
    result = emulated("gemm_sm90")(a, b, c)
    (launch,) = result.launches
    assert isinstance(launch, Launch)
    assert launch.grid == (2, 1, 1)
    assert launch.block == (160, 1, 1)
    assert launch.dynamic_shared > 48 * 1024
    assert launch.max_dynamic_shared >= launch.dynamic_shared
    assert not launch.cooperative


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(
        NoCompiler, match=r"needs a C compiler .*'no-such-compiler' is not on the PATH"
    ):
        link.compiler()


def test_compiler_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "false")
    with pytest.raises(NoCompiler, match="failed with exit code 1"):
        link._compile(["-c"], tmp_path / "out.o")
    assert list(tmp_path.iterdir()) == []


def test_importing_the_package_imports_nothing_heavy() -> None:
    """The pytest plugin is loaded in every project's test run."""
    modules = ("torch", "numpy", "cutlass", "tvm_ffi", "linattn")
    code = (
        "import sys, ptx_emulator, ptx_emulator.pytest_provider;"
        f"print([m for m in {modules} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_run_refuses() -> None:
    with pytest.raises(ValueError, match="keep-ptx"):
        ptx_emulator.from_compiled(lambda: None)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        ptx_emulator.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"schedule": 3}, TypeError, r"got \['schedule'\], expected settings of \['memory'"),
        ({"checks": ("everything",)}, ValueError, "unknown checks"),
        ({"checks": "memcheck"}, TypeError, "checks: got 'memcheck', expected a list"),
        ({"seed": "x"}, TypeError, "seed: got 'x'"),
        ({"seed": True}, TypeError, "seed: got True"),
        ({"budget": None}, TypeError, "budget: got None"),
        ({"budget": 0}, ValueError, "budget: got 0, expected at least 1"),
    ],
)
def test_other_settings_are_refused(
    emulated: Callable[..., EmulatedFunction],
    settings: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        emulated("elementwise")(torch.zeros(4), torch.zeros(4), **settings)


def test_a_tensor_that_is_not_on_the_cpu(emulated: Callable[..., EmulatedFunction]) -> None:
    with pytest.raises(ValueError, match="argument 1: got a tensor on meta, expected one on the"):
        emulated("elementwise")(torch.zeros(4), torch.zeros(4, device="meta"))


def test_foreign_ptx_is_refused(emulated: Callable[..., EmulatedFunction]) -> None:
    f = emulated("elementwise").with_ptx(text("mov.b32 %o, 1;"))
    with pytest.raises(ptx_emulator.EmulationError, match="the PTX has no entry"):
        f(torch.zeros(4), torch.zeros(4))


HUGE = tuple(x * 2**24 for x in (0x7FFF, 0x6FFF, 0x5FFF, 0x4FFF))
DESCRIPTORS = [  # dtype, box, swizzle, shape, strides in elements, store
    ("BFloat16", (64, 8), 0, (1024, 512), (1, 1024), False),
    ("BFloat16", (16, 8), 1, (1024, 512), (1, 1024), False),
    ("BFloat16", (32, 8), 2, (1024, 512), (1, 1024), False),
    ("BFloat16", (64, 8), 3, (1024, 512), (1, 1024), True),
    ("BFloat16", (64, 4, 2, 1), 3, (128, 7, 5, 3), (1, 128, 1024, 8192), False),
    ("BFloat16", (64, 4, 2, 2, 1), 3, (1024, 512, 7, 5, 3), (1, *HUGE), False),
    ("Float32", (32, 8), 3, (1024, 512), (1, 1024), False),
    ("Float16", (64, 8), 3, (2**31 - 1, 512), (1, 2**31), False),
]
CODES = {"BFloat16": 10, "Float16": 6, "Float32": 7}


@pytest.mark.parametrize("case", DESCRIPTORS, ids=str)
def test_descriptors_of_the_host_code(
    case: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A freshly written TMA descriptor decodes to what was asked for."""
    import cutlass

    from ptx_emulator import launch as launch_module

    from .kernels import tma_touch

    name, box, swizzle, shape, strides, store = case
    f = ptx_emulator.from_compiled(tma_touch.build(getattr(cutlass, name), box, swizzle, store))
    base = torch.zeros(
        64, dtype={"BFloat16": torch.bfloat16, "Float16": torch.float16}.get(name, torch.float32)
    )
    keep: list[Any] = []
    monkeypatch.setattr(launch_module, "_argument", lambda x: made_up(base, shape, strides, keep))
    result = f(base)
    raw = result.launches[0].parameters[:128]
    t = tma.decode(raw[:64])
    size = base.element_size()
    assert (t.address, t.rank, t.dtype, t.swizzle) == (
        base.data_ptr(),
        len(box),
        CODES[name],
        swizzle,
    )
    assert t.strides == tuple(s * size for s in strides[1:])
    assert (t.dims, t.box) == (shape, box)


def made_up(
    base: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], keep: list[Any]
) -> Any:
    """A small buffer presented with arbitrary shape and strides (nothing is ever read)."""
    import ctypes

    import tvm_ffi

    from ptx_emulator.launch import _AsCuda, _capsule_pointer

    class Head(ctypes.Structure):
        _fields_ = (
            ("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("ndim", ctypes.c_int32),
            ("dtype", ctypes.c_uint32), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
        )  # fmt: skip

    sizes, steps = ((ctypes.c_int64 * len(x))(*x) for x in (shape, strides))
    keep += [sizes, steps]

    class MadeUp(_AsCuda):
        def __dlpack__(self, **_: object) -> object:
            capsule = super().__dlpack__()
            head = Head.from_address(_capsule_pointer(capsule, b"dltensor"))
            head.ndim = len(shape)
            head.shape, head.strides = ctypes.addressof(sizes), ctypes.addressof(steps)
            return capsule

    return tvm_ffi.from_dlpack(MadeUp(base))


def test_parameters_reach_the_kernel(emulated: Callable[..., EmulatedFunction]) -> None:
    """The address of an argument is in the parameter block as the host code put it there."""
    f = emulated("elementwise", "build_by_address")
    a, b = torch.zeros(4), torch.zeros(4)
    parameters = f(a, b.data_ptr(), memory=[b]).launches[0].parameters
    assert struct.pack("Q", b.data_ptr()) in parameters
