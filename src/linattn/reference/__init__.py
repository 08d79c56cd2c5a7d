"""Oracles in plain PyTorch: what the operators mean, and where the kernels round.

- ``recurrent``: the definition, token by token in float64. Kernels are judged against it.
- ``chunked``: the kernels' algorithm with their rounding points.
- ``packed``: packed sequences and pools of states, by one call of an oracle a sequence.
- ``bounds``: how far the second may be from the first, derived from those rounding points.
- ``decay``, ``arithmetic``: bit models of the decay factor and of the tensor core.
- ``slopes``: decay slopes by model family.

Nothing here is fast enough, or meant, to serve a model.
"""

from linattn.reference.bounds import lightning_error_bound
from linattn.reference.chunked import lightning_chunked
from linattn.reference.packed import lightning_packed, packed_offsets, packed_spans
from linattn.reference.recurrent import lightning_recurrent
from linattn.reference.slopes import lightning_slopes

__all__ = [
    "lightning_chunked",
    "lightning_error_bound",
    "lightning_packed",
    "lightning_recurrent",
    "lightning_slopes",
    "packed_offsets",
    "packed_spans",
]
