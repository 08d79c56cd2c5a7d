"""Does the host path wait for the device, or read from it? An audit in layers.

``with no_host_sync() as audit:`` watches the calls inside and fails with every violation it saw:
operation, reason, file and line. What watches depends on the machine:

* *dispatch*, always: a recorder in torch's dispatcher with a table of operations that read device
  values on the host, and the waits of ``torch.cuda`` by name. On meta tensors, which hold no
  values, any read that the table does not know raises by itself, so a host path whose launch is
  stubbed is audited without a GPU.
* *debug mode*, on a GPU: ``torch.cuda.set_sync_debug_mode("warn")``, which also sees C++, such as
  the copy in ``torch.tensor([1.0], device="cuda")`` that no dispatched operation shows, in any
  thread.
* *deep*, on a GPU when asked for: a profiler window with the waits and copies of the CUDA runtime.

``graph_safe`` complements them: what is captured into a CUDA graph and replayed has done no wait
and used no value that the host had read. No layer is complete: a driver-level wait on a stream
shows only in a capture, a driver-level copy to the host only in the profiler.

A layer is trusted only after it has found a planted ``.item()`` in this session.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_kernel_claims import arch, compare, launches, sanitizer
from pytest_kernel_claims.claims.model import Measurement
from pytest_kernel_claims.claims.properties import Measured

Level = Literal["dispatch", "deep"]
LEVELS: tuple[Level, ...] = ("dispatch", "deep")

_TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True)
class Violation:
    """One wait or read: the operation, why it counts, and the line of the caller."""

    operation: str
    reason: str
    where: str

    def __str__(self) -> str:
        return f"{self.where}: {self.operation}: {self.reason}"


class HostSync(AssertionError):
    """An audited block waited for the device or read from it."""


# --- rules: what an operation does to the host ----------------------------------------------

READS = "reads a device value on the host"
COUNTED = "a boolean index is counted on the host"
PAGEABLE = "copies from the host to the device and waits; pin the source and do not block"

_READING = {
    f"aten::{name}": READS
    for name in (
        "_local_scalar_dense",
        "is_nonzero",
        "equal",
        "allclose",
        "_linalg_check_errors",
    )
} | {
    f"aten::{name}": "the size of its result is read on the host"
    for name in (
        "nonzero",
        "_unique",
        "_unique2",
        "unique_consecutive",
        "unique_dim",
        "masked_select",
        "bincount",
        "_coalesce",
        "to_sparse",
        "_to_sparse",
    )
}
_INDEXING = {
    f"aten::{name}" for name in ("index", "index_put", "index_put_", "_index_put_impl_", "_index")
}


class Rules:
    """Judges a dispatched operation. ``on`` names device types beyond those that are not the
    CPU whose tensors count as device tensors."""

    def __init__(self, on: Sequence[str] = ()) -> None:
        self._on = frozenset(on)

    def on_device(self, value: object) -> bool:
        return isinstance(value, torch.Tensor) and (value.device.type != "cpu" or "cpu" in self._on)

    def reason(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
        """Why this call waits or reads, or None."""
        if name in _READING:
            everything = launches.leaves((args, kwargs))
            return _READING[name] if any(map(self.on_device, everything)) else None
        if name == "aten::histc":
            low, high = (
                kwargs.get(key, _at(args, place)) for place, key in ((2, "min"), (3, "max"))
            )
            return READS if low == high and any(map(self.on_device, args)) else None
        if name in _INDEXING:
            return self._indexing(name, args)
        if name == "aten::repeat_interleave":
            return self._repeats(args, kwargs)
        if name == "aten::_to_copy":
            target = kwargs.get("device")
            return self._copy(args[0], target, bool(kwargs.get("non_blocking")))
        if name == "aten::copy_":
            late = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            return self._copy(args[1], args[0].device, bool(late))
        return None

    def _indexing(self, name: str, args: Sequence[Any]) -> str | None:
        masks = [
            index
            for index in args[1]
            if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
        ]
        if not masks or not any(map(self.on_device, (args[0], *masks))):
            return None
        value = args[2] if len(args) > 2 else None
        # ``x[mask] = 1.0`` becomes a masked fill, without a count. Its value is a scalar of the
        # host on a GPU, and of the device elsewhere, where ``_values`` knows what was given.
        single = isinstance(value, torch.Tensor) and value.dim() == 0 and not value.is_cuda
        return None if len(masks) == len(args[1]) and single else COUNTED

    def _repeats(self, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
        counted = kwargs.get("output_size") is None and any(map(self.on_device, args))
        return "repeat counts are read on the host; pass output_size" if counted else None

    def _copy(self, source: Any, target: Any, late: bool) -> str | None:
        if target is None or not isinstance(source, torch.Tensor):
            return None
        to_cpu, from_cpu = torch.device(target).type == "cpu", source.device.type == "cpu"
        if to_cpu and not from_cpu:
            return "copies from the device to the host"
        if from_cpu and not to_cpu and not (late and source.is_pinned()):
            return PAGEABLE
        return None


def _at(args: Sequence[Any], place: int) -> Any:
    """An argument by its place, or the 0 that stands for one that is not given."""
    return args[place] if len(args) > place else 0


def _name(operation: Any) -> str:
    """``aten::copy_`` of an overload such as ``aten.copy_.default``."""
    packet = getattr(operation, "overloadpacket", operation)
    return str(packet).replace(".", "::", 1)


def _caller(ignored: str | None = None) -> str | None:
    """``file:line`` of the innermost frame outside torch and this file; None when the package
    ``ignored`` is among the callers."""
    found = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if ignored is not None and package == ignored:
            return None
        if found is None and _is_users(frame.f_code.co_filename):
            found = f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return found or "?"


def _raised_at(trace: TracebackType | None) -> str:
    """``file:line`` of the innermost frame of a traceback outside torch and this file."""
    where = "?"
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if _is_users(file):
            where = f"{_short(file)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return where


def _is_users(file: str) -> bool:
    return not file.startswith((_TORCH, "<")) and file not in (__file__, warnings.__file__)


def _short(file: str) -> str:
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except ValueError:
        return file


# --- layers ---------------------------------------------------------------------------------

Found = list[Violation]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Judges every operation of this thread before it runs."""

    def __init__(self, found: Found, rules: Rules, ignored: str | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found, self._rules, self._ignored = found, rules, ignored
        self.watched = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = _name(func)
        reason = self._rules.reason(name, args, kwargs)
        if reason is not None:
            where = _caller(self._ignored)
            if where is not None:
                self._found.append(Violation(name, reason, where))
        result = func(*args, **kwargs)
        everything = launches.leaves((args, kwargs, result))
        self.watched = self.watched or any(map(self._rules.on_device, everything))
        return result


def _values(rules: Rules, found: Found, ignored: str | None) -> Iterator[tuple[str, Any]]:
    """Methods of tensors that read values, each with one that notes it: reads of CPU tensors, which
    an emulator has for a device's, never reach the dispatcher, nor do those of another thread."""

    def noting(name: str, reads: Callable[..., bool], why: str = READS) -> Any:
        original = getattr(torch.Tensor, name)

        def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            where, seen = None, len(found)
            if rules.on_device(self) and reads(*args, **kwargs):
                where = _caller(ignored)
            try:
                return original(self, *args, **kwargs)
            finally:
                if where is not None and len(found) == seen:  # no other layer has seen it
                    found.append(Violation(f"torch.Tensor.{name}", why, where))

        return method

    for name in READING_METHODS:
        yield name, noting(name, lambda *args, **kwargs: True)
    yield "to", noting("to", _to_the_host)

    def fills(index: Any, value: Any) -> bool:
        """Whether ``x[mask] = value`` counts the mask for a scalar of the device."""
        mask = isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
        return mask and rules.on_device(value) and value.dim() == 0

    yield "__setitem__", noting("__setitem__", fills, COUNTED)


READING_METHODS = (
    *("item", "tolist", "numpy", "cpu", "__array__", "__repr__", "__format__"),
    *("__bool__", "__int__", "__float__", "__complex__", "__index__"),
)


def _to_the_host(*args: Any, **kwargs: Any) -> bool:
    """Whether ``x.to(...)`` asks for the CPU."""
    target = kwargs.get("device", args[0] if args else None)
    if isinstance(target, torch.Tensor):
        target = target.device
    return isinstance(target, (str, torch.device)) and torch.device(target).type == "cpu"


@contextmanager
def _waits_by_name(found: Found) -> Iterator[None]:
    """Notes the waits that torch offers in Python; debug mode knows only that on a stream.

    A function that was imported by name before is known by what it calls.
    """
    owners: list[tuple[Any, str, str]] = [
        (torch.cuda, "synchronize", "torch.cuda.synchronize"),
        (torch._C, "_cuda_synchronize", "torch.cuda.synchronize"),
        (torch.cuda.Stream, "synchronize", "torch.cuda.Stream.synchronize"),
        (torch.cuda.Event, "synchronize", "torch.cuda.Event.synchronize"),
        (getattr(torch, "accelerator", None), "synchronize", "torch.accelerator.synchronize"),
        (torch._C, "_accelerator_synchronizeDevice", "torch.accelerator.synchronize"),
    ]
    with pytest.MonkeyPatch.context() as patch:
        for owner, attribute, name in owners:
            original = getattr(owner, attribute, None)
            if original is not None:
                patch.setattr(owner, attribute, _noting(original, name, found))
        yield


def _noting(original: Callable[..., Any], name: str, found: Found) -> Callable[..., Any]:
    def synchronize(*args: Any, **kwargs: Any) -> Any:
        one = Violation(name, "waits for the device", _caller() or "?")
        if found[-1:] != [one]:  # which the function that calls this one has noted
            found.append(one)
        return original(*args, **kwargs)

    return synchronize


SYNCHRONIZING = "synchronizing CUDA operation"
"""What torch says of a wait."""


@contextmanager
def _debug_mode(found: Found) -> Iterator[None]:
    """Notes where torch waits for a stream, in C++ and in other threads too."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        show = warnings.showwarning

        def note(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: Any = None,
            line: str | None = None,
        ) -> None:
            text = str(message).partition("\n")[0]
            if SYNCHRONIZING not in text:
                show(message, category, filename, lineno, file, line)
                return
            where = _caller() or "?"
            if all(one.where != where for one in found):  # no other layer has seen it
                found.append(Violation("CUDA", text, where))

        warnings.showwarning = note
        warnings.filterwarnings("always", message=f".*{SYNCHRONIZING}")
        warnings.filterwarnings("ignore", message=".*[Ss]ynchronization debug mode")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


WINDOW = "pytest_kernel_claims.no_host_sync"
WAITING_CALL = re.compile(
    r"cu(da)?(Stream|Device|Event|Ctx)Synchronize|cudaMemcpy(2D|3D)?(_|$)|cuMemcpyDtoH|cudaFree(_|$)"
)


@contextmanager
def _profiled(found: Found, where: str) -> Iterator[Callable[[], Any]]:
    """Profiles the block; the yielded function opens the window that counts, because the
    profiler itself waits when it ends."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    profiler = torch.profiler.profile(activities=activities)
    with profiler:
        yield lambda: torch.profiler.record_function(WINDOW)
    events: list[Any] = list(profiler.events() or ())  # type: ignore[no-untyped-call]
    # The device has a row of that name too, later than the host's.
    windows = [
        event.time_range
        for event in events
        if event.name == WINDOW and str(event.device_type).endswith("CPU")
    ]
    for event in events:
        begin = event.time_range.start
        if event.name.startswith("Memcpy DtoH"):
            found.append(Violation(event.name, "copies from the device to the host", where))
        elif WAITING_CALL.match(event.name) and any(w.start <= begin <= w.end for w in windows):
            found.append(Violation(event.name, "waits for the device (profiler)", where))


# --- the audit ------------------------------------------------------------------------------


class Audit:
    """A block under audit; ``violations`` holds what was found, at the latest when it is left.

    ``ignored`` names a package whose operations do not count: the launches of an emulator.
    """

    def __init__(
        self, level: Level, rules: Rules, gpu: bool = False, ignored: str | None = None
    ) -> None:
        self.violations: Found = []
        self._level, self._rules, self._gpu, self._ignored = level, rules, gpu, ignored
        self._allowed: dict[str, str] = {}
        self._stack = ExitStack()
        self._recorder = _Recorder(self.violations, rules, ignored)

    def allow(self, operation: str, reason: str) -> None:
        """Let an operation, such as ``"aten::copy_"``, pass in this block. Reports name both."""
        if not reason:
            raise ValueError("reason: got '', expected why this operation may wait")
        self._allowed[operation] = reason

    @property
    def watched(self) -> bool:
        """Whether an operation on a device's tensors was seen, or a violation."""
        return self._recorder.watched or bool(self.violations)

    @property
    def counted(self) -> Found:
        """Violations that were not allowed."""
        return [one for one in self.violations if one.operation not in self._allowed]

    def __enter__(self) -> Audit:
        with ExitStack() as stack:
            window: Callable[[], Any] | None = None
            if self._gpu and self._level == "deep":
                window = stack.enter_context(_profiled(self.violations, _caller() or "?"))
            if self._gpu:
                stack.enter_context(_debug_mode(self.violations))
            stack.enter_context(_waits_by_name(self.violations))
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            for name, method in _values(self._rules, self.violations, self._ignored):
                patch.setattr(torch.Tensor, name, method)
            stack.enter_context(self._recorder)
            if window is not None:
                stack.enter_context(window())
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        __tracebackhide__ = True
        self._stack.close()
        if error is not None and not isinstance(error, Exception):
            return
        raised = None if error is None else _violation_of(error, trace)
        if raised is not None and all(one.where != raised.where for one in self.violations):
            self.violations.append(raised)
        if self.counted:
            raise HostSync(self.report()) from error

    def report(self) -> str:
        """All violations, a line each."""
        lines = [f"{len(self.counted)} host sync(s)", *(f"  {one}" for one in self.counted)]
        lines += [f"  allowed: {name} ({reason})" for name, reason in self._allowed.items()]
        return "\n".join(lines)


def _violation_of(error: Exception, trace: TracebackType | None) -> Violation | None:
    """What an exception says about the host path: meta tensors raise."""
    text = str(error)
    first = text.partition("\n")[0]
    if isinstance(error, (RuntimeError, TypeError)) and "meta" in text.lower():
        return Violation("meta tensor", first, _raised_at(trace))
    return None


_PROVEN = pytest.StashKey[set[str]]()


class NoHostSync:
    """The ``no_host_sync`` fixture: ``with no_host_sync(level=None, on=()) as audit:``.

    Args of a call:
        level: ``"dispatch"`` or ``"deep"``; None takes that of the test's mark
            ``no_host_sync(level=...)``, else that of ``--sync-audit``. An explicit ``"deep"``
            skips the test where there is no GPU.
        on: further device types whose tensors stand for the device's, such as ``("cpu",)``.
    """

    def __init__(self, node: pytest.Item) -> None:
        self._node = node

    @contextmanager
    def __call__(self, level: Level | None = None, on: Sequence[str] = ()) -> Iterator[Audit]:
        __tracebackhide__ = True
        here = arch.machine(self._node.config)
        gpu = here.gpu is not None and here.provider is None
        chosen = self._level(level, gpu)
        ignored = None
        if here.provider is not None:
            on, ignored = (*on, "cpu"), type(here.provider).__module__.partition(".")[0]
        self._prove(chosen, gpu)
        audit, seen = Audit(chosen, Rules(on), gpu, ignored), launches.Seen()
        try:
            with audit:
                yield audit
        finally:
            count = float(len(audit.counted))
            figure = Measurement(f"host syncs ({chosen})", count, 0.0)
            Measured(self._node).record(figure)
        launched = here.provider is not None and here.provider.launched(self._node)
        if not (audit.watched or seen or launched):
            pytest.skip(f"no_host_sync watched no tensor of a device and no launch; {here}")

    def _level(self, level: Level | None, gpu: bool) -> Level:
        config = self._node.config
        if level is None:
            mark = next(arch.marks(self._node, "no_host_sync"), None)
            level = mark.kwargs.get("level") if mark is not None else None
        if level not in (None, *LEVELS):
            raise ValueError(f"level: got {level!r}, expected one of {', '.join(LEVELS)}")
        if sanitizer.active(config) is not None:
            # A profiler cannot run under a sanitizer.
            return "dispatch"
        if level == "deep" and not gpu:
            pytest.skip(f"a deep audit needs a GPU; {arch.machine(config)}")
        chosen: Level = level or config.getoption("sync_audit")
        return chosen

    def _prove(self, level: Level, gpu: bool) -> None:
        """Fail the test unless each layer of this machine finds a planted read."""
        proven = self._node.config.stash.setdefault(_PROVEN, set())
        layers = ["dispatch"] + ["debug mode"] * gpu + ["deep"] * (gpu and level == "deep")
        for layer in layers:
            if layer not in proven:
                if not planted_read_is_found(layer, "cuda" if gpu else "meta"):
                    pytest.fail(f"no_host_sync: a planted .item() was not found by {layer}")
                proven.add(layer)


def planted_read_is_found(layer: str, device: str) -> bool:
    """Whether one layer by itself sees ``.item()``."""
    tensor = torch.zeros((), device=device)
    found: Found = []
    try:
        if layer == "dispatch":
            with _Recorder(found, Rules(), None):
                tensor.item()
        elif layer == "debug mode":
            with _debug_mode(found):
                tensor.item()
        else:
            with _profiled(found, "planted") as window, window():
                tensor.item()
    except (RuntimeError, NotImplementedError) as error:
        return bool(found) or _violation_of(error, None) is not None
    return bool(found)


# --- graphs ---------------------------------------------------------------------------------


class GraphSafe:
    """The ``graph_safe`` fixture; skips without a GPU.

    ``graph_safe(call, inputs=None, rounds=2)`` warms ``call`` up, captures it into a CUDA graph,
    and for each round compares what a replay leaves in the captured results with what an eager
    call returns, bit for bit. The results are overwritten before each replay.

    Args of a call:
        call: function without arguments that returns a tensor or nested tuples and lists of them.
        inputs: ``inputs(i)`` puts the inputs of round ``i`` in place, and all else that a call
            changes, before each run of it. A host that acts on values it read shows when they
            differ between rounds.
        rounds: number of replays.

    Raises AssertionError when the capture fails or a replay differs.
    """

    def __init__(self, node: pytest.Item) -> None:
        here = arch.machine(node.config)
        if here.gpu is None or here.provider is not None:
            pytest.skip(f"graph capture needs a GPU; {here}")

    def __call__(
        self,
        call: Callable[[], Any],
        inputs: Callable[[int], object] | None = None,
        rounds: int = 2,
    ) -> None:
        place = inputs or (lambda i: None)
        want = []
        for i in range(rounds):
            place(i)
            want.append([tensor.clone() for tensor in _tensors(call())])
        if not want or not want[0]:
            raise ValueError("call: got no tensor, expected results to compare")
        place(0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with launches.captured(graph, capture_error_mode="global") as found:
                captured = _tensors(call())
        except Exception as error:
            raise AssertionError(f"graph_safe: cannot be captured: {error}") from error
        if not found.launches:
            pytest.skip("graph_safe: the call launched nothing that was captured")
        for i in range(rounds):
            for tensor in captured:
                _overwrite(tensor)
            place(i)
            graph.replay()
            torch.cuda.synchronize()
            compare.assert_bitwise(captured, want[i])


def _overwrite(tensor: torch.Tensor) -> None:
    """Put values there that no replay leaves by chance."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(torch.nan)
    else:
        tensor.bitwise_not_()


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors of nested tuples and lists, in order; None is nothing."""
    if value is None:
        return []
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for one in value for tensor in _tensors(one)]
    raise TypeError(f"call: got {type(value).__name__} among its results, expected tensors")
