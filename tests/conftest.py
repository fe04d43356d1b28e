"""What a test may need, and what happens when it is not there.

A marker names a need. A need that is missing skips the test with a reason, unless ``PRORL_GYM_REQUIRE`` (a
comma-separated list) names it: then the test fails, so that a machine that was provisioned for it cannot pass by
skipping. ``tiers.py`` says which tests a run plays.
"""

import gc
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tiers


def _importable(*names: str) -> Callable[[], bool]:
    return lambda: all(find_spec(name) is not None for name in names)


def _in_usr(program: str) -> bool:
    """Whether sandboxes of the host's ``/usr`` have a program: its links lead to nothing outside of that."""
    found = shutil.which(program, path="/usr/bin:/usr/local/bin")
    return found is not None and os.path.realpath(found).startswith("/usr/")


def _cache() -> Path:
    """Where provisioned things are (``.ci/run``). Looked up without the package, which may not be importable."""
    default = "/var/cache/prorl-gym" if os.geteuid() == 0 else "~/.cache/prorl-gym"
    return Path(os.environ.get("PRORL_GYM_CACHE") or default).expanduser()


def _stock_image() -> bool:
    """Whether ``.ci/stock-image`` has finished here."""
    return (_cache() / f"stock-{os.geteuid() or 61099}.built").is_file()


def _vllm() -> str:
    """Interpreter that ``.ci/vllm`` has made here; empty: none, or it is not wanted (``CI_NO_VLLM=1``)."""
    if os.environ.get("CI_NO_VLLM") == "1":
        return ""
    made = _cache() / "vllm.python"
    python = made.read_text().strip() if made.is_file() else ""
    return python if os.access(python, os.X_OK) else ""


def _oracles() -> Path:
    """Interpreter that ``.ci/oracles`` has made."""
    return _cache() / "oracles" / "bin" / "python"


def _axe() -> Path:
    """Accessibility rules that ``.ci/chromium`` has fetched."""
    return _cache() / "axe-core.js"


def _harnesses() -> bool:
    """Whether ``.ci/harnesses`` has finished here, once; a test that needs a newer preset says so."""
    names = ("claude-code", "codex", "mini-swe-agent", "opencode", "openhands", "qwen-code")
    return all(any((_cache() / "agents").glob(f"{name}-*")) for name in names)


def _slurm() -> bool:
    """Whether this machine may submit jobs."""
    return shutil.which("sinfo") is not None and subprocess.run(["sinfo"], capture_output=True).returncode == 0


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job; tests interrupt programs
    signal.signal(signal.SIGINT, signal.default_int_handler)

NEEDS: dict[str, tuple[Callable[[], bool], str]] = {
    "apptainer": (
        lambda: any(shutil.which(name) for name in ("apptainer", "singularity")),
        "Apptainer is not installed",
    ),
    "chromium": (
        lambda: shutil.which("chromium") is not None and find_spec("playwright") is not None and _axe().is_file(),
        "Chromium, playwright or axe-core is not installed (.ci/chromium)",
    ),
    "gym": (_importable("nemo_gym"), "NeMo Gym is not installed in this environment"),
    "harness": (_harnesses, "the presets of agent programs are not installed (.ci/harnesses)"),
    "mini_swe_agent": (_importable("minisweagent", "tenacity"), "mini-swe-agent is not installed (.ci/gym-agents)"),
    "vllm": (lambda: bool(_vllm()), "no environment with vLLM is in the cache (.ci/vllm), or CI_NO_VLLM=1"),
    "ray": (_importable("ray"), "Ray is not installed in this environment"),
    "slurm": (_slurm, "there is no Slurm here (.ci/slurm)"),
    "cpp": (lambda: shutil.which("g++", path="/usr/bin:/usr/local/bin") is not None, "g++ is not installed in /usr"),
    "node": (lambda: _in_usr("node"), "Node.js is not installed in /usr"),
    "java": (lambda: _in_usr("java"), "no Java runtime is installed in /usr"),
    "data": (_importable("pyarrow", "unearth"), "prorl-gym[data] is not installed in this environment"),
    "mcp": (_importable("mcp"), "prorl-gym[mcp] is not installed in this environment"),
    "swebench": (_importable("swebench"), "prorl-gym[swe] is not installed in this environment"),
    "oracles": (_oracles().is_file, "no environment with Harbor and SWE-bench is in the cache (.ci/oracles)"),
    "stock_image": (_stock_image, "the python tool's stock image is not built (.ci/stock-image, as root)"),
    "trl": (_importable("trl", "torch"), "TRL is not installed in this environment (.ci/trainers)"),
    "verl": (
        _importable("verl", "cachetools", "fastapi", "uvicorn"),
        "verl is not installed in this environment (.ci/trainers)",
    ),
    "verifiers": (_importable("verifiers"), "verifiers is not installed in this environment (.ci/trainers)"),
    "root": (lambda: os.geteuid() == 0, "not started as root"),
}


def required() -> set[str]:
    """Return the needs that may not be missing."""
    names = {name.strip() for name in os.environ.get("PRORL_GYM_REQUIRE", "").split(",") if name.strip()}
    unknown = names - set(NEEDS)
    if unknown:
        raise pytest.UsageError(f"PRORL_GYM_REQUIRE: unknown {sorted(unknown)}. Known: {', '.join(sorted(NEEDS))}.")
    return names


def pytest_addoption(parser: pytest.Parser) -> None:
    tiers.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Give the tests, and all that they start, a temporary directory of their own: libraries leave things there."""
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # paths of tests stay short: sockets
    own = tempfile.mkdtemp(prefix="prorl-tests-")
    os.chmod(own, 0o1777)  # as /tmp: tests start programs as other users
    before, os.environ["TMPDIR"], tempfile.tempdir = os.environ.get("TMPDIR"), own, own

    def remove() -> None:
        tempfile.tempdir = None
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before
        shutil.rmtree(own, ignore_errors=True)

    config.add_cleanup(remove)


_seconds: Counter[str] = Counter()
"""What the tests of each folder took, in seconds of a worker."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    folders = report.nodeid.partition("::")[0].split("/")[:-1]
    _seconds["/".join(folders[:2])] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Note for ``.ci/budgets`` what the tests of each folder took."""
    cache: pytest.Cache | None = getattr(session.config, "cache", None)
    if cache is not None and not hasattr(session.config, "workerinput"):
        cache.set("prorl/seconds", {folder: round(seconds) for folder, seconds in _seconds.most_common()})


def pytest_report_header(config: pytest.Config) -> list[str]:
    present = ", ".join(name for name in NEEDS if NEEDS[name][0]())
    return [f"needs present: {present or 'none'}", tiers.header(config)]


def pytest_itemcollected(item: pytest.Item) -> None:
    """Give one worker of pytest-xdist all tests with real engines, which are costly to start."""
    if item.get_closest_marker("vllm"):
        item.add_marker(pytest.mark.xdist_group("servers"))  # later than here, pytest-xdist has read the groups


def _missing(item: pytest.Item) -> list[str]:
    """Needs of a test that are not there."""
    return [name for name, (present, _) in NEEDS.items() if item.get_closest_marker(name) and not present()]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tiers.mark_slow(items)
    chosen = tiers.select(config, items, lambda item: not _missing(item))
    if left_out := set(items) - set(chosen):
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = chosen


def pytest_collection_finish(session: pytest.Session) -> None:
    """Check that groups hold, and leave all that was imported out of garbage collections.

    A service does so when it starts. Here thousands start in one process, and nothing would ever be collected.
    """
    if getattr(session.config.option, "loadgroup", False):
        alone = [item.nodeid for item in session.items if item.get_closest_marker("xdist_group")]
        assert all("@" in nodeid for nodeid in alone), "pytest-xdist has not read the groups of tests"
    gc.collect()
    gc.freeze()
    gc.freeze = lambda: None


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """Interpreter with vLLM, for tests marked ``vllm``."""
    return _vllm()


@pytest.fixture(scope="session")
def oracles() -> Iterator[Callable[..., dict[str, Any]]]:
    """Ask the owners of foreign formats (``foreign_readers.py``), for tests marked ``oracles``."""
    command = [_oracles(), Path(__file__).with_name("foreign_readers.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None

        def ask(**request: object) -> dict[str, Any]:
            print(json.dumps(request), file=process.stdin, flush=True)
            return json.loads(process.stdout.readline())

        yield ask
        process.stdin.close()


@pytest.fixture(scope="session")
def axe_rules() -> str:
    """Program of axe-core, for tests marked ``chromium``."""
    return _axe().read_text(encoding="utf-8")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    for name in _missing(item):
        reason = NEEDS[name][1]
        if name in required():
            pytest.fail(f"{reason}, but PRORL_GYM_REQUIRE names {name!r}", pytrace=False)
        pytest.skip(reason)
