"""Hand-written tensor-core kernels, and the layouts of their operands.

Shared memory is filled from an image that is laid out by the figures of the PTX ISA, independently
of the emulator's own index arithmetic. Each CTA takes one problem with an image, accumulators and
register operands of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

IMAGE = 48 * 1024
PLACE_B = 16 * 1024
K = {"bf16": 16, "f16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32}
BYTES = {"bf16": 2, "f16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1}
SPAN = {"none": 16, "32B": 32, "64B": 64, "128B": 128}
CODE = {"none": 0, "128B": 1, "64B": 2, "32B": 3}

TEMPLATE = """
.version 8.0
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 s[];
.visible .entry t(.param .u64 image, .param .u64 c, .param .u64 a, .param .u64 da, .param .u64 db)
.reqntid {threads}, 1, 1
{{
 .reg .pred %p; .reg .b32 %t, %g, %v, %w, %x, %r<132>, %a<4>;
 .reg .b64 %i, %l, %c, %da, %db, %A;
 mov.u32 %t, %tid.x;  mov.u32 %g, %ctaid.x;
 mov.b32 %v, s;  shl.b32 %w, %t, 4;  add.s32 %v, %v, %w;
 ld.param.b64 %i, [image];  mul.wide.u32 %l, %g, {image};  add.s64 %i, %i, %l;
 mul.wide.u32 %l, %t, 16;  add.s64 %i, %i, %l;  mov.b32 %x, 0;
 COPY: ld.global.v4.b32 {{%r0, %r1, %r2, %r3}}, [%i];
 st.shared.v4.b32 [%v], {{%r0, %r1, %r2, %r3}};
 add.s32 %v, %v, {step};  add.s64 %i, %i, {step};  add.s32 %x, %x, 1;
 setp.lt.u32 %p, %x, {steps};  @%p bra COPY;
 ld.param.b64 %da, [da];  ld.param.b64 %db, [db];
 mov.b32 %x, s;  shr.u32 %x, %x, 4;  cvt.u64.u32 %l, %x;  add.s64 %da, %da, %l;
  add.s64 %db, %db, %l;
 mad.lo.s32 %x, %g, {threads}, %t;
 ld.param.b64 %c, [c];  mul.wide.u32 %l, %x, {row};  add.s64 %c, %c, %l;
 ld.param.b64 %A, [a];  mul.wide.u32 %l, %x, 16;  add.s64 %A, %A, %l;
 ld.global.v4.b32 {{%a0, %a1, %a2, %a3}}, [%A];
 {loads}
 setp.ne.u32 %p, {scale}, 0;
 fence.proxy.async.shared::cta;  bar.sync 0;
 wgmma.fence.sync.aligned;
 wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{dtype}.{dtype} {{{accumulators}}}, {left}, %db,
   %p, 1, 1{trans};
 wgmma.commit_group.sync.aligned;  wgmma.wait_group.sync.aligned 0;
 {stores}
 ret;
}}
"""


def swizzled(address: np.ndarray, span: int) -> np.ndarray:
    """The number of a 16-byte chunk is XORed with that of its 128-byte line, in the bits that count
    a span.
    """
    chunk, line = address // 16, address // 128
    return (chunk ^ line % (span // 16)) * 16 + address % 16


def k_major(rows: int, columns: int, e: int, span: int, at: int) -> tuple[np.ndarray, int, int]:
    """(address of each element, leading offset, stride offset).

    Rows of a swizzle span each, groups of 8 one after the other. Without a swizzle, 8x16-byte core
    matrices: along k they lie `leading` apart, along the rows `stride`.
    """
    r, byte = np.arange(rows)[:, None], np.arange(columns)[None, :] * e
    if span == 16:
        leading, stride = 128, 8 * columns * e
        return at + r // 8 * stride + byte // 16 * leading + r % 8 * 16 + byte % 16, leading, stride
    return swizzled(at + r // 8 * 8 * span + r % 8 * span + byte, span), 0, 8 * span


def mn_major(rows: int, columns: int, e: int, span: int, at: int) -> tuple[np.ndarray, int, int]:
    """As `k_major`: lines of k, each a swizzle span of the other dimension;
    8 of them make an atom."""
    r, c, wide = np.arange(rows)[:, None], np.arange(columns)[None, :], span // e
    stride, leading = 8 * span, 8 * span * (columns // 8)
    inside = r // wide * leading + c // 8 * stride + c % 8 * span + r % wide * e
    return swizzled(at + inside, span), leading, stride


def accumulator_places(n: int) -> tuple[np.ndarray, np.ndarray]:
    """(rows, columns) of each thread's accumulator registers, from the ISA's figure of the D
    fragment.
    """
    t, j = np.arange(128)[:, None], np.arange(n // 2)[None, :]
    rows = t // 32 * 16 + t % 32 // 4 + 8 * (j // 2 % 2)
    return rows, j // 4 * 8 + t % 4 * 2 + j % 2


@dataclass(frozen=True)
class Form:
    """One form of wgmma. `left`: A in "shared" memory or "registers"; `scale` 0 ignores the
    accumulator.
    """

    dtype: str
    n: int
    left: str = "shared"
    swizzle_a: str = "128B"
    swizzle_b: str = "128B"
    major_a: str = "k"
    major_b: str = "k"
    scale: int = 1
    threads: int = 128

    def __str__(self) -> str:
        left = "registers" if self.left == "registers" else f"{self.major_a}-{self.swizzle_a}"
        return f"n{self.n}-{self.dtype}-{left}-{self.major_b}-{self.swizzle_b}"

    def _operand(self, which: str) -> tuple[np.ndarray, int]:
        """Addresses of the elements of A or B, and its matrix descriptor."""
        rows, at = (64, 0) if which == "a" else (self.n, PLACE_B)
        major, swizzle = getattr(self, f"major_{which}"), getattr(self, f"swizzle_{which}")
        layout = k_major if major == "k" else mn_major
        address, leading, stride = layout(rows, K[self.dtype], BYTES[self.dtype], SPAN[swizzle], at)
        descriptor = at >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | CODE[swizzle] << 62
        return address, descriptor

    def descriptors(self) -> tuple[int, int]:
        """Matrix descriptors relative to the image; the kernel adds where it lies."""
        return self._operand("a")[1], self._operand("b")[1]

    def images(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Shared memory of each problem; a (P, 64, K) and b (P, n, K) are operand bits."""
        e = BYTES[self.dtype]
        out = np.zeros((len(a), IMAGE // e), f"u{e}")
        for which, bits in (("a", a), ("b", b)):
            out[:, self._operand(which)[0] // e] = bits
        return out.view(np.uint8)

    def fragments(self, a: np.ndarray) -> np.ndarray:
        """The A operand as four 32-bit registers of each thread, (P, 128, 4)."""
        k, per = K[self.dtype], 4 // BYTES[self.dtype]
        out = np.zeros((len(a), 128, 4), np.uint32)
        t = np.arange(128)
        for j in range(4):
            row = t // 32 * 16 + t % 32 // 4 + 8 * (j % 2)
            column = j // 2 * (k // 2) + t % 4 * per
            picked = a[:, row[:, None], column[:, None] + np.arange(per)]
            out[:, :, j] = np.ascontiguousarray(picked).view(np.uint32)[..., 0]
        return out

    def pack(self, c: np.ndarray) -> np.ndarray:
        """Accumulators (P, 64, n) by thread and register, (P, 128, n / 2)."""
        rows, columns = accumulator_places(self.n)
        return np.ascontiguousarray(c[:, rows, columns])

    def unpack(self, held: np.ndarray) -> np.ndarray:
        rows, columns = accumulator_places(self.n)
        out = np.zeros((len(held), 64, self.n), np.float32)
        out[:, rows, columns] = held
        return out

    def ptx(self) -> str:
        registers = [f"%r{i}" for i in range(self.n // 2)]
        trans = ""
        if BYTES[self.dtype] == 2:
            flags = [self.major_b] if self.left == "registers" else [self.major_a, self.major_b]
            trans = "".join(f", {int(m == 'mn')}" for m in flags)
        step = 16 * self.threads
        return TEMPLATE.format(
            threads=self.threads, image=IMAGE, step=step, steps=IMAGE // step, scale=self.scale,
            row=4 * (self.n // 2), n=self.n, k=K[self.dtype], dtype=self.dtype, trans=trans,
            accumulators=", ".join(registers),
            left="%da" if self.left == "shared" else "{%a0, %a1, %a2, %a3}",
            loads=" ".join(f"ld.global.b32 {r}, [%c+{4 * i}];" for i, r in enumerate(registers)),
            stores=" ".join(f"st.global.b32 [%c+{4 * i}], {r};" for i, r in enumerate(registers)),
        )  # fmt: skip


MMA = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry t(.param .u64 in, .param .u64 out)
.reqntid 64, 1, 1
{{ .reg .b32 %t, %g, %r<12>; .reg .b64 %i, %l;
  mov.u32 %t, %tid.x;  mov.u32 %g, %ctaid.x;  mad.lo.s32 %t, %g, 64, %t;
  ld.param.b64 %i, [in];  mul.wide.u32 %l, %t, 40;  add.s64 %i, %i, %l;
  {loads}
  mma.sync.aligned.m16n8k{k}.row.col.f32.{dtype}.{dtype}.f32 {{%r6, %r7, %r8, %r9}}, {{{a}}},
    {{{b}}},
    {{%r6, %r7, %r8, %r9}};
  ld.param.b64 %i, [out];  mul.wide.u32 %l, %t, 16;  add.s64 %i, %i, %l;
  st.global.v4.b32 [%i], {{%r6, %r7, %r8, %r9}};  ret; }}
"""


@dataclass(frozen=True)
class WarpForm:
    """One form of mma.sync; each CTA of two warps takes two problems."""

    dtype: str
    k: int

    def __str__(self) -> str:
        return f"m16n8k{self.k}-{self.dtype}"

    def lanes(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        """Registers of every lane, (P * 32, 10): A, then B from 4 on, then C from 6 on."""
        per, problems = 4 // BYTES[self.dtype], len(a)
        out = np.zeros((problems, 32, 10), np.uint32)
        lane = np.arange(32)
        g, q = lane // 4, lane % 4
        for j in range(16 * self.k // per // 32):
            at = g[:, None] + 8 * (j % 2), (j // 2 * 4 * per + q * per)[:, None] + np.arange(per)
            out[:, :, j] = np.ascontiguousarray(a[:, at[0], at[1]]).view(np.uint32)[..., 0]
        for j in range(8 * self.k // per // 32):
            columns = (j * 4 * per + q * per)[:, None] + np.arange(per)
            out[:, :, 4 + j] = np.ascontiguousarray(b[:, g[:, None], columns]).view(np.uint32)[
                ..., 0
            ]
        for j in range(4):
            out[:, :, 6 + j] = c[:, g + 8 * (j // 2), 2 * q + j % 2].view(np.uint32)
        return out.reshape(-1, 10)

    def results(self, out: np.ndarray) -> np.ndarray:
        """(P, 16, 8) from the lanes' outputs."""
        held = out.reshape(-1, 32, 4)
        d = np.zeros((len(held), 16, 8), np.float32)
        g, q = np.arange(32) // 4, np.arange(32) % 4
        for j in range(4):
            d[:, g + 8 * (j // 2), 2 * q + j % 2] = held[:, :, j]
        return d

    def ptx(self) -> str:
        per = 4 // BYTES[self.dtype]
        na, nb = 16 * self.k // per // 32, 8 * self.k // per // 32
        return MMA.format(
            k=self.k, dtype=self.dtype,
            loads=" ".join(f"ld.global.b32 %r{i}, [%i+{4 * i}];" for i in range(10)),
            a=", ".join(f"%r{i}" for i in range(na)),
            b=", ".join(f"%r{4 + i}" for i in range(nb)),
        )  # fmt: skip


def operand_bits(x: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values -> operand bits of the type (truncated where that is enough)."""
    if dtype == "tf32":
        return x.view(np.uint32)
    if dtype == "bf16":
        return (x.view(np.uint32) >> 16).astype(np.uint16)
    if dtype == "f16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).view(np.uint16)
    # a byte of moderate exponent, with the value's sign and some of its mantissa
    bits = x.view(np.uint32)
    return ((bits >> 24 & 0x80) | 0x28 + (bits >> 16 & 0x1F)).astype(np.uint8)
