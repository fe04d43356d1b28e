"""A service that is killed while agents are at work, in real sandboxes: they go on after their last whole turn."""

import asyncio
import json
import signal
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest
from aiohttp import web
from killed_service import ROOT, SERVING, configure, gone, place, started
from loopback_service import entered_in_a_thread

from prorl_gym.client import SyncClient, read_token
from prorl_gym.environments.row_format import read_rows
from prorl_gym.inference.tokens.template_check import load_codec
from prorl_gym.oracle.oracle_policy import OraclePolicy, example_files, load_rows
from prorl_gym.oracle.oracle_server import OracleServer, serve_oracle
from prorl_gym.records import RolloutRequest
from prorl_gym.settings import RolloutSettings

ROWS = {"math": 5, "swe": 2}
"""How many of the example rows."""


class HoldingServer(OracleServer):
    """Plays gold turns, counts who asked for which, and keeps back one of each rollout until it is told."""

    def __init__(self, held_turns: Mapping[str, int]) -> None:
        self._chat = load_codec("small")
        super().__init__(self._chat, OraclePolicy(self._chat, load_rows(example_files())))
        self.asked: Counter[tuple[str, int]] = Counter()
        self.released = threading.Event()
        self.all_held = threading.Event()
        self._to_be_held = set(held_turns)
        self._held_turns = held_turns

    async def _completions(self, request: web.Request) -> web.Response:
        session = request.headers["X-Session-ID"]
        prompt = self._chat.decode(json.loads(await request.read())["prompt"])
        turn = prompt.count("<|im_start|>assistant") - 1
        self.asked[session, turn] += 1
        if turn == self._held_turns.get(session):
            self._to_be_held.discard(session)
            if not self._to_be_held:
                self.all_held.set()
            while not self.released.is_set():  # noqa: ASYNC110 - by another thread
                await asyncio.sleep(0.05)
        return await super()._completions(request)


def requests() -> dict[str, tuple[RolloutRequest, int]]:
    """Rollouts, and how many turns of each are whole when the service dies: all but the last, or three."""
    found: dict[str, tuple[RolloutRequest, int]] = {}
    for name, count in ROWS.items():
        for row in read_rows(ROOT / f"environments/prorl_{name}/data/example.jsonl")[:count]:
            request = RolloutRequest(
                rollout_id=str(row.task["id"]), environment=name, task=row.task, settings=RolloutSettings(resume=True)
            )
            turns = len(row.task.get("gold_steps", [None]))
            found[request.rollout_id] = request, min(3, turns - 1)
    return found


def wait_for_logged_turns(path: Path, count: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as ledger:
            (logged,) = ledger.execute("SELECT count(*) FROM turns").fetchone()
        if logged == count:
            return
        assert time.monotonic() < deadline, f"{logged} turns of {count} are in the ledger"
        time.sleep(0.1)


@pytest.mark.slow
def test_killed_rollouts_go_on_after_their_last_whole_turn() -> None:
    wanted = requests()
    held = {name: turns for name, (_, turns) in wanted.items() if turns}
    server = HoldingServer(held)
    with place() as ground, entered_in_a_thread(serve_oracle(server, "127.0.0.1", 0)) as engine:
        serve = configure(ground, engine)
        token, ledger = ground / "state" / "token", ground / "state" / "ledger.sqlite"
        with started(serve, SERVING) as (service, address):
            with SyncClient(address, token=read_token(token)) as client:
                client.submit([request for request, _ in wanted.values()])
                assert server.all_held.wait(120)
                wait_for_logged_turns(ledger, sum(held.values()), 20)
                assert {name: server.asked[name, turns] for name, turns in held.items()} == dict.fromkeys(held, 1)
                service.send_signal(signal.SIGKILL)
        assert gone(ground, 10.0)
        server.released.set()
        with started(serve, SERVING) as (service, address):
            with SyncClient(address, token=read_token(token)) as client:
                rollouts = {name: client.result(name, timeout=300) for name in wanted}
            service.send_signal(signal.SIGTERM)
            service.communicate(timeout=20)
        wait_for_logged_turns(ledger, 0, 1)
    assert {name: (one.resume_refused, one.resumed_turns) for name, one in rollouts.items()} == {
        name: ("", turns) for name, (_, turns) in wanted.items()
    }
    assert {name: one.reward for name, one in rollouts.items()} == dict.fromkeys(wanted, 1.0)
    again = {place: times for place, times in server.asked.items() if times > 1 and place[0] != "trial"}
    assert again == {(name, turns): 2 for name, turns in held.items()}, "the engine saw a turn again that was whole"
