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

BASE: dict[str, set[str]] = {
    "backoff": set(),
    "errors": set(),
    "settings": {"errors"},
    "demand": {"settings"},
    "deadlines": set(),
    "logs": set(),
    "process_identity": set(),
    "free_ports": set(),
    "http_body": set(),
    "routed_experts": set(),
    "gym_roots": set(),
    "thoughts": set(),
    "concurrency": set(),
    "left_out": set(),
    "records": {"errors", "settings"},
    "config": {"errors", "logs"},
}
"""The modules of the base, which every package may import, and what each may import of the others."""

PACKAGES: dict[str, set[str]] = {
    "client": set(),
    "trainers": set(),
    "sandbox": set(),
    "inference": set(),
    "gateway": {"inference"},
    "agents": {"sandbox.protocol", "sandbox.service.operations.shell", "inference"},
    "environments": {"agents", "sandbox", "inference"},
    "rollout": {
        *("environments", "agents", "sandbox.protocol", "sandbox.syscalls", "inference"),
        "client.wire_models",
    },
    "oracle": {"environments", "inference"},
    "data": {"environments", "sandbox"},
    "harness": {
        *("agents", "gateway", "inference"),
        *("rollout.protocol", "rollout.scheduling.model_source", "sandbox.protocol"),
    },
    "contrib": {"agents", "sandbox.service.egress_rules"},
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
"""Packages, or single modules of packages, that each may import beside the base and itself. Arrows run one way."""

ARROWS: dict[str, dict[str, set[str]]] = {
    "": {
        "__init__": {"client", "records"},
        **BASE,
        **{name: {"__version__", *BASE, *may} for name, may in PACKAGES.items()},
    },
    "sandbox": {
        "limit_breach": set(),
        "tree_removal": set(),
        "cancellation": set(),
        "syscalls": set(),
        "protocol": {"limit_breach"},
        "guest": {"limit_breach", "protocol", "syscalls"},
        "spawner": {"guest", "protocol", "tree_removal", "syscalls"},
        "backends": {"spawner", "guest", "protocol", "syscalls"},
        "images": {"config", "protocol", "tree_removal", "cancellation", "syscalls"},
        "config": {"protocol"},
        "service": {"*"},
        "backend_selection": {"*"},
    },
    "sandbox.service": {
        "guest_channel": set(),
        "host_facts": set(),
        "python_packages": set(),
        "warm_pool": set(),
        "spawner_client": set(),
        "operations": {"guest_channel"},
        "egress_rules": set(),
        "egress_proxy": {"egress_rules", "guest_channel"},
        "running_sandbox": {"egress_proxy", "guest_channel", "operations", "spawner_client"},
        "local_backend": {"*"},
        "namespace_backend": {"*"},
    },
    "inference": {
        "strict_json": set(),
        "protocol": set(),
        "toolcalls": {"strict_json"},
        "engines": {"strict_json", "protocol"},
        "balance": {"protocol"},
        "tokens": {"balance", "strict_json", "protocol", "toolcalls"},
        "weights": {"balance"},
        "config": {"*"},
    },
    "rollout": {
        "protocol": set(),
        "ledger": {"protocol"},
        "scheduling": {"ledger", "protocol"},
        "groups": {"ledger", "protocol", "scheduling"},
        "nodes": {"ledger", "protocol", "scheduling"},
        "service": {"*"},
    },
    "api": {
        "http": set(),
        "monitoring": set(),
        "config": set(),
        "policy_control": {"config", "http"},
        "app_context": {"http", "monitoring", "policy_control"},
        "routes": {"app_context", "http", "monitoring", "policy_control"},
        "app": {"app_context", "http", "routes"},
        "build": {"app_context", "config", "policy_control"},
        "node_process": {"*"},
        "service_process": {"*"},
    },
}
"""What each part of a package may import of the same package; "" is the whole. ``*``: all but what is for tests.

``service`` of ``sandbox`` is the service's process.
"""

_PLAIN = {"pydantic", "pydantic_core", "aiohttp", "typing_extensions"}
LIBRARIES: dict[str, set[str]] = {
    **dict.fromkeys(("client", "records", "errors", "settings"), _PLAIN),
    # numpy is imported on first use only: without it everything still loads, see below.
    **dict.fromkeys(("trainers", "routed_experts"), _PLAIN | {"numpy"}),
    # All but the first are the image's own, and imported by what runs on the image's python only.
    "sandbox.guest": {"ptyprocess", "jupyter_client", "zmq", "ipykernel", "IPython", "traitlets"},
}
"""Libraries that may be imported where a trainer's environment, or an image, decides what is installed."""


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


@cache
def imported(file: Path) -> set[str]:
    return imports_of(tree_of(file))


def inside(name: str, package: str) -> str:
    """Return a full name as it continues after that of a package of ours; "": it does not lie in that."""
    prefix = f"prorl_gym.{package}.".replace("..", ".")
    return name.removeprefix(prefix) if name.startswith(prefix) else ""


def may_import(name: str, allowed: set[str]) -> bool:
    """Whether something is one of these packages and modules, or part of one."""
    if "*" in allowed and not f"{name}.".startswith("testing."):
        return True
    return any(f"{name}.".startswith(f"{one}.") for one in allowed)


@pytest.mark.parametrize(("package", "part"), [(package, part) for package, parts in ARROWS.items() for part in parts])
def test_arrows_run_one_way(package: str, part: str) -> None:
    allowed = ARROWS[package][part] | {part}
    wrong = {
        f"{file.relative_to(ROOT)} -> {name}"
        for file in package_files()
        if inside(module_of(file), package).partition(".")[0] == part
        for name in imported(file)
        if (other := inside(name, package)) and not may_import(other, allowed)
    }
    assert wrong == set()


@pytest.mark.parametrize("package", ARROWS)
def test_every_part_of_a_package_is_named(package: str) -> None:
    parts = {inside(module_of(file), package).partition(".")[0] for file in package_files()}
    assert parts - {"", "__init__"} == ARROWS[package].keys() - {"__init__"}


@cache
def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT.parent).with_suffix("").parts)


@pytest.mark.parametrize("part", LIBRARIES)
def test_what_others_install_is_enough(part: str) -> None:
    foreign = {
        f"{file.relative_to(ROOT)}: {name}"
        for file in package_files()
        if f"{module_of(file)}.".startswith(f"prorl_gym.{part}.")
        for name in imported(file)
        if name.split(".")[0] not in {*sys.stdlib_module_names, "prorl_gym", *LIBRARIES[part]}
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
            package = file.relative_to(ROOT).parts[0]
            assert package in {"gym_root", "_gym_compat.py"}, file
            assert package == "_gym_compat.py" or names <= GYM_EXPORTS | GYM_SCAFFOLD, file


@pytest.mark.gym
def test_gym_exports_these_names() -> None:
    assert set(pytest.importorskip("nemo_gym").__all__) >= GYM_EXPORTS


def test_checker_sees_what_it_should() -> None:
    source = (
        "import os\nfrom prorl_gym.rollout import service\n"
        "def f():\n    import prorl_gym.api.app\n"
        "if TYPE_CHECKING:\n    from prorl_gym.cli import main\n"
    )
    assert imports_of(ast.parse(source)) == {"os", "prorl_gym.rollout.service", "prorl_gym.api.app"}


_ONLY_PLAIN = """
import pkgutil
import sys

sys.modules.update(dict.fromkeys(sys.argv[1:]))  # None: importing it fails
import prorl_gym

for name in ("Client", "SyncClient", "Rollout", "RolloutRequest", "RolloutSettings", "Outcome"):
    getattr(prorl_gym, name)
import prorl_gym.client, prorl_gym.records, prorl_gym.trainers
for module in pkgutil.iter_modules(prorl_gym.trainers.__path__, "prorl_gym.trainers."):
    __import__(module.name)
"""

_HEAVY = (
    *(
        "fastapi",
        "starlette",
        "uvicorn",
        "typer",
        "rich",
        "click",
        "ptyprocess",
        "jupyter_client",
        "IPython",
        "spython",
    ),
    *("transformers", "tokenizers", "math_verify", "sympy", "prometheus_client", "yaml", "nemo_gym", "ray", "numpy"),
    *("spython", "torch", "huggingface_hub"),
)


def test_client_records_and_trainers_load_where_nothing_else_is_installed() -> None:
    command = [sys.executable, "-c", _ONLY_PLAIN, *_HEAVY]
    child = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (child.returncode, child.stderr) == (0, "")


def test_package_root_imports_nothing_of_ours() -> None:
    script = "import sys, prorl_gym; print([name for name in sys.modules if name.startswith('prorl_gym')])"
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert ast.literal_eval(child.stdout) == ["prorl_gym"]
