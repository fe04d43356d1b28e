"""Making untrusted text fit for an observation: bounded, without control characters."""


def shorten(text: str, characters: int) -> str:
    """Return a text of at most about so many characters: head and tail, with a mark of what was left out."""
    if len(text) <= characters:
        return text
    head, tail = characters - characters // 4, characters // 4
    left_out = len(text) - head - tail
    return f"{text[:head]}\n[... {left_out} characters left out ...]\n{text[len(text) - tail :]}"


def printable_text(text: str) -> str:
    """Return a text without control characters, and without lone surrogates, which no record can hold."""
    text = text.replace("\r\n", "\n").encode("utf-8", "replace").decode("utf-8")
    return "".join(letter if letter in "\n\t" or (letter >= " " and letter != "\x7f") else "\ufffd" for letter in text)
