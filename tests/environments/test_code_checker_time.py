"""Outputs that keep the row's checker busy are wrong: they neither look like a broken grader nor miss the deadline."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from prorl_gym.environments.code import program_runs
from prorl_gym.environments.code.code_row import CodeRow
from prorl_gym.environments.code.environment import grade
from prorl_gym.environments.code.program_runs import BatchResult, Launch, ProgramResult, TestInput
from prorl_gym.environments.protocol import Leases
from prorl_gym.errors import GraderError
from prorl_gym.records import Score
from prorl_gym.rollout.scheduling.sandbox_leases import SandboxLeases
from prorl_gym.testing.rollout.fake_rollout import EmptyBackend

SECONDS = 40.0
HOSTILE = "hostile"


class Machine:
    """In place of sandboxes: the program prints its source, and its tests and the checker's take as long as is said.

    The checker takes ``slow`` seconds for a hostile output, where the wall clock of a test lets it.
    """

    def __init__(self, program: float = 0.01, check: float = 0.01, slow: float = 1e6) -> None:
        self.program, self.check, self.slow = program, check, slow
        self.used = 0.0
        self.given: list[str] = []

    async def run_batch(
        self, sandbox: Any, launch: Launch, tests: Sequence[TestInput], seconds: float, *, stop_at_crash: bool
    ) -> BatchResult:
        ends: list[ProgramResult] = []
        for test in tests:
            left = seconds - sum(end.seconds for end in ends)
            ends.append(self.end(launch, test, min(launch.wall_seconds, left)))
            if sum(end.seconds for end in ends) >= 3:
                break
        spent = sum(end.seconds for end in ends)
        self.used += spent
        return BatchResult(tuple(ends), interrupted=False, seconds=spent)

    def end(self, launch: Launch, test: TestInput, wall: float) -> ProgramResult:
        wanted, output = self.program, launch.content
        if launch.result_pipe:
            _, expected, said = json.loads(test.stdin)["args"]
            self.given.append(said)
            wanted = self.slow if said == HOSTILE else self.check
            output = json.dumps(said == expected).encode()
        late = wanted > wall
        took = min(wanted, wall)
        return ProgramResult(
            exit=0, timed_out=late, truncated=False, seconds=took, cpu=0, clean=True, out=0, err=0, output=output
        )


async def mark(machine: Machine, monkeypatch: pytest.MonkeyPatch, program: str, **more: Any) -> Score:
    monkeypatch.setattr(program_runs, "run_batch", machine.run_batch)
    cases = [{"stdin": f"{n}", "stdout": "right"} for n in range(20)]
    row = CodeRow.model_validate(
        {"question": "?", "time_limit": 1.0, "checker": "?", "tests": {"kind": "stdio", "cases": cases}, **more}
    )
    leases = SandboxLeases(EmptyBackend())
    try:
        return await grade(row, program, leases, SECONDS)
    finally:
        await leases.close()


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("slow", [2.9, 5.9, 1e6])
async def test_an_output_that_uses_up_the_checkers_time_is_wrong(
    monkeypatch: pytest.MonkeyPatch, slow: float, *, partial: bool
):
    machine = Machine(slow=slow)
    score = await mark(machine, monkeypatch, HOSTILE, partial=partial)
    assert (score.reward, score.detail["why"]) == (0.0, "wrong output")
    assert machine.used <= SECONDS + 1e-6


@pytest.mark.parametrize("check", [0.01, 0.5, 3.0, 5.0])
@pytest.mark.parametrize("program", [0.01, 1.2, 1e6])
async def test_all_that_a_program_can_cause_ends_before_the_deadline(
    monkeypatch: pytest.MonkeyPatch, program: float, check: float
):
    machine = Machine(program, check)
    score = await mark(machine, monkeypatch, HOSTILE, partial=True)
    assert score.reward == 0.0
    assert machine.used <= SECONDS + 1e-6


async def test_an_honest_program_passes_and_no_control_is_asked(monkeypatch: pytest.MonkeyPatch):
    machine = Machine(program=0.9, check=0.6)
    assert (await mark(machine, monkeypatch, "right")).reward == 1.0
    assert len(machine.given) == 20


async def test_a_checker_that_is_too_slow_for_the_expected_output_is_no_verdict(monkeypatch: pytest.MonkeyPatch):
    for partial in (False, True):
        with pytest.raises(GraderError, match="fails on an expected output"):
            await mark(Machine(check=1e6), monkeypatch, "right", partial=partial)


@pytest.mark.parametrize("slow", [0.01, 1e6])
async def test_a_checker_that_breaks_on_one_expected_output_is_found_among_hostile_outputs(
    monkeypatch: pytest.MonkeyPatch, slow: float
):
    class Breaking(Machine):
        def end(self, launch: Launch, test: TestInput, wall: float) -> ProgramResult:
            end = super().end(launch, test, wall)
            broken = launch.result_pipe and json.loads(test.stdin)["args"][0] == "1"
            return end.model_copy(update={"output": b"", "exit": 1}) if broken and not end.timed_out else end

    with pytest.raises(GraderError, match="fails on an expected output"):
        await mark(Breaking(slow=slow), monkeypatch, HOSTILE, partial=True)


PRIMES = """
def check(given, expected, output):
    n, i = int(output.split()[0]), 2
    while i * i <= n:
        i += 1
    return n == int(expected)
"""


@pytest.mark.slow
async def test_a_real_checker_that_is_kept_busy(leases: Leases):
    cases = [{"stdin": f"{n}\n", "stdout": f"{n}\n"} for n in range(14)]
    row = CodeRow.model_validate(
        {"question": "?", "time_limit": 1.0, "checker": PRIMES, "tests": {"kind": "stdio", "cases": cases}}
    )
    assert (await grade(row, "print(input())", leases, 12.0)).reward == 1.0
    score = await grade(row, "print(10**40)", leases, 12.0)
    assert (score.reward, score.detail["why"]) == (0.0, "wrong output")
