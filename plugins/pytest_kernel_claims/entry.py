"""What pytest loads of an installed package: the plugin, where pytest is new enough for it.

Beside an older pytest, which another project may have pinned, it is not there: nothing is imported
that such a pytest cannot load, and no run is disturbed.
"""

from __future__ import annotations

import pytest

LOWEST = (9, 0)
"""The version that the extra ``conformance`` asks for."""

if pytest.version_tuple[:2] >= LOWEST:
    pytest_plugins = ["pytest_kernel_claims.plugin"]
