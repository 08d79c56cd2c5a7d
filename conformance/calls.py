"""The public functions: what each promises of its tensors, a small legal call, and its claims.

Tests of a rule that every function keeps run over this table; what one function alone promises
stands with its family. The table is written by hand, from the documentation, so that it does not
repeat what a signature says by mistake.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import pytest
import torch

import linattn

INDICES = torch.int32, torch.int64


class Lies(Enum):
    """How a tensor has to lie in memory."""

    ROWS = "the last dimension contiguous"
    STATES = "the last two dimensions contiguous"
    LIST = "contiguous"
    VECTOR = "with any stride"


@dataclass(frozen=True)
class Argument:
    """One tensor of a function.

    Attributes:
        shape: as errors write it.
        dtypes: that are taken.
        lies: in memory.
        needed: may not be None.
        written: by the legal call below.
        passed: the compiled function's names of it, where they differ.
    """

    shape: str
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
    lies: Lies = Lies.ROWS
    needed: bool = True
    written: bool = False
    passed: tuple[str, ...] = ()

    @property
    def dims(self) -> list[str]:
        """Dimensions of the legal call's tensor: the last shape of several."""
        return self.shape.rpartition("[")[2].rstrip("]").split(", ")


@dataclass(frozen=True)
class Public:
    """One function.

    Attributes:
        tensors: by argument, in the order in which they are checked.
        sizes: of the legal call.
        flags: arguments that are bools.
        scaled: takes a scale.
        chunked: takes ``chunk_size`` and ``segments``.
        given: further arguments of the legal call.
        targets: architectures that kernels exist for.
        missing: architectures that kernels are to come for.
    """

    tensors: Mapping[str, Argument]
    sizes: Mapping[str, int]
    flags: tuple[str, ...] = ()
    scaled: bool = True
    chunked: bool = False
    given: Mapping[str, Any] = field(default_factory=dict)
    targets: tuple[str, ...] = ("sm90", "sm100")
    missing: tuple[str, ...] = ()

    @property
    def needed(self) -> list[str]:
        """Arguments that may not be None."""
        return [label for label, argument in self.tensors.items() if argument.needed]

    @property
    def written(self) -> list[str]:
        """Arguments that the legal call writes."""
        return [label for label, argument in self.tensors.items() if argument.written]


F32 = (torch.float32,)
OUT = Argument("[B, T, HV, 128]", needed=False, written=True, passed=("o",))
TOKENS = {
    "q": Argument("[B, T, H, 128]"),
    "k": Argument("[B, T, H, 128]"),
    "v": Argument("[B, T, HV, 128]"),
    "out": OUT,
    "decay": Argument("[H] or [HV]", F32, Lies.VECTOR),
}
POOL = Argument("[P, HV, 128, 128]", F32, Lies.STATES, written=True)
SLOTS = Argument("[B]", INDICES, Lies.VECTOR, needed=False)
KEYS = Argument("[P, T_max, H, 128]", needed=False, written=True)
BUFFERS = {"k_buffer": KEYS, "v_buffer": replace(KEYS, shape="[P, T_max, HV, 128]")}
DRAFTS = {"B": 2, "T": 3, "H": 2, "HV": 4, "P": 5, "T_max": 4}


def _of_batch(batch: str, tensors: Mapping[str, Argument]) -> dict[str, Argument]:
    return {
        x: replace(one, shape=one.shape.replace("[B, T, ", batch)) for x, one in tensors.items()
    }


PUBLIC: dict[str, Public] = {
    "lightning_attn_fwd": Public(
        TOKENS | {"initial_state": Argument("[B, HV, 128, 128]", F32, Lies.STATES, needed=False)},
        {"B": 2, "T": 5, "H": 2, "HV": 4},
        flags=("output_final_state",),
        chunked=True,
        given={"output_final_state": True},
        targets=("sm90",),
        missing=("sm100", "sm103"),
    ),
    "lightning_attn_fwd_varlen": Public(
        _of_batch("[1, T, ", TOKENS)
        | {
            "state_pool": replace(POOL, needed=False, passed=("initial_state", "final_state")),
            "cu_seqlens": Argument("[N + 1]", INDICES, Lies.LIST),
            "initial_state_indices": Argument(
                "[N]", INDICES, Lies.LIST, needed=False, passed=("slots",)
            ),
            "has_initial_state": Argument(
                "[N]", (torch.bool,), Lies.LIST, needed=False, passed=("has_initial",)
            ),
        },
        {"T": 6, "H": 2, "HV": 4, "N": 3, "P": 5},
        flags=("persistent",),
        chunked=True,
        targets=("sm90",),
        missing=("sm100", "sm103"),
    ),
    "la_decode": Public(
        _of_batch("[B, ", TOKENS) | {"state_pool": POOL, "state_indices": SLOTS}, DRAFTS
    ),
    "la_decode_mtp": Public(
        TOKENS
        | {
            "state_pool": POOL,
            "intermediate_states": Argument(
                "[B, T, HV, 128, 128]", F32, Lies.STATES, needed=False, written=True
            ),
            "state_indices": SLOTS,
        },
        DRAFTS,
        flags=("update_state",),
    ),
    "la_verify_kvbuffer": Public(
        TOKENS
        | {"state_pool": POOL, **BUFFERS, "state_indices": SLOTS}
        | {"accepted_len": replace(SLOTS, needed=False)},
        DRAFTS,
    ),
    "la_state_update_kvbuffer": Public(
        {label: replace(one, needed=True, written=False) for label, one in BUFFERS.items()}
        | {"decay": TOKENS["decay"], "state_pool": POOL, "state_indices": SLOTS}
        | {"accepted_len": replace(SLOTS, needed=True)},
        DRAFTS,
        scaled=False,
    ),
}


def legal(name: str, seed: int | None = None, **sizes: int) -> dict[str, Any]:
    """Arguments of a legal call with every optional one.

    Args:
        name: key of ``PUBLIC``.
        seed: of inputs that are standard normal numbers; zeros without one.
        sizes: other ones than the table's.
    """
    public = PUBLIC[name]
    taken = {**public.sizes, **sizes}
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    arguments: dict[str, Any] = {}
    for label, argument in public.tensors.items():
        shape = [_size(dim, taken) for dim in argument.dims]
        if label in CONTENTS:
            arguments[label] = CONTENTS[label](taken)
        elif generator is None or label == "out":
            arguments[label] = torch.zeros(shape, dtype=argument.dtypes[0])
        else:
            numbers = torch.randn(shape, generator=generator)
            numbers = numbers.abs() if label == "decay" else numbers
            arguments[label] = numbers.to(argument.dtypes[0])
    return arguments | public.given


def bare(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The same without what may be None."""
    tensors = PUBLIC[name].tensors
    return {label: arguments[label] if one.needed else None for label, one in tensors.items()}


CONTENTS: dict[str, Any] = {
    "cu_seqlens": lambda s: torch.arange(s["N"] + 1).int() * s["T"] // max(s["N"], 1),
    "initial_state_indices": lambda s: torch.arange(s["N"]).flip(0) + 1,
    "has_initial_state": lambda s: torch.arange(s["N"]) % 2 == 0,
    "state_indices": lambda s: torch.arange(s["B"]).flip(0) + 1,
    "accepted_len": lambda s: (torch.arange(s["B"]).int() + 1) % (s["T_max"] + 1),
}
"""What index vectors hold; slots and lengths of both widths."""


def _size(dim: str, sizes: Mapping[str, int]) -> int:
    name, _, more = dim.partition(" + ")
    return int(name) if name.isdigit() else sizes[name] + int(more or 0)


def holders(name: str, symbol: str) -> list[str]:
    """Tensors of a function that have a size, in the order in which they are checked."""
    return [
        label
        for label, argument in PUBLIC[name].tensors.items()
        if any(re.split(r" \+ ", dim)[0] == symbol for dim in argument.dims)
    ]


def moved_to(device: torch.device | str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The same with the tensors on a device."""
    return {x: y.to(device) if torch.is_tensor(y) else y for x, y in arguments.items()}


def call(name: str, arguments: Mapping[str, Any]) -> Any:
    """Call the function."""
    return getattr(linattn, name)(**arguments)


def refuse(name: str, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    """Assert that a call is refused in words that start like these."""
    with pytest.raises(error) as caught:
        call(name, arguments)
    assert str(caught.value).startswith(message)


def results(name: str, arguments: Mapping[str, Any], result: Any) -> list[torch.Tensor]:
    """What a call returned, and what it may have written: whatever the legal call writes."""
    returned = result if isinstance(result, tuple) else (result,)
    written = [arguments.get(label) for label in PUBLIC[name].written]
    return [x for x in (*returned, *written) if x is not None]


# ---------------------------------------------------------------------------------------------
# Claims: each family of functions states a rule as its own

Claim = tuple[str, str]


def claims(fixed: Claim, packed: Claim, drafts: Claim) -> dict[str, pytest.MarkDecorator]:
    """The mark of each function for a rule, from the (id, text) of each family."""
    families = {"lightning_attn_fwd": fixed, "lightning_attn_fwd_varlen": packed}
    return {name: pytest.mark.claim(*families.get(name, drafts)) for name in PUBLIC}


def over(
    marks: Mapping[str, pytest.MarkDecorator],
    cases: Iterable[tuple[Any, ...]] | None = None,
    targets: bool = False,
) -> list[Any]:
    """Parameters of a test of a rule: functions, or cases that begin with one, with its claim.

    ``targets`` adds the marks of the architectures that kernels exist for.
    """
    parameters = []
    for case in ((name,) for name in PUBLIC) if cases is None else cases:
        families = PUBLIC[case[0]].targets if targets else ()
        every = [marks[case[0]], *(getattr(pytest.mark, family) for family in families)]
        words = "-".join(getattr(one, "__name__", str(one)) for one in case)
        parameters.append(pytest.param(*case, marks=every, id=words))
    return parameters
