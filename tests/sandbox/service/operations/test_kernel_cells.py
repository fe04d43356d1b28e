"""Cells in a kernel, as the service sees it: one that does what cells tell it, right or wrong."""

import asyncio
import base64
import secrets
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from sandbox_support import closing, fails_as, run_cell

from prorl_gym.errors import FailureKind
from prorl_gym.sandbox.protocol import CellResult
from prorl_gym.sandbox.service.local_backend import LocalBackend
from prorl_gym.sandbox.service.running_sandbox import RunningSandbox
from prorl_gym.testing.sandbox.conformance import CHECK_SPEC

pytestmark = pytest.mark.asyncio(loop_scope="module")

FAKE = str(Path(__file__).parent / "fake_kernel")
KERNEL = replace(CHECK_SPEC, python_tool="kernel", env={"PYTHONPATH": FAKE})
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n").decode()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend() -> AsyncIterator[LocalBackend]:
    async with closing(LocalBackend(allow_unsafe_local=True)) as backend:
        yield backend


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box(backend: LocalBackend) -> AsyncIterator[RunningSandbox]:
    async with closing(await backend.start_sandbox(KERNEL)) as box:
        yield box


@pytest.mark.parametrize(
    ("code", "output"),
    [
        pytest.param("print('printed')\nk.show(text_plain='shown')\nk.done()", "printed\nshown\n", id="in order"),
        pytest.param("k.show(text_plain='shown')\nk.reply()", "shown\n", id="a kernel that forgets to be idle"),
        pytest.param(
            "k.reply(payload=[{'source': 'page', 'data': {'text/plain': 'a page'}}, 5])\nk.idle()",
            "a page\n",
            id="help pages",
        ),
        *(
            pytest.param(forged + "\nk.done()", "", id=f"not the cell's: {forged[:40]}")
            for forged in (
                "k.publish('display_data', {'data': {'text/plain': 'forged'}}, parent={})",
                "k.publish('stream', {'text': 'forged'}, parent={'msg_id': 'another'})",
                "k.session.key, real = b'another', k.session.key; k.show(text_plain='forged'); k.session.key = real",
                "k.iopub.send_multipart([b'forged'])",
                "k.publish('display_data', {'data': ['forged']})",
                "k.publish('display_data', {})",
                "k.publish('comm_msg', {'data': {'text/plain': 'forged'}})",
            )
        ),
    ],
)
async def test_what_belongs_to_a_cell_is_its_output(box: RunningSandbox, code: str, output: str) -> None:
    assert await run_cell(box, code) == CellResult(output, True)


async def test_an_error_is_output_and_the_kernel_lives_on(box: RunningSandbox) -> None:
    code = "k.publish('error', {'ename': 'E', 'evalue': 'x', 'traceback': ['line', 'E: x']})\n"
    result = await run_cell(box, code + "k.reply(status='error')\nk.idle()")
    assert result == CellResult("line\nE: x\n", False)
    assert (await run_cell(box, "k.done()")).ok


async def test_figures_are_images_in_place_of_their_text(box: RunningSandbox) -> None:
    result = await run_cell(box, f"k.show(image_png='{PNG}\\n', text_plain='<Figure>')\nk.done()")
    assert (result.output, len(result.images)) == ("", 1)
    assert result.images[0].startswith(b"\x89PNG")


@pytest.mark.parametrize("picture", ["'aGVsbG8='", "'not base64'", "5", "['x']", "'A' * (17 << 20)"])
async def test_what_is_no_image_is_text_at_most(box: RunningSandbox, picture: str) -> None:
    result = await run_cell(box, f"k.publish('display_data', {{'data': {{'image/png': {picture}}}}})\nk.done()")
    assert result.ok and result.images == ()


async def test_images_are_counted(box: RunningSandbox) -> None:
    assert len((await run_cell(box, f"for _ in range(20): k.show(image_png='{PNG}')\nk.done()")).images) == 8


@pytest.mark.parametrize("length", ["8 << 20", "17 << 20"])
async def test_a_long_value_is_cut(box: RunningSandbox, length: str) -> None:
    result = await run_cell(box, f"k.show(text_plain='x' * ({length}))\nk.done()")
    assert result.ok and "bytes left out" in result.output and len(result.output) < CHECK_SPEC.limits.output + 200


@pytest.mark.parametrize("flood", ["k.iopub.send(b'')", "k.show(text_plain='x' * (1 << 20))"])
async def test_an_endless_stream_of_messages_ends_with_its_cell(box: RunningSandbox, flood: str) -> None:
    result = await run_cell(box, f"k.iopub.sndhwm = 0\nwhile True: {flood}", seconds=1)
    assert result.restarted and result.timed_out and not result.ok
    assert len(result.output) < CHECK_SPEC.limits.output + 300
    assert (await run_cell(box, "k.done()")).ok


async def test_a_cell_that_closes_its_descriptors_is_over(box: RunningSandbox) -> None:
    result = await run_cell(box, "import os; os.closerange(3, 100)\nk.done()")
    assert result.restarted and not result.ok and not result.timed_out
    assert (await run_cell(box, "k.done()")).ok


async def test_one_that_never_replies_is_killed_at_the_timeout(box: RunningSandbox) -> None:
    result = await run_cell(box, "print('said')\nk.idle()", seconds=0.2)
    assert result.timed_out and result.restarted and result.output.startswith("said\n")


async def test_its_end_is_reported_with_its_output_before(box: RunningSandbox) -> None:
    result = await run_cell(box, "print('said', flush=True)\nimport os; os._exit(3)")
    assert result.restarted and result.output.startswith("said\n") and "exit code 3" in result.output


async def test_a_cancelled_cell_ends_with_its_kernel(box: RunningSandbox) -> None:
    name = secrets.token_hex(8)
    cell = asyncio.ensure_future(run_cell(box, f"open('{name}', 'w').close()\nimport time; time.sleep(1000)"))
    while name not in [entry.name for entry in await box.list_dir(".")]:  # noqa: ASYNC110 - no event reaches us
        await asyncio.sleep(0.02)
    cell.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cell
    assert await run_cell(box, "print('again')\nk.done()") == CellResult("again\n", True, restarted=True)


async def test_it_is_asked_again_until_its_publisher_knows_us(backend: LocalBackend) -> None:
    box = await backend.start_sandbox(replace(KERNEL, env={**KERNEL.env, "FAKE_SILENT": "2"}))
    assert (await run_cell(box, "print('ready')\nk.done()")).output == "ready\n"
    await box.close()


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"PYTHONPATH": ""}, r"No module named 'ipykernel'"),
        ({"FAKE_WORDS": "no such thing"}, "no such thing"),
        ({"FAKE_UNBOUND": "1"}, "Connection refused"),
    ],
)
async def test_an_image_without_a_kernel_that_works_is_broken(
    backend: LocalBackend, env: dict[str, str], words: str
) -> None:
    box = await backend.start_sandbox(replace(KERNEL, env={**KERNEL.env, **env}))
    with fails_as(FailureKind.IMAGE_BROKEN, match=words) as raised:
        await box.python()
    await box.close()
    assert "python_tool: session" in raised.value.fix and str(raised.value).count("\n") == 1
