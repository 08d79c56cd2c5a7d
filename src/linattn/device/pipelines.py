"""Ring of shared-memory stages between a TMA producer warp and its consumers."""

import copy

import cutlass
from cutlass import Int32, Int64, cute

from linattn.device.compat import extract_mlir_values, new_from_mlir_values


class TmaRing:
    """Full and empty mbarriers of a ring; stage and phase follow from the step number.

    full[s]: one arrival by the producer, which announces the bytes of the stage.
    empty[s]: one arrival by each consumer warp once it no longer reads the stage.
    """

    def __init__(self, smem, stages: int, stage_bytes: int, consumer_warps: int):
        self.stages = stages
        self.stage_bytes = stage_bytes
        self.consumer_warps = consumer_warps
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

    def init(self, first_warp) -> None:
        """Initialise the barriers; a CTA-wide barrier must follow."""
        _init(self.full, self.empty, self.stages, self.consumer_warps, first_warp)

    def stage(self, step: Int32) -> Int32:
        """Stage that holds step ``step``."""
        return step % self.stages

    def phase(self, step: Int32) -> Int32:
        """Parity that ``full[stage]`` has once step ``step`` has landed."""
        return (step // self.stages) & 1

    def acquire(self, step: Int32):
        """Producer: wait until the stage of ``step`` is free, announce its bytes, give its barrier.

        A fresh barrier answers the opposite parity at once, so the first round does not wait.
        """
        stage = self.stage(step)
        cute.arch.mbarrier_wait(self.empty + stage, self.phase(step) ^ 1)
        _announce(self.full + stage, self.stage_bytes)
        return self.full + stage

    def wait(self, step: Int32) -> None:
        """Consumer: wait until the tiles of ``step`` have landed."""
        cute.arch.mbarrier_wait(self.full + self.stage(step), self.phase(step))

    def release(self, step: Int32) -> None:
        """Consumer warp: done with the tiles of ``step``."""
        _arrive(self.empty + self.stage(step))


@cute.jit
def _init(full, empty, stages: cutlass.Constexpr, consumers: cutlass.Constexpr, warp):
    if warp == 0:
        with cute.arch.elect_one():
            for s in cutlass.range_constexpr(stages):
                cute.arch.mbarrier_init(full + s, 1)
                cute.arch.mbarrier_init(empty + s, consumers)
    cute.arch.mbarrier_init_fence()


@cute.jit
def _announce(barrier, size: cutlass.Constexpr):
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)


@cute.jit
def _arrive(barrier):
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier)
