"""``docs/client.md`` says what the client has, and its examples are Python; the two clients have the same calls."""

import ast
import inspect
import re
import runpy
import textwrap
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from prorl_gym.client import Client, CompletedGroup, SyncClient
from prorl_gym.client.async_client import BATCH_BYTES, BATCH_ROLLOUTS
from prorl_gym.client.record_stream import ACKNOWLEDGE_RECORDS, ACKNOWLEDGE_SECONDS
from prorl_gym.trainers.mismatch import Mismatch

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "client.md").read_text(encoding="utf-8")


def calls(kind: type) -> dict[str, list[str]]:
    """Public methods with their parameters."""
    return {
        name: list(inspect.signature(method).parameters)
        for name, method in vars(kind).items()
        if inspect.isfunction(method) and not name.startswith("_")
    }


def test_both_clients_have_the_same_calls() -> None:
    assert calls(Client) == calls(SyncClient)
    assert (
        inspect.signature(Client.__init__).parameters.keys() == inspect.signature(SyncClient.__init__).parameters.keys()
    )


def test_the_table_names_every_call_and_its_route() -> None:
    rows = re.findall(r"^\| (`.*?`) \| (`.*?`) \|$", PAGE.partition("## All calls")[2], re.MULTILINE)
    named = {name for call, _ in rows for name in re.findall(r"`?(\w+)\(", call)}
    assert named == set(calls(Client)) - {"close"}


def test_the_routes_are_there() -> None:
    known = runpy.run_path(str(ROOT / "scripts" / "api_page.py"))["document"]()["paths"]
    for path in re.findall(r"(/v1/[^`?]+)", PAGE.partition("## All calls")[2]):
        assert re.sub(r"\{\w+\}", "{}", path) in {re.sub(r"\{\w+\}", "{}", one) for one in known}, path


def test_its_figures_are_those_of_the_code() -> None:
    assert f"larger than {BATCH_ROLLOUTS} rollouts or {BATCH_BYTES >> 20} MiB" in PAGE
    assert f"{ACKNOWLEDGE_RECORDS} records or {ACKNOWLEDGE_SECONDS:g} seconds at a time" in PAGE
    patience = inspect.signature(Client.__init__).parameters["retry_seconds"].default
    assert f"After `retry_seconds` seconds ({patience:g})" in PAGE


@pytest.mark.parametrize("example", re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
def test_its_examples_use_what_there_is(example: str) -> None:
    tree = ast.parse(f"async def example():\n{textwrap.indent(example, '    ')}")
    used = {
        node.func.attr: {keyword.arg for keyword in node.keywords}
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "client"
    }
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    assert used or imported
    names: dict[str, Any] = {"group": CompletedGroup, "one": Mismatch}
    for node in imported:
        module = import_module(node.module or "")
        assert all(hasattr(module, alias.name) for alias in node.names), node.module
        names |= {alias.name: getattr(module, alias.name) for alias in node.names}
    for name, keywords in used.items():
        assert keywords <= set(calls(Client)[name]), name
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
            assert {one.arg for one in node.keywords} <= set(inspect.signature(names[node.func.id]).parameters)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("group", "one"):
            assert hasattr(names[node.value.id], node.attr), node.attr
