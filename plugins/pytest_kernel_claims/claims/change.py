"""``python -m pytest_kernel_claims.claims change``: what two runs on one GPU say of each time.

Two readings of one kernel always differ. What they differ by is told from noise by the processes
that measured: a row changed only where the intervals over the processes of the two runs have no
point in common. By chance alone that is so of one equal row in 10 with three processes in each run,
in 126 with five. A row that cannot be told says why: another way of timing, too few processes that
count (thermal and hardware slow-downs count none), or the GPU's power limit, at which a time is
that of the temperature as much as of the kernel. Two builds are then timed alternating in one
process (``cuda_benchmark.versus``).
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pytest_kernel_claims import figures
from pytest_kernel_claims.claims import merge
from pytest_kernel_claims.claims.text import shown

CAP = "sw_power_cap"
WAY = ("protocol", "mode", "l2", "hold", "calls", "fresh")
"""What two records of a row must have in common; not all of it is in every file."""

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Interval:
    """Microseconds that the processes of a run say, the least and the most."""

    least: float
    median: float
    most: float

    def __str__(self) -> str:
        return f"{self.median:.2f} us [{self.least:.2f}, {self.most:.2f}]"


def interval(record: Record, name: str) -> Interval | str:
    """Of one implementation of a row, or why there is none."""
    processes = record["implementations"][name]
    valid = figures.valid(processes)
    if not record["fresh"] or len(valid) < 2:
        reasons = sorted({text for one in processes for text in figures.invalid_reasons(one)})
        told = f" ({'; '.join(reasons)})" if reasons else ""
        return f"{len(valid)} of {len(processes)} processes count{told}, expected two or more"
    if any(CAP in (one["loaded"] or {}).get("reasons", ()) for one in valid):
        return "at the power limit: time both alternating in one process"
    estimates = [figures.estimate_us(one) for one in valid]
    return Interval(min(estimates), statistics.median(estimates), max(estimates))


def verdict(old: Record, new: Record, name: str) -> tuple[str, str]:
    """``slower``, ``faster``, ``same`` or ``unknown``, and the figures or the reason."""
    other = [key for key in WAY if old.get(key) != new.get(key)]
    if other:
        return "unknown", f"timed in another way: {', '.join(other)}"
    before, after = interval(old, name), interval(new, name)
    if isinstance(before, str) or isinstance(after, str):
        told = (("before", before), ("now", after))
        return "unknown", "; ".join(f"{when} {x}" for when, x in told if isinstance(x, str))
    word = "same"
    if after.least > before.most:
        word = "slower"
    elif after.most < before.least:
        word = "faster"
    return word, f"{before} -> {after}, {after.median / before.median:.3f} x"


def lines(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(verdict, line) for each implementation of each row that both runs timed.

    Raises ValueError for runs on different GPUs or without a row in common.
    """
    machines = [run["gpu"] and (run["gpu"]["name"], run["gpu"]["driver"]) for run in (old, new)]
    if machines[0] != machines[1]:
        raise ValueError(
            f"got runs on {machines[0]} and {machines[1]}, expected one GPU and driver"
        )
    found = False
    for test, record in new.get("timings", {}).items():
        known = old.get("timings", {}).get(test)
        for name in record["implementations"] if known else ():
            if name in known["implementations"]:
                found = True
                word, about = verdict(known, record, name)
                yield word, f"{word:8}{test} {name}: {about}"
    if not found:
        raise ValueError("got no row that both runs timed, expected some")


def add_command(commands: Any) -> None:
    """Add ``change`` to the command line of ``claims``."""
    command = commands.add_parser("change", help="which times of two runs differ beyond noise")
    command.add_argument("old", metavar="OLD.json")
    command.add_argument("new", metavar="NEW.json")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Returns 0, or 1 where a row became slower. Raises ValueError."""
    words: Counter[str] = Counter()
    for word, line in lines(*merge.load_all([options.old, options.new])):
        words[word] += 1
        print(shown(line))
    print(", ".join(f"{words[word]} {word}" for word in ("slower", "faster", "same", "unknown")))
    return int(words["slower"] > 0)
