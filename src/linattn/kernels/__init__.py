"""Device code: a folder is an operator, a file in it an architecture."""

from __future__ import annotations

from linattn.kernels.kvbuffer_verify import config as kvbuffer_verify
from linattn.kernels.lightning_prefill import config as lightning_prefill
from linattn.kernels.mtp_decode import config as mtp_decode
from linattn.kernels.state_update import config as state_update
from linattn.spec.operator import Operator

OPERATORS: dict[str, Operator] = {
    module.OPERATOR.name: module.OPERATOR
    for module in (kvbuffer_verify, lightning_prefill, mtp_decode, state_update)
}
"""Every operator that ships, by name."""
