"""Python workers that are forked from the template are what fresh interpreters in the sandbox would be."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from sandbox_support import cell_output, children_of, closing
from test_ipython import *  # noqa: F403 - the same tests, over a worker that is a fork

from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.guest.fork_exec import fork_template
from prorl_gym.sandbox.guest.guest_messages import ChildStartError
from prorl_gym.sandbox.guest.process_table import ProcessTable
from prorl_gym.sandbox.limit_breach import Breach
from prorl_gym.sandbox.protocol import Mount, SandboxLimits, SandboxSpec
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.service.running_sandbox import RunningSandbox
from prorl_gym.sandbox.spawner.spawner_protocol import BackendName

del test_closed_cache_does_not_stop_sandboxes  # noqa: F821 - it has a backend of its own
pytestmark = pytest.mark.asyncio(loop_scope="module")

FRESH = SandboxSpec(env={"PYTHONUNBUFFERED": ""})
"""Its interpreters are started, since a variable that they read is set."""
FACTS = """
import gc, json, linecache, locale, os, resource, signal, site, sys, threading, warnings
def of_descriptor(number):
    try:
        return os.readlink(f"/proc/self/fd/{number}").partition("[")[0]
    except OSError:
        return ""
status = dict(line.split(":\\t") for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
shell = get_ipython()
handlers = {number.name: str(signal.getsignal(number)).partition(" at ")[0] for number in signal.valid_signals()
            if hasattr(number, "name")}
facts = {
    "version": sys.version, "executable": sys.executable, "argv": sys.argv, "path": sys.path, "flags": list(sys.flags),
    "cwd": os.getcwd(), "environment": {**os.environ, "PYTHONUNBUFFERED": ""}, "umask": os.umask(0o022),
    "limits": [resource.getrlimit(number) for number in range(16)], "handlers": handlers,
    "streams": [(s.name, s.encoding, s.errors, s.line_buffering, s.writable(), s.seekable())
                for s in (sys.stdin, sys.stdout, sys.stderr, sys.__stdout__)],
    "descriptors": [of_descriptor(number) for number in range(12)],
    "privileges": [status[key] for key in sorted(status) if key[:3] in ("Cap", "NoN", "Sec", "Uid", "Gid", "Sig")],
    "threads": threading.active_count(), "collects": gc.isenabled(), "frozen": gc.get_freeze_count(),
    "locale": locale.setlocale(locale.LC_ALL), "user site": site.ENABLE_USER_SITE, "hooks": str(sys.excepthook)[:20],
    "shell": [shell.starting_dir, shell.history_manager.dir_hist, shell.home_dir, shell.execution_count,
              sorted(shell.user_ns), os.path.dirname(shell.ipython_dir), os.listdir(shell.ipython_dir)],
    "main": [__name__, sys.modules["__main__"].__dict__ is globals()],
    "ours": [name for name in sys.modules if "prorl" in name or "customize" in name],
    "modules": sorted(sys.modules), "lines": len(linecache.cache), "hidden": sorted(shell.user_ns_hidden),
    "finders": [str(finder).partition(" ")[0] for finder in sys.meta_path],
    "functions": [str(function).partition(" at ")[0] for function in (open, os.stat)],
    "ipython": [sys.modules["IPython"].__file__, shell.run_cell.__code__.co_filename],
    "parent": os.getpgrp() == os.getsid(0) == os.getpid(), "score": open("/proc/self/oom_score_adj").read(),
    "mode": oct(os.stat("/proc/self/mem").st_mode), "owner": os.stat("/proc/self/mem").st_uid,
}
print(json.dumps(facts, default=str))
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box(backend: NamespaceBackend) -> AsyncIterator[RunningSandbox]:
    assert await backend.prepare_python()
    async with closing(await backend.start_sandbox(SandboxSpec())) as box:
        yield box


async def hash_seed(backend: NamespaceBackend, spec: SandboxSpec, *commands: str) -> str:
    """Return what shows the hash seed of a new sandbox's interpreter, which forks of one process share."""
    async with closing(await backend.start_sandbox(spec)) as box:
        for command in commands:
            done = await box.exec(["sh", "-c", command], timeout=30)
            assert done.exit_code == 0, done
        return await cell_output(box, "hash('a text')")


async def test_workers_are_forks(backend: NamespaceBackend, box: RunningSandbox):
    assert await hash_seed(backend, SandboxSpec()) == await cell_output(box, "hash('a text')")
    assert await hash_seed(backend, FRESH) != await cell_output(box, "hash('a text')")


async def test_cells_find_what_a_fresh_interpreter_has(backend: NamespaceBackend):
    assert await backend.prepare_python()
    facts: list[dict[str, Any]] = []
    for spec in (SandboxSpec(), FRESH):
        async with closing(await backend.start_sandbox(spec)) as box:
            facts.append(json.loads(await cell_output(box, FACTS)))
    forked, fresh = facts
    assert forked == fresh


@pytest.mark.parametrize("code", ["open('/missing')", "import json\njson.loads('{')", "%run missing.py", "!false\n1/0"])
async def test_errors_look_alike(backend: NamespaceBackend, box: RunningSandbox, code: str):
    async with closing(await backend.start_sandbox(FRESH)) as started:
        forked, fresh = [await (await each.python()).run_cell(code, timeout=30) for each in (box, started)]
    assert forked == fresh


async def test_random_numbers_differ_between_workers(backend: NamespaceBackend):
    code = "import random, tempfile, uuid\n(random.random(), next(tempfile._get_candidate_names()), uuid.uuid4())"
    seen: set[str] = set()
    for _ in range(3):
        async with closing(await backend.start_sandbox(SandboxSpec())) as box:
            seen.add(await cell_output(box, code))
    assert len(seen) == 3


@pytest.mark.parametrize(
    "change",
    [
        """cd "$(python3 -c 'import sys; print(*[p for p in sys.path if "local" in p])')" && touch decimal.py""",
        "mkdir -p /etc/python3.11 /usr/local/lib/python3.11/dist-packages; "
        "echo 'x = 1' > /usr/local/lib/python3.11/dist-packages/usercustomize.py",
        "mkdir -p $(python3 -m site --user-site)",
    ],
    ids=["a module", "a customisation", "a user's packages"],
)
async def test_a_changed_python_is_started_afresh(backend: NamespaceBackend, box: RunningSandbox, change: str):
    assert await hash_seed(backend, SandboxSpec(), change) != await cell_output(box, "hash('a text')")


async def test_ends_are_told_apart(backend: NamespaceBackend):
    box = await backend.start_sandbox(SandboxSpec(limits=SandboxLimits(cpu_seconds=2)))
    python = await box.python()
    ended = await python.run_cell("import os; os._exit(3)", timeout=20)
    assert "exit code 3" in ended.output and ended.breach is None, ended
    killed = await python.run_cell("import os; os.kill(os.getpid(), 9)", timeout=20)
    assert "exit code 137" in killed.output and killed.breach is None, killed
    deaf = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    slow = await python.run_cell(deaf, timeout=20)
    assert slow.breach is Breach.CPU, slow
    await box.close()


async def test_what_a_worker_starts_ends_with_it(fresh: RunningSandbox):
    python = await fresh.python()
    started = "import subprocess\n_ = subprocess.Popen('sleep 300 & sleep 300', shell=True, start_new_session=True)"
    assert (await python.run_cell(started, timeout=20)).ok
    await python.close()
    assert b"sleep" not in (await fresh.exec(["ps", "-e"], timeout=20)).stdout


async def test_memory_of_workers_is_counted(backend: NamespaceBackend):
    limits = SandboxLimits(memory=200 << 20, total_memory=300 << 20)
    code = "import signal\nblock = bytearray(b'x') * (250 << 20)\nsignal.pause()"
    async with closing(await backend.start_sandbox(SandboxSpec(limits=limits))) as box:
        grown = await (await box.python()).run_cell(code, timeout=30)
    assert grown.breach in (Breach.MEMORY_PROCESS, Breach.MEMORY_SANDBOX), grown


async def test_a_killed_template_is_replaced(backend: NamespaceBackend, box: RunningSandbox):
    seed = await cell_output(box, "hash('a text')")
    template = next(pid for pid in children_of(await backend.spawner_pid()) if _command(pid) == "python3")
    os.kill(template, signal.SIGKILL)
    assert await cell_output(box, "hash('a text')") == seed  # what runs goes on
    async with asyncio.timeout(30):
        while await hash_seed(backend, SandboxSpec()) == seed or not await backend.prepare_python():
            continue
    assert await hash_seed(backend, SandboxSpec()) == await hash_seed(backend, SandboxSpec()) != seed


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0].decode()


async def test_a_mount_over_a_directory_of_python_is_seen(backend: NamespaceBackend, ground: Path):
    source = ground / "mounted"
    source.mkdir(exist_ok=True)
    seed = await hash_seed(backend, SandboxSpec())
    for target in ("/usr/local/lib/python3.11/dist-packages", "/srv/../usr/lib/python3"):
        assert await hash_seed(backend, SandboxSpec(mounts=(Mount(str(source), target),))) != seed
    assert await hash_seed(backend, SandboxSpec(mounts=(Mount(str(source), "/data"),))) == seed


async def test_a_template_that_has_ended_is_a_failure_of_its_stage():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.close()
    processes = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    with ours, pytest.raises(ChildStartError) as failure:
        fork_template(ours, ProcessTable(processes), {}, {0: 0, 1: 1, 2: 2})
    os.close(processes)
    assert failure.value.stage == "template"


async def test_a_template_that_is_still_loading_leaves_nothing_behind(backend_name: BackendName, own_scratch: Path):
    backend = NamespaceBackend(backend_name, SandboxConfig(scratch=own_scratch))
    loading = asyncio.create_task(backend.prepare_python())
    async with asyncio.timeout(30):
        while not any(name.startswith("template-") for name in os.listdir(own_scratch)):  # noqa: ASYNC110
            await asyncio.sleep(0)  # nothing is reported before it has loaded
    await backend.close()
    assert not await loading
    assert not [name for name in os.listdir(own_scratch) if "template" in name]
