"""A small project as a source distribution, and a fake package index that has it."""

import hashlib
import zipfile
from collections.abc import Sequence
from pathlib import Path

from prorl_gym.data.sdist.source_tree import SourceFile, pack_tree

METADATA = "Metadata-Version: 2.1\nName: tiny-shop\nVersion: 1.2\nRequires-Python: >=3.8\n"

PRICES = '''"""Prices."""


def total(prices):
    """Add prices up."""
    result = 0
    for price in prices:
        if price > 0:
            result += price
    return result


def discount(price, percent):
    if percent > 100 or percent < 0:
        raise ValueError("no such discount")
    return price - price * percent // 100
'''

STOCK = '''"""What is there."""


def take(stock, name, count):
    left = stock.get(name, 0)
    if left < count:
        return False
    stock[name] = left - count
    return True


def names(stock):
    return sorted(name for name, count in stock.items() if count >= 1)
'''

TEST_PRICES = """import unittest

import pytest

from shop.prices import discount, total


def test_total():
    assert total([1, 2, 3]) == 6


def test_total_of_nothing():
    assert total([]) == 0


def test_total_skips_what_was_given_back():
    assert total([5, -2]) == 5


@pytest.mark.parametrize("price,percent,left", [(100, 0, 100), (100, 100, 0), (50, 10, 45)])
def test_discount(price, percent, left):
    assert discount(price, percent) == left


class Refused(unittest.TestCase):
    def test_too_much(self):
        with self.assertRaises(ValueError):
            discount(1, 101)

    def test_negative(self):
        with self.assertRaises(ValueError):
            discount(1, -1)
"""

TEST_STOCK = """from shop.stock import names, take


class Common:
    def test_takes_all(self):
        assert take(self.stock(), "b", 1) is True


class TestStock(Common):
    def stock(self):
        return {"b": 1, "a": 3, "c": 0}

    def test_take(self):
        stock = self.stock()
        assert take(stock, "a", 2) is True
        assert stock == {"b": 1, "a": 1, "c": 0}

    def test_too_few(self):
        assert take(self.stock(), "b", 2) is False

    def test_unknown(self):
        assert take(self.stock(), "x", 1) is False

    def test_names(self):
        assert names(self.stock()) == ["a", "b"]
"""

TINY: dict[str, str] = {
    "PKG-INFO": METADATA,
    "README.md": "A shop.\n",
    "src/shop/__init__.py": "",
    "src/shop/prices.py": PRICES,
    "src/shop/stock.py": STOCK,
    "tests/test_prices.py": TEST_PRICES,
    "tests/test_stock.py": TEST_STOCK,
}


def sdist(path: Path) -> Path:
    path.write_bytes(pack_tree({f"tiny_shop-1.2/{name}": SourceFile(text.encode()) for name, text in TINY.items()}))
    return path


def wheel(folder: Path, name: str, requires: Sequence[str] = ()) -> Path:
    """Make a wheel of one empty module."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    needs = "".join(f"Requires-Dist: {line}\n" for line in requires)
    files = {
        f"{name}.py": "",
        f"{name}-1.0.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needs}",
        f"{name}-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for inner, text in {**files, f"{name}-1.0.dist-info/RECORD": "".join(f"{each},,\n" for each in files)}.items():
            archive.writestr(inner, text)
    return path


def index(folder: Path, distribution: Path, project: str = "tiny-shop", sha256: str = "") -> str:
    """Make a simple index of one project; return its URL."""
    page = folder / "simple" / project / "index.html"
    page.parent.mkdir(parents=True)
    stated = sha256 or hashlib.sha256(distribution.read_bytes()).hexdigest()
    link = f'<a href="{distribution.as_uri()}#sha256={stated}">{distribution.name}</a>'
    page.write_text(f"<!DOCTYPE html><html><body>{link}</body></html>")
    return (folder / "simple").as_uri()
