"""Tensor-core and tensor-memory instructions."""

from __future__ import annotations

import re

from ptx_emulator.emitter import Emitter
from ptx_emulator.errors import Unmodelled
from ptx_emulator.isa import op
from ptx_emulator.ptx import Address, Instr, Reg, Vector


@op(
    r"mma\.sync\.aligned\.m16n8k(?:8|16)\.row\.col\.f32\.(?:bf16\.bf16|f16\.f16)\.f32",
    r"mma\.sync\.aligned\.m16n8k[48]\.row\.col\.f32\.tf32\.tf32\.f32",
    leads=True,
)
def warp_mma(e: Emitter, i: Instr) -> None:
    e.whole(None)
    k, dtype = int(i.parts[3].rsplit("k", 1)[1]), i.parts[7]
    a, b, c = e.values(i.ops[1]), e.values(i.ops[2]), e.values(i.ops[3], "f32")
    e.emit(f"t=U.warp_mma({a},{b},{c},{k},{dtype!r})")
    e.spread(i.ops[0], "f32")


# ---- wgmma
@op(r"wgmma\.fence\.sync\.aligned", leads=True)
def wgmma_fence(e: Emitter, i: Instr) -> None:
    """Waits here until all 128 lanes of the warpgroup have arrived."""
    _whole_group(e)
    e.emit("U.wgmma_fence()")


@op(r"wgmma\.commit_group\.sync\.aligned")
def wgmma_commit(e: Emitter, i: Instr) -> None:
    e.emit(f"U.wgmma_commit({e.active})")


@op(r"wgmma\.wait_group\.sync\.aligned", leads=True, ends=True)
def wgmma_wait(e: Emitter, i: Instr) -> None:
    _whole_group(e)
    e.emit(f"U.wgmma_wait({e.integer(i.ops[0])},R,{e.active})")
    e.emit(f"return {e.next}")


def _whole_group(e: Emitter) -> None:
    e.emit(f"t=U.converge_group({e.active},{e.block})")
    e.emit("if t is not None: return t")


_FP8_APPROXIMATE = "fp8 on Hopper follows the public bit model, not compared with hardware"


@op(
    r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k32\.f32\.(?:e4m3|e5m2)\.(?:e4m3|e5m2)",
    approximate=_FP8_APPROXIMATE,
)
@op(
    r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.(?:bf16\.bf16|f16\.f16)",
    r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k8\.f32\.tf32\.tf32",
)
def wgmma(e: Emitter, i: Instr) -> None:
    """D, A (registers or descriptor), B descriptor, scale-d, -a, -b[, trans-a][, trans-b]"""
    m = re.match(r"m64n(\d+)k(\d+)", i.parts[4])
    if m is None or int(m[1]) % 8 or not 8 <= int(m[1]) <= 256:
        raise Unmodelled(f"wgmma shape {i.parts[4]}")
    if i.parts[-1] != i.parts[-2]:
        raise Unmodelled("wgmma with two operand types")
    n, k = int(m[1]), int(m[2])
    in_registers = isinstance(i.ops[1], Vector)
    a = e.values(i.ops[1]) if in_registers else e.get(i.ops[1], "b64")
    flags = [e.integer(o) for o in i.ops[4:]]
    if flags[:2] != [1, 1]:
        raise Unmodelled("wgmma with negated operands")
    trans = flags[2:]
    trans_a, trans_b = (trans[0], trans[1]) if len(trans) == 2 else (0, trans[0] if trans else 0)
    d = i.ops[0]
    if not isinstance(d, Vector) or len(d.items) != n // 2:
        raise Unmodelled("wgmma needs a full vector of accumulators")
    e.values(d, "f32")  # accumulators are float32 registers
    registers = tuple(_index(x) for x in d.items)
    sources = tuple(_index(x) for x in i.ops[1].items) if isinstance(i.ops[1], Vector) else ()
    scale = e.get(i.ops[3], "pred")
    e.emit(
        f"U.wgmma({registers},{a},{sources},{e.get(i.ops[2], 'b64')},{scale},{n},{k},"
        f"{i.parts[-1]!r},{trans_a},{trans_b},R,{e.active})"
    )


def _index(o: object) -> int:
    if not isinstance(o, Reg):
        raise Unmodelled("an accumulator must be a register")
    return o.index


# ---- tcgen05
_GROUP = r"cta_group::[12]"


@op(rf"tcgen05\.alloc\.{_GROUP}\.sync\.aligned\.shared::cta\.b32", leads=True)
def tmem_alloc(e: Emitter, i: Instr) -> None:
    e.whole(None)
    e.emit(f"U.tmem_alloc({e.shared_address(i.ops[0])},{e.get(i.ops[1], 'b32')},{e.active})")


@op(rf"tcgen05\.dealloc\.{_GROUP}\.sync\.aligned\.b32", leads=True)
def tmem_dealloc(e: Emitter, i: Instr) -> None:
    e.whole(None)
    e.emit(f"U.tmem_dealloc({e.get(i.ops[0], 'b32')},{e.get(i.ops[1], 'b32')},{e.active})")


@op(rf"tcgen05\.relinquish_alloc_permit\.{_GROUP}\.sync\.aligned", leads=True)
def tmem_relinquish(e: Emitter, i: Instr) -> None:
    e.whole(None)
    e.emit("U.tmem_relinquish()")


@op(
    rf"tcgen05\.commit\.{_GROUP}\.mbarrier::arrive::one(?:\.shared::cluster)?"
    r"(?:\.multicast::cluster)?\.b64"
)
def tmem_commit(e: Emitter, i: Instr) -> None:
    mask = e.get(i.ops[1], "b16") if len(i.ops) > 1 else "None"
    e.emit(f"U.tmem_commit({e.shared_address(i.ops[0])},{mask},{e.active})")


_SHAPE = r"(?:32x32b|16x64b|16x128b|16x256b)\.x\d+"


@op(rf"tcgen05\.ld\.sync\.aligned\.{_SHAPE}\.b32", leads=True)
def tmem_load(e: Emitter, i: Instr) -> None:
    e.whole(None)
    count = len(e.items(i.ops[0]))
    registers = tuple(x.index for x in e.items(i.ops[0]) if isinstance(x, Reg))
    address = e.address(i.ops[1], "b32")
    e.emit(f"t=U.tmem_load({address},{count},{i.parts[4]!r},{registers},{e.active})")
    e.spread(i.ops[0])


@op(rf"tcgen05\.st\.sync\.aligned\.{_SHAPE}\.b32", leads=True)
def tmem_store(e: Emitter, i: Instr) -> None:
    e.whole(None)
    address, values = e.address(i.ops[0], "b32"), e.values(i.ops[1])
    e.emit(f"U.tmem_store({address},{values},{i.parts[4]!r},{e.active})")


@op(r"tcgen05\.wait::(?:ld|st)\.sync\.aligned", leads=True, ends=True)
def tmem_wait(e: Emitter, i: Instr) -> None:
    e.whole(None)
    e.emit(f"U.tmem_wait({i.parts[1].endswith('ld')},{e.active})")
    e.emit(f"return {e.next}")


@op(r"tcgen05\.fence::(?:before|after)_thread_sync")
def tmem_fence(e: Emitter, i: Instr) -> None:
    """tcgen05 instructions run in order here; the ordering that the fence gives is that of the
    barrier beside it.
    """
    e.emit("pass")


@op(rf"tcgen05\.mma\.{_GROUP}\.kind::(?:f16|tf32)(?:\.collector::a::(?:discard|fill|use|lastuse))?")
def tmem_mma(e: Emitter, i: Instr) -> None:
    """[D], A descriptor or [A], B descriptor, instruction descriptor, disable-lane vector?,
    enable-input-d
    """
    d, a, b, descriptor = i.ops[:4]
    in_tmem = isinstance(a, Address)
    a_text = e.address(a, "b32") if in_tmem else e.get(a, "b64")
    disable = "None"
    rest = i.ops[4:]
    if isinstance(rest[0], Vector):
        disable = e.values(rest[0])
        rest = rest[1:]
    if len(rest) != 1:
        raise Unmodelled("tcgen05.mma with a scale of the input")
    kind = next(p for p in i.parts if p.startswith("kind::"))[6:]
    e.emit(
        f"U.tmem_mma({e.address(d, 'b32')},{a_text},{in_tmem},{e.get(b, 'b64')},"
        f"{e.get(descriptor, 'b32')},{disable},{e.get(rest[0], 'pred')},"
        f"{'cta_group::2' in i.parts},{kind!r},{e.active})"
    )
