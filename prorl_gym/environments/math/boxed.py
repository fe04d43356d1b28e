r"""Finding the final answer: the content of the last ``\boxed{}`` of a text."""


class NoAnswerError(ValueError):
    """The text holds no answer that could be graded; the message says why."""


_MARK = "\\boxed"


def last_boxed(text: str) -> str:
    r"""Return what the last ``\boxed{...}`` of a text holds, its own boxes and outer dollar signs taken off.

    Braces nest and escaped braces do not count, as in TeX. Only the last one counts: a text with two boxes does not
    get two chances, and one whose last box was cut off has not answered.

    Raises:
        NoAnswerError: there is no box, or the last one is not closed or empty.
    """
    start = text.rfind(_MARK)
    if start < 0:
        raise NoAnswerError("no boxed answer")
    start += len(_MARK)
    while start < len(text) and text[start].isspace():
        start += 1
    if start == len(text) or text[start] != "{":
        raise NoAnswerError("the last \\boxed has no braces")
    # A box inside a box is found first by rfind, so the content holds none.
    content = text[start + 1 : _closing_brace(text, start)].strip().strip("$").strip()
    if not content:
        raise NoAnswerError("the last \\boxed is empty")
    return content


def _closing_brace(text: str, start: int) -> int:
    depth = 0
    position = start
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 2
            continue
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return position
        position += 1
    raise NoAnswerError("the last \\boxed is not closed")
