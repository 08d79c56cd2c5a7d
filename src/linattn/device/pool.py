"""What a request or a head looks up: its slot, its length, its slope.

A vector of slots or lengths is of int32 or int64. Elements of the latter are read as two words, so
one kernel serves both types.
"""

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute

from linattn.device.memory import extended, view, words

PADDING = -1
"""Slot of a request that has none."""


class Vector(NamedTuple):
    """A number for each request.

    address: of the first, 0 where the vector is absent.
    stride: from one to the next, in 32-bit words.
    wide: 1 where they are 64-bit, else 0.
    """

    address: Int64
    stride: Int64
    wide: Int64


class Requests(NamedTuple):
    """The slot of each request, and how many of its draft tokens are accepted."""

    indices: Vector
    accepted: Vector


@cute.jit
def places_of(vector: Vector, request: Int32, spare: Int64) -> tuple:
    """Addresses of the words (low, high) of a request's element; a 32-bit one is both.

    There is no branch, so that the reads of several vectors are in flight together. Where the
    vector is absent, it is the word at ``spare``, which then means nothing.
    """
    at = vector.address + extended(request) * vector.stride * 4
    if vector.address == 0:
        at = spare
    return at, at + vector.wide * 4


def element_at(places: tuple) -> tuple:
    """The words (low, high) at their addresses."""
    low, high = (words(at, 0, cute.make_layout(1))[0] for at in places)
    return low, high


def slope_at(decay: cute.Tensor, head: Int32, qk_head: Int32, value_heads: Int32) -> Int64:
    """Address of a value head's slope in a vector over those or over query/key heads."""
    index = cutlass.select_(decay.shape[0] == value_heads, head, qk_head)
    return (decay.iterator + decay.layout(index)).toint()


def slope_of(at: Int64) -> Float32:
    """The slope at its address."""
    return view(Float32, at, 0, cute.make_layout(1), 4)[0]


@cute.jit
def slot_of(vector: Vector, element: tuple, request: Int32, slots: Int32) -> Int32:
    """Slot of a request, ``PADDING`` where its index is outside ``0 .. slots - 1``.

    Without a vector request ``n`` has slot ``n``.
    """
    slot, high = element
    if vector.wide != 0 and high != 0:
        slot = Int32(PADDING)
    if vector.address == 0:
        slot = request
    if cutlass.Uint32(slot) >= cutlass.Uint32(slots):
        slot = Int32(PADDING)
    return slot


@cute.jit
def length_of(vector: Vector, element: tuple, limit: Int32) -> Int32:
    """Element of a vector of lengths, clamped to ``0 .. limit``."""
    low, high = element
    length = cutlass.max(low, 0)
    if vector.wide != 0:
        if high < 0:
            length = Int32(0)
        elif high > 0 or low < 0:
            length = limit
    return cutlass.min(length, limit)
