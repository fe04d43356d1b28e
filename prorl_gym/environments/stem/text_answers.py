"""Compares answers in words: options of multiple choice, and short texts such as names, formulas and nuclides."""

import re
import unicodedata
from collections.abc import Iterator, Sequence
from string import ascii_uppercase

from prorl_gym.environments.answers import tex
from prorl_gym.environments.stem.text_normalization import (
    ELEMENT,
    ELEMENTS,
    comparison_key,
    raised_charges,
    strip_fonts,
)

_OPTION_LEAD = re.compile(
    r"^\s*+(?:(?:so|thus|hence|therefore|final|correct|right|best|the|answer|ans|option|choice|statement|letter|is|it|my)\b"
    r"[\s:,=.*]*)+",
    re.IGNORECASE,
)
_LEADING_LETTER = re.compile(
    r"^[\s(\[{*]*([A-Za-z])(?![\w'\u2019^_\\])[\s)\]}*]*(?:[.:,;=\u2013\u2014]|-(?=\s+\S)|is\b)?\s*+(.*)$", re.DOTALL
)
_TRAILING_LETTER = re.compile(r"^(.*\S)\s*+[(\[]\s*+([A-Za-z])\s*+[)\]]$", re.DOTALL)
_REASON = re.compile(r"^(?:because|since|as|due to)\b", re.IGNORECASE)
_BOTH = re.compile(r"^\s*+both\s+(?=\S+\s+and\b)|(?<=\sand\s)(\S++)\s++only$", re.IGNORECASE)
"""Words of how many of several statements: ``both I and II``, ``I and II only``."""
_PRAISE = re.compile(
    r"(?<!\s)\s++is\s++(?:the\s+)?(?:correct|right|true)(?:\s+(?:answer|option|choice|one))?$", re.IGNORECASE
)
_QUOTES = ("**", "*", '"', "'", "`")
_LEADING_ARTICLE = re.compile(r"^(?:the|an?)\s+", re.IGNORECASE)
_BRACKETED = re.compile(r"^\((.*)\)$|^\[(.*)\]$", re.DOTALL)
_ANSWER_LEAD = re.compile(r"^\s*+(?:the\s+)?(?:final\s+|correct\s+)?answer\s*+(?:is|:)\s*+:?\s*+", re.IGNORECASE)
_ARTICLE = re.compile(r"(?<![\w'])(?:a|an|the)\s+(?=\w)", re.IGNORECASE)
_ABBREVIATION_POINT = re.compile(r"(?<=[A-Za-z])\.(?=\s|$|[A-Za-z])")
_POSSESSIVE = re.compile(r"(?<=[A-Za-z])['\u2019]s?(?=\s|$)")
_PLURAL = re.compile(r"(?<=[a-z]{3})(?<![sui])s(?![\w'\u2019])")
_FORMULA = re.compile(rf"(?:{ELEMENT}|[\d()\[\]+\-*\ue000\ue001])+")
_CHEMICAL = re.compile(
    rf"\\(?:ce|{tex.alternation(tex.UPRIGHT)})\s*+\{{|"
    r"[a-z]|(?<=[A-Z)])(?:\d|_\s*+\{?\s*+\d)|\^\s*+\{?\s*+\d?\s*+[+-]|[⁺⁻₀-₉]|[+-]$"
)
_POWER = re.compile(r"\^\s*+\{?\s*+\d+\s*+(?![\d\s+-])")
_PARTICLE = re.compile(r"(?:[a-z]|\\[a-z]+)\s*+\^\s*+\{?\s*+[+-]\s*+\}?")
_STATE = re.compile(r"\((?:aq|s|l|g)\)$")
_REACTION = re.compile(rf"(?:{ELEMENT}|[\d()\[\]+\->*\ue000\ue001])+")
_TWO_LETTERS = frozenset(symbol for symbol in ELEMENTS if len(symbol) == 2)
_WORDS = {"yes", "no"}
"""Words that are formulas too (No)."""
_ACRONYMS = frozenset("HIV UV PVC CNS CPU PCB IUPAC UHF VHF IBS BIOS SSB UNIC".split())
"""Capitals that happen to be symbols of elements."""
_OPTION_LETTERS = re.compile(
    r"\(?([A-J])\)?(?:(?:\s*+[,;&/]\s*+|\s+and\s+|\s*+,\s*+and\s+|\s+)\(?([A-J])\)?)+", re.DOTALL
)
_RUN_OF_LETTERS = re.compile(r"A[B-J]+")
_ELEMENT_NAMES = (
    "hydrogen helium lithium beryllium boron carbon nitrogen oxygen fluorine neon sodium magnesium aluminium silicon "
    "phosphorus sulfur chlorine argon potassium calcium scandium titanium vanadium chromium manganese iron cobalt "
    "nickel copper zinc gallium germanium arsenic selenium bromine krypton rubidium strontium yttrium zirconium "
    "niobium molybdenum technetium ruthenium rhodium palladium silver cadmium indium tin antimony tellurium iodine "
    "xenon caesium barium lanthanum cerium praseodymium neodymium promethium samarium europium gadolinium terbium "
    "dysprosium holmium erbium thulium ytterbium lutetium hafnium tantalum tungsten rhenium osmium iridium platinum "
    "gold mercury thallium lead bismuth polonium astatine radon francium radium actinium thorium protactinium uranium "
    "neptunium plutonium americium curium berkelium californium einsteinium fermium mendelevium nobelium lawrencium "
    "rutherfordium dubnium seaborgium bohrium hassium meitnerium darmstadtium roentgenium copernicium nihonium "
    "flerovium moscovium livermorium tennessine oganesson"
).split()
"""In the order of their atomic numbers."""
_ATOMIC_NUMBERS = (
    {symbol: number for number, symbol in enumerate(ELEMENTS, 1)}
    | {name: number for number, name in enumerate(_ELEMENT_NAMES, 1)}
    | {"aluminum": 13, "sulphur": 16, "cesium": 55}
)
_SYMBOL = r"(?P<symbol>[A-Z][a-z]?)"
_MASS = r"\{?\s*+(?P<mass>\d{1,3}m?)\s*+\}?"
_NUMBER = r"\{?\s*+(?P<number>\d{1,3})\s*+\}?"
_NUCLIDE_FORMS = [
    re.compile(pattern)
    for pattern in (
        rf"(?:\{{\s*+\}}\s*+)?\^\s*+{_MASS}\s*+(?:_\s*+{_NUMBER}\s*+)?\{{?\s*+{_SYMBOL}\s*+\}}?",
        rf"(?:\{{\s*+\}}\s*+)?_\s*+{_NUMBER}\s*+\^\s*+{_MASS}\s*+\{{?\s*+{_SYMBOL}\s*+\}}?",
        rf"(?P<mass>\d{{1,3}}m?){_SYMBOL}",
        rf"{_SYMBOL}\s*+\^\s*+\{{?\s*+(?P<mass>\d{{2,3}}m?)\s*+\}}?",
        rf"{_SYMBOL}\s*+-\s*+(?P<mass>\d{{1,3}}m?)",
        r"(?P<symbol>[A-Za-z][a-z]{2,})(?:\s*+-\s*+|\s+)(?P<mass>\d{1,3}m?)",
    )
]


def chosen_option(answer: str, options: Sequence[str]) -> int | None:
    """Return the index of the option that an answer names, or ``None`` when it names none or several.

    A lone letter names an option by its position even if another option's text is that letter: the prompt requests
    the letter. A letter with a text counts when the text is that option's. ``options`` has the order of the prompt.
    """
    answer = unicodedata.normalize("NFKC", answer) if len(answer.strip()) == 1 else answer
    text = strip_fonts(answer).rstrip(".! ")
    for quote in _QUOTES:
        if len(text) > 2 * len(quote) and text.startswith(quote) and text.endswith(quote):
            text = text[len(quote) : -len(quote)]
    text = _PRAISE.sub("", text.rstrip(". "))
    keys = [comparison_key(_BOTH.sub(r"\1", option)) for option in options]
    text = _BOTH.sub(r"\1", text)
    whole = comparison_key(text)
    if len(whole) > 1 and (place := _find_option(whole, keys)) is not None:
        return place
    bare = _OPTION_LEAD.sub("", text)
    for letter, words in _letter_and_words(bare):
        place = ascii_uppercase.find(letter.upper())
        if place < len(options) and (
            not words
            or (_REASON.match(words) and (letter.isupper() or bare.lstrip().startswith("(")))
            or place in (_find_option(comparison_key(each), keys) for each in (words, _LEADING_ARTICLE.sub("", words)))
        ):
            return place
    return _find_option(comparison_key(bare), keys)


def text_key(text: str) -> str:
    """Return a text without articles, plural s, case, spacing, hyphens, sub- and superscript, for comparison."""
    text = _ABBREVIATION_POINT.sub("", _POSSESSIVE.sub("s", strip_fonts(text)))
    return comparison_key(_PLURAL.sub("", _ARTICLE.sub("", text))).casefold()


def is_equal(one: str, other: str) -> bool:
    """Whether two texts are the same answer. Symmetric; nothing equals an empty text.

    In a chemical formula the case of letters counts (Co is cobalt and CO carbon monoxide), and so does which number is
    a charge. Nuclides are equal when element and mass are, lists of letters when the letters are, in their order.
    """
    nuclides = read_nuclide(one), read_nuclide(other)
    if all(nuclides):
        return nuclides[0] == nuclides[1]
    lists = _option_letters(one), _option_letters(other)
    if all(lists):
        return lists[0] == lists[1]
    first, second = text_key(one), text_key(other)
    if first != second or not any(map(str.isalnum, first)):
        return False
    charges = raised_charges(one), raised_charges(other)
    if all(charges) and charges[0] != charges[1]:
        return False
    exact = comparison_key(one), comparison_key(other)
    if first in _WORDS and first in exact:
        return True  # NO may be the word in capitals
    if first not in _WORDS and all(map(_FORMULA.fullmatch, exact)) and exact[0] != exact[1]:
        return False
    return _keeps_formulas(one, exact[1]) and _keeps_formulas(other, exact[0])


def is_right(answer: str, *golds: str) -> bool:
    stripped = _ANSWER_LEAD.sub("", strip_fonts(answer))
    return any(is_equal(stripped, wanted) for wanted in golds)


def is_term(text: str) -> bool:
    r"""Whether a text is a chemical formula (``H2SO4``), a reaction or a nuclide, not a formula of physics."""
    if read_nuclide(text) is not None or _PARTICLE.fullmatch(strip_fonts(text)):
        return True
    exact = comparison_key(_STATE.sub("", text))
    if "->" in exact:
        return _REACTION.fullmatch(exact) is not None
    return _is_compound(exact) and _CHEMICAL.search(text) is not None and not _POWER.search(strip_fonts(text))


def read_nuclide(text: str) -> tuple[int, str] | None:
    """Return atomic number and mass of the nuclide that a text spells, ``None`` where they are of no element."""
    text = strip_fonts(text).strip().rstrip(".").strip()
    for form in _NUCLIDE_FORMS:
        if (found := form.fullmatch(text)) is None:
            continue
        parts = found.groupdict()
        symbol = parts["symbol"]
        number = _ATOMIC_NUMBERS.get(symbol) or _ATOMIC_NUMBERS.get(symbol.casefold() if len(symbol) > 2 else symbol)
        possible = number is not None and number <= int(parts["mass"].rstrip("m")) <= 3 * number + 4
        if number is not None and possible and int(parts.get("number") or number) == number:
            return number, parts["mass"]
    return None


def _find_option(key: str, keys: Sequence[str]) -> int | None:
    """Return the index of a key among those of the options: exact, otherwise regardless of case if unambiguous."""
    if not key:
        return None
    for fold in (str, str.casefold):
        places = [place for place, option in enumerate(keys) if fold(option) == fold(key)]
        if len(places) == 1:
            return places[0]
    return None


def _letter_and_words(text: str) -> Iterator[tuple[str, str]]:
    """Yield the letter that a text begins or ends with, and the rest of the text."""
    if found := _LEADING_LETTER.match(text):
        words = found[2].strip().rstrip(".").strip()
        bracketed = _BRACKETED.match(words)
        yield found[1], (bracketed[1] or bracketed[2] or "").strip() if bracketed else words
    if found := _TRAILING_LETTER.match(text):
        yield found[2], found[1]


def _option_letters(text: str) -> list[str]:
    """Return the letters of a list of options (``A, C and D``, ``ACD``); empty when it is something else."""
    text = strip_fonts(text).strip().rstrip(".")
    run = _RUN_OF_LETTERS.fullmatch(text)
    if run is not None and "".join(sorted(set(text))) == text:
        return list(text)
    return re.findall(r"\b[A-J]\b", text) if _OPTION_LETTERS.fullmatch(text) else []


def _keeps_formulas(text: str, exact: str) -> bool:
    """Whether each formula among the words of a text is part of another text, with the same case of letters."""
    words = list(map(comparison_key, strip_fonts(text).split()))
    formulas = [word for word in words if _is_compound(word)]
    if len(words) == 1 and words[0] in _TWO_LETTERS and words[0].casefold() not in _WORDS:
        formulas = words
    return all(formula in exact for formula in formulas)


def _is_compound(word: str) -> bool:
    """Whether a word is a formula of several elements, or of one with a number or a charge."""
    capitals = sum(map(str.isupper, word))
    several = capitals > 1 or (capitals == 1 and any(sign.isdigit() or sign in "+\ue001" for sign in word))
    return several and word not in _ACRONYMS and _FORMULA.fullmatch(word) is not None
