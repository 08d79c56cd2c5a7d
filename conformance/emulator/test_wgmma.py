"""wgmma and mma.sync on hand-written PTX: operand layouts, and results against the scalar
tensor-core model.
"""

from __future__ import annotations

import struct

import numpy as np
import pytest

from linattn.reference import instructions
from ptx_emulator.errors import CHECKS, KernelFault

from . import oracles
from .bare_ptx import buffer, launch, machine_for
from .wgmma_ptx import BYTES, IMAGE, Form, K, WarpForm, operand_bits

pytestmark = pytest.mark.claim(
    "EMU-05", "tensor-core instructions read and write the right elements"
)


def operands(form: Form, problems: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(form.n)
    a, b = (
        operand_bits(
            rng.standard_normal((problems, m, K[form.dtype])).astype(np.float32), form.dtype
        )
        for m in (64, form.n)
    )
    return a, b, rng.standard_normal((problems, 64, form.n)).astype(np.float32)


def run(
    form: Form, a: np.ndarray, b: np.ndarray, c: np.ndarray, seed: int | None = None
) -> np.ndarray:
    image, held, fragments = form.images(a, b), form.pack(c), form.fragments(a)
    machine = machine_for(form.ptx(), CHECKS, seed)
    pointers = (x.ctypes.data for x in (image, held, fragments))
    buffers = [
        buffer("image", image, readonly=True), buffer("c", held),
        buffer("a", fragments, readonly=True),
    ]  # fmt: skip
    launch(
        machine, buffers, struct.pack("QQQQQ", *pointers, *form.descriptors()), grid=(len(a), 1, 1),
        threads=form.threads, shared=IMAGE,
    )  # fmt: skip
    assert not machine.findings
    return form.unpack(held)


FORMS = [
    Form("bf16", 64),
    Form("bf16", 128, left="registers"),
    Form("bf16", 256, left="registers", major_b="mn"),
    Form("bf16", 64, major_a="mn", major_b="mn"),
    Form("bf16", 8, swizzle_a="none", swizzle_b="none"),
    Form("bf16", 24, swizzle_a="32B", swizzle_b="64B"),
    Form("bf16", 64, swizzle_b="64B", major_b="mn"),
    Form("f16", 64, left="registers", swizzle_b="32B"),
    Form("f16", 32),
    Form("tf32", 64),
    Form("tf32", 16, left="registers"),
    Form("e4m3", 16),
    Form("e5m2", 16, left="registers"),
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_wgmma(form: Form) -> None:
    a, b, c = operands(form, 2)
    got = run(form, a, b, c)
    eight_bits = BYTES[form.dtype] == 1
    alignment = instructions.ALIGNMENT_FP8_HOPPER if eight_bits else instructions.ALIGNMENT
    wide = instructions.widen(a, form.dtype), instructions.widen(b, form.dtype)
    want = instructions.mma(*wide, c, form.dtype, alignment)
    assert (got.view(np.uint32) == want.view(np.uint32)).all()
    widths = (13, 13) if eight_bits else (25, 23)
    some = oracles.mma(wide[0][0, :8], wide[1][0, :8], c[0, :8, :8], form.dtype, *widths)
    assert (got[0, :8, :8].view(np.uint32) == some.view(np.uint32)).all()


def test_wgmma_can_ignore_the_accumulator() -> None:
    form = Form("bf16", 64, scale=0)
    a, b, c = operands(form)
    got = run(form, a, b, np.full_like(c, np.nan))
    wide = instructions.widen(a, "bf16"), instructions.widen(b, "bf16")
    assert (got == instructions.mma(*wide, np.zeros_like(c))).all()


def test_late_results_are_the_same() -> None:
    """Adversarial schedules hold results back over poisoned registers."""
    form = Form("bf16", 64)
    a, b, c = operands(form)
    want = run(form, a, b, c)
    assert all((run(form, a, b, c, seed) == want).all() for seed in range(4))


def test_part_of_a_warpgroup_is_refused() -> None:
    form = Form("bf16", 8, threads=64)
    with pytest.raises(KernelFault, match="whole warpgroup"):
        run(form, *operands(form))


WARP_FORMS = [
    WarpForm("bf16", 16),
    WarpForm("bf16", 8),
    WarpForm("f16", 16),
    WarpForm("tf32", 8),
    WarpForm("tf32", 4),
]


@pytest.mark.parametrize("form", WARP_FORMS, ids=str)
def test_mma_sync(form: WarpForm) -> None:
    """Two warps, each its own product."""
    rng = np.random.default_rng(form.k)
    a, b = (
        operand_bits(rng.standard_normal((2, m, form.k)).astype(np.float32), form.dtype)
        for m in (16, 8)
    )
    c = rng.standard_normal((2, 16, 8)).astype(np.float32)
    lanes, out = form.lanes(a, b, c), np.zeros((64, 4), np.float32)
    parameters = struct.pack("QQ", lanes.ctypes.data, out.ctypes.data)
    launch(
        machine_for(form.ptx()), [buffer("in", lanes), buffer("out", out)], parameters, threads=64
    )
    got = form.results(out)
    for w in range(2):
        wide = instructions.widen(a[w], form.dtype), instructions.widen(b[w], form.dtype)
        want = oracles.mma(*wide, c[w], form.dtype)
        assert (got[w].view(np.uint32) == want.view(np.uint32)).all()
