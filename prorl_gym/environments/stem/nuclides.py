r"""Nuclides in their spellings: ``^{14}_{6}\mathrm{C}``, ``C-14``, ``carbon-14``."""

import re
from dataclasses import dataclass

from prorl_gym.environments.stem.elements import ELEMENTS
from prorl_gym.environments.stem.spelling import unfonted

_NAMES = (
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
"""Of the elements, in their order."""
_NUMBERS = (
    {symbol: number for number, symbol in enumerate(ELEMENTS, 1)}
    | {name: number for number, name in enumerate(_NAMES, 1)}
    | {"aluminum": 13, "sulphur": 16, "cesium": 55}
)

_SYMBOL = r"(?P<symbol>[A-Z][a-z]?)"
_MASS = r"\{?\s*(?P<mass>\d{1,3}m?)\s*\}?"
_NUMBER = r"\{?\s*(?P<number>\d{1,3})\s*\}?"
_FORMS = [
    re.compile(pattern)
    for pattern in (
        rf"(?:\{{\s*\}}\s*)?\^\s*{_MASS}\s*(?:_\s*{_NUMBER}\s*)?\{{?\s*{_SYMBOL}\s*\}}?",
        rf"(?:\{{\s*\}}\s*)?_\s*{_NUMBER}\s*\^\s*{_MASS}\s*\{{?\s*{_SYMBOL}\s*\}}?",
        rf"(?P<mass>\d{{1,3}}m?){_SYMBOL}",
        rf"{_SYMBOL}\s*\^\s*\{{?\s*(?P<mass>\d{{2,3}}m?)\s*\}}?",
        rf"{_SYMBOL}\s*-\s*(?P<mass>\d{{1,3}}m?)",
        r"(?P<symbol>[A-Za-z][a-z]{2,})(?:\s*-\s*|\s+)(?P<mass>\d{1,3}m?)",
    )
]


@dataclass(frozen=True, slots=True)
class Nuclide:
    """An isotope of an element."""

    number: int
    mass: str


def read_nuclide(text: str) -> Nuclide | None:
    """Return the nuclide that a text spells, otherwise ``None``; also where its atomic number is another element's."""
    text = unfonted(text).strip().rstrip(".").strip()
    for form in _FORMS:
        if (found := form.fullmatch(text)) is None:
            continue
        parts = found.groupdict()
        symbol = parts["symbol"]
        number = _NUMBERS.get(symbol) or _NUMBERS.get(symbol.casefold() if len(symbol) > 2 else symbol)
        possible = number is not None and number <= int(parts["mass"].rstrip("m")) <= 3 * number + 4
        if number is not None and possible and int(parts.get("number") or number) == number:
            return Nuclide(number, parts["mass"])
    return None
