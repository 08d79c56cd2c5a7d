"""The table of accepted opcode spellings. One entry = one regular expression over complete
spellings, its translation, and how it shapes basic blocks.

The `isa_*` modules fill it. A spelling outside the table is refused by the parser, so a modifier
that is not modelled cannot be ignored by accident.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ptx_emulator.emitter import Emitter
from ptx_emulator.ptx import Instr

Translate = Callable[[Emitter, Instr], None]

INT = "[su](?:16|32|64)"
BIT = "b(?:16|32|64)"
SHARED = r"shared(?:::cta)?"


@dataclass(frozen=True)
class Form:
    """A family of spellings.

    `leads`: the instruction starts a basic block, because it may be run again (it waits or splits
    its group). `ends`: it ends its block. `approximate`: what is known about the difference from
    hardware, or None when exact.
    """

    pattern: re.Pattern[str]
    translate: Translate
    leads: bool = False
    ends: bool = False
    approximate: str | None = None


_FORMS: dict[str, list[Form]] = {}
_FOUND: dict[str, Form | None] = {}


def op(
    *patterns: str, leads: bool = False, ends: bool = False, approximate: str | None = None
) -> Callable[[Translate], Translate]:
    """Register a translation for complete opcode spellings (regular expressions, anchored at both
    ends).
    """

    def register(translate: Translate) -> Translate:
        for pattern in patterns:
            heads = re.match(r"(?:\(\?:([a-z0-9|]+)\)|([a-z0-9]+))", pattern)
            if heads is None:
                raise ValueError(f"a pattern begins with opcode names, got {pattern!r}")
            compiled = re.compile(rf"(?:{pattern})\Z")
            form = Form(compiled, translate, leads, ends, approximate)
            for head in (heads[1] or heads[2]).split("|"):
                _FORMS.setdefault(head, []).append(form)
        return translate

    return register


def find(spelling: str) -> Form | None:
    """The form of a complete opcode spelling, or None when it is not accepted."""
    if spelling not in _FOUND:
        forms = _FORMS.get(spelling.split(".", 1)[0], ())
        _FOUND[spelling] = next((f for f in forms if f.pattern.match(spelling)), None)
    return _FOUND[spelling]
