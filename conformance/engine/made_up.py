"""Operators that exist in tests alone, declared as those that ship are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import Tensor

from linattn.ops import declared
from linattn.ops._face import FACES
from linattn.spec.operator import Kernel, Operator
from linattn.spec.signature import Kind, Signature, TensorSpec

# begin: what an operator of three tensors costs
X = TensorSpec("x", ("B", "T", 128), "f32")
GAIN = TensorSpec("gain", ("B",), "f32", Kind.WHOLE)
SIGNATURE = Signature((X, GAIN, replace(X, name="y", output=True, public="out")), ("B", "T"))


@dataclass(frozen=True)
class CopyConfig:
    workspace: bool = False

    def name(self) -> str:
        return "scaled_copy" + "_through_workspace" * self.workspace


COPY = CopyConfig()
KERNEL = Kernel("copy_kernel", (COPY,), lambda s, _: COPY, lambda c, s, _: (s["T"], s["B"], 1))
OPERATOR = Operator("scaled_copy", SIGNATURE, dict.fromkeys(("sm90", "sm100"), KERNEL))
RULES = {"results": {"y": "out"}, "problem": ("B", "T"), "idle": ("B", "T"), "dynamic": ("B", "T")}


@declared(OPERATOR, SIGNATURE, **RULES)
def scaled_copy(x: Tensor, gain: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Rows of ``x``, multiplied by the gain of their tower."""


# end


WORKSPACE = TensorSpec("workspace", ("W",), "f32", Kind.LIST, output=True, updated=True)
LARGER = Signature((*SIGNATURE.tensors, WORKSPACE), ("B", "T", "W"))
THROUGH = CopyConfig(workspace=True)


def _elements(config: CopyConfig, sizes: dict[str, int]) -> int:
    return sizes["B"] * sizes["T"] * 128


@declared(
    Operator(
        "workspace_copy",
        LARGER,
        dict.fromkeys(
            ("sm90", "sm100"),
            replace(KERNEL, configs=(THROUGH,), choose=lambda s, _: THROUGH, workspace=_elements),
        ),
    ),
    LARGER,
    **RULES,
)
def workspace_copy(x: Tensor, gain: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The same by way of a workspace."""


_DECLARED = {name: FACES.pop(name) for name in ("scaled_copy", "workspace_copy")}


@contextmanager
def known() -> Iterator[None]:
    """``warm_up`` and ``explain`` know the operators by name inside a ``with`` block."""
    FACES.update(_DECLARED)
    try:
        yield
    finally:
        for name in _DECLARED:
            del FACES[name]
