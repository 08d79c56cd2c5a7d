"""Judging tensors: bit for bit, within limits, and whether exactly the right bytes were written.

Everything is computed where the tensors live, in float64, and in slabs of bounded size, so that a
comparison of large GPU tensors neither moves them to the host nor doubles their memory. torch is
imported on first use.

Bits: NaN equals NaN whatever its payload; -0.0 and +0.0 are different results.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, Union

from pytest_kernel_claims.claims.model import Better, Measurement
from pytest_kernel_claims.claims.properties import Measured

if TYPE_CHECKING:
    import torch

Tensors = Union["torch.Tensor", None, Sequence["Tensors"], Mapping[str, "Tensors"]]

SLAB_ELEMENTS = 1 << 24
GUARD_BYTES = 1 << 16
_INT64_MAX = (1 << 63) - 1


class BitwiseCheck(Protocol):
    def __call__(
        self, got: Tensors, want: Tensors, names: str | Sequence[str] | None = None
    ) -> None: ...


# --- pairs of tensors -----------------------------------------------------------------------


def _pairs(got: Tensors, want: Tensors, name: str) -> Iterator[tuple[str, Any, Any]]:
    """Walk two equal structures of tuples, lists and dicts; yields (name, got, want) tensors."""
    import torch

    if isinstance(got, torch.Tensor) and isinstance(want, torch.Tensor):
        yield name, got, want
    elif isinstance(got, Mapping) and isinstance(want, Mapping):
        if got.keys() != want.keys():
            raise AssertionError(f"{name}: got keys {sorted(got)}, expected {sorted(want)}")
        for key in want:
            yield from _pairs(got[key], want[key], f"{name}[{key!r}]")
    elif isinstance(got, (tuple, list)) and isinstance(want, (tuple, list)):
        if len(got) != len(want):
            raise AssertionError(f"{name}: got {len(got)} results, expected {len(want)}")
        for index, (one, other) in enumerate(zip(got, want, strict=True)):
            yield from _pairs(one, other, f"{name}[{index}]")
    elif not (got is None and want is None):
        raise AssertionError(f"{name}: got {_kind(got)}, expected {_kind(want)}")


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _require_like(name: str, got: torch.Tensor, want: torch.Tensor, *, dtype: bool) -> None:
    aspects = ["shape", "device"] + ["dtype"] * dtype
    for aspect in aspects:
        mine, theirs = getattr(got, aspect), getattr(want, aspect)
        if mine != theirs:
            if aspect == "shape":
                mine, theirs = tuple(mine), tuple(theirs)
            raise AssertionError(f"{name}: got {aspect} {mine}, expected {aspect} {theirs}")


def _slabs(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Cut equally shaped tensors into views of at most SLAB_ELEMENTS, in row-major order.

    Yields the row-major offset of each slab's first element. Only a leading dimension is ever cut
    (all before it have size 1), so offsets within a slab are row-major too.
    """
    todo = [(0, list(tensors))]
    while todo:
        offset, parts = todo.pop()
        shape = parts[0].shape
        if parts[0].numel() <= SLAB_ELEMENTS:
            yield offset, parts
            continue
        dim = next(d for d, size in enumerate(shape) if size > 1)
        half = shape[dim] // 2
        inner = math.prod(shape[dim + 1 :])
        rest = [part.narrow(dim, half, shape[dim] - half) for part in parts]
        todo.append((offset + half * inner, rest))
        todo.append((offset, [part.narrow(dim, 0, half) for part in parts]))


def _index(offset: int, shape: Sequence[int]) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        offset, here = divmod(offset, size)
        index.append(here)
    return tuple(reversed(index))


# --- bits -----------------------------------------------------------------------------------


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bit patterns as integers of its own width."""
    import torch

    if tensor.dtype.is_complex:
        return _bits(torch.view_as_real(tensor.resolve_conj()))
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().view(widths[tensor.element_size()])


def _nan(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    if tensor.dtype.is_complex:
        return torch.isnan(torch.view_as_real(tensor.resolve_conj()))
    if not tensor.dtype.is_floating_point:
        return torch.zeros_like(tensor, dtype=torch.bool)
    return torch.isnan(tensor.float() if tensor.element_size() == 1 else tensor)


def _different(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Where bits differ, two NaNs counting as equal."""
    different = (_bits(got) != _bits(want)) & ~(_nan(got) & _nan(want))
    return different.any(-1) if got.dtype.is_complex else different


def _ulps(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor | None:
    """Distance in representable numbers (int64, saturated), 0 where either is NaN; None for
    types that have no such order."""
    import torch

    if got.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        return None
    one, other = _ordered(got), _ordered(want)
    distance = torch.where(one >= other, one - other, other - one)
    distance = torch.where(distance < 0, _INT64_MAX, distance)
    return torch.where(_nan(got) | _nan(want), 0, distance)


def _ordered(tensor: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the numbers; both zeros are 0."""
    import torch

    bits = _bits(tensor).to(torch.int64)
    magnitude = bits & ((1 << (8 * tensor.element_size() - 1)) - 1)
    return torch.where(bits < 0, -magnitude, magnitude)


def assert_bitwise(got: Tensors, want: Tensors, names: str | Sequence[str] | None = None) -> None:
    """Fail unless two tensors, or two structures of tensors (tuple, list, dict, None), have equal
    shapes, dtypes, devices and bits.

    NaN equals NaN; -0.0 does not equal +0.0. ``names`` ("o state" or a sequence) names the
    members of a tuple in the report. The AssertionError tells every tensor that differs.
    """
    __tracebackhide__ = True
    wrong = []
    for name, mine, theirs in _named_pairs(got, want, names):
        _require_like(name, mine, theirs, dtype=True)
        report = _bitwise_report(name, mine, theirs)
        if report:
            wrong.append(report)
    if wrong:
        raise AssertionError("\n".join(wrong))


def _named_pairs(
    got: Tensors, want: Tensors, names: str | Sequence[str] | None
) -> Iterator[tuple[str, Any, Any]]:
    if names is None:
        yield from _pairs(got, want, "result")
        return
    listed = names.split() if isinstance(names, str) else list(names)
    ours = got if isinstance(got, (tuple, list)) else (got,)
    expected = want if isinstance(want, (tuple, list)) else (want,)
    if not len(ours) == len(expected) == len(listed):
        raise AssertionError(
            f"got {len(ours)} results, expected {len(expected)}; names for {len(listed)}: {listed}"
        )
    for name, mine, theirs in zip(listed, ours, expected, strict=True):
        yield from _pairs(mine, theirs, name)


def _bitwise_report(name: str, got: torch.Tensor, want: torch.Tensor) -> str | None:
    count, first = 0, -1
    for offset, (mine, theirs) in _slabs([got, want]):
        bad = _different(mine, theirs)
        here = int(bad.sum())
        if here and not count:
            first = offset + int(bad.reshape(-1).int().argmax())
        count += here
    if not count:
        return None
    index = _index(first, got.shape)
    lines = [
        f"{name}: {count} of {got.numel()} elements differ in their bits ({got.dtype})",
        f"  first at {index}: got {_show(got[index])}, expected {_show(want[index])}",
    ]
    if not got.dtype.is_complex:
        lines.append(f"  {measure(got, want)}")
    return "\n".join(lines)


def _show(scalar: torch.Tensor) -> str:
    bits = _bits(scalar.reshape(1)).reshape(-1).tolist()
    mask = (1 << (8 * scalar.element_size())) - 1
    return f"{scalar.item()!r} (bits {' '.join(f'{value & mask:#x}' for value in bits)})"


# --- numbers --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Metrics:
    """How far ``got`` is from ``want``; figures in float64, over elements finite in both.

    ``rel_rms``: root mean square of the difference over that of ``want``. ``agreement``: share of
    elements with equal bits after rounding ``want`` to the dtype of ``got``; ``ulp``: the largest
    distance there (None for types without such an order). ``pass_rate``: share with
    ``|got - want| <= atol + rtol * |want|`` (None when neither was given). ``nonfinite``: elements
    that are NaN or infinite on one side and not the same on the other. ``first_bad``: first index
    in row-major order that is ``nonfinite`` or outside the tolerance; ``worst``: index of the
    largest difference. ``peer`` and ``apart`` hold peer against reference and ours against peer.
    """

    count: int
    max_abs: float
    rel_rms: float
    cosine: float
    agreement: float
    ulp: int | None
    pass_rate: float | None
    nonfinite: int
    first_bad: tuple[int, ...] | None
    worst: tuple[int, ...] | None
    peer: Metrics | None = None
    apart: Metrics | None = None

    def __str__(self) -> str:
        parts = [
            f"max_abs {self.max_abs:.4g}",
            f"rel_rms {self.rel_rms:.4g}",
            f"cosine {self.cosine:.8f}",
            f"bitwise agreement {self.agreement:.2%}",
        ]
        parts += [] if self.ulp is None else [f"ulp {self.ulp}"]
        parts += [] if self.pass_rate is None else [f"within tolerance {self.pass_rate:.4%}"]
        parts += [f"{self.nonfinite} not finite alike"] if self.nonfinite else []
        return ", ".join(parts)


class _Sums:
    """Accumulates ``Metrics`` slab by slab."""

    def __init__(self, tolerance: tuple[float, float] | None) -> None:
        self.rtol, self.atol = tolerance or (0.0, math.inf)
        self.count = self.outside = self.nonfinite = self.equal = 0
        self.max_abs = self.dd = self.ww = self.gg = self.gw = 0.0
        self.ulp: int | None = None
        self.first = self.worst = -1

    def add(self, offset: int, got: torch.Tensor, want: torch.Tensor) -> None:
        import torch

        g, w = got.to(torch.float64), want.to(torch.float64)
        finite = torch.isfinite(g) & torch.isfinite(w)
        bad = ~finite & (g != w) & ~(torch.isnan(g) & torch.isnan(w))
        self.nonfinite += int(bad.sum())
        g, w = torch.where(finite, g, 0.0), torch.where(finite, w, 0.0)
        difference = (g - w).abs()
        bad |= difference > self.atol + self.rtol * w.abs()
        self._note_places(offset, difference.reshape(-1), bad.reshape(-1))
        self.count += g.numel()
        self.dd += float((difference * difference).sum())
        self.ww += float((w * w).sum())
        self.gg += float((g * g).sum())
        self.gw += float((g * w).sum())
        rounded = want.to(got.dtype)
        self.equal += got.numel() - int(_different(got, rounded).sum())
        ulps = _ulps(got, rounded)
        if ulps is not None:
            self.ulp = max(self.ulp or 0, int(ulps.max()))

    def _note_places(self, offset: int, difference: torch.Tensor, bad: torch.Tensor) -> None:
        outside = int(bad.sum())
        if outside and self.first < 0:
            self.first = offset + int(bad.int().argmax())
        self.outside += outside
        largest = float(difference.max())
        if largest > self.max_abs:
            self.max_abs, self.worst = largest, offset + int(difference.argmax())

    def metrics(self, shape: Sequence[int], with_tolerance: bool) -> Metrics:
        count = max(self.count, 1)
        product = math.sqrt(self.ww) * math.sqrt(self.gg)
        return Metrics(
            count=self.count,
            max_abs=self.max_abs,
            rel_rms=_ratio(math.sqrt(self.dd), math.sqrt(self.ww)),
            cosine=self.gw / product if product else float(self.ww == self.gg),
            agreement=self.equal / count if self.count else 1.0,
            ulp=self.ulp,
            pass_rate=1.0 - self.outside / count if with_tolerance else None,
            nonfinite=self.nonfinite,
            first_bad=None if self.first < 0 else _index(self.first, shape),
            worst=None if self.worst < 0 else _index(self.worst, shape),
        )


def _ratio(part: float, whole: float) -> float:
    if whole:
        return part / whole
    return math.inf if part else 0.0


def measure(
    got: torch.Tensor,
    want: torch.Tensor,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    name: str = "result",
) -> Metrics:
    """Metrics of two real tensors of one shape on one device; dtypes may differ.

    Raises AssertionError for another shape or device, TypeError for complex tensors.
    """
    _require_like(name, got, want, dtype=False)
    if got.dtype.is_complex or want.dtype.is_complex:
        raise TypeError(f"{name}: got {got.dtype} and {want.dtype}, expected real tensors")
    with_tolerance = rtol is not None or atol is not None
    sums = _Sums((rtol or 0.0, atol or 0.0) if with_tolerance else None)
    if got.numel():
        for offset, (mine, theirs) in _slabs([got.detach(), want.detach()]):
            sums.add(offset, mine, theirs)
    return sums.metrics(got.shape, with_tolerance)


class NumericCheck:
    """``assert_numeric``; built with a ``Measured`` it records its figures with the claims."""

    def __init__(self, measured: Measured | None = None) -> None:
        self._measured = measured

    def __call__(
        self,
        got: torch.Tensor,
        want: torch.Tensor,
        *,
        rtol: float | None = None,
        atol: float | None = None,
        pass_rate: float = 1.0,
        rel_rms: float | None = None,
        max_abs: float | None = None,
        ulp: int | None = None,
        cosine: float | None = None,
        peer: torch.Tensor | None = None,
        reference: torch.Tensor | None = None,
        times_peer: float | None = None,
        name: str = "",
    ) -> Metrics:
        """Fail unless ``got`` is within every given limit of its reference.

        Two-way, ``want`` is the reference. Three-way, a peer is judged against the same
        reference: either ``want`` is the reference and ``peer=`` the peer, or ``want`` is the
        peer and ``reference=`` the reference. ``times_peer`` bounds our rel_rms by that factor
        of the peer's.

        ``rtol``/``atol``: at least the share ``pass_rate`` of the elements lies within
        ``atol + rtol * |reference|``. ``rel_rms``, ``max_abs``, ``ulp``: upper limits.
        ``cosine``: a lower limit. An element that is NaN or infinite where the reference is
        not (or the other way round) fails whatever the limits.

        Returns the metrics. Raises AssertionError with a full report; ValueError when no limit
        is given or the three-way arguments do not fit.
        """
        __tracebackhide__ = True
        if reference is not None:
            if peer is not None:
                raise ValueError("with reference= the peer is the second argument; got peer= too")
            want, peer = reference, want
        if (times_peer is not None) and peer is None:
            raise ValueError("times_peer needs a peer")
        if all(x is None for x in (rtol, atol, rel_rms, max_abs, ulp, cosine, times_peer)):
            raise ValueError("no limit given: this comparison could not fail")
        label = name or "result"
        found = measure(got, want, rtol=rtol, atol=atol, name=label)
        if peer is not None:
            against = measure(peer, want, rtol=rtol, atol=atol, name=f"{label} of peer")
            apart = measure(got, peer, rtol=rtol, atol=atol, name=f"{label} against peer")
            found = replace(found, peer=against, apart=apart)
            if times_peer is not None:
                rel_rms = min(
                    times_peer * against.rel_rms, math.inf if rel_rms is None else rel_rms
                )
        limits = {"rel_rms": rel_rms, "max_abs": max_abs, "ulp": ulp, "cosine": cosine}
        limits["pass_rate"] = None if rtol is None and atol is None else pass_rate
        figures = list(_figures(found, limits, name))
        if self._measured is not None:
            for figure in figures:
                self._measured.record(figure)
        if found.nonfinite or (found.peer and found.peer.nonfinite) or _violated(figures):
            raise AssertionError(_numeric_report(label, got, want, found, figures))
        return found


assert_numeric = NumericCheck()


def _figures(
    found: Metrics, limits: Mapping[str, float | None], name: str
) -> Iterator[Measurement]:
    """rel_rms and max_abs always, the other figures when they have a limit."""
    for metric, limit in limits.items():
        value = getattr(found, metric)
        if limit is None and metric not in ("rel_rms", "max_abs"):
            continue
        better: Better = "higher" if metric in ("cosine", "pass_rate") else "lower"
        value = math.nan if value is None else float(value)
        yield Measurement(f"{name} {metric}".strip(), value, limit, better=better)
    if found.peer is not None:
        yield Measurement(f"{name} rel_rms of peer".strip(), found.peer.rel_rms)


def _violated(figures: Iterable[Measurement]) -> list[Measurement]:
    return [figure for figure in figures if figure.violated]


def _numeric_report(
    label: str, got: torch.Tensor, want: torch.Tensor, found: Metrics, figures: list[Measurement]
) -> str:
    lines = [
        f"{label}: not within limits ({tuple(got.shape)}, {got.dtype}, {found.count} elements)"
    ]
    lines += [f"  violated: {figure}" for figure in _violated(figures)]
    if found.nonfinite:
        lines.append(f"  violated: {found.nonfinite} elements are not finite alike")
    if found.peer and found.peer.nonfinite:
        lines.append("  violated: the peer is not finite where the reference is")
    places = {"first outside": found.first_bad, "largest difference": found.worst}
    for what, index in places.items():
        if index is not None:
            values = f"got {got[index].item()!r}, expected {want[index].item()!r}"
            lines.append(f"  {what} at {index}: {values}")
    against = {"ours/reference": found, "peer/reference": found.peer, "ours/peer": found.apart}
    lines += [f"  {what}: {metrics}" for what, metrics in against.items() if metrics]
    return "\n".join(lines)


# --- bytes around a result ------------------------------------------------------------------


@dataclass(frozen=True)
class _Band:
    """A poisoned tensor inside its buffer of canary bytes; ``start`` and ``span`` in bytes."""

    buffer: torch.Tensor
    tensor: torch.Tensor
    start: int
    span: int


class Poison:
    """Output tensors that tell what was written.

    ``poison(like)`` makes, for a tensor or a structure of tensors, tensors of the same shape,
    dtype, device and strides. Floating-point elements hold a NaN with a payload that no
    arithmetic produces, integers a fixed pattern. Each tensor lies 256-byte aligned inside a
    buffer of canary bytes: bands before and after it, and the gaps of a strided view.
    """

    def __init__(self) -> None:
        self._bands: list[_Band] = []

    def __call__(self, like: Any) -> Any:
        import torch

        if like is None:
            return None
        if isinstance(like, torch.Tensor):
            repeats = any(s == 0 and n > 1 for s, n in zip(like.stride(), like.shape, strict=True))
            strides = None if repeats else like.stride()
            return self.empty(like.shape, like.dtype, like.device, strides)
        if isinstance(like, Mapping):
            return {key: self(value) for key, value in like.items()}
        if isinstance(like, (tuple, list)):
            return type(like)(map(self, like))
        raise TypeError(f"poison: got {_kind(like)}, expected a tensor or a structure of tensors")

    def empty(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        strides: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """A poisoned tensor; ``strides`` in elements, contiguous when None."""
        import torch

        pattern = _pattern(dtype)
        if strides is None:
            strides = torch.empty(tuple(shape), device="meta").stride()
        elements = 0
        if math.prod(shape):
            steps = zip(shape, strides, strict=True)
            elements = 1 + sum((size - 1) * stride for size, stride in steps)
        span = elements * dtype.itemsize
        total = 2 * GUARD_BYTES + span + 256
        buffer = _canary(total, torch.device(device))
        start = GUARD_BYTES + -(buffer.data_ptr() + GUARD_BYTES) % 256
        flat = buffer[start : start + span].view(dtype)
        tensor = flat.as_strided(tuple(shape), tuple(strides), flat.storage_offset())
        _bits(tensor).fill_(pattern)
        self._bands.append(_Band(buffer, tensor, start, span))
        return tensor

    def check(self) -> None:
        """Fail when a byte outside the tensors changed; runs by itself after the test."""
        __tracebackhide__ = True
        wrong = [report for report in map(_band_report, self._bands) if report]
        if wrong:
            raise AssertionError("\n".join(wrong))

    def assert_overwritten(self, tensors: Tensors, name: str = "result") -> None:
        """Fail when an element of these poisoned tensors, or of views of them, is still poison."""
        __tracebackhide__ = True
        self._judge(tensors, name, written=True)

    def assert_untouched(self, tensors: Tensors, name: str = "result") -> None:
        """Fail when an element of these poisoned tensors, or of views of them, was written."""
        __tracebackhide__ = True
        self._judge(tensors, name, written=False)

    def _judge(self, tensors: Tensors, name: str, *, written: bool) -> None:
        __tracebackhide__ = True
        for label, tensor, _ in _pairs(tensors, tensors, name):
            self._require_ours(label, tensor)
            count, first = 0, -1
            for offset, (part,) in _slabs([tensor]):
                bad = (_bits(part) == _pattern(tensor.dtype)) == written
                here = int(bad.sum())
                if here and not count:
                    first = offset + int(bad.reshape(-1).int().argmax())
                count += here
            if count:
                what = "were never written" if written else "were written"
                raise AssertionError(
                    f"{label}: {count} of {tensor.numel()} elements {what}, "
                    f"first at {_index(first, tensor.shape)}"
                )

    def _require_ours(self, label: str, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage().data_ptr()
        if all(storage != band.buffer.untyped_storage().data_ptr() for band in self._bands):
            raise ValueError(f"{label}: expected a tensor that this poison made, or a view of it")


def _pattern(dtype: torch.dtype) -> int:
    """Bits of a poisoned element, as a signed integer of its width (unsigned for one byte)."""
    import torch

    quiet_nans = {
        torch.bfloat16: 0x7FE5,
        torch.float16: 0x7EE5,
        torch.float32: 0x7FE5A5A5,
        torch.float64: 0x7FFCA5A5A5A5A5A5,
    }
    if dtype in quiet_nans:
        return quiet_nans[dtype]
    if dtype.is_floating_point or dtype.is_complex:
        raise TypeError(f"poison: got {dtype}, expected one of {list(quiet_nans)} or integers")
    pattern = int.from_bytes(b"\xa5" * dtype.itemsize, "little")
    return pattern if dtype.itemsize == 1 else pattern - (1 << 8 * dtype.itemsize)


def _canary(length: int, device: torch.device, first: int = 0) -> torch.Tensor:
    """Bytes ``first`` and on of a pattern whose period, 251, fits no tile and no vector width."""
    import torch

    period = (torch.arange(251, device=device) + first).remainder(251).to(torch.uint8)
    return period.repeat(length // 251 + 1)[:length].clone()


def _outside(band: _Band) -> Iterator[tuple[int, torch.Tensor]]:
    """Masks of changed bytes outside the tensor, each with its offset from the tensor's start."""
    end = band.start + band.span
    yield -band.start, _changed(band, 0, band.start)
    if band.tensor.numel() * band.tensor.element_size() < band.span:
        yield 0, _changed(band, band.start, end) & ~_covered(band)
    yield band.span, _changed(band, end, band.buffer.numel())


def _changed(band: _Band, low: int, high: int) -> torch.Tensor:
    return band.buffer[low:high] != _canary(high - low, band.buffer.device, low)


def _covered(band: _Band) -> torch.Tensor:
    """Which bytes of its span belong to elements of a strided tensor."""
    import torch

    width = band.tensor.element_size()
    covered = torch.zeros(band.span // width, dtype=torch.bool, device=band.buffer.device)
    covered.as_strided(band.tensor.shape, band.tensor.stride()).fill_(True)
    return covered.repeat_interleave(width)


def _band_report(band: _Band) -> str | None:
    count, first = 0, 0
    for offset, changed in _outside(band):
        here = int(changed.sum())
        if here and not count:
            first = offset + int(changed.int().argmax())
        count += here
    if not count:
        return None
    tensor = band.tensor
    where = f"{-first} bytes before it" if first < 0 else f"at byte {first} of {band.span} from it"
    return (
        f"guard bands: {count} bytes outside a tensor of {tuple(tensor.shape)}, {tensor.dtype}, "
        f"strides {tensor.stride()} were changed, the first {where}"
    )
