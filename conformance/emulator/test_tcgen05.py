"""tcgen05 and tensor memory on hand-written PTX."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch

from linattn.reference import instructions
from ptx_emulator.errors import KernelFault, UnsupportedInstruction

from . import oracles
from .bare_ptx import Bench, buffer, launch, machine_for
from .tcgen05_ptx import TensorForm
from .test_hardware_bits import inputs, mismatches, problems, run
from .wgmma_ptx import IMAGE, K

MODEL = pytest.mark.claim("EMU-05", "tensor-core instructions read and write the right elements")
FORMS = [
    TensorForm("bf16", 128, 64),
    TensorForm("bf16", 64, 128),
    TensorForm("bf16", 128, 128, left="tensor"),
    TensorForm("bf16", 64, 64, left="tensor", major_b="mn"),
    TensorForm("f16", 128, 32, swizzle="64B"),
    TensorForm("tf32", 64, 64, left="tensor"),
    TensorForm("tf32", 128, 64),
]


def wanted(form: TensorForm, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    wide = instructions.widen(a, form.dtype), instructions.widen(b, form.dtype)
    c = c if form.scale else np.zeros_like(c)
    return np.stack([instructions.mma(x, y, z, form.dtype) for x, y, z in zip(*wide, c)])


def results(
    form: TensorForm, a: np.ndarray, b: np.ndarray, c: np.ndarray, device: torch.device
) -> np.ndarray:
    arrays = [form.images(a, b), form.pack(c), form.fragments(a)]
    held = run(
        device, form.ptx(), arrays, form.descriptors(), grid=len(a), threads=128, shared=IMAGE
    )[1]
    return form.unpack(held)


@MODEL
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_layouts(form: TensorForm) -> None:
    """A in shared and in tensor memory, M of 64 and 128, both majors of B."""
    a, b, c = inputs(2, (form.m, form.n), K[form.dtype], form.dtype)
    got = results(form, a, b, c, torch.device("cpu"))
    assert mismatches(got, wanted(form, a, b, c)) == 0
    wide = (instructions.widen(x[0, :8], form.dtype) for x in (a, b))
    some = oracles.mma(*wide, c[0, :8, :8], form.dtype)
    assert mismatches(got[0, :8, :8], some) == 0


@MODEL
def test_without_the_accumulator() -> None:
    form = TensorForm("bf16", 128, 64, scale=0)
    a, b, c = inputs(1, (128, 64), 16, "bf16")
    got = results(form, a, b, np.full_like(c, np.nan), torch.device("cpu"))
    assert mismatches(got, wanted(form, a, b, c)) == 0


@pytest.mark.sm100
@pytest.mark.bitwise
@pytest.mark.claim("EMU-23", "tcgen05.mma gives the bits of the tensor-core model")
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_bits(form: TensorForm, device: torch.device, measured: Callable[..., None]) -> None:
    count = problems(device, form.m * form.n)
    a, b, c = inputs(count, (form.m, form.n), K[form.dtype], form.dtype)
    want = wanted(form, a, b, c)
    measured("outputs", want.size, better="higher")
    assert mismatches(results(form, a, b, c, device), want) == 0


MOVE = """
  mov.b32 %v, s;  setp.ge.u32 %p, %t, 32;  @%p bra READY;
  tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%v], 64;
  READY: bar.sync 0;  ld.shared.b32 %w, [%v];  shr.u32 %x, %t, 5;  shl.b32 %x, %x, 21;
   add.s32 %w, %w, %x;
  {body}
  bar.sync 0;  @%p bra DONE;  ld.shared.b32 %w, [%v];
  tcgen05.dealloc.cta_group::1.sync.aligned.b32 %w, 64;
  DONE:"""
SHARED = ".shared .align 8 .b8 s[8];"
WRITE = (
    "tcgen05.st.sync.aligned.32x32b.x8.b32 [%w], {%a, %b, %c, %t, %a, %b, %c, %t}; "
    "tcgen05.wait::st.sync.aligned; "
)


def moved(body: str) -> Bench:
    bench = Bench(128)
    lane = np.arange(128)
    bench.set(a=1000 + lane, b=2000 + lane, c=3000 + lane)
    bench.run(MOVE.format(body=body), declarations=SHARED, target="sm_100a")
    return bench


@MODEL
@pytest.mark.parametrize(
    ("shape", "register", "place"),
    [
        ("32x32b.x2", 1, lambda t: (t, 1)),
        ("16x64b.x1", 0, None),
        ("16x128b.x1", 1, lambda t: (8 + t // 4, t % 4)),
        ("16x256b.x1", 2, lambda t: (8 + t // 4, 2 * (t % 4))),
        ("16x256b.x1", 1, lambda t: (t // 4, 2 * (t % 4) + 1)),
    ],
)
def test_load_shapes(
    shape: str, register: int, place: Callable[[int], tuple[int, int]] | None
) -> None:
    """Which (lane, column) a register of a thread receives."""
    count = {"32x32b.x2": 2, "16x64b.x1": 1, "16x128b.x1": 2, "16x256b.x1": 4}[shape]
    names = ["%x", "%y", "%z", "%c"][:count]
    loaded = ", ".join(names)
    body = WRITE + f"tcgen05.ld.sync.aligned.{shape}.b32 {{{loaded}}}, [%w];"
    body += f"tcgen05.wait::ld.sync.aligned; mov.b32 %o, {names[register]};"
    if place is None:
        with pytest.raises(UnsupportedInstruction, match="tensor-memory shape 16x64b"):
            moved(body)
        return
    bench = moved(body)
    assert bench.messages == []
    for t in range(128):
        lane, column = place(t % 32)
        lane += t // 32 * 32
        assert bench.outputs[t] == (1000, 2000, 3000, 0)[column % 4] + lane


@MODEL
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("add.s32 %w, %w, 2097152; " + WRITE, (
            "a warp of quarter 0 may not "
            "access tensor-memory lane 32"
        )),
        ("add.s32 %w, %w, 60; " + WRITE, r"tensor-memory columns \[60, 68\) are not allocated"),
        ((
            "@%p bra A; "
            "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %w, 32; A:"
        ), "tcgen05.dealloc of 32 columns at 0"),
        ((
            "@%p bra A; "
            "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%v+4], 48; A:"
        ), "alloc of 48 columns"),
        (
            ("@%p bra A; tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"
            "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%v+4], 32; A:"),
            "after relinquish_alloc_permit",
        ),
    ],
)  # fmt: skip
def test_misuse_of_tensor_memory(body: str, message: str) -> None:
    with pytest.raises(KernelFault, match=message):
        moved(body)


@MODEL
def test_uninitialised_and_unordered_tensor_memory() -> None:
    read = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%o}, [%w]; tcgen05.wait::ld.sync.aligned; "
    assert moved(read).messages == ["initcheck: read of uninitialised tensor memory"]
    early = moved(
        WRITE
        + (
            "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%o}, [%w]; "
            "add.s32 %o, %o, 1; tcgen05.wait::ld.sync.aligned; "
        )
    )
    assert early.messages == [
        "racecheck: registers of a tcgen05.ld are used before tcgen05.wait::ld"
    ]


@MODEL
def test_mma_before_its_operand_is_stored() -> None:
    """Without wait::st, the accumulator that tcgen05.st writes is not ordered before the tensor
    core.
    """
    form = TensorForm("bf16", 128, 64)
    a, b, c = inputs(1, (128, 64), 16, "bf16")
    arrays = [form.images(a, b), form.pack(c), form.fragments(a)]
    ptx = form.ptx().replace("tcgen05.wait::st.sync.aligned;", "")
    machine = machine_for(ptx)
    parameters = struct.pack("QQQQQ", *(x.ctypes.data for x in arrays), *form.descriptors())
    launch(
        machine,
        [buffer(str(i), x) for i, x in enumerate(arrays)],
        parameters,
        threads=128,
        shared=IMAGE,
    )
    assert {f.message for f in machine.findings} == {
        "tensor memory is used before a tcgen05.st on it is complete"
    }
