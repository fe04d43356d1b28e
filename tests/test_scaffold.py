"""``prorl-gym init``: the project works unchanged; an error names the fix."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from prorl_gym.cli.main import app
from prorl_gym.cli.scaffold import scaffold_environment
from prorl_gym.environments import registry
from prorl_gym.errors import ConfigError

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "new-environment.md"
LINT = ["--config", str(ROOT / "pyproject.toml"), "--config", "lint.per-file-ignores={'**/tests/**'=['D']}"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scaffold")
    result = CliRunner().invoke(app, ["init", "toy_maze", "--directory", str(folder / "maze")])
    assert result.exit_code == 0, result.output
    assert "pip install -e ." in result.output
    return folder / "maze"


@pytest.fixture
def on_path(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The project as if it were installed."""
    entry = EntryPoint("toy_maze", "toy_maze.environment:ToyMazeEnvironment", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "installed_plugins", lambda: {"toy_maze": entry})
    monkeypatch.syspath_prepend(str(project))
    monkeypatch.syspath_prepend(str(project / "tests"))
    yield project
    registry.get.cache_clear()
    for module in [name for name in sys.modules if name.split(".")[0] in ("toy_maze", "test_toy_maze")]:
        del sys.modules[module]


def test_the_environment_is_one_short_file(project: Path) -> None:
    source = (project / "toy_maze" / "environment.py").read_text("utf-8")
    assert len(source.splitlines()) <= 40
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom | ast.Import)]
    ours = [node for node in imports if isinstance(node, ast.ImportFrom) and str(node.module).startswith("prorl_gym")]
    assert sum(len(node.names) for node in ours) <= 4
    assert [name.name for node in imports if node not in ours for name in node.names] == ["re"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_its_rows_are_validated(on_path: Path) -> None:
    rows = "toy_maze/gym_root/environments/toy_maze/data/example.jsonl"
    result = CliRunner().invoke(app, ["validate", "toy_maze", str(on_path / rows)])
    assert result.exit_code == 0, result.output
    assert "All 5 rows are good" in result.output


@pytest.mark.slow
def test_its_tests_fail_when_the_grader_is_generous(on_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks can fail: two of them notice a grader that accepts everything."""
    tests: Any = import_module("test_toy_maze")
    from prorl_gym.records import Score

    async def generous(*_: Any) -> Score:
        return Score(reward=1.0)

    monkeypatch.setattr(tests.ENVIRONMENT, "evaluate", generous)
    for name in ("test_nothing_scores_zero", "test_wrong_scores_zero"):
        with pytest.raises(AssertionError):
            getattr(tests, name)()


def test_nothing_of_the_template_is_left(project: Path) -> None:
    texts = {path: path.read_text("utf-8") for path in project.rglob("*") if path.is_file()}
    assert len(texts) == 10
    for path, text in texts.items():
        assert not re.search("my.?env", text, re.IGNORECASE), path
        assert "my_env" not in str(path)
    assert not list(project.rglob("__pycache__"))


def test_it_is_clean(project: Path) -> None:
    for command in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", *LINT, "."]
        ran = subprocess.run(ruff, cwd=project, capture_output=True, text=True, check=False, timeout=60)
        assert ran.returncode == 0, ran.stdout


@pytest.mark.gym
def test_gym_accepts_it(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_gym.environment.validation import validate_environment

    from prorl_gym.cli.installation import gym_root

    root = project / "toy_maze" / "gym_root"
    monkeypatch.setenv("NEMO_GYM_EXTRA_ROOTS", f"{gym_root()}{os.pathsep}{root}")
    report = validate_environment(root / "environments" / "toy_maze" / "manifest.yaml")
    assert report.inferred_profile == report.declared_profile
    assert [(dataset.name, dataset.rows) for dataset in report.datasets] == [("example", 5)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("My Env", "cannot be the name.*\n.*for example my_env"),
        ("my__env", "cannot be the name"),
        ("1st", "cannot be the name"),
        ("class", "cannot be the name"),
        ("../up", "cannot be the name"),
        ("x" * 41, "cannot be the name"),
        ("math", "There is an environment 'math' already"),
        ("json", "A Python package 'json' is installed here.\nChoose another, for example json_env."),
        ("tests", "A Python package 'tests'"),
    ],
)
def test_bad_names_are_refused(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        scaffold_environment(name, tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_an_existing_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine").write_text("x")
    with pytest.raises(ConfigError, match=r"exists already\.\nGive another place with --directory"):
        scaffold_environment("toy_maze", tmp_path / "taken")
    assert [path.name for path in tmp_path.rglob("*")] == ["taken", "mine"]


def test_a_place_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot be written"):
        scaffold_environment("toy_maze", tmp_path / "file" / "new")


def blocks() -> list[tuple[str, str]]:
    """Language and text of each fenced block of the page, in order."""
    return re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)


def test_the_page_shows_the_file_that_init_writes(tmp_path: Path) -> None:
    scaffold_environment("pattern_env", tmp_path / "project")
    written = (tmp_path / "project" / "pattern_env" / "environment.py").read_text("utf-8")
    shown = [text for language, text in blocks() if language == "python"]
    assert shown[0] == f"# pattern_env/environment.py\n{written}"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_page_works_as_it_is_written(tmp_path: Path) -> None:
    """Every block: shell lines are run, Python is written to the file that its first line names.

    Only ``pip`` gets options: to stay off the network, and where to install.
    """
    site = tmp_path / "site"
    pip = f"{sys.executable} -m pip install -q --no-deps --no-build-isolation --disable-pip-version-check"
    path = os.pathsep.join([str(site), str(ROOT), os.environ.get("PYTHONPATH", "")])
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PYTHONPATH": path, "PATH": programs}
    env.pop("PYTEST_ADDOPTS", None)
    folder = tmp_path
    for language, text in blocks():
        if language == "python":
            comment, _, source = text.partition("\n")
            (folder / comment.removeprefix("# ")).write_text(source)
            continue
        assert language == "bash"
        for line in text.splitlines():
            if line.startswith("cd "):
                folder /= line.removeprefix("cd ")
                continue
            # An editable install would write into the interpreter's own directory, which the test shares.
            command = line.replace("pip install -e .", f"{pip} --upgrade --target {site} .")
            if line.startswith(("python ", "pytest")):
                command = f"{pip} --upgrade --target {site} . && {command}"
            ran = subprocess.run(command, shell=True, cwd=folder, env=env, capture_output=True, text=True, check=False)
            assert ran.returncode == 0, f"{line}\n{ran.stdout}\n{ran.stderr}"
    assert "All 2 rows are good" in ran.stdout
