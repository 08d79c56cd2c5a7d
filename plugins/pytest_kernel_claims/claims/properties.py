"""What a test says with its report: its claims and ratio sets by marks, its figures by fixtures."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

import pytest

from pytest_kernel_claims import arch
from pytest_kernel_claims.claims.model import Better, Measurement

TIMINGS = pytest.StashKey[dict[str, dict[str, Any]]]()
"""Test -> its record (see ``figures``). Only the process that timed it has one: under xdist nothing
is timed, so records need not travel with reports."""


def claims_of(item: pytest.Item) -> dict[str, str]:
    """Claims of a test, id -> text, the outermost first; module, class and function marks count.

    Raises pytest.UsageError when a mark is not ``claim(id, text)`` or gives one id two texts.
    """
    found: dict[str, str] = {}
    for mark in reversed(list(arch.marks(item, "claim"))):
        given = dict(zip(("id", "text"), mark.args), **mark.kwargs)
        key, text = given.get("id"), given.get("text")
        sound = len(mark.args) + len(mark.kwargs) == len(given) == 2
        if not (sound and isinstance(key, str) and key and isinstance(text, str) and text):
            raise pytest.UsageError(
                f"{item.nodeid}: got claim with {mark.args} {mark.kwargs}, expected claim(id, text)"
            )
        _same_text(found, key, text, item.nodeid)
    return found


def _same_text(known: dict[str, str], key: str, text: str, where: str) -> None:
    if known.setdefault(key, text) != text:
        raise pytest.UsageError(
            f"claim {key} has two texts: {known[key]!r} and (in {where}) {text!r}"
        )


def attach(items: list[pytest.Item], kinds: Iterable[str]) -> None:
    """Write the claims of every chosen test into its properties."""
    texts: dict[str, str] = {}
    found = [(item, claims_of(item)) for item in items]
    found = [(item, claims) for item, claims in found if claims]
    for item, claims in found:
        for key, text in claims.items():
            _same_text(texts, key, text, item.nodeid)
    for item, claims in found:
        about = {
            "kinds": [kind for kind in kinds if any(arch.marks(item, kind))],
            "arches": list(arch.needs(item)),
        }
        for key, text in claims.items():
            _put(item, "claim", {"id": key, "text": text, **about})


def note_family(item: pytest.Item) -> None:
    """Say which family of GPUs a test runs on; of several that it is for, it is one."""
    name = arch.family(item)
    if name:
        _put(item, "family", {"name": name})


def attach_ratio_sets(items: Iterable[pytest.Item]) -> None:
    """Write the ratio sets of every collected test, with their limits, into its properties.

    Raises pytest.UsageError for a mark that states no limit or no number of rows, and for one set
    with two sets of limits.
    """
    known: dict[str, dict[str, Any]] = {}
    for item in items:
        for mark in arch.marks(item, "ratio_set"):
            limits = {"rows": None, "worst": None, "geomean": None, **mark.kwargs}
            sound = len(mark.args) == 1 and isinstance(mark.args[0], str) and len(limits) == 3
            sound = sound and type(limits["rows"]) is int and limits["rows"] > 0
            if not sound or limits["worst"] is limits["geomean"] is None:
                raise pytest.UsageError(
                    f"{item.nodeid}: got ratio_set with {mark.args} {mark.kwargs}, expected "
                    "ratio_set(name, rows=, worst=, geomean=) with rows and at least one limit"
                )
            found = {"name": mark.args[0], **limits}
            if known.setdefault(mark.args[0], found) != found:
                raise pytest.UsageError(
                    f"{item.nodeid}: ratio_set {mark.args[0]} has other limits than elsewhere"
                )
            _put(item, "ratio_set", found)


def attach_error(items: list[pytest.Item], text: str) -> None:
    """Let every report say that the claims of this run are wrong."""
    for item in items:
        _put(item, "claim_error", {"text": text})


def _put(node: pytest.Item, name: str, value: dict[str, Any]) -> None:
    node.user_properties.append((name, json.dumps(value)))


def values(report: pytest.TestReport, name: str) -> Iterator[dict[str, Any]]:
    """The properties of this name that a test has been given here."""
    for key, value in report.user_properties:
        if key == name and isinstance(value, str):
            with contextlib.suppress(ValueError):
                parsed = json.loads(value)
                if isinstance(parsed, dict):
                    yield parsed


class Measured:
    """The ``measured`` fixture: records figures with the claims of one test."""

    def __init__(self, node: pytest.Item) -> None:
        self._node = node

    def applying(self, limit: float | None) -> float | None:
        """The limit, or None where it is for another GPU."""
        return None if limit is None or arch.other_gpu(self._node) else float(limit)

    def record(self, measurement: Measurement) -> None:
        """Record without judging."""
        _put(self._node, "measured", asdict(measurement))

    def __call__(
        self,
        name: str,
        value: float,
        limit: float | None = None,
        unit: str | None = None,
        better: Better = "lower",
    ) -> float:
        """Record ``value`` and judge it; anything that ``float()`` takes is a value.

        Raises AssertionError when the value is NaN, above ``limit`` (``better="lower"``) or
        below it (``better="higher"``); the figure is recorded all the same.
        """
        __tracebackhide__ = True
        measurement = Measurement(name, float(value), self.applying(limit), unit, better)
        self.record(measurement)
        if measurement.violated:
            raise AssertionError(f"measured: {measurement}, {better} is better")
        return measurement.value


def record_cubin(node: pytest.Item, name: str, digest: str) -> None:
    """Tie the SHA-256 of a cubin to this run's evidence, under ``cubins`` in the claims JSON."""
    _put(node, "cubin", {"name": name, "sha256": digest})
