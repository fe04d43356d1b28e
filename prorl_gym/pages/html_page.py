"""One HTML file of style sheet, script and data, under a policy that lets nothing else run in it."""

import hashlib
import json
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

_ASSETS = Path(__file__).parent / "assets"

_ESCAPES = str.maketrans({character: f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"})
"""Without these, no ``</script>`` or ``<!--`` can end or derail a data block."""


@dataclass(frozen=True, slots=True)
class PageAssets:
    """The fixed part of a page: style sheet, script and markup."""

    style: str
    script: str
    body: str

    @property
    def hashes(self) -> tuple[str, str]:
        """Return the hashes of style sheet and script, as a policy names them."""
        return _digest(self.style), _digest(self.script)


@cache
def load_assets(styles: Sequence[str], scripts: Sequence[str], body: str) -> PageAssets:
    """Read a page's parts from the package. The scripts share one scope of their own."""
    program = "\n".join(_read_asset(name) for name in scripts)
    return PageAssets(
        "\n".join(map(_read_asset, styles)), f'(() => {{\n"use strict";\n{program}}})();\n', _read_asset(body)
    )


def render_page(
    assets: PageAssets, title: str, data: Any = None, *, framed: Sequence[PageAssets] = (), may_connect: bool = False
) -> str:
    """Return the page, whose script finds ``data`` (JSON) in the element of that name.

    ``framed``: pages that it shows in a frame, which is under the policy of its parent. ``may_connect``: the page may
    send requests to the server that it came from.
    """
    source = "'self'" if may_connect else "'none'"
    styles, scripts = zip(*(shown.hashes for shown in (assets, *framed)), strict=True)
    policy = (
        f"default-src 'none'; script-src {' '.join(scripts)}; style-src {' '.join(styles)}; "
        f"connect-src {source}; base-uri 'none'; form-action 'none'"
    )
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).translate(_ESCAPES)
    block = "" if data is None else f'<script type="application/json" id="data">{text}</script>\n'
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n'
        f"<title>{escape(title)}</title>\n<style>{assets.style}</style>\n</head>\n<body>\n{assets.body}"
        f"{block}<script>{assets.script}</script>\n</body>\n</html>\n"
    )
    return page.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate in a model's text is no UTF-8


def _digest(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _read_asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")
