"""``gym eval run --resume`` after a kill at half, with everything as a user starts it. Slow: it starts Gym and Ray."""

import sqlite3
import textwrap
from pathlib import Path

import pytest
from foreign_run import read_lines, run_python

from prorl_gym.cli.installation import gym_root
from prorl_gym.trainers.nemo_rl import check_result

pytestmark = [pytest.mark.gym, pytest.mark.slow, pytest.mark.timeout(400)]

REPEATS, AT_ONCE = 8, 4

RUN = """
    import asyncio, os, signal, sys
    from pathlib import Path

    import yaml

    from prorl_gym.cli.demo.stack import ProcessSupervisor, descendants
    from prorl_gym.cli.demo.stack import PolicyEndpoint, DemoFolders, DemoStack
    from prorl_gym.sandbox.syscalls import set_child_subreaper

    class Resumable(DemoStack):
        def write_config(self, engines: PolicyEndpoint) -> dict[str, str]:
            addresses = super().write_config(engines)
            config = yaml.safe_load(self._config.read_text())
            config["prorl_service"] = {"ledger": {"path": str(self._folders.output / "ledger.sqlite")}}
            agent = config["prorl_math_agent"]["responses_api_agents"]["prorl_rollout_agent"]
            agent["repost_seconds"] = 300.0
            self._config.write_text(yaml.safe_dump(config))
            return addresses

        async def evaluate(self, rows: Path, repeats: int, at_once: int, *extra: str):
            return await self._start(
                "gym-eval", "gym", "eval", "run", "--no-serve", "--config", str(self._config),
                "--input", str(rows), "--output", str(self._folders.results), "--num-repeats", str(repeats),
                "--concurrency", str(at_once), *extra,
            )

    def rollout_server() -> int:
        for seen in descendants(os.getpid()):
            try:
                environment = Path(f"/proc/{seen.pid}/environ").read_bytes().split(b"\\0")
                if b"NEMO_GYM_CONFIG_PATH=prorl_rollout" in environment:
                    if b"app.py" in Path(f"/proc/{seen.pid}/cmdline").read_bytes().split(b"\\0")[1]:
                        return seen.pid
            except (OSError, IndexError):
                continue
        raise SystemExit("there is no rollout server")

    async def until_half(results: Path, expected: int) -> None:
        while not results.exists() or results.read_bytes().count(b"\\n") < expected // 2:
            await asyncio.sleep(0.01)  # another process: there is no event to wait for

    async def main(victim: str, output: Path, scratch: Path, rows: Path, repeats: int, at_once: int) -> None:
        set_child_subreaper()
        family = ProcessSupervisor(output)
        stack = Resumable(family, DemoFolders(output, scratch))
        try:
            engines = await stack.start_oracles(1)
            await stack.start_gym(engines)
            expected = rows.read_text().count("\\n") * repeats
            evaluation = await stack.evaluate(rows, repeats, at_once)
            await asyncio.wait_for(until_half(stack._folders.results, expected), 120)
            if victim == "server":
                os.kill(rollout_server(), signal.SIGKILL)
            evaluation.process.kill()
            await evaluation.process.wait()
            print("killed at", stack._folders.results.read_bytes().count(b"\\n"), "of", expected)
            if victim == "server":  # Gym ends all its servers when one of them died
                await family.stop_all()
                engines = await stack.start_oracles(1)
                await stack.start_gym(engines)
            evaluation = await stack.evaluate(rows, repeats, at_once, "--resume")
            await asyncio.wait_for(evaluation.process.wait(), 120)
            print(evaluation.tail() if evaluation.process.returncode else "resumed")
        finally:
            print("left", await family.stop_all())

    victim, output, scratch, rows, repeats, at_once = sys.argv[1:]
    asyncio.run(main(victim, Path(output), Path(scratch), Path(rows), int(repeats), int(at_once)))
"""


@pytest.mark.parametrize("victim", ["client", pytest.param("server", marks=pytest.mark.release)])
def test_no_row_is_lost_or_answered_twice_or_made_again(tmp_path: Path, short_directory: Path, victim: str):
    source = gym_root() / "environments/prorl_math/data/example.jsonl"
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(line + "\n" for line in source.read_text().splitlines() if line.strip()))
    expected = len(rows.read_text().splitlines()) * REPEATS
    arguments = (victim, tmp_path, short_directory, rows, REPEATS, AT_ONCE)
    assert run_python("-c", textwrap.dedent(RUN), *arguments).endswith("resumed\nleft 0\n")
    results = read_lines(tmp_path / "results.jsonl")
    for result in results:
        check_result(result)
    assert len({(result["_ng_task_index"], result["_ng_rollout_index"]) for result in results}) == expected
    assert len(results) == expected
    with sqlite3.connect(tmp_path / "ledger.sqlite") as ledger:
        made = dict(ledger.execute("SELECT rollout_id, released_at FROM rollouts LEFT JOIN outcomes USING (seq)"))
    # What the client had and had not yet written when it died is made again: nothing can tell (RowDeduplicator).
    again = made.keys() - {result["prorl_rollout_id"] for result in results}
    assert len(made) - len(again) == expected
    assert all(made[one] is not None for one in again), "none was made again whose answer the client had not"
