"""Rings of shared-memory stages between a producer and its consumers, on mbarriers."""

import copy

import cutlass
from cutlass import Int32, Int64, cute

from linattn.device.compat import extract_mlir_values, new_from_mlir_values


class Ring:
    """Full and empty mbarriers of a ring; stage and phase follow from the step number alone.

    full[s]: one arrival by each producer warp, and the bytes of a stage where TMA brings it.
    empty[s]: one arrival by each consumer warp once it no longer touches the stage.

    Producers ``acquire``, write, then ``publish`` (or ``announce``, whose TMA copies complete it);
    consumers ``wait``, read, then ``release``. Every role counts the same steps.
    """

    def __init__(
        self, smem, stages: int, producer_warps: int, consumer_warps: int, stage_bytes: int = 0
    ):
        if stage_bytes and producer_warps != 1:
            raise ValueError(f"producer_warps: got {producer_warps}, expected 1 that announces")
        self.stages = stages
        self.producer_warps = producer_warps
        self.consumer_warps = consumer_warps
        self.stage_bytes = stage_bytes
        self.full = smem.allocate_array(Int64, stages, byte_alignment=8)
        self.empty = smem.allocate_array(Int64, stages, byte_alignment=8)

    def __extract_mlir_values__(self):
        """The barrier pointers: lets the tracer carry a ring through a run-time loop."""
        return extract_mlir_values(self.full) + extract_mlir_values(self.empty)

    def __new_from_mlir_values__(self, values):
        ring = copy.copy(self)
        ring.full = new_from_mlir_values(self.full, values[:1])
        ring.empty = new_from_mlir_values(self.empty, values[1:])
        return ring

    def stage(self, step: Int32) -> Int32:
        """Stage that holds step ``step``."""
        return step % self.stages

    def phase(self, step: Int32) -> Int32:
        """Parity that ``full[stage]`` has once step ``step`` is there."""
        return (step // self.stages) & 1

    def acquire(self, step: Int32) -> None:
        """Producer: wait until the stage of ``step`` is free; the first round finds it so."""
        cute.arch.mbarrier_wait(self.empty + self.stage(step), self.phase(step) ^ 1)

    def announce(self, step: Int32, size: int = 0):
        """TMA producer: promise the bytes of a stage, or ``size`` of them; gives the barrier for
        the copies."""
        full = self.full + self.stage(step)
        _announce(full, size or self.stage_bytes)
        return full

    def publish(self, step: Int32) -> None:
        """Producer warp: what its lanes wrote to the stage of ``step`` is there."""
        _arrive(self.full + self.stage(step))

    def wait(self, step: Int32) -> None:
        """Consumer: wait until step ``step`` is there."""
        cute.arch.mbarrier_wait(self.full + self.stage(step), self.phase(step))

    def release(self, step: Int32) -> None:
        """Consumer warp: its lanes are done with the stage of ``step``."""
        _arrive(self.empty + self.stage(step))


def init_rings(rings, warp: Int32) -> None:
    """Initialise the barriers of all rings; a CTA-wide barrier must follow."""
    for ring in rings:
        _init(ring.full, ring.empty, ring.stages, ring.producer_warps, ring.consumer_warps, warp)
    cute.arch.mbarrier_init_fence()


@cute.jit
def _init(
    full,
    empty,
    stages: cutlass.Constexpr,
    producers: cutlass.Constexpr,
    consumers: cutlass.Constexpr,
    warp: Int32,
):
    if warp == 0:
        with cute.arch.elect_one():
            for s in cutlass.range_constexpr(stages):
                cute.arch.mbarrier_init(full + s, producers)
                cute.arch.mbarrier_init(empty + s, consumers)


@cute.jit
def _announce(barrier, size: cutlass.Constexpr):
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)


@cute.jit
def _arrive(barrier):
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier)
