"""pytest_kernel_claims: statements about GPU kernels as marked pytest tests.

``entry`` is what pytest loads, ``plugin`` holds the hooks and fixtures, ``arch`` decides which GPU
tests may run on, ``claims`` collects and publishes verdicts and has the commands on claims files,
``compare`` judges tensors, ``codegen`` reads machine code, ``hostsync`` audits the host path,
``child`` re-runs tests in a pytest of their own, ``sanitizer`` does so under compute-sanitizer.
Timing: ``timing`` is the fixture, ``processes`` decides which process times what, ``events`` is
what one process does, ``gpustate`` observes the GPU meanwhile, ``figures`` is the arithmetic.
``launches`` tells whether anything was launched, ``progress`` how far long work is,
``termination`` lets a run that a time limit ends write what it has.
Nothing here imports torch, numpy or CUDA state until a marker, option or fixture needs it.
"""

from __future__ import annotations

Capability = tuple[int, int]

FAMILIES: dict[str, tuple[Capability, ...]] = {
    "sm90": ((9, 0),),
    "sm100": ((10, 0), (10, 3)),
    "sm103": ((10, 3),),
}
"""Compute capabilities by family."""
