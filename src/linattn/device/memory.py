"""Global memory by address: views of tensors that reach a kernel as an address and strides.

Addresses and strides are 64-bit, strides in elements; a row's base is formed in 64 bits first, so
the layouts on top of it stay small.
"""

from cutlass import BFloat16, Float32, Int32, Int64, Uint32, cute

from linattn.device.compat import AddressSpace


def view(element, address: Int64, offset, layout, align: int) -> cute.Tensor:
    """Tensor of ``element`` type that starts ``offset`` elements behind ``address``."""
    start = address + Int64(offset) * (element.width // 8)
    return cute.make_tensor(
        cute.make_ptr(element, start, AddressSpace.gmem, assumed_align=align), layout
    )


def floats(address: Int64, offset, layout) -> cute.Tensor:
    """FP32 view whose vectors are 16-byte aligned."""
    return view(Float32, address, offset, layout, 16)


def halves(address: Int64, offset, layout, align: int = 16) -> cute.Tensor:
    """BF16 view."""
    return view(BFloat16, address, offset, layout, align)


def words(address: Int64, offset, layout, align: int = 4) -> cute.Tensor:
    """View of 32-bit words, for values that are moved and not computed with."""
    return view(Int32, address, offset, layout, align)


def pairs(address: Int64, offset, layout, align: int = 4) -> cute.Tensor:
    """View of BF16 elements two to a word, from an even ``offset`` in elements on."""
    return words(address + Int64(offset) * (BFloat16.width // 8), 0, layout, align)


def extended(coordinate) -> Int64:
    """A coordinate that is not negative in 64 bits. Without a sign to extend that saves an
    instruction, and two more where it meets a stride."""
    return Int64(Uint32(coordinate))


def offset_of(strides: tuple, *coordinates):
    """64-bit sum of coordinate times stride; the coordinates are not negative."""
    total = Int64(0)
    for coordinate, stride in zip(coordinates, strides):
        total = total + extended(coordinate) * stride
    return total


def rows_of(rows: tuple, outer, head) -> tuple:
    """(address, offset, token stride) of the rows of one head in ``[outer, tokens, heads, 128]``.

    ``rows`` is an address with the strides of the first three dimensions.
    """
    address, (stride_outer, stride_token, stride_head) = rows
    return address, offset_of((stride_outer, stride_head), outer, head), stride_token


def byte_offset(rows: tuple, outer, element) -> Int64:
    """Distance in bytes from coordinate 0 of the first dimension to ``outer``.

    ``rows`` is an address with strides.
    """
    _, (stride, *_) = rows
    return extended(outer) * (stride * (element.width // 8))
