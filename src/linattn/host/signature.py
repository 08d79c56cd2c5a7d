"""Tensor signatures of the compiled operators.

One table an operator, read twice: ``host/validate.py`` checks the caller's tensors against it, and
``host/compile.py`` builds from it the fake tensors that the kernel is compiled with. The order of
the entries is the order of the compiled function's arguments. Where several public functions share
a compiled one, each has a table of its own with the same entries, whose sizes say what it accepts.

A function costs its caller the same for every argument, an address as much as a tensor. So where
every tensor goes by address, their strides, the sizes and the flags can form one block of 64-bit
integers in host memory, the layout, whose address is one argument; the host half of the compiled
function reads it before it launches. A layout depends on no address, so it is built once for a
combination of shapes.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from linattn.host.dtypes import DTYPES, DType

if TYPE_CHECKING:
    import torch


class Kind(Enum):
    """How a tensor reaches the kernel, and what its layout must be.

    VIEW: a tensor argument read or written by TMA. Last dimension contiguous, the other strides
        multiples of 16 bytes, 16-byte aligned.
    STATE: three integers (address or 0, first stride, second stride, both in elements). The last
        two dimensions contiguous, the other strides multiples of 16 bytes, 16-byte aligned.
    VECTOR: a tensor argument with any stride and the alignment of its element.
    NUMBERS: two integers (address or 0, and 1 where its elements are 64-bit, else 0). Contiguous.
    FLAGS: one integer (address or 0). Contiguous.
    ROWS: an address (0 where absent) with strides in the layout; otherwise as VIEW.
    POOL: the same, otherwise as STATE.
    INDEX: the same with any stride; the layout holds the stride in 32-bit words and whether the
        elements are 64-bit.
    """

    VIEW = "view"
    STATE = "state"
    VECTOR = "vector"
    NUMBERS = "numbers"
    FLAGS = "flags"
    ROWS = "rows"
    POOL = "pool"
    INDEX = "index"


_PACKED_DIMS = {
    Kind.VIEW: 1,
    Kind.STATE: 2,
    Kind.VECTOR: 0,
    Kind.NUMBERS: 1,
    Kind.FLAGS: 1,
    Kind.ROWS: 1,
    Kind.POOL: 2,
    Kind.INDEX: 0,
}
_TILED = (Kind.VIEW, Kind.STATE, Kind.ROWS, Kind.POOL)
_IN_LAYOUT = (Kind.ROWS, Kind.POOL, Kind.INDEX)
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
        updated: an output that the kernel also reads.
        public: the argument's name in the public function, where it differs.
        also: further dtypes that are taken, as keys of ``DTYPES``.
    """

    name: str
    dims: tuple[str | int, ...]
    dtype: str
    kind: Kind = Kind.VIEW
    optional: bool = False
    output: bool = False
    updated: bool = False
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
    def in_layout(self) -> bool:
        """Whether the tensor is one address, with the rest in the layout."""
        return self.kind in _IN_LAYOUT

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

    def layout(self, tensor: torch.Tensor | None) -> list[int]:
        """What the layout holds of a tensor; zeros where it is absent."""
        if self.kind is Kind.INDEX:
            if tensor is None:
                return [0, 0]
            words = tensor.element_size() // 4
            return [tensor.stride(0) * words, int(words == 2)]
        free = len(self.dims) - self.packed
        return [0] * free if tensor is None else list(tensor.stride()[:free])

    def placed(self, shape: tuple[int, ...], rest: Sequence[int]) -> tuple[tuple[int, ...], int]:
        """Strides and bytes of an element of a tensor by address, from what stands beside it.

        Args:
            shape: sizes of the tensor.
            rest: its other arguments, or its part of the layout.
        """
        itemsize = self.element.itemsize
        if self.kind is Kind.INDEX:
            stride, wide = rest
            return (stride // (1 + wide),), itemsize * (1 + wide)
        if self.kind is Kind.NUMBERS:
            return (1,), itemsize * (1 + rest[0])
        return (*rest, *(shape[-1], 1)[2 - self.packed :]), itemsize


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
        scalars: (name, key of ``DTYPES``) of the arguments behind the tensors and the layout; one
            that is called like a symbol holds its size.
        multiples: pairs of symbols whose first must be a multiple of the second.
        choices: symbols that must equal one of several others, such as a vector per head of either
            sort.
        sizes: symbols whose values stand in the layout, behind the strides.
        flags: further integers of the layout, behind the sizes.
    """

    operator: str
    tensors: tuple[TensorSpec, ...]
    scalars: tuple[tuple[str, str], ...] = ()
    multiples: tuple[tuple[str, str], ...] = ()
    choices: tuple[tuple[str, tuple[str, ...]], ...] = ()
    sizes: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()

    @property
    def has_layout(self) -> bool:
        """Whether the address of a layout follows the tensors."""
        return any(spec.in_layout for spec in self.tensors)

    def layout(
        self,
        tensors: Mapping[str, torch.Tensor | None],
        sizes: Mapping[str, int],
        flags: Mapping[str, int],
    ) -> array[int]:
        """The layout of one combination of shapes, strides and flags.

        Args:
            tensors: by name; those that are absent may be missing.
            sizes: values of ``self.sizes`` at least; 0 where a symbol is missing.
            flags: values of ``self.flags``.
        """
        words: list[int] = []
        for spec in self.tensors:
            if spec.in_layout:
                words += spec.layout(tensors.get(spec.name))
        words += [sizes.get(name, 0) for name in self.sizes]
        words += [flags[name] for name in self.flags]
        return array("q", words)

    def shape_text(self, spec: TensorSpec) -> str:
        """The shape of a tensor as documentation writes it, such as ``[H] or [HV]``."""
        text = spec.shape_text
        for name, options in self.choices:
            if name in spec.dims:
                text = " or ".join(text.replace(name, option) for option in options)
        return text

    def __getitem__(self, name: str) -> TensorSpec:
        """The tensor called ``name``."""
        return next(spec for spec in self.tensors if spec.name == name)

    def accesses(self, arguments: Sequence[Any]) -> Iterator[Access]:
        """The memory behind the arguments of a call of the compiled function; what is absent is
        left out. Reads the layout, where there is one, at its address."""
        count = sum(len(spec.arguments) for spec in self.tensors)
        names = (name for name, _ in self.scalars)
        sizes: dict[str, int] = dict(zip(names, arguments[count + self.has_layout :]))
        words: list[int] = []
        if self.has_layout:
            strides = sum(len(spec.layout(None)) for spec in self.tensors if spec.in_layout)
            total = strides + len(self.sizes)
            words = list((ctypes.c_int64 * total).from_address(arguments[count]))
            sizes |= dict(zip(self.sizes, words[strides:]))
        at = 0
        for spec in self.tensors:
            first, *rest = arguments[at : at + len(spec.arguments)]
            at += len(spec.arguments)
            if spec.in_layout:
                taken = len(spec.layout(None))
                rest, words = words[:taken], words[taken:]
            if not spec.by_address:
                sizes |= {d: n for d, n in zip(spec.dims, first.shape) if isinstance(d, str)}
                itemsize = spec.element.itemsize
                yield Access(spec, first.data_ptr(), tuple(first.shape), first.stride(), itemsize)
            elif first:
                shape = tuple(_size(dim, sizes) for dim in spec.dims)
                yield Access(spec, first, shape, *spec.placed(shape, rest))


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
            TensorSpec(
                "cu_seqlens",
                ("N + 1",),
                "i32",
                Kind.NUMBERS,
                optional=not pool,
                also=("i64",),
            ),
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

_TOKENS = (
    TensorSpec("q", ("B", "T", "H", 128), "bf16", Kind.ROWS),
    TensorSpec("k", ("B", "T", "H", 128), "bf16", Kind.ROWS),
    TensorSpec("v", ("B", "T", "HV", 128), "bf16", Kind.ROWS),
    TensorSpec("o", ("B", "T", "HV", 128), "bf16", Kind.ROWS, output=True, public="out"),
    TensorSpec("decay", ("S",), "f32", Kind.VECTOR),
)
_STATE_POOL = TensorSpec(
    "state_pool", ("P", "HV", 128, 128), "f32", Kind.POOL, output=True, updated=True
)
_BUFFERS = (
    TensorSpec("k_buffer", ("P", "T_max", "H", 128), "bf16", Kind.ROWS),
    TensorSpec("v_buffer", ("P", "T_max", "HV", 128), "bf16", Kind.ROWS),
)
_INDICES = TensorSpec("state_indices", ("B",), "i32", Kind.INDEX, optional=True, also=("i64",))
_LENGTHS = TensorSpec("accepted_len", ("B",), "i32", Kind.INDEX, also=("i64",))
_HEADS: dict[str, Any] = {
    "multiples": (("HV", "H"),),
    "choices": (("S", ("H", "HV")),),
}

MTP_DECODE = Signature(
    operator="mtp_decode",
    tensors=(
        *_TOKENS,
        _STATE_POOL,
        TensorSpec(
            "intermediate_states",
            ("B", "T", "HV", 128, 128),
            "f32",
            Kind.POOL,
            optional=True,
            output=True,
        ),
        _INDICES,
    ),
    scalars=(("scale", "f32"),),
    sizes=("B", "T", "H", "HV", "P"),
    flags=("update_state",),
    **_HEADS,
)
"""``la_decode_mtp``, and ``la_decode`` as its case of one token."""

KVBUFFER_VERIFY = Signature(
    operator="kvbuffer_verify",
    tensors=(
        *_TOKENS,
        _STATE_POOL,
        *(replace(spec, optional=True, output=True, updated=True) for spec in _BUFFERS),
        _INDICES,
        replace(_LENGTHS, optional=True),
    ),
    scalars=(("scale", "f32"),),
    sizes=("B", "T", "H", "HV", "P", "T_max"),
    **_HEADS,
)
"""``la_verify_kvbuffer``."""

STATE_UPDATE = Signature(
    operator="state_update",
    tensors=(*_BUFFERS, _TOKENS[-1], _STATE_POOL, _INDICES, _LENGTHS),
    sizes=("B", "H", "HV", "P", "T_max"),
    **_HEADS,
)
"""``la_state_update_kvbuffer``."""

SIGNATURES: dict[str, Signature] = {
    signature.operator: signature
    for signature in (LIGHTNING_PREFILL, MTP_DECODE, KVBUFFER_VERIFY, STATE_UPDATE)
}
"""Signature of the compiled function, by operator."""
