"""The one call engine: a declaration and a Python signature become a public operator.

``declared`` reads both and writes the function that callers get, as dataclasses write ``__init__``,
because a warm call may cost the host a few microseconds and each line is up to a tenth of one. The
function finds the plan of the call by the tensors that are there, reads their addresses, looks
closer where these are new, makes the results and launches (``host/plan.py`` says what a plan is,
``_source.py`` holds the text). From the same declaration come the operator that ``torch.library``
knows (for ``torch.compile``, recorders, fake tensors and subclasses), ``warm_up`` and ``explain``.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

from linattn.host import checked, guards, launch, plan, validate
from linattn.ops import _library, _source
from linattn.ops._declaration import Face
from linattn.spec.operator import Function, Operator
from linattn.spec.signature import Signature, TensorSpec, size_of

Public = TypeVar("Public", bound=Callable[..., Any])

FACES: dict[str, Face] = {}
"""Every public operator, by name."""


def declared(
    operator: Operator, signature: Signature, **declaration: Any
) -> Callable[[Public], Public]:
    """Decorator of a function that is a signature and a docstring: makes it a public operator.

    Parameters that are tensors have the labels of the signature's entries; of the others bools and
    floats are checked as such, and the rest by ``checks``.

    Args:
        operator: what it launches.
        signature: the operator's with this function's sizes.
        declaration: further attributes of ``linattn.spec.operator.Function``.
    """

    def decorate(stub: Public) -> Public:
        name = stub.__name__
        face = Face(Function(name, operator, signature, **declaration), stub)
        public: Public = _written(face)
        for attribute in ("__module__", "__qualname__", "__doc__", "__annotations__"):
            setattr(public, attribute, getattr(stub, attribute))
        FACES[name] = face
        return public

    return decorate


def _written(face: Face) -> Any:
    """Write, compile and register the functions of a declaration; return the public one."""
    scope: dict[str, Any] = {
        "_checked": checked,
        "_current": launch.current,
        "_eager": guards.eager,
        "_empty": torch.empty,
        "_face": face,
        "_find": plan.find,
        "_grad_enabled": torch.is_grad_enabled,
        "_idle": _idle,
        "_inspect": plan.inspect,
        "_ops": face.ops,
        "_redirect": True,
        "_refuse_grad": _refuse_grad,
        "_rows": face.rows,
        "_screen": _screen,
        "_type": type,
        "_least": -validate.LARGEST_SCALE,
        "_most": validate.LARGEST_SCALE,
    }
    scope |= {f"_check_{name}": check for name, check in face.scalars.items()}
    scope |= {f"_default_{name}": x.default for name, x in face.parameters.items()}
    for name in face.function.results:
        element = face.function.signature[name].element
        scope[f"_dtype_{name}"] = validate.dtype(element.torch)
    text, file = _source.text(face, list(scope)), f"<linattn.{face.function.name}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    made: dict[str, Any] = {}
    exec(compile(text, file, "exec"), globals(), made)
    make = made["make"]
    direct = make(**{**scope, "_eager": lambda: True, "_redirect": False})
    face.ops.update(_registered(face, direct))
    return make(**scope)


# ---------------------------------------------------------------------------------------------
# What it calls where it is in no hurry


def _idle(
    face: Face, made: plan.Planned, form: int, given: Sequence[Tensor], deciders: Sequence[Any]
) -> Any:
    """Results of a call that launches nothing."""
    tensors = dict(zip(face.given(form), given))
    results: list[Tensor | None] = []
    for (name, _), decider, shape in zip(face.function.results.items(), deciders, made.shapes):
        if isinstance(decider, Tensor) or decider is False:
            results.append(decider if isinstance(decider, Tensor) else None)
            continue
        fresh = _empty(face.function.signature[name], shape, made.traits.device)
        if name in face.function.starts:
            start = tensors.get(face.function.starts[name])
            fresh = fresh.zero_() if start is None else fresh.copy_(start)
        results.append(fresh)
    return _some(results)


def _empty(spec: TensorSpec, shape: Sequence[int], device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=validate.dtype(spec.element.torch), device=device)


def _refuse_grads(named: Iterable[tuple[str, Tensor, bool]]) -> None:
    """Raise for a tensor that requires grad, while grad mode is on, and may not."""
    if torch.is_grad_enabled():
        validate.no_grad([(label, x) for label, x, differentiable in named if not differentiable])


def _refuse_grad(face: Face, form: int, given: Sequence[Tensor]) -> None:
    """Raise for the tensor that requires grad; called while grad mode is on."""
    entries = map(face.function.signature.__getitem__, face.given(form))
    _refuse_grads((spec.label, x, spec.whole) for spec, x in zip(entries, given))


def _screen(rows: Sequence[tuple[str, str, bool, bool]], tensors: Sequence[Tensor | None]) -> None:
    """Refuse what no operator takes, before the dispatcher sees it.

    Args:
        rows: label, shape in words, whether it may be absent and whether it may require grad, for
            each tensor.
        tensors: the call's.
    """
    named = [
        (label, validate.strided(label, text, x), differentiable)
        for (label, text, optional, differentiable), x in zip(rows, tensors)
        if x is not None or not optional
    ]
    if is_compiling():  # Dynamo may lose the words of what is raised here; fake results say it
        return
    _library.refuse_derived([(label, x) for label, x, _ in named])
    _refuse_grads(named)


# ---------------------------------------------------------------------------------------------
# The registered operator


def _registered(face: Face, direct: Callable[..., Any]) -> dict[str, Any]:
    """Register the overloads of a face: one makes the first result, the other takes it."""
    function, results = face.function, list(face.function.results.items())
    passed = [name for name in face.parameters if name in face.schema]
    names = (*passed, *(argument for _, argument in results[:1]))
    absent = dict.fromkeys(face.optional)

    def run(*values: Any) -> Any:
        named = {**absent, **dict(zip(names, values))}
        made = direct(**named)
        if len(results) < 2:
            return made if results and named[results[0][1]] is None else None
        own = [
            # None that the caller gave, and none that is absent: without elements it stands for
            # both.
            _empty(function.signature[name], [0], values[0].device)
            if x is None or isinstance(named[argument], Tensor)
            else x
            for x, (name, argument) in zip(made, results)
        ]
        return _some(own if named[results[0][1]] is None else own[1:])

    def fake(*values: Any) -> Any:
        named = {**absent, **dict(zip(names, values))}
        tensors = {
            spec.name: named[name] for name, spec in face.tensors.items() if named[name] is not None
        }
        _refuse_grads(
            (spec.label, tensors[spec.name], spec.whole)
            for spec in face.tensors.values()
            if spec.name in tensors
        )
        sizes = function.complete(dict(validate.check(function, tensors).sizes))
        device = next(iter(tensors.values())).device
        made: list[Tensor] = []
        for name, argument in results:
            spec = function.signature[name]
            wanted = named[argument] is None or named[argument] is True
            shape = [size_of(dim, sizes) for dim in spec.dims] if wanted else [0]
            made.append(_empty(spec, shape, device))
        return _some(made if results and named[results[0][1]] is None else made[1:])

    arguments = ", ".join(face.schema[name] for name in passed)
    name, kinds = function.name, ["Tensor"] * len(results)
    overloads = {"default": _library.register(f"{name}({arguments}) -> {_text(kinds)}", run, fake)}
    if results:
        arguments = f"{arguments}, Tensor(z!) {results[0][1]}"
        schema = f"{name}.out({arguments}) -> {_text(kinds[1:])}"
        overloads["out"] = _library.register(schema, run, fake)
    return overloads


def _some(results: Sequence[Tensor | None]) -> Any:
    return results[0] if len(results) == 1 else tuple(results) or None


def _text(kinds: Sequence[str]) -> str:
    return kinds[0] if len(kinds) == 1 else f"({', '.join(kinds)})"
