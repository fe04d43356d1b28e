"""The python tool in its stock image, as ``.ci/stock-image`` built it: what models use, and what they do to it."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from sandbox_support import cell_output, closing, run_cell, sandbox_uid

from prorl_gym.sandbox.config import ImagesConfig, SandboxConfig, default_cache
from prorl_gym.sandbox.images.python_image import NAME
from prorl_gym.sandbox.images.store import ImageStore
from prorl_gym.sandbox.protocol import SandboxSpec
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.service.running_sandbox import RunningSandbox
from prorl_gym.sandbox.spawner.spawner_protocol import BackendName
from prorl_gym.testing.sandbox.conformance import CHECK_SPEC, PYTHON_CHECKS, Check

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.stock_image, pytest.mark.product]

STORE = default_cache() / f"stock-{sandbox_uid()}"
STOCK = SandboxSpec(image=NAME, limits=CHECK_SPEC.limits)
PLOT = "import matplotlib.pyplot as plt\nplt.plot([1, 4, 9])\nplt.title('squares')\nplt.show()"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(backend_name: BackendName, scratch: Path) -> AsyncIterator[NamespaceBackend]:
    store = ImageStore(ImagesConfig(directory=STORE, uid=sandbox_uid()))
    async with closing(
        NamespaceBackend(backend_name, SandboxConfig(scratch=scratch), store, on_close=store.close)
    ) as backend:
        yield backend


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box(backend: NamespaceBackend) -> AsyncIterator[RunningSandbox]:
    async with closing(await backend.start_sandbox(STOCK)) as box:
        yield box


async def test_ipython_of_the_image_wins_over_the_mount(box: RunningSandbox) -> None:
    result = await run_cell(box, "import IPython\nIPython.__file__")
    assert result.output == "'/usr/local/lib/python3.11/dist-packages/IPython/__init__.py'\n"
    assert (await box.python()).cell_runner == "ipython"


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("import numpy as np\nprint(np.arange(6).reshape(2, 3).sum(axis=0))", "[3 5 7]\n"),
        ("import sympy\nprint(sympy.integrate(sympy.Symbol('x') ** 2))", "x**3/3\n"),
    ],
)
async def test_numpy_and_sympy_calculate(box: RunningSandbox, code: str, shown: str) -> None:
    assert await cell_output(box, code) == shown


@pytest.mark.parametrize("magic", ["", "%matplotlib inline\n"])
async def test_plot_comes_back_as_png(box: RunningSandbox, magic: str) -> None:
    result = await run_cell(box, magic + PLOT)
    assert result.ok and len(result.images) == 1 and len(result.images[0]) > 5000, result.output
    assert result.images[0].startswith(b"\x89PNG\r\n\x1a\n")


async def test_pytest_is_there(box: RunningSandbox) -> None:
    await box.write_file("test_it.py", b"def test_it():\n    assert 1 + 1 == 2\n")
    result = await box.exec(["pytest", "-q"], timeout=60)
    assert result.exit_code == 0 and b"1 passed" in result.stdout, result


@pytest.mark.parametrize("check", PYTHON_CHECKS, ids=lambda check: check.__name__)
async def test_conformance(check: Check, backend: NamespaceBackend) -> None:
    async with closing(await backend.start_sandbox(STOCK)) as box:
        await check(box)


@pytest.mark.release
@pytest.mark.root
@pytest.mark.timeout(900)
async def test_second_build_without_network_is_the_same_image(ground: Path) -> None:
    first = ImageStore(ImagesConfig(directory=STORE, uid=sandbox_uid()))
    built = first.records.find_record(NAME)
    await first.close()
    assert built is not None
    place = ground / "stock-again"
    command = [sys.executable, "-m", "prorl_gym", "images", "build", NAME, "--store", str(place)]
    done = await asyncio.to_thread(
        subprocess.run,
        ["unshare", "--net", *command],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PIP_NO_INDEX": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1] == built.digest
