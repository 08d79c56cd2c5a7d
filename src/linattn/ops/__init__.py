"""The public operators. Torch only: nothing here knows a kernel's code or a launch."""

from __future__ import annotations

from linattn.ops._face import declared
from linattn.ops._tools import explain, warm_up
from linattn.ops.lightning import lightning_attn_fwd, lightning_attn_fwd_varlen
from linattn.ops.speculative import (
    get_mtp_config,
    la_decode,
    la_decode_mtp,
    la_state_update_kvbuffer,
    la_verify_kvbuffer,
)

__all__ = [
    "declared",
    "explain",
    "get_mtp_config",
    "la_decode",
    "la_decode_mtp",
    "la_state_update_kvbuffer",
    "la_verify_kvbuffer",
    "lightning_attn_fwd",
    "lightning_attn_fwd_varlen",
    "warm_up",
]
