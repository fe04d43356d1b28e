"""One spelling for answers that people write in many ways: Unicode, spacing, percent, scientific notation, words."""

import re
import unicodedata

# ruff: noqa: RUF001 - look-alike signs are what this file is about

_FRACTIONS = {
    "½": (1, 2), "⅓": (1, 3), "⅔": (2, 3), "¼": (1, 4), "¾": (3, 4), "⅕": (1, 5), "⅖": (2, 5), "⅗": (3, 5),
    "⅘": (4, 5), "⅙": (1, 6), "⅚": (5, 6), "⅛": (1, 8), "⅜": (3, 8), "⅝": (5, 8), "⅞": (7, 8),
}  # fmt: skip

_SYMBOLS = str.maketrans(
    {
        "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "π": r"\pi ", "∞": r"\infty ",
        "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∅": r"\emptyset ", "°": r"^\circ ", "±": r"\pm ",
        "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "\u200b": "", "\u2060": "", "\ufeff": "",
        **{character: rf"\frac{{{top}}}{{{bottom}}}" for character, (top, bottom) in _FRACTIONS.items()},
    }
)  # fmt: skip

_SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹⁻"
_SUPERSCRIPT = re.compile(f"[{_SUPERSCRIPTS}]+")
_PLAIN_DIGITS = str.maketrans(_SUPERSCRIPTS, "0123456789-")
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|(\d+|\w))")
_SCIENTIFIC = re.compile(r"(?<![\w.\\])([+-]?\d+(?:\.\d+)?)[eE]([+-]?\d+)(?!\w)")
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|operatorname)\s*\{([^{}]*)\}")
_SET = re.compile(r"\\\{.*\\\}", re.DOTALL)
_ORDERED = re.compile(r"[(\[].*,.*[)\]]", re.DOTALL)
_SPACING = re.compile(r"\\[,;:!]|\\(?:quad|qquad|displaystyle|left|right)(?![a-zA-Z])")
_BASE = re.compile(r"_\{?(\d+)\}?$")
_DOLLAR = re.compile(r"\\?\$")
_PERCENT = re.compile(r"\s*\\?%$")
_WORDS = re.compile(r"[^\W\d_]{2,}(?:[ '\-]+[^\W\d_]+)*")


def plain(answer: str) -> str:
    """Return the answer with Unicode signs as LaTeX, without dollar signs, closing full stop or outer spaces."""
    text = _ROOT.sub(lambda match: rf"\sqrt{{{match[1] or match[2]}}}", _DOLLAR.sub("", answer))
    text = _SUPERSCRIPT.sub(lambda match: f"^{{{match[0].translate(_PLAIN_DIGITS)}}}", text).translate(_SYMBOLS)
    text = unicodedata.normalize("NFKC", text)
    text = _SCIENTIFIC.sub(r"\1\\times 10^{\2}", text)
    return _SPACING.sub("", text.replace("~", " ")).strip().rstrip(".").rstrip()


def key(answer: str) -> str:
    """Return what is left of a plain answer when spacing does not count: equal keys are equal answers."""
    return re.sub(r"\s+", "", _TEXT.sub(r"\1", answer))


def words(answer: str) -> str | None:
    """Return a plain answer that consists of words (``Tuesday``, ``two doors``) in lower case, otherwise ``None``.

    Such an answer must not be parsed: as a product of letters, ``lube`` would equal ``blue``.
    """
    text = _TEXT.sub(r"\1", answer).strip()
    return " ".join(text.casefold().split()) if _WORDS.fullmatch(text) else None


def enclosure(answer: str) -> str | None:
    """Return ``set`` for ``{1,2}``, ``ordered`` for a tuple or an interval, ``None`` for anything else."""
    if _SET.fullmatch(answer):
        return "set"
    return "ordered" if _ORDERED.fullmatch(answer) else None


def base(answer: str) -> str | None:
    """Return the subscript of a number such as ``1011_2``, or ``None``."""
    match = _BASE.search(answer)
    return match[1] if match else None


def without_percent(answer: str) -> str | None:
    """Return an answer without its percent sign, or ``None`` when it has none."""
    return _PERCENT.sub("", answer) if _PERCENT.search(answer) else None
