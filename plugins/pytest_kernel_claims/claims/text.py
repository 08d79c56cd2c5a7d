"""Text that others wrote, such as claims, ids and reasons, where it is shown: data, never markup.

Everything that a report or a document shows of it goes through here.
"""

from __future__ import annotations

import unicodedata

HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
"""Categories of characters that move a cursor, hide, turn the text around or break a line."""


def shown(text: str) -> str:
    """The text in one line of a terminal; what cannot be seen is written as Python writes it."""
    return "".join(
        char.encode("unicode_escape").decode() if unicodedata.category(char) in HIDDEN else char
        for char in text
    )


class Markdown(str):
    """Text that is Markdown already."""


def markdown(text: str) -> Markdown:
    """The text in one line of a Markdown document, or in a cell of a table. Any run of white space
    is a space; no tag, entity, link, code or mark of a generated part begins in it."""
    if isinstance(text, Markdown):
        return text
    plain = shown(" ".join(text.split())).replace("&", "&amp;").replace("<", "&lt;")
    return Markdown(plain.replace("|", "\\|").replace("`", "&#96;").replace("](", "]\\("))


def code(text: str) -> Markdown:
    """The text as code, in a document or in a cell."""
    plain = shown(text)
    if any(char in plain for char in "`<|&"):
        return Markdown(f"<code>{markdown(plain).replace(chr(92) + '|', '&#124;')}</code>")
    return Markdown(f"`{plain}`")
