"""The layout block: strides, sizes and flags that the host half of a kernel reads before a launch.

``host/signature.py`` says what it holds and why it exists.
"""

from cutlass import Int32, Int64, cute

from linattn.device.compat import AddressSpace


class Layout:
    """Reads the block at a host address front to back; used while ``__call__`` is traced."""

    def __init__(self, address: Int64, words: int):
        pointer = cute.make_ptr(Int64, address, AddressSpace.generic, assumed_align=8)
        self.block = cute.make_tensor(pointer, cute.make_layout(words))
        self.words = words
        self.position = 0

    def wide(self, count: int) -> tuple:
        """The next integers, as they are."""
        start, self.position = self.position, self.position + count
        return tuple(self.block[i] for i in range(start, self.position))

    def narrow(self, count: int) -> tuple:
        """The next integers, as 32-bit ones."""
        return tuple(Int32(word) for word in self.wide(count))

    def end(self) -> None:
        """Refuse to trace a kernel that reads another number of integers than the block has."""
        if self.position != self.words:
            raise ValueError(f"layout: got {self.position} integers read, expected {self.words}")
