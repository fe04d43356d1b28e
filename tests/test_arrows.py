"""Which room may know which: every import of the package, read from its source, follows the arrows of the design."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "prorl_gym"

WALLS = {"errors", "records", "settings", "demand", "config", "deadlines", "logs", "__init__", "_bootstrap"}

# What each room may import of the package, beside the walls and itself. Arrows run one way.
ARROWS: dict[str, set[str]] = {
    "client": set(),
    "trainers": set(),
    "sandbox": set(),
    "inference": set(),
    "agents": {"sandbox", "inference"},
    "environments": {"agents", "sandbox", "inference"},
    "rollout": {"environments", "agents", "sandbox", "inference"},
    "oracle": {"environments", "agents", "sandbox", "inference"},
    "pages": {"trainers", "client"},
    "api": {"rollout", "oracle", "environments", "agents", "sandbox", "inference", "client", "trainers", "pages"},
    "gym_root": {"*"},
    "gym_sandbox": {"sandbox"},
    "_gym_compat": set(),
    "cli": {"*"},
    "__main__": {"cli"},
}

WALL_ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "settings": {"errors"},
    "demand": {"settings"},
    "deadlines": set(),
    "logs": set(),
    "_bootstrap": set(),
    "__init__": {"client", "records"},
    "records": {"errors", "settings"},
    "config": {"errors", "logs"},
}

PLAIN = {"client", "trainers"}
"""Usable in a trainer's own environment: nothing but these from outside the standard library."""
PLAIN_LIBRARIES = {"pydantic", "pydantic_core", "aiohttp", "typing_extensions"}
OPTIONAL_LIBRARIES = {"trainers": {"numpy"}}
"""Imported on first use only: without them everything still loads, see below."""


def room_of(file: Path) -> str:
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


def imports_of(source: str) -> set[str]:
    """Full names of imported modules, wherever they stand; what only type checkers see does not count."""
    found: set[str] = set()
    tree = ast.parse(source)
    hidden = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if node in hidden:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def files() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if "tests" not in path.relative_to(ROOT).parts)


def rooms_in(names: set[str]) -> set[str]:
    return {name.split(".")[1] for name in names if name.startswith("prorl_gym.")}


@pytest.mark.parametrize("room", sorted({room_of(file) for file in files()}))
def test_arrows_run_one_way(room: str) -> None:
    assert room in ARROWS or room in WALL_ARROWS, f"say in this file what the new room {room} may know"
    allowed = ARROWS.get(room, set()) | {room, "__version__"} | WALLS if room in ARROWS else WALL_ARROWS[room]
    wrong = {
        f"{file.relative_to(ROOT)} -> {other}"
        for file in files()
        if room_of(file) == room
        for other in rooms_in(imports_of(file.read_text(encoding="utf-8")))
        if other not in allowed and "*" not in allowed
    }
    assert wrong == set()


def test_only_three_places_know_nemo_gym() -> None:
    knowing = {
        room_of(file)
        for file in files()
        if any(name.split(".")[0] == "nemo_gym" for name in imports_of(file.read_text(encoding="utf-8")))
    }
    assert knowing <= {"gym_root", "gym_sandbox", "_gym_compat"}


@pytest.mark.parametrize("room", sorted(PLAIN | {"records", "errors", "settings"}))
def test_what_trainers_import_needs_pydantic_and_aiohttp_only(room: str) -> None:
    foreign = {
        name.split(".")[0]
        for file in files()
        if room_of(file) == room
        for name in imports_of(file.read_text(encoding="utf-8"))
        if name.split(".")[0] not in {*sys.stdlib_module_names, "prorl_gym"}
    }
    assert foreign <= PLAIN_LIBRARIES | OPTIONAL_LIBRARIES.get(room, set())


def test_checker_sees_what_it_should() -> None:
    source = (
        "import os\nfrom prorl_gym.rollout import service\n"
        "def f():\n    import prorl_gym.api.app\n"
        "if TYPE_CHECKING:\n    from prorl_gym.cli import main\n"
    )
    assert rooms_in(imports_of(source)) == {"rollout", "api"}


_ONLY_PLAIN = """
import sys
from importlib.abc import MetaPathFinder
from importlib.metadata import packages_distributions, requires
from importlib.util import find_spec

class Refuse(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in REFUSED:
            raise ImportError(f"{name} is not there")

REFUSED = set(sys.argv[1].split(","))
sys.meta_path.insert(0, Refuse())
import prorl_gym
for name in ("Client", "SyncClient", "Rollout", "RolloutRequest", "RolloutSettings", "Outcome"):
    getattr(prorl_gym, name)
import prorl_gym.client, prorl_gym.records, prorl_gym.trainers
import pkgutil
for module in pkgutil.iter_modules(prorl_gym.trainers.__path__, "prorl_gym.trainers."):
    __import__(module.name)
print(sorted(REFUSED & {name.partition(".")[0] for name in sys.modules}))
"""

_HEAVY = (
    "fastapi,starlette,uvicorn,typer,rich,click,ptyprocess,jupyter_client,IPython,spython,transformers,tokenizers,"
    "math_verify,sympy,prometheus_client,yaml,nemo_gym,ray,numpy,torch,huggingface_hub"
)


def test_client_records_and_trainers_load_where_nothing_else_is_installed() -> None:
    child = subprocess.run(
        [sys.executable, "-c", _ONLY_PLAIN, _HEAVY], capture_output=True, text=True, timeout=60, check=False
    )
    assert (child.stdout.strip(), child.stderr) == ("[]", "")


def test_package_root_imports_nothing() -> None:
    script = "import sys; before = set(sys.modules); import prorl_gym; print(sorted(set(sys.modules) - before))"
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert set(ast.literal_eval(child.stdout)) <= {"prorl_gym", "prorl_gym._bootstrap"}
