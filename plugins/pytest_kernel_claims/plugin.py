"""Hooks and fixtures. The rooms behind the fixtures are imported when a test first uses one."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from pytest_kernel_claims import arch
from pytest_kernel_claims.claims import properties, selection
from pytest_kernel_claims.claims.collector import COLLECTION, Collector

if TYPE_CHECKING:
    import torch

    from pytest_kernel_claims.codegen import Codegen
    from pytest_kernel_claims.compare import BitwiseCheck, NumericCheck, Poison
    from pytest_kernel_claims.hostsync import GraphSafe, NoHostSync
    from pytest_kernel_claims.timing import CudaBenchmark

KINDS = {
    "bitwise": "results are equal bit for bit",
    "numeric": "results lie within stated bounds of a reference",
    "determinism": "repeats give the same bits",
    "dispatch": "which kernel serves which problem, and what is refused",
    "no_host_sync": "the host path reads no device value and never waits",
    "codegen": "properties of the generated machine code",
    "perf": "speed",
}

_TIMED = pytest.StashKey[bool]()
"""Set when a test has used ``cuda_benchmark``."""

MARKERS = {
    **{
        name: f"{name}: needs a GPU (or its emulation) of compute capability "
        + " or ".join(f"{major}.{minor}" for major, minor in capabilities)
        for name, capabilities in arch.FAMILIES.items()
    },
    arch.ANY_GPU: "gpu: needs a GPU (or its emulation), whatever its compute capability",
    **{name: f"{name}: kind of claim: {what}" for name, what in KINDS.items()},
    "no_host_sync": "no_host_sync(level=None): kind of claim: the host path reads no device value "
    "and never waits; audits the whole test unless it uses the fixture no_host_sync",
    "claim": "claim(id, text): a published statement that this test verifies; may be repeated",
    "sanitize": "sanitize(*tools): run under --sanitizer with one of these tools of "
    "compute-sanitizer (all, when empty)",
    "timing": "timing(processes=, warmup=, iterations=, escalate=, mode=, calls=, l2=, hold=, "
    "group=): how cuda_benchmark measures this test",
    "limits_for": "limits_for(*gpus): the limits of this test are for a GPU with one of these in "
    "its name; on another one it measures without them, and its claims stay 'not run'",
    "ratio_set": "ratio_set(name, rows=, worst=, geomean=): the set of rows that the ratio of a "
    "cuda_benchmark test belongs to; judged when the session ends, missing rows make it incomplete",
}

SANITIZERS = ("memcheck", "synccheck", "racecheck", "initcheck")

CHILD = "PYTEST_KERNEL_CLAIMS_CHILD"
"""Environment variable of ``child``, which is imported only where it is set."""

_IS_CHILD = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Exits with pytest's usage error where another plugin has an option of ours: no exception of
    pytest's own is caught as early as options are added."""
    group = parser.getgroup("kernel claims")
    try:
        _add_options(group)
    except (ValueError, argparse.ArgumentError) as error:
        way_out = "leave one out by -p no:kernel_claims or -p no:NAME"
        text = f"ERROR: pytest-kernel-claims: {error}: another plugin has it; {way_out}"
        print(text, file=sys.stderr)
        raise SystemExit(int(pytest.ExitCode.USAGE_ERROR)) from None


def _add_options(group: pytest.OptionGroup) -> None:
    group.addoption(
        "--gpu-arch",
        choices=arch.CHOICES,
        default="any",
        help="GPU to run on: 'any' uses what is there and skips the rest, 'auto' emulates where no "
        "GPU is, 'none' hides GPUs, a named architecture is required, 'emulated' needs a plugin "
        "that provides an emulator",
    )
    group.addoption(
        "--claims-json", metavar="PATH", help="write verdicts and provenance of all claims to PATH"
    )
    group.addoption(
        "--claims-report",
        choices=("table", "none"),
        default="table",
        help="what of the claims is told when the run ends: 'none' leaves it to whoever reads the "
        "file of --claims-json",
    )
    group.addoption(
        "--claims-index",
        metavar="FILE",
        help="all tests of each claim (python -m pytest_kernel_claims.claims index FILE), for a "
        "run that collects a part of the suite",
    )
    group.addoption(
        "--require-claims",
        metavar="FILE",
        help="fail unless every claim listed in FILE (an id a line, comments behind a "
        "space and #) is verified",
    )
    group.addoption(
        "--sanitizer",
        choices=SANITIZERS,
        help="run the tests marked 'sanitize' for this tool, and no other, each in a child under "
        "compute-sanitizer; without a GPU, on an emulator that has such checks",
    )
    group.addoption(
        "--sanitizer-bin", metavar="PATH", help="compute-sanitizer to use instead of the one found"
    )
    group.addoption(
        "--sanitizer-timeout",
        metavar="SECONDS",
        type=float,
        default=300.0,
        help="time limit of a test under --sanitizer (default: %(default)g)",
    )
    group.addoption(
        "--sync-audit",
        choices=("dispatch", "deep"),
        default="dispatch",
        help="'deep' adds a profiler window to every no_host_sync audit on a GPU",
    )
    group.addoption(
        "--timing",
        metavar="NAME=N,...",
        help="override processes, warmup, iterations or calls of every timing marker, "
        "for example --timing=processes=5,iterations=200",
    )


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(arch)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    _register_markers(config)
    if CHILD in os.environ:
        from pytest_kernel_claims import child, sanitizer

        child.configure(config)
        config.stash[_IS_CHILD] = True
        if getattr(child.order(config), "role", None) == sanitizer.ROLE:
            config.pluginmanager.register(sanitizer.Watched(), "kernel_claims_watched")
    arch.configure(config)
    if config.getoption("sanitizer") is not None:
        from pytest_kernel_claims import sanitizer

        sanitizer.configure(config)
    if config.getoption("timing") is not None:
        from pytest_kernel_claims import processes

        processes.overrides(config)
    if not hasattr(config.option, "benchmark_disable"):
        config.pluginmanager.register(_WithoutBenchmark(), "kernel_claims_no_benchmark")
    if not hasattr(config, "workerinput") and not _is_child(config):
        config.pluginmanager.register(Collector(config), "kernel_claims_collector")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, object, object]:
    """What is recorded is what pytest returns: plugins end runs behind the last hook, too."""
    status: object = pytest.ExitCode.TESTS_FAILED
    try:
        status = yield
        return status
    finally:
        collector = config.pluginmanager.get_plugin("kernel_claims_collector")
        if collector is not None and isinstance(status, int):
            collector.ended(int(status))


def _is_child(config: pytest.Config) -> bool:
    """Whether this pytest re-runs tests for another one, which has their claims."""
    return config.stash.get(_IS_CHILD, False)


def _register_markers(config: pytest.Config) -> None:
    """A marker that the project has registered under one of our names stays the project's."""
    theirs = {line.partition(":")[0].partition("(")[0].strip() for line in config.getini("markers")}
    config.stash[arch.FOREIGN_MARKERS] = frozenset(theirs & MARKERS.keys())
    for name, line in MARKERS.items():
        if name not in theirs:
            config.addinivalue_line("markers", line)


def pytest_report_header(config: pytest.Config) -> str | None:
    if config.getoption("gpu_arch") == "any":
        return None
    return f"kernel claims: --gpu-arch={config.getoption('gpu_arch')}; {arch.machine(config)}"


def pytest_itemcollected(item: pytest.Item) -> None:
    selection.note_collected(item)


def pytest_collection_finish(session: pytest.Session) -> None:
    if _is_child(session.config):
        return
    try:
        collection = selection.gather(session, KINDS)
        collector = session.config.pluginmanager.get_plugin("kernel_claims_collector")
        if collector is not None:
            collector.note_collection(collection)
        else:
            session.config.workeroutput[COLLECTION] = collection.as_json()  # type: ignore[attr-defined]
        properties.attach(session.items, KINDS)
        properties.attach_ratio_sets(session.items)
        marked = [item for item in session.items if any(arch.marks(item, "timing"))]
        if marked:
            from pytest_kernel_claims import processes

            for item in marked:
                processes.timed(item)
    except pytest.UsageError as error:
        if not hasattr(session.config, "workerinput"):
            raise
        # A worker cannot stop an xdist run with a message: its reports tell the controller.
        properties.attach_error(session.items, str(error))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    reason = arch.skip_reason(item)
    if reason is not None:
        # A mark, not pytest.skip(): pytest then reports the test's own location.
        item.add_marker(pytest.mark.skip(reason=reason), append=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """A test marked ``no_host_sync`` that opens no audit of its own is audited as a whole; one that
    has measured without its limits says so."""
    marked = next(arch.marks(item, "no_host_sync"), None) is not None
    audit: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if marked and "no_host_sync" not in getattr(item, "fixturenames", ()):
        from pytest_kernel_claims import hostsync

        audit = hostsync.NoHostSync(item)()
    properties.note_family(item)
    with audit:
        result = yield
    if not _is_child(item.config):
        watched = item.config.getoption("sanitizer") is not None
        unshown = arch.not_launched(item, watched) or arch.other_gpu(item)
        if unshown is not None:
            pytest.skip(unshown)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A skip that was decided on in this package names the test."""
    report = yield
    if report.skipped and isinstance(report.longrepr, tuple):
        path, _, reason = report.longrepr
        if str(path).startswith((os.path.dirname(__file__) + os.sep, contextlib.__file__)):
            place, line, _ = item.reportinfo()
            report.longrepr = str(place), (line or 0) + 1, reason
    return report


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """torch.device to compute on: the GPU, or what the emulator provides; skips without either."""
    with arch.open_device(request.node) as opened:
        yield opened


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> properties.Measured:
    """``measured(name, value, limit=None, unit=None, better="lower")``: record a figure with the
    claims of this test; the test fails when the figure violates its limit or is NaN."""
    return properties.Measured(request.node)


@pytest.fixture
def _cuda_event_clock(request: pytest.FixtureRequest) -> Any:
    """Timer of the ``benchmark`` fixture, which reads it when it is set up: after this one."""
    from pytest_kernel_claims import timing

    request.config.stash[_TIMED] = True
    return timing.install_clock(request.node)


@pytest.fixture
def cuda_benchmark(
    request: pytest.FixtureRequest, _cuda_event_clock: Any, benchmark: Any
) -> CudaBenchmark:
    """``cuda_benchmark(factory)`` or ``cuda_benchmark.versus(ours=factory, peer=factory)``: GPU
    timings as results of pytest-benchmark, see ``timing.CudaBenchmark``."""
    from pytest_kernel_claims import timing

    return timing.CudaBenchmark(request, benchmark, _cuda_event_clock)


class _WithoutBenchmark:
    """Takes the fixture's place where pytest-benchmark is not there to be its base."""

    @pytest.fixture
    def cuda_benchmark(self) -> None:
        pytest.skip("timing needs pytest-benchmark")


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(
    config: pytest.Config, machine_info: dict[str, Any]
) -> None:
    if _TIMED in config.stash:
        from pytest_kernel_claims import timing

        timing.describe_machine(config, machine_info)


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_benchmark_compare_machine_info(
    config: pytest.Config, machine_info: dict[str, Any], compared_benchmark: dict[str, Any]
) -> None:
    if compared_benchmark["machine_info"].get("gpu"):
        from pytest_kernel_claims import timing

        timing.compare_machines(config, machine_info, compared_benchmark)


@pytest.fixture
def assert_bitwise() -> BitwiseCheck:
    """``assert_bitwise(got, want, names=None)``, see ``compare.assert_bitwise``."""
    from pytest_kernel_claims import compare

    return compare.assert_bitwise


@pytest.fixture
def assert_numeric(request: pytest.FixtureRequest) -> NumericCheck:
    """``compare.assert_numeric`` that also records its figures with the claims of this test."""
    from pytest_kernel_claims import compare

    return compare.NumericCheck(properties.Measured(request.node))


@pytest.fixture
def poison() -> Iterator[Poison]:
    """Output tensors full of NaN inside guard bands, checked at the end of the test."""
    from pytest_kernel_claims import compare

    poisoned = compare.Poison()
    yield poisoned
    poisoned.check()


@pytest.fixture
def no_host_sync(request: pytest.FixtureRequest) -> NoHostSync:
    """``with no_host_sync() as audit:`` fails when the block waits for the device or reads from
    it; see ``hostsync.NoHostSync``."""
    from pytest_kernel_claims import hostsync

    return hostsync.NoHostSync(request.node)


@pytest.fixture
def graph_safe(request: pytest.FixtureRequest) -> GraphSafe:
    """``graph_safe(call, inputs=None)``: captured and replayed, ``call`` gives the bits of an
    eager call; see ``hostsync.GraphSafe``."""
    from pytest_kernel_claims import hostsync

    return hostsync.GraphSafe(request.node)


@pytest.fixture
def under_sanitizer(request: pytest.FixtureRequest) -> str | None:
    """Tool that checks this test (``"memcheck"``, ...), or None: shrink the problem under one."""
    from pytest_kernel_claims import sanitizer

    return sanitizer.active(request.config)


@pytest.fixture
def codegen(request: pytest.FixtureRequest) -> Codegen:
    """Facts of generated code; skips the test when the disassembler or ptxas is missing."""
    from pytest_kernel_claims import codegen as room

    return room.Codegen(request.node)
