"""Docstrings name what exists: parameters, members of our classes, files."""

import ast
import re

from sources import ROOT, in_one_worker, package_files, tree_of

pytestmark = in_one_worker
PAGES = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PLACES = (ROOT, ROOT / "prorl_gym", ROOT / "prorl_gym" / "sandbox", ROOT / "docs", ROOT / "tests")
OF_OTHERS = {
    "nemo_rl/environments/nemo_gym.py",
    "examples/run_grpo_single_controller.py",
    "tests/test.sh",
    "solution/solve.sh",
}
"""Files of NeMo-RL and of a task's directory."""


def documented_args(docstring: str) -> list[str]:
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", docstring, re.DOTALL | re.MULTILINE)
    return re.findall(r"^    \*{0,2}(\w+):", section[1], re.MULTILINE) if section else []


def test_every_documented_argument_is_a_parameter() -> None:
    unknown = [
        f"{path.relative_to(ROOT)}:{function.lineno} {function.name}: {name}"
        for path in package_files()
        for function in ast.walk(tree_of(path))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for name in documented_args(ast.get_docstring(function) or "")
        if name not in {argument.arg for argument in ast.walk(function.args) if isinstance(argument, ast.arg)}
    ]
    assert unknown == []


def members() -> dict[str, tuple[set[str], list[str]]]:
    """What is defined or set in each class of ours, and its bases' names."""
    found: dict[str, tuple[set[str], list[str]]] = {}
    for path in package_files():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                names, bases = found.setdefault(node.name, (set(), []))
                bases += [ast.unparse(base) for base in node.bases]
                for part in ast.walk(node):
                    if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                        names.add(part.name)
                    elif isinstance(part, ast.Name):
                        names.add(part.id)
                    elif isinstance(part, ast.Attribute) and ast.unparse(part.value) == "self":
                        names.add(part.attr)
    return found


def has(classes: dict[str, tuple[set[str], list[str]]], name: str, member: str) -> bool:
    if name not in classes:  # a base from another library: its methods are unknown here
        return True
    names, bases = classes[name]
    inherited = [base.partition("[")[0] for base in bases]
    return member in names or any(
        has(classes, base, member) for base in inherited if base not in ("Protocol", "Exception", "object", name)
    )


def test_every_member_and_file_that_is_named_exists() -> None:
    classes = members()
    unknown: list[str] = []
    for path in (*package_files(), *PAGES):
        text = path.read_text("utf-8")
        unknown += [
            f"{path.relative_to(ROOT)}: {name}.{member}"
            for name, member in re.findall(r"`+([A-Z]\w+)\.(\w+)(?:\([^`]*\))?`+", text)
            if not has(classes, name, member)
        ]
        unknown += [
            f"{path.relative_to(ROOT)}: {named}"
            for named in re.findall(r"`+((?:[a-z_]+/)+[a-z_0-9]+\.(?:py|sh|md))`+", text)
            if named not in OF_OTHERS and not any((place / named).exists() for place in PLACES)
        ]
    assert unknown == []
