"""The layout block: strides, sizes and flags that the host half of a kernel reads before a launch.

``spec/signature.py`` says what it holds and why it exists.
"""

from cutlass import Int32, Int64, cute

from linattn.device.compat import AddressSpace
from linattn.device.memory import Strided
from linattn.device.pool import Vector
from linattn.spec.signature import Signature


class Layout:
    """Reads the block at a host address by name; used while ``__call__`` is traced."""

    def __init__(self, signature: Signature, address: Int64):
        self.signature = signature
        pointer = cute.make_ptr(Int64, address, AddressSpace.generic, assumed_align=8)
        self.block = cute.make_tensor(pointer, cute.make_layout(signature.words))

    def strides(self, name: str) -> tuple:
        """Strides of a tensor in elements (of an index vector in 32-bit words), 64-bit."""
        dims = self.signature[name].strided
        return tuple(self.block[self.signature.at_stride(name, dim)] for dim in dims)

    def wide(self, name: str) -> Int64:
        """1 where the elements of a vector are 64-bit, else 0."""
        return self.block[self.signature.at_wide(name)]

    def size(self, name: str) -> Int32:
        """A size or a flag."""
        return Int32(self.block[self.signature.at(name)])

    def strided(self, name: str, address: Int64) -> Strided:
        """A tensor with its strides."""
        return Strided(address, self.strides(name))

    def vector(self, name: str, address: Int64) -> Vector:
        """An index vector."""
        (stride,) = self.strides(name)
        return Vector(address, stride, self.wide(name))
