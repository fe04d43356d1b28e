"""Finding the parts of an answer: separators, brackets and labels outside of any nesting."""

import re
from collections.abc import Collection

from prorl_gym.environments.math.expressions import GREEK

_PIECE = re.compile(r"\\[a-zA-Z]+|\\.|.", re.DOTALL)
_OPENING = frozenset({"(", "[", "{", "\\{", "\\langle", "\\lfloor", "\\lceil", "\\begin"})
_CLOSING = frozenset({")", "]", "}", "\\}", "\\rangle", "\\rfloor", "\\rceil", "\\end"})
_ENDS = {"(": (")", "]"), "[": (")", "]"), "\\{": ("\\}",), "\\langle": ("\\rangle",)}

_SUBSCRIPT = re.compile(r"_(?:\{[^{}]*\}|\\[a-zA-Z]+|\d+|[a-zA-Z])")
_FUNCTION_OF = re.compile(r"[a-zA-Z]'*\s*(?:\^\s*\{?\s*-1\s*\}?)?\s*\([^()]*\)")
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|angle)\s*(?:\{[^{}]*\}|\(?\s*(?:\\angle\s*)?(?:[A-Z]+|\\[a-z]+)\s*\)?)")
_SEGMENT = re.compile(
    r"\|\s*(?:[A-Z]'?\s*[A-Z]'?|\\(?:overline|overrightarrow|vec)\s*(?:\{\s*[a-zA-Z]{1,2}\s*\}|[a-zA-Z]{1,2}))\s*\|"
    r"|\[\s*[A-Z]{3,}\s*\]"
)
_MARK = re.compile(r"\\(?:overline|vec|angle|triangle|overrightarrow)(?![a-zA-Z])")
_LABEL = re.compile(r"(?!-)[a-zA-Z\s\\+\-*/(){}',.]*")
_LETTER = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]|\\(?:" + "|".join(sorted(GREEK)) + r")(?![a-zA-Z])")
_NO_LABEL = re.compile(
    r"\\(?:pi|infty|sqrt|ln|log|lg|exp|sin|cos|tan|sum|int|lim|cup|cap|pm|begin|usd)(?![a-zA-Z])|^[ei]$"
)


def split(text: str, separators: Collection[str]) -> list[tuple[str, str]]:
    """Return the parts of a text between separators outside brackets, each with the separator before it."""
    parts: list[tuple[str, str]] = []
    before, depth, start = "", 0, 0
    for match in _PIECE.finditer(text):
        token = match[0]
        if token in _OPENING:
            depth += 1
        elif token in _CLOSING:
            depth -= 1
        elif depth == 0 and token in separators:
            parts.append((before, text[start : match.start()].strip()))
            before, start = token, match.end()
    parts.append((before, text[start:].strip()))
    return parts


def enclosed(text: str) -> tuple[str, str, str] | None:
    """Return opening bracket, content and closing bracket when one pair of brackets is around all of a text."""
    tokens = list(_PIECE.finditer(text))
    if len(tokens) < 2 or tokens[0][0] not in _ENDS or tokens[-1][0] not in _ENDS[tokens[0][0]]:
        return None
    depth = 0
    for token in tokens[:-1]:
        depth += (token[0] in _OPENING) - (token[0] in _CLOSING)
        if depth == 0:
            return None
    return tokens[0][0], text[tokens[0].end() : tokens[-1].start()].strip(), tokens[-1][0]


def whole_group(text: str) -> str | None:
    """Return the content of the braces that are around all of a text, otherwise ``None``."""
    depth = 0
    for match in _PIECE.finditer(text):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth <= 0:
            return text[1 : match.start()] if depth == 0 and match.end() == len(text) and text[0] == "{" else None
    return None


def is_label(text: str) -> bool:
    """Whether what stands left of an equals sign only names what is asked: ``x``, ``f(2)``, ``m+n``, ``Area``.

    Not ``-x``, ``2x`` or ``x^2``: such an equation is one to be solved.
    """
    if re.fullmatch(r"\(\s*[a-zA-Z](?:_\w)?(?:\s*,\s*[a-zA-Z](?:_\w)?)+\s*\)", text):
        return True
    if len(parts := split(text, (":",))) > 1:
        return all(is_label(part) for _, part in parts)
    rest = _FUNCTION_OF.sub("f", _SUBSCRIPT.sub("", text))
    rest = _MARK.sub("", _SEGMENT.sub("f", _TRIGONOMETRIC.sub("f", rest)))
    rest = re.sub(r"\\text\s*\{[\w\s]*\}", "f", rest)
    if _NO_LABEL.search(rest.strip()):
        return False
    return _LABEL.fullmatch(rest) is not None and _LETTER.search(rest) is not None


def is_name(text: str) -> bool:
    """Whether a text is one variable, perhaps with a subscript."""
    text = text.strip()
    return (
        text not in ("e", "i") and re.fullmatch(r"(?:[a-zA-Z]|\\(?!pi|infty)[a-z]+)(?:_\{?\w+\}?)?'*", text) is not None
    )


def normal_name(text: str) -> str:
    r"""Return a name in one spelling: ``|AB|``, ``\\overline{AB}`` and ``AB`` are one, ``a_1`` and ``a_{1}`` too."""
    text = re.sub(r"\\(?:overline|overrightarrow|mathrm|text)\s*\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"(?<![a-zA-Z])m\s*(?=\\angle)|\\angle(?![a-zA-Z])(?=\s*\\angle)", "", text)
    text = re.sub(r"\|([^|()]*)\|", r"\1", text)
    text = re.sub(r"_\{\s*(\w|\\[a-zA-Z]+)\s*\}", r"_\1", text)
    return "".join(text.split())
