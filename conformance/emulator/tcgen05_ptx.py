"""A hand-written Blackwell kernel: one tcgen05.mma per CTA, accumulators through tensor memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .wgmma_ptx import BYTES, IMAGE, PLACE_B, SPAN, K, k_major, mn_major

LAYOUT = {"none": 0, "128B": 2, "64B": 4, "32B": 6}
FORMAT = {"f16": 0, "bf16": 1, "tf32": 2}

TEMPLATE = """
.version 8.7
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 s[];
.shared .align 8 .b8 barrier[8];
.shared .align 4 .b8 place[4];
.visible .entry t(.param .u64 image, .param .u64 c, .param .u64 a, .param .u64 da, .param .u64 db)
.reqntid 128, 1, 1
{{
 .reg .pred %p, %q; .reg .b32 %t, %g, %v, %w, %x, %y, %d, %id, %z, %b, %r<256>, %k<8>;
 .reg .b64 %i, %l, %c, %da, %db, %A;
 mov.u32 %t, %tid.x;  mov.u32 %g, %ctaid.x;  mov.b32 %b, barrier;  mov.b32 %y, place;
 setp.ne.b32 %p, %t, 0;  @%p bra READY;  mbarrier.init.shared.b64 [%b], 1;
 fence.mbarrier_init.release.cluster;
 READY: shr.u32 %w, %t, 5;  setp.ne.b32 %q, %w, 0;  @%q bra ALLOCATED;
 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%y], 512;
 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
 ALLOCATED: mov.b32 %v, s;  shl.b32 %x, %t, 4;  add.s32 %v, %v, %x;
 ld.param.b64 %i, [image];  mul.wide.u32 %l, %g, {image};  add.s64 %i, %i, %l;
 mul.wide.u32 %l, %t, 16;  add.s64 %i, %i, %l;  mov.b32 %x, 0;
 COPY: ld.global.v4.b32 {{%r0, %r1, %r2, %r3}}, [%i];
 st.shared.v4.b32 [%v], {{%r0, %r1, %r2, %r3}};
 add.s32 %v, %v, 2048;  add.s64 %i, %i, 2048;  add.s32 %x, %x, 1;
 setp.lt.u32 %q, %x, {steps};  @%q bra COPY;
 fence.proxy.async.shared::cta;  bar.sync 0;
 tcgen05.fence::after_thread_sync;
 ld.shared.b32 %d, [%y];  shl.b32 %x, %w, 21;  add.s32 %d, %d, %x;
 mad.lo.s32 %x, %g, 128, %t;
 ld.param.b64 %c, [c];  mul.wide.u32 %l, %x, {row};  add.s64 %c, %c, %l;
 {loads}
 tcgen05.st.sync.aligned.32x32b.x{n}.b32 [%d], {{{accumulators}}};
 ld.param.b64 %A, [a];  mul.wide.u32 %l, %x, 32;  add.s64 %A, %A, %l;
 ld.global.v4.b32 {{%k0, %k1, %k2, %k3}}, [%A];  ld.global.v4.b32 {{%k4, %k5, %k6, %k7}}, [%A+16];
 tcgen05.st.sync.aligned.32x32b.x8.b32 [%d+256], {{%k0, %k1, %k2, %k3, %k4, %k5, %k6, %k7}};
 tcgen05.wait::st.sync.aligned;
 tcgen05.fence::before_thread_sync;  bar.sync 0;
 @%p bra WAIT;
 tcgen05.fence::after_thread_sync;
 ld.param.b64 %da, [da];  ld.param.b64 %db, [db];
 mov.b32 %x, s;  shr.u32 %x, %x, 4;  cvt.u64.u32 %l, %x;  add.s64 %da, %da, %l;
  add.s64 %db, %db, %l;
 mov.b32 %id, {instruction};  ld.shared.b32 %x, [%y];
 add.s32 %z, %x, 256;  setp.ne.u32 %q, {scale}, 0;
 tcgen05.mma.cta_group::1.kind::{kind} [%x], {left}, %db, %id, %q;
 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%b];
 WAIT: mbarrier.try_wait.parity.shared.b64 %q, [%b], 0;  @!%q bra WAIT;
 tcgen05.fence::after_thread_sync;
 tcgen05.ld.sync.aligned.32x32b.x{n}.b32 {{{accumulators}}}, [%d];
 tcgen05.wait::ld.sync.aligned;
 {stores}
 tcgen05.fence::before_thread_sync;  bar.sync 0;
 setp.ne.b32 %q, %w, 0;  @%q bra FREED;  ld.shared.b32 %x, [%y];
 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %x, 512;
 FREED: ret;
}}
"""


@dataclass(frozen=True)
class TensorForm:
    """One form of tcgen05.mma with one CTA. `left`: A in "shared" memory or in "tensor" memory."""

    dtype: str
    m: int
    n: int
    left: str = "shared"
    swizzle: str = "128B"
    major_b: str = "k"
    scale: int = 1

    def __str__(self) -> str:
        return f"m{self.m}n{self.n}-{self.dtype}-{self.left}-{self.major_b}-{self.swizzle}"

    def _operand(self, which: str) -> tuple[np.ndarray, int]:
        rows, at = (self.m, 0) if which == "a" else (self.n, PLACE_B)
        layout = mn_major if which == "b" and self.major_b == "mn" else k_major
        k, e = K[self.dtype], BYTES[self.dtype]
        address, leading, stride = layout(rows, k, e, SPAN[self.swizzle], at)
        fields = at >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | 1 << 46
        return address, fields | LAYOUT[self.swizzle] << 61

    def descriptors(self) -> tuple[int, int]:
        """Matrix descriptors relative to the image; the kernel adds where it lies."""
        return self._operand("a")[1], self._operand("b")[1]

    def images(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        e = BYTES[self.dtype]
        out = np.zeros((len(a), IMAGE // e), f"u{e}")
        for which, bits in (("a", a), ("b", b)):
            out[:, self._operand(which)[0] // e] = bits
        return out.view(np.uint8)

    @property
    def lanes(self) -> np.ndarray:
        """Tensor-memory lane of each accumulator row."""
        row = np.arange(self.m)
        return row if self.m == 128 else row // 16 * 32 + row % 16

    def fragments(self, a: np.ndarray) -> np.ndarray:
        """The A operand in tensor memory: 8 words of 32 bits a lane, (P, 128, 8)."""
        out = np.zeros((len(a), 128, 8), np.uint32)
        out[:, self.lanes] = np.ascontiguousarray(a).view(np.uint32)
        return out

    def pack(self, c: np.ndarray) -> np.ndarray:
        out = np.full((len(c), 128, self.n), np.nan, np.float32)
        out[:, self.lanes] = c
        return out

    def unpack(self, held: np.ndarray) -> np.ndarray:
        return held[:, self.lanes]

    def ptx(self) -> str:
        registers = [f"%r{i}" for i in range(self.n)]
        code = FORMAT[self.dtype]
        instruction = 1 << 4 | code << 7 | code << 10 | self.n // 8 << 17 | self.m // 16 << 24
        instruction |= int(self.major_b == "mn") << 16
        return TEMPLATE.format(
            image=IMAGE, steps=IMAGE // 2048, row=4 * self.n, n=self.n, scale=self.scale,
            accumulators=", ".join(registers), instruction=instruction,
            kind="tf32" if self.dtype == "tf32" else "f16",
            left="%da" if self.left == "shared" else "[%z]",
            loads=" ".join(f"ld.global.b32 {r}, [%c+{4 * i}];" for i, r in enumerate(registers)),
            stores=" ".join(f"st.global.b32 [%c+{4 * i}], {r};" for i, r in enumerate(registers)),
        )  # fmt: skip
