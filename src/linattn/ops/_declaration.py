"""A declaration beside the Python parameters of its function: what the call engine reads."""

from __future__ import annotations

import inspect
import itertools
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from torch import Tensor

from linattn.host import validate
from linattn.spec.operator import Function

_forms = itertools.count()
_FORM_BITS = 16


class Face:
    """A public operator: its declaration beside its Python parameters.

    Attributes:
        function: the declaration.
        parameters: of the Python function.
        tensors: tensor parameters to their entries of the signature, required ones first.
        optional: of these, the ones that may be None.
        scalars: other parameters to what checks them.
        bits: optional tensors and switches that a form of a call is told by, in the order of its
            bits.
        form: number of the form without any of them.
        schema: parameters of the registered operator, as ``torch.library`` writes them.
        ops: overloads of the registered operator: ``default`` makes the first result, ``out`` takes
            it.
        rows: of the tensors, label, shape in words, whether it may be absent and whether it may
            require grad.
    """

    def __init__(self, function: Function, stub: Callable[..., Any]) -> None:
        self.function = function
        self.parameters = inspect.signature(stub).parameters
        hints = typing.get_type_hints(stub)
        given = {name: hints.get(name) for name in self.parameters}
        tensors = [name for name, hint in given.items() if Tensor in (hint, *typing.get_args(hint))]
        self.optional = [name for name in tensors if given[name] is not Tensor]
        required = [name for name in tensors if given[name] is Tensor]
        self._refuse_parameters(given)
        self._refuse(tensors)
        entries = {spec.label: spec for spec in function.signature.tensors}
        self.tensors = {name: entries[name] for name in (*required, *self.optional)}
        self.scalars: dict[str, Callable[[str, Any], Any]] = {}
        for name, hint in given.items():
            if name not in tensors:
                usual = {bool: validate.flag, float: validate.scalar}
                self.scalars[name] = usual[hint] if hint in usual else function.checks[name]
        self.bits = (*self.optional, *(x for x in function.switches.values() if given[x] is bool))
        if len(self.bits) > _FORM_BITS:
            raise TypeError(f"{function.name}: got {len(self.bits)} optional tensors and switches")
        self.form = next(_forms) << _FORM_BITS
        self.schema = {name: self._schema(name, hint) for name, hint in given.items()}
        for name in (*function.checks, *list(function.results.values())[:1]):
            del self.schema[name]
        self.rows = tuple(
            (name, function.signature.shape_text(spec), name in self.optional, spec.whole)
            for name, spec in self.tensors.items()
        )
        self.ops: dict[str, Any] = {}
        self.given = cache(self._given)
        self.switches = cache(self._switches)

    def _refuse_parameters(self, hints: Mapping[str, Any]) -> None:
        """Raise ``TypeError`` for parameters that no call can have, or that nothing reads."""
        name, function = self.function.name, self.function
        if not name.isidentifier():
            raise TypeError(f"{name}: got a function without a name, expected one")
        scalars = [scalar for scalar, _ in function.operator.signature.scalars]
        read = {
            float: (scalars, "a scalar of the signature"),
            bool: ((*function.switches.values(), *function.results.values()), "a switch or result"),
        }
        for x in self.parameters.values():
            hint = hints[x.name]
            if x.kind not in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY) or x.name.startswith("_"):
                raise TypeError(
                    f"{name}: {x.name}: got {x.kind.description}, expected a plain name"
                )
            if Tensor in (hint, *typing.get_args(hint)) or x.name in function.checks:
                continue
            if hint not in read:
                expected = "Tensor, Tensor | None, bool, float, or an entry in checks"
                raise TypeError(f"{name}: {x.name}: got {hint}, expected {expected}")
            names, what = read[hint]
            if x.name not in names:
                raise TypeError(f"{name}: {x.name}: got a {hint.__name__}, expected {what}")
        missing = [scalar for scalar in scalars if hints.get(scalar) is not float]
        if missing:
            raise TypeError(f"{name}: got no float parameters {missing}, expected the scalars")

    def _refuse(self, tensors: Sequence[str]) -> None:
        """Raise ``TypeError`` for a declaration that does not fit its parameters."""
        name, function = self.function.name, self.function
        entries = function.signature.tensors
        labels = [spec.label for spec in entries]
        unknown = [x for x in tensors if x not in labels]
        arguments = (*function.results.values(), *function.switches.values(), *function.checks)
        unknown += [x for x in arguments if x not in self.parameters]
        if unknown:
            raise TypeError(f"{name}: got {unknown}, expected parameters of it, tensors {labels}")
        for spec in entries:
            if spec.label in self.optional and not (
                spec.optional or spec.label in function.results.values()
            ):
                raise TypeError(f"{name}: got {spec.label} that may be None, expected a tensor")
            made = spec.name in function.results or spec.name == "workspace"
            if spec.label not in tensors and not made and not spec.optional:
                raise TypeError(f"{name}: got no parameter {spec.label}, expected a tensor")

    def _schema(self, name: str, hint: Any) -> str:
        """A parameter as ``torch.library`` writes it."""
        if name not in self.tensors:
            return f"{getattr(hint, '__name__', '')} {name}"
        mutated = f"({chr(ord('a') + list(self.tensors).index(name))}!)"
        alias = mutated if self.tensors[name].output else ""
        return f"Tensor{alias}{'?' * (name in self.optional)} {name}"

    def bit(self, name: str) -> int:
        """Bit of an optional tensor or a switch in a form."""
        return 1 << self.bits.index(name)

    def _given(self, form: int) -> tuple[str, ...]:
        """Entries of the tensors of a call of that form, in the order in which it gives them."""
        return tuple(
            spec.name
            for name, spec in self.tensors.items()
            if name not in self.optional or form & self.bit(name)
        )

    def _switches(self, form: int) -> Mapping[str, int]:
        """Switches of a call of that form, by their name in the declaration."""
        switches = self.function.switches.items()
        return {name: int(bool(form & self.bit(argument))) for name, argument in switches}
