"""Tensor signatures of the compiled operators.

One table an operator, read twice: ``host/validate.py`` checks the caller's tensors against it, and
``host/compile.py`` builds from it the fake tensors that the kernel is compiled with. The order of
the entries is the order of the compiled function's arguments.

A function costs its caller the same for every argument, an address as much as a tensor. So where
tensors go by address alone, their strides, the sizes and the flags form one block of 64-bit
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
    ROWS: an address (0 where absent) with strides in the layout; otherwise as VIEW.
    POOL: the same, otherwise as STATE.
    INDEX: the same with any stride; the layout holds the stride in 32-bit words and whether the
        elements are 64-bit.
    """

    VIEW = "view"
    STATE = "state"
    VECTOR = "vector"
    ROWS = "rows"
    POOL = "pool"
    INDEX = "index"


_PACKED_DIMS = {
    Kind.VIEW: 1,
    Kind.STATE: 2,
    Kind.VECTOR: 0,
    Kind.ROWS: 1,
    Kind.POOL: 2,
    Kind.INDEX: 0,
}
_BY_ADDRESS = (Kind.ROWS, Kind.POOL, Kind.INDEX)
_VECTOR_BYTES = 16


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of an operator.

    Attributes:
        name: argument of the compiled function.
        dims: sizes; a string is a symbol bound by the first tensor that has it.
        dtype: key of ``DTYPES``.
        kind: how the tensor is passed and laid out.
        optional: may be absent. A tensor argument cannot be.
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
        """Whether the tensor is one address, with the rest in the layout."""
        return self.kind in _BY_ADDRESS

    @property
    def packed(self) -> int:
        """How many trailing dimensions must be contiguous."""
        return _PACKED_DIMS[self.kind]

    @property
    def alignment(self) -> int:
        """Bytes that the address must be a multiple of."""
        return self.element.itemsize if self.packed == 0 else _VECTOR_BYTES

    @property
    def stride_divisor(self) -> int:
        """Elements that every stride outside the packed dimensions must be a multiple of."""
        return 1 if self.packed == 0 else _VECTOR_BYTES // self.element.itemsize

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

    def layout(self, tensor: torch.Tensor | None) -> list[int]:
        """What the layout holds of a tensor by address; zeros where it is absent."""
        if self.kind is Kind.INDEX:
            if tensor is None:
                return [0, 0]
            words = tensor.element_size() // 4
            return [tensor.stride(0) * words, int(words == 2)]
        free = len(self.dims) - self.packed
        return [0] * free if tensor is None else list(tensor.stride()[:free])


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
        scalars: FP32 arguments behind the tensors and the layout.
        multiples: pairs of symbols whose first must be a multiple of the second.
        choices: symbols that must equal one of several others, such as a vector per head of either
            sort.
        sizes: symbols whose values stand in the layout, behind the strides.
        flags: further integers of the layout, behind the sizes.
    """

    operator: str
    tensors: tuple[TensorSpec, ...]
    scalars: tuple[str, ...] = ()
    multiples: tuple[tuple[str, str], ...] = ()
    choices: tuple[tuple[str, tuple[str, ...]], ...] = ()
    sizes: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()

    @property
    def has_layout(self) -> bool:
        """Whether the address of a layout follows the tensors."""
        return any(spec.by_address for spec in self.tensors)

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
            if spec.by_address:
                words += spec.layout(tensors.get(spec.name))
        words += [sizes.get(name, 0) for name in self.sizes]
        words += [flags[name] for name in self.flags]
        return array("q", words)

    def accesses(self, arguments: Sequence[Any]) -> Iterator[Access]:
        """The memory behind the arguments of a call of the compiled function.

        Reads the layout, whose address is among the arguments. Present tensors only.
        """
        sizes: dict[str, int] = {}
        words: list[int] = []
        if self.has_layout:
            count = sum(len(spec.layout(None)) for spec in self.tensors if spec.by_address)
            count += len(self.sizes)
            at = sum(len(spec.arguments) for spec in self.tensors)
            words = list((ctypes.c_int64 * count).from_address(arguments[at]))
            sizes.update(zip(self.sizes, words[count - len(self.sizes) :]))
        at = 0
        for spec in self.tensors:
            address, *rest = arguments[at : at + len(spec.arguments)]
            at += len(spec.arguments)
            itemsize = spec.element.itemsize
            if spec.by_address:
                rest = [words.pop(0) for _ in spec.layout(None)]
                if spec.kind is Kind.INDEX:
                    itemsize *= 1 + rest[1]
                    rest = [rest[0] * 4 // itemsize]
            elif spec.kind is not Kind.STATE:
                sizes.update((d, n) for d, n in zip(spec.dims, address.shape) if isinstance(d, str))
                yield Access(
                    spec, address.data_ptr(), tuple(address.shape), address.stride(), itemsize
                )
                continue
            if address:
                shape = tuple(sizes[d] if isinstance(d, str) else d for d in spec.dims)
                packed = [1, shape[-1]][: spec.packed]
                yield Access(spec, address, shape, (*rest, *reversed(packed)), itemsize)

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
    scalars=("scale",),
    multiples=(("HV", "H"),),
    choices=(("S", ("H", "HV")),),
)
"""``lightning_attn_fwd``: fixed-length prefill."""

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
    scalars=("scale",),
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
    scalars=("scale",),
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
"""Signature by operator."""
