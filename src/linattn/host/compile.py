"""``python -m linattn.host.compile --arch sm_90a --all`` fills the kernel cache ahead of time."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from linattn import env
from linattn.errors import UnsupportedArchitecture
from linattn.host import cache, dispatch, toolchain
from linattn.host.arch import Arch
from linattn.kernels import OPERATORS
from linattn.spec.operator import Operator


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: compile configurations into the kernel cache and print where they are.

    Returns 0; 1 where the cache cannot be written; 2 for an architecture without a kernel, or a
    toolkit that is not installed.
    """
    parser = argparse.ArgumentParser(
        prog="python -m linattn.host.compile",
        description="Compile kernels into the cache. Needs neither a GPU nor a driver.",
    )
    parser.add_argument("--arch", action="append", required=True, metavar="TARGET")
    parser.add_argument(
        "--toolkit",
        metavar="NAME",
        help="CUDA toolkit of the DSL, cu12 or cu13: it takes the newest that the "
        "driver supports where the kernels will run (default: what it takes here)",
    )
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument(
        "--all", action="store_true", help="every operator that has a kernel for the target"
    )
    chosen.add_argument("--operator", action="append", choices=sorted(OPERATORS))
    options = parser.parse_args(arguments)
    try:
        root = env.cache_dir()
    except OSError as error:
        print(f"error: there is no folder for the cache: {error}", file=sys.stderr)
        return 1
    try:
        if options.toolkit is not None:
            toolchain.use_toolkit(options.toolkit)
        for arch in map(Arch.parse, options.arch):
            for operator, config in _wanted(arch, options.operator):
                if not _fill(operator, arch, config, root):
                    return 1
    except (NotImplementedError, UnsupportedArchitecture, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if len(toolchain.toolkits()) > 1:
        other = "; for a driver that takes another toolkit: --toolkit"
        print(f"by {toolchain.toolkit()}{other * (options.toolkit is None)}")
    return 0


def _wanted(arch: Arch, names: Sequence[str] | None) -> Iterator[tuple[Operator, Any]]:
    """The configurations of the operators named, or of all that have a kernel for ``arch``."""
    for name in names or sorted(OPERATORS):
        try:
            kernel = dispatch.kernel_of(OPERATORS[name], arch)
        except NotImplementedError as error:
            if names:
                raise
            print(f"left out: {error}", file=sys.stderr)
        else:
            yield from ((OPERATORS[name], config) for config in kernel.configs)


def _fill(operator: Operator, arch: Arch, config: Any, root: Path) -> bool:
    """Put one configuration into the cache; False where it cannot stay there."""
    start = time.perf_counter()
    entry = cache.get(operator, arch.target, config)
    seconds = time.perf_counter() - start
    if not entry.path.is_relative_to(root):
        print(f"error: nothing was kept: {root} cannot be written", file=sys.stderr)
        return False
    print(f"{operator.name} {arch.target} {config.name()} {seconds:.1f} s {entry.path}")
    return True


if __name__ == "__main__":
    sys.exit(main())
