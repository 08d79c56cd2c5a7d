"""Configuration to object file: trace, compile and export one kernel, with no GPU and no tensor.

``python -m linattn.host.compile --arch sm_90a --all`` fills the kernel cache ahead of time.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linattn import env
from linattn.errors import UnsupportedArchitecture
from linattn.host import dispatch
from linattn.host.arch import Arch
from linattn.host.dtypes import DTYPES
from linattn.host.signature import SIGNATURES, Kind, Signature, TensorSpec


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
    """Placeholders for the arguments of ``signature``: symbolic sizes and strides, no storage.

    A size that appears under one name in several tensors is one symbol, so the compiled function
    itself checks that they agree.
    """
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    symbols: dict[str, Any] = {}

    def size(dim: str | int) -> Any:
        return symbols.setdefault(dim, cute.sym_int()) if isinstance(dim, str) else dim

    def tensor(spec: TensorSpec) -> Any:
        free = len(spec.dims) - spec.packed
        strides = [cute.sym_int64(divisibility=spec.stride_divisor) for _ in range(free)]
        return make_fake_tensor(
            getattr(cutlass, spec.element.cutlass),
            tuple(size(dim) for dim in spec.dims),
            (*strides, *(1,) * spec.packed),
            assumed_align=spec.alignment,
        )

    arguments: list[Any] = []
    for spec in signature.tensors:
        if spec.kind is Kind.NUMBERS:
            arguments += [cutlass.Int64(0), cutlass.Int32(0)]
        elif spec.by_address:
            arguments += [cutlass.Int64(0) for _ in spec.arguments]
        else:
            arguments.append(tensor(spec))
    if signature.has_layout:
        arguments.append(cutlass.Int64(0))
    for _, dtype in signature.scalars:
        arguments.append(getattr(cutlass, DTYPES[dtype].cutlass)(0))
    return [*arguments, make_fake_stream(use_tvm_ffi_env_stream=True)]


def build(operator: str, target: str, config: Any) -> Artifact:
    """Compile one configuration of ``operator`` for ``target`` (such as ``sm_90a``).

    The kernel is the class that the architecture's file calls ``KERNEL``.

    Not thread-safe, because the DSL's compiler is not; ``host/cache.py`` serialises its calls.
    """
    from cutlass import cute

    module = dispatch.kernel_of(operator, Arch.parse(target)).module
    kernel = importlib.import_module(module).KERNEL(config)

    symbol = config.name()
    # The default name spells out every layout; a profiler row should be readable.
    kernel.kernel.set_name_prefix(symbol, remove_cutlass_symbol=True, keep_mangled_name=False)
    with tempfile.TemporaryDirectory(prefix="linattn-build-") as folder:
        options = f"--gpu-arch {target} --enable-tvm-ffi --keep-ptx --keep-cubin"
        compiled = cute.compile(
            kernel,
            *fake_arguments(SIGNATURES[operator]),
            options=f"{options} --dump-dir {folder}",
        )
        path = Path(folder) / "kernel.o"
        compiled.export_to_c(str(path), function_name=symbol)
        return Artifact(path.read_bytes(), compiled.__cubin__, compiled.__ptx__, symbol)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: compile configurations into the kernel cache and print where they are.

    Returns 0; 1 where the cache cannot be written; 2 for an architecture without a kernel.
    """
    parser = argparse.ArgumentParser(
        prog="python -m linattn.host.compile",
        description="Compile kernels into the cache. Needs neither a GPU nor a driver.",
    )
    parser.add_argument("--arch", action="append", required=True, metavar="TARGET")
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument(
        "--all", action="store_true", help="every operator that has a kernel for the target"
    )
    chosen.add_argument("--operator", action="append", choices=sorted(SIGNATURES))
    options = parser.parse_args(arguments)
    try:
        for arch in map(Arch.parse, options.arch):
            for operator, config in _wanted(arch, options.operator):
                if not _fill(operator, arch, config):
                    return 1
    except (NotImplementedError, UnsupportedArchitecture, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _wanted(arch: Arch, operators: Sequence[str] | None) -> Iterator[tuple[str, Any]]:
    """The configurations of ``operators``, or of all that have a kernel for ``arch``."""
    for operator in operators or sorted(SIGNATURES):
        try:
            kernel = dispatch.kernel_of(operator, arch)
        except NotImplementedError as error:
            if operators:
                raise
            print(f"left out: {error}", file=sys.stderr)
        else:
            yield from ((operator, config) for config in kernel.configs)


def _fill(operator: str, arch: Arch, config: Any) -> bool:
    """Put one configuration into the cache; False where it cannot stay there."""
    from linattn.host import cache

    start = time.perf_counter()
    entry = cache.get(operator, arch.target, config)
    seconds = time.perf_counter() - start
    if not entry.path.is_relative_to(env.cache_dir()):
        print(f"error: nothing was kept: {env.cache_dir()} cannot be written", file=sys.stderr)
        return False
    print(f"{operator} {arch.target} {config.name()} {seconds:.1f} s {entry.path}")
    return True


if __name__ == "__main__":
    sys.exit(main())
