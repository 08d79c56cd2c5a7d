"""Tensor signatures of the compiled operators.

One table an operator, read twice: ``host/validate.py`` checks the caller's tensors against it, and
``host/compile.py`` builds from it the fake tensors that the kernel is compiled with. The order of
the entries is the order of the compiled function's arguments. Where several public functions share
a compiled one, each has a table of its own with the same entries, whose sizes say what it accepts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from linattn.host.dtypes import DTYPES, DType


class Kind(Enum):
    """How a tensor reaches the kernel, and what its layout must be.

    VIEW: a tensor argument read or written by TMA. Last dimension contiguous, the other strides
        multiples of 16 bytes, 16-byte aligned.
    STATE: three integers (address or 0, first stride, second stride, both in elements). The last
        two dimensions contiguous, the other strides multiples of 16 bytes, 16-byte aligned.
    VECTOR: a tensor argument with any stride and the alignment of its element.
    NUMBERS: two integers (address or 0, and 1 where its elements are 64-bit, else 0). Contiguous.
    FLAGS: one integer (address or 0). Contiguous.
    """

    VIEW = "view"
    STATE = "state"
    VECTOR = "vector"
    NUMBERS = "numbers"
    FLAGS = "flags"


_PACKED_DIMS = {Kind.VIEW: 1, Kind.STATE: 2, Kind.VECTOR: 0, Kind.NUMBERS: 1, Kind.FLAGS: 1}
_TILED = (Kind.VIEW, Kind.STATE)
_VECTOR_BYTES = 16


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of an operator.

    Attributes:
        name: argument of the compiled function.
        dims: sizes; a string is a symbol bound by the first tensor that has it, or such a symbol
            and one more, as in ``"N + 1"``.
        dtype: key of ``DTYPES``.
        kind: how the tensor is passed and laid out.
        optional: may be absent, which only what is passed by address can be.
        output: written by the kernel.
        public: the argument's name in the public function, where it differs.
        also: further dtypes that are taken, as keys of ``DTYPES``.
    """

    name: str
    dims: tuple[str | int, ...]
    dtype: str
    kind: Kind = Kind.VIEW
    optional: bool = False
    output: bool = False
    public: str = ""
    also: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Name that error messages use."""
        return self.public or self.name

    @property
    def element(self) -> DType:
        """The element type."""
        return DTYPES[self.dtype]

    @property
    def elements(self) -> tuple[DType, ...]:
        """Every element type that is taken, the one of ``element`` first."""
        return tuple(DTYPES[name] for name in (self.dtype, *self.also))

    @property
    def by_address(self) -> bool:
        """Whether integers stand for the tensor among the arguments."""
        return self.kind not in (Kind.VIEW, Kind.VECTOR)

    @property
    def packed(self) -> int:
        """How many trailing dimensions must be contiguous."""
        return _PACKED_DIMS[self.kind]

    @property
    def alignment(self) -> int:
        """Bytes that the address must be a multiple of."""
        return _VECTOR_BYTES if self.kind in _TILED else self.element.itemsize

    @property
    def stride_divisor(self) -> int:
        """Elements that every stride outside the packed dimensions must be a multiple of."""
        return _VECTOR_BYTES // self.element.itemsize if self.kind in _TILED else 1

    @property
    def shape_text(self) -> str:
        """The shape as documentation writes it, such as ``[B, T, H, 128]``."""
        return "[" + ", ".join(str(dim) for dim in self.dims) + "]"

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments of the compiled function that carry this tensor."""
        if self.kind is Kind.STATE:
            return (self.name, f"{self.name}_stride_b", f"{self.name}_stride_h")
        if self.kind is Kind.NUMBERS:
            return (self.name, f"{self.name}_wide")
        return (self.name,)


@dataclass(frozen=True)
class Access:
    """Memory that a call reads or writes.

    Attributes:
        spec: the tensor in the signature.
        address: of its first element.
        shape, strides: in elements.
        itemsize: bytes of an element.
    """

    spec: TensorSpec
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int


@dataclass(frozen=True)
class Signature:
    """Tensors, then scalars, of one compiled operator.

    Attributes:
        operator: folder of the operator under ``kernels/``.
        tensors: in the order of the compiled function's arguments.
        scalars: (name, key of ``DTYPES``) of the arguments behind the tensors; one that is called
            like a symbol holds its size.
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

    def accesses(self, arguments: Sequence[Any]) -> Iterator[Access]:
        """The memory behind the arguments of a call of the compiled function; what is absent is
        left out."""
        count = sum(len(spec.arguments) for spec in self.tensors)
        names = (name for name, _ in self.scalars)
        sizes: dict[str, int] = dict(zip(names, arguments[count:]))
        at = 0
        for spec in self.tensors:
            first, *rest = arguments[at : at + len(spec.arguments)]
            at += len(spec.arguments)
            itemsize = spec.element.itemsize
            if not spec.by_address:
                sizes |= {d: n for d, n in zip(spec.dims, first.shape) if isinstance(d, str)}
                yield Access(spec, first.data_ptr(), tuple(first.shape), first.stride(), itemsize)
            elif first:
                shape = tuple(_size(dim, sizes) for dim in spec.dims)
                strides = (*rest, shape[-1], 1) if spec.kind is Kind.STATE else (1,)
                wide = spec.kind is Kind.NUMBERS and rest[0] == 1
                yield Access(spec, first, shape, strides, 2 * itemsize if wide else itemsize)


def symbol(dim: str) -> tuple[str, int]:
    """The symbol of a size, and how much larger the size is: ``"N + 1"`` is ("N", 1)."""
    name, plus, more = dim.partition(" + ")
    return name, int(more) if plus else 0


def _size(dim: str | int, sizes: dict[str, int]) -> int:
    if isinstance(dim, int):
        return dim
    name, more = symbol(dim)
    return sizes[name] + more


def _prefill(batch: str | int, states: str, pool: str = "") -> Signature:
    """Prefill over a batch of that size, with that many states, which ``pool`` names in public."""
    tokens = (batch, "T")
    state = (states, "HV", 128, 128)
    return Signature(
        operator="lightning_prefill",
        tensors=(
            TensorSpec("q", (*tokens, "H", 128), "bf16"),
            TensorSpec("k", (*tokens, "H", 128), "bf16"),
            TensorSpec("v", (*tokens, "HV", 128), "bf16"),
            TensorSpec("o", (*tokens, "HV", 128), "bf16", output=True, public="out"),
            TensorSpec("decay", ("S",), "f32", Kind.VECTOR),
            TensorSpec("initial_state", state, "f32", Kind.STATE, optional=True, public=pool),
            TensorSpec("final_state", state, "f32", Kind.STATE, optional=True, output=True),
            TensorSpec("cu_seqlens", ("N + 1",), "i32", Kind.NUMBERS, optional=True, also=("i64",)),
            TensorSpec(
                "slots",
                ("N",),
                "i32",
                Kind.NUMBERS,
                optional=True,
                public="initial_state_indices",
                also=("i64",),
            ),
            TensorSpec(
                "has_initial",
                ("N",),
                "bool",
                Kind.FLAGS,
                optional=True,
                public="has_initial_state",
            ),
        ),
        scalars=(("N", "i32"), ("P", "i32"), ("ctas", "i32"), ("scale", "f32")),
        multiples=(("HV", "H"),),
        choices=(("S", ("H", "HV")),),
    )


LIGHTNING_PREFILL = _prefill("B", "P")
"""The compiled function of prefill: sequences are planes of a batch, or packed in one plane."""

LIGHTNING_FIXED = _prefill("B", "B")
"""``lightning_attn_fwd``: sequences of one length."""

LIGHTNING_PACKED = _prefill(1, "P", "state_pool")
"""``lightning_attn_fwd_varlen``: sequences of any length, one behind the other."""

SIGNATURES: dict[str, Signature] = {LIGHTNING_PREFILL.operator: LIGHTNING_PREFILL}
"""Signature of the compiled function, by operator."""
