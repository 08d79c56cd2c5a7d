"""TMA and bulk copies on hand-written PTX: boxes, edges, swizzles, reductions, multicast,
descriptor edits.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from ptx_emulator import tma
from ptx_emulator.errors import KernelFault, UnsupportedInstruction
from ptx_emulator.machine import Machine

from .bare_ptx import buffer, launch, machine_for
from .tma_descriptors import encode

pytestmark = pytest.mark.claim("EMU-06", "TMA copies move the right bytes and refuse the others")

HEAD = """
.version 8.0
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 s[];
.visible .entry t(.param .align 64 .b8 map[128], .param .u64 out, .param .u64 in)
.reqntid 32, 1, 1
{{ .reg .pred %p, %q; .reg .b16 %h; .reg .b32 %t, %v, %w, %x, %y, %c<5>; .reg .b64 %d, %l, %o, %i;
  mov.u32 %t, %tid.x;  mov.b32 %v, s;  mov.b64 %d, map;  cvta.param.u64 %d, %d;
   ld.param.b64 %o, [out];
  ld.param.b64 %i, [in];
  {coordinates}
  setp.ne.b32 %p, %t, 0;  @%p bra READY;  mbarrier.init.shared.b64 [%v], 1;
  READY: bar.sync 0;
  {body}
  ret; }}
"""
WAIT = "WAIT: mbarrier.try_wait.parity.shared.b64 %q, [%v], 0;  @!%q bra WAIT;"
# copies the staged bytes to global memory, 4 a lane and step
DUMP = """
  mov.b32 %x, 0;
  NEXT: shl.b32 %w, %t, 2;  shl.b32 %y, %x, 7;  add.s32 %w, %w, %y;  add.s32 %y, %v, %w;
   ld.shared.b32 %y, [%y+1024];
  cvt.u64.u32 %l, %w;  add.s64 %l, %o, %l;  st.global.b32 [%l], %y;
  add.s32 %x, %x, 1;  setp.lt.u32 %p, %x, {steps};  @%p bra NEXT;"""


def kernel(body: str, coordinates: tuple[int, ...]) -> str:
    return HEAD.format(
        body=body, coordinates=" ".join(f"mov.b32 %c{i}, {c};" for i, c in enumerate(coordinates))
    )


def run(
    ptx: str, descriptor: bytes, tensor: np.ndarray, out: np.ndarray, **settings: Any
) -> Machine:
    grid, cluster = settings.pop("grid", (1, 1, 1)), settings.pop("cluster", (1, 1, 1))
    readonly = settings.pop("readonly", True)
    programmatic = settings.pop("programmatic", False)
    machine = machine_for(ptx, **settings)
    parameters = descriptor + struct.pack("QQ", out.ctypes.data, tensor.ctypes.data)
    buffers = [buffer("tensor", tensor, readonly=readonly), buffer("out", out)]
    launch(
        machine, buffers, parameters, shared=64 * 1024, grid=grid, cluster=cluster,
        programmatic=programmatic,
    )  # fmt: skip
    return machine


def load(
    tensor: np.ndarray,
    dtype: str,
    box: tuple[int, ...],
    at: tuple[int, ...],
    swizzle: int = 0,
    **settings: Any,
) -> np.ndarray:
    """The bytes that a load of one box leaves in shared memory. `tensor` outermost first, box and
    at innermost first.
    """
    strides = tuple(tensor.strides[::-1][1:])
    descriptor = encode(tensor.ctypes.data, dtype, tensor.shape[::-1], strides, box, swizzle)
    nbytes = int(np.prod(box)) * tensor.itemsize
    rank = len(box)
    body = f"""@%p bra WAIT;  mbarrier.arrive.expect_tx.shared.b64 _, [%v], {nbytes};
      cp.async.bulk.tensor.{rank}d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%v+1024],
        [%d, {{{", ".join(f"%c{i}" for i in range(rank))}}}], [%v];
      {WAIT} {DUMP.format(steps=-(-nbytes // 128))}"""
    out = np.zeros(-(-nbytes // 128) * 128, np.uint8)
    machine = run(
        kernel(body, at), descriptor, tensor, out, checks=("synccheck", "racecheck"), **settings
    )
    assert not machine.findings
    return out[:nbytes]


def box_of(tensor: np.ndarray, box: tuple[int, ...], at: tuple[int, ...]) -> np.ndarray:
    """The box with zeros outside the tensor."""
    out = np.zeros(box[::-1], tensor.dtype)
    for index in np.ndindex(*out.shape):
        where = tuple(i + a for i, a in zip(index, at[::-1]))
        if all(0 <= w < n for w, n in zip(where, tensor.shape)):
            out[index] = tensor[where]
    return out


@pytest.mark.parametrize(
    ("shape", "box", "at"),
    [
        ((64,), (32,), (8,)),
        ((9, 64), (32, 8), (16, 4)),
        ((9, 64), (32, 8), (-8, -3)),
        ((3, 9, 64), (16, 4, 2), (56, 6, 2)),
        ((2, 3, 5, 16), (8, 5, 3, 2), (8, 0, 0, 1)),
        ((2, 2, 3, 4, 8), (8, 2, 2, 2, 1), (0, 3, 2, 1, 1)),
        ((9, 64), (32, 8), (64, 0)),
        ((9, 64), (32, 8), (0, 9)),
    ],
)
@pytest.mark.parametrize("seed", [None, 5])
def test_boxes_and_edges(
    shape: tuple[int, ...], box: tuple[int, ...], at: tuple[int, ...], seed: int | None
) -> None:
    tensor = np.arange(1, np.prod(shape) + 1, dtype=np.uint16).reshape(shape)
    got = load(tensor, "u16", box, at, seed=seed).view(np.uint16).reshape(box[::-1])
    assert (got == box_of(tensor, box, at)).all()


def test_strided_tensor() -> None:
    """A slice of a wider buffer: only the slice's bytes are touched."""
    whole = np.full((6, 4, 64), 0xFFFF, np.uint16)
    view = whole[:, 1:3, :32]
    view[...] = np.arange(view.size).reshape(view.shape)
    got = load(view, "u16", (32, 2, 4), (0, 0, 3), holes=True).view(np.uint16).reshape(4, 2, 32)
    assert (got == box_of(view, (32, 2, 4), (0, 0, 3))).all()


@pytest.mark.parametrize(("swizzle", "span"), [(1, 32), (2, 64), (3, 128)])
def test_swizzles(swizzle: int, span: int) -> None:
    """The 16-byte chunk number is XORed with the number of the 128-byte line, within a span."""
    tensor = np.arange(16 * span, dtype=np.uint8).reshape(16, span) % 251
    got = load(tensor, "u8", (span, 16), (0, 0), swizzle)
    flat = tensor.ravel()
    for byte in range(flat.size):
        address = 2048 + byte  # where the box starts
        moved = address ^ ((address >> 7) % (span // 16)) << 4
        assert got[moved - 2048] == flat[byte]


STORE = """
  mov.b32 %x, 0;
  FILL: shl.b32 %w, %t, 2;  shl.b32 %y, %x, 7;  add.s32 %w, %w, %y;  cvt.u64.u32 %l, %w;
   add.s64 %l, %o, %l;
  ld.global.b32 %y, [%l];  add.s32 %w, %v, %w;  st.shared.b32 [%w+1024], %y;
  add.s32 %x, %x, 1;  setp.lt.u32 %q, %x, {steps};  @%q bra FILL;
  fence.proxy.async.shared::cta;  bar.sync 0;  @%p bra DONE;
  {store}  cp.async.bulk.commit_group;  cp.async.bulk.wait_group 0;
  DONE:"""


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize(
    ("kind", "dtype", "expected"),
    [
        ("", "u32", lambda old, new: new),
        (".add", "u32", lambda old, new: old + new),
        (".add", "f32", lambda old, new: old + new),
        (".max", "u32", np.maximum),
        (".xor", "u32", np.bitwise_xor),
    ],
)
def test_stores_are_clipped(kind: str, dtype: str, expected: Any, seed: int | None) -> None:
    numpy_type = {"u32": np.uint32, "f32": np.float32}[dtype]
    tensor = np.arange(9 * 8, dtype=numpy_type).reshape(9, 8)
    staged = (np.arange(8 * 4)[::-1] + 5).astype(numpy_type).reshape(8, 4)
    before = tensor.copy()
    name = (
        f"cp.reduce.async.bulk.tensor.2d.global.shared::cta{kind}"
        if kind
        else "cp.async.bulk.tensor.2d.global.shared::cta"
    )
    store = f"{name}.tile.bulk_group [%d, {{%c0, %c1}}], [%v+1024];"
    descriptor = encode(tensor.ctypes.data, dtype, (8, 9), (32,), (4, 8))
    ptx = kernel(STORE.format(steps=1, store=store), (4, 5))
    machine = run(ptx, descriptor, tensor, staged, readonly=False, seed=seed)
    assert not machine.findings
    before[5:, 4:] = expected(before[5:, 4:], staged[:4])
    assert (tensor == before).all()


def test_store_to_a_read_only_tensor() -> None:
    tensor, staged = np.zeros((9, 8), np.uint32), np.zeros((8, 4), np.uint32)
    store = (
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d, {%c0, %c1}], [%v+1024];"
    )
    descriptor = encode(tensor.ctypes.data, "u32", (8, 9), (32,), (4, 8))
    with pytest.raises(KernelFault, match="store to read-only memory"):
        run(kernel(STORE.format(steps=1, store=store), (0, 0)), descriptor, tensor, staged)


def test_descriptor_beyond_its_tensor() -> None:
    """The descriptor claims one row more than there is."""
    tensor = np.zeros((9, 64), np.uint16)
    descriptor = encode(tensor.ctypes.data, "u16", (64, 10), (128,), (32, 8))
    body = f"""@%p bra WAIT;  mbarrier.arrive.expect_tx.shared.b64 _, [%v], 512;
      cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%v+1024],
        [%d, {{%c0, %c1}}], [%v];
      {WAIT}"""
    with pytest.raises(KernelFault, match=r"memcheck: transfer out of bounds .* past tensor"):
        run(kernel(body, (0, 4)), descriptor, tensor, np.zeros(16, np.uint32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": "[%v+1040]"}, "TMA destination at 0x810 is not 128-byte aligned"),
        ({"target": "[%v+65536]"}, "TMA destination .* is outside shared memory"),
        ({"box": (4, 8)}, "inner box of 8 bytes, not a multiple of 16"),
        ({"box": (64, 8), "swizzle": 1}, "inner box of 128 bytes for a 32B swizzle"),
        ({"shift": 8}, "address .* is not 16-byte aligned"),
        ({"rank": 3}, "3 coordinates for a tensor of rank 2"),
        ({"barrier": "[%v+8]"}, "mbarrier at 0x408 is used before its init"),
    ],
)
def test_misuse(change: dict[str, Any], message: str) -> None:
    tensor = np.zeros((16, 64), np.uint16)
    box = change.get("box", (32, 8))
    descriptor = encode(
        tensor.ctypes.data + change.get("shift", 0),
        "u16",
        (64, 16),
        (128,),
        box,
        change.get("swizzle", 0),
    )
    rank = change.get("rank", 2)
    body = f"""@%p bra DONE;  mbarrier.arrive.expect_tx.shared.b64 _, [%v], 512;
      cp.async.bulk.tensor.{rank}d.shared::cta.global.tile.mbarrier::complete_tx::bytes
        {change.get("target", "[%v+1024]")},
        [%d, {{{", ".join(f"%c{i}" for i in range(rank))}}}], {change.get("barrier", "[%v]")};
         DONE:"""
    with pytest.raises(KernelFault, match=message):
        run(kernel(body, (0, 0, 0)), descriptor, tensor, np.zeros(16, np.uint32))


@pytest.mark.parametrize("bit", [0, 11, 12])
def test_unknown_descriptor_features_are_refused(bit: int) -> None:
    raw = bytearray(encode(4096, "u16", (64, 8), (128,), (32, 8)))
    raw[8 + bit // 8] ^= 1 << bit % 8
    with pytest.raises(Exception, match="TMA descriptor with flags"):
        tma.decode(bytes(raw[:64]))


def test_replaced_descriptor() -> None:
    """A kernel edits a descriptor in global memory: address, one dimension, one stride; strides
    reach 2**35.
    """
    raw = bytearray(encode(4096, "u16", (64, 8, 3), (128, 1024), (32, 8, 1)))
    tma.replace(raw, "global_address", 0, 8192)
    tma.replace(raw, "global_dim", 1, 5)
    tma.replace(raw, "global_stride", 1, 2**37)
    t = tma.decode(bytes(raw[:64]))
    assert (t.address, t.dims, t.strides) == (8192, (64, 5, 3), (128, 2**37))

    tensor = np.arange(8 * 64, dtype=np.uint16).reshape(8, 64)
    place = np.zeros(384, np.uint8)
    shift = -place.ctypes.data % 128
    place[shift : shift + 128] = np.frombuffer(
        encode(4096, "u16", (64, 8), (128,), (32, 4)), np.uint8
    )
    body = f"""@%p bra WAIT;  mbarrier.arrive.expect_tx.shared.b64 _, [%v], 256;
      tensormap.replace.tile.global_address.global.b1024.b64 [%o], %i;
      mov.b32 %x, 6;  tensormap.replace.tile.global_dim.global.b1024.b32 [%o], 1, %x;
      fence.proxy.tensormap::generic.acquire.gpu;
      cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%v+1024],
        [%o, {{%c0, %c1}}], [%v];
      {WAIT} ld.shared.b32 %x, [%v+1216];  ld.shared.b32 %y, [%v+1024];
       st.global.v2.b32 [%o+128], {{%x, %y}};"""
    out = place[shift : shift + 136]
    machine = machine_for(kernel(body, (0, 4)))
    parameters = bytes(128) + struct.pack("QQ", out.ctypes.data, tensor.ctypes.data)
    launch(machine, [buffer("tensor", tensor), buffer("out", out)], parameters, shared=8192)
    row_past_the_edge, row_inside = out[128:].view(np.uint32)
    assert row_past_the_edge == 0
    assert row_inside == int(tensor[4, 0]) | int(tensor[4, 1]) << 16


def test_im2col_is_refused() -> None:
    ptx = kernel(
        "cp.async.bulk.tensor.3d.shared::cta.global.im2col.mbarrier::complete_tx::bytes "
        "[%v], [%d, {%c0, %c1, %c2}], [%v];",
        (0, 0, 0),
    )
    with pytest.raises(UnsupportedInstruction, match="instruction not modelled"):
        machine_for(ptx)


TOUCHES = {
    "load": f"""@%p bra WAIT;  mbarrier.arrive.expect_tx.shared.b64 _, [%v], 128;
      cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%v+1024],
        [%d, {{%c0, %c1}}], [%v];
      {WAIT}""",
    "store": """shl.b32 %w, %t, 2;  add.s32 %w, %v, %w;  st.shared.b32 [%w+1024], %t;
      fence.proxy.async.shared::cta;  bar.sync 0;  @%p bra DONE;
      cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d, {%c0, %c1}], [%v+1024];
      cp.async.bulk.commit_group;  cp.async.bulk.wait_group 0;
      DONE:""",
    "edited descriptor": "@!%p tensormap.replace.tile.global_address.global.b1024.b64 [%o], %i;",
    "published descriptor": """add.s32 %w, %v, 1024;
      tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned
        [%o], [%w], 128;""",
}


@pytest.mark.parametrize("touch", TOUCHES.values(), ids=TOUCHES)
def test_copies_wait_for_the_grid_before(touch: str) -> None:
    tensor, out = np.zeros((9, 8), np.uint32), np.zeros(256, np.uint8)
    start = -out.ctypes.data % 128
    descriptor = encode(tensor.ctypes.data, "u32", (8, 9), (32,), (4, 8))
    for wait, expected in (
        ("", {"global memory is touched before griddepcontrol.wait in a programmatic launch"}),
        ("griddepcontrol.wait; ", set()),
    ):
        machine = run(
            kernel(wait + touch, (0, 0)), descriptor, tensor, out[start : start + 128],
            readonly=False, programmatic=True, checks=("racecheck",),
        )  # fmt: skip
        assert {f.message for f in machine.findings} == expected
