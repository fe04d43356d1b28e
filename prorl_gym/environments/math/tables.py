r"""What stands between ``\begin`` and ``\end``: matrices, systems of equations, and functions by cases."""

import re
from collections.abc import Callable, Sequence

from prorl_gym.environments.math import intervals, spelling
from prorl_gym.environments.math.expressions import Apply, Node, UnreadableError, read_expression, symbols
from prorl_gym.environments.math.forms import Amount, Form, Grid, Labelled, Piecewise, Reals
from prorl_gym.environments.math.values import same_on

_TABLE = re.compile(
    r"(?P<factor>[^=<>]*?)(?P<open>[(\[|]|\\\{)?\s*\\begin\s*\{(?P<kind>[a-zA-Z]*matrix|array|d?r?cases|aligned|align|gathered|split)\*?\}"
    r"\s*(?:\{[clr|@\s]*\})?(?P<body>.*?)\\end\s*\{(?P=kind)\*?\}\s*(?P<close>[)\]|]|\\\})?\s*",
    re.DOTALL,
)
_CONDITION = re.compile(r"^(?:\\text\s*\{\s*)?(?:if|for|when|where)\b\s*\}?\s*|^\\text\s*\{\s*\}")
_OTHERWISE = re.compile(r"(?:\\text\s*\{)?\s*(?:otherwise|else|elsewhere)\s*\}?\.?", re.IGNORECASE)


def read_table(text: str, read: Callable[[str], Form]) -> Form | None:
    """Return a table as a matrix, as a list of equations or as a function by cases.

    Raises:
        UnreadableError: a determinant that was not computed, or no such thing.
    """
    match = _TABLE.fullmatch(text)
    if match is None:
        return None
    rows = [row.strip() for row in re.split(r"\\\\(?:\[[^\[\]]*\])?", re.sub(r"\\hline", "", match["body"]))]
    rows = [row for row in rows if row]
    matrix = match["kind"].endswith("matrix") or (match["kind"] == "array" and match["open"] != "\\{")
    if matrix and match["kind"] == "array" and any(re.search(r"=|<|>|\\[lg]e(?![a-z])", row) for row in rows):
        matrix = False
    if matrix:
        return _matrix(rows, match["factor"], match["open"], match["kind"])
    if match["factor"].strip():
        raise UnreadableError("something before a system of equations")
    rows = [
        re.sub(r"&\s*(?==|<|>|\\[lg]e(?![a-z])|\\approx)|(?<=[=<>])\s*&", "", row).strip().rstrip(",;.") for row in rows
    ]
    if all("&" in row for row in rows) or any(_OTHERWISE.search(row) for row in rows):
        return _piecewise([_row(row) for row in rows], read)
    return read(", ".join(row.replace("&", " ") for row in rows))


def _matrix(rows: list[str], factor: str, opening: str | None, kind: str) -> Grid:
    if kind == "vmatrix" or opening == "|":
        raise UnreadableError("a determinant that was not computed")
    grid = [[read_expression(spelling.formula(cell.strip())) for cell in row.split("&")] for row in rows]
    if factor := factor.strip():
        scale = read_expression(factor.removesuffix("\\cdot").strip())
        grid = [[Apply("*", (scale, cell)) for cell in row] for row in grid]
    return Grid(tuple(tuple(row) for row in grid))


def _row(row: str) -> tuple[str, str]:
    """Return the formula and the condition of one case."""
    formula, mark, condition = row.partition("&")
    if not mark:
        formula, mark, condition = row.partition(",")
    formula, condition = formula.strip().rstrip(","), condition.replace("&", " ").strip()
    return formula, _CONDITION.sub("", condition).strip()


def _piecewise(rows: list[tuple[str, str]], read: Callable[[str], Form]) -> Piecewise:
    cases: list[tuple[Node, Reals]] = []
    names: set[str] = set()
    covered = intervals.NOTHING
    for at, (formula, condition) in enumerate(rows):
        if _OTHERWISE.fullmatch(condition):
            if at != len(rows) - 1:
                raise UnreadableError("cases behind all others")
            found = intervals.complement(covered)
        else:
            name, found = _condition(read(condition))
            names.add(name)
        if intervals.intersection(covered, found).pieces:
            raise UnreadableError("cases that overlap")
        covered = intervals.union(covered, found)
        cases.append((read_expression(formula), found))
    if len(names) != 1 or any(symbols(formula) - names for formula, _ in cases):
        raise UnreadableError("cases of several variables")
    return Piecewise(names.pop(), tuple(cases))


def _condition(form: Form) -> tuple[str, Reals]:
    match form:
        case Labelled(name, Reals() as found):
            return name, found
        case Labelled(name, Amount() as point):
            return name, intervals.points([point.value])
        case _:
            raise UnreadableError("a case that is no condition on a variable")


def same_cases(one: Sequence[tuple[Node, Reals]], other: Sequence[tuple[Node, Reals]]) -> bool:
    """Whether two functions by cases have the same domain, and the same formula on each common part of it."""
    domains = [intervals.NOTHING, intervals.NOTHING]
    for at, cases in enumerate((one, other)):
        for _, where in cases:
            domains[at] = intervals.union(domains[at], where)
    if not intervals.equal_sets(*domains):
        return False
    return all(
        same_on(left, right, intervals.intersection(here, there)) for left, here in one for right, there in other
    )
