r"""One spelling for answers that people write in many ways: Unicode, LaTeX's synonyms, spacing, numerals."""

import re
import unicodedata
from fractions import Fraction

from prorl_gym.environments import tex
from prorl_gym.environments.math.expressions import FUNCTIONS
from prorl_gym.environments.math.splitting import whole_group

# ruff: noqa: RUF001 - look-alike signs are what this file is about

_FRACTIONS = {
    "½": (1, 2), "⅓": (1, 3), "⅔": (2, 3), "¼": (1, 4), "¾": (3, 4), "⅕": (1, 5), "⅖": (2, 5), "⅗": (3, 5),
    "⅘": (4, 5), "⅙": (1, 6), "⅚": (5, 6), "⅛": (1, 8), "⅜": (3, 8), "⅝": (5, 8), "⅞": (7, 8),
}  # fmt: skip

_GREEK = {"α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "θ": "theta", "λ": "lambda", "μ": "mu",
          "φ": "phi", "ω": "omega", "σ": "sigma", "ρ": "rho", "τ": "tau"}  # fmt: skip

_SYMBOLS = str.maketrans(
    {
        "−": "-", "–": "-", "‐": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "π": r"\pi ",
        "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ", "≠": r"\ne ", "∅": r"\emptyset ",
        "°": r"^\circ ", "±": r"\pm ", "∓": r"\mp ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∖": r"\setminus ",
        "≈": r"\approx ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "∣": "|", "⟨": r"\langle ", "⟩": r"\rangle ",
        "€": r"\eur ", "£": r"\gbp ", "’": "'", "“": "", "”": "", "…": r"\ldots ", "⌊": r"\lfloor ",
        "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "′": "'",
        "\u200b": "", "\u2060": "", "\ufeff": "",
        **{sign: rf"\{name} " for sign, name in _GREEK.items()},
        **{sign: rf"\frac{{{top}}}{{{bottom}}}" for sign, (top, bottom) in _FRACTIONS.items()},
    }
)  # fmt: skip

_SYNONYMS = {
    "dfrac": r"\frac", "tfrac": r"\frac", "cfrac": r"\frac", "dbinom": r"\binom", "tbinom": r"\binom",
    "geq": r"\ge", "geqslant": r"\ge", "leq": r"\le", "leqslant": r"\le", "neq": r"\ne", "lt": "<", "gt": ">",
    "ast": r"\cdot", "infin": r"\infty", "lvert": "|", "rvert": "|", "vert": "|", "varnothing": r"\emptyset",
    "R": r"\mathbb{R}", "reals": r"\mathbb{R}", "Z": r"\mathbb{Z}", "degree": r"^\circ", "lor": r"\or",
    "vee": r"\or", "land": r"\and", "wedge": r"\and", "dots": r"\ldots", "cdots": r"\ldots", "imath": "i",
    "lbrace": r"\{", "rbrace": r"\}", "lbrack": "[", "rbrack": "]", "dotsc": r"\ldots", "colon": ":",
    "smallsetminus": r"\setminus", "backslash": r"\setminus", "thickapprox": r"\approx", "doteq": r"\approx",
    "simeq": r"\approx", "textpi": r"\pi", "percent": "%", "textdegree": r"^\circ", "texteuro": r"\eur",
    "euro": r"\eur", "pounds": r"\gbp", "bar": r"\overline", "dollar": r"\usd", "textdollar": r"\usd",
}  # fmt: skip

_SUPERSCRIPT = re.compile(f"[{tex.SUPERSCRIPTS}]+")
_SUBSCRIPTS = "₀₁₂₃₄₅₆₇₈₉"
_SUBSCRIPT = re.compile(f"[{_SUBSCRIPTS}]+")
_LOWERED = str.maketrans(_SUBSCRIPTS, "0123456789")
_ROOT = re.compile(r"([√∛])\s*(?:\(([^()]*)\)|(\d+(?:\.\d+)?|\w))")
_SCIENTIFIC = re.compile(r"(?<![\w.\\])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?!\w)")
_FONTS = re.compile(rf"\\(?:{tex.any_of([*tex.FONTS, 'rm'])})\*?\s*\{{")
_LOOKS = re.compile(
    r"\\(?:textcolor|color|colorbox|fcolorbox\s*\{[^{}]*\})\s*(?:\[[^\[\]]*\])?\s*\{[^{}]*\}"
    rf"|\\(?:{tex.any_of([*tex.STYLED, *tex.SWITCHES])})(?![a-zA-Z])"
    rf"|\\(?:{tex.any_of(tex.UNSEEN)})\*?\s*\{{[^{{}}]*\}}"
)
"""Macros that change how something looks; what they apply to stays."""
_COMMAND = re.compile(r"\\([a-zA-Z]+)")
_SPACING = re.compile(rf"\\!|\\(?:{tex.DELIMITER_SIZES})(?![a-zA-Z])\.?")
_SPACE = re.compile(rf"(?<!\\)\\[, ]|\\(?:{tex.any_of(tex.SPACES)})(?![a-zA-Z])|\\\\$")
_WIDE = re.compile(rf"\\(?:{tex.any_of(tex.WIDE_SPACES)})(?![a-zA-Z])")
_THIN = re.compile(
    rf"(?<!\\)\\[:;>]|\\(?:{tex.any_of(tex.THIN_SPACES)})(?![a-zA-Z])|~|\\hspace\*?\s*\{{[^{{}}]*\}}|{tex.LENGTH}"
)
"""Spaces of a width that may also group digits."""
_THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3})((?:(?:\{,\}|\\,\s*|\\ |\\!|,\\!\s*)\d{3})+)(?!\d)")
_DECIMALS = re.compile(r"(?<=\d)\.(?:\d{3}\\,\s*)+\d{1,3}(?!\d)")
_SPACED_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_CONSTANT = re.compile(r"(?<=\+)\s*\\text\s*\{\s*(?:C|c|const(?:ant)?\.?)\s*\}|(?<=\+)\s*const(?:ant)?\b\.?")
_ORDINAL = re.compile(
    r"(?:\bthe\s+)?(?<![\w.,/^}])(\d+)\s*\^?\s*(?P<open>(?:\{\s*)?(?:\\text\s*\{)?)\s*(st|nd|rd|th)(?![a-zA-Z])"
    r"(?P<close>(?:\s*\}){0,2})"
)
_CLOSED_THOUSANDS = re.compile(r"[+-]?(?:\\(?:usd|eur|gbp)\s*)?\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?(?=$|[^\d,])")
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_FUNCTION = re.compile(rf"(?<![a-zA-Z\\])({'|'.join(sorted(FUNCTIONS - {'lg'}))}|gcd|lcm)(?![a-zA-Z])")
_FUNCTION_AS_TEXT = re.compile(
    rf"\\text\{{\s*({'|'.join(sorted(FUNCTIONS))}|gcd|lcm|(?:max|min)(?=\s*\}}\s*[({{\\]))\s*\}}"
)
_UNIT_VECTOR = re.compile(
    r"\\(?:mathbf|hat|vec|boldsymbol|bm|overrightarrow)\s*\{?\s*(?:\\(?:mathbf|boldsymbol|bm)\s*\{\s*)?\\?([ijk])(?:math)?(?![a-z])\s*\}{0,2}"
)
_EMPTY = re.compile(r"(?:(?<![\\^_}a-zA-Z])|(?<=\\cdot)|(?<=\\times)|(?<=\\pi))\{\s*\}(?!\s*[_^](?!\s*\{?\s*\\circ))")
"""A pair of braces with nothing in it, unless it is an argument or carries a sub- or superscript."""
_MARKDOWN = re.compile(r"(\*\*|`)((?:(?!\1).)+)\1")
_COMBINATIONS = re.compile(r"\\text\s*\{\s*C\s*\}\s*_\s*\{?\s*(\w+)\s*\}?\s*\^\s*\{?\s*(\w+)\s*\}?")
_CHOSEN = re.compile(
    r"(?:\\text\s*\{\s*|(?<![a-zA-Z\\]))(?:nCr|binom(?:ial)?|comb)\s*\}?\s*\(\s*(\w+)\s*,\s*(\w+)\s*\)"
    r"|(?<![\w.^_{])(\d+)C(\d+)(?![\w_.])|(?<![\w.])(\w+)\s*(?:\\text\s*\{)?\s*\bchoose\b\s*\}?\s*(\w+)(?![\w.])"
)
_SELECTION = re.compile(r"\\text\s*\{\s*([CP])\s*\}\s*(?=\()")
_NAMED = re.compile(r"(?<![a-zA-Z\\])(pi|infinity|inf)(?![a-zA-Z])")
_CONNECTIVE = re.compile(r"\\text\s*\{\s*,?\s*(and|or)\s*\}|(?<=[\s\d)}\]$,])(and|or)(?=[\s\d({\[$\\-])")
_REPEATING = re.compile(
    r"(\d*)\.(\d*)\\overline\s*\{?(\d+)\}?|(\d+)\.(\d*)\((\d+)\)|(\d*)\.(\d*)\\dot\s*\{?(\d)\}?(?!\d|\\dot)"
)
_ELLIPSIS = re.compile(r"(\d*)\.(\d+?)(\d+?)(\3{2,})(?:\\ldots|\.\.\.)|(\d*)\.()(\d+?)(\7{2,})(?:\\ldots|\.\.\.)")
_MIXED = re.compile(r"(?<![\d.^_{}\w])(\d+)\s*\\frac\s*(?:\{(\d+)\}\s*\{(\d+)\}|(\d)(\d))")
_MINUS = re.compile(
    r"(?:^|(?<=[=,(:]))\s*(?:\\text\s*\{\s*(?:minus|negative)\s*\}|\b(?:minus|negative)\b)\s*(?=[\d.]|\\(?:frac|sqrt|pi)(?![a-z]))"
)
_MIXED_PLAIN = re.compile(r"(?<![\d./^_])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d/])")


def plain(answer: str) -> str:
    """Return the answer in LaTeX's plainest spelling, without dollar signs, closing full stop or outer spaces."""
    text = _ROOT.sub(lambda match: rf"\sqrt{'[3]' if match[1] == '∛' else ''}{{{match[2] or match[3]}}}", answer)
    text = _SUPERSCRIPT.sub(lambda match: f"^{{{match[0].translate(tex.RAISED)}}}", text)
    text = _SUBSCRIPT.sub(lambda match: f"_{{{match[0].translate(_LOWERED)}}}", text).translate(_SYMBOLS)
    text = unicodedata.normalize("NFKC", text)
    text = re.sub(r"^\s*~(?=\s*\$?[\d\\])", r"\\approx ", re.sub(r"\\\$", r"\\usd ", text))
    text = re.sub(r"\$(?=\s*\d[\d.,]*$)", r"\\usd ", text) if text.count("$") == 1 else text
    text = re.sub(r"(?<!\\)\\[()\[\]]", "", text.replace("$", ""))
    if match := _MARKDOWN.fullmatch(text.strip()):
        text = match[2]
    if len(set(_UNIT_VECTOR.findall(text))) > 1:
        text = _UNIT_VECTOR.sub(r"\\e\1 ", text)
    text = _EMPTY.sub(" ", text)
    text = _LOOKS.sub(" ", _THIN.sub(r"\\,", text))
    text = _THOUSANDS.sub(lambda match: match[1] + re.sub(r"\D", "", match[2]), text)
    text = _DECIMALS.sub(lambda match: re.sub(r"[^\d.]", "", match[0]), text)
    text = _COMMAND.sub(lambda match: f"{_SYNONYMS[match[1]]} " if match[1] in _SYNONYMS else match[0], text)
    text = _FONTS.sub(r"\\text{", _SPACE.sub(" ", _SPACING.sub("", text)))
    text = re.sub(r"\\text\{\s*([eid]|[\d.,]+)\s*\}", r"\1", _CONSTANT.sub(" C", text))
    text = re.sub(r"\\text\s*\{\s*\}", " ", text)
    text = _COMBINATIONS.sub(r"\\binom{\1}{\2}", _ORDINAL.sub(_ordinal, _SELECTION.sub(r"\1", text)))
    text = _CHOSEN.sub(_binomial, text)
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?", r"\\degree ", text).replace("\\%", "%").replace("**", "^")
    text = text.replace("<=", r"\le ").replace(">=", r"\ge ").replace("!=", r"\ne ").replace("*", r"\cdot ")
    text = re.sub(r"\{([:=<>])\}", r"\1", text)
    text = re.sub(r"\.{3,}", r"\\ldots ", text)  # what breaks off does not end with a full stop
    text = _SCIENTIFIC.sub(r"\1\\times 10^{\2}", re.sub(r"\s+", " ", text))
    text = _unwrapped(text.strip().rstrip(".,;").rstrip())
    return text.replace(" ", "") if _SPACED_THOUSANDS.fullmatch(text) else _WIDE.sub(" ", text).strip()


def _binomial(match: re.Match[str]) -> str:
    of, count = (group for group in match.groups() if group is not None)
    return rf"\binom{{{of}}}{{{count}}}"


def _ordinal(match: re.Match[str]) -> str:
    """Return the number of ``21st``; a wrong ending or half of its braces stay."""
    number = match[1]
    ending = "th" if number[-2:-1] == "1" else {"1": "st", "2": "nd", "3": "rd"}.get(number[-1], "th")
    outer = match["close"].count("}") - match["open"].count("{")
    return number + "}" * outer if outer >= 0 and match[3] == ending else match[0]


def _unwrapped(text: str) -> str:
    r"""Take off ``\\text{...}`` or braces around all of it."""
    while match := re.fullmatch(r"(?:\\text\s*)?(\{.*\})", text, re.DOTALL):
        if (content := whole_group(match[1])) is None:
            break
        text = content.strip().rstrip(".").rstrip()
    return text


def formula(text: str) -> str:
    """Return a plain answer with numerals and function names as an expression spells them."""
    text = _CONNECTIVE.sub(lambda match: rf" \{match[1] or match[2]} ", text)
    text = _NAMED.sub(lambda match: r"\pi " if match[1] == "pi" else r"\infty ", text)
    text = re.sub(r"^(?:\\text\s*\{)?\s*(?:approximately|approx\.?|about|roughly)\s*\}?(?=[\s\d])", r"\\approx ", text)
    text = _MINUS.sub("-", text)
    text = _FUNCTION_AS_TEXT.sub(r"\\\1 ", text)
    text = _FUNCTION.sub(r"\\\1 ", text)
    text = _REPEATING.sub(_repeating, _ELLIPSIS.sub(_ellipsis, text))
    return _MIXED_PLAIN.sub(_mixed, _MIXED.sub(_mixed, text)).strip()


def number_with_commas(text: str) -> str | None:
    """Return ``1,234.5 m`` without its comma, or ``None`` when it is not a single number with thousands marked."""
    return text.replace(",", "") if _CLOSED_THOUSANDS.match(text) and text.count(",") == _marks(text) else None


def _marks(text: str) -> int:
    match = _CLOSED_THOUSANDS.match(text)
    return match[0].count(",") if match else 0


def _repeating(match: re.Match[str]) -> str:
    whole, fixed, period = next(
        (match[at], match[at + 1], match[at + 2]) for at in (1, 4, 7) if match[at + 2] is not None
    )
    return _periodic(whole, fixed, period)


def _ellipsis(match: re.Match[str]) -> str:
    at = 1 if match[3] is not None else 5
    return _periodic(match[at], match[at + 1], match[at + 2])


def _periodic(whole: str, fixed: str, period: str) -> str:
    shift = 10 ** len(fixed)
    number = Fraction(int(f"{whole or 0}{fixed}"), shift) + Fraction(int(period), (10 ** len(period) - 1) * shift)
    return rf"\frac{{{number.numerator}}}{{{number.denominator}}}"


def _mixed(match: re.Match[str]) -> str:
    whole, top, bottom = (group for group in match.groups() if group is not None)
    if int(top) >= int(bottom):
        return match[0]
    return rf"({whole}+\frac{{{top}}}{{{bottom}}})"


def key(answer: str) -> str:
    """Return what is left of a plain answer when spacing does not count: equal keys are equal answers."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", untexted(answer)).rstrip(".")  # "4 2" is not 42


def untexted(text: str) -> str:
    r"""Return the text with the content of ``\text{...}`` in place of it."""
    return _TEXT.sub(r"\1", text)


def means_something(answer: str) -> bool:
    """Whether there is anything in a plain answer that could be compared."""
    return bool(re.search(r"[^\W_]|\\\{\s*\\\}|\\(?:emptyset|infty)", untexted(answer)))
