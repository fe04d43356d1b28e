"""Normalizes a text to one spelling: TeX fonts and spacing, Unicode signs, hyphens, Greek letters."""

import re
import unicodedata
from collections.abc import Mapping, Sequence

from prorl_gym.environments.answers import tex

# ruff: noqa: RUF001 - look-alike signs are what this file is about
ELEMENTS = (
    "H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se Br Kr Rb Sr Y Zr Nb "
    "Mo Tc Ru Rh Pd Ag Cd In Sn Sb Te I Xe Cs Ba La Ce Pr Nd Pm Sm Eu Gd Tb Dy Ho Er Tm Yb Lu Hf Ta W Re Os Ir Pt Au "
    "Hg Tl Pb Bi Po At Rn Fr Ra Ac Th Pa U Np Pu Am Cm Bk Cf Es Fm Md No Lr Rf Db Sg Bh Hs Mt Ds Rg Cn Nh Fl Mc Lv Ts "
    "Og"
).split()
"""Symbols, in the order of their atomic numbers."""
ELEMENT = rf"(?:{'|'.join(sorted([*ELEMENTS, 'D', 'T'], key=len, reverse=True))})"
"""Pattern of a symbol; deuterium and tritium have their own."""

_FONTS = [*tex.FONTS, *tex.STYLED, *"mathbb mathring bbox ce unit si num boxed underbrace".split()]
_MACROS: Mapping[str, tuple[int, Sequence[int]]] = (
    dict.fromkeys(_FONTS, (1, (0,)))
    | dict.fromkeys(tex.INVISIBLE, (1, ()))
    | dict.fromkeys(("textcolor", "colorbox", "style", "class", "overset", "stackrel"), (2, (1,)))
    | {"fcolorbox": (3, (2,)), "SI": (2, (0, 1)), "qty": (2, (0, 1))}
)
"""Macros that change the look of something: how many arguments they take, and which of these are visible."""
_MACRO = re.compile(rf"\\({tex.alternation(_MACROS)})\*?\s*+(?:\[[^\[\]{{}}]*\]\s*+)?(?=\{{)")
_OPENING = re.compile(r"\s*+\{")
_UNDERBRACE_NOTE = re.compile(r"\s*+_\s*+(?=\{)")
_COMMAND_BEFORE = re.compile(r"\\[a-zA-Z]+$")
_SWITCH = re.compile(rf"\\(?:{tex.alternation(tex.SWITCHES)}|{tex.DELIMITER_SIZES})(?![a-zA-Z])\s*+")
_SPACE = re.compile(
    rf"\\[,;:>! ]|\\(?:{tex.alternation([*tex.WIDE_SPACES, *tex.SPACES, *tex.THIN_SPACES])})(?![a-zA-Z])"
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
    re.compile(pattern): sign
    for pattern, sign in {
        r"\\(?:long)?rightarrow|\\to(?![a-zA-Z])|→|⟶": "->",
        r"\\(?:times|cdot)(?![a-zA-Z])|[×·⋅∙]": "*",
        r"\^\s*+\{?\s*+\\circ\s*+\}?|\\degree(?![a-zA-Z])|º|℃": "°",
        r"\\pm(?![a-zA-Z])": "±",
        r"\\leq?(?![a-zA-Z])": "≤",
        r"\\geq?(?![a-zA-Z])": "≥",
        r"\\infty(?![a-zA-Z])": "∞",
        r"\\[dt]?frac\s*+\{([^{}]*)\}\s*+\{([^{}]*)\}": r"(\1)/(\2)",
        r"\\sqrt\s*+\{([^{}]*)\}|√\(?(\w+)\)?": r"sqrt(\1\2)",
        r"\\%": "%",
    }.items()
}
_BRACKETED_ATOM = re.compile(r"\(([\w.]+)\)(?=/)|(?<=/)\(([\w.]+)\)")
_POWER_OF_NUMBER = re.compile(r"(?<![A-Za-z\d)\]])(\d+(?:\.\d+)?)\^\{?([+-]?\d+)\}?")
_CHARGE = re.compile(r"(?<=[A-Za-z\d)\]])(?!(?<=\d)\d)\^?\{?(\d*)([+-])\}?(?=$|[\s,;.)*]|->)")
_RAISED_CHARGE = re.compile(
    r"(?<!\s)\s*+\^\s*+\{?\s*+(?:(?P<sign>[+-])(?P<number>\d)|(?P<number_first>\d)(?P<sign_behind>[+-]))\s*+\}?(?!\w)"
)
_RAISED_NUMBER = re.compile(r"(?<!\s)\s*+\^\s*+\{?\s*+(\d+)\s*+\}?(?![\d+\-])")
_ION_BEFORE = re.compile(r"[A-Za-z\d_{}()\[\]]{1,60}$")
_ION = re.compile(rf"(?=.*[A-Z])(?:{ELEMENT}|[\d()\[\]])+")
_BRACKETED_CHARGE = re.compile(r"(?<=[A-Za-z\d\]])\((\d*[+-])\)$")
_LONE_ION = re.compile(rf"({ELEMENT})\+(\d)")
_EXPLICIT_CHARGE = re.compile(r"(?<=[A-Za-z\d)\]}])\s*+\^\s*+\{?\s*+(\d*[+-])\s*+\}?")
_WORD_HYPHEN = re.compile(r"(?<=[A-Za-z])-(?=[A-Za-z])|(?<=[A-Za-z]{2})-(?=\d)|(?<=\d)-(?=[A-Za-z]{2})")
_KEPT_POWER, _KEPT_MINUS = "\ue000", "\ue001"
_OWN_NAME = re.compile(
    r"\|?\s*+(?:(?:\\Delta|\u0394)\s*+)?\\?[A-Za-z]+(?:\{\\?[A-Za-z]+\})?'?"
    r"(?:\s*+\^\s*+\{?\s*+\\?(?:circ|degree|theta|ominus|prime|\u00b0|\*)\s*+\}?)?(?:_(?:\w|\{[^{}=]{1,20}(?:\{[^{}=]{1,20}\})?[^{}=]{0,4}\}))?"
    r"\s*+(?:\([A-Za-z]\))?\s*+\|?"
)
_HBAR = re.compile(r"\\hbar(?![a-zA-Z])|[ħℏ]")
_LETTERS_SIDE_BY_SIDE = re.compile(
    r"(?:\\(?:text|math|operatorname|mbox|end)[a-z]*\*?|_)\s*+\{[^{}]*\}|\\begin\s*+\{\w+\}(?:\{[clr|]*\})?|\\[a-zA-Z]+|(?<![a-zA-Z])[a-zA-Z]{2,3}(?![a-zA-Z])"
)
_NO_SYMBOLS = frozenset(
    "sin cos tan cot sec csc log exp ln lg max min gcd lcm mod lim det deg arg and or for all if is the not no let of "
    "pi inf any yes so odd".split()
)


def strip_fonts(text: str) -> str:
    r"""Return a text without TeX's fonts, spacing and math delimiters: ``5\,\mathrm{kg}`` becomes ``5  kg``."""
    text = _MINUS.sub("-", _INVISIBLE.sub("", text))
    text = _SUPERSCRIPT.sub(lambda match: f"^{{{match[0].translate(tex.SUPERSCRIPT_TABLE)}}}", text)
    text = _SWITCH.sub(" ", _DELIMITERS.sub("", _SPACE.sub(" ", text)))
    while (macro := _MACRO.search(text)) is not None:
        before = text[: macro.start()]
        count, visible = _MACROS[macro[1]]
        arguments, end = _arguments(text, macro.end(), count)
        if macro[1] == "underbrace" and (note := _UNDERBRACE_NOTE.match(text, end)):
            end = _arguments(text, note.end(), 1)[1]
        # TeX sets k and Omega without a gap: one unit. Behind a command a space has to end its name.
        gap = " " if _COMMAND_BEFORE.search(before) else ""
        text = before + gap + " ".join(arguments[place] for place in visible if place < len(arguments)) + text[end:]
    return text.strip()


def raised_charges(text: str) -> list[str]:
    """Return the charges of a text that are raised, so that their numbers are no subscripts."""
    return _EXPLICIT_CHARGE.findall(_normalize_charges(strip_fonts(text)))


def comparison_key(text: str) -> str:
    """Return a key of a text in which spacing, hyphens between words, sub- and superscript do not count.

    Powers of numbers do (``10^5`` is not ``105``), numbers raised in a formula (``SO^2`` is not ``SO2``), and so do
    signs, charges and the case of letters.
    """
    text = _RAISED_NUMBER.sub(
        lambda found: f"{_KEPT_POWER}{found[1]}" if _is_behind_formula(found) else found[0],
        _normalize_charges(strip_fonts(text)),
    )
    for pattern, sign in _SIGNS.items():
        text = pattern.sub(sign, text)
    text = GREEK_COMMAND.sub(r" \1", text)
    text = _GREEK_LETTER.sub(lambda match: _GREEK_LETTERS[match[0]], text)
    text = unicodedata.normalize("NFKD", text.replace("°", "\ue002")).replace("\ue002", "°")
    text = "".join(character for character in text if not unicodedata.combining(character))
    text = _POWER_OF_NUMBER.sub(rf"\1{_KEPT_POWER}\2", text.replace("_", ""))
    text = _CHARGE.sub(lambda match: match[1] + match[2].replace("-", _KEPT_MINUS), text)
    text = re.sub(r"[\\^{}\"'`´‘’“”]", "", text)
    text = _BRACKETED_ATOM.sub(r"\1\2", _WORD_HYPHEN.sub("", re.sub(r"\s+", " ", text)))
    return text.strip().rstrip(".;:!").replace(" ", "")


def strip_own_name(answer: str) -> str:
    r"""Return an answer without the name that it gives to itself: ``|Z| = ...``, ``E_{\text{kin}} = ...``."""
    name, equals, rest = answer.partition("=")
    return rest if equals and "=" not in rest and _OWN_NAME.fullmatch(name.strip()) else answer


def separate_symbols(text: str) -> str:
    r"""Return a formula with its symbols apart: ``mg/k`` is a product, not milligrams over k."""
    return _LETTERS_SIDE_BY_SIDE.sub(
        lambda found: found[0] if not found[0].isalpha() or found[0] in _NO_SYMBOLS else " ".join(found[0]),
        _HBAR.sub(" h_{bar}", text),
    )


def _arguments(text: str, start: int, count: int) -> tuple[list[str], int]:
    """Return up to ``count`` groups in braces that begin at ``start``, and the end of the last one."""
    found: list[str] = []
    while len(found) < count and (opening := _OPENING.match(text, start)) is not None:
        length = tex.closing_brace(text[opening.end() - 1 :])
        closing = len(text) if length is None else opening.end() - 1 + length
        found.append(text[opening.end() : closing])
        start = min(closing + 1, len(text))
    return found, start


def _normalize_charges(text: str) -> str:
    """Return a text in which a charge is written as ``^{2-}``, and a single one without its number."""
    text = _RAISED_CHARGE.sub(_normalized_charge, _BRACKETED_CHARGE.sub(r"^{\1}", text))
    if (ion := _LONE_ION.fullmatch(text)) is not None:
        return f"{ion[1]}^{{{ion[2]}+}}"  # Fe-56 is a nuclide
    return text


def _normalized_charge(found: re.Match[str]) -> str:
    if not _is_behind_formula(found):
        return found[0]  # a power
    number = found["number"] or found["number_first"]
    return f"^{{{'' if number == '1' else number}{found['sign'] or found['sign_behind']}}}"


def _is_behind_formula(found: re.Match[str]) -> bool:
    before = _ION_BEFORE.search(found.string[max(0, found.start() - 60) : found.start()])
    return before is not None and _ION.fullmatch(re.sub(r"[_{}]", "", before[0])) is not None
