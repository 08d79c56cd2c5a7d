"""Global memory by address: views of tensors that reach a kernel as an address and strides.

Addresses and strides are 64-bit, strides in elements; a row's base is formed in 64 bits first, so
the layouts on top of it stay small.
"""

from typing import NamedTuple

from cutlass import BFloat16, Float32, Int32, Int64, Uint32, cute

from linattn.device.compat import AddressSpace


class Strided(NamedTuple):
    """A tensor by address.

    address: of its first element, 0 where the tensor is absent.
    strides: of its dimensions, but for those that are contiguous.
    """

    address: Int64
    strides: tuple


class Rows(NamedTuple):
    """The rows that one head has in ``[outer, tokens, heads, 128]``, one a token.

    address: of the tensor, 0 where it is absent.
    offset: of the first token's row, in elements.
    stride: from one token to the next.
    """

    address: Int64
    offset: Int64
    stride: Int64

    def at(self, token) -> Int64:
        """Offset of a token's row."""
        return self.offset + extended(token) * self.stride


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


def rows_of(tensor: Strided, outer, head) -> Rows:
    """The rows of one head; states by token, with two more dimensions, have rows likewise."""
    stride_outer, stride_token, stride_head = tensor.strides
    offset = offset_of((stride_outer, stride_head), outer, head)
    return Rows(tensor.address, offset, stride_token)


def byte_offset(tensor: Strided, outer, element) -> Int64:
    """Distance in bytes from coordinate 0 of the first dimension to ``outer``."""
    return extended(outer) * (tensor.strides[0] * (element.width // 8))
