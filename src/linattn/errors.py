"""Errors that callers see: every message names the argument, what was got and what is expected."""

from __future__ import annotations


class UnsupportedArchitecture(RuntimeError):
    """No kernel of the operator exists for the architecture of the device."""


class CacheWarning(UserWarning):
    """The kernel cache could not be read or written as it should; the kernel was built anyway."""


def _message(name: str, got: object, expected: str) -> str:
    return f"{name}: got {got}, expected {expected}"


def value_error(name: str, got: object, expected: str) -> ValueError:
    """A ``ValueError`` for argument ``name``; the caller raises it."""
    return ValueError(_message(name, got, expected))


def type_error(name: str, got: object, expected: str) -> TypeError:
    """A ``TypeError`` for argument ``name``; the caller raises it."""
    return TypeError(_message(name, got, expected))


def not_implemented(name: str, got: object, expected: str) -> NotImplementedError:
    """A ``NotImplementedError`` for a legal value that no kernel serves; the caller raises it."""
    return NotImplementedError(_message(name, got, expected))
