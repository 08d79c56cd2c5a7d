"""The bits of single instructions: a GPU, where there is one, against the models; else the emulator
against them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from linattn.reference import instructions

from . import on_gpu
from .bare_ptx import buffer, machine_for
from .bare_ptx import launch as emulate
from .test_instruction_models import KINDS, floats
from .wgmma_ptx import IMAGE, Form, K, WarpForm, operand_bits

pytestmark = [pytest.mark.sm90, pytest.mark.bitwise]
OUTPUTS = 1 << 20
EMULATED_OUTPUTS = 1 << 13

EX2 = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry t(.param .u64 in, .param .u64 out)
.reqntid 256, 1, 1
{ .reg .b32 %t, %g, %x; .reg .b64 %i, %o, %l;
  mov.u32 %t, %tid.x;  mov.u32 %g, %ctaid.x;  mad.lo.s32 %t, %g, 256, %t;
  ld.param.b64 %i, [in];  ld.param.b64 %o, [out];  mul.wide.u32 %l, %t, 4;
  add.s64 %i, %i, %l;  add.s64 %o, %o, %l;
  ld.global.b32 %x, [%i];  ex2.approx.ftz.f32 %x, %x;  st.global.b32 [%o], %x;  ret; }
"""


def run(
    device: torch.device, ptx: str, arrays: Sequence[np.ndarray], integers: Sequence[int] = (), *,
    grid: int, threads: int, shared: int = 0,
) -> list[np.ndarray]:  # fmt: skip
    """Run a kernel that takes the arrays and then the integers;
    returns the arrays as it left them."""
    if device.type == "cuda":
        held = [torch.from_numpy(a.view(np.uint8)).to(device) for a in arrays]
        on_gpu.launch(ptx, "t", [*held, *integers], grid=grid, block=threads, shared=shared)
        return [h.cpu().numpy().view(a.dtype) for h, a in zip(held, arrays)]
    parameters = struct.pack(
        "Q" * (len(arrays) + len(integers)), *(a.ctypes.data for a in arrays), *integers
    )
    buffers = [buffer(f"array {i}", a) for i, a in enumerate(arrays)]
    machine = machine_for(ptx)
    emulate(machine, buffers, parameters, grid=(grid, 1, 1), threads=threads, shared=shared)
    assert not machine.findings
    return list(arrays)


def problems(device: torch.device, outputs: int, step: int = 1) -> int:
    """How many problems of so many outputs give enough outputs, a multiple of `step`."""
    wanted = OUTPUTS if device.type == "cuda" else EMULATED_OUTPUTS
    return -(-wanted // (outputs * step)) * step


def inputs(
    count: int, rows: tuple[int, int], k: int, dtype: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Operand bits and accumulators; the problems take turns through the kinds of operands."""
    rng = np.random.default_rng(count + k)
    tiny = 2.0**-16 if dtype == "f16" else 2.0**-128
    a, b, c = (np.zeros((count, m, n), np.float32) for m, n in ((rows[0], k), (rows[1], k), rows))
    for i, kind in enumerate(KINDS):
        for x, small in ((a, tiny), (b, tiny), (c, tiny * tiny)):
            x[i :: len(KINDS)] = floats(rng, x[i :: len(KINDS)].shape, kind, small)
    return operand_bits(a, dtype), operand_bits(b, dtype), c


def mismatches(got: np.ndarray, want: np.ndarray) -> int:
    """Outputs that differ in a bit; NaN equals NaN."""
    both = np.isnan(got) & np.isnan(want)
    return int(((got.view(np.uint32) != want.view(np.uint32)) & ~both).sum())


FORMS = [
    Form("bf16", 64),
    Form("bf16", 64, left="registers"),
    Form("bf16", 128, left="registers", major_b="mn"),
    Form("bf16", 256),
    Form("bf16", 256, left="registers", major_b="mn"),
    Form("bf16", 64, major_a="mn", major_b="mn"),
    Form("bf16", 64, swizzle_a="32B", swizzle_b="64B"),
    Form("bf16", 64, swizzle_a="none", swizzle_b="none"),
    Form("f16", 64),
    Form("f16", 128, left="registers"),
    Form("tf32", 64),
    Form("tf32", 128, left="registers"),
]


@pytest.mark.claim("EMU-20", "wgmma gives the bits of the tensor-core model")
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_wgmma(form: Form, device: torch.device, measured: Callable[..., None]) -> None:
    count = problems(device, 64 * form.n)
    a, b, c = inputs(count, (64, form.n), K[form.dtype], form.dtype)
    arrays = [form.images(a, b), form.pack(c), form.fragments(a)]
    _, held, _ = run(
        device, form.ptx(), arrays, form.descriptors(), grid=count, threads=128, shared=IMAGE
    )
    wide = instructions.widen(a, form.dtype), instructions.widen(b, form.dtype)
    want = np.stack([instructions.mma(x, y, z, form.dtype) for x, y, z in zip(*wide, c)])
    measured("outputs", want.size, better="higher")
    assert mismatches(form.unpack(held), want) == 0


WARP_FORMS = [
    WarpForm("bf16", 16),
    WarpForm("bf16", 8),
    WarpForm("f16", 16),
    WarpForm("tf32", 8),
    WarpForm("tf32", 4),
]


@pytest.mark.claim("EMU-21", "mma.sync gives the bits of the tensor-core model")
@pytest.mark.parametrize("form", WARP_FORMS, ids=str)
def test_mma_sync(form: WarpForm, device: torch.device, measured: Callable[..., None]) -> None:
    count = problems(device, 128, step=2)
    a, b, c = inputs(count, (16, 8), form.k, form.dtype)
    out = np.zeros((32 * count, 4), np.float32)
    lanes = form.lanes(a, b, c)
    _, out = run(device, form.ptx(), [lanes, out], grid=count // 2, threads=64)
    wide = instructions.widen(a, form.dtype), instructions.widen(b, form.dtype)
    want = np.concatenate(
        [
            instructions.mma(wide[0][i : i + 64], wide[1][i : i + 64], c[i : i + 64], form.dtype)
            for i in range(0, count, 64)
        ]
    )
    measured("outputs", want.size, better="higher")
    assert mismatches(form.results(out), want) == 0


@pytest.mark.claim("EMU-22", "ex2.approx.ftz gives the bits of its integer model")
def test_ex2(device: torch.device, measured: Callable[..., None]) -> None:
    """Every fraction of one binade, and random patterns of all exponents."""
    rng = np.random.default_rng(9)
    if device.type == "cuda":
        binade = (np.arange(1 << 23, dtype=np.uint32) + np.uint32(0x3F800000)).view(np.float32)
        patterns = rng.integers(0, 1 << 32, 1 << 23, dtype=np.uint32).view(np.float32)
        x = np.concatenate([binade, -binade, patterns])
    else:
        x = rng.integers(0, 1 << 32, EMULATED_OUTPUTS, dtype=np.uint32).view(np.float32)
    _, got = run(device, EX2, [x, np.zeros_like(x)], grid=len(x) // 256, threads=256)
    want = np.concatenate([instructions.ex2_approx_ftz(part) for part in np.array_split(x, 16)])
    measured("outputs", want.size, better="higher")
    assert mismatches(got, want) == 0
