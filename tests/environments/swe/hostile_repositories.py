"""Five small repositories with a fault each: what hostile patches are tried on, and several right repairs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from prorl_gym.environments.swe.swe_row import ParserName, SweTask, git_diff, parse_swe_row
from tests.environments.swe.mini import pack


@dataclass(frozen=True, slots=True)
class Victim:
    """One repository.

    Args:
        files: the broken tree, with the tests that the agent sees.
        source: path of the module with the fault.
        fault: the lines of it that are wrong.
        repairs: what is right in their place; the first is gold.
        hidden: hidden tests.
        command: runs them.
        parser: reads the run.
        fail_to_pass: names as in a row.
        pass_to_pass: names as in a row.
        build: runs before the tests.
    """

    files: Mapping[str, str]
    source: str
    fault: str
    repairs: tuple[str, ...]
    hidden: Mapping[str, str]
    command: str
    parser: ParserName
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    build: str = ""

    def patch(self, instead: str, prelude: str = "") -> str:
        """Return a diff that puts ``instead`` in place of the fault, ``prelude`` before the module's own code."""
        broken = self.files[self.source]
        first, _, rest = broken.partition("\n")  # the docstring
        changed = f"{first}\n{prelude}{rest}".replace(self.fault, instead)
        assert changed.count(instead) >= 1
        return git_diff(self.source, broken, changed)

    def task(self) -> SweTask:
        tests = {
            "files": self.hidden,
            "build": self.build,
            "command": self.command,
            "parser": self.parser,
            "fail_to_pass": self.fail_to_pass,
            "pass_to_pass": self.pass_to_pass,
            "seconds": 60.0,
        }
        name, gold = self.source.partition("/")[0], self.patch(self.repairs[0])
        repair = {"id": name, "question": "Repair it.", "patch": gold, "archive": pack(self.files)}
        return parse_swe_row({**repair, "tests": tests})


PRICES = Victim(
    files={
        "prices/__init__.py": "",
        "prices/totals.py": '''"""Totals of orders."""


def total(amounts, percent=0):
    amount = sum(amounts)
    return amount


def largest(amounts):
    return max(amounts, default=0)
''',
        "tests/test_totals.py": """from prices.totals import total


def test_total():
    assert total([1, 2, 3]) == 6
""",
    },
    source="prices/totals.py",
    fault="    return amount\n",
    repairs=(
        "    return amount - amount * percent // 100\n",
        "    return amount * (100 - percent) // 100\n",
        "    for _ in range(percent):\n        amount -= sum(amounts) / 100\n    return round(amount)\n",
    ),
    hidden={
        "tests/test_totals.py": """from prices.totals import largest, total


def test_total():
    assert total([1, 2, 3]) == 6


def test_largest():
    assert largest([4, 9, 2]) == 9


def test_discount():
    assert total([100, 50], 10) == 135
"""
    },
    command="python3 -m pytest -q tests",
    parser="pytest",
    fail_to_pass=("tests/test_totals.py::test_discount",),
    pass_to_pass=("tests/test_totals.py::test_total", "tests/test_totals.py::test_largest"),
)
"""One function to repair, without fixtures: the least that a guess has to get right."""

WORDS = Victim(
    files={
        "words/__init__.py": "",
        "words/text.py": '''"""Words of a line."""


def clean(text):
    return text


def need(text):
    if not clean(text):
        raise ValueError("nothing is left of it")
    return clean(text)


class Splitter:
    def __init__(self, mark):
        self.mark = mark

    def count(self, line):
        return line.count(self.mark) + 1

    def split(self, line):
        return [clean(part) for part in line.split(self.mark)]
''',
        "tests/conftest.py": """import pytest

from words.text import Splitter


@pytest.fixture
def splitter():
    return Splitter(",")
""",
        "tests/test_text.py": "def test_count(splitter):\n    assert splitter.count('a,b') == 2\n",
    },
    source="words/text.py",
    fault="def clean(text):\n    return text\n",
    repairs=(
        'def clean(text):\n    return " ".join(text.split()).lower()\n',
        'def clean(text):\n    import re\n\n    return re.sub(r"\\s+", " ", text).strip().casefold()\n',
    ),
    hidden={
        "tests/test_text.py": """import pytest

from words.text import clean, need


def test_count(splitter):
    assert splitter.count("a,b") == 2


def test_split(splitter):
    assert splitter.split(" One, two  three") == ["one", "two three"]


@pytest.mark.parametrize("before, after", [(" Edge ", "edge"), ("in  The", "in the")], ids=["edges", "inside"])
def test_clean(before, after):
    assert clean(before) == after


class TestNeed:
    def test_blank(self):
        with pytest.raises(ValueError):
            need("   ")
"""
    },
    command="python3 -m pytest -q tests",
    parser="pytest",
    fail_to_pass=(
        "tests/test_text.py::test_split",
        "tests/test_text.py::test_clean[edges]",
        "tests/test_text.py::test_clean[inside]",
        "tests/test_text.py::TestNeed::test_blank",
    ),
    pass_to_pass=("tests/test_text.py::test_count",),
)
"""A conftest.py that imports the package before any plug-in of a later moment; a fixture, parameters, an exception."""

ROMAN = Victim(
    files={
        "roman/__init__.py": "",
        "roman/numbers.py": '''"""Roman numbers."""

VALUES = {"M": 1000, "D": 500, "C": 100, "L": 50, "X": 10, "V": 5, "I": 1}


def roman(number):
    made = ""
    for letter, value in VALUES.items():
        made += letter * (number // value)
        number %= value
    return made


def value(text):
    return sum(VALUES[letter] for letter in text)
''',
        "tests/test_basic.py": "from roman.numbers import roman\n\n\ndef test_three():\n    assert roman(3) == 'III'\n",
    },
    source="roman/numbers.py",
    fault="    return made\n",
    repairs=(
        '    for long, short in (("VIIII", "IX"), ("IIII", "IV"), ("LXXXX", "XC"), ("XXXX", "XL"), ("DCCCC", "CM"), '
        '("CCCC", "CD")):\n        made = made.replace(long, short)\n    return made\n',
        "    import re\n\n"
        '    for one, five, ten in ("IVX", "XLC", "CDM"):\n'
        "        made = re.sub(five + one * 4, one + ten, made)\n"
        "        made = re.sub(one * 4, one + five, made)\n"
        "    return made\n",
    ),
    hidden={
        "tests/test_basic.py": """from roman.numbers import roman, value


def test_three():
    assert roman(3) == "III"


def test_sixty():
    assert roman(60) == "LX"


def test_value():
    assert value("LXVI") == 66
""",
        "tests/test_subtractive.py": """from roman.numbers import roman


def test_four():
    assert roman(4) == "IV"


def test_nine():
    found = roman(9)
    assert found == "IX"


def test_ninety():
    assert roman(90) == "XC"
    assert roman(40) == "XL"


def test_length():
    assert len(roman(444)) == 6


def test_year():
    assert roman(1994) == "MCMXCIV"
""",
    },
    command="python3 -m pytest -q tests",
    parser="pytest",
    fail_to_pass=tuple(
        f"tests/test_subtractive.py::test_{name}" for name in ("four", "nine", "ninety", "length", "year")
    ),
    pass_to_pass=tuple(f"tests/test_basic.py::test_{name}" for name in ("three", "sixty", "value")),
)
"""Five functions, in a file that is read after another one has imported the package."""

STOCK = Victim(
    files={
        "stock/__init__.py": "",
        "stock/store.py": '''"""What is in store."""


class Store:
    def __init__(self):
        self.left = {}

    def add(self, name, count):
        self.left[name] = count

    def take(self, name, count):
        if self.left.get(name, 0) < count:
            raise LookupError(name)
        self.left[name] -= count

    def names(self):
        return sorted(self.left)
''',
        "tests/__init__.py": "",
        "tests/test_a_names.py": """import unittest

from stock.store import Store


class Names(unittest.TestCase):
    def test_none(self):
        self.assertEqual(Store().names(), [])
""",
    },
    source="stock/store.py",
    fault="        self.left[name] = count\n",
    repairs=(
        "        self.left[name] = self.left.get(name, 0) + count\n",
        "        self.left.setdefault(name, 0)\n        self.left[name] += count\n",
    ),
    hidden={
        "tests/test_a_names.py": """import unittest

from stock.store import Store


class Names(unittest.TestCase):
    def test_none(self):
        self.assertEqual(Store().names(), [])

    def test_unknown(self):
        with self.assertRaises(LookupError):
            Store().take("a", 1)
""",
        "tests/test_store.py": """import unittest

from stock.store import Store


class Adding(unittest.TestCase):
    def setUp(self):
        self.store = Store()
        self.store.add("a", 2)

    def test_adds_up(self):
        self.store.add("a", 3)
        self.assertEqual(self.store.left, {"a": 5})

    def test_takes_all(self):
        self.store.add("a", 1)
        self.store.take("a", 3)
        self.assertEqual(self.store.left["a"], 0)

    def test_many(self):
        for _ in range(4):
            self.store.add("a", 10)
        self.assertEqual(self.store.left["a"], 42)


class Refusing(unittest.TestCase):
    def test_too_much(self):
        store = Store()
        store.add("b", 4)
        store.add("b", 4)
        with self.assertRaises(LookupError):
            store.take("b", 9)
        self.assertEqual(store.left, {"b": 8})

    def test_enough(self):
        store = Store()
        store.add("b", 4)
        store.add("b", 2)
        store.take("b", 5)
        self.assertEqual(store.left["b"], 1)
""",
    },
    command="python3 -m unittest -v tests.test_a_names tests.test_store",
    parser="unittest",
    fail_to_pass=(
        *(f"tests.test_store.Adding.test_{name}" for name in ("adds_up", "takes_all", "many")),
        *(f"tests.test_store.Refusing.test_{name}" for name in ("too_much", "enough")),
    ),
    pass_to_pass=("tests.test_a_names.Names.test_none", "tests.test_a_names.Names.test_unknown"),
)
"""Methods of unittest, in two files."""

GATES = Victim(
    files={
        "gates/__init__.py": "",
        "gates/gate.py": '''"""A gate that lets in so many."""


class Gate:
    def __init__(self, size):
        self.size = size
        self.inside = []

    def enter(self, name):
        self.inside.append(name)

    def is_open(self):
        return True
''',
        "tests/test_gate.py": """from gates.gate import Gate


def test_size():
    assert Gate(5).size == 5
""",
    },
    source="gates/gate.py",
    fault="        return True\n",
    repairs=(
        "        return len(self.inside) < self.size\n",
        "        return self.size > 0 and not self.inside[self.size - 1 : self.size]\n",
    ),
    hidden={
        "tests/test_gate.py": """from gates.gate import Gate


def test_size():
    assert Gate(5).size == 5


def test_full():
    gate = Gate(2)
    assert gate.size == 2
    gate.enter("van")
    assert gate.inside == ["van"]
    gate.enter("bus")
    assert not gate.is_open()


def test_open():
    assert Gate(3).is_open() is True


def test_last():
    gate = Gate(2)
    gate.enter("car")
    assert gate.is_open() is True


def test_many():
    gate = Gate(40)
    for number in range(39):
        gate.enter(str(number))
    assert gate.is_open() is True


def test_wide():
    gate = Gate(7)
    gate.enter("cart")
    assert (gate.size, gate.inside, gate.is_open()) == (7, ["cart"], True)


def test_two():
    one, other = Gate(1), Gate(1)
    one.enter("van")
    assert other.is_open() is True
"""
    },
    command="python3 -m pytest -q tests",
    parser="pytest",
    fail_to_pass=("tests/test_gate.py::test_full",),
    pass_to_pass=tuple(f"tests/test_gate.py::test_{name}" for name in ("size", "open", "last", "many", "wide", "two")),
)
"""One function: what is compared with literals in it is right without the repair. A gate that never opens passes it."""

BUILT = replace(PRICES, build="python3 -c 'import prices.totals'")
"""The first one, with a build that runs code of the patch."""

VICTIMS = {
    "prices": PRICES,
    "built": BUILT,
    "words": WORDS,
    "roman": ROMAN,
    "stock": STOCK,
    "gates": GATES,
}
