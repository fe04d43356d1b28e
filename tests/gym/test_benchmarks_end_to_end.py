"""``gym eval run --benchmark``, with everything as a user starts it. Slow: it starts Gym and Ray.

The rows of three benchmarks are prepared from published columns; those of SWE-bench Verified would need its images, so
example rows of the same environment take their place.
"""

import json
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import gym_needed  # noqa: F401
import pytest
from foreign_run import read_lines, run_python
from typer.testing import CliRunner

from prorl_gym.cli.installation import gym_root
from prorl_gym.cli.main import app
from prorl_gym.data.benchmarks import BENCHMARKS, benchmark_file
from prorl_gym.trainers.nemo_rl import check_result
from tests.data.test_benchmarks import PUBLISHED

pytestmark = [pytest.mark.gym, pytest.mark.slow, pytest.mark.timeout(400)]

REPEATS = {"prorl_aime25": 32, "prorl_gpqa_diamond": 8, "prorl_livecodebench": 3, "prorl_swebench_verified": 1}
SOLUTION = "print(2 * int(input()))\n"
"""Of the programming tasks; the oracle knows the other answers from the rows."""

RUN = """
    import asyncio, sys
    from pathlib import Path

    from prorl_gym.cli.demo.stack import HOST, DemoFolders, DemoStack, ProcessSupervisor
    from prorl_gym.free_ports import free_ports
    from prorl_gym.cli.installation import link_venvs
    from prorl_gym.sandbox.syscalls import set_child_subreaper

    class Evaluation(DemoStack):
        async def evaluate(self, rows: Path, names: list[str]):
            engine, head = free_ports(2)
            arguments = ("--port", str(engine), "--rows", str(rows), "--tokens-per-second", "0")
            oracle = await self._start("oracle", "prorl-gym", "engine", "oracle", *arguments)
            await self._wait_ready(oracle, f"http://{HOST}:{engine}/health", 60)
            return await self._start(
                "gym-eval", "gym", "eval", "run", *(word for name in names for word in ("--benchmark", name)),
                "--split", "benchmark", "--model-type", "prorl_model", "--model-url", f"http://{HOST}:{engine}/v1",
                "--model", "oracle", "--model-api-key", "none", "+prorl_tokenizer=small",
                "+skip_venv_if_present=true", f"+uv_venv_dir={self._folders.scratch / 'venvs'}",
                f"+head_server={{host: {HOST}, port: {head}}}", "--output", str(self._folders.results),
            )

    async def main(output: Path, scratch: Path, rows: Path, names: list[str]) -> None:
        set_child_subreaper()
        family = ProcessSupervisor(output)
        stack = Evaluation(family, DemoFolders(output, scratch))
        link_venvs(scratch / "venvs", Path(sys.prefix))
        try:
            evaluation = await stack.evaluate(rows, names)
            await asyncio.wait_for(evaluation.process.wait(), 200)
            print(evaluation.tail() if evaluation.process.returncode else "evaluated")
        finally:
            print("left", await family.stop_all())

    output, scratch, rows, *names = sys.argv[1:]
    asyncio.run(main(Path(output), Path(scratch), Path(rows), names))
"""


def prepare(name: str, folder: Path) -> list[dict[str, Any]]:
    """Write a benchmark's rows below the folder, and return them as the oracle knows them."""
    file = folder / benchmark_file(name)
    if name == "prorl_swebench_verified":
        file.parent.mkdir(parents=True)
        examples = (gym_root() / "environments/prorl_swe/data/example.jsonl").read_text(encoding="utf-8")
        file.write_text("".join(examples.splitlines(keepends=True)[:2]), encoding="utf-8")
    else:
        published = folder / f"{name}.jsonl"
        published.write_text("".join(json.dumps(row) + "\n" for row in PUBLISHED[name]))
        done = CliRunner().invoke(app, ["prepare", name, str(published), "--output", str(file)])
        assert done.exit_code == 0, done.output
    rows = read_lines(file)
    for row in rows:
        if row["environment"] == "code":
            row["task"]["solution"] = SOLUTION
    return rows


def test_every_benchmark_is_run(tmp_path: Path, short_directory: Path):
    known = tmp_path / "oracle_rows.jsonl"
    known.write_text("".join(json.dumps(row) + "\n" for name in BENCHMARKS for row in prepare(name, short_directory)))
    arguments = (tmp_path, short_directory, known, *BENCHMARKS)
    assert run_python("-c", textwrap.dedent(RUN), *arguments) == "evaluated\nleft 0\n"
    results = read_lines(tmp_path / "results.jsonl")
    for result in results:
        check_result(result)
        assert (result["reward"], result["mask_sample"]) == (1.0, False), result["failure_reason"]
    assert Counter(result["agent_ref"]["name"] for result in results) == {
        f"{name}_agent": 2 * repeats for name, repeats in REPEATS.items()
    }
    entries = json.loads((tmp_path / "results_aggregate_metrics.json").read_text(encoding="utf-8"))
    headline = {entry["agent_ref"]["name"]: entry["key_metrics"] for entry in entries}
    for name, repeats in REPEATS.items():
        figures = headline[f"{name}_agent"]
        assert figures[f"pass@1[avg-of-{repeats}]/accuracy"] == 100.0
        assert figures[f"pass@{repeats}/accuracy"] == 100.0
    predictions = tmp_path / "predictions.jsonl"
    command = ["predictions", str(tmp_path / "results.jsonl"), "--model", "oracle", "--output", str(predictions)]
    assert CliRunner().invoke(app, command).exit_code == 0
    patches = [line["model_patch"] for line in read_lines(predictions)]
    assert len(patches) == 2 and all(patch.startswith("diff --git a/") for patch in patches)
