"""What a run says of its claims: the table in the terminal, and how files are written."""

from __future__ import annotations

import json
import math
import os
import stat
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pytest_kernel_claims.claims.model import SEVERITY, VERDICTS, Claim

# --- terminal -------------------------------------------------------------------------------


def table(claims: Iterable[Claim]) -> Iterator[str]:
    """A line for each claim, and one below it for its worst figures."""
    rows = sorted(claims, key=lambda claim: claim.id)
    width = max((len(claim.id) for claim in rows), default=0)
    needs = max((len(_needs(claim)) for claim in rows), default=0)
    for claim in rows:
        head = f"{claim.id:{width}}  {claim.verdict:8}  {tally(claim):>7}"
        yield f"{head}  {_needs(claim):{needs}}  {claim.text}{_asides(claim)}"
        figures = [str(figure) for _, (figure, _) in sorted(claim.worst().items())]
        if figures:
            yield f"{'':{width}}  worst: {', '.join(figures)}"


def tally(claim: Claim) -> str:
    return f"{claim.counts()['passed']}/{claim.selected}"


def _needs(claim: Claim) -> str:
    return ",".join(sorted(claim.arches)) or "any"


def _asides(claim: Claim) -> str:
    counts = claim.counts()
    named = [f"{counts[o]} {o}" for o in SEVERITY if o != "passed" and counts[o]]
    if claim.left_out:
        named.append(f"{len(claim.left_out)} deselected")
    if claim.shown_on and len(claim.arches) > len(claim.shown_on):
        named.append(f"on {', '.join(claim.shown_on)} alone")
    return f" ({', '.join(named)})" if named else ""


def counted(number: int, what: str) -> str:
    """``1 test``, ``2 tests``."""
    return f"{number} {what}{'s' * (number != 1)}"


def closing(claims: Iterable[Claim], modules: Counter[str]) -> Iterator[str]:
    """What was shown, and what this run could not show and why."""
    claims = sorted(claims, key=lambda claim: claim.id)
    verdicts = Counter(claim.verdict for claim in claims)
    told = [f"{verdicts[verdict]} {verdict}" for verdict in VERDICTS if verdicts[verdict]]
    yield f"{counted(len(claims), 'claim')}: {', '.join(told)}"
    reasons: dict[str, tuple[list[str], set[str]]] = {}
    for claim in claims:
        for reason, tests in claim.reasons().items():
            ids, named = reasons.setdefault(reason, ([], set()))
            ids.append(claim.id)
            named |= tests
    if reasons:
        yield "not shown by this run:"
    for reason, (ids, named) in sorted(reasons.items(), key=lambda x: (-len(x[1][0]), x[0])):
        of = f"{counted(len(named), 'test')} of " if named else ""
        yield f"  {of}{counted(len(ids), 'claim')}: {reason} [{' '.join(ids)}]"
    for outcome, number in sorted(modules.items()):
        yield f"  claims in {number} module(s) that {outcome} at import are not counted"


# --- files ----------------------------------------------------------------------------------


def finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: such figures become strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def write_json(path: Path, value: dict[str, Any]) -> None:
    """``write_whole`` of JSON."""
    text = json.dumps(finite(value), indent=1, allow_nan=False)
    write_whole(path, f"{text}\n")


def write_whole(path: Path, text: str) -> None:
    """Write so that a reader sees the old file or the new one, never a part, and so that the old
    one stays where writing fails. A link stays one: what it leads to is written.
    """
    target = Path(os.path.realpath(path))
    mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o644
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, mode)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
