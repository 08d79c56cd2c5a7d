"""What of a suite a run has collected and chosen, and ``python -m pytest_kernel_claims.claims
index``, which writes down all of it.

A claim is verified by all of its tests. A run that collects the whole suite knows them, whatever it
then chooses by ``-m``, ``-k``, ``--deselect``, ``--stepwise``, ``--sanitizer`` or another plugin.
One that collects less, such as a file, a node id or what ``--lf`` leaves, knows them from an index.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import io
import json
from collections.abc import Iterable, Mapping
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pytest_kernel_claims import arch
from pytest_kernel_claims.claims.properties import claims_of
from pytest_kernel_claims.claims.report import write_json

SCHEMA = "pytest-kernel-claims-index/1"

_COLLECTED = pytest.StashKey[list[pytest.Item]]()


@dataclass
class Chosen:
    """A claim as one collection has it: its tests, and whether each is chosen."""

    text: str
    kinds: list[str] = field(default_factory=list)
    arches: list[str] = field(default_factory=list)
    tests: dict[str, bool] = field(default_factory=dict)


@dataclass
class Collection:
    """What one process has collected. ``whole``: nothing of the suite was left out before."""

    whole: bool
    claims: dict[str, Chosen]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> Collection:
        claims = {key: Chosen(**entry) for key, entry in value["claims"].items()}
        return cls(value["whole"], claims)


def note_collected(item: pytest.Item) -> None:
    """Remember a test before anything leaves it out."""
    item.config.stash.setdefault(_COLLECTED, []).append(item)


def gather(session: pytest.Session, kinds: Iterable[str]) -> Collection:
    """The claims of all tests that this process has collected."""
    claims: dict[str, Chosen] = {}
    chosen = set(session.items)
    kinds = tuple(kinds)
    for item in session.config.stash.get(_COLLECTED, session.items):
        for key, text in claims_of(item).items():
            one = claims.setdefault(key, Chosen(text))
            one.tests[item.nodeid] = item in chosen
            if item in chosen:
                one.kinds += [k for k in kinds if k not in one.kinds and any(arch.marks(item, k))]
                one.arches += [name for name in arch.needs(item) if name not in one.arches]
    return Collection(is_whole(session.config), claims)


def is_whole(config: pytest.Config) -> bool:
    """Whether a run collects all that ``pytest`` alone would collect in the project's folder."""
    option = config.option
    narrowed = ("lf", "ignore", "ignore_glob")
    if any(getattr(option, name, None) for name in narrowed):
        return False
    given = [config.invocation_params.dir / text for text in config.args]
    paths = [path.resolve() for path in given if path.is_dir()]
    return all(
        any(path == wanted or path in wanted.parents for path in paths)
        for wanted in _usual_places(config)
    )


def _usual_places(config: pytest.Config) -> list[Path]:
    """What ``testpaths`` names, or else, as where that names nothing there is, all of it."""
    named = [path for one in config.getini("testpaths") for path in config.rootpath.glob(one)]
    return [path.resolve() for path in named or [config.rootpath]]


# --- the index ------------------------------------------------------------------------------


def read_index(path: str | None) -> dict[str, set[str]]:
    """Tests of each claim, from the file of ``--claims-index``.

    Raises pytest.UsageError when it is none.
    """
    if path is None:
        return {}
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
        if value["schema"] != SCHEMA:
            raise ValueError(f"schema: got {value['schema']!r}, expected {SCHEMA!r}")
        return {str(key): set(map(str, tests)) for key, tests in value["claims"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        told = f"{type(error).__name__}: {error}"
        raise pytest.UsageError(f"--claims-index: cannot read {path}: {told}") from None


class _Gatherer:
    """Takes the place of a run: collects alone."""

    def __init__(self) -> None:
        self.found = Collection(False, {})

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.found = gather(session, ())


def _plugin() -> str:
    """What loads this package's plugin, also where nothing is loaded by itself: an installed one is
    known by its entry point alone."""
    installed = importlib.metadata.entry_points(group="pytest11", name="kernel_claims")
    return "kernel_claims" if installed else "pytest_kernel_claims.plugin"


def add_command(commands: Any) -> None:
    """Add ``index`` to the command line of ``claims``."""
    command = commands.add_parser(
        "index", help="all tests of each claim, for runs of a part (pytest --claims-index=FILE)"
    )
    command.add_argument("file", metavar="FILE", help="to write")
    command.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="for pytest, behind --")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Returns 0. Raises ValueError where collecting fails, or collects a part."""
    gatherer = _Gatherer()
    command = ("--collect-only", "-q", "--gpu-arch=none", "-p", _plugin())
    with redirect_stdout(io.StringIO()) as told:
        status = pytest.main([*command, *options.arguments], plugins=[gatherer])
    if status:
        raise ValueError(f"index: collecting failed, pytest says {int(status)}:\n{told.getvalue()}")
    if not gatherer.found.whole:
        raise ValueError(f"index: got {' '.join(options.arguments)}, expected the whole suite")
    claims = {key: sorted(one.tests) for key, one in sorted(gatherer.found.claims.items())}
    write_json(Path(options.file), {"schema": SCHEMA, "claims": claims})
    return 0
