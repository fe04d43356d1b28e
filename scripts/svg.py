"""The few shapes that the pictures of the documentation are made of: plain SVG text, the same on every machine."""

from collections.abc import Sequence
from html import escape

INK, QUIET, LINE, GOOD, BAD, CARD = "#1f2933", "#5b6773", "#c3ccd5", "#2f7d4f", "#b3261e", "#f3f6f9"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


def text(
    x: float, y: float, words: str, *, size: int = 13, color: str = INK, anchor: str = "start", bold: bool = False
) -> str:
    """Return a line of text."""
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{_n(x)}" y="{_n(y)}" font-size="{size}" fill="{color}" text-anchor="{anchor}"{weight}>'
        f"{escape(words)}</text>"
    )


def box(
    x: float, y: float, width: float, height: float, *, fill: str = CARD, stroke: str = LINE, round_by: int = 6
) -> str:
    """Return a rectangle."""
    return (
        f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" rx="{round_by}" fill="{fill}" '
        f'stroke="{stroke}"/>'
    )


def line(*points: tuple[float, float], color: str = LINE, width: float = 1, dash: str = "", arrow: str = "") -> str:
    """Return a line through points.

    Args:
        points: x and y of each.
        color: of the line.
        width: of the line.
        dash: lengths of dashes and gaps; empty: none.
        arrow: ``end``, ``both`` or empty.
    """
    path = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    heads = {"end": ' marker-end="url(#head)"', "both": ' marker-start="url(#head)" marker-end="url(#head)"', "": ""}
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{_n(width)}"{dashes}{heads[arrow]}/>'


def document(width: int, height: int, title: str, shapes: Sequence[str]) -> str:
    """Return a picture on white, so that it reads the same on a dark page."""
    head = (
        '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        f'orient="auto-start-reverse"><path d="M0,0 L8,4 L0,8 z" fill="{QUIET}"/></marker>'
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" font-family="{FONT}">',
            f"<title>{escape(title)}</title>",
            f"<defs>{head}</defs>",
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            *shapes,
            "</svg>\n",
        ]
    )


def _n(value: float) -> str:
    """Return a number with one decimal at most."""
    return f"{value:.1f}".removesuffix(".0")
