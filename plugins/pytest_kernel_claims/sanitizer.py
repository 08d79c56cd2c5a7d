"""``--sanitizer=TOOL``: the tests marked ``sanitize``, each under a tool of compute-sanitizer.

With a GPU every test runs in a child of its own under the tool, so that a fault belongs to one
test and cannot spoil the next; this process only judges and replays the child's reports. A test
is clean when

* the child's own report file says that it passed, tear-down included, and
* the tool's log ends in its summary line with no error, and nothing in it casts doubt on that.

Exit codes decide nothing: the tool's own are ambiguous, and a child without one error may have
checked nothing. For the same reason a program with a planted fault (``planted``) runs first, under
the very command line and environment of the tests; unless the tool names the fault, the run stops.

Without a GPU the tests run in this process on a provider that has checks of its own, see
``arch.CheckingProvider``: a fault there is an exception, and its planted fault comes first too.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from pytest_kernel_claims import arch, child, launches, planted, progress
from pytest_kernel_claims.claims.model import Measurement
from pytest_kernel_claims.claims.properties import Measured

TOOLS = tuple(planted.KERNELS)
MINIMUM = (2025, 4, 1)
"""Older ones leak host memory when Python launches kernels, and misreport mbarriers."""

ROLE = "sanitize"
_PASSED = pytest.StashKey[bool]()
_SEEN = pytest.StashKey[launches.Seen]()
PROGRAM = "compute-sanitizer"
ERROR_EXIT = 86
STACKS_BEFORE_LIMIT = 10.0
"""Seconds before the time limit at which a hanging child prints its Python stacks."""

ENVIRONMENT: dict[str, str | None] = {
    # A caching allocator hides every stray access that stays inside its slab.
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    "PYTORCH_ALLOC_CONF": None,
    "PYTORCH_CUDA_ALLOC_CONF": None,
    # Reports then name lines of a CuTe DSL kernel.
    "CUTE_DSL_LINEINFO": "1",
    # Serialised launches would hide races.
    "CUDA_LAUNCH_BLOCKING": None,
}

PADDING = 512
"""Bytes of guard behind each allocation: at its end there may be a neighbour."""

DOUBTS = (
    "Internal Sanitizer Error",
    "Errors might go undetected",
    "Results might be incorrect",
    "terminated before first instrumented",
    "Device not supported",
)
"""Parts of log lines after which "0 errors" says nothing."""


def active(config: pytest.Config) -> str | None:
    """The tool that checks the tests of this process, or None."""
    orders = child.order(config)
    if orders is not None and orders.role == ROLE:
        return cast(str, orders.payload["tool"])
    return cast("str | None", config.getoption("sanitizer"))


def configure(config: pytest.Config) -> None:
    """Set the run up for ``--sanitizer``.

    Raises pytest.UsageError (exit 4) when there is nothing to check with.
    """
    tool: str = config.getoption("sanitizer")
    here = arch.machine(config)
    provider = here.provider
    if provider is None and here.gpu is None:
        provider = arch.emulate(config)
    run: SanitizedRun
    program = config.getoption("sanitizer_bin")
    if provider is not None and program is not None:
        raise pytest.UsageError(
            f"--sanitizer-bin={program} is a program for a GPU; here {provider.name} checks"
        )
    if provider is not None:
        run = EmulatedRun(config, tool, provider)
    elif here.gpu is not None:
        run = ChildRun(config, tool, find(program))
    else:
        raise pytest.UsageError(
            f"--sanitizer={tool} needs a GPU, or an emulator with checks "
            f"(hook pytest_kernel_claims_device); {here}"
        )
    config.pluginmanager.register(run, "kernel_claims_sanitizer")


# --- the program ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """An installed compute-sanitizer."""

    path: Path
    version: tuple[int, ...]
    help: str

    def __str__(self) -> str:
        return f"{PROGRAM} {'.'.join(map(str, self.version))}"

    def command(self, tool: str, log: Path) -> list[str]:
        """What goes in front of the command line of a child."""
        options = [
            f"--tool={tool}",
            f"--log-file={str(log).replace('%', '%%')}",
            "--target-processes=application-only",
            "--launch-timeout=120",
            # A failing test is no fault; that the child ended well is seen in its reports.
            "--check-exit-code=no",
            f"--error-exitcode={ERROR_EXIT}",
        ]
        for switch in ("--check-bulk-copy", "--check-tensor-ops", "--check-warpgroup-mma"):
            if switch in self.help:
                options.append(f"{switch}=yes")
        if tool == "memcheck":
            # Frameworks and just-in-time compilers probe the driver, and failing probes are normal.
            options += ["--report-api-errors=no", f"--padding={PADDING}"]
        return [str(self.path), *options]


def find(given: str | None = None) -> Program:
    """The first usable compute-sanitizer: ``given``, else of the package
    ``nvidia-cuda-sanitizer-api``, of CUDA_HOME (CUDA_PATH), or on PATH.

    Raises pytest.UsageError, naming what was found instead, when there is none.
    """
    refused: list[str] = []
    for path in [Path(given)] if given else list(dict.fromkeys(_candidates())):
        if not path.is_file():
            continue
        problem = _not_executable(path)
        if problem is None:
            found = _inspect(path)
            if isinstance(found, Program):
                return found
            problem = found
        refused.append(f"{path}: {problem}")
    least = ".".join(map(str, MINIMUM))
    instead = "; ".join(refused) or f"not found{f' at {given}' if given else ''}"
    raise pytest.UsageError(
        f"--sanitizer needs {PROGRAM} {least} or later (pip install nvidia-cuda-sanitizer-api); "
        f"{instead}"
    )


def _folders() -> list[str]:
    """Where packages are installed; a folder that PYTHONPATH names counts too."""
    return sys.path


def _candidates() -> Iterator[Path]:
    for folder in _folders():
        yield from sorted(Path(folder, "nvidia").glob(f"cu*/bin/{PROGRAM}"), reverse=True)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield Path(os.environ[variable]) / "bin" / PROGRAM
    on_path = shutil.which(PROGRAM)
    if on_path is not None:
        yield Path(on_path)


def _not_executable(path: Path) -> str | None:
    """Why a file that was unpacked without its run bits cannot be used; helpers count too."""
    helpers = path.parent.parent / PROGRAM
    for file in (path, helpers / PROGRAM, helpers / "TreeLauncherSubreaper"):
        if file.exists() and not os.access(file, os.X_OK):
            return f"{file} is not executable (chmod +x)"
    return None


def _inspect(path: Path) -> Program | str:
    """The program at ``path``, or why it cannot be used."""
    try:
        shown = _output(path, "--version")
        found = re.search(r"Version (\d+)\.(\d+)\.(\d+)", shown)
        if found is None:
            return f"shows no version: {shown[:200]!r}"
        version = tuple(map(int, found.groups()))
        if version < MINIMUM:
            return f"version {'.'.join(map(str, version))} is too old"
        return Program(path, version, _output(path, "--help"))
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"cannot be run: {error}"


def _output(path: Path, option: str) -> str:
    done = subprocess.run(
        [path, option], capture_output=True, text=True, timeout=60, check=False, errors="replace"
    )
    return done.stdout + done.stderr


# --- the verdict ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """What the log of a tool says. ``errors`` is None when it has no summary line."""

    tool: str
    errors: int | None
    doubts: tuple[str, ...]
    text: str

    @property
    def complete(self) -> bool:
        return self.errors is not None and not self.doubts

    @classmethod
    def read(cls, tool: str, log: Path) -> Verdict:
        """Judge a log file; a missing one is an incomplete verdict."""
        text = log.read_text(errors="replace") if log.exists() else ""
        if tool == "racecheck":
            pattern = r"^=+ RACECHECK SUMMARY: (\d+) hazards?\b"
        else:
            pattern = r"^=+ ERROR SUMMARY: (\d+) errors?\b"
        found = re.findall(pattern, text, re.MULTILINE)
        doubts = tuple(line for line in text.splitlines() if any(part in line for part in DOUBTS))
        return cls(tool, int(found[-1]) if found else None, doubts, text.strip())


def problem_of(verdict: Verdict, back: child.Child, item: pytest.Item, limit: float) -> str | None:
    """Why a test is not clean beyond what its own reports say, or None."""
    tool = verdict.tool
    reports = back.of(item)
    phases = {report.when for report in reports}
    failed = any(report.failed for report in reports)
    skipped = any(report.skipped and not hasattr(report, "wasxfail") for report in reports)
    if verdict.errors:
        return f"{tool}: {verdict.errors} error(s)\n{verdict.text}"
    log = f"\n--- log of {tool}\n{verdict.text or '(empty)'}"
    if back.timed_out:
        return f"{tool}: the test did not end within its time limit of {limit:g} s\n" + (
            back.explain() + log
        )
    if "teardown" not in phases or not ("call" in phases or failed or skipped):
        return f"{tool}: the child ended without a full report of the test\n{back.explain()}{log}"
    if failed or skipped or verdict.complete:
        return None
    doubts = "".join(f"\n{line}" for line in verdict.doubts) or " (no summary line)"
    return f"{tool} did not complete its check{doubts}\n{back.explain()}{log}"


def judge(
    verdict: Verdict, back: child.Child, item: pytest.Item, limit: float
) -> list[pytest.TestReport]:
    """The child's reports of a test, with the verdict of the tool worked in."""
    reports = back.of(item)
    call = next((report for report in reports if report.when == "call"), None)
    problem = problem_of(verdict, back, item, limit)
    if problem is not None:
        if call is None:
            call = pytest.TestReport(
                item.nodeid, item.location, {item.name: 1}, "failed", problem, "call"
            )
            reports.insert(sum(report.when == "setup" for report in reports), call)
        elif call.failed:
            problem += f"\n--- the test itself\n{call.longreprtext}"
        vars(call).pop("wasxfail", None)
        call.outcome, call.longrepr = "failed", problem
    elif call is not None:
        call.sections.append((f"log of {verdict.tool}", verdict.text))
    found: list[tuple[str, object]] = []
    # No errors are a figure of a test that was watched to its end.
    if call is not None and (verdict.errors or (verdict.errors == 0 and problem is None)):
        found.append(("measured", json.dumps(asdict(_figure(verdict)))))
    for report in reports:
        # Claims were attached here, where it is known how many tests they have.
        report.user_properties = [*item.user_properties, *report.user_properties, *found]
    return reports


def _figure(verdict: Verdict) -> Measurement:
    return Measurement(f"{verdict.tool} errors", float(verdict.errors or 0), 0.0)


# --- the run --------------------------------------------------------------------------------


class Blind(Exception):
    """The planted fault was not found; the text says what was seen instead."""


class SanitizedRun:
    """What both kinds of run share: which tests, and the planted fault before the first one."""

    def __init__(self, config: pytest.Config, tool: str) -> None:
        self.config, self.tool = config, tool
        self.blind: str | None = None

    def prove(self) -> None:
        """Raise ``Blind`` unless a planted fault is found."""
        raise NotImplementedError

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        meant = [self._meant(item) for item in items]
        drop = [item for item, stays in zip(items, meant) if not stays]
        if drop:
            self.config.hook.pytest_deselected(items=drop)
        items[:] = [item for item, stays in zip(items, meant) if stays]

    def _meant(self, item: pytest.Item) -> bool:
        mark = next(arch.marks(item, "sanitize"), None)
        if mark is None:
            return False
        unknown = [name for name in mark.args if name not in TOOLS]
        if unknown:
            expected = ", ".join(TOOLS)
            raise pytest.UsageError(
                f"{item.nodeid}: got sanitize with {unknown}, expected some of {expected}"
            )
        return not mark.args or self.tool in mark.args

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        if self.config.getoption("collectonly") or session.testsfailed:
            return
        if all(arch.skip_reason(item) is not None for item in session.items):
            return
        try:
            self.prove()
        except Blind as seen:
            self.blind = (
                f"--sanitizer={self.tool}: a planted fault was not found, so a clean result would "
                f"mean nothing: {seen}"
            )
            if not hasattr(self.config, "workerinput"):
                raise pytest.UsageError(self.blind) from None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        # Only an xdist worker, which cannot stop the run with a message, comes here blind.
        if self.blind is not None:
            pytest.fail(self.blind, pytrace=False)
        with self._told(item):
            return (yield)

    def _told(self, item: pytest.Item) -> AbstractContextManager[object]:
        """Around a phase of a test: records what makes it fail and is a fault."""
        return nullcontext()


class ChildRun(SanitizedRun):
    """Each test in a child under compute-sanitizer."""

    def __init__(self, config: pytest.Config, tool: str, program: Program) -> None:
        super().__init__(config, tool)
        self.program = program
        self.limit: float = config.getoption("sanitizer_timeout")
        self.seconds: list[float] = []
        self.steps: progress.Progress | None = None

    def pytest_report_header(self) -> str:
        return f"kernel claims: --sanitizer={self.tool}; {self.program} at {self.program.path}"

    def prove(self) -> None:
        with tempfile.TemporaryDirectory(prefix="kernel-claims-") as folder:
            log = Path(folder) / "log"
            program = [sys.executable, "-m", planted.__name__, self.tool]
            ended = child.run_command(
                [*self.program.command(self.tool, log), *program],
                env=ENVIRONMENT,
                timeout=self.limit,
                cwd=self.config.invocation_params.dir,
            )
            verdict = Verdict.read(self.tool, log)
        if not (verdict.errors and planted.entry(self.tool) in verdict.text):
            how = "killed at its time limit" if ended.returncode is None else ended.returncode
            raise Blind(
                f"{self.program}, exit {how} after {ended.seconds:.1f} s\n"
                f"{verdict.text or '(empty log)'}\n{(ended.stdout + ended.stderr)[-child.TAIL :]}"
            )

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        if self.blind is not None or arch.skip_reason(item) is not None:
            return None
        if self.steps is None:
            meant = [one for one in item.session.items if arch.skip_reason(one) is None]
            self.steps = progress.Progress(self.config, self.tool, len(meant))
        self.steps.step(item.nodeid)
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._reports(item):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _reports(self, item: pytest.Item) -> list[pytest.TestReport]:
        stacks = max(self.limit - STACKS_BEFORE_LIMIT, self.limit / 2)
        with tempfile.TemporaryDirectory(prefix="kernel-claims-") as folder:
            log = Path(folder) / "log"
            back = child.run_child(
                self.config,
                [item],
                role=ROLE,
                payload={"tool": self.tool},
                wrapper=self.program.command(self.tool, log),
                env=ENVIRONMENT,
                timeout=self.limit,
                options=("-o", f"faulthandler_timeout={stacks}"),
            )
            verdict = Verdict.read(self.tool, log)
        self.seconds.append(back.seconds)
        reports = judge(verdict, back, item, self.limit)
        for report in reports:
            report.user_properties.append(("sanitizer", f"{self.tool} of {self.program}"))
        return reports

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.seconds:
            terminalreporter.section(f"{self.tool} of {self.program}")
            terminalreporter.line(
                f"planted fault reported; {len(self.seconds)} tests, each in a child: "
                f"{sum(self.seconds):.1f} s, the longest {max(self.seconds):.1f} s"
            )


class Watched:
    """In a child: a test that has launched nothing was not checked, and is skipped."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        item.stash[_SEEN] = launches.Seen()
        with launches.watching(item.stash[_SEEN]):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        with launches.watching(item.stash[_SEEN]):
            result = yield
        if not item.stash[_SEEN]:
            pytest.skip(f"no kernel was launched; {arch.machine(item.config)}")
        return result


class EmulatedRun(SanitizedRun):
    """The tests in this process, on a provider that checks what it runs."""

    def __init__(self, config: pytest.Config, tool: str, provider: arch.DeviceProvider) -> None:
        super().__init__(config, tool)
        checks = getattr(provider, "checks", ())
        if tool not in checks:
            raise pytest.UsageError(
                f"--sanitizer={tool}: {provider.name} checks {', '.join(checks) or 'nothing'}"
            )
        self.provider = cast(arch.CheckingProvider, provider)

    def pytest_report_header(self) -> str:
        return f"kernel claims: --sanitizer={self.tool}; checks of {self.provider.name}"

    def prove(self) -> None:
        if not self.provider.canary(self.tool):
            raise Blind(f"{self.provider.name} reported nothing")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        with self._told(item):
            result = yield
        item.stash[_PASSED] = True
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        with self._told(item):
            result = yield
        if item.stash.get(_PASSED, False):
            self._record(item, 0.0)
        return result

    @contextmanager
    def _told(self, item: pytest.Item) -> Iterator[None]:
        """Record a fault that the provider raises; it does so once for all that a launch has."""
        try:
            yield
        except Exception as error:
            package = type(self.provider).__module__.partition(".")[0]
            if type(error).__module__.partition(".")[0] == package:
                self._record(item, 1.0)
            raise

    def _record(self, item: pytest.Item, errors: float) -> None:
        Measured(item).record(Measurement(f"{self.tool} errors", errors, 0.0))
