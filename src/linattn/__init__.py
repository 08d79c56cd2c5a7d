"""Linear-attention GPU kernels that carry their own proof.

Importing this package needs no GPU, no driver and no compiler: kernels are compiled, or loaded from
the cache, when an operator first needs them.
"""

from linattn.errors import CacheWarning, UnsupportedArchitecture
from linattn.host.arch import Arch
from linattn.host.cache import compile_count
from linattn.host.checked import checked
from linattn.host.dispatch import Plan
from linattn.kernels.mtp_decode.config import MtpConfig
from linattn.ops import (
    explain,
    get_mtp_config,
    la_decode,
    la_decode_mtp,
    la_state_update_kvbuffer,
    la_verify_kvbuffer,
    lightning_attn_fwd,
    lightning_attn_fwd_varlen,
    warm_up,
)

__all__ = [
    "Arch",
    "CacheWarning",
    "MtpConfig",
    "Plan",
    "UnsupportedArchitecture",
    "checked",
    "compile_count",
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
