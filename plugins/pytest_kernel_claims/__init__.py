"""pytest_kernel_claims: statements about GPU kernels as marked pytest tests.

``plugin`` holds the hooks and fixtures, ``arch`` decides which GPU tests may run on, ``claims``
collects and publishes verdicts, ``compare`` judges tensors, ``codegen`` reads machine code,
``hostsync`` audits the host path, ``child`` re-runs tests in a pytest of their own, ``sanitizer``
does so under compute-sanitizer.
Nothing here imports torch, numpy or CUDA state until a marker, option or fixture needs it.
"""

from __future__ import annotations
