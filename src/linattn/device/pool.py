"""Requests and pool slots: device-side vectors of indices and lengths, int32 or int64.

A vector arrives as an address (0 where absent), a stride in 32-bit words and a flag that says
whether its elements are 64-bit. Those are read as two words, so one kernel serves both types.
"""

import cutlass
from cutlass import Int32, Int64, cute

from linattn.device.memory import words

PADDING = -1
"""Slot of a request that has none."""


@cute.jit
def slot_of(vector: tuple, request: Int32, slots: Int32) -> Int32:
    """Slot of a request, ``PADDING`` where its index is outside ``0 .. slots - 1``.

    Without a vector request ``n`` has slot ``n``.
    """
    address, stride, wide = vector
    slot = request
    if address != 0:
        element = words(address, Int64(request) * stride, cute.make_layout(2))
        slot = element[0]
        high = Int32(0)
        if wide != 0:
            high = element[1]
        if high != 0:
            slot = Int32(PADDING)
    if cutlass.Uint32(slot) >= cutlass.Uint32(slots):
        slot = Int32(PADDING)
    return slot


@cute.jit
def length_of(vector: tuple, request: Int32, limit: Int32) -> Int32:
    """Element of a vector of lengths, clamped to ``0 .. limit``."""
    address, stride, wide = vector
    element = words(address, Int64(request) * stride, cute.make_layout(2))
    length = cutlass.max(element[0], 0)
    if wide != 0:
        high = element[1]
        if high < 0:
            length = Int32(0)
        elif high > 0 or element[0] < 0:
            length = limit
    return cutlass.min(length, limit)
