"""Walk of a CTA over its units: strided, or as planned."""

from typing import NamedTuple

from cutlass import Int32, cute

from linattn.device.pipelines import Ring
from linattn.schedulers.varlen import Batch

AS_THEY_COME, RANKED, PLANNED = range(3)
"""Orders of units."""


class Work(NamedTuple):
    """What every role of a CTA knows of the launch.

    order_of: ``AS_THEY_COME``; ``RANKED`` where ``order`` says which sequence a unit belongs to;
        ``PLANNED`` where besides ``plan`` holds this CTA's units from the second on, once ``plans``
        says so. One number, because movers have few registers.
    """

    batch: Batch
    units: Int32
    order_of: Int32
    order: cute.Tensor
    plan: cute.Tensor
    plans: Ring


@cute.jit
def following(index: Int32, done: Int32, work: Work) -> Int32:
    """Unit after ``index``, the ``done``-th of this CTA; at least ``units`` when there is none."""
    ctas, _, _ = cute.arch.grid_dim()
    index += ctas
    if work.order_of == PLANNED:
        work.plans.wait(0)
        index = work.plan[done]
    return index
