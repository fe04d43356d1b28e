"""``bench peers``: what it refuses, its arithmetic, its schedule and its rows. Speed is not tested here."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import _engine as engine
import _load as loads
import _programs as programs
import _rollout_systems as systems
import _rollout_work as work
import peers
import pytest

from prorl_gym.environments.playback import gold_steps
from prorl_gym.environments.protocol import Environment
from prorl_gym.oracle.oracle_policy import load_rows

BENCH = Path(__file__).parent.parent / "bench"
WORK = work.QUESTION_WORK


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "calls", "complaint"),
    [
        ([1.0, 1.0], 4, ""),
        ([1.0, 0.0], 4, r"1 rewards are not 1 \(2 rollouts were asked for, 2 made\)"),
        ([1.0], 4, r"0 rewards are not 1 \(2 rollouts were asked for, 1 made\)"),
        ([1.0, 1.0], 5, "the engine counted 5 calls, expected 4"),
        ([1.0, 1.0], 3, "the engine counted 3 calls, expected 4"),
    ],
    ids=["right", "a wrong answer", "a lost rollout", "a retried call", "a missing call"],
)
def test_worthless_figures_are_refused(rewards: list[float], calls: int, complaint: str) -> None:
    arm = systems.Arm.of("ours", WORK)
    seen = loads.Seen(1.0, [50.0] * len(rewards), rewards)
    if not complaint:
        peers.check(arm, loads.Load(2), seen, calls)
        return
    with pytest.raises(peers.BenchRefusedError, match=complaint):
        peers.check(arm, loads.Load(2), seen, calls)


# --- arithmetic -------------------------------------------------------------------------------------------------------


def test_busy_time_leaves_out_idle_waiting_and_guests() -> None:
    stat = "cpu  100 20 30 9000 800 4 6 70 50 0\ncpu0 1 1 1 1 1 1 1 0 0 0\n"
    assert peers.busy_seconds(stat, 100) == 1.6


def test_time_and_cpu_beyond_the_engine() -> None:
    class Counters(peers.Machine):
        def __init__(self) -> None:
            self.engine_calls = iter([10, 14])
            self.times = iter([5.0, 5.5])
            self.engine_times = iter([1.0, 1.1])

        def busy(self) -> float:
            return next(self.times)

        def engine(self) -> float:
            return next(self.engine_times)

        async def calls(self) -> int:
            return next(self.engine_calls)

        async def wait_quiet(self) -> None:
            pass

    async def put(load: Any) -> Any:
        return loads.Seen(0.5, [41.0, 100.0], [1.0, 1.0])

    measured = asyncio.run(Counters().measure(systems.Arm.of("ours", WORK), loads.Load(2), put))
    assert (measured.per_second, measured.beyond_ms) == (4.0, [1.0, 60.0])
    assert measured.cpu_ms == pytest.approx(200.0)


# --- loads ------------------------------------------------------------------------------------------------------------


async def test_an_open_loop_waits_for_no_rollout() -> None:
    running, everyone = 0, asyncio.Event()

    async def rollout() -> float:
        nonlocal running
        running += 1
        if running == 3:
            everyone.set()
        await everyone.wait()
        return 1.0

    seen = await asyncio.wait_for(loads.put_load(loads.Load(3, per_second=20.0), rollout), 30)
    assert seen.seconds >= 2 / 20.0
    assert seen.rewards == [1.0] * 3 and len(seen.latencies) == 3


async def test_a_peers_program_answers_loads(tmp_path: Path) -> None:
    program = tmp_path / "peer.py"
    program.write_text(
        "import asyncio, _load\n"
        "async def rollout():\n    print('noise of a library')\n    return 1.0\n"
        "asyncio.run(_load.answer_loads(rollout))\n"
    )
    log = tmp_path / "log"
    async with programs.running([sys.executable, str(program)], log, {"PYTHONPATH": str(BENCH)}) as child:
        assert await programs.read_line(child, log, 60.0) == "ready"
        child.stdin.write(b'{"count": 2, "callers": 2}\n')
        seen = loads.Seen(**json.loads(await programs.read_line(child, log, 60.0)))
    assert seen.rewards == [1.0, 1.0]
    assert "noise of a library" in log.read_text()


async def test_a_program_that_ends_is_quoted(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with programs.running([sys.executable, "-c", "raise SystemExit('no such engine')"], log) as child:
        with pytest.raises(programs.BenchRefusedError, match="no such engine"):
            await programs.read_line(child, log, 60.0)


# --- the engine and the rows ------------------------------------------------------------------------------------------


def test_the_chat_engine_calls_the_tool_then_boxes_what_it_said() -> None:
    question = {"role": "user", "content": work.QUESTION}
    for name, arguments in (
        ("execute_python", {"code": work.CODE}),
        ("bash", {"command": f"python3 -c '{work.CODE}'"}),
    ):
        message, finish = engine.next_message([question], [{"type": "function", "function": {"name": name}}])
        (call,) = message["tool_calls"]
        assert finish == "tool_calls" and call["function"]["name"] == name
        assert json.loads(call["function"]["arguments"]) == arguments
    for content, boxed in ((f'{{"stdout": "{work.ANSWER}\\n"}}', work.ANSWER), ("Traceback: no python", "?")):
        message, finish = engine.next_message([question, {"role": "tool", "content": content}], [])
        assert (message["content"], finish) == (f"The product is \\boxed{{{boxed}}}.", "stop")


@pytest.mark.slow
async def test_the_engines_rows_make_the_calls_that_are_expected(tmp_path: Path) -> None:
    async with systems.peers_engine(tmp_path) as (url, pid):
        rows = load_rows([tmp_path / "rows.jsonl"])
        for each in work.WORKS:
            known = rows.find(each.row["question"])
            environment: Environment[Any] = known.environment
            assert environment.name == each.environment and len(gold_steps(environment, known.task)) == each.calls
        machine = peers.Machine(url, pid)
        (floor, *_) = systems.all_systems()
        async with floor.start(systems.Site(url, tmp_path)) as (put,):
            seen = await put(loads.Load(3, callers=3))
        assert seen.rewards == [1.0] * 3 and await machine.calls() == 6
        assert min(seen.latencies) >= WORK.engine_ms
        assert machine.engine() > 0


def results(*lines: tuple[str, str, int, float]) -> Any:
    found = peers.Results(list)
    for name, arm, callers, value in lines:
        found[name, arm, callers].append(peers.Measured(value, value, [value, value]))
    return found


def test_ours_stands_beside_its_peers() -> None:
    every = (systems.OURS["userns"], systems.OURS["apptainer"], systems.THROUGH_GYM, systems.GYM, systems.TOOL_ENV)
    found = results(*((WORK.name, arm, 32, float(n)) for n, arm in enumerate(every, 10)))
    found[WORK.name, every[0], 32] *= 3
    found[WORK.name, systems.FLOOR, 32] = found[WORK.name, systems.GYM, 32]
    rows = {(row["name"], row["backend"]): row for row in peers.work_rows(found, WORK)}
    rate = rows["one question, 32 callers: rollouts", "userns"]
    assert (rate["runs"], rate["unit"], rate["better"]) == ([10.0] * 3, "1/s", "higher")
    assert [(peer["name"], peer["value"], peer["target"]) for peer in rate["peers"]] == [
        (systems.GYM, 13.0, 1.2),
        (systems.TOOL_ENV, 14.0, 0.7),
    ]
    apptainer = rows["one question, 32 callers: rollouts", "apptainer"]
    assert {peer["target"] for peer in apptainer["peers"]} == {None}
    assert rows["one question, 32 callers: CPU per rollout", "userns"]["target"] == 35.0
    assert rows["one question, 32 callers: CPU per rollout", "apptainer"]["target"] == 60.0
    gym = rows["one question, through Gym, 32 callers: rollouts", "userns"]
    assert [peer["name"] for peer in gym["peers"]] == [systems.GYM]
    assert not [name for name, _ in rows if "1 caller" in name], "nothing was measured with one caller"


def test_latency_rows_have_medians_and_tails() -> None:
    found = results()
    found[WORK.name, systems.OURS["userns"], 1] = [peers.Measured(1.0, 1.0, [10.0, 20.0, 30.0])]
    found[WORK.name, systems.FLOOR, 1] = [peers.Measured(1.0, 1.0, [2.0, 3.0, 4.0])]
    found[WORK.name, systems.OURS["userns"], peers.OPEN] = [peers.Measured(1.0, 1.0, [5.0, 5.0, 105.0])]
    rows = {row["name"]: row for row in peers.work_rows(found, WORK)}
    assert rows["one question, 1 caller: beyond the engine, p50"]["value"] == 20.0
    assert rows["one question, 1 caller: beyond the engine, p50"]["target"] == 30.0
    assert rows["one question, 1 caller: beyond the engine, p50"]["peers"] == [
        {"name": systems.FLOOR, "value": 3.0, "target": None}
    ]
    assert rows["one question, half of the rate: beyond the engine, p50"]["value"] == 5.0
    assert rows["one question, half of the rate: beyond the engine, p99"]["value"] == pytest.approx(103.0)
