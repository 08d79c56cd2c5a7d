"""Tensors that hold tokens, in bundles that kernels pass on as one."""

from typing import Any, NamedTuple

from linattn.device.memory import Strided


class Tokens(NamedTuple):
    """What there is of queries, keys, values and outputs: addresses, tensors or TMA atoms."""

    q: Any
    k: Any
    v: Any
    o: Any


class Buffers(NamedTuple):
    """Keys and values of draft tokens by pool slot."""

    k: Strided
    v: Strided
