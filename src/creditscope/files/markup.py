"""Text to html. A `str` is text and is escaped; only `Html` is markup, and only `tag` makes it.

Model output is untrusted: tags, control characters, marks that reverse the reading order, lone surrogates, which have
no UTF-8. `shown` makes each of them visible.
"""

from __future__ import annotations

import html
import unicodedata

VOID = frozenset({"br", "hr", "img", "input", "link", "meta", "col"})
LONGEST = 400
"""Characters of one token that are shown."""


class Html(str):
    """Markup that is safe as it stands."""

    __slots__ = ()


def shown(text: str, longest: int | None = None) -> str:
    r"""Text in which nothing is invisible: control and format characters, private ones and lone surrogates are named.

    Line breaks and tabs stay. With `longest` the end of a longer text is cut off and counted.

    >>> shown("a\x00b\u202ec\ud800"), shown("12345678", longest=3)
    ('a⟨0⟩b⟨202E⟩c⟨D800⟩', '123… (8 characters)')
    """
    count = len(text)
    kept = text if longest is None else text[:longest]
    out = "".join(c if c in "\n\t" or unicodedata.category(c) not in HIDDEN else f"⟨{ord(c):X}⟩" for c in kept)
    return out if len(kept) == count else f"{out}… ({count:,} characters)"


HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories of characters that are invisible."""


def escape(child: object) -> Html:
    return child if isinstance(child, Html) else Html(html.escape(shown(str(child)), quote=True))


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """An element. None and False leave a child or an attribute out; `class_` is class, `data_step` is data-step.

    >>> tag("p", "a < b", tag("br"), class_="note", hidden=True, title=None)
    '<p class="note" hidden>a &lt; b<br></p>'
    """
    words = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        attribute = key.rstrip("_").replace("_", "-")
        words.append(attribute if value is True else f'{attribute}="{escape(value)}"')
    opening = f"<{' '.join(words)}>"
    if name in VOID:
        return Html(opening)
    return Html(f"{opening}{join(*children)}</{name}>")


def join(*children: object) -> Html:
    return Html("".join(escape(child) for child in children if child is not None and child is not False))
