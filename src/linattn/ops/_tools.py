"""``warm_up`` and ``explain``: questions that any public operator answers."""

from __future__ import annotations

import torch

from linattn.errors import type_error, value_error
from linattn.host import dispatch, launch, warm
from linattn.host.arch import Arch, ArchLike
from linattn.ops._declaration import Face
from linattn.ops._face import FACES


def face_of(op: object) -> Face:
    """The face of ``op``, a public function or its name.

    Raises:
        TypeError: neither a function nor a string.
        ValueError: no such operator.
    """
    name = op if isinstance(op, str) else getattr(op, "__name__", None)
    if not isinstance(name, str):
        raise type_error("op", type(op).__name__, "a linattn operator or its name")
    if name not in FACES:
        raise value_error("op", repr(name), "one of " + ", ".join(sorted(FACES)))
    return FACES[name]


def warm_up(op: object, device: torch.device | str | int | None = None) -> None:
    """Compile and load every configuration of an operator, and launch each once on a tiny problem.

    Afterwards any call of the operator on that device can be captured in a CUDA graph.

    Args:
        op: a public function, such as ``linattn.lightning_attn_fwd``, or its name.
        device: device to load onto; by default the current one.

    Raises:
        RuntimeError: a graph is being captured, or there is no device.
        TypeError, ValueError: no such operator.
        UnsupportedArchitecture, NotImplementedError: no kernel serves the device.
    """
    function, launcher = face_of(op).function, launch.current()
    if launcher.capturing():
        raise RuntimeError(f"warm_up: {function.name} cannot be compiled inside a graph capture")
    target = launcher.default_device() if device is None else torch.device(device)
    if str(target) == "cuda":  # the current one, as everywhere in torch
        target = launcher.default_device()
    warm.every(launcher, function.operator, target)


def explain(
    op: object,
    *,
    arch: ArchLike | None = None,
    multiprocessors: int | None = None,
    segments: int | str = 1,
    **shapes: int,
) -> dispatch.Plan:
    """Which kernel, configuration and grid a call would get, and why. Launches nothing.

    Args:
        op: a public function, such as ``linattn.lightning_attn_fwd``, or its name.
        arch: architecture such as ``"sm90"`` or ``(9, 0)``; by default that of the current device.
        multiprocessors: of the GPU; by default those of the current device, or of an H200 where
            ``arch`` is given.
        segments: as the function's argument.
        shapes: the sizes of the problem by letter, such as ``B=1, T=4096, H=64``; ``HV`` is ``H``
            by default. Packed functions take ``N``, and ``T`` in total. Besides the switches of a
            call: ``persistent`` of ``lightning_attn_fwd_varlen`` and ``update_state`` of
            ``la_decode_mtp``, as in a call, and ``commit`` of ``la_verify_kvbuffer``: with accepted
            lengths, False by default.

    Raises:
        TypeError: a letter that is missing, unknown or no int; a switch that is neither a bool nor
            0 or 1.
        ValueError: an unknown operator, a negative size, ``HV`` no multiple of ``H``.
        RuntimeError: no ``arch`` was given and there is no device to ask.
        UnsupportedArchitecture, NotImplementedError: the call itself would raise that, too.
    """
    face = face_of(op)
    defaults = {
        name: face.parameters[argument].default is True
        for name, argument in face.function.switches.items()
    }
    sizes = dispatch.sizes_of(face.function, defaults, shapes)
    if multiprocessors is not None and (type(multiprocessors) is not int or multiprocessors < 1):
        raise value_error("multiprocessors", repr(multiprocessors), "an int of at least 1, or None")
    known, processors = _known_device(arch)
    dispatch.segments_of("segments", segments)
    return dispatch.explain(face.function, known, sizes, multiprocessors or processors)


def _known_device(arch: ArchLike | None) -> tuple[Arch, int]:
    if arch is not None:
        return Arch.parse(arch), launch.H200_MULTIPROCESSORS
    launcher = launch.current()
    try:
        device = launcher.default_device()
    except RuntimeError as error:
        raise RuntimeError(
            f'explain: no architecture is known here ({error}); pass one, such as arch="sm90"'
        ) from error
    return launcher.arch(device), launcher.multiprocessors(device)
