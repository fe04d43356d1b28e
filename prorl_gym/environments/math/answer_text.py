"""Normalizes the text of an answer: one LaTeX spelling, parts between separators, brackets, labels and names."""

import re
import unicodedata
from collections.abc import Collection
from fractions import Fraction

from prorl_gym.environments.answers import tex
from prorl_gym.environments.answers.number_words import ordinal_suffix
from prorl_gym.environments.math.expressions import FUNCTIONS, GREEK, PRINTED_FUNCTIONS

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
        "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "′": "'", "。": ".", "、": ",", "或": r"\or ",
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
_SUBSCRIPT_TABLE = str.maketrans(_SUBSCRIPTS, "0123456789")
_ROOT = re.compile(r"([√∛])\s*+(?:\(([^()]*)\)|(\d+(?:\.\d+)?|\w))")
_SCIENTIFIC = re.compile(r"(?<![\w.\\])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?!\w)")
_FONTS = re.compile(rf"\\(?:{tex.alternation([*tex.FONTS, 'rm'])})\*?\s*+\{{")
_STYLES = re.compile(
    r"\\(?:textcolor|color|colorbox|fcolorbox\s*+\{[^{}]*\})\s*+(?:\[[^\[\]]*\])?\s*+\{[^{}]*\}"
    rf"|\\(?:{tex.alternation([*tex.STYLED, *tex.SWITCHES])})(?![a-zA-Z])"
    rf"|\\(?:{tex.alternation(tex.INVISIBLE)})\*?\s*+\{{[^{{}}]*\}}"
)
"""Macros that change only the look of their argument, which is kept."""
_COMMAND = re.compile(r"\\([a-zA-Z]+)")
_SPACING = re.compile(rf"\\!|\\(?:{tex.DELIMITER_SIZES})(?![a-zA-Z])\.?")
_SPACE = re.compile(rf"(?<!\\)\\[, ]|\\(?:{tex.alternation(tex.SPACES)})(?![a-zA-Z])|\\\\$")
_WIDE = re.compile(rf"\\(?:{tex.alternation(tex.WIDE_SPACES)})(?![a-zA-Z])")
_THIN = re.compile(
    rf"(?<!\\)\\[:;>]|\\(?:{tex.alternation(tex.THIN_SPACES)})(?![a-zA-Z])|~|\\hspace\*?\s*+\{{[^{{}}]*\}}|{tex.LENGTH}"
)
"""Spaces of a width that may also group digits."""
_THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3})((?:(?:\{,\}|\\,\s*+|\\ |\\!|,\\!\s*+)\d{3})+)(?!\d)")
_DECIMALS = re.compile(r"(?<=\d)\.(?:\d{3}\\,\s*+)+\d{1,3}(?!\d)")
_SPACED_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_CONSTANT = re.compile(r"(?<=\+)\s*+\\text\s*+\{\s*+(?:C|c|const(?:ant)?\.?)\s*+\}|(?<=\+)\s*+const(?:ant)?\b\.?")
_ORDINAL = re.compile(
    r"(?:\bthe\s+)?(?<![\w.,/^}])(\d+)\s*+\^?\s*+(?P<open>(?:\{\s*+)?(?:\\text\s*+\{)?)\s*+(st|nd|rd|th)(?![a-zA-Z])"
    r"(?P<close>(?:\s*+\}){0,2})"
)
_CLOSED_THOUSANDS = re.compile(r"[+-]?(?:\\(?:usd|eur|gbp)\s*+)?\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?(?=$|[^\d,])")
_TEXT = re.compile(r"\\text\s*+\{([^{}]*)\}")
_FUNCTION = re.compile(rf"(?<![a-zA-Z\\])({'|'.join(sorted(FUNCTIONS - {'lg'}))}|gcd|lcm)(?![a-zA-Z])")
_FUNCTION_AS_TEXT = re.compile(
    rf"\\text\{{\s*+({'|'.join(sorted(FUNCTIONS))}|gcd|lcm|(?:max|min)(?=\s*+\}}\s*+[({{\\]))\s*+\}}"
)
_UNIT_VECTOR = re.compile(
    r"\\(?:mathbf|hat|vec|boldsymbol|bm|overrightarrow)\s*+\{?\s*+(?:\\(?:mathbf|boldsymbol|bm)\s*+\{\s*+)?\\?([ijk])(?:math)?(?![a-z])\s*+\}{0,2}"
)
_EMPTY = re.compile(
    r"(?:(?<![\\^_}a-zA-Z])|(?<=\\cdot)|(?<=\\times)|(?<=\\pi))\{\s*+\}(?!\s*+[_^](?!\s*+\{?\s*+\\circ))"
)
"""A pair of braces with nothing in it, unless it is an argument or carries a sub- or superscript."""
_CHINESE_UNITS = {
    "平方厘米": "cm^2", "平方分米": "dm^2", "平方米": "m^2", "平方千米": "km^2", "立方厘米": "cm^3", "立方米": "m^3",
    "厘米": "cm", "分米": "dm", "毫米": "mm", "千米": "km", "米": "m", "千克": "kg", "克": "g", "吨": "tonne",
    "升": "l", "毫升": "ml", "小时": "h", "分钟": "minutes", "秒": "s", "天": "days", "年": "years", "度": "degrees",
    "元": "yuan", "米/秒": "m/s", "千米/小时": "km/h", "千米/时": "km/h",
    **dict.fromkeys("个 人 种 次 只 条 张 本 块 件 名 位 棵 支 组 对 面 页 岁".split(), "items"),
}  # fmt: skip
_CHINESE = re.compile(rf"^答案(?:是|为|:)+ ?|(?<=[\d)}}]) ?({tex.alternation(_CHINESE_UNITS)})(?=[.,]?$)")
_MARKDOWN = re.compile(r"(\*\*|`)((?:(?!\1).)+)\1")
_COMBINATIONS = re.compile(r"\\text\s*+\{\s*+C\s*+\}\s*+_\s*+\{?\s*+(\w+)\s*+\}?\s*+\^\s*+\{?\s*+(\w+)\s*+\}?")
_CHOOSE = re.compile(
    r"(?:\\text\s*+\{\s*+|(?<![a-zA-Z\\]))(?:nCr|binom(?:ial)?|comb)\s*+\}?\s*+\(\s*+(\w+)\s*+,\s*+(\w+)\s*+\)"
    r"|(?<![\w.^_{])(\d+)C(\d+)(?![\w_.])|(?<![\w.])(\w+)\s*+(?:\\text\s*+\{)?\s*+\bchoose\b\s*+\}?\s*+(\w+)(?![\w.])"
)
_SELECTION = re.compile(r"\\text\s*+\{\s*+([CP])\s*+\}\s*+(?=\()")
_SPELLED_CONSTANT = re.compile(r"(?<![a-zA-Z\\])(pi|infinity|inf|oo)(?![a-zA-Z])")
_CONNECTIVE = re.compile(r"\\text\s*+\{\s*+,?\s*+(and|or)\s*+\}|(?<=[\s\d)}\]$,])(and|or)(?=[\s\d({\[$\\-])")
_SIGN_AFTER_SIGN = re.compile(r"(?<=[\w)}\]!|])( ?)([-+])(?: ([-+]) ?|([-+])(?=[\d.]))")
"""A second sign behind a gap or before a number; ``1+-\\sqrt2`` may mean two values."""
_UNIT_QUOTIENT = re.compile(r"\\frac ?\{ ?\\text ?\{([^{}]*)\} ?\} ?\{ ?\\text ?\{([^{}]*)\} ?(\^ ?\{?\d\}?)? ?\}")
_REPEATING = re.compile(
    r"(?<!\d)(\d*+)\.(\d*+)\\overline\s*+\{?(\d++)\}?|(?<!\d)(\d++)\.(\d*+)\((\d++)\)|(?<!\d)(\d*+)\.(\d*+)\\dot\s*+\{?(\d)\}?(?!\d|\\dot)"
)
_MAX_PERIOD = 60
_ELLIPSIS = re.compile(r"(?<!\d)(\d*+)\.(\d++)(?:\\ldots|\.\.\.)")
_MIXED = re.compile(r"(?<![\d.^_{}\w])(\d+)\s*+\\frac\s*+(?:\{(\d+)\}\s*+\{(\d+)\}|(\d)(\d))")
_MINUS = re.compile(
    r"(?:^|(?<=[=,(:]))\s*+(?:\\text\s*+\{\s*+(?:minus|negative)\s*+\}|\b(?:minus|negative)\b)\s*+(?=[\d.]|\\(?:frac|sqrt|pi)(?![a-z]))"
)
_EVERYWHERE = re.compile(
    r"(?<!\s)\s*+\\text ?\{ ?,? ?for (?:all|any|every|each)(?: real)?(?: numbers?| values? of)?"
    r"(?: ?\} ?[a-z]| [a-z] ?\})$"
)
"""A clause behind a formula that restricts nothing: ``for all x``."""
_DERIVATIVE = re.compile(r"^\\frac ?\{ ?d([a-z]) ?\} ?\{ ?dx ?\} ?(?==)")
_EXCEPT = re.compile(
    r"^(?:\\text ?\{ ?)?(?:all|any|every) real(?: numbers?)?(?: [a-z])?,? except(?: for)? ?\}? ?(?:[a-z] ?= ?)?"
    r"([^a-z{}=]*[\d)])$"
)
_MAPPING = re.compile(r"^([a-zA-Z]) ?: ?([a-zA-Z]) ?\\(?:mapsto|to)(?![a-zA-Z])")
_OPTION = re.compile(r"^(?:\\text ?\{ ?)?(?i:option|choice|statement) ?\}? ?\(?([A-H])\)?\.? ?\}?$")
_MIXED_PLAIN = re.compile(r"(?<![\d./^_])(\d+)\s+(\d+)\s*+/\s*+(\d+)(?![\d/])")
_DISPLAY = re.compile(r"\\(?:begin|end) ?\{ ?(?:equation|displaymath|math)\*? ?\}")
_ROOT_OF = re.compile(r"\\root ?(?:\{(\d+)\}(?= ?\{)|(\d+) ?\\of(?![a-zA-Z]))")
_PRINTED_FUNCTION = re.compile(rf"(?<![a-zA-Z\\])({tex.alternation(PRINTED_FUNCTIONS)})(?=\()")
_PRINTED_LOGIC = re.compile(r"(?<=\)) ([&|]) (?=\()")
_PRINTED_SETS = {
    "Interval": "[{}, {}]", "Interval.open": "({}, {})", "Interval.Lopen": "({}, {}]", "Interval.Ropen": "[{}, {})",
    "Eq": "{} = {}", "Ne": r"{} \ne {}", "Matrix": "{}",
}  # fmt: skip
"""How sympy prints sets, relations and matrices, and how people write these."""
_PIECE = re.compile(r"\\[a-zA-Z]+|\\.|.", re.DOTALL)
_OPENING = frozenset({"(", "[", "{", "\\{", "\\langle", "\\lfloor", "\\lceil", "\\begin"})
_CLOSING = frozenset({")", "]", "}", "\\}", "\\rangle", "\\rfloor", "\\rceil", "\\end"})
_ENDS = {"(": (")", "]"), "[": (")", "]"), "\\{": ("\\}",), "\\langle": ("\\rangle",)}
_LABEL_SUBSCRIPT = re.compile(r"_(?:\{[^{}]*\}|\\[a-zA-Z]+|\d+|[a-zA-Z])")
_FUNCTION_OF = re.compile(
    rf"(?:[a-zA-Z]|\\(?:det|{tex.alternation(GREEK)}))'*\s*+(?:\^\s*+\{{?\s*+-1\s*+\}}?)?\s*+\([^()]*\)"
)
_TRIGONOMETRIC = re.compile(
    r"\\(?:sin|cos|tan|angle)\s*+\d?(?:\{[^{}]*\}|\(?\s*+(?:\\angle\s*+)?(?:[A-Z]+|\\[a-z]+)\s*+\)?)"
)
_SEGMENT = re.compile(
    r"\|\s*+(?:[A-Z]'?(?:\s*+[A-Z]'?)?|\\(?:overline|overrightarrow|vec)\s*+(?:\{\s*+[a-zA-Z]{1,2}\s*+\}|[a-zA-Z]{1,2}))\s*+\|"
    r"|\[\s*+[A-Z]{3,}\s*+\]"
)
_GEOMETRIC_MARK = re.compile(r"\\(?:overline|vec|angle|triangle|overrightarrow)(?![a-zA-Z])")
_LABEL = re.compile(r"(?!-)[a-zA-Z\s\\+\-*/(){}',.]*")
_LETTER = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]|\\(?:" + "|".join(sorted(GREEK)) + r")(?![a-zA-Z])")
_NO_LABEL = re.compile(
    r"\\(?:pi|infty|sqrt|ln|log|lg|exp|sin|cos|tan|sum|int|lim|cup|cap|pm|begin|usd)(?![a-zA-Z])|^[ei]$"
)


def normalize_latex(answer: str) -> str:
    """Return the answer in LaTeX's plainest spelling, without dollar signs, closing full stop or outer spaces."""
    text = _ROOT_OF.sub(r"\\sqrt[\1\2] ", _DISPLAY.sub(" ", answer))
    text = _ROOT.sub(lambda match: rf"\sqrt{'[3]' if match[1] == '∛' else ''}{{{match[2] or match[3]}}}", text)
    text = _SUPERSCRIPT.sub(lambda match: f"^{{{match[0].translate(tex.SUPERSCRIPT_TABLE)}}}", text)
    text = _SUBSCRIPT.sub(lambda match: f"_{{{match[0].translate(_SUBSCRIPT_TABLE)}}}", text).translate(_SYMBOLS)
    text = unicodedata.normalize("NFKC", text)
    text = re.sub(r"^\s*+~(?=\s*+\$?[\d\\])", r"\\approx ", re.sub(r"\\\$", r"\\usd ", text))
    text = re.sub(r"\$(?=\s*+\d[\d.,]*$)", r"\\usd ", text) if text.count("$") == 1 else text
    text = re.sub(r"(?<!\\)\\[()\[\]]", "", text.replace("$", ""))
    text = _CHINESE.sub(lambda match: rf"\text{{ {_CHINESE_UNITS[match[1]]}}}" if match[1] else "", text.strip())
    if match := _MARKDOWN.fullmatch(text.strip()):
        text = match[2]
    if len(set(_UNIT_VECTOR.findall(text))) > 1:
        text = _UNIT_VECTOR.sub(r"\\e\1 ", text)
    text = _EMPTY.sub(" ", text)
    text = _STYLES.sub(" ", _THIN.sub(r"\\,", text))
    text = _THOUSANDS.sub(lambda match: match[1] + re.sub(r"\D", "", match[2]), text)
    text = _DECIMALS.sub(lambda match: re.sub(r"[^\d.]", "", match[0]), text)
    text = _COMMAND.sub(lambda match: f"{_SYNONYMS[match[1]]} " if match[1] in _SYNONYMS else match[0], text)
    text = _FONTS.sub(r"\\text{", _SPACE.sub(" ", _SPACING.sub("", text)))
    text = re.sub(r"\\text\{\s*+([eijd]|[\d.,]+|\\usd )\s*+\}", r"\1", _CONSTANT.sub(" C", text))
    text = re.sub(r"\\text\s*+\{\s*+\}", " ", text)
    text = _COMBINATIONS.sub(r"\\binom{\1}{\2}", _ORDINAL.sub(_ordinal_number, _SELECTION.sub(r"\1", text)))
    text = _CHOOSE.sub(lambda match: r"\binom{{{}}}{{{}}}".format(*filter(None, match.groups())), text)
    text = re.sub(r"\^ ?(?:\{ ?\\circ ?\}|\\circ)", r"\\degree ", text).replace("\\%", "%").replace("**", "^")
    text = re.sub(r"(?<![\d)}])!=", r"\\ne ", text.replace("<=", r"\le ").replace(">=", r"\ge "))  # 5!=120
    text = re.sub(r"\{ ?(\d+) ?\\over ?(\d+) ?\}", r"\\frac{\1}{\2}", text.replace("*", r"\cdot "))
    text = _UNIT_QUOTIENT.sub(r"\\text{ \1/\2\3}", re.sub(r"(?<![\^_])(?<![\^_] )\{([-+:=<>])\}", r"\1", text))
    text = text if "mod" in text else text.replace("\\equiv", "=")  # an identity
    text = re.sub(r"\.{3,}", r"\\ldots ", text)  # before a full stop at the end is removed
    text = _SCIENTIFIC.sub(r"\1\\times 10^{\2}", re.sub(r"\s+", " ", text))
    text = _without_wrapping(text.strip().rstrip(".,;").rstrip())
    return text.replace(" ", "") if _SPACED_THOUSANDS.fullmatch(text) else _WIDE.sub(" ", text).strip()


def normalize_formula(text: str) -> str:
    """Return a plain answer with numerals and function names as an expression spells them."""
    text = _EXCEPT.sub(r"\\mathbb{R}\\setminus\\{\1\\}", _DERIVATIVE.sub(r"\1'", _printed_set(text)))
    text = _MAPPING.sub(r"\1(\2)=", _EVERYWHERE.sub("", text))
    if re.search(r"[<>=]|\\[lgn]e ", text):
        text = _PRINTED_LOGIC.sub(lambda match: rf" \{'and' if match[1] == '&' else 'or'} ", text)
    text = _CONNECTIVE.sub(lambda match: rf" \{match[1] or match[2]} ", text)
    text = _SPELLED_CONSTANT.sub(lambda match: r"\pi " if match[1] == "pi" else r"\infty ", text)
    text = re.sub(
        r"^(?:\\text\s*+\{)?\s*+(?:approximately|approx\.?|about|roughly)\s*+\}?(?=[\s\d])", r"\\approx ", text
    )
    text = _SIGN_AFTER_SIGN.sub(lambda match: "+" if match[2] == (match[3] or match[4]) else "-", _MINUS.sub("-", text))
    text = _FUNCTION_AS_TEXT.sub(r"\\\1 ", _OPTION.sub(r"\1", text))
    text = _PRINTED_FUNCTION.sub(r"\\\1 ", _FUNCTION.sub(r"\\\1 ", text))
    text = _REPEATING.sub(_repeating_decimal, _ELLIPSIS.sub(_decimal_with_period, text))
    return _MIXED_PLAIN.sub(_mixed_number, _MIXED.sub(_mixed_number, text)).strip()


def parse_comma_number(text: str) -> str | None:
    """Return ``1,234.5 m`` without its comma, or ``None`` when it is not a single number with thousands marked."""
    match = _CLOSED_THOUSANDS.match(text)
    return text.replace(",", "") if match is not None and text.count(",") == match[0].count(",") else None


def comparison_key(answer: str) -> str:
    """Return a key of a plain answer in which spacing does not count: equal keys are equal answers."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", strip_text_macros(answer)).rstrip(".")  # "4 2" is not 42


def strip_text_macros(text: str) -> str:
    return _TEXT.sub(r"\1", text)


def has_content(answer: str) -> bool:
    """Whether there is anything in a plain answer that could be compared."""
    return bool(re.search(r"[^\W_]|\\\{\s*+\\\}|\\(?:emptyset|infty)", strip_text_macros(answer)))


def split_top_level(text: str, separators: Collection[str]) -> list[tuple[str, str]]:
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


def split_brackets(text: str) -> tuple[str, str, str] | None:
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


def is_label(text: str) -> bool:
    """Whether the left side of an equation only names the value: ``x``, ``f(2)``, ``m+n``, ``Area``.

    Not ``-x``, ``2x`` or ``x^2``: such an equation is one to be solved.
    """
    if re.fullmatch(r"\(\s*+[a-zA-Z](?:_\w)?(?:\s*+,\s*+[a-zA-Z](?:_\w)?)+\s*+\)", text):
        return True
    if len(parts := split_top_level(text, (":",))) > 1:
        return all(is_label(part) for _, part in parts)
    rest = _FUNCTION_OF.sub("f", _LABEL_SUBSCRIPT.sub("", text))
    rest = _GEOMETRIC_MARK.sub("", _SEGMENT.sub("f", _TRIGONOMETRIC.sub("f", rest)))
    rest = re.sub(r"\\text\s*+\{[\w\s]*\}", "f", rest)
    if _NO_LABEL.search(rest.strip()):
        return False
    return _LABEL.fullmatch(rest) is not None and _LETTER.search(rest) is not None


def is_name(text: str) -> bool:
    """Whether a text is one variable, perhaps with a subscript."""
    text = text.strip()
    return (
        text not in ("e", "i") and re.fullmatch(r"(?:[a-zA-Z]|\\(?!pi|infty)[a-z]+)(?:_\{?\w+\}?)?'*", text) is not None
    )


def is_variable(text: str) -> bool:
    """Whether a text is a variable, or the value of a function at one: ``f(x)``."""
    return is_name(text) or re.fullmatch(r"[a-zA-Z]\([a-zA-Z]\)", text) is not None


def normalize_name(text: str) -> str:
    r"""Return a name in one spelling: ``|AB|``, ``\\overline{AB}`` and ``AB`` are one, ``a_1`` and ``a_{1}`` too."""
    text = re.sub(r"\\(?:vec|overrightarrow) ?\{? ?([a-zA-Z])(?![a-zA-Z]) ?\}?", r"\1", text)
    text = text.replace("\\vec", "\\overrightarrow")  # of two letters, whose order is a direction
    text = re.sub(r"\\(?:overline|mathrm|text)\s*+\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"(?<![a-zA-Z])m\s*+(?=\\angle)|\\angle(?![a-zA-Z])(?=\s*+\\angle)", "", text)
    text = re.sub(r"\|([^|()]*)\||\\det ?[({]? ?([A-Z]) ?[)}]?", r"\1\2", text)
    text = re.sub(r"_\{\s*+(\w|\\[a-zA-Z]+)\s*+\}", r"_\1", text)
    return "".join(text.split())


def _printed_set(text: str) -> str:
    """Return what sympy printed (``Union({0}, Interval.open(1, 2))``) as people write it, and all else as it is."""
    kind, opening, content = text.partition("(")
    if kind not in (*_PRINTED_SETS, "Union") or split_brackets(opening + content) is None:
        return text
    parts = [_printed_set(part) for _, part in split_top_level(content[:-1], ",")]
    if kind == "Union":
        return r" \cup ".join(rf"\{part[:-1]}\}}" if part.startswith("{") else part for part in parts)
    return _PRINTED_SETS[kind].format(*parts) if _PRINTED_SETS[kind].count("{}") == len(parts) else text


def _ordinal_number(match: re.Match[str]) -> str:
    """Return the number of ``21st``; text with a wrong suffix or unmatched braces stays as it is."""
    outer = match["close"].count("}") - match["open"].count("{")
    return match[1] + "}" * outer if outer >= 0 and match[3] == ordinal_suffix(int(match[1])) else match[0]


def _without_wrapping(text: str) -> str:
    r"""Return a text without ``\\text{...}`` or braces around all of it."""
    while match := re.fullmatch(r"(?:\\text\s*+)?(\{.*\})", text, re.DOTALL):
        if tex.closing_brace(match[1]) != len(match[1]) - 1:
            break
        text = match[1][1:-1].strip().rstrip(".").rstrip()
    return text


def _decimal_with_period(match: re.Match[str]) -> str:
    """Return ``0.1666...`` as a fraction; its end must be one period at least three times."""
    digits = match[2]
    for size in range(1, _MAX_PERIOD + 1):
        start = len(digits) - size
        while start > 0 and digits[start - 1] == digits[start - 1 + size]:
            start -= 1
        if start >= 0 and (times := (len(digits) - start) // size) >= 3:
            return _fraction_with_period(match[1], digits[: len(digits) - times * size], digits[-size:])
    return match[0]


def _repeating_decimal(match: re.Match[str]) -> str:
    """Return ``0.1(6)`` as a fraction."""
    return _fraction_with_period(*[group for group in match.groups() if group is not None][:3])


def _fraction_with_period(whole: str, fixed: str, period: str) -> str:
    shift = 10 ** len(fixed)
    number = Fraction(int(f"{whole or 0}{fixed}"), shift) + Fraction(int(period), (10 ** len(period) - 1) * shift)
    return rf"\frac{{{number.numerator}}}{{{number.denominator}}}"


def _mixed_number(match: re.Match[str]) -> str:
    whole, top, bottom = (group for group in match.groups() if group is not None)
    if int(top) >= int(bottom):
        return match[0]
    return rf"({whole}+\frac{{{top}}}{{{bottom}}})"
