"""The one re-exec engine: run tests again in a pytest of their own and bring their reports back.

``run_child(config, items, role="...")`` starts ``python -m pytest`` on the same node ids, so that
fixtures and parameters just work and nothing is pickled. The plugin in the child finds its orders
in an environment variable (``order(config)``), appends every test report to a file, and whatever
else the test wants to say through ``send(config, {...})``; both survive a crash of the child,
because each is one flushed line. The parent reads them back as ``Child.reports`` (outcomes,
assertion details, skips with their reasons, captured output) and ``Child.records``.

The child has the project's ini file and root folder, the plugins named by ``-p`` and the same
``--gpu-arch``, but none of ``addopts``: selections, xdist and report files are the parent's. A
project whose tests read options of their own gives them to its children through the hook
``pytest_kernel_claims_child_options``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "PYTEST_KERNEL_CLAIMS_CHILD"
"""Environment variable that makes a pytest a child: JSON with role, file and payload."""

NOT_INHERITED = ("PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST", VARIABLE)
TAIL = 4000

_ORDER = pytest.StashKey["Order"]()


@dataclass(frozen=True)
class Order:
    """What a child was started for. ``payload`` is JSON data of whoever started it."""

    role: str
    file: str
    payload: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Child:
    """What came back. ``returncode`` is None when the child was killed at its time limit."""

    returncode: int | None
    reports: list[pytest.TestReport]
    records: list[dict[str, Any]]
    problems: list[str]
    """Collection and internal errors, as text."""
    stdout: str
    stderr: str
    seconds: float

    @property
    def timed_out(self) -> bool:
        return self.returncode is None

    def of(self, item: pytest.Item) -> list[pytest.TestReport]:
        """Reports of one test, in the order set-up, call, tear-down."""
        return [report for report in self.reports if report.nodeid == item.nodeid]

    def explain(self) -> str:
        """How the child ended and the last of what it printed; for failure messages."""
        how = "killed at its time limit" if self.timed_out else f"exit {self.returncode}"
        parts = [f"child: {how} after {self.seconds:.1f} s", *self.problems]
        for name, text in (("stdout", self.stdout), ("stderr", self.stderr)):
            if text.strip():
                parts.append(f"--- child's {name}\n{text[-TAIL:].rstrip()}")
        return "\n".join(parts)


# --- the parent's side ----------------------------------------------------------------------


def run_child(
    config: pytest.Config,
    items: Sequence[pytest.Item],
    *,
    role: str,
    payload: Mapping[str, Any] | None = None,
    wrapper: Sequence[str] = (),
    env: Mapping[str, str | None] | None = None,
    timeout: float = 600.0,
    options: Sequence[str] = (),
) -> Child:
    """Run ``items`` in one fresh pytest and wait for it.

    Args:
        role: what the child is for; its side compares ``order(config).role``.
        payload: JSON data for the child's ``order(config).payload``.
        wrapper: command put in front of the interpreter, such as a sanitizer with its options.
        env: environment variables set on top of this process's; None unsets one.
        timeout: seconds after which the child and everything it started is killed.
        options: further pytest options of the child.

    The child's verdict is in its reports, never in its exit code.
    """
    with tempfile.TemporaryDirectory(prefix="kernel-claims-") as folder:
        file = Path(folder) / "child.jsonl"
        file.touch()
        orders = {"role": role, "file": str(file), "payload": dict(payload or {})}
        ended = run_command(
            [*wrapper, *_pytest_command(config, items), *options],
            env={**(env or {}), VARIABLE: json.dumps(orders)},
            timeout=timeout,
            cwd=config.invocation_params.dir,
        )
        lines = list(_lines(file))
    return Child(
        returncode=ended.returncode,
        reports=[_report(config, line["report"]) for line in lines if "report" in line],
        records=[line["record"] for line in lines if "record" in line],
        problems=[line["problem"] for line in lines if "problem" in line],
        stdout=ended.stdout,
        stderr=ended.stderr,
        seconds=ended.seconds,
    )


@dataclass(frozen=True)
class Ended:
    """A finished command; ``returncode`` None means killed at the time limit."""

    returncode: int | None
    stdout: str
    stderr: str
    seconds: float


def run_command(
    command: Sequence[str], *, env: Mapping[str, str | None], timeout: float, cwd: Path
) -> Ended:
    """Run a command in a process group of its own, which is killed as a whole.

    Output goes through files: a process that outlives the command cannot block the reader.
    """
    start = time.monotonic()
    merged = {**inherited_environment(), **env}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            command,
            env={name: value for name, value in merged.items() if value is not None},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        code: int | None = None
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        seconds = time.monotonic() - start
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode(errors="replace"))
    return Ended(code, texts[0], texts[1], seconds)


def inherited_environment() -> dict[str, str]:
    """This process's environment without what belongs to its own pytest run."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in NOT_INHERITED and not name.startswith("PYTEST_XDIST_")
    }


def _pytest_command(config: pytest.Config, items: Sequence[pytest.Item]) -> list[str]:
    command = [sys.executable, "-m", "pytest", *map(_argument, items)]
    command += ["--rootdir", str(config.rootpath)]
    if config.inipath is not None:
        command += ["-c", str(config.inipath)]
    command += ["-q", "-q", "--no-header", "--color=no"]
    for name in ("no:cacheprovider", "no:xdist"):
        command += ["-p", name]
    for name in dict.fromkeys(config.getoption("plugins") or ()):
        command += ["-p", name]
    for setting in config.getoption("override_ini") or ():
        command += ["-o", setting]
    command += ["-o", "addopts=", f"--import-mode={config.getoption('importmode')}"]
    command.append(f"--gpu-arch={config.getoption('gpu_arch')}")
    for more in config.hook.pytest_kernel_claims_child_options(config=config):
        command += more
    return command


def _argument(item: pytest.Item) -> str:
    """The node id with an absolute path: right from any folder."""
    _, separator, name = item.nodeid.partition("::")
    return f"{item.path}{separator}{name}"


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    for text in file.read_text(encoding="utf-8").splitlines():
        # A child that was killed may leave half a line.
        with contextlib.suppress(ValueError):
            yield json.loads(text)


def _report(config: pytest.Config, data: dict[str, Any]) -> pytest.TestReport:
    """JSON turns tuples into lists; pytest's own consumers unpack and hash them."""
    report = config.hook.pytest_report_from_serializable(config=config, data=data)
    if not isinstance(report, pytest.TestReport):
        raise TypeError(f"report of the child: got {type(report).__name__}, expected TestReport")
    reason: Any = report.longrepr
    if report.skipped and isinstance(reason, list):
        report.longrepr = (reason[0], reason[1], reason[2])
    path, line, name = report.location
    report.location = (path, line, name)
    report.user_properties = [(name, value) for name, value in report.user_properties]
    report.sections = [(name, text) for name, text in report.sections]
    return report


# --- the child's side -----------------------------------------------------------------------


def configure(config: pytest.Config) -> None:
    """Make this pytest a child when its environment says so.

    The orders leave the environment at once: a pytest started by a test is nobody's child.
    """
    text = os.environ.pop(VARIABLE, None)
    if text is None:
        return
    config.stash[_ORDER] = Order(**json.loads(text))
    config.pluginmanager.register(_Sender(config), "kernel_claims_child")


def order(config: pytest.Config) -> Order | None:
    """What this pytest was started for, or None when it is nobody's child."""
    return config.stash.get(_ORDER, None)


def send(config: pytest.Config, record: Mapping[str, Any]) -> None:
    """Give JSON data to the parent, where it is the next of ``Child.records``.

    Raises RuntimeError outside a child.
    """
    _append(config, {"record": dict(record)})


def _append(config: pytest.Config, line: dict[str, Any]) -> None:
    orders = order(config)
    if orders is None:
        raise RuntimeError("child.send: got a pytest that is nobody's child, expected a child")
    # Properties of a report may hold any object; as text it still reaches the parent's reports.
    text = json.dumps(line, default=str)
    with open(orders.file, "a", encoding="utf-8") as file:
        file.write(text + "\n")


class _Sender:
    """Appends reports, and errors that belong to no test, to the file of the orders."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        _append(self._config, {"report": data})

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            _append(self._config, {"problem": f"collecting {report.nodeid}\n{report.longreprtext}"})

    def pytest_internalerror(self, excrepr: object) -> None:
        _append(self._config, {"problem": f"internal error\n{excrepr}"})
