"""Tests reach the package through what is public: they access no private attribute of an object or module.

Their own ``self``, ``cls`` and ``super()`` are exempt, and the public methods of named tuples that begin with ``_``.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
NAMED_TUPLE = {"_replace", "_asdict", "_fields", "_make"}
EXCEPTIONS = {
    "agents/mcp_example_server.py": {"_exit", "_tool_manager", "_tools"},  # of os and of the MCP library
    "agents/mcp_raw_server.py": {"_exit"},  # of os
    "environments/swe/controls/test_control_checks.py": {
        # Each check must refuse an attack alone, and which of them sees it first is left to chance.
        *("_ControlChecks", "_check_sealed", "_check_batch", "_check_standalone", "_check_interleaved"),
        "_split_runs",
    },
    "gym/published_provider.py": {"_ENTRY_POINT_LOADERS"},  # NeMo Gym reads its plug-ins once a process
    "gym/test_mini_swe_agent_session.py": {"_api_url"},  # of mini-swe-agent, whose model has no other way to an address
    "gym/test_sandbox_provider.py": {"_require_handle"},  # of NeMo Gym, which offers no way to our handle
    "gym/test_sandbox_provider_pty.py": {"_require_handle"},
    "inference/token_codecs.py": {"_without_control_tokens"},  # several templates share what takes seconds to make
    "sandbox/spawner/test_namespaces.py": {"_exit"},
    "sandbox/test_no_forks.py": {"_exit"},
}
"""Private names that a file uses all the same. Extend it only by names of other libraries."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in NAMED_TUPLE


def is_own(value: ast.expr) -> bool:
    """Whether an expression is ``self``, ``cls`` or ``super()``."""
    if isinstance(value, ast.Call):
        value = value.func
    return isinstance(value, ast.Name) and value.id in ("self", "cls", "super")


def private_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of every access to something private."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and not is_own(node.value):
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("prorl_gym"):
            yield from ((node.lineno, alias.name) for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.Call) and is_reflection(node.func):
            texts = [each.value for each in node.args[:2] if isinstance(each, ast.Constant)]
            names = [text.rpartition(".")[2] for text in texts if isinstance(text, str)]
            yield from ((node.lineno, name) for name in names if is_private(name))


def is_reflection(function: ast.expr) -> bool:
    """Whether a function takes the name of an attribute: ``getattr``, ``monkeypatch.setattr`` and their like."""
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("getattr", "setattr", "delattr", "object", "patch")


def test_tests_access_nothing_private() -> None:
    wrong: list[str] = []
    for path in sorted(TESTS.rglob("*.py")):
        name = path.relative_to(TESTS).as_posix()
        for line, found in private_names(ast.parse(path.read_text())):
            if found not in EXCEPTIONS.get(name, set()):
                wrong.append(f"{name}:{line} {found}")
    assert wrong == [], "use something public, or give the class a parameter, a snapshot or a limits record"


def test_every_exception_is_used() -> None:
    used = {
        name: {found for _, found in private_names(ast.parse((TESTS / name).read_text()))}
        for name in EXCEPTIONS
        if (TESTS / name).exists()
    }
    # The names in a loop of test_control_checks.py are text, which is not searched.
    assert [name for name in EXCEPTIONS if not used.get(name)] == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("ledger._writer.run()", "_writer"),
        ("from prorl_gym.rollout.service import _PAGE", "_PAGE"),
        ("monkeypatch.setattr(module, '_SECONDS', 1)", "_SECONDS"),
        ("monkeypatch.setattr('prorl_gym.module._SECONDS', 1)", "_SECONDS"),
        ("getattr(thing, '_hidden')", "_hidden"),
    ],
)
def test_a_private_access_is_found(text: str, name: str) -> None:
    assert [found for _, found in private_names(ast.parse(text))] == [name]


@pytest.mark.parametrize(
    "text", ["self._mine", "cls._mine", "super()._theirs()", "job._replace(attempt=1)", "x.__dict__", "_helper(1)"]
)
def test_what_is_the_tests_own_is_left_alone(text: str) -> None:
    assert list(private_names(ast.parse(text))) == []
