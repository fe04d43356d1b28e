"""What a payload sees of its host although it is kept from the rest: docs/threat-model.md says so."""

import os
from pathlib import Path

import pytest

from prorl_gym.sandbox.service.running_sandbox import RunningSandbox

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def cat(box: RunningSandbox, path: str) -> str:
    result = await box.exec(["/bin/cat", path], timeout=20)
    assert result.exit_code == 0, result.stderr
    return bytes(result.stdout).decode()


def of_host(path: str) -> str:
    return Path(path).read_text()


async def test_kernel_processors_load_and_memory_are_the_hosts(box: RunningSandbox) -> None:
    assert await cat(box, "/proc/sys/kernel/osrelease") == of_host("/proc/sys/kernel/osrelease")
    assert (await cat(box, "/proc/cpuinfo")).count("processor\t") == of_host("/proc/cpuinfo").count("processor\t")
    assert len((await cat(box, "/proc/loadavg")).split()) == 5
    assert int((await box.exec(["/usr/bin/nproc", "--all"], timeout=20)).stdout) == os.cpu_count()
    assert (await cat(box, "/proc/meminfo")).startswith(of_host("/proc/meminfo").splitlines()[0])


async def test_paths_of_cgroup_and_mounts_are_shown(box: RunningSandbox) -> None:
    assert ":/" in await cat(box, "/proc/self/cgroup")
    assert " / " in await cat(box, "/proc/self/mountinfo")
