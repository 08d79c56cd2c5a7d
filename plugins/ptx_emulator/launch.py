"""The library face: load an exported kernel, call it with CPU tensors, and read what the checks
found.
"""

from __future__ import annotations

import ctypes
import tempfile
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ptx_emulator import link
from ptx_emulator.device import Statistics
from ptx_emulator.errors import CHECKS, CheckFailure, EmulationError, Finding, KernelFault
from ptx_emulator.machine import DEFAULT_BUDGET, Machine
from ptx_emulator.memory import Buffer
from ptx_emulator.parser import parse
from ptx_emulator.program import Program
from ptx_emulator.ptx import Kernel
from ptx_emulator.state import Launch

if TYPE_CHECKING:
    import torch

_CUDA = 2  # kDLCUDA


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
    )


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = (
    ctypes.c_void_p,
    [ctypes.py_object, ctypes.c_char_p],
)


class _AsCuda:
    """DLPack exporter that presents a CPU tensor as one on CUDA device 0. The data stays where it
    is.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_CUDA, 0)

    def __dlpack__(self, **_: object) -> object:
        from torch.utils import dlpack

        capsule = dlpack.to_dlpack(self.tensor)  # type: ignore[attr-defined]
        head = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
        head.device_type, head.device_id = _CUDA, 0
        return capsule


def _is_tensor(x: object) -> bool:
    import torch

    return isinstance(x, torch.Tensor)


def _argument(x: Any) -> Any:
    """A CPU tensor becomes one that the host code takes for a CUDA tensor; anything else passes
    through.
    """
    if not _is_tensor(x):
        return x
    import tvm_ffi

    return tvm_ffi.from_dlpack(_AsCuda(x))


@dataclass
class Result:
    """What a run did and found.

    `findings`: (finding, count), most frequent first. `launches`: grid, block, cluster, shared
    memory and attributes of each launch. `seconds`: time spent in the emulator, translation
    included.
    """

    findings: list[tuple[Finding, int]] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    statistics: Statistics = field(default_factory=Statistics)
    seconds: float = 0.0


@dataclass(frozen=True)
class Options:
    """How to run. `checks`: names out of `CHECKS`; bounds and alignment are enforced in any case,
    since the memory is the host's. `seed`: None for the deterministic schedule, a number for an
    adversarial one. `budget`: warp instructions of one launch, looked at where a warp jumps.
    `holes`: also refuse accesses between the elements of strided tensors. `collect`: return
    findings instead of raising `CheckFailure`.
    """

    checks: frozenset[str] = frozenset(CHECKS)
    seed: int | None = None
    budget: int = DEFAULT_BUDGET
    holes: bool = False
    collect: bool = False

    def __post_init__(self) -> None:
        """Raise ``TypeError`` or ``ValueError`` for what no run can have."""
        if self.seed is not None and type(self.seed) is not int:
            raise TypeError(f"seed: got {self.seed!r}, expected None or an int")
        if type(self.budget) is not int:
            raise TypeError(f"budget: got {self.budget!r}, expected an int")
        if self.budget < 1:
            raise ValueError(f"budget: got {self.budget}, expected at least 1")


def _options(settings: dict[str, Any]) -> Options:
    """Options by name; `checks` is any set of names, not one name."""
    known = [one.name for one in fields(Options)]
    unknown = sorted(settings.keys() - set(known))
    if unknown:
        others = ("memory", "readonly", "uninitialized")
        raise TypeError(f"got {unknown}, expected settings of {[*others, *known]}")
    checks = settings.get("checks", CHECKS)
    if isinstance(checks, str):
        raise TypeError(f"checks: got {checks!r}, expected a list of names such as [{checks!r}]")
    return Options(**{**settings, "checks": frozenset(checks)})


class EmulatedFunction:
    """A kernel's exported host function whose launches run in the emulator. Made by `load` and
    `from_compiled`.
    """

    def __init__(self, host_object: bytes, ptx: str, symbol: str) -> None:
        self.ptx, self.symbol = ptx, symbol
        self.kernels: dict[str, Kernel] = parse(ptx)
        self._function, self._shim, self._module = link.load(link.link(host_object), symbol)
        self._programs: dict[tuple[str, int], Program] = {}
        self._lock = threading.RLock()
        target = next(iter(self.kernels.values())).target if self.kernels else "sm_90a"
        digits = int("".join(c for c in target if c.isdigit()))
        self._shim.ptx_emulator_set_capability(digits // 10, digits % 10)

    def with_ptx(self, ptx: str) -> EmulatedFunction:
        """The same host code with other PTX text: for tests that plant a fault."""
        other = object.__new__(EmulatedFunction)
        other.__dict__.update(self.__dict__)
        other.ptx, other.kernels, other._programs = ptx, parse(ptx), {}
        return other

    def __call__(self, *arguments: Any, **settings: Any) -> Result:
        """Run on CPU tensors. See `run` for the settings."""
        memory = settings.pop("memory", ())
        readonly = tuple(settings.pop("readonly", ()))
        uninitialized = tuple(settings.pop("uninitialized", ()))
        options = _options(settings)
        buffers = _buffers(arguments, memory, readonly, uninitialized)
        return self.call(arguments, buffers, options)

    def call(self, arguments: Sequence[Any], buffers: Sequence[Buffer], options: Options) -> Result:
        """Run with the memory that the kernel may touch given as buffers."""
        with self._lock:
            return self._run(arguments, buffers, options)

    def _run(self, arguments: Sequence[Any], buffers: Sequence[Buffer], options: Options) -> Result:
        result, raised = Result(), list[BaseException]()
        machine = Machine(
            self.kernels,
            options.checks,
            options.seed,
            options.budget,
            options.holes,
            self._programs,
        )

        def launch(record: Any) -> int:
            """Success in any case: the host code's own error path is slow, and an exception must
            not unwind through C. What was raised is raised again when the host code is back.
            """
            if raised:
                return 0
            start = time.perf_counter()
            try:
                made = self._launch(record[0])
                result.launches.append(made)
                machine.launch(made, buffers)
            except BaseException as e:
                raised.append(e)
            result.seconds += time.perf_counter() - start
            return 0

        for number, a in enumerate(arguments):
            if _is_tensor(a) and a.device.type != "cpu":
                got = f"a tensor on {a.device}"
                raise ValueError(f"argument {number}: got {got}, expected one on the CPU")
        converted = [_argument(a) for a in arguments]
        callback = link.LAUNCH_CALLBACK(launch)
        self._shim.ptx_emulator_set_launch(callback)
        try:
            self._function(*converted)
        finally:
            self._shim.ptx_emulator_set_launch(link.LAUNCH_CALLBACK())
        result.findings = machine.findings.most_common()
        result.statistics = machine.statistics
        if raised:
            error = raised[0]
            if isinstance(error, KernelFault) and machine.findings:
                raise KernelFault(error.finding, condensed(machine.findings))
            raise error
        if result.findings and not options.collect:
            raise CheckFailure(condensed(machine.findings))
        return result

    def _launch(self, record: Any) -> Launch:
        name = record.name.decode()
        kernel = self.kernels.get(name)
        if kernel is None:
            raise EmulationError(f"the PTX has no entry {name}, it has {list(self.kernels)}")
        parameters = bytearray(kernel.param_bytes)
        for i, variable in enumerate(kernel.params.values()):
            value = ctypes.string_at(record.arguments[i], variable.bytes)
            parameters[variable.offset : variable.offset + variable.bytes] = value
        grid, block, cluster = (
            (int(d[0]), int(d[1]), int(d[2])) for d in (record.grid, record.block, record.cluster)
        )
        return Launch(
            name,
            grid,
            block,
            cluster,
            int(record.dynamic_shared),
            bytes(parameters),
            bool(record.cooperative),
            bool(record.programmatic_serialization),
            int(record.max_dynamic_shared),
        )


def condensed(findings: Counter[Finding]) -> list[tuple[Finding, int]]:
    """One entry per check, message and instruction, with the first CTA and warps as the example."""
    groups: dict[tuple[str, str, int], list[tuple[Finding, int]]] = {}
    for f, n in findings.items():
        groups.setdefault((f.check, f.message, f.ptx_line), []).append((f, n))
    return [(members[0][0], sum(n for _, n in members)) for members in groups.values()]


def _buffers(
    arguments: Iterable[Any],
    memory: Iterable[Any] | Mapping[str, Any],
    readonly: Sequence[Any],
    uninitialized: Sequence[Any],
) -> list[Buffer]:
    named: list[tuple[str, Any]] = []
    for i, a in enumerate(arguments):
        if _is_tensor(a):
            named.append((f"argument {i}", a))
    pairs = memory.items() if isinstance(memory, Mapping) else enumerate(memory)
    named += [(str(k) if isinstance(k, str) else f"memory {k}", t) for k, t in pairs]
    listed = {_view(t) for _, t in named}
    named += [(f"read-only {i}", t) for i, t in enumerate(readonly) if _view(t) not in listed]
    constant = {_view(t) for t in readonly}
    fresh = {_view(t) for t in uninitialized}
    return [buffer_of(n, t, _view(t) in constant, _view(t) not in fresh) for n, t in named]


def buffer_of(name: str, t: torch.Tensor, readonly: bool, initialized: bool = True) -> Buffer:
    """The memory of a tensor."""
    size = t.element_size()
    strides = tuple(s * size for s in t.stride())
    label = f"{name} {tuple(t.shape)}"
    return Buffer(label, t.data_ptr(), tuple(t.shape), strides, size, readonly, initialized)


def _view(t: Any) -> tuple[Any, ...]:
    return (t.data_ptr(), tuple(t.shape), tuple(t.stride()), t.dtype)


def load(host_object: bytes, ptx: str, symbol: str) -> EmulatedFunction:
    """An exported object (`compiled.export_to_c`), its PTX, and the name of its function ->
    `EmulatedFunction`.

    Raises `NoCompiler` without a C compiler, `UnsupportedInstruction` for PTX outside the model.
    """
    return EmulatedFunction(host_object, ptx, symbol)


_from_compiled: weakref.WeakKeyDictionary[Any, EmulatedFunction] = weakref.WeakKeyDictionary()


def from_compiled(compiled: Any) -> EmulatedFunction:
    """A function compiled by `cute.compile(.., options="--enable-tvm-ffi --keep-ptx")` ->
    `EmulatedFunction`.

    Compile from fake tensors, as for shipping: a real CPU tensor would be compiled for generic
    memory. With `--generate-line-info` reports name lines of the Python source.
    """
    known = _from_compiled.get(compiled)
    if known is not None:
        return known
    ptx = getattr(compiled, "__ptx__", None)
    if not ptx:
        raise ValueError('the compiled function has no PTX: compile with options="--keep-ptx"')
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.o"
        compiled.export_to_c(str(path), function_name="emulated")
        made = load(path.read_bytes(), ptx, "emulated")
    _from_compiled[compiled] = made
    return made


def run(compiled: Any, *arguments: Any, **settings: Any) -> Result:
    """Run a compiled CuTe DSL function on CPU tensors.

    `arguments` are those of the function: torch tensors on the CPU (seen by the host code as CUDA
    tensors), numbers, addresses. Settings, all by keyword:

    memory: further tensors that the kernel may touch (a sequence, or names to tensors), for kernels
    that take addresses. readonly: tensors that the kernel may not store to. uninitialized: tensors
    that it may not read before writing (with initcheck). checks, seed, budget, holes, collect: see
    `Options`.

    Raises `KernelFault` for what cannot be continued (out of bounds, deadlock, ..), `CheckFailure`
    for findings, `UnsupportedInstruction` for what is not modelled; and what the generated host
    code itself raises for bad arguments.
    """
    return from_compiled(compiled)(*arguments, **settings)
