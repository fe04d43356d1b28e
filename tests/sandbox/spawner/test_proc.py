"""What a payload can write to ``/proc``: nothing of the kernel's, all that its own descriptors lead to."""

from pathlib import Path

import pytest
from sandbox_support import children_of
from test_attacks import bash

from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.service.running_sandbox import RunningSandbox
from prorl_gym.sandbox.spawner.scratch import read_state

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("score", [0, 799, 1000])
@pytest.mark.parametrize("file", ["self/oom_score_adj", "self/task/$$/../../oom_score_adj", "$PPID/oom_score_adj"])
async def test_who_is_killed_for_memory_is_not_the_payloads_choice(box: RunningSandbox, file: str, score: int) -> None:
    result = await bash(box, f"echo {score} > /proc/{file}; cat /proc/self/oom_score_adj")
    assert result.stdout == b"800\n" and b"oom_score_adj" in result.stderr


async def test_everything_of_a_sandbox_is_killed_before_the_service(
    backend: NamespaceBackend, box: RunningSandbox
) -> None:
    await (await box.shell()).run_command("sleep 60 &", timeout=10)
    state = read_state(backend.scratch / box.id, "")
    assert state is not None and state.init is not None
    inside = [pid for pid in children_of(state.init.pid) if in_other_pids(pid)]
    assert len(inside) >= 2
    assert {score_of(pid) for pid in inside} == {800}
    assert score_of(await backend.spawner_pid()) < 800


def score_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def in_other_pids(pid: int) -> bool:
    """Whether a process is in a pid namespace below this one."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return len(next(line for line in lines if line.startswith("NSpid:")).split()) > 2


@pytest.mark.parametrize("file", ["sys/kernel/shmall", "sys/kernel/sem", "self/comm", "self/coredump_filter"])
async def test_files_of_the_kernel_cannot_be_opened_for_writing(box: RunningSandbox, file: str) -> None:
    assert b"Read-only file system" in (await bash(box, f": >> /proc/{file}")).stderr


@pytest.mark.parametrize("command", ["mount -o remount,rw /proc", "umount /proc", "mount -t proc p /mnt"])
async def test_it_stays_so(box: RunningSandbox, command: str) -> None:
    assert (await bash(box, command)).exit_code != 0
    assert (await bash(box, "echo 0 > /proc/self/oom_score_adj")).exit_code != 0


async def test_what_descriptors_lead_to_is_as_writable_as_ever(box: RunningSandbox) -> None:
    script = """
set -e
echo to fd > /proc/self/fd/1
echo to stderr > /dev/stderr
exec 7>/tmp/through-proc
echo file > /proc/$$/fd/7
cat /tmp/through-proc
"""
    result = await bash(box, script)
    assert (result.stdout, result.stderr, result.exit_code) == (b"to fd\nfile\n", b"to stderr\n", 0)
