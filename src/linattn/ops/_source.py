"""Text of the functions that the call engine writes for a declaration.

Names that start with an underscore are the functions' own, or what ``_face.py`` hands to them; the
others are parameters.
"""

from __future__ import annotations

from linattn.host import validate
from linattn.ops._declaration import Face


def text(face: Face, scope: list[str]) -> str:
    """Source of ``make``, which takes what is in ``scope`` and returns the public function.

    Made with ``_redirect`` False it is the function behind the registered operator, which gets what
    the dispatcher has taken apart.
    """
    lines = [f"def make({', '.join(scope)}):"]
    for writer in (_dispatched, _public):
        lines += [f"    {line}" for line in writer(face)]
    lines.append(f"    return {face.function.name}")
    return "\n".join(lines) + "\n"


def _header(face: Face, name: str, defaults: bool) -> str:
    """First line of a function with the parameters of a face."""
    parts, keywords = [], False
    for parameter in face.parameters.values():
        if defaults and parameter.kind is parameter.KEYWORD_ONLY and not keywords:
            parts.append("*")
            keywords = True
        fallback = defaults and parameter.default is not parameter.empty
        parts.append(parameter.name + (f"=_default_{parameter.name}" if fallback else ""))
    return f"def {name}({', '.join(parts)}):"


def _dispatched(face: Face) -> list[str]:
    """The call through torch's dispatcher."""
    function = face.function
    tensors = ", ".join(face.tensors)
    lines = [f"{name} = _check_{name}({name!r}, {name})" for name in face.scalars]
    lines.append(f"_screen(_rows, ({tensors},))")
    lines += [f"{name} = {name}.detach()" for name, spec in face.tensors.items() if spec.whole]
    passed = [name for name in face.parameters if name in face.schema]
    results = list(function.results.items())
    if not results:
        lines.append(f"_ops['default']({', '.join(passed)})")
        return [_header(face, "_dispatched", False), *(f"    {line}" for line in lines)]
    (_, out), rest = results[0], [name for name, _ in results[1:]]
    made = ", ".join(f"_new_{name}" for name, _ in results)
    given = ", ".join(f"_new_{name}" for name in rest)
    call = f"_ops['out']({', '.join((*passed, out))})"
    lines += [f"if {out} is None:", f"    {made} = _ops['default']({', '.join(passed)})", "else:"]
    lines.append(f"    {given} = {call}" if rest else f"    {call}")
    lines.append(f"    _new_{results[0][0]} = {out}")
    for name, argument in results[1:]:
        if argument in face.tensors:
            lines.append(f"if {argument} is not None: _new_{name} = {argument}")
        else:
            lines.append(f"if not {argument}: _new_{name} = None")
    lines.append(f"return {made}")
    return [_header(face, "_dispatched", False), *(f"    {line}" for line in lines)]


def _public(face: Face) -> list[str]:
    """The public function: past the dispatcher where nobody watches and tensors are ordinary."""
    elsewhere = f"return _dispatched({', '.join(face.parameters)})"
    lines = ["if not _eager():", f"    {elsewhere}"]
    lines += [*_scalars(face), "_launcher = _current()", *_form(face)]
    lines += [
        "_plan = _launcher.plans.get(_form)",
        "if _plan is None or not _plan.matches(*_given):",
        "    _plan = _find(_launcher, _face, _form, _given, _redirect)",
        "    if _plan is None:",
        f"        {elsewhere}",
    ]
    lines += ["_traits = _plan.traits", "if _traits.grads and _grad_enabled():"]
    lines.append("    _refuse_grad(_face, _form, _given)")
    deciders = "".join(f"{argument}, " for argument in face.function.results.values())
    lines += [
        "_run = _plan.run",
        "if _run is None:",
        f"    return _idle(_face, _plan, _form, _given, ({deciders}))",
        *_addresses(face),
        *_launch(face),
    ]
    return [_header(face, face.function.name, True), *(f"    {line}" for line in lines)]


def _scalars(face: Face) -> list[str]:
    """Check what is no tensor. Identity is the quickest comparison, and what it misses only takes
    the longer way."""
    wrong = []
    for name, check in face.scalars.items():
        if check is validate.flag:
            wrong.append(f"({name} is not True and {name} is not False)")
        elif check is validate.scalar:
            wrong.append(f"_type({name}) is not float or not _least <= {name} <= _most")
        else:
            wrong.append(f"{name} is not _default_{name}")
    if not wrong:
        return []
    checks = [f"    {name} = _check_{name}({name!r}, {name})" for name in face.scalars]
    return [f"if {' or '.join(wrong)}:", *checks]


def _form(face: Face) -> list[str]:
    """Which arguments a call has, and the tensors that are there. The usual call of an engine has
    all of them."""
    required = [name for name in face.tensors if name not in face.optional]
    every = ", ".join((*required, *face.optional))
    full = face.form | sum(face.bit(name) for name in face.optional)
    lines = [f"_form, _given = {face.form}, ({', '.join(required)},)"]
    for name in face.optional:
        lines += [f"if {name} is not None:"]
        lines += [f"    _form += {face.bit(name)}", f"    _given += ({name},)"]
    if len(face.optional) > 1:
        present = " and ".join(f"{name} is not None" for name in face.optional)
        lines = [
            f"if {present}:",
            f"    _form, _given = {full}, ({every})",
            "else:",
            *(f"    {line}" for line in lines),
        ]
    for name in face.bits[len(face.optional) :]:
        lines += [f"if {name}:", f"    _form += {face.bit(name)}"]
    return lines


def _addresses(face: Face) -> list[str]:
    """Read the addresses, and look closer where they are new."""
    lines = []
    for name in face.tensors:
        read = f"{name}.data_ptr()"
        lines.append(f"_at_{name} = " + (f"0 if {name} is None else " + read
                                         if name in face.optional else read))  # fmt: skip
    groups: dict[int, list[str]] = {}
    for name, spec in face.tensors.items():
        groups.setdefault(spec.alignment - 1, []).append(f"_at_{name}")
    misaligned = " | ".join(f"({' | '.join(of)}) & {bits}" for bits, of in groups.items() if bits)
    labels = [spec.label for spec in face.function.signature.tensors]
    places = ", ".join(f"_at_{label}" if label in face.tensors else "0" for label in labels)
    return [
        *lines,
        f"_places = ({places},)",
        "if (_places != _plan.latest and _places not in _plan.known) or _checked.active:",
        f"    if not _plan.settles(_places, {misaligned}) or _checked.active:",
        "        _inspect(_launcher, _plan, _given, _places)",
    ]


def _launch(face: Face) -> list[str]:
    """Make the results that are not given, and launch."""
    function = face.function
    lines = []
    whole = [name for name, spec in face.tensors.items() if spec.whole]
    lines += [line for x in whole for line in ("if _traits.detach:", f"    {x} = {x}.detach()")]
    for number, (name, argument) in enumerate(function.results.items()):
        make = f"_empty(_plan.shapes[{number}], dtype=_dtype_{name}, device=_traits.device)"
        given = argument in face.tensors
        lines += [
            f"if {argument} is None:" if given else f"if {argument}:",
            f"    _new_{name} = {make}",
            f"    _to_{name} = _new_{name}.data_ptr()",
            "else:",
            f"    _new_{name}, _to_{name} = "
            + (f"{argument}, _at_{argument}" if given else "None, 0"),
        ]
    arguments = []
    labels = {spec.name: name for name, spec in face.tensors.items()}
    for spec in function.operator.signature.tensors:
        if spec.whole:
            arguments.append(labels[spec.name])
        elif spec.name in function.results:
            arguments.append(f"_to_{spec.name}")
        else:
            arguments.append(f"_at_{labels[spec.name]}" if spec.name in labels else "0")
    arguments += ["_plan.layout_at", *(name for name, _ in function.operator.signature.scalars)]
    call = f"_run({', '.join(arguments)})"
    lines += ["_guard = _launcher.guard(_traits.device)", "if _guard is None:", f"    {call}"]
    lines += ["else:", "    with _guard:", f"        {call}"]
    if function.results:
        lines.append("return " + ", ".join(f"_new_{name}" for name in function.results))
    return lines
