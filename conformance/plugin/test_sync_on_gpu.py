"""Which layer finds which wait or read on a GPU, row by row, and the tools on a real fault.

The matrix is what the documentation of ``hostsync`` rests on. A row that changes with a new torch
or driver is news: the layers then promise something else.
"""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.cuda import synchronize

from pytest_kernel_claims import child, hostsync, launches, planted, sanitizer

from .conftest import elsewhere

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.claim(
        "PLUGIN-SYNC", "host waits and reads are found in every layer, with operation and line"
    ),
]

LAYERS = ("dispatch", "debug mode", "deep", "graph")

MATRIX: dict[str, set[str]] = {
    "nothing": set(),
    "item": {"dispatch", "debug mode", "deep", "graph"},
    "cpu": {"dispatch", "debug mode", "deep", "graph"},
    "nonzero": {"dispatch", "debug mode", "deep", "graph"},
    "x[mask]": {"dispatch", "debug mode", "deep", "graph"},
    "x[mask] = 1.0": set(),
    "x[mask] = scalar of the device": {"dispatch", "debug mode", "deep", "graph"},
    "x[mask] = values": {"dispatch", "debug mode", "deep", "graph"},
    "masked_select": {"dispatch", "debug mode", "deep", "graph"},
    "equal": {"dispatch", "debug mode", "deep", "graph"},
    "repeat_interleave": {"dispatch", "debug mode", "deep", "graph"},
    "histc of the range that is there": {"dispatch", "debug mode", "deep", "graph"},
    "tensor of values": {"debug mode", "deep", "graph"},
    "pageable copy to the device": {"dispatch", "debug mode", "deep", "graph"},
    "torch.cuda.synchronize": {"dispatch", "deep", "graph"},
    "a synchronize imported by name": {"dispatch", "deep", "graph"},
    "nonzero in a thread that swallows errors": {"debug mode", "deep", "graph"},
    "stream.synchronize": {"dispatch", "debug mode", "deep", "graph"},
    "event.synchronize": {"dispatch", "deep", "graph"},
    "pinned async copy to the host": {"dispatch", "deep"},
    "driver: wait for the stream": {"graph"},
    "driver: copy to the host": {"deep"},
}


class Bench:
    """Tensors and calls of the matrix; made once a test, before any layer watches."""

    def __init__(self, device: torch.device) -> None:
        # No random numbers: a capture that a wait broke leaves torch's generator unusable.
        self.x = torch.arange(4096, device=device) / 4096
        self.mask = self.x > 0.5
        self.values = self.x[self.mask]
        self.one = self.values[0].clone()
        self.counts = torch.ones(8, dtype=torch.int64, device=device)
        self.pinned = torch.empty(8).pin_memory()
        self.pageable = torch.empty(8)
        self.host = (ctypes.c_char * 32)()
        self.event = torch.cuda.Event()
        self.event.record()
        self.driver = ctypes.CDLL("libcuda.so.1")

    def wait_for_stream(self) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if self.driver.cuStreamSynchronize(stream):
            raise RuntimeError("cuStreamSynchronize failed")

    def copy_to_host(self) -> None:
        address = ctypes.c_uint64(self.x.data_ptr())
        if self.driver.cuMemcpyDtoH_v2(self.host, address, ctypes.c_size_t(32)):
            raise RuntimeError("cuMemcpyDtoH failed")

    def in_a_thread(self) -> None:
        def read() -> None:
            with contextlib.suppress(Exception):
                self.mask.nonzero()

        thread = threading.Thread(target=read)
        thread.start()
        thread.join()

    def call(self, name: str) -> Callable[[], Any]:
        x, mask = self.x, self.mask
        calls: dict[str, Callable[[], Any]] = {
            "nothing": lambda: x + 1,
            "item": lambda: x[0].item(),
            "cpu": lambda: x[:8].cpu(),
            "nonzero": lambda: mask.nonzero(),
            "x[mask]": lambda: x[mask],
            "x[mask] = 1.0": lambda: x.__setitem__(mask, 1.0),
            "x[mask] = scalar of the device": lambda: x.__setitem__(mask, self.one),
            "x[mask] = values": lambda: x.__setitem__(mask, self.values),
            "masked_select": lambda: x.masked_select(mask),
            "equal": lambda: x.equal(x + 1),
            "repeat_interleave": lambda: torch.repeat_interleave(x[:8], self.counts),
            "histc of the range that is there": lambda: x.histc(4),
            "tensor of values": lambda: torch.tensor([1.0, 2.0], device=x.device),
            "pageable copy to the device": lambda: self.pageable.to(x.device),
            "torch.cuda.synchronize": lambda: torch.cuda.synchronize(),
            "a synchronize imported by name": lambda: synchronize(),
            "nonzero in a thread that swallows errors": self.in_a_thread,
            "stream.synchronize": lambda: torch.cuda.current_stream().synchronize(),
            "event.synchronize": lambda: self.event.synchronize(),
            "pinned async copy to the host": lambda: self.pinned.copy_(x[:8], non_blocking=True),
            "driver: wait for the stream": self.wait_for_stream,
            "driver: copy to the host": self.copy_to_host,
        }
        return calls[name]


def found_by(layer: str, call: Callable[[], Any]) -> bool:
    """Whether one layer alone objects to a call."""
    torch.cuda.synchronize()
    found: list[hostsync.Violation] = []
    if layer == "dispatch":
        audit = hostsync.Audit("dispatch", hostsync.Rules())
        with contextlib.suppress(hostsync.HostSync), audit:
            call()
        return bool(audit.violations)
    if layer == "debug mode":
        with hostsync._debug_mode(found):
            call()
        return bool(found)
    if layer == "deep":
        with hostsync._profiled(found, "here") as window, window():
            call()
        return bool(found)
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="global"):
            call()
    except Exception:
        return True
    finally:
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize()
    return False


@pytest.mark.parametrize("name", MATRIX)
def test_matrix(name: str, device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("runs in emulation")
    call = Bench(device).call(name)
    call()
    found = {layer for layer in LAYERS if found_by(layer, call)}
    assert found == MATRIX[name]


def test_every_row_but_the_harmless_ones_is_found_somewhere() -> None:
    missed = {name for name, layers in MATRIX.items() if not layers}
    assert missed == {"nothing", "x[mask] = 1.0"}


def test_multinomial_waits_for_nothing(device: torch.device) -> None:
    """Apart from the matrix: a capture that a wait broke leaves torch's generator unusable."""
    if device.type != "cuda":
        pytest.skip("runs in emulation")
    weights, own = torch.ones(64, device=device), torch.Generator(device)
    call = partial(torch.multinomial, weights, 2, generator=own)
    call()
    assert not [layer for layer in ("dispatch", "debug mode", "deep") if found_by(layer, call)]


@pytest.mark.parametrize("level", hostsync.LEVELS)
def test_a_planted_item_is_named_with_its_line(
    level: hostsync.Level, device: torch.device, no_host_sync: hostsync.NoHostSync
) -> None:
    if device.type != "cuda":
        pytest.skip("runs in emulation")
    x = torch.ones(4, device=device)
    with no_host_sync(level):
        x.mul_(2)
    with pytest.raises(hostsync.HostSync, match=r"test_sync_on_gpu\.py:\d+: aten::_local_scalar"):
        _audited(level, lambda: x[0].item())


def _audited(level: hostsync.Level, call: Callable[[], object]) -> None:
    with hostsync.Audit(level, hostsync.Rules(), gpu=True):
        call()


def test_a_wait_in_a_thread_is_named_with_its_line(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("runs in emulation")
    bench = Bench(device)
    with pytest.raises(hostsync.HostSync, match=r"test_sync_on_gpu\.py:\d+: CUDA: .*synchronizing"):
        _audited("dispatch", bench.in_a_thread)


def test_graph_safe(device: torch.device, graph_safe: hostsync.GraphSafe) -> None:
    x = torch.zeros(64, device=device)

    def inputs(i: int) -> None:
        x.fill_(i + 1)

    graph_safe(lambda: (x * 3, [x.sum(), None]), inputs)
    graph_safe(lambda: x.add_(1), inputs)
    with pytest.raises(AssertionError, match="cannot be captured"):
        graph_safe(lambda: x * x[0].item(), inputs)
    held: list[torch.Tensor] = []

    def stale() -> torch.Tensor:
        """Acts on a value that the host read before the capture."""
        if not torch.cuda.is_current_stream_capturing():
            held.append(x.sum())
            return x * held[-1].item()
        return x * 64.0

    with pytest.raises(AssertionError, match=r"\d+ of 64"):
        graph_safe(stale, inputs)


def test_a_call_without_a_launch_shows_nothing(
    device: torch.device, graph_safe: hostsync.GraphSafe, no_host_sync: hostsync.NoHostSync
) -> None:
    x = torch.zeros(64, device=device)
    with pytest.raises(pytest.skip.Exception, match="launched nothing"):
        graph_safe(lambda: x)
    idle = pytest.raises(pytest.skip.Exception, match="no tensor of a device and no launch")
    with idle, no_host_sync():
        x.size()
    with no_host_sync():
        launches.note_launch()
    with no_host_sync():
        x.add_(1)


def test_what_launches(device: torch.device) -> None:
    """Also what neither dispatches an operation nor goes through a seam."""
    if device.type != "cuda":
        pytest.skip("runs in emulation")
    x = torch.zeros(64, device=device)
    assert not launches.launches(lambda: x.size())
    assert launches.launches(lambda: torch.cuda._sleep(1000))
    assert launches.launches(lambda: x.add_(1))
    assert launches.launches(launches.note_launch)
    assert launches.launches(lambda: synchronize())  # cannot be captured
    assert x.sum().item() == 64.0


# --- compute-sanitizer on this machine ------------------------------------------------------

TESTS = """
    import ctypes
    import pytest
    import torch
    from pytest_kernel_claims import planted

    @pytest.mark.sanitize
    def test_clean():
        assert torch.ones(64, device="cuda").cumsum(0)[-1].item() == 64

    @pytest.mark.sanitize
    def test_faulty(under_sanitizer):
        planted.main([under_sanitizer])

    @pytest.mark.sanitize
    def test_idle():
        torch.cuda.synchronize()

    @pytest.mark.sanitize
    def test_wrong():
        assert torch.ones(4, device="cuda").sum().item() == 5
"""


@pytest.fixture
def program() -> sanitizer.Program:
    if sys.platform != "linux":
        pytest.skip("compute-sanitizer is looked for on Linux")
    try:
        return sanitizer.find()
    except pytest.UsageError as error:
        pytest.skip(str(error))


@pytest.mark.claim(
    "PLUGIN-SANITIZER", "a sanitizer verdict needs a planted fault found and a complete check"
)
@pytest.mark.parametrize("tool", sanitizer.TOOLS)
def test_the_planted_fault_is_reported(tool: str, program: sanitizer.Program) -> None:
    ended, verdict = _planted(program, tool, sanitizer.ENVIRONMENT)
    told = f"exit {ended.returncode}\n{verdict.text}\n{ended.stdout}{ended.stderr}"
    assert verdict.errors, told
    assert planted.entry(tool) in verdict.text, told


def _planted(
    program: sanitizer.Program, tool: str, environment: dict[str, str | None]
) -> tuple[child.Ended, sanitizer.Verdict]:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = [*program.command(tool, log), sys.executable, "-m", planted.__name__, tool]
        ended = child.run_command(command, env=environment, timeout=120, cwd=Path.cwd())
        return ended, sanitizer.Verdict.read(tool, log)


@pytest.mark.claim(
    "PLUGIN-SANITIZER", "a sanitizer verdict needs a planted fault found and a complete check"
)
def test_a_caching_allocator_would_hide_the_stray_store(program: sanitizer.Program) -> None:
    """Why the child's environment turns it off: with it on, the planted store goes unseen."""
    ended, verdict = _planted(program, "memcheck", {"PYTORCH_NO_CUDA_MEMORY_CACHING": None})
    assert verdict.errors == 0, f"exit {ended.returncode}\n{verdict.text}\n{ended.stderr}"


@pytest.mark.claim(
    "PLUGIN-SANITIZER", "a sanitizer verdict needs a planted fault found and a complete check"
)
@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
def test_a_suite_under_the_tool(
    tool: str,
    program: sanitizer.Program,
    pytester: pytest.Pytester,
    load_plugin: tuple[str, ...],
) -> None:
    pytester.makepyfile(test_it=TESTS)
    command = [sys.executable, "-m", "pytest", *load_plugin, f"--sanitizer={tool}", "-rf"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=elsewhere())
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert "1 skipped" in done.stdout, done.stdout + done.stderr
    assert "2 failed" in done.stdout, done.stdout + done.stderr
    assert f"at {planted.entry(tool)}" in done.stdout
    assert "assert 4.0 == 5" in done.stdout
