"""What a claims file looks like, as far as the commands read it, and the check that one does.

A shape is a ``Leaf``, a list ``[shape]``, an object ``{"key": shape}`` (which may have further
keys, unless it is ``Exactly`` these), or one of the wrappers below.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pytest_kernel_claims.claims.model import SEVERITY, VERDICTS


@dataclass(frozen=True)
class Leaf:
    words: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class Nullable:
    shape: Any


@dataclass(frozen=True)
class Optional:
    """The value of a key that may be absent."""

    shape: Any


@dataclass(frozen=True)
class Each:
    """An object whose keys are names; every value has this shape."""

    shape: Any


@dataclass(frozen=True)
class Some:
    """A list of at least one of this shape."""

    shape: Any


class Exactly(dict[str, Any]):
    """An object with these keys and no other."""


def _number(value: Any) -> bool:
    """Whether this is a finite number, as a float too; JSON can spell integers beyond any float."""
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:
        return False


def _time(value: Any) -> bool:
    """Whether this is a date and time with its offset, so that runs have an order."""
    try:
        return datetime.fromisoformat(value).utcoffset() is not None
    except (TypeError, ValueError):
        return False


def _among(*words: str) -> Leaf:
    return Leaf("one of " + ", ".join(map(repr, words)), lambda value: value in words)


TEXT = Leaf("a string", lambda value: isinstance(value, str))
TIME = Leaf("a time such as 2026-05-01T10:00:00+00:00", _time)
TRUTH = Leaf("true or false", lambda value: isinstance(value, bool))
COUNT = Leaf("a whole number from 0", lambda value: type(value) is int and value >= 0)
SOME = Leaf("a whole number from 1", lambda value: type(value) is int and value >= 1)
WHOLE = Leaf("a whole number", lambda value: type(value) is int)
NUMBER = Leaf("a finite number", _number)
POSITIVE = Leaf("a finite number above 0", lambda value: _number(value) and value > 0)
FIGURE = Leaf("a number", lambda value: _number(value) or value in ("nan", "inf", "-inf"))
BETTER = _among("lower", "higher")

MEASURED = Exactly(
    name=TEXT, value=FIGURE, limit=Nullable(FIGURE), unit=Nullable(TEXT), better=BETTER
)
STATE = {"utilisation_percent": Nullable(NUMBER), "reasons": [TEXT]}
PROCESS = {
    "readings_ms": Some(POSITIVE),
    "calls": SOME,
    "before": Nullable(STATE),
    "loaded": Nullable(STATE),
    "after": Nullable(STATE),
}
RECORD = {
    "subject": TEXT,
    "mode": _among("graph", "eager"),
    "l2": _among("warm", "rotate"),
    "fresh": TRUTH,
    "required": SOME,
    "calls": SOME,
    "implementations": Each([PROCESS]),
    "figures": [
        {
            "name": TEXT,
            "kind": _among("time", "ratio"),
            "of": TEXT,
            "to": Nullable([TEXT]),
            "limit": Nullable(NUMBER),
            "better": BETTER,
            "unit": Nullable(TEXT),
            "value": NUMBER,
        }
    ],
}
RUN = {
    "commit": Nullable(TEXT),
    "dirty": Nullable(TRUTH),
    "gpu": Nullable({"name": TEXT, "sm": TEXT, "driver": Nullable(TEXT)}),
    "emulator": Nullable({"name": TEXT, "sm": [TEXT]}),
    "torch": Nullable(TEXT),
    "cutlass_dsl": Nullable(TEXT),
    "when": TIME,
    "claims": Each(
        {
            "text": TEXT,
            "arches": [TEXT],
            "verdict": _among(*VERDICTS),
            "selected": COUNT,
            "deselected": COUNT,
            "whole": TRUTH,
            "left_out": Optional([TEXT]),
            "counts": Each(WHOLE),
            "tests": Each({"outcome": _among(*SEVERITY), "reason": TEXT, "family": Optional(TEXT)}),
            "worst": Optional(Each(Exactly(**MEASURED, test=TEXT))),
        }
    ),
    "ratio_sets": Optional(
        Each(
            {
                "limits": Exactly(rows=SOME, worst=Nullable(NUMBER), geomean=Nullable(NUMBER)),
                "ratios": Each(Nullable(POSITIVE)),
            }
        )
    ),
    "timings": Optional(Each(RECORD)),
}


def _escalation(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and POSITIVE.holds(value[0])
        and SOME.holds(value[1])
    )


EVIDENCE = {
    "exitstatus": Nullable(WHOLE),
    "modules_not_collected": Optional(Each(COUNT)),
    "claims": Each(
        {
            "kinds": [TEXT],
            "ratio_sets": Optional([TEXT]),
            "tests": Each({"measured": [MEASURED]}),
            "shown_on": Optional([TEXT]),
        }
    ),
    "timings": Optional(
        Each(
            {
                "protocol": TEXT,
                "group": TEXT,
                "iterations": SOME,
                "processes": SOME,
                "escalate": Nullable(Leaf("[spread, processes]", _escalation)),
                "medians_us": Each(NUMBER),
            }
        )
    ),
}
"""What ``audit`` reads, and ``verdict`` in part."""


def check(run: Any, *shapes: Any) -> None:
    """Raises ValueError for the first place of a run that is not as ``RUN`` and ``shapes`` say."""
    for shape in (RUN, *shapes):
        for problem in _mismatches(run, shape, ""):
            raise ValueError(problem)
    for problem in _dangling(run):
        raise ValueError(problem)


def _mismatches(value: Any, shape: Any, where: str) -> Iterator[str]:
    if isinstance(shape, Nullable):
        if value is not None:
            yield from _mismatches(value, shape.shape, where)
    elif isinstance(shape, Leaf):
        if not shape.holds(value):
            yield _told(where, value, shape.words)
    elif isinstance(shape, (list, Some)):
        if not isinstance(value, list) or not (value or isinstance(shape, list)):
            yield _told(where, value, _words(shape))
            return
        inner = shape[0] if isinstance(shape, list) else shape.shape
        for place, one in enumerate(value):
            yield from _mismatches(one, inner, f"{where}[{place}]")
    elif not isinstance(value, dict):
        yield _told(where, value, "an object")
    elif isinstance(shape, Each):
        for key, one in value.items():
            yield from _mismatches(one, shape.shape, _below(where, key))
    else:
        yield from _of_object(value, shape, where)


def _of_object(value: Mapping[str, Any], shape: Mapping[str, Any], where: str) -> Iterator[str]:
    for key, wanted in shape.items():
        inner = wanted.shape if isinstance(wanted, Optional) else wanted
        if key in value:
            yield from _mismatches(value[key], inner, _below(where, key))
        elif inner is wanted:
            yield f"{_below(where, key)}: got nothing, expected {_words(wanted)}"
    if isinstance(shape, Exactly):
        for key in value.keys() - shape.keys():
            yield _told(_below(where, key), value[key], "no such key")


def _dangling(run: Mapping[str, Any]) -> Iterator[str]:
    """Names that must be those of other parts of the run, and are not."""
    for test, record in run.get("timings", {}).items():
        known = record["implementations"]
        for place, figure in enumerate(record["figures"]):
            where = f"timings.{test}.figures[{place}]"
            named = {"of": [figure["of"]], "to": figure["to"] or []}
            if figure["kind"] == "ratio" and not named["to"]:
                yield _told(f"{where}.to", figure["to"], "the implementations of a ratio")
            for key, names in named.items():
                if not known.keys() >= set(names):
                    yield _told(f"{where}.{key}", figure[key], f"among {', '.join(known)}")
    for key, entry in run["claims"].items():
        for name in entry.get("ratio_sets", ()):
            if name not in run.get("ratio_sets", {}):
                yield _told(f"claims.{key}.ratio_sets", name, "one of the run's ratio_sets")


def _below(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _words(shape: Any) -> str:
    if isinstance(shape, Nullable):
        return f"{_words(shape.shape)} or null"
    if isinstance(shape, Leaf):
        return shape.words
    if isinstance(shape, Some):
        return "a list that is not empty"
    return "a list" if isinstance(shape, list) else "an object"


def _told(where: str, value: Any, expected: str) -> str:
    text = json.dumps(value)
    shown = text if len(text) <= 60 else f"{text[:60]}..."
    return f"{where}: got {shown}, expected {expected}"
