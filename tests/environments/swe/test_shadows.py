"""New modules that would be imported instead of the standard library's or the runner's are no part of a repair."""

from dataclasses import replace

import pytest
from swe_support import archived

from prorl_gym.environments.swe.patch_filter import filter_patch
from prorl_gym.environments.swe.swe_row import SweTask, git_diff

TASK = archived()
EDIT = git_diff("src/answer.py", "a\n", "b\n")


def counts(path: str, task: SweTask = TASK, old: str = "") -> bool:
    return path in filter_patch((EDIT + git_diff(path, old, "x\n")).encode(), task).files


@pytest.mark.parametrize(
    "path",
    [
        "json.py",
        "src/json.py",
        "lib/encodings/__init__.py",
        "python/abc.cpython-311-x86_64-linux-gnu.so",
        "argparse.py",
        "imp.py",
        "pluggy/__init__.py",
        "src/pytest_cov/plugin.py",
        "pygments/formatters/terminal.py",
        "_sysconfigdata__linux_x86_64-linux-gnu.py",
        "sitecustomize.py",
        "src/sitecustomize/__init__.py",
        "a/b/usercustomize/x.py",
    ],
)
def test_shadows_do_not_count(path: str):
    assert not counts(path)


@pytest.mark.parametrize(
    "path",
    [
        "pkg/json.py",
        "pkg/types/__init__.py",
        "src/pkg/logging.py",
        "types/index.d.ts",
        "lib/http.js",
        "queue/worker.py",
        "json/schema.json",
        "src/json_tools.py",
        "python.py",
        "lib/pkg/pytest_helper.py",
    ],
)
def test_modules_of_such_names_elsewhere_count(path: str):
    assert counts(path)


@pytest.mark.parametrize(
    ("command", "path"),
    [
        ("PYTHONPATH=code/py:$PYTHONPATH python3 -m pytest", "code/py/json.py"),
        ('PYTHONPATH="$PWD/code:$PWD/.vendor${PYTHONPATH:+:$PYTHONPATH}" python3 -m pytest', "code/json.py"),
        ("export PYTHONPATH=/testbed/code; python3 -m pytest", "code/json.py"),
        ("true && cd './code' && python3 -m pytest", "code/json.py"),
    ],
)
def test_the_row_lists_what_is_on_the_path(command: str, path: str):
    assert counts(path)
    assert not counts(path, replace(TASK, tests=replace(TASK.tests, command=command)))
    assert not counts(path, replace(TASK, tests=replace(TASK.tests, build=command)))


def test_what_the_repository_has_counts():
    assert counts("json.py", old="there before\n")
    assert not counts("sitecustomize/__init__.py", old="there before\n")
    of_attrs = replace(TASK, gold_patch=git_diff("src/attr/_make.py", "a\n", "b\n"))
    assert counts("src/attr/_new.py", of_attrs)
    assert not counts("src/attr/_new.py")
    assert counts("json.py", replace(TASK, gold_patch=git_diff("json.py", "", "b\n")))
