"""Configuration to object file: trace, compile and export one kernel, with no GPU and no tensor."""

from __future__ import annotations

import importlib
import inspect
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linattn import env
from linattn.host import dispatch
from linattn.host.arch import Arch
from linattn.spec.dtypes import DTYPES
from linattn.spec.operator import Operator
from linattn.spec.signature import Signature, TensorSpec


@dataclass(frozen=True)
class Artifact:
    """What one compilation yields.

    Attributes:
        object: host object file with the machine code embedded; its function takes the arguments
            of the operator's signature and launches on TVM-FFI's current stream.
        cubin: the machine code alone.
        ptx: the PTX it was assembled from.
        symbol: name of the function in the object.
    """

    object: bytes
    cubin: bytes
    ptx: str
    symbol: str


def fake_arguments(signature: Signature) -> list[Any]:
    """Placeholders for the arguments of ``signature``: addresses, numbers, and for the tensor that
    goes whole symbolic sizes and strides, no storage."""
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    def whole(spec: TensorSpec) -> Any:
        return make_fake_tensor(
            getattr(cutlass, spec.element.cutlass),
            tuple(cute.sym_int() if isinstance(dim, str) else dim for dim in spec.dims),
            tuple(cute.sym_int64(divisibility=spec.stride_divisor) for _ in spec.dims),
            assumed_align=spec.alignment,
        )

    arguments = [whole(spec) if spec.whole else cutlass.Int64(0) for spec in signature.tensors]
    arguments.append(cutlass.Int64(0))
    arguments += [getattr(cutlass, DTYPES[dtype].cutlass)(0) for _, dtype in signature.scalars]
    return [*arguments, make_fake_stream(use_tvm_ffi_env_stream=True)]


def build(operator: Operator, target: str, config: Any) -> Artifact:
    """Compile one configuration of ``operator`` for ``target`` (such as ``sm_90a``).

    The kernel is the class that the architecture's file calls ``KERNEL``.

    Not thread-safe, because the DSL's compiler is not; ``host/cache.py`` serialises its calls.

    Raises:
        RuntimeError: settings of the compiler were changed after it had read them, or ask it for
            no code.
        TypeError: a kernel whose parameters are not the arguments of its signature, in order.
    """
    from cutlass import cute

    from linattn.device import compat

    read, told = compat.settings(), env.compiler_settings()
    if env.code_settings(read) != {name: told[name] for name in read if name in told}:
        raise RuntimeError(
            f"{env.COMPILER}*: got {told} in the environment, expected "
            f"{env.code_settings(read)}, by which cutlass works since it was imported or told so"
        )

    module = dispatch.kernel_of(operator, Arch.parse(target)).module
    kernel = importlib.import_module(module).KERNEL(config)
    expected = (*operator.signature.arguments, "stream")
    parameters = tuple(inspect.signature(kernel.__call__).parameters)
    if parameters != expected:
        raise TypeError(f"{module}: got parameters {parameters}, expected {expected}")

    symbol = config.name()
    # The default name spells out every layout; a profiler row should be readable.
    kernel.kernel.set_name_prefix(symbol, remove_cutlass_symbol=True, keep_mangled_name=False)
    with _plain_folder() as folder:
        options = f"--gpu-arch {target} --enable-tvm-ffi --keep-ptx --keep-cubin"
        compiled = cute.compile(
            kernel,
            *fake_arguments(operator.signature),
            options=f"{options} --dump-dir {folder}",
        )
        if compiled is None:
            raise RuntimeError(f"{symbol}: got no code, expected a kernel; settings: {told}")
        path = Path(folder) / "kernel.o"
        compiled.export_to_c(str(path), function_name=symbol)
        return Artifact(path.read_bytes(), compiled.__cubin__, compiled.__ptx__, symbol)


@contextmanager
def _plain_folder() -> Iterator[str]:
    """A temporary folder by a name that holds neither spaces nor quotes, whatever ``TMPDIR`` holds:
    the compiler takes it as a word of its options, at several levels."""
    with tempfile.TemporaryDirectory(prefix="linattn-build-") as folder:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield f"/proc/{os.getpid()}/fd/{handle}"
        finally:
            os.close(handle)
