"""Tensor Memory Accelerator: views of strided tensors as tiles, and their partitions."""

import cutlass
from cutlass import BFloat16, Int64, cute
from cutlass.cute.nvgpu import cpasync

from linattn.device import memory
from linattn.device.compat import AddressSpace

VECTOR = 16 // (BFloat16.width // 8)
"""Elements that the strides of a bf16 tensor are multiples of."""


def tile_atom(op, tensor: cute.Tensor, modes: tuple, smem_tile, tiler: tuple):
    """Copy atom and coordinate tensor of ``tensor`` with its modes in the order ``modes``.

    The descriptor carries the tensor's own extents and strides, so loads outside it read zeros and
    stores outside it are dropped, whatever lies in memory there.
    """
    view = cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=list(modes)))
    return cpasync.make_tiled_tma_atom(op, view, smem_tile, tiler)


@cute.jit
def describable(tensor: memory.Strided, shape: tuple, spare: Int64) -> cute.Tensor:
    """A bf16 tensor [B, T, H, D], or where T is 0 a row at the address ``spare`` that stands in.

    Its address and strides are multiples of 16 bytes, and its last dimension is contiguous.

    A descriptor has neither an extent of 0 nor an address of 0, which is that of an empty tensor.
    The row is never named, because no sequence has a token then.
    """
    batch, tokens, heads, width = shape
    address = tensor.address
    if tokens == 0:
        address = spare
    shape = (batch, cutlass.max(tokens, 1), heads, width)
    stride = (*(cute.assume(x, divby=VECTOR) for x in tensor.strides), 1)
    return memory.halves(address, 0, cute.make_layout(shape, stride=stride))


def ragged_store_atom(op, tensor: cute.Tensor, smem_tile, tiler: tuple):
    """Store atom of a ``[B, T, H, D]`` tensor that can be clipped behind any token.

    Its modes are (D, row, end, H, B). Row ``T - n`` of end ``e`` is token ``e - n``, so a tile that
    starts there is dropped from token ``e`` on, by the bound of the row mode. The base lies T
    tokens before the tensor; only rows and ends that lead back into it are ever named.
    """
    batch, tokens, heads, width = tensor.shape
    batch_stride, token_stride, head_stride, _ = tensor.stride
    back = Int64(tokens) * Int64(token_stride) * (tensor.element_type.width // 8)
    base = cute.make_ptr(
        tensor.element_type, tensor.iterator.toint() - back, AddressSpace.gmem, assumed_align=16
    )
    shape = (width, tokens, tokens + 1, heads, batch)
    stride = (1, token_stride, token_stride, head_stride, batch_stride)
    view = cute.make_tensor(base, cute.make_layout(shape, stride=stride))
    return cpasync.make_tiled_tma_atom(op, view, smem_tile, tiler)


def tiles(atom, shared: cute.Tensor, plane: cute.Tensor, tiler: tuple, coordinate: tuple):
    """Partition ``shared`` (tile, stage) and ``plane`` (tile, number) for whole-CTA copies."""
    tiled = cute.local_tile(plane, tiler, coordinate)
    return cpasync.tma_partition(
        atom,
        0,
        cute.make_layout(1),
        cute.group_modes(shared, 0, 2),
        cute.group_modes(tiled, 0, 2),
    )
