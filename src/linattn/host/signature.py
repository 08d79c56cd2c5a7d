"""Tensor signatures of the compiled operators.

One table an operator, read twice: ``host/validate.py`` checks the caller's tensors against it, and
``host/compile.py`` builds from it the fake tensors that the kernel is compiled with. The order of
the entries is the order of the compiled function's arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from linattn.host.dtypes import DTYPES, DType


class Kind(Enum):
    """How a tensor reaches the kernel, and what its layout must be.

    VIEW: a tensor argument read or written by TMA. Last dimension contiguous, the other strides
        multiples of 16 bytes, 16-byte aligned.
    STATE: three integers (address or 0, first stride, second stride, both in elements). The last
        two dimensions contiguous, the other strides multiples of 16 bytes, 16-byte aligned.
    VECTOR: a tensor argument with any stride and the alignment of its element.
    """

    VIEW = "view"
    STATE = "state"
    VECTOR = "vector"


_PACKED_DIMS = {Kind.VIEW: 1, Kind.STATE: 2, Kind.VECTOR: 0}
_VECTOR_BYTES = 16


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of an operator.

    Attributes:
        name: argument of the compiled function.
        dims: sizes; a string is a symbol bound by the first tensor that has it.
        dtype: key of ``DTYPES``.
        kind: how the tensor is passed and laid out.
        optional: may be absent. Only a STATE can be.
        output: written by the kernel.
        public: the argument's name in the public function, where it differs.
    """

    name: str
    dims: tuple[str | int, ...]
    dtype: str
    kind: Kind = Kind.VIEW
    optional: bool = False
    output: bool = False
    public: str = ""

    @property
    def label(self) -> str:
        """Name that error messages use."""
        return self.public or self.name

    @property
    def element(self) -> DType:
        """The element type."""
        return DTYPES[self.dtype]

    @property
    def packed(self) -> int:
        """How many trailing dimensions must be contiguous."""
        return _PACKED_DIMS[self.kind]

    @property
    def alignment(self) -> int:
        """Bytes that the address must be a multiple of."""
        return self.element.itemsize if self.kind is Kind.VECTOR else _VECTOR_BYTES

    @property
    def stride_divisor(self) -> int:
        """Elements that every stride outside the packed dimensions must be a multiple of."""
        return 1 if self.kind is Kind.VECTOR else _VECTOR_BYTES // self.element.itemsize

    @property
    def shape_text(self) -> str:
        """The shape as documentation writes it, such as ``[B, T, H, 128]``."""
        return "[" + ", ".join(str(dim) for dim in self.dims) + "]"

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments of the compiled function that carry this tensor."""
        if self.kind is Kind.STATE:
            return (self.name, f"{self.name}_stride_b", f"{self.name}_stride_h")
        return (self.name,)


@dataclass(frozen=True)
class Signature:
    """Tensors, then scalars, of one compiled operator.

    Attributes:
        operator: folder of the operator under ``kernels/``.
        tensors: in the order of the compiled function's arguments.
        scalars: (name, key of ``DTYPES``) of the arguments behind the tensors.
        multiples: pairs of symbols whose first must be a multiple of the second.
        choices: symbols that must equal one of several others, such as a vector per head of either
            sort.
    """

    operator: str
    tensors: tuple[TensorSpec, ...]
    scalars: tuple[tuple[str, str], ...] = ()
    multiples: tuple[tuple[str, str], ...] = ()
    choices: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def __getitem__(self, name: str) -> TensorSpec:
        """The tensor called ``name``."""
        return next(spec for spec in self.tensors if spec.name == name)


LIGHTNING_PREFILL = Signature(
    operator="lightning_prefill",
    tensors=(
        TensorSpec("q", ("B", "T", "H", 128), "bf16"),
        TensorSpec("k", ("B", "T", "H", 128), "bf16"),
        TensorSpec("v", ("B", "T", "HV", 128), "bf16"),
        TensorSpec("o", ("B", "T", "HV", 128), "bf16", output=True, public="out"),
        TensorSpec("decay", ("S",), "f32", Kind.VECTOR),
        TensorSpec("initial_state", ("B", "HV", 128, 128), "f32", Kind.STATE, optional=True),
        TensorSpec(
            "final_state", ("B", "HV", 128, 128), "f32", Kind.STATE, optional=True, output=True
        ),
    ),
    scalars=(
        ("cu_seqlens", "i64"),
        ("cu_seqlens_wide", "i32"),
        ("slots", "i64"),
        ("slots_wide", "i32"),
        ("has_initial", "i64"),
        ("sequences", "i32"),
        ("pool", "i32"),
        ("ctas", "i32"),
        ("scale", "f32"),
    ),
    multiples=(("HV", "H"),),
    choices=(("S", ("H", "HV")),),
)
"""``lightning_attn_fwd``: fixed-length prefill."""

SIGNATURES: dict[str, Signature] = {LIGHTNING_PREFILL.operator: LIGHTNING_PREFILL}
"""Signature by operator."""
