"""Control keys as models spell them: ``C-c``, ``^C``, ``ctrl+c``, ``Ctrl-C``."""

import re

_KEY = re.compile(r"(?i:c-|(?:ctrl|control)[-+ ])(?P<named>[A-Za-z\\\[\]])|\^(?P<caret>[A-Zcdz\\\[\]])")


def control_key(text: str) -> bytes | None:
    """Return the byte that a key sends when ``text`` is nothing but that key's name or that byte; else ``None``."""
    name = text.strip(" \t\r\n")
    if len(name) == 1 and "\x01" <= name < "\x20":
        return name.encode()
    key = _KEY.fullmatch(name.removeprefix("<").removesuffix(">"))
    return None if key is None else bytes([ord((key["named"] or key["caret"]).upper()) & 0x1F])
