"""Agent programs whose model calls and sandboxes fail at random: a reward is the right one, or there is none.

The policy always knows the answer. So a reward of 0 is a wrong one, whatever the program did about the failures.
"""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from pathlib import Path
from random import Random

import pytest
from aiohttp import web
from killed_service import place
from sandbox_killer import killing

from prorl_gym.api.build import build_service
from prorl_gym.api.config import ServiceConfig
from prorl_gym.environments.playback import ScriptedStep
from prorl_gym.errors import Cause
from prorl_gym.inference.tokens.template_check import load_codec
from prorl_gym.oracle.oracle_policy import OraclePolicy, RowIndex
from prorl_gym.oracle.oracle_server import OracleServer, serve_oracle
from prorl_gym.records import Rollout, RolloutRequest
from prorl_gym.rollout.service import RolloutService
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.settings import RolloutSettings

PROGRAM = Path(__file__).with_name("careless_program.py").read_text(encoding="utf-8")
"""It goes on after every failure and hands in what it has."""
WAYS = [f"{wire} {how}" for wire in ("chat", "messages") for how in ("plain", "streamed", "retrying")]
FAULTS = ("500", "429", "reset", "half", "other ids", "other model", "no log-probs", "hang")


class Knowing(OraclePolicy):
    """Thinks for one turn, then answers a sum, unless the thoughts are not its own; it names everything else."""

    def _next_step(self, conversation, seed, session) -> ScriptedStep:
        said = "\n".join(turn.text for turn in conversation.turns)
        if (asked := re.search(r"What is (\d+) \+ (\d+)\?", said)) is None:
            return ScriptedStep("A title")
        match [turn.text for turn in conversation.assistant_turns]:
            case []:
                return ScriptedStep("Let me think.")
            case ["Let me think."]:
                return ScriptedStep(f"\\boxed{{{int(asked[1]) + int(asked[2])}}}")
            case _:
                return ScriptedStep("I have lost the thread.")


class FaultyServer(OracleServer):
    def __init__(self, seed: int, share: float) -> None:
        codec = load_codec("small")
        super().__init__(codec, Knowing(codec, RowIndex([])))
        self._chance, self._share = Random(seed), share
        self._due: dict[bytes, list[str]] = {}
        """Faults that are still to come, by call."""
        self.fired: Counter[str] = Counter()

    def _next_fault(self, call: bytes) -> str | None:
        """Draw whether a call fails once, which the pool mends, or so often that the program sees it."""
        if call not in self._due:
            fails = self._chance.random() < self._share
            self._due[call] = [self._chance.choice(FAULTS)] * self._chance.choice((1, 4, 7)) if fails else []
        return self._due[call].pop() if self._due[call] else None

    async def _completions(self, request: web.Request) -> web.Response:
        session = request.headers["X-Session-ID"]
        fault = None if session == "trial" else self._next_fault(session.encode() + await request.read())
        if fault is None:
            return await super()._completions(request)
        self.fired[fault] += 1
        if fault in ("500", "429"):
            return web.json_response({"error": {"message": "It broke."}}, status=int(fault))
        if fault == "hang":
            await asyncio.sleep(3600)
        answer = await super()._completions(request)
        text = answer.text or ""
        changed = {
            "reset": "",
            "half": text[: len(text) // 2],
            "other ids": re.sub(r'"token_ids": \[\d+', '"token_ids": [5', text),
            "other model": text.replace('"model": "oracle"', '"model": "another"'),
            "no log-probs": re.sub(r'"token_logprobs": \[[^\]]*\]', '"token_logprobs": null', text),
        }[fault]
        assert changed != text
        if fault in ("reset", "half"):
            assert request.transport is not None
            request.transport.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\n\r\n{changed}".encode())
            request.transport.close()
        return web.json_response(text=changed)


@asynccontextmanager
async def service_of(engines: list[str], ground: Path) -> AsyncIterator[tuple[RolloutService, NamespaceBackend]]:
    program = {"files": {"$home/program.py": PROGRAM.replace("$", "$$")}, "answer_file": "$home/answer"}
    command = ["python3", "$home/program.py", "$url", "$token", "$home/answer", "$task"]
    config = {
        "inference": {"engines": engines, "model": "oracle", "tokenizer": "small", "request_seconds": 2},
        "agents": {way.replace(" ", "-"): {"argv": [*command, *way.split()], **program} for way in WAYS},
        "sandbox": {"backend": "userns", "scratch": str(ground / "scratch")},
        "state": str(ground / "state"),
        "retry": {"attempts": 8, "pause_seconds": 0.01},
    }
    loaded = await build_service(ServiceConfig.model_validate(config))
    try:
        assert isinstance(loaded.backend, NamespaceBackend)
        yield loaded.service, loaded.backend
    finally:
        await loaded.close()


async def storm(rounds: int, seed: int, *, share: float, kills: bool) -> tuple[list[Rollout], Counter[str], int]:
    """Play rollouts of each program; return their records, the faults that fired, and how many sandboxes died."""
    server, chance = FaultyServer(seed, share), Random(seed)
    requests = [
        RolloutRequest(
            rollout_id=f"{way.replace(' ', '-')}-{index}",
            environment="math",
            task={"question": f"What is {index} + {(a := chance.randrange(1000))}?", "answer": str(index + a)},
            settings=RolloutSettings(agent=way.replace(" ", "-")),
        )
        for index in range(rounds)
        for way in WAYS
    ]
    with place() as ground:
        async with AsyncExitStack() as open_until_the_end:
            served = [serve_oracle(server, "127.0.0.1", 0) for _ in range(4)]
            engines = [await open_until_the_end.enter_async_context(one) for one in served]
            service, backend = await open_until_the_end.enter_async_context(service_of(engines, ground))
            async with killing(backend, "init", chance) if kills else nullcontext(lambda: 0) as count:
                await service.submit(requests)
                records = [await service.result(request.rollout_id, wait=400) for request in requests]
            return [record for record in records if record is not None], server.fired, count()


def wrong_rewards(records: list[Rollout]) -> list[str]:
    return [
        f"{one.rollout_id}: {one.outcome}, {one.reward}"
        for one in records
        if one.reward != 1.0 and (one.reward is not None or one.outcome.cause is not Cause.INFRASTRUCTURE)
    ]


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("kills", [False, pytest.param(True, marks=pytest.mark.release)])
@pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=pytest.mark.release)])
async def test_no_fault_below_a_program_costs_a_right_answer_its_reward(rounds: int, kills: bool) -> None:
    records, fired, killed = await storm(rounds, 11, share=0.4, kills=kills)
    assert len(records) == rounds * len(WAYS)
    assert wrong_rewards(records) == []
    assert sum(fired.values()) >= rounds * len(WAYS) / 2 and (killed >= 3 or not kills)
    assert any(record.reward == 1.0 for record in records) and any(record.retries for record in records)


@pytest.mark.slow
async def test_without_faults_every_program_is_paid() -> None:
    records, _, _ = await storm(1, 5, share=0.0, kills=False)
    assert [record.reward for record in records] == [1.0] * len(WAYS), [record.outcome for record in records]
