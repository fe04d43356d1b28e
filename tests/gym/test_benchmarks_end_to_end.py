"""``gym eval run --benchmark``, with everything as a user starts it. Slow: it starts Gym and Ray.

The rows of three benchmarks are prepared from published columns; those of SWE-bench Verified would need its images, so
example rows of the same environment take their place.
"""

import json
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import gym_needed  # noqa: F401
import pytest
from typer.testing import CliRunner

from prorl_gym.cli.installation import gym_root
from prorl_gym.cli.main import app
from prorl_gym.environments.prepare.benchmarks import BENCHMARKS, benchmark_file
from prorl_gym.trainers.nemo_rl import check_result
from tests.environments.prepare.test_benchmarks import PUBLISHED

pytestmark = [pytest.mark.gym, pytest.mark.slow, pytest.mark.timeout(400)]

REPEATS = {"prorl_aime25": 32, "prorl_gpqa_diamond": 8, "prorl_livecodebench": 3, "prorl_swebench_verified": 1}
SOLUTION = "print(2 * int(input()))\n"
"""Of the programming tasks; the oracle knows the other answers from the rows."""

# In a process of its own: ending what was started needs to adopt orphans, which a test process must not.
RUN = """
    import asyncio, os, signal, sys
    from pathlib import Path

    from prorl_gym.cli.demo.process_supervisor import ProcessSupervisor, descendants, send_signal
    from prorl_gym.cli.demo.stack import HOST, DemoFolders, DemoStack, free_ports
    from prorl_gym.cli.installation import link_venvs
    from prorl_gym.sandbox.syscalls import set_child_subreaper

    class Evaluation(DemoStack):
        async def start_oracle(self, rows: Path, speed: str) -> None:
            self.engine, self.head = free_ports(2)
            arguments = ("--port", str(self.engine), "--rows", str(rows), "--tokens-per-second", speed)
            oracle = await self._start("oracle", "prorl-gym", "engine", "oracle", *arguments)
            await self._wait_ready(oracle, f"http://{HOST}:{self.engine}/health", 60)

        async def evaluate(self, names: list[str], *extra: str):
            return await self._start(
                "gym-eval", "gym", "eval", "run", *(word for name in names for word in ("--benchmark", name)),
                "--split", "benchmark", "--model-type", "prorl_model", "--model-url", f"http://{HOST}:{self.engine}/v1",
                "--model", "oracle", "--model-api-key", "none", "+prorl_tokenizer=small",
                "+skip_venv_if_present=true", f"+uv_venv_dir={self._folders.scratch / 'venvs'}",
                f"+head_server={{host: {HOST}, port: {self.head}}}", "--output", str(self._folders.results), *extra,
            )

    async def until_written(results: Path, count: int) -> None:
        while not results.exists() or results.read_bytes().count(b"\\n") < count:
            await asyncio.sleep(0.01)  # another process: there is no event to wait for

    async def main(output: Path, scratch: Path, rows: Path, kill_at: int, names: list[str]) -> None:
        set_child_subreaper()
        family = ProcessSupervisor(output)
        stack = Evaluation(family, DemoFolders(output, scratch))
        link_venvs(scratch / "venvs", Path(sys.prefix))
        try:
            await stack.start_oracle(rows, "10" if kill_at else "0")
            evaluation = await stack.evaluate(names, *(["--concurrency", "8"] if kill_at else []))
            if kill_at:
                await asyncio.wait_for(until_written(stack._folders.results, kill_at), 150)
                for process in descendants(os.getpid()):
                    send_signal(process, signal.SIGKILL)
                await family.stop_all()
                print("killed at", stack._folders.results.read_bytes().count(b"\\n"))
                await stack.start_oracle(rows, "0")
                evaluation = await stack.evaluate(names, "--resume")
            await asyncio.wait_for(evaluation.process.wait(), 200)
            print(evaluation.tail() if evaluation.process.returncode else "evaluated")
        finally:
            print("left", await family.stop_all())

    output, scratch, rows, kill_at, *names = sys.argv[1:]
    asyncio.run(main(Path(output), Path(scratch), Path(rows), int(kill_at), names))
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
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        if row["environment"] == "code":
            row["task"]["solution"] = SOLUTION
    return rows


def evaluate(folder: Path, scratch: Path, names: list[str], kill_at: int = 0) -> tuple[list[dict[str, Any]], str]:
    """Return the results of an evaluation of these benchmarks, and what the runner printed."""
    known = folder / "oracle_rows.jsonl"
    known.write_text("".join(json.dumps(row) + "\n" for name in names for row in prepare(name, scratch)))
    arguments = [folder, scratch, known, kill_at, *names]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(RUN), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=390,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "evaluated" in done.stdout and "left 0" in done.stdout, done.stdout
    results = [json.loads(line) for line in (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    for result in results:
        check_result(result)
        assert (result["reward"], result["mask_sample"]) == (1.0, False), result["failure_reason"]
    return results, done.stdout


def headline(folder: Path) -> dict[str, dict[str, float]]:
    """Return the key metrics of each agent."""
    entries = json.loads((folder / "results_aggregate_metrics.json").read_text(encoding="utf-8"))
    return {entry["agent_ref"]["name"]: entry["key_metrics"] for entry in entries}


def test_every_benchmark_is_run(tmp_path: Path, short_directory: Path):
    results, _ = evaluate(tmp_path, short_directory, list(BENCHMARKS))
    assert Counter(result["agent_ref"]["name"] for result in results) == {
        f"{name}_agent": 2 * repeats for name, repeats in REPEATS.items()
    }
    for name, repeats in REPEATS.items():
        figures = headline(tmp_path)[f"{name}_agent"]
        assert figures[f"pass@1[avg-of-{repeats}]/accuracy"] == 100.0
        assert figures[f"pass@{repeats}/accuracy"] == 100.0
    predictions = tmp_path / "predictions.jsonl"
    command = ["predictions", str(tmp_path / "results.jsonl"), "--model", "oracle", "--output", str(predictions)]
    assert CliRunner().invoke(app, command).exit_code == 0
    patches = [json.loads(line)["model_patch"] for line in predictions.read_text(encoding="utf-8").splitlines()]
    assert len(patches) == 2 and all(patch.startswith("diff --git a/") for patch in patches)


@pytest.mark.release
def test_an_evaluation_that_was_killed_is_resumed(tmp_path: Path, short_directory: Path):
    expected = 2 * REPEATS["prorl_aime25"]
    results, said = evaluate(tmp_path, short_directory, ["prorl_aime25"], kill_at=expected // 2)
    assert expected // 2 <= int(said.split("killed at ")[1].split()[0]) < expected
    assert len({(result["_ng_task_index"], result["_ng_rollout_index"]) for result in results}) == expected
    assert len(results) == expected
    assert headline(tmp_path)["prorl_aime25_agent"]["pass@1[avg-of-32]/accuracy"] == 100.0
