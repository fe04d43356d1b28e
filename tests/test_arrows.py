"""Which package may import which: every import, read from the source, follows the arrows of the design."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from sources import PACKAGE as ROOT
from sources import in_one_worker, package_files, statements_of, tree_of

pytestmark = in_one_worker

BASE_ARROWS: dict[str, set[str]] = {
    "backoff": set(),
    "errors": set(),
    "settings": {"errors"},
    "demand": {"settings"},
    "deadlines": set(),
    "logs": set(),
    "process_identity": set(),
    "http_body": set(),
    "routed_experts": set(),
    "_bootstrap": set(),
    "__init__": {"client", "records"},
    "records": {"errors", "settings"},
    "config": {"errors", "logs"},
}
"""The modules of the base, which every package may import, and what each may import of the others."""

# Packages, or single modules of packages, that each may import beside the base and itself. Arrows run one way.
ARROWS: dict[str, set[str]] = {
    "client": set(),
    "trainers": set(),
    "sandbox": set(),
    "inference": set(),
    "gateway": {"inference"},
    "agents": {"sandbox.protocol", "sandbox.service.egress.rules", "sandbox.service.operations.shell", "inference"},
    "environments": {"agents", "sandbox", "inference"},
    "rollout": {
        *("environments", "agents", "gateway", "sandbox.protocol", "sandbox.syscalls", "inference"),
        "client.wire_models",
    },
    "oracle": {"environments", "inference"},
    "pages": set(),
    "api": {
        *("agents", "rollout", "environments", "inference", "client", "trainers", "pages"),
        *("sandbox.backend_selection", "sandbox.config", "sandbox.protocol"),
    },
    "gym_root": {"*"},
    "gym_sandbox": {"_gym_compat", "sandbox"},
    "_gym_compat": set(),
    "cli": {"*"},
    "testing": {"*"},
    "__main__": {"cli"},
}

INNER_ARROWS: dict[str, dict[str, set[str]]] = {
    "sandbox": {
        "limit_breach": set(),
        "tree_removal": set(),
        "cancellation": set(),
        "syscalls": set(),
        "protocol": {"limit_breach"},
        "guest": {"limit_breach", "protocol", "syscalls"},
        "spawner": {"guest", "protocol", "tree_removal", "syscalls"},
        "backends": {"spawner", "guest", "protocol", "syscalls"},
        "images": {"protocol", "tree_removal", "cancellation", "syscalls"},
        "config": {"images", "protocol"},
        "service": {"*"},
        "backend_selection": {"*"},
    },
    "sandbox.service": {
        "guest_channel": set(),
        "host_facts": set(),
        "loss_evidence": set(),
        "python_packages": set(),
        "warm_pool": set(),
        "doctor_checks": {"host_facts"},
        "spawner_client": {"loss_evidence"},
        "operations": {"guest_channel"},
        "egress": {"guest_channel"},
        "running_sandbox": {"egress", "guest_channel", "loss_evidence", "operations"},
        "local_backend": {"*"},
        "namespace_backend": {"*"},
    },
    "inference": {
        "engine_errors": set(),
        "json_depth": set(),
        "protocol": set(),
        "toolcalls": {"json_depth"},
        "engines": {"engine_errors", "json_depth", "protocol"},
        "balance": {"engine_errors", "protocol"},
        "tokens": {"balance", "engine_errors", "json_depth", "protocol", "toolcalls"},
        "weights": {"balance"},
        "config": {"*"},
    },
    "rollout": {
        "protocol": set(),
        "ledger": {"protocol"},
        "scheduling": {"ledger", "protocol"},
        "groups": {"ledger", "protocol", "scheduling"},
        "intake": {"groups", "protocol", "scheduling"},
        "nodes": {"ledger", "protocol", "scheduling"},
        "service": {"*"},
    },
    "api": {
        "http": set(),
        "monitoring": set(),
        "openapi_examples": set(),
        "config": set(),
        "policy_control": {"config", "http"},
        "app_context": {"http", "monitoring", "policy_control"},
        "routes": {"app_context", "http", "openapi_examples", "policy_control"},
        "app": {"app_context", "http", "routes"},
        "build": {"app_context", "config", "policy_control"},
        "node_process": {"*"},
        "service_process": {"*"},
    },
}
"""What each part of a package may import of the same package. ``service`` of ``sandbox`` is the service's process."""

PLAIN = {"client", "trainers"}
"""Usable in a trainer's own environment: nothing but these from outside the standard library."""
PLAIN_LIBRARIES = {"pydantic", "pydantic_core", "aiohttp", "typing_extensions"}
OPTIONAL_LIBRARIES = {"trainers": {"numpy"}, "routed_experts": {"numpy"}}
"""Imported on first use only: without them everything still loads, see below."""


@cache
def package_of(file: Path) -> str:
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


def imports_of(tree: ast.Module) -> set[str]:
    """Full names of imported modules, wherever they stand; what only type checkers see does not count."""
    found: set[str] = set()
    for node in statements_of(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def is_in(name: str, modules: set[str]) -> bool:
    """Whether something imported is one of these packages and modules, or part of one."""
    return any(f"{name}.".startswith(f"prorl_gym.{module}.") for module in modules)


def packages_in(names: set[str]) -> set[str]:
    return {name.split(".")[1] for name in names if name.startswith("prorl_gym.")}


@pytest.mark.parametrize("package", sorted({package_of(file) for file in package_files()}))
def test_arrows_run_one_way(package: str) -> None:
    assert package in ARROWS or package in BASE_ARROWS, f"add what {package} may import to this file"
    if package in ARROWS:
        allowed = ARROWS[package] | {package, "__version__", *BASE_ARROWS}
    else:
        allowed = BASE_ARROWS[package]
    wrong = {
        f"{file.relative_to(ROOT)} -> {name}"
        for file in package_files()
        if package_of(file) == package
        for name in imported(file)
        if name.startswith("prorl_gym.") and not is_in(name, allowed) and "*" not in allowed
    }
    assert wrong == set()


@cache
def imported(file: Path) -> set[str]:
    return imports_of(tree_of(file))


@pytest.mark.parametrize(
    ("package", "inner"), [(package, inner) for package, arrows in INNER_ARROWS.items() for inner in arrows]
)
def test_arrows_inside_a_package_run_one_way(package: str, inner: str) -> None:
    allowed = INNER_ARROWS[package][inner] | {inner}
    wrong = {
        f"{file.relative_to(ROOT)} -> {name}"
        for file in package_files()
        if part_of(module_of(file), package) == inner
        for name in imported(file)
        if (other := part_of(name, package)) and other not in allowed and "*" not in allowed
    }
    assert wrong == set()


@pytest.mark.parametrize("package", INNER_ARROWS)
def test_every_part_of_a_package_is_named(package: str) -> None:
    parts = {part_of(module_of(file), package) for file in package_files()}
    assert parts - {"", "__init__"} == set(INNER_ARROWS[package])


def part_of(name: str, package: str) -> str:
    """Return the part of ``prorl_gym.PACKAGE`` that a full name lies in; "": in none."""
    prefix = f"prorl_gym.{package}."
    return name.removeprefix(prefix).partition(".")[0] if name.startswith(prefix) else ""


@cache
def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT.parent).with_suffix("").parts)


def test_no_production_module_imports_testing() -> None:
    assert {
        str(file)
        for file in package_files()
        if package_of(file) != "testing" and "testing" in packages_in(imported(file))
    } == set()


GUEST_LIBRARIES = {"ptyprocess", "jupyter_client", "zmq", "ipykernel", "IPython", "traitlets"}
"""All but the first are the image's own, and imported by what runs on the image's python only."""


def test_the_guest_needs_the_standard_library_only() -> None:
    foreign = {
        f"{file.name}: {name}"
        for file in (ROOT / "sandbox" / "guest").glob("*.py")
        for name in imported(file)
        if name.split(".")[0] not in {*sys.stdlib_module_names, "prorl_gym", *GUEST_LIBRARIES}
    }
    assert foreign == set()


def modules() -> dict[str, set[str]]:
    """Return the modules of the package with those that each imports, wherever in its file."""
    names = {module_of(file).removesuffix(".__init__"): file for file in package_files()}

    def imported_module(name: str) -> str:
        while name not in names:
            name = name.rpartition(".")[0]
        return name

    return {
        name: {imported_module(other) for other in imported(file) if other.startswith("prorl_gym.")} - {name}
        for name, file in names.items()
    }


def test_no_circle_of_modules() -> None:
    waiting = modules()
    while free := {name for name, others in waiting.items() if not others & waiting.keys()}:
        waiting = {name: others for name, others in waiting.items() if name not in free}
    assert set(waiting) == set(), "each of these imports another of these"


GYM_EXPORTS = {
    *("BaseResourcesServerConfig", "BaseVerifyRequest", "ReverifyMode", "SimpleResourcesServer", "SESSION_ID_KEY"),
    *("BaseResponsesAPIAgentConfig", "SimpleResponsesAPIAgent", "get_response_json", "ServerClient"),
    *("BaseResponsesAPIModelConfig", "SimpleResponsesAPIModel", "NeMoGymResponse", "NeMoGymChatCompletion"),
    *("NeMoGymResponseCreateParamsNonStreaming", "NeMoGymChatCompletionCreateParamsNonStreaming"),
}
"""Names that Gym exports for authors of servers; 0.5.1 has them in the same modules, without the export."""
GYM_SCAFFOLD = {"ResourcesServerRef", "is_nemo_gym_fastapi_entrypoint"}
"""What the servers that ``gym env init`` writes import beside these."""


def gym_names_of(file: Path) -> set[str]:
    """What a file imports of Gym; a module that is imported as a whole counts by its own name."""
    return {
        alias.name
        for node in statements_of(tree_of(file))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if (getattr(node, "module", None) or alias.name).split(".")[0] == "nemo_gym"
    }


def test_only_one_module_imports_what_gym_does_not_export() -> None:
    for file in package_files():
        if names := gym_names_of(file):
            assert package_of(file) in {"gym_root", "_gym_compat"}, file
            assert package_of(file) == "_gym_compat" or names <= GYM_EXPORTS | GYM_SCAFFOLD, file


@pytest.mark.gym
def test_gym_exports_these_names() -> None:
    assert set(pytest.importorskip("nemo_gym").__all__) >= GYM_EXPORTS


@pytest.mark.parametrize("package", sorted(PLAIN | {"records", "errors", "settings", "routed_experts"}))
def test_what_trainers_import_needs_pydantic_and_aiohttp_only(package: str) -> None:
    foreign = {
        name.split(".")[0]
        for file in package_files()
        if package_of(file) == package
        for name in imported(file)
        if name.split(".")[0] not in {*sys.stdlib_module_names, "prorl_gym"}
    }
    assert foreign <= PLAIN_LIBRARIES | OPTIONAL_LIBRARIES.get(package, set())


def test_checker_sees_what_it_should() -> None:
    source = (
        "import os\nfrom prorl_gym.rollout import service\n"
        "def f():\n    import prorl_gym.api.app\n"
        "if TYPE_CHECKING:\n    from prorl_gym.cli import main\n"
    )
    assert packages_in(imports_of(ast.parse(source))) == {"rollout", "api"}


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
