"""A real distribution's image, made by ``.ci/base-image``: git, python and removals as in a task's repository."""

import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from sandbox_support import DEBIAN_IMAGE
from test_root import COMMITS, identities

from prorl_gym.sandbox.protocol import SandboxSpec
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.service.running_sandbox import RunningSandbox

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.apptainer]


@pytest.fixture(scope="module")
def image() -> str:
    if not DEBIAN_IMAGE.is_dir():
        reason = f"normal outside CI: there is no {DEBIAN_IMAGE}; to have it, run .ci/base-image (needs a network)"
        if "apptainer" in os.environ.get("PRORL_GYM_REQUIRE", ""):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    return str(DEBIAN_IMAGE)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def debian(backend: NamespaceBackend, image: str) -> AsyncIterator[RunningSandbox]:
    box = await backend.start_sandbox(SandboxSpec(image=image))
    yield box
    await box.close()


async def bash(box: RunningSandbox, script: str) -> str:
    result = await box.exec(["/bin/bash", "-ec", script], timeout=30)
    assert result.exit_code == 0, result
    return result.stdout.decode()


async def test_git_checks_out_over_a_removed_directory(debian: RunningSandbox) -> None:
    script = """
    cd /workspace; git init -q; git config user.email a@b; git config user.name n
    mkdir pkg; echo 1 > pkg/file; git add .; git commit -qm one
    rm -rf pkg; git checkout -q .; cat pkg/file; git status --porcelain
    """
    assert await bash(debian, script) == "1\n"


async def test_git_commits_without_an_identity(debian: RunningSandbox) -> None:
    assert identities(await bash(debian, f"cd $(mktemp -d); {COMMITS}")) == [
        "Given <m@m> Mine",
        "Mine <m@m> Mine",
        "root <root@localhost> root",
    ]


async def test_system_directory_can_be_removed_and_made_again(debian: RunningSandbox) -> None:
    assert await bash(debian, "rm -rf /usr/share/doc; mkdir /usr/share/doc; ls -A /usr/share/doc") == ""
    assert (DEBIAN_IMAGE / "usr/share/doc").is_dir()


async def test_new_directory_in_a_system_directory_can_be_renamed(debian: RunningSandbox) -> None:
    assert await bash(debian, "cd /usr/lib; mkdir new; touch new/x; mv new newer; ls newer") == "x\n"


async def test_packages_can_be_removed(debian: RunningSandbox) -> None:
    await bash(debian, "dpkg --force-all -r git >/dev/null 2>&1; ! command -v git")
    assert (DEBIAN_IMAGE / "usr/bin/git").exists()


async def test_python_of_the_image_runs(debian: RunningSandbox) -> None:
    assert (await bash(debian, "python3 -c 'import json, sqlite3; print(6 * 7)'")) == "42\n"
