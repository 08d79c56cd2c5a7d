"""Tensor Memory Accelerator: views of strided tensors as tiles, and their partitions."""

from cutlass import cute
from cutlass.cute.nvgpu import cpasync


def tile_atom(op, tensor: cute.Tensor, modes: tuple, smem_tile, tiler: tuple):
    """Copy atom and coordinate tensor of ``tensor`` with its modes in the order ``modes``.

    The descriptor carries the tensor's own extents and strides, so loads outside it read zeros and
    stores outside it are dropped, whatever lies in memory there.
    """
    view = cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=list(modes)))
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
