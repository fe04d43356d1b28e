r"""TeX in answers: the content of the last ``\boxed{}``, and the macros that change how an answer looks.

The graders do different things with the macros (``math`` keeps ``\text{...}``, since it compares words apart), but only
this file lists them.
"""

import re
from collections.abc import Iterable

UPRIGHT = "text textrm textsf textup textnormal mathrm mathsf mathup mbox hbox operatorname".split()
"""Fonts of words and units."""

FONTS = [*UPRIGHT, *"textbf textit texttt textsc mathbf mathit mathtt mathnormal emph".split()]
"""Fonts whose argument may be text."""

STYLED = "mathcal mathscr mathfrak boldsymbol bm bold pmb underline uline fbox framebox ensuremath smash".split()
"""Macros that change the look of a formula in braces."""

INVISIBLE = "color phantom hphantom vphantom hspace vspace label tag".split()
"""Macros whose argument is invisible."""

SWITCHES = (
    "tiny scriptsize footnotesize small normalsize large Large LARGE huge Huge rm bf it sf tt sc bfseries itshape "
    "boldmath displaystyle textstyle scriptstyle scriptscriptstyle limits nolimits mathstrut strut null"
).split()
"""Macros without an argument that only change how the rest looks."""

DELIMITER_SIZES = r"left|middle|right|[bB]igg?[lrm]?"

WIDE_SPACES = "quad qquad".split()
SPACES = "enspace enskip space".split()
THIN_SPACES = "thinspace medspace thickspace negthinspace negmedspace negthickspace nobreakspace".split()
"""Spaces of a width that may also group digits."""

LENGTH = r"\\(?:kern|mkern|hskip|mskip)\s*+-?[\d.]+\s*+(?:pt|em|ex|mu|mm|cm|in)(?![a-zA-Z])"
"""A space of a given length."""

SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ"
SUPERSCRIPT_TABLE = str.maketrans(SUPERSCRIPTS, "0123456789+-n")
_BOX = re.compile(r"\\boxed\s*+(?:(?P<brace>\{)|(?P<digit>\d)(?=\s*+(?:$|\$|\\[)\]])|\.(?:\s|$)))?")
_INNER_BOX = re.compile(r"[$ \n]*+\\boxed\s*+\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def alternation(names: Iterable[str]) -> str:
    """Return a pattern of one of these names, longest first."""
    return "|".join(sorted(names, key=len, reverse=True))


class NoAnswerError(ValueError):
    """The text holds no answer that could be graded; the message is the reason."""


def last_boxed(text: str) -> str:
    r"""Return what the last ``\boxed{...}`` of a text holds, without dollar signs around it.

    Braces nest, and escaped braces do not count, as in TeX. Only the last box counts: a text with two boxes does not
    get two chances, and one whose last box was cut off has not answered. A box inside another is a pair of braces. A
    box without content, or without braces around more than a digit, only mentions the macro. Raises ``NoAnswerError``:
    there is no box, or the last one is not closed or empty.
    """
    why, answer, position, closings = "no boxed answer", "", 0, _closing_braces(text)
    while (box := _BOX.search(text, position)) is not None:
        position = box.end()
        if box["digit"] is not None:
            answer = box["digit"]
        elif box["brace"] is None:
            why = "the last \\boxed has no braces"
        elif (end := closings.get(box.end() - 1)) is None:
            why, answer = "the last \\boxed is not closed", ""
        else:
            start, position = box.end(), end + 1
            while inner := _INNER_BOX.match(text, start):
                closed = closings[inner.end() - 1]
                if text[closed + 1 : end].strip("$ \n"):
                    break
                start, end = inner.end(), closed
            content = _BOX.sub(r"\g<digit>\g<brace>", text[start:end]).strip().strip("$").strip().rstrip("\\").rstrip()
            why = "the last \\boxed is empty"
            answer = content if content.strip(".… ") else answer
    if not answer:
        raise NoAnswerError(why)
    return answer


def _closing_braces(text: str) -> dict[int, int]:
    """Return the index of the closing brace for that of each opening one that is closed, in one pass."""
    opened: list[int] = []
    closings: dict[int, int] = {}
    for match in _BRACE.finditer(text):
        if match[0] == "{":
            opened.append(match.start())
        elif match[0] == "}" and opened:
            closings[opened.pop()] = match.start()
    return closings


def closing_brace(text: str) -> int | None:
    """Return the index of the brace that closes the one at the start of a text; ``None`` when there is none."""
    return _closing_braces(text).get(0)
