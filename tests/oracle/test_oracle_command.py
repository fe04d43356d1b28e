"""The command as the demo starts it."""

import asyncio
import json
import signal
import socket
import sys
from pathlib import Path

import aiohttp
import pytest

from prorl_gym.oracle.row_index import example_files, load_rows

pytestmark = pytest.mark.slow

START = "from prorl_gym.cli.main import app; app()"


async def start(*options):
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", START, "engine", "oracle", *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def test_it_prints_where_it_listens_and_ends_on_sigterm():
    process = await start("--port", "0")
    try:
        line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
        assert line.startswith("oracle engine: http://127.0.0.1:")
        url = line.split()[2]
        async with aiohttp.ClientSession() as http, http.get(f"{url}/models") as response:
            assert (await response.json())["data"][0]["id"] == "oracle"
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 20) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = await start("--port", str(port))
        _, complaint = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 2
    assert complaint.decode().splitlines()[-2].startswith(f"prorl-gym: 127.0.0.1:{port}: cannot listen (")


async def test_a_file_without_rows_is_named(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": "?"}) + "\n")
    process = await start("--rows", str(rows))
    _, complaint = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 2
    assert f"{rows}:1: 'environment' is missing." in complaint.decode()


@pytest.mark.default
def test_the_example_rows_are_known_and_have_a_gold_and_a_wrong_plan():
    files = example_files()
    assert len(files) >= 2
    index = load_rows(files)
    assert len(index) >= 10
    for file in files:
        for line in Path(file).read_text().splitlines():
            question = json.loads(line)["responses_create_params"]["input"][-1]["content"]
            row = index.find(question)
            assert row is not None
            assert row.task["question"] in question
            assert row.gold_steps() != row.wrong_steps(0)
