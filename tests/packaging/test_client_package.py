"""``prorl-gym-client``: it has all that its files import, and does not hide the whole package."""

import ast
import subprocess
import sys
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((REPOSITORY / "client_package/pyproject.toml").read_text("utf-8"))
PLACED: dict[str, str] = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]


def modules() -> dict[str, Path]:
    """The modules of the distribution, with their files in the repository."""
    found: dict[str, Path] = {}
    for source in PLACED:
        path = (REPOSITORY / "client_package" / source).resolve()
        for file in [path, *path.rglob("*.py")]:
            if file.suffix == ".py":
                parts = file.relative_to(REPOSITORY).with_suffix("").parts
                found[".".join(parts).removesuffix(".__init__")] = file
    return found


def test_every_file_keeps_its_place_in_the_package() -> None:
    moved = {source: place for source, place in PLACED.items() if source.startswith("../prorl_gym/")}
    assert moved == {source: f"prorl_gym_client/{source.removeprefix('../')}" for source in moved}


def test_what_the_files_import_of_the_package_is_there() -> None:
    known, missing = modules(), set[str]()
    for file in known.values():
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("prorl_gym"):
                missing |= {node.module or ""} - known.keys()
    assert missing == set()


def test_it_requires_what_the_package_requires_of_the_same_libraries() -> None:
    whole = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
    assert {"pydantic", "aiohttp"} == {line.partition(">")[0] for line in PROJECT["project"]["dependencies"]}
    assert set(PROJECT["project"]["dependencies"]) <= set(whole["dependencies"])
    assert PROJECT["project"]["requires-python"] == whole["requires-python"]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("build") is None, reason="the package build is not installed in this environment")
def test_the_whole_package_is_imported_where_both_are_installed(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(tmp_path)]
    subprocess.run([*build, str(REPOSITORY / "client_package")], check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    script = f"import site; site.addsitedir({str(site)!r}); import prorl_gym; print(prorl_gym.__file__)"
    for blocked in ([], [str(REPOSITORY)]):
        # As in an environment without the package, whose start-up file has imported it already.
        paths = f"sys.path = [path for path in sys.path if path not in {blocked!r}]"
        drop = f"import sys; {paths}; sys.modules.pop('prorl_gym', None); "
        child = subprocess.run(
            [sys.executable, "-P", "-c", (drop if blocked else "") + script],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert ("prorl_gym_client" in child.stdout) == bool(blocked), child.stderr
