r"""Reading one mathematical expression, written as LaTeX or as plain text, into a tree.

Strict: the whole text must be an expression. What could mean two things to a reader (``3 4``, ``x2``) is refused, since
a lenient reading of a wrong answer is a wrong reward.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

MAX_DEPTH = 60
"""Deepest nesting that is read; answers of people have less than ten."""

FUNCTIONS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan arccot arcsec arccsc sinh cosh tanh coth sech csch arcsinh arccosh "
    "arctanh asin acos atan asinh acosh atanh arsinh arcosh artanh ln log lg exp sqrt cbrt cis sgn".split()
)
GREEK = frozenset(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta kappa lambda mu nu xi rho sigma tau phi varphi "
    "chi psi omega Gamma Delta Theta Lambda Sigma Phi Psi Omega ell".split()
)
UNIT_VECTORS = ("\\ei", "\\ej", "\\ek")
"""How ``plain`` spells unit vectors, which are printed bold or under a hat."""

CALLED = frozenset("f g h F G H P \\varphi \\phi".split())
"""Names of functions: brackets behind one hold its arguments. Behind other letters they are a factor."""

FOREIGN = re.compile(r"\\(?:int|iint|sum|prod|lim)(?![a-zA-Z])")
"""Commands whose expressions are left to math-verify's grammar."""

OPERATORS = frozenset({"gcd", "lcm", "max", "min", "mod"})
"""Operations that a question asks to carry out, as it does with those of the library's grammar."""

_TOKEN = re.compile(r"\s*(?:(\d+(?:\.\d+)?|\.\d+)|(\\[a-zA-Z]+|\\[{}])|([a-zA-Z])|([-+*/^_!()\[\]{}|',]))")


class UnreadableError(ValueError):
    """The text is not one expression."""


@dataclass(frozen=True, slots=True)
class Number:
    """A rational number."""

    value: Fraction


@dataclass(frozen=True, slots=True)
class Symbol:
    r"""A variable, a parameter, a named object, or one of the constants ``e``, ``i``, ``\\pi``, ``\\infty``."""

    name: str


@dataclass(frozen=True, slots=True)
class Apply:
    """An operation or a function, by name; one that is not known (``f(2)``) has a name that starts with ``call``."""

    operation: str
    arguments: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Foreign:
    """A whole expression in math-verify's grammar."""

    text: str


Node = Number | Symbol | Apply | Foreign

CONSTANTS = frozenset({"e", "i", "\\pi", "\\infty"})


def read_expression(text: str) -> Node:
    r"""Return the tree of a text.

    Raises:
        UnreadableError: the text is not one expression, breaks off (``\ldots``), or is too deep.
    """
    if FOREIGN.search(text):
        if "\\ldots" in text:
            raise UnreadableError("something is left out")
        return Foreign(text)
    return _Parser(_tokens(text)).whole()


def symbols(node: Node) -> frozenset[str]:
    """Return the names of the variables of a tree; constants are none. A foreign expression's are not known."""
    match node:
        case Symbol(name):
            return frozenset() if name in CONSTANTS else frozenset({name})
        case Apply(_, arguments):
            return frozenset[str]().union(*map(symbols, arguments))
        case _:
            return frozenset()


def substitute(node: Node, name: str, by: Node) -> Node:
    """Return the tree with a tree in place of a variable.

    Raises:
        UnreadableError: the tree is in the library's grammar.
    """
    match node:
        case Symbol(own):
            return by if own == name else node
        case Apply(operation, arguments):
            return Apply(operation, tuple(substitute(argument, name, by) for argument in arguments))
        case Foreign():
            raise UnreadableError("a foreign expression")
        case Number():
            return node


def _tokens(text: str) -> list[str]:
    tokens: list[str] = []
    position, end = 0, len(text.rstrip())
    while position < end:
        match = _TOKEN.match(text, position)
        if match is None:
            raise UnreadableError(f"'{text[position : position + 10]}' is no mathematics")
        tokens.append(match[0].strip())
        position = match.end()
    return tokens


class _Parser:
    """Recursive descent, one token ahead."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._position = 0
        self._depth = 0
        self._bars = 0

    def whole(self) -> Node:
        tree = self._sum()
        if self._next() is not None:
            raise UnreadableError(f"'{self._next()}' is left over")
        return tree

    def _next(self) -> str | None:
        return self._tokens[self._position] if self._position < len(self._tokens) else None

    def last(self) -> str:
        return self._tokens[self._position - 1]

    def _take(self) -> str:
        token = self._next()
        if token is None:
            raise UnreadableError("it ends too early")
        self._position += 1
        return token

    def _expect(self, token: str) -> None:
        if (found := self._take()) != token:
            raise UnreadableError(f"'{token}' is missing before '{found}'")

    def _sum(self) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise UnreadableError("it is nested too deep")
        tree = self._signed()
        while (sign := self._next()) in ("+", "-"):
            self._take()
            tree = Apply(sign, (tree, self._product()))
        self._depth -= 1
        return tree

    def _signed(self) -> Node:
        if self._next() in ("+", "-"):
            sign = self._take()
            tree = self._product()
            return Apply("neg", (tree,)) if sign == "-" else tree
        return self._product()

    def _product(self) -> Node:
        tree = factor = self._power()
        while True:
            token = self._next()
            if token in ("*", "\\cdot", "\\times"):
                self._take()
                factor = self._signed_power()
                tree = Apply("*", (tree, factor))
            elif token in ("/", "\\div"):
                self._take()
                factor = self._signed_power()
                tree = Apply("/", (tree, factor))
            elif token in ("\\mod", "\\bmod", "\\pmod"):
                self._take()
                factor = tree = Apply("mod", (tree, self._power()))
            elif self._starts_factor(token) or (_ends_itself(factor) and token is not None and token[0].isdigit()):
                factor = self._power()
                tree = Apply("*", (tree, factor))
            elif token == "\\choose":
                self._take()
                factor = tree = Apply("binom", (tree, self._product()))
            else:
                return tree

    def _signed_power(self) -> Node:
        if self._next() == "-":
            self._take()
            return Apply("neg", (self._power(),))
        return self._power()

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
        return self._raised(self._base())

    def _raised(self, tree: Node) -> Node:
        while (token := self._next()) in ("^", "!", "\\degree"):
            self._take()
            if token == "^":
                tree = Apply("^", (tree, self._exponent()))
            elif token == "!" and self._next() == "!":
                self._take()
                if self._next() == "!":
                    raise UnreadableError("too many factorials")
                tree = Apply("!!", (tree,))
            else:
                tree = Apply("!" if token == "!" else "degrees", (tree,))
        return tree

    def _exponent(self) -> Node:
        if self._next() == "-":
            self._take()
            return Apply("neg", (self._exponent(),))
        tree = self._base()
        if self._next() == "^":  # 2^3^2 groups to the right
            self._take()
            return Apply("^", (tree, self._exponent()))
        return tree

    def _base(self) -> Node:
        token = self._take()
        if token in "_^" or (
            token == "{" and self._tokens[self._position : self._position + 2] in (["}", "_"], ["}", "^"])
        ):
            self._position += 2 * (token == "{")
            return self._selection()
        if token[0].isdigit() or token[0] == ".":
            return Number(Fraction(token if token[0] != "." else f"0{token}"))
        if token in _CLOSING:
            return self._group(_CLOSING[token])
        if token == "|":
            self._bars += 1
            tree = self._sum()
            self._expect("|")
            self._bars -= 1
            return Apply("abs", (tree,))
        if token[0] == "\\" and token[1:] in FUNCTIONS:
            return self._function(token[1:])
        if token in _COMMANDS:
            return _COMMANDS[token](self)
        if token.isalpha() or token[1:] in GREEK:
            return self._symbol(token)
        raise UnreadableError(f"'{token}' starts nothing")

    def _group(self, closing: str) -> Node:
        bars, self._bars = self._bars, 0
        tree = self._sum()
        self._expect(closing)
        self._bars = bars
        return tree

    def _symbol(self, name: str) -> Node:
        letter = name
        if name == "\\Gamma" and self._next() == "(":
            self._take()
            return Apply("gamma", (self._group(")"),))
        while self._next() in ("_", "'"):
            mark = self._take()
            name += mark if mark == "'" else f"_{self._subscript()}"
        if name in ("C", "P") and (selected := self._selected(name)) is not None:
            return selected
        if letter in CALLED:
            inverse = self._tokens[self._position : self._position + 6] == ["^", "{", "-", "1", "}", "("]
            if inverse:
                self._position += 5
                name += "^-1"
            if self._next() == "(":
                return Apply(f"call {name}", self._list())
        return Symbol(name)

    def named(self) -> Node:
        r"""Read ``\triangle ABC`` or ``\vec v``: an object with a name, which is not a product of letters."""
        mark, braced = self.last(), self._next() == "{"
        if braced:
            self._take()
            if mark == "\\overline" and (conjugate := self._conjugate()) is not None:
                return conjugate
        letters = ""
        while (token := self._next()) is not None and token.isalpha() and (braced or not letters or token.isupper()):
            letters += self._take()
        if braced:
            self._expect("}")
        if not letters:
            raise UnreadableError(f"{mark} of nothing")
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
            raise UnreadableError("a bar over a product")
        for name in symbols(tree):
            if "i" not in inside or name[0] in "zw":  # in a + bi the letters are real
                tree = substitute(tree, name, Symbol(f"\\overline {name}"))
        return Apply("conj", (tree,))

    def chosen(self) -> Node:
        r"""Read the arguments of ``\gcd(12, 18)`` or ``\max\{a, b\}`` behind its name."""
        return Apply(self.last().removeprefix("\\"), self._list())

    def _list(self) -> tuple[Node, ...]:
        """Read arguments with commas between them, brackets included."""
        closing = {"(": ")", "\\{": "\\}"}.get(self._take())
        if closing is None:
            raise UnreadableError("a function without its arguments")
        bars, self._bars = self._bars, 0
        arguments = [self._sum()]
        while self._next() == ",":
            self._take()
            arguments.append(self._sum())
        self._expect(closing)
        self._bars = bars
        return tuple(arguments)

    def _selection(self) -> Node:
        """Read ``_5C_2``, ``^5C_2`` or ``_5P_2`` behind its first sign."""
        of = self._argument()
        kind = self._take()
        if kind not in ("C", "P") or self._take() != "_":
            raise UnreadableError("a subscript of nothing")
        return self._chosen_of(kind, of, self._argument())

    def _chosen_of(self, kind: str, of: Node, count: Node) -> Node:
        found = Apply("binom", (of, count))
        return found if kind == "C" else Apply("*", (found, Apply("!", (count,))))

    def _selected(self, kind: str) -> Node | None:
        """Read the brackets of ``C(6,3)`` or ``P(n,2)``; ``None`` where they choose nothing, as in ``C(x,y)``."""
        opening, of, comma, count, closing = [*self._tokens[self._position : self._position + 5], *[""] * 5][:5]
        numbers = of.isdigit() and count.isdigit() and int(of) >= int(count)
        letters = of in ("n", "m", "N") and count.isalnum()
        if (opening, comma, closing) != ("(", ",", ")") or not (numbers or letters):
            return None
        return self._chosen_of(kind, *self._list())

    def _subscript(self) -> str:
        token = self._take()
        if token != "{":
            return token
        parts: list[str] = []
        while (token := self._take()) != "}":
            parts.append(token)
        return "".join(parts)

    def _argument(self) -> Node:
        r"""Read what follows ``\frac`` or ``\sqrt``: a group, or one token, of which digits count singly."""
        token = self._next()
        if token is not None and token.isdigit() and len(token) > 1:
            self._tokens[self._position : self._position + 1] = list(token)
        if token in ("{", "("):
            self._take()
            return self._group(_CLOSING[token])
        return self._base()

    def fraction(self) -> Node:
        over, under = self._argument(), self._argument()
        if _is_differential(over) and _is_differential(under) and under != Symbol("d"):
            raise UnreadableError("a derivative that was not computed")
        return Apply("/", (over, under))

    def binomial(self) -> Node:
        return Apply("binom", (self._argument(), self._argument()))

    def rounded(self, operation: str, closing: str) -> Node:
        return Apply(operation, (self._group(closing),))

    def _function(self, name: str) -> Node:
        if name == "sqrt":
            return self._root()
        base = None
        exponent = None
        while self._next() in ("_", "^"):
            if self._take() == "_":
                base = self._argument()
            else:
                exponent = self._exponent()
        inverse = exponent == Apply("neg", (Number(Fraction(1)),)) and f"arc{name}" in FUNCTIONS
        if inverse:
            name, exponent = f"arc{name}", None
        elif exponent == Apply("neg", (Number(Fraction(1)),)):
            raise UnreadableError(f"\\{name}^{{-1}} may be its inverse or one over it")
        argument = self._function_argument()
        tree = Apply(name, (argument,)) if base is None else Apply("logarithm", (base, argument))
        if base is not None and name != "log":
            raise UnreadableError(f"\\{name} has no subscript")
        return tree if exponent is None else Apply("^", (tree, exponent))

    def _root(self) -> Node:
        index: Node = Number(Fraction(2))
        if self._next() == "[":
            self._take()
            index = self._group("]")
        token = self._next()
        if token is not None and token.isdigit():  # sqrt 12 in plain text is the root of twelve
            return Apply("root", (index, Number(Fraction(self._take()))))
        return Apply("root", (index, self._argument()))

    def _function_argument(self) -> Node:
        if self._next() in ("(", "{", "["):
            return self._raised_inside(self._base())
        tree = self._power()
        while True:
            token = self._next()
            if token is not None and token[1:] in FUNCTIONS:
                return tree
            if token in ("\\cdot", "*") or not self._starts_factor(token) or token in ("(", "["):
                return tree
            tree = Apply("*", (tree, self._power()))

    def _raised_inside(self, tree: Node) -> Node:
        r"""Only the degree sign after a bracket belongs to the argument: ``\\sin(x)^2`` is a squared sine."""
        while self._next() == "\\degree":
            self._take()
            tree = Apply("degrees", (tree,))
        return tree


def _is_differential(tree: Node) -> bool:
    """Whether a tree starts with ``d``, as ``d``, ``d^2 y`` and ``dx`` do."""
    while isinstance(tree, Apply) and tree.operation in ("*", "^"):
        tree = tree.arguments[0]
    return tree == Symbol("d")


def _is_linear(tree: Node) -> bool:
    """Whether a tree is a sum of variables with numbers as coefficients."""
    match tree:
        case Apply("+" | "-" | "neg", arguments):
            return all(map(_is_linear, arguments))
        case Apply("*", (left, right)):
            return not (symbols(left) and symbols(right)) and _is_linear(left) and _is_linear(right)
        case Apply("/", (left, right)):
            return _is_linear(left) and isinstance(right, Number)
        case Symbol(name):
            return not name[0].isupper()  # events and statements, of which a bar is the negation
        case _:
            return isinstance(tree, Number)


def _ends_itself(factor: Node) -> bool:
    """Whether a number may follow without a sign, as in ``5!3!``."""
    return isinstance(factor, Apply) and factor.operation in ("!", "!!", "binom")


_CLOSING = {"(": ")", "[": "]", "{": "}"}
_COMMANDS: dict[str, Callable[[_Parser], Node]] = {
    "\\frac": _Parser.fraction,
    "\\binom": _Parser.binomial,
    "\\lfloor": lambda parser: parser.rounded("floor", "\\rfloor"),
    "\\lceil": lambda parser: parser.rounded("ceil", "\\rceil"),
    "\\pi": lambda _: Symbol("\\pi"),
    "\\infty": lambda _: Symbol("\\infty"),
    **{f"\\{name}": _Parser.chosen for name in OPERATORS - {"mod"}},
    **{name: lambda parser: Symbol(parser.last()) for name in UNIT_VECTORS},
    **dict.fromkeys(
        ("\\mathbb", "\\triangle", "\\angle", "\\overline", "\\vec", "\\overrightarrow", "\\hat", "\\odot"),
        _Parser.named,
    ),
}
