"""Parses one mathematical expression, written as LaTeX or as plain text, into a tree by recursive descent.

The whole text must be an expression. An ambiguous text (``3 4``, ``x2``) is refused, since a lenient reading of a wrong
answer is a wrong reward.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_DEPTH = 60
"""Deepest nesting that is parsed; real answers have less than ten levels."""

FUNCTIONS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan arccot arcsec arccsc sinh cosh tanh coth sech csch arcsinh arccosh "
    "arctanh asin acos atan asinh acosh atanh arsinh arcosh artanh ln log lg exp sqrt cbrt cis sgn".split()
)
GREEK = frozenset(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta kappa lambda mu nu xi rho sigma tau phi varphi "
    "chi psi omega Gamma Delta Theta Lambda Sigma Phi Psi Omega ell".split()
)
UNIT_VECTORS = ("\\ei", "\\ej", "\\ek")
"""How ``normalize_latex`` spells unit vectors, which are printed bold or under a hat."""

_FUNCTION_NAMES = frozenset("f g h F G H P \\varphi \\phi".split())
"""Names of functions: brackets behind one hold its arguments. Behind other letters they are a factor."""

MATH_VERIFY_COMMANDS = re.compile(r"\\(?:int|iint|sum|prod|lim)(?![a-zA-Z])")
"""Commands whose expressions are left to math-verify's grammar."""

OPERATORS = frozenset({"gcd", "lcm", "max", "min", "mod"})
"""Operations that are work for the answerer, as those of ``MATH_VERIFY_COMMANDS`` are."""

_TOKEN = re.compile(r"\s*+(?:(\d+(?:\.\d+)?|\.\d+)|(\\[a-zA-Z]+|\\[{}])|([a-zA-Z])|([-+*/^_!()\[\]{}|',]))")
PRINTED_FUNCTIONS = {"Abs": "abs", "abs": "abs", "floor": "floor", "ceiling": "ceil", "ceil": "ceil", "factorial": "!"}
"""Names of functions as Python and sympy print them, and their operations."""
_COMMANDS = frozenset(
    r"\frac \binom \lfloor \lceil \gcd \lcm \max \min \pi \infty \mathbb \triangle \angle \overline \vec "
    r"\overrightarrow \hat \odot".split()
).union(UNIT_VECTORS, map("\\{}".format, PRINTED_FUNCTIONS))
_PRODUCT_SIGNS = {"*": "*", "\\cdot": "*", "\\times": "*", "/": "/", "\\div": "/"}
_CONSTANTS = frozenset({"e", "i", "\\pi", "\\infty"})
_CLOSING = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True, slots=True)
class Number:
    """A rational number."""

    value: Fraction


@dataclass(frozen=True, slots=True)
class Symbol:
    r"""A variable, a parameter, a named object, or one of the constants ``e``, ``i``, ``\\pi``, ``\\infty``."""

    name: str


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation or a function, by name; one that is not known (``f(2)``) has a name that starts with ``call``."""

    operation: str
    arguments: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class MathVerifyNode:
    """A whole expression in math-verify's grammar."""

    text: str


Node = Number | Symbol | Operation | MathVerifyNode
"""The tree of an expression: the output of the parser and the input of every computation."""


class UnreadableExpressionError(ValueError):
    """The text is not one expression."""


def parse_expression(text: str) -> Node:
    """Return the tree of a text. Raises ``UnreadableExpressionError``."""
    if MATH_VERIFY_COMMANDS.search(text):
        if "\\ldots" in text:
            raise UnreadableExpressionError("something is left out")
        return MathVerifyNode(text)
    return _Parser(_tokens(text)).parse_all()


def free_symbols(node: Node) -> frozenset[str]:
    """Return the names of the variables of a tree; none for an expression in math-verify's grammar."""
    match node:
        case Symbol(name):
            return frozenset() if name in _CONSTANTS else frozenset({name})
        case Operation(_, arguments):
            return frozenset[str]().union(*map(free_symbols, arguments))
        case _:
            return frozenset()


def substitute(node: Node, name: str, by: Node) -> Node:
    """Return the tree with a tree in place of a variable; not in math-verify's grammar."""
    match node:
        case Symbol(own):
            return by if own == name else node
        case Operation(operation, arguments):
            return Operation(operation, tuple(substitute(argument, name, by) for argument in arguments))
        case MathVerifyNode():
            raise UnreadableExpressionError("an expression in math-verify's grammar")
        case Number():
            return node


class _Parser:
    """Recursive-descent parser with one token of look-ahead."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._position = 0
        self._depth = 0
        self._bars = 0

    def parse_all(self) -> Node:
        tree = self._quotient()
        if self._next() is not None:
            raise UnreadableExpressionError(f"'{self._next()}' is left over")
        return tree

    def _next(self) -> str | None:
        return self._tokens[self._position] if self._position < len(self._tokens) else None

    def _take(self) -> str:
        token = self._next()
        if token is None:
            raise UnreadableExpressionError("it ends too early")
        self._position += 1
        return token

    def _accept(self, token: str) -> bool:
        is_next = self._next() == token
        self._position += is_next
        return is_next

    def _expect(self, token: str) -> None:
        if (found := self._take()) != token:
            raise UnreadableExpressionError(f"'{token}' is missing before '{found}'")

    def _quotient(self) -> Node:
        r"""Read ``1 \over 2``, which divides all of its group."""
        tree = self._sum()
        return Operation("/", (tree, self._sum())) if self._accept("\\over") else tree

    def _sum(self) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise UnreadableExpressionError("it is nested too deep")
        sign = self._take() if self._next() in ("+", "-") else ""
        tree = self._product()
        if sign == "-":
            tree = Operation("neg", (tree,))
        while (sign := self._next()) in ("+", "-"):
            self._take()
            tree = Operation(sign, (tree, self._product()))
        self._depth -= 1
        return tree

    def _product(self) -> Node:
        tree = factor = self._power()
        while True:
            token = self._next()
            if token in _PRODUCT_SIGNS:
                self._take()
                factor = Operation("neg", (self._power(),)) if self._accept("-") else self._power()
                tree = Operation(_PRODUCT_SIGNS[token], (tree, factor))
            elif token in ("\\mod", "\\bmod", "\\pmod"):
                self._take()
                factor = tree = Operation("mod", (tree, self._power()))
            elif self._starts_factor(token) or (
                token is not None
                and token[0].isdigit()
                and not isinstance(factor, Number)
                and (self._tokens[self._position + 1 :][:1] in (["^"], ["!"]) or self._is_counted(factor))  # n2^n, 5!3
            ):
                factor = self._power()
                tree = Operation("*", (tree, factor))
            elif token == "\\choose":
                self._take()
                factor = tree = Operation("binom", (tree, self._product()))
            else:
                return tree

    @staticmethod
    def _is_counted(factor: Node) -> bool:
        return isinstance(factor, Operation) and factor.operation in ("!", "!!", "binom")

    def _starts_factor(self, token: str | None) -> bool:
        """Whether a token goes on a product without a sign. A number does not: ``x2`` may lack a caret."""
        if token is None or token[0].isdigit() or token[0] in ".,":
            return False
        if token == "|":
            return not self._bars
        if token[0] == "\\":
            return token in _COMMANDS or token[1:] in FUNCTIONS or token[1:] in GREEK
        return token.isalpha() or token in "([{"

    def _power(self) -> Node:
        tree = self._base()
        while (token := self._next()) in ("^", "!", "\\degree"):
            self._take()
            if token == "^":
                tree = Operation("^", (tree, self._exponent()))
            elif token == "!" and self._accept("!"):
                if self._next() == "!":
                    raise UnreadableExpressionError("too many factorials")
                tree = Operation("!!", (tree,))
            else:
                tree = Operation("!" if token == "!" else "degrees", (tree,))
        return tree

    def _exponent(self) -> Node:
        if self._accept("-"):
            return Operation("neg", (self._exponent(),))
        tree = self._base()
        return Operation("^", (tree, self._exponent())) if self._accept("^") else tree  # 2^3^2 groups to the right

    def _base(self) -> Node:
        token = self._take()
        if token in "_^" or (
            token == "{" and self._tokens[self._position : self._position + 2] in (["}", "_"], ["}", "^"])
        ):  # _5C_2, ^5C_2 or _5P_2
            self._position += 2 * (token == "{")
            of, kind = self._argument(), self._take()
            if kind not in ("C", "P") or self._take() != "_":
                raise UnreadableExpressionError("a subscript of nothing")
            return self._chosen_of(kind, of, self._argument())
        if token[0].isdigit() or token[0] == ".":
            return Number(Fraction(token if token[0] != "." else f"0{token}"))
        if token in _CLOSING:
            return self._group(_CLOSING[token])
        if token == "|":
            self._bars += 1
            tree = self._sum()
            self._expect("|")
            self._bars -= 1
            return Operation("abs", (tree,))
        if token[0] == "\\" and token[1:] in FUNCTIONS:
            return self._function(token[1:])
        if token in _COMMANDS:
            return self._command(token)
        if token.isalpha() or token[1:] in GREEK:
            return self._symbol(token)
        raise UnreadableExpressionError(f"'{token}' starts nothing")

    def _group(self, closing: str) -> Node:
        bars, self._bars = self._bars, 0
        tree = self._quotient()
        self._expect(closing)
        self._bars = bars
        return tree

    def _symbol(self, name: str) -> Node:
        letter = name
        if name == "\\Gamma" and self._accept("("):
            return Operation("gamma", (self._group(")"),))
        while self._next() in ("_", "'"):
            name += self._take()
            if name[-1] == "_":
                name += "".join(iter(self._take, "}")) if self._accept("{") else self._take()
        if letter in ("C", "P", "A") and (selected := self._selected(name)) is not None:
            return selected
        if letter in _FUNCTION_NAMES:
            inverse = self._tokens[self._position : self._position + 6] == ["^", "{", "-", "1", "}", "("]
            if inverse:
                self._position += 5
                name += "^-1"
            if self._next() == "(":
                return Operation(f"call {name}", self._list())
        return Symbol(name)

    def _named_object(self, mark: str) -> Node:
        r"""Read the name of ``\triangle ABC`` or ``\vec v``, which is not a product of letters."""
        braced = self._accept("{")
        if braced and mark == "\\overline" and (conjugate := self._conjugate()) is not None:
            return conjugate
        letters = ""
        while (token := self._next()) is not None and token.isalpha() and (braced or not letters or token.isupper()):
            letters += self._take()
        if braced:
            self._expect("}")
        if not letters:
            raise UnreadableExpressionError(f"{mark} of nothing")
        return Symbol(f"{mark} {letters}")

    def _conjugate(self) -> Node | None:
        """Read a sum under a bar, behind its brace.

        Where it has no ``i`` in it, the letters are complex numbers, or random variables with a mean. A bar over a sum
        with numbers as coefficients means the same for both, and over a product it does not.
        """
        end = self._tokens.index("}", self._position) if "}" in self._tokens[self._position :] else self._position
        inside = self._tokens[self._position : end]
        if not {"+", "-"}.intersection(inside):
            return None
        tree = self._group("}")
        if "i" not in inside and not _is_linear(tree):
            raise UnreadableExpressionError("a bar over a product")
        for name in free_symbols(tree):
            if "i" not in inside or name[0] in "zw":  # in a + bi the letters are real
                tree = substitute(tree, name, Symbol(f"\\overline {name}"))
        return Operation("conj", (tree,))

    def _list(self) -> tuple[Node, ...]:
        closing = {"(": ")", "\\{": "\\}"}.get(self._take())
        if closing is None:
            raise UnreadableExpressionError("a function without its arguments")
        bars, self._bars = self._bars, 0
        arguments = [self._sum()]
        while self._accept(","):
            arguments.append(self._sum())
        self._expect(closing)
        self._bars = bars
        return tuple(arguments)

    def _chosen_of(self, kind: str, of: Node, count: Node) -> Node:
        found = Operation("binom", (of, count))
        return found if kind == "C" else Operation("*", (found, Operation("!", (count,))))

    def _selected(self, kind: str) -> Node | None:
        """Read ``C(6,3)``, ``P(n,2)`` or ``C_6^3``; ``None`` where nothing is chosen, as in ``C(x,y)`` or ``C_1^2``."""
        start = self._position
        if re.fullmatch(r"[CPA]_(?:\d+|\d*n(?:[-+]\d+)?)", kind) and self._accept("^"):
            of, count = parse_expression(kind[2:]), self._exponent()
            if isinstance(of, Number) and isinstance(count, Number):
                is_choice = of.value >= count.value
            else:
                is_choice = not isinstance(of, Number) and count != Operation("neg", (Number(Fraction(1)),))
            if is_choice:
                return self._chosen_of(kind[0], of, count)
            self._position = start
        if kind not in ("C", "P"):
            return None
        opening, of, comma, count, closing = [*self._tokens[self._position : self._position + 5], *[""] * 5][:5]
        numbers = of.isdigit() and count.isdigit() and int(of) >= int(count)
        letters = of in ("n", "m", "N") and count.isalnum()
        if (opening, comma, closing) != ("(", ",", ")") or not (numbers or letters):
            return None
        return self._chosen_of(kind, *self._list())

    def _argument(self) -> Node:
        r"""Read an argument of ``\frac`` or ``\sqrt``: a group, one digit, or one other token."""
        token = self._next()
        if token is not None and token.isdigit() and len(token) > 1:
            self._tokens[self._position : self._position + 1] = list(token)
        if token in ("{", "("):
            self._take()
            return self._group(_CLOSING[token])
        return self._base()

    def _command(self, name: str) -> Node:
        match name:
            case "\\frac":
                over, under = self._argument(), self._argument()
                if _is_differential(over) and _is_differential(under) and under != Symbol("d"):
                    raise UnreadableExpressionError("a derivative that was not computed")
                return Operation("/", (over, under))
            case "\\binom":
                return Operation("binom", (self._argument(), self._argument()))
            case "\\lfloor":
                return Operation("floor", (self._group("\\rfloor"),))
            case "\\lceil":
                return Operation("ceil", (self._group("\\rceil"),))
            case "\\gcd" | "\\lcm" | "\\max" | "\\min":
                return Operation(name[1:], self._list())
            case _ if name[1:] in PRINTED_FUNCTIONS:
                return Operation(PRINTED_FUNCTIONS[name[1:]], (self._argument(),))
            case "\\pi" | "\\infty" | "\\ei" | "\\ej" | "\\ek":
                return Symbol(name)
            case _:
                return self._named_object(name)

    def _function(self, name: str) -> Node:
        if name == "sqrt":
            index = self._group("]") if self._accept("[") else Number(Fraction(2))
            token = self._next()
            if token is not None and token.isdigit():  # sqrt 12 in plain text is the root of twelve
                return Operation("root", (index, Number(Fraction(self._take()))))
            return Operation("root", (index, self._argument()))
        base = None
        exponent = None
        while self._next() in ("_", "^"):
            if self._take() == "_":
                base = self._argument()
            else:
                exponent = self._exponent()
        if exponent == Operation("neg", (Number(Fraction(1)),)):
            if f"arc{name}" not in FUNCTIONS:
                raise UnreadableExpressionError(f"\\{name}^{{-1}} may be its inverse or one over it")
            name, exponent = f"arc{name}", None
        argument = self._function_argument()
        tree = Operation(name, (argument,)) if base is None else Operation("logarithm", (base, argument))
        if base is not None and name != "log":
            raise UnreadableExpressionError(f"\\{name} has no subscript")
        return tree if exponent is None else Operation("^", (tree, exponent))

    def _function_argument(self) -> Node:
        if self._next() in ("(", "{", "["):
            tree = self._base()
            while self._accept("\\degree"):  # no other sign: sin(x)^2 is a squared sine
                tree = Operation("degrees", (tree,))
            return tree
        tree = self._power()
        while True:
            token = self._next()
            if token is not None and token[1:] in FUNCTIONS:
                return tree
            if token in ("\\cdot", "*") or not self._starts_factor(token) or token in ("(", "["):
                return tree
            tree = Operation("*", (tree, self._power()))


def _is_linear(tree: Node) -> bool:
    """Whether a tree is a sum of variables with numbers as coefficients."""
    match tree:
        case Operation("+" | "-" | "neg", arguments):
            return all(map(_is_linear, arguments))
        case Operation("*", (left, right)):
            return not (free_symbols(left) and free_symbols(right)) and _is_linear(left) and _is_linear(right)
        case Operation("/", (left, right)):
            return _is_linear(left) and isinstance(right, Number)
        case Symbol(name):
            return not name[0].isupper()  # events and statements, of which a bar is the negation
        case _:
            return isinstance(tree, Number)


def _is_differential(tree: Node) -> bool:
    """Whether a tree starts with ``d``, as ``d``, ``d^2 y`` and ``dx`` do."""
    while isinstance(tree, Operation) and tree.operation in ("*", "^"):
        tree = tree.arguments[0]
    return tree == Symbol("d")


def _tokens(text: str) -> list[str]:
    tokens: list[str] = []
    position, end = 0, len(text.rstrip())
    while position < end:
        match = _TOKEN.match(text, position)
        if match is None:
            raise UnreadableExpressionError(f"'{text[position : position + 10]}' is no mathematics")
        tokens.append(match[0].strip())
        position = match.end()
    return tokens
