"""A service for the dashboard to ask: its routes, answered from a small world, on a real socket."""

import json
import math
import random
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

from pydantic import TypeAdapter

from prorl_gym.pages.dashboard import render_dashboard
from prorl_gym.rollout.ledger.analysis import LedgerAnalysis
from prorl_gym.rollout.ledger.sql_schema import create_tables
from prorl_gym.rollout.protocol import ListPage, RolloutFilter

TOKEN = "t0ken"
ENGINE_TIMEOUT = ("failed", "engine_timeout", "infrastructure")
ENVIRONMENTS = ("math", "code", "swe")
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "connect-src 'self'; frame-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""As the service sends it, beside the page's own."""
NOW = 1_760_000_000.0


def member(cursor: int, rng: random.Random, run: str | None = None) -> dict[str, Any]:
    """A finished rollout as a list shows it."""
    environment = rng.choice(ENVIRONMENTS)
    status, detail, cause = rng.choices(
        [("completed", "", None), ("truncated", "tokens", None), ENGINE_TIMEOUT, ("cancelled", "redundant", None)],
        [85, 9, 2, 4],
    )[0]
    problem = cursor // 8 % 40
    reward = float(rng.random() < problem / 40 + cursor / 50_000) if status in ("completed", "truncated") else None
    finished_at, took = NOW + cursor, 60 * rng.random()
    return {
        **{"cursor": cursor, "rollout_id": f"{environment}-{cursor // 8:04d}-{cursor % 8}", "run_id": run or "grpo-7b"},
        **{"group_id": f"{environment}-{cursor // 8:04d}", "group_size": 8, "replica": cursor % 8},
        **{"environment": environment, "evaluation": False, "stands_in_for": None, "status": status},
        **{"detail": detail, "cause": cause, "reward": reward, "masked": reward is None, "released": False},
        **{"oldest_version": 100 + cursor // 1000, "turns": rng.randrange(1, 40)},
        "sampled_tokens": rng.randrange(9000),
        **{"accepted_at": finished_at - took, "finished_at": finished_at, "begun_at": finished_at - took / 1.5},
        **{"row_id": f"{environment}-row-{problem}", "why": "the answer differs" if reward == 0 else ""},
    }


def pending(number: int) -> dict[str, Any]:
    """An accepted rollout without a record; every third one runs."""
    return {
        **{"rollout_id": f"open-{number:03d}", "run_id": "grpo-7b", "group_id": f"math-{number // 8}"},
        **{"group_size": 8, "replica": number % 8, "environment": "math", "evaluation": False},
        **{"attempt": 0, "accepted_at": time.time() - 600 + number},
        **{"place": "run" if number % 3 == 0 else "queue", "since": time.time() - 5 if number % 3 == 0 else None},
    }


@dataclass
class World:
    """What the service would answer, and what it was asked."""

    members: list[dict[str, Any]] = field(default_factory=list)
    pending: list[dict[str, Any]] = field(default_factory=list)
    pages: dict[str, str] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    history: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, Any] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    down: bool = False
    _built: tuple[object, sqlite3.Connection] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, path: str, query: dict[str, str]) -> tuple[int, Any]:
        if self.down:
            return 503, {"error": {"what": "The service is stopping.", "fix": "Ask again when it is back."}}
        parts = [unquote(part) for part in path.split("/")[2:]]
        match parts:
            case ["status"]:
                return 200, self.status
            case ["history"]:
                return 200, self.history
            case ["rollouts"] | ["analysis"] | ["problems"]:
                return 200, self._of_ledger(parts[0], query)
            case ["rollouts", name, "page"] if name in self.pages:
                return 200, self.pages[name]
            case ["runs", run, "groups"] if run in self.groups:
                return 200, self.groups[run]
            case _:
                return 404, {"error": {"what": f"{path}: there is none.", "fix": ""}}

    def _of_ledger(self, subject: str, query: dict[str, str]) -> dict[str, Any]:
        """Answer as a ledger with these rollouts."""
        query = {"run_id" if name == "run" else name: value for name, value in query.items()}
        names = RolloutFilter.__dataclass_fields__
        texts: dict[str, Any] = {name: value for name, value in query.items() if name in names}
        chosen = TypeAdapter(RolloutFilter).validate_python(texts)
        numbers = {name: int(query[name]) for name in ("limit", "offset", "before") if name in query}
        with self._lock:
            ledger = LedgerAnalysis(self._database())
            if subject == "analysis":
                answer: Any = ledger.analyze(chosen)
            elif subject == "problems":
                order: Any = query.get("order", "newest")
                answer = ledger.list_problems(chosen, order, numbers.get("offset", 0), numbers.get("limit", 50))
            else:
                sort: Any = query.get("sort", "finished")
                state: Any = query.get("state", "finished")
                page = ListPage(sort=sort, descending=query.get("descending", "true") == "true", **numbers)
                running = [one["rollout_id"] for one in self.pending if one["place"] == "run"]
                answer = ledger.list_rollouts(chosen, state, page, running)
        listed = answer.model_dump(mode="json")
        places = {one["rollout_id"]: {name: one[name] for name in ("place", "since")} for one in self.pending}
        for one in listed.get("pending", ()):
            one |= places[one["rollout_id"]]
        return listed

    def _database(self) -> sqlite3.Connection:
        content = (id(self.members), len(self.members), len(self.pending))
        if self._built is None or self._built[0] != content:
            connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            create_tables(connection)
            every = list(enumerate([*self.members, *self.pending], 1))
            _insert(
                connection,
                "rollouts",
                [
                    {**{name: one[name] for name in _ROLLOUT_COLUMNS}, "cursor": one.get("cursor")}
                    | {"seq": seq, "body_hash": "", "attempt": one.get("attempt", 1)}
                    for seq, one in every
                ],
            )
            ended = [(seq, one) for seq, one in every if "cursor" in one]
            rows = [
                {**{name: one[name] for name in _OUTCOME_COLUMNS}, "seq": seq, "written_at": one["finished_at"]}
                for seq, one in ended
            ]
            _insert(connection, "outcomes", rows)
            self._built = content, connection
        return self._built[1]


_ROLLOUT_COLUMNS = (
    *("rollout_id", "run_id", "group_id", "group_size", "replica", "environment", "evaluation", "accepted_at"),
)
_OUTCOME_COLUMNS = (
    *("cursor", "run_id", "group_id", "status", "detail", "cause", "reward", "masked", "oldest_version", "turns"),
    *("sampled_tokens", "finished_at", "begun_at", "row_id", "why"),
)


def _insert(connection: sqlite3.Connection, table: str, rows: list[dict[str, Any]]) -> None:
    if rows:
        statement = f"INSERT INTO {table} ({', '.join(rows[0])}) VALUES ({', '.join('?' * len(rows[0]))})"
        connection.executemany(statement, [list(row.values()) for row in rows])


def busy(rollouts: int = 10_000) -> World:
    """A service in the middle of a training run."""
    rng = random.Random(7)
    members = [member(cursor, rng, "eval-17" if cursor % 9 == 0 else None) for cursor in range(1, rollouts + 1)]
    samples = 720

    def wave(base: float, swing: float, period: float) -> list[float | None]:
        values = (base + swing * math.sin(i / period) + swing * 0.1 * (rng.random() - 0.5) for i in range(samples))
        return [round(max(value, 0), 3) for value in values]

    def held(steps: int, values: list[float | None]) -> list[float | None]:
        return [values[i - i % steps] for i in range(samples)]

    columns = {
        **{"queued": wave(900, 600, 160), "running": wave(190, 20, 40), "runner_queue": wave(60, 50, 70)},
        **{"init": wave(22, 9, 25), "run": wave(140, 18, 60), "eval": wave(18, 7, 33), "parked": wave(6, 8, 90)},
        **{"finished_per_second": wave(14, 5, 45), "tokens_per_second": wave(52_000, 9_000, 80)},
        **{"mean_reward": [None, None, *wave(0.46, 0.05, 200)[2:]], "event_loop_lag_seconds": wave(0.004, 0.001, 20)},
        **{"mismatch_max_abs_diff": held(12, wave(0.31, 0.1, 9)), "mismatch_kl": held(12, wave(0.002, 0.001, 13))},
        **{f"engine.policy-{i}.in_flight": wave(36, 9, 30 + 9 * i) for i in range(4)},
    }
    engines = [engine(f"policy-{i}", rng) for i in range(4)]
    engines[2] |= {"serves": False, "quarantine": "log-probs differ from the reference by 0.31", "in_flight": 0}
    causes = {"engine_timeout": "infrastructure", "sandbox_limit": "policy", "bad_row": "task"}
    ended = [
        {"environment": "math", "status": "completed", "cause": "", "detail": "", "count": 8432},
        {"environment": "code", "status": "truncated", "cause": "", "detail": "tokens", "count": 911},
        {"environment": "code", "status": "cancelled", "cause": "", "detail": "redundant", "count": 402},
        *(
            {"environment": "code", "status": "failed", "cause": cause, "detail": detail, "count": 60 + len(detail)}
            for detail, cause in causes.items()
        ),
    ]
    return World(
        members=members,
        pending=[pending(number) for number in range(24 if rollouts else 0)],
        history={"interval_seconds": 5.0, "times": [NOW + 5 * i for i in range(samples)], "columns": columns},
        groups={run: groups(run) for run in ("grpo-7b", "eval-17")},
        status={
            **{"ready": True, "problem": "", "queued": 1204, "running": 186, "finished": 10_004, "version": "0.1.0"},
            "places": {"queue": 16, "run": 8} if rollouts else {},
            "capacity": {"queued": 64, "init": 22, "run": 141, "eval": 17, "parked": 6, "free": 12},
            **{"uptime_seconds": 12_345.6, "ended": ended, "sampled_tokens": 41_812_000, "wasted_tokens": 1_204_511},
            "rewards": [
                {"environment": name, "count": 3000, "mean": mean}
                for name, mean in zip(ENVIRONMENTS, (0.61, 0.43, 0.18), strict=True)
            ],
            "pools": [pool("policy", engines), pool("judge", [engine("judge-0", rng)])],
            "mismatches": [mismatch("grpo-7b")],
            **{"sandboxes": 168, "event_loop_lag_seconds": 0.0041},
            "ledger": {"bytes": 819_200_000, "pending": 1390, "kept": 9800, "released": 204, "full": False},
        },
    )


def mismatch(run: str) -> dict[str, Any]:
    """What a trainer reported of its last batch."""

    def figures(largest: float) -> dict[str, Any]:
        return {
            **{"tokens": 9000, "max_abs_diff": largest, "mean_abs_diff": 0.011, "kl": 0.0004},
            **{"mult_prob_error": 1.0112, "zeros": 0},
        }

    batch = {
        "total": figures(0.342),
        "by_version": {"101": figures(0.342), "102": figures(0.118)},
        "by_position": {"turn 1": figures(0.101), "turns 4-7": figures(0.342)},
        "by_engine": {"policy-0": figures(0.118), "policy-3": figures(0.342)},
    }
    return {"run_id": run, "version": 102, "reported_at": NOW, "mismatch": batch}


def groups(run: str) -> dict[str, Any]:
    """How the groups of a run stand; an evaluation has no demand."""
    if run.startswith("eval"):
        return {"run_id": run, "demand": None}
    done, going_on = {"ready": 412, "uninformative": 530}, {"informative": 21, "open": 64}
    states = {**done, **going_on, "redundant": 31, "stale": 4, "short": 2}
    return {
        **{"run_id": run, "demand": {"groups": 64}, "version": 102, "satisfied": False},
        **{"wanted": 64, "ready": 41, "ready_stale": 1, "begun": 126, "waiting": 40},
        **{"kept": 3, "held": 320, "parked": 6},
        **{"states": states, "replaced": 2, "extras": 1, "wasted_tokens": 91_000, "reclaimed_seconds": 5210.5},
        "ready_groups": [],
    }


def engine(name: str, rng: random.Random) -> dict[str, Any]:
    load = {"running": 30, "waiting": rng.randrange(4), "kv_usage": 0.3 + rng.random() / 2}
    return {
        **{"name": name, "url": None, "serves": True, "unhealthy_reason": "", "quarantine": "", "draining": False},
        "version": 102,
        **{"in_flight": rng.randrange(25, 45), "calls": rng.randrange(90_000), "failures": rng.randrange(9)},
        **{"sampled_tokens": 9_000_000, "hit_rate": 0.8 + rng.random() / 6, "load": load},
    }


def pool(name: str, engines: list[dict[str, Any]]) -> dict[str, Any]:
    admission = {"budget": None, "in_tokens": True, "filled": 0, "live": 10, "waiting": 0}
    failovers = sum(one["failures"] for one in engines)
    return {
        **{"name": name, "version": 102, "paused": False, "failovers": failovers, "unavailable_reason": ""},
        **{"waiting_rollouts": 0, "admission": admission, "engines": engines},
    }


@contextmanager
def serving(world: World) -> Iterator[str]:
    """Serve a world; yield its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            address = urlparse(self.path)
            world.asked.append(self.path)
            if address.path == "/":
                self._send(200, render_dashboard(), "text/html; charset=utf-8")
            elif address.path == "/favicon.ico":
                self._send(204, "", "image/x-icon")
            elif self.headers["Authorization"] != f"Bearer {TOKEN}":
                self._send(401, {"error": {"what": "The bearer token is missing or wrong.", "fix": ""}})
            else:
                query = {name: values[0] for name, values in parse_qs(address.query).items()}
                status, answer = world.answer(address.path, query)
                self._send(status, answer, "text/html" if isinstance(answer, str) else "application/json")

        def _send(self, status: int, answer: Any, kind: str = "application/json") -> None:
            body = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Security-Policy", POLICY)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
