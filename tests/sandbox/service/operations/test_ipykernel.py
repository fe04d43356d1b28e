"""A real ipykernel in the small Debian image: the kit that every python session runs, and what only a kernel does."""

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
from sandbox_support import DEBIAN_IMAGE, closing, downloaded_once

from prorl_gym.sandbox.images.python_image import locked_wheels
from prorl_gym.sandbox.protocol import Mount, Sandbox, SandboxSpec
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.testing.sandbox.conformance import CHECK_SPEC, PYTHON_CHECKS, Check

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.apptainer,
    pytest.mark.product,
    pytest.mark.timeout(300),
]

BIG = ("matplotlib", "numpy", "sympy", "pillow", "fonttools", "contourpy", "kiwisolver", "mpmath")
"""Not needed by a kernel."""


@pytest.fixture(scope="module")
def packages() -> Path:
    """What the stock image has of ipykernel, installed for the image's python once and kept."""
    lock = [f"{name} --hash={digest}" for digest, name in locked_wheels().items() if name.partition("==")[0] not in BIG]
    version = next(line.split()[0] for line in lock if line.startswith("ipykernel=="))
    return downloaded_once(f"kernel-{version}", partial(_install, lock))


def _install(lock: list[str], target: Path) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(lock))
        file.flush()
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
        image = ("--only-binary=:all:", "--implementation=cp", "--python-version=3.11", "--no-deps", "--require-hashes")
        machines = ("--platform=manylinux_2_28_x86_64", "--platform=manylinux2014_x86_64")
        subprocess.run([*pip, *image, *machines, f"--target={target}", "-r", file.name], check=True, timeout=200)


@pytest.fixture(scope="module")
def spec(packages: Path) -> SandboxSpec:
    mount = Mount(str(packages), "/opt/kernel")
    return replace(
        CHECK_SPEC, image=str(DEBIAN_IMAGE), mounts=(mount,), env={"PYTHONPATH": mount.target}, python_tool="kernel"
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kernel_box(backend: NamespaceBackend, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
    async with closing(await backend.start_sandbox(spec)) as box:
        yield box


@pytest.mark.parametrize("check", PYTHON_CHECKS, ids=lambda check: check.__name__)
async def test_python_conformance(check: Check, kernel_box: Sandbox) -> None:
    await check(kernel_box)


async def test_a_displayed_picture_is_an_image(kernel_box: Sandbox) -> None:
    python = await kernel_box.python()
    code = "from IPython.display import Image, display\ndisplay(Image(data=b'\\x89PNG\\r\\n\\x1a\\n' + b'x' * 10))"
    result = await python.run_cell(code, timeout=60)
    assert (result.ok, result.output, len(result.images)) == (True, "", 1)


async def test_it_is_the_images_own_kernel(kernel_box: Sandbox) -> None:
    python = await kernel_box.python()
    result = await python.run_cell("get_ipython().kernel.implementation, __import__('ipykernel').__file__", timeout=60)
    assert result.output == "('ipython', '/opt/kernel/ipykernel/__init__.py')\n"


async def test_nothing_of_it_is_left_in_the_file_system(kernel_box: Sandbox) -> None:
    python = await kernel_box.python()
    found = await python.run_cell(
        "import glob; glob.glob('/tmp/.kernel*'), glob.glob('*') + glob.glob('@*')", timeout=60
    )
    assert found.output.startswith("([], ") and "@" not in found.output


async def test_its_sockets_are_the_sandboxs_own(kernel_box: Sandbox) -> None:
    await kernel_box.python()
    inside = await kernel_box.exec(["cat", "/proc/net/unix"], timeout=60)
    names = {word for word in inside.stdout.decode().split() if word.startswith("@prorl-kernel-")}
    host = await asyncio.to_thread(Path("/proc/net/unix").read_text)
    assert len(names) == 5 and not [name for name in names if name in host]
