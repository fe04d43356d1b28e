r"""TeX's macros that change how an answer looks and not what it is, for all graders and converters of answers.

The graders do different things with them (mathematics keeps ``\text{...}``, since words are compared apart), but which
macros there are is written down here only.
"""

from collections.abc import Iterable

UPRIGHT = "text textrm textsf textup textnormal mathrm mathsf mathup mbox hbox operatorname".split()
"""Fonts of words and units."""

FONTS = [*UPRIGHT, *"textbf textit texttt textsc mathbf mathit mathtt mathnormal emph".split()]
"""Fonts in which what stands in braces may be text."""

STYLED = "mathcal mathscr mathfrak boldsymbol bm bold pmb underline uline fbox framebox ensuremath smash".split()
"""What changes the look of a formula in braces."""

UNSEEN = "color phantom hphantom vphantom hspace vspace label tag".split()
"""Macros whose argument is not seen."""

SWITCHES = (
    "tiny scriptsize footnotesize small normalsize large Large LARGE huge Huge rm bf it sf tt sc bfseries itshape "
    "boldmath displaystyle textstyle scriptstyle scriptscriptstyle limits nolimits mathstrut strut null"
).split()
"""Macros without an argument that say nothing themselves."""

DELIMITER_SIZES = r"left|middle|right|[bB]igg?[lrm]?"

WIDE_SPACES = "quad qquad".split()
SPACES = "enspace enskip space".split()
THIN_SPACES = "thinspace medspace thickspace negthinspace negmedspace negthickspace nobreakspace".split()
"""Spaces of a width that may also group digits."""

LENGTH = r"\\(?:kern|mkern|hskip|mskip)\s*-?[\d.]+\s*(?:pt|em|ex|mu|mm|cm|in)(?![a-zA-Z])"
"""A space of a given length."""

SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ"
RAISED = str.maketrans(SUPERSCRIPTS, "0123456789+-n")


def any_of(names: Iterable[str]) -> str:
    """Return a pattern of one of these names, longest first."""
    return "|".join(sorted(names, key=len, reverse=True))
