"""The emulator as a launcher of linattn: operators run on CPU tensors, through their compiled host
code and PTX.

    with use_launcher(EmulatedLauncher("sm90")):
        o, state = linattn.lightning_attn_fwd(q, k, v, decay)       # CPU tensors

The object and the PTX are those of linattn's kernel cache, so what runs is what ships. What the
kernel may touch follows from the operator's signature: inputs are read-only, outputs count as
uninitialised, and the bytes between the elements of strided views are out of bounds.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from linattn.host import cache
from linattn.host.arch import Arch
from linattn.host.launch import H200_MULTIPROCESSORS, Launcher
from linattn.spec.operator import Operator
from linattn.spec.signature import Signature
from ptx_emulator.errors import CHECKS
from ptx_emulator.launch import EmulatedFunction, Options, Result, load
from ptx_emulator.memory import Buffer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from linattn.host.arch import ArchLike

_functions: dict[str, EmulatedFunction] = {}
_lock = threading.Lock()


def emulated_function(operator: Operator, target: str, config: Any) -> EmulatedFunction:
    """The cached object of one configuration, loaded into the emulator once for this process."""
    found = cache.get(operator, target, config)
    name = str(found.path)
    with _lock:
        if name not in _functions:
            _functions[name] = load(found.files[cache.OBJECT], found.ptx(), found.symbol)
        return _functions[name]


def _start_afresh() -> None:
    """In a process that was forked, where a thread of its parent may have held a lock."""
    global _lock
    _lock = threading.Lock()
    _functions.clear()


os.register_at_fork(after_in_child=_start_afresh)


class EmulatedLauncher(Launcher):
    """Runs kernels of `arch` in the emulator.

    `checks`, `seed`, `budget`: see `ptx_emulator.Options`. `multiprocessors`: how many the device
    has; few of them make a persistent kernel walk several units of work. `results` holds what each
    launch did, the latest last.
    """

    def __init__(
        self,
        arch: ArchLike,
        checks: Iterable[str] = CHECKS,
        seed: int | None = None,
        multiprocessors: int = H200_MULTIPROCESSORS,
        **options: Any,
    ) -> None:
        super().__init__()
        self._arch, self._multiprocessors = Arch.parse(arch), multiprocessors
        self.options = Options(checks=frozenset(checks), seed=seed, holes=True, **options)
        self.results: list[Result] = []

    def expects(self, device: torch.device) -> str:
        return "" if device.type == "cpu" else "a CPU tensor (emulated)"

    def default_device(self) -> torch.device:
        return torch.device("cpu")

    def arch(self, device: torch.device) -> Arch:
        return self._arch

    def multiprocessors(self, device: torch.device) -> int:
        return self._multiprocessors

    def function(self, operator: Operator, arch: Arch, config: Any) -> Callable[..., Any]:
        """A callable with the arguments of the compiled function."""
        emulated = emulated_function(operator, arch.target, config)

        def call(*arguments: Any) -> None:
            buffers = signature_buffers(operator.signature, arguments)
            self.results.append(emulated.call(arguments, buffers, self.options))

        return call


def signature_buffers(signature: Signature, arguments: Sequence[Any]) -> list[Buffer]:
    """What a call may touch: its signature's tensors, whether they come whole or by address."""
    return [
        Buffer(
            f"{access.spec.name} {access.shape}",
            access.address,
            access.shape,
            tuple(stride * access.itemsize for stride in access.strides),
            access.itemsize,
            readonly=not access.spec.output,
            initialized=not access.spec.output or access.spec.updated,
        )
        for access in signature.call(arguments).accesses
    ]
