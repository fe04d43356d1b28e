"""A task as SWE environments have them: a real sdist from PyPI in /testbed, git, a venv from wheels, its own tests."""

import subprocess
import sys
from pathlib import Path

import pytest
from sandbox_support import DEBIAN_IMAGE, closing, downloaded_once

from prorl_gym.sandbox.protocol import Mount, SandboxLimits, SandboxSpec
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.apptainer,
    pytest.mark.slow,
    pytest.mark.timeout(300),
]

SDIST = "toolz==0.12.1"
WHEELS = ("pip==24.3.1", "setuptools==75.6.0", "pytest==8.3.4", "iniconfig==2.0.0", "packaging==24.2", "pluggy==1.5.0")


def _download(target: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(target)]
    subprocess.run([*pip, "--no-binary", ":all:", SDIST], check=True, timeout=120)
    subprocess.run([*pip, "--only-binary", ":all:", *WHEELS], check=True, timeout=120)


@pytest.fixture(scope="module")
def packages() -> Path:
    """The sdist and the wheels, downloaded once and kept."""
    return downloaded_once("swe-like", _download)


# One uid is mapped: tar, which is root inside, cannot give files to the uids of their packager.
SCRIPT = """
tar --no-same-owner -xzf /packages/toolz-*.tar.gz --strip-components=1 -C /testbed
git init -q; git config user.email a@b; git config user.name n; git add -A; git commit -qm "as released"
python3 -m venv --without-pip /opt/venv
pip="/opt/venv/bin/python $(echo /packages/pip-*.whl)/pip"
$pip install -q --no-index --find-links /packages pytest setuptools
$pip install -q --no-index --no-build-isolation --no-deps -e .
/opt/venv/bin/python -m pytest -q -p no:cacheprovider toolz/tests 2>&1 | tail -n 3
"""


async def test_own_tests_of_a_real_package_pass(backend: NamespaceBackend, packages: Path) -> None:
    spec = SandboxSpec(
        image=str(DEBIAN_IMAGE),
        workdir="/testbed",
        mounts=(Mount(str(packages), "/packages"),),
        limits=SandboxLimits(root_size=1 << 30),
    )
    async with closing(await backend.start_sandbox(spec)) as box:
        shell = await box.shell()
        await box.write_file("/tmp/set-up", SCRIPT.encode())
        result = await shell.run_command("bash -e -o pipefail /tmp/set-up", timeout=240)
        assert result.exit_code == 0, result
        assert " passed" in result.output and "failed" not in result.output, result
        # What an agent does next: break it, see red, look, and take it back.
        await shell.run_command("sed -i 's/return x/return None/' toolz/functoolz.py", timeout=20)
        red = await shell.run_command("/opt/venv/bin/python -m pytest -q -x toolz/tests/test_functoolz.py", timeout=120)
        assert red.exit_code == 1 and "1 failed" in red.output, red
        assert (
            "toolz/functoolz.py"
            in (await shell.run_command("git status --porcelain; git diff --stat", timeout=20)).output
        )
        await shell.run_command("rm -rf toolz && git checkout -q .", timeout=20)
        green = await shell.run_command("/opt/venv/bin/python -m pytest -q toolz/tests/test_functoolz.py", timeout=120)
        assert green.exit_code == 0, green
        assert (await shell.run_command("cut -s -d: -f1 /proc/net/dev", timeout=20)).output.split() == ["lo"]
