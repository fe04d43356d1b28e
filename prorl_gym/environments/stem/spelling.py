"""One spelling for what is written in many: TeX fonts and spacing, Unicode signs, hyphens, Greek letters."""

import re
import unicodedata
from collections.abc import Mapping, Sequence

from prorl_gym.environments import tex
from prorl_gym.environments.stem.elements import ELEMENT

# ruff: noqa: RUF001 - look-alike signs are what this file is about

_FONTS = [*tex.FONTS, *tex.STYLED, *"mathbb mathring bbox ce unit si num boxed underbrace".split()]
_MACROS: Mapping[str, tuple[int, Sequence[int]]] = (
    dict.fromkeys(_FONTS, (1, (0,)))
    | dict.fromkeys(tex.UNSEEN, (1, ()))
    | dict.fromkeys(("textcolor", "colorbox", "style", "class", "overset", "stackrel"), (2, (1,)))
    | {"fcolorbox": (3, (2,)), "SI": (2, (0, 1)), "qty": (2, (0, 1))}
)
"""Of macros that change how something looks: how many arguments they take, and which of these are seen."""
_MACRO = re.compile(rf"\\({tex.any_of(_MACROS)})\*?\s*(?:\[[^\[\]{{}}]*\]\s*)?(?=\{{)")
_OPENING = re.compile(r"\s*\{")
_NOTE = re.compile(r"\s*_\s*(?=\{)")
_COMMAND_BEFORE = re.compile(r"\\[a-zA-Z]+$")
_SWITCH = re.compile(rf"\\(?:{tex.any_of(tex.SWITCHES)}|{tex.DELIMITER_SIZES})(?![a-zA-Z])\s*")
_SPACE = re.compile(
    rf"\\[,;:>! ]|\\(?:{tex.any_of([*tex.WIDE_SPACES, *tex.SPACES, *tex.THIN_SPACES])})(?![a-zA-Z])"
    rf"|{tex.LENGTH}|~|[\u00a0\u2000-\u200a\u202f]"
)
_INVISIBLE = re.compile("[\u200b-\u200f\u2060-\u2064\ufeff\u00ad]")
_DELIMITERS = re.compile(r"\\?\$|\\[()\[\]]")
_MINUS = re.compile("[−‒–—‐‑﹣－]")
_SUPERSCRIPT = re.compile(f"[{tex.SUPERSCRIPTS}]+")

_GREEK = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma tau upsilon phi chi "
    "psi omega"
).split()
_GREEK_LETTERS = {
    unicodedata.lookup(f"GREEK {case} LETTER {'LAMDA' if name == 'lambda' else name.upper()}"): (
        name if case == "SMALL" else name.capitalize()
    )
    for name in _GREEK
    for case in ("SMALL", "CAPITAL")
} | {"ϕ": "phi", "ϵ": "epsilon", "ϑ": "theta", "ς": "sigma", "µ": "mu"}
GREEK_COMMAND = re.compile(r"\\(?:var)?(" + "|".join([*_GREEK, *map(str.capitalize, _GREEK)]) + r")(?![a-zA-Z])")
_GREEK_LETTER = re.compile(f"[{''.join(_GREEK_LETTERS)}]")

_SIGNS = {
    r"\\(?:long)?rightarrow|\\to(?![a-zA-Z])|→|⟶": "->",
    r"\\(?:times|cdot)(?![a-zA-Z])|[×·⋅∙]": "*",
    r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-zA-Z])|º|℃": "°",
    r"\\pm(?![a-zA-Z])": "±",
    r"\\leq?(?![a-zA-Z])": "≤",
    r"\\geq?(?![a-zA-Z])": "≥",
    r"\\infty(?![a-zA-Z])": "∞",
    r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}": r"(\1)/(\2)",
    r"\\sqrt\s*\{([^{}]*)\}|√\(?(\w+)\)?": r"sqrt(\1\2)",
    r"\\%": "%",
}
_SIGN = {re.compile(pattern): sign for pattern, sign in _SIGNS.items()}
_LONE = re.compile(r"\(([\w.]+)\)(?=/)|(?<=/)\(([\w.]+)\)")
_POWER_OF_NUMBER = re.compile(r"(?<![A-Za-z\d)\]])(\d+(?:\.\d+)?)\^\{?([+-]?\d+)\}?")
_CHARGE = re.compile(r"(?<=[A-Za-z\d)\]])\^?\{?(\d*)([+-])\}?(?=$|[\s,;.)*]|->)")
_RAISED_CHARGE = re.compile(
    r"\s*\^\s*\{?\s*(?:(?P<sign>[+-])(?P<number>\d)|(?P<number_first>\d)(?P<sign_behind>[+-]))\s*\}?(?!\w)"
)
_RAISED_NUMBER = re.compile(r"\s*\^\s*\{?\s*(\d+)\s*\}?(?![\d+\-])")
_ION_BEFORE = re.compile(r"[A-Za-z\d_{}()\[\]]{1,60}$")
_ION = re.compile(rf"(?=.*[A-Z])(?:{ELEMENT}|[\d()\[\]])+")
_BRACKETED_CHARGE = re.compile(r"(?<=[A-Za-z\d\]])\((\d*[+-])\)$")
_LONE_ION = re.compile(rf"({ELEMENT})\+(\d)")
_EXPLICIT_CHARGE = re.compile(r"(?<=[A-Za-z\d)\]}])\s*\^\s*\{?\s*(\d*[+-])\s*\}?")
_JOINT = re.compile(r"(?<=[A-Za-z])-(?=[A-Za-z])|(?<=[A-Za-z]{2})-(?=\d)|(?<=\d)-(?=[A-Za-z]{2})")
_KEPT_POWER, _KEPT_MINUS = "\ue000", "\ue001"


def unfonted(text: str) -> str:
    r"""Return a text without TeX's fonts, spacing and math delimiters: ``5\,\mathrm{kg}`` becomes ``5  kg``."""
    text = _MINUS.sub("-", _INVISIBLE.sub("", text))
    text = _SUPERSCRIPT.sub(lambda match: f"^{{{match[0].translate(tex.RAISED)}}}", text)
    text = _SWITCH.sub(" ", _DELIMITERS.sub("", _SPACE.sub(" ", text)))
    while (macro := _MACRO.search(text)) is not None:
        before = text[: macro.start()]
        count, seen = _MACROS[macro[1]]
        arguments, end = _arguments(text, macro.end(), count)
        if macro[1] == "underbrace" and (note := _NOTE.match(text, end)):
            end = _arguments(text, note.end(), 1)[1]
        # As TeX sets it: k and Omega side by side are one unit.
        gap = " " if _COMMAND_BEFORE.search(before) else ""
        text = before + gap + " ".join(arguments[place] for place in seen if place < len(arguments)) + text[end:]
    return text.strip()


def _arguments(text: str, start: int, count: int) -> tuple[list[str], int]:
    """Return up to so many groups in braces that begin at ``start``, and where the last of them ends."""
    found: list[str] = []
    while len(found) < count and (opening := _OPENING.match(text, start)) is not None:
        closing = _closing(text, opening.end())
        found.append(text[opening.end() : closing])
        start = min(closing + 1, len(text))
    return found, start


def _closing(text: str, start: int) -> int:
    """Return where the group ends that was opened before ``start``; the end of the text when it is not closed."""
    depth = 1
    for place in range(start, len(text)):
        if text[place - 1] == "\\":
            continue
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if not depth:
            return place
    return len(text)


def _charged(text: str) -> str:
    """Return a text in which a charge is written as ``^{2-}``, and a single one without its number."""
    text = _RAISED_CHARGE.sub(_charge, _BRACKETED_CHARGE.sub(r"^{\1}", text))
    if (ion := _LONE_ION.fullmatch(text)) is not None:
        return f"{ion[1]}^{{{ion[2]}+}}"  # Fe-56 is a nuclide
    return text


def _raised_number(found: re.Match[str]) -> str:
    return f"{_KEPT_POWER}{found[1]}" if _is_behind_formula(found) else found[0]


def _is_behind_formula(found: re.Match[str]) -> bool:
    before = _ION_BEFORE.search(found.string[max(0, found.start() - 60) : found.start()])
    return before is not None and _ION.fullmatch(re.sub(r"[_{}]", "", before[0])) is not None


def _charge(found: re.Match[str]) -> str:
    if not _is_behind_formula(found):
        return found[0]  # a power
    number = found["number"] or found["number_first"]
    return f"^{{{'' if number == '1' else number}{found['sign'] or found['sign_behind']}}}"


def explicit_charges(text: str) -> list[str]:
    """Return the charges of a text that are raised, so that their numbers are no subscripts."""
    return _EXPLICIT_CHARGE.findall(_charged(unfonted(text)))


def squeezed(text: str) -> str:
    """Return a key of a text in which spacing, hyphens between words, sub- and superscript do not count.

    Powers of numbers do (``10^5`` is not ``105``), numbers raised in a formula (``SO^2`` is not ``SO2``), and so do
    signs, charges and the case of letters.
    """
    text = _RAISED_NUMBER.sub(_raised_number, _charged(unfonted(text)))
    for pattern, sign in _SIGN.items():
        text = pattern.sub(sign, text)
    text = GREEK_COMMAND.sub(r" \1", text)
    text = _GREEK_LETTER.sub(lambda match: _GREEK_LETTERS[match[0]], text)
    text = unicodedata.normalize("NFKD", text.replace("°", "\ue002")).replace("\ue002", "°")
    text = "".join(character for character in text if not unicodedata.combining(character))
    text = _POWER_OF_NUMBER.sub(rf"\1{_KEPT_POWER}\2", text.replace("_", ""))
    text = _CHARGE.sub(lambda match: match[1] + match[2].replace("-", _KEPT_MINUS), text)
    text = re.sub(r"[\\^{}\"'`´‘’“”]", "", text)
    text = _LONE.sub(r"\1\2", _JOINT.sub("", re.sub(r"\s+", " ", text)))
    return text.strip().rstrip(".;:!").replace(" ", "")
