"""When asynchronous work happens."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ptx_emulator.ptx import Instr
from ptx_emulator.state import Progress, UnitView

_Unit = TypeVar("_Unit", bound=UnitView)


@dataclass
class _Late:
    """A transfer that has been issued and not been carried out."""

    run: Callable[[], None]
    unit: UnitView
    instruction: Instr
    group: int = 0


class Schedule:
    """Without a seed: at once, and in a fixed order. With a seed (adversarial mode): loads arrive
    late and in any order, stores read their source late, wgmma results appear late over poisoned
    registers, mbarrier waits fail now and then, and units take turns in random order.
    """

    def __init__(self, progress: Progress, seed: int | None) -> None:
        self.progress, self.adversarial = progress, seed is not None
        self._random = random.Random(seed)
        self._loads: list[_Late] = []
        self._stores: dict[tuple[int, int], list[_Late]] = {}
        self._groups: dict[tuple[int, int], int] = {}

    def order(self, units: list[_Unit]) -> list[_Unit]:
        return self._random.sample(units, len(units)) if self.adversarial else units

    def spurious_failure(self) -> bool:
        return self.adversarial and self._random.random() < 0.25

    def hold_result(self) -> bool:
        return self.adversarial and self._random.random() < 0.5

    def transfer(self, run: Callable[[], None], unit: UnitView) -> None:
        """A load into shared memory."""
        if not self.adversarial:
            run()
            return
        self._loads.append(_Late(run, unit, unit.instruction()))

    def store(self, unit: UnitView, lane: int, run: Callable[[], None]) -> None:
        """A store from shared memory, part of the lane's open bulk group."""
        if not self.adversarial:
            run()
            return
        key = (id(unit), lane)
        late = _Late(run, unit, unit.instruction(), self._groups.get(key, 0))
        self._stores.setdefault(key, []).append(late)

    def commit_stores(self, unit: UnitView, lane: int) -> None:
        if self.adversarial:
            key = (id(unit), lane)
            self._groups[key] = self._groups.get(key, 0) + 1

    def finish_stores(self, unit: UnitView, lane: int, pending: int) -> None:
        """Carry out all but the last `pending` groups of the lane."""
        key = (id(unit), lane)
        late = self._stores.get(key)
        if late:
            keep = self._groups.get(key, 0) - pending
            for each in [x for x in late if x.group < keep]:
                late.remove(each)
                self._carry_out(each)

    def finish_all(self) -> int:
        """At the end of a cluster: carry out what is left. Returns the number of loads that nobody
        waited for.
        """
        loads = len(self._loads)
        for late in (*self._loads, *(x for xs in self._stores.values() for x in xs)):
            self._carry_out(late)
        self._loads.clear()
        self._stores.clear()
        self._groups.clear()
        return loads

    def idle(self, stalled: bool) -> None:
        """Between rounds: perhaps carry out one transfer."""
        if not self.adversarial or not (self._loads or self._stores):
            return
        if stalled or self._random.random() < 0.3:
            if self._loads and (stalled or self._random.random() < 0.7):
                self._carry_out(self._loads.pop(self._random.randrange(len(self._loads))))
                return
            keys = [k for k, v in self._stores.items() if v]
            if keys:
                queue = self._stores[self._random.choice(keys)]
                self._carry_out(queue.pop(0))

    def _carry_out(self, late: _Late) -> None:
        late.unit.replay = late.instruction
        late.run()
        late.unit.replay = None
        self.progress.changes += 1
