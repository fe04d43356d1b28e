"""Short texts: names, terms, chemical formulas. Equal when the words are, however they are spelt."""

import re
from collections.abc import Iterable

from prorl_gym.environments import tex
from prorl_gym.environments.stem.elements import ELEMENT, ELEMENTS
from prorl_gym.environments.stem.nuclides import read_nuclide
from prorl_gym.environments.stem.spelling import explicit_charges, squeezed, unfonted

_LEAD = re.compile(r"^\s*(?:the\s+)?(?:final\s+|correct\s+)?answer\s*(?:is|:)\s*:?\s*", re.IGNORECASE)
_ARTICLE = re.compile(r"(?<![\w'])(?:a|an|the)\s+(?=\w)", re.IGNORECASE)
_POINT = re.compile(r"(?<=[A-Za-z])\.(?=\s|$|[A-Za-z])")
_POSSESSIVE = re.compile(r"(?<=[A-Za-z])['\u2019]s?(?=\s|$)")
_PLURAL = re.compile(r"(?<=[a-z]{3})(?<![sui])s(?![\w'\u2019])")

_FORMULA = re.compile(rf"(?:{ELEMENT}|[\d()\[\]+\-*\ue000\ue001])+")
_CHEMICAL = re.compile(
    rf"\\(?:ce|{tex.any_of(tex.UPRIGHT)})\s*\{{|"
    r"[a-z]|(?<=[A-Z)])(?:\d|_\s*\{?\s*\d)|\^\s*\{?\s*\d?\s*[+-]|[⁺⁻₀-₉]|[+-]$"
)
_POWER = re.compile(r"\^\s*\{?\s*\d+\s*(?![\d\s+-])")
_PARTICLE = re.compile(r"(?:[a-z]|\\[a-z]+)\s*\^\s*\{?\s*[+-]\s*\}?")
_STATE = re.compile(r"\((?:aq|s|l|g)\)$")
_REACTION = re.compile(rf"(?:{ELEMENT}|[\d()\[\]+\->*\ue000\ue001])+")
_TWO_LETTERS = frozenset(symbol for symbol in ELEMENTS if len(symbol) == 2)
_WORDS = {"yes", "no"}
"""Formulas too (No), but meant as words."""
_ACRONYMS = frozenset("HIV UV PVC CNS CPU PCB IUPAC UHF VHF IBS BIOS SSB UNIC".split())
"""Capitals that happen to be symbols of elements."""
_LETTERS = re.compile(r"\(?([A-J])\)?(?:(?:\s*[,;&/]\s*|\s+and\s+|\s*,\s*and\s+|\s+)\(?([A-J])\)?)+", re.DOTALL)
_RUN_OF_LETTERS = re.compile(r"A[B-J]+")


def key(text: str) -> str:
    """Return what is compared: no articles, plural s, case, spacing, hyphens, sub- and superscript."""
    return squeezed(_loose(text)).casefold()


def equal(one: str, other: str) -> bool:
    """Whether two texts say the same. Symmetric; nothing equals an empty text.

    In a chemical formula the case of letters counts (Co is cobalt and CO carbon monoxide), and so does which number is
    a charge. Nuclides are equal when element and mass are, lists of letters when the letters are, in their order.
    """
    nuclides = read_nuclide(one), read_nuclide(other)
    if all(nuclides):
        return nuclides[0] == nuclides[1]
    lists = _letters(one), _letters(other)
    if all(lists):
        return lists[0] == lists[1]
    first, second = key(one), key(other)
    if first != second or not any(map(str.isalnum, first)):
        return False
    charges = explicit_charges(one), explicit_charges(other)
    if all(charges) and charges[0] != charges[1]:
        return False
    exact = squeezed(one), squeezed(other)
    if first in _WORDS and first in exact:
        return True  # NO, shouted
    if first not in _WORDS and all(map(_FORMULA.fullmatch, exact)) and exact[0] != exact[1]:
        return False
    return _has_formulas_of(one, exact[1]) and _has_formulas_of(other, exact[0])


def right(answer: str, gold: str, accept: Iterable[str] = ()) -> bool:
    """Whether an answer is the gold one or one of the other accepted."""
    stripped = _LEAD.sub("", unfonted(answer))
    return any(equal(stripped, wanted) for wanted in (gold, *accept))


def is_term(text: str) -> bool:
    r"""Whether a text is a chemical formula (``H2SO4``), a reaction or a nuclide, not a formula of physics."""
    if read_nuclide(text) is not None or _PARTICLE.fullmatch(unfonted(text)):
        return True
    exact = squeezed(_STATE.sub("", text))
    if "->" in exact:
        return _REACTION.fullmatch(exact) is not None
    return _is_compound(exact) and _CHEMICAL.search(text) is not None and not _POWER.search(unfonted(text))


def _has_formulas_of(text: str, exact: str) -> bool:
    """Whether each formula among the words of a text stands, letter for letter, in another text."""
    words = list(map(squeezed, unfonted(text).split()))
    formulas = [word for word in words if _is_compound(word)]
    if len(words) == 1 and words[0] in _TWO_LETTERS and words[0].casefold() not in _WORDS:
        formulas = words
    return all(formula in exact for formula in formulas)


def _is_compound(word: str) -> bool:
    """Whether a word is a formula of several elements, or of one with a number or a charge."""
    capitals = sum(map(str.isupper, word))
    several = capitals > 1 or (capitals == 1 and any(sign.isdigit() or sign in "+\ue001" for sign in word))
    return several and word not in _ACRONYMS and _FORMULA.fullmatch(word) is not None


def _letters(text: str) -> list[str]:
    """Return the letters of a list of options (``A, C and D``, ``ACD``); empty when it is something else."""
    text = unfonted(text).strip().rstrip(".")
    run = _RUN_OF_LETTERS.fullmatch(text)
    if run is not None and "".join(sorted(set(text))) == text:
        return list(text)
    return re.findall(r"\b[A-J]\b", text) if _LETTERS.fullmatch(text) else []


def _loose(text: str) -> str:
    text = _POINT.sub("", _POSSESSIVE.sub("s", unfonted(text)))
    return _PLURAL.sub("", _ARTICLE.sub("", text))
