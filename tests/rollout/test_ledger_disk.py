"""Disks: what is on them before an answer is given, what happens when they are full, and what is given back."""

import asyncio
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Awaitable
from pathlib import Path

import pytest

from prorl_gym.demand import Demand
from prorl_gym.errors import CancelReason, ConflictError, FailureKind, GoneError, NotFoundError
from prorl_gym.records import Outcome, Retry, Rollout, RolloutRequest, Score
from prorl_gym.rollout import ledger_writer
from prorl_gym.rollout.insistence import Insistence
from prorl_gym.rollout.ledger import SqliteLedger
from prorl_gym.rollout.ledger_file import LedgerConfig, LedgerFullError, StuckDiskError, UnreadableRecordError
from prorl_gym.rollout.ledger_guard import Mark
from prorl_gym.rollout.memory_ledger import MemoryLedger

DAY = 86400.0
NOW = 1_900_000_000.0


def ask(rollout_id: str, size: int = 0, run_id: str = "default") -> RolloutRequest:
    return RolloutRequest(rollout_id=rollout_id, run_id=run_id, environment="noop", task={"text": "x" * size})


def record(rollout_id: str, size: int = 0, at: float = NOW, run_id: str = "default") -> Rollout:
    return Rollout(
        rollout_id=rollout_id,
        run_id=run_id,
        group_id=None,
        group_size=1,
        replica=0,
        environment="noop",
        outcome=Outcome(status="completed"),
        score=Score(reward=1.0, detail={"text": "x" * size}),
        accepted_at=at,
        finished_at=at,
    )


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


# --- commit before answer -------------------------------------------------------------------------------------------

_DIE = """
import asyncio, os, signal, sys
from pathlib import Path
from prorl_gym.records import RolloutRequest
from prorl_gym.rollout import ledger_writer
from prorl_gym.rollout.ledger import SqliteLedger
from prorl_gym.rollout.ledger_file import LedgerConfig

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

async def main():
    ledger = await SqliteLedger.open(LedgerConfig(path=Path(sys.argv[1])))
    await ledger.accept([RolloutRequest(rollout_id="first", environment="noop", task={})])
    if sys.argv[2] == "before":
        together = ledger_writer.LedgerWriter._together
        ledger_writer.LedgerWriter._together = lambda *a: (together(*a), die())
    else:
        ledger_writer._deliver = die
    await ledger.accept([RolloutRequest(rollout_id="second", environment="noop", task={})])

asyncio.run(main())
"""


@pytest.mark.parametrize(("moment", "kept"), [("before", ["first"]), ("after", ["first", "second"])])
async def test_the_commit_comes_before_the_answer(tmp_path: Path, moment: str, kept: list[str]) -> None:
    """Killed when all is written but the commit, it has nothing; killed before its first answer, it has it all."""
    path = tmp_path / "l.db"
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", _DIE, str(path), moment)
    assert await child.wait() == -signal.SIGKILL
    ledger = await SqliteLedger.open(LedgerConfig(path=path))
    assert [job.request.rollout_id for job in await ledger.pending()] == kept
    await ledger.close()


async def test_an_answer_means_that_other_processes_see_it(tmp_path: Path) -> None:
    """A reader of a write-ahead log sees commits only."""
    ledger = await SqliteLedger.open(LedgerConfig(path=tmp_path / "l.db"))
    reader = sqlite3.connect(tmp_path / "l.db")
    for number in range(5):
        await ledger.accept([ask(f"r{number}")])
        assert reader.execute("SELECT count(*) FROM rollouts").fetchone() == (number + 1,)
    reader.close()
    await ledger.close()


# --- a disk that is full ------------------------------------------------------------------------------------------

_FILE_LIMIT = """
import asyncio, json, resource, sys
from pathlib import Path
from prorl_gym.records import RolloutRequest
from prorl_gym.rollout.ledger import SqliteLedger
from prorl_gym.rollout.ledger_file import LedgerConfig, LedgerError

def ask(name, size=0):
    return RolloutRequest(rollout_id=name, environment="noop", task={"text": "x" * size})

async def main():
    path = Path(sys.argv[1])
    ledger = await SqliteLedger.open(LedgerConfig(path=path))
    await ledger.accept([ask("kept")])
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.with_name("l.db-wal").stat().st_size + 16384, hard))
    answers = await asyncio.gather(
        ledger.accept([ask("half"), ask("too-big", 100_000)]), ledger.accept([ask("with-it")]), return_exceptions=True
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    await ledger.accept([ask("after", 100_000)])
    pending = [job.request.rollout_id for job in await ledger.pending()]
    print(json.dumps({"errors": [isinstance(a, LedgerError) and str(a) for a in answers], "pending": pending}))
    await ledger.close()

asyncio.run(main())
"""


def test_a_write_that_the_system_refuses_leaves_nothing_half(tmp_path: Path) -> None:
    """A real refusal, in the middle of a transaction: all who shared it are told, and the next one works."""
    done = subprocess.run(
        [sys.executable, "-c", _FILE_LIMIT, str(tmp_path / "l.db")], capture_output=True, text=True, check=True
    )
    said = json.loads(done.stdout)
    assert said["pending"] == ["kept", "after"]
    assert all(error and error.startswith(f"{tmp_path}/l.db: disk I/O error.\n") for error in said["errors"])


_SMALL_DISK = """
import asyncio, json, subprocess, sys
from pathlib import Path
directory = Path(sys.argv[1])
if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(directory)], capture_output=True).returncode:
    print("null")
    sys.exit()
from prorl_gym.records import RolloutRequest
from prorl_gym.rollout.ledger import SqliteLedger
from prorl_gym.rollout.ledger_file import LedgerConfig, LedgerFullError

def ask(name, size=0):
    return RolloutRequest(rollout_id=name, environment="noop", task={"text": "x" * size})

async def main():
    path = directory / "l.db"
    (directory / "filler").write_bytes(bytes(300_000))
    ledger = await SqliteLedger.open(LedgerConfig(path=path))
    accepted, said = [], ""
    while not said:
        name = f"r{len(accepted)}"
        try:
            await ledger.accept([ask(name + "-with-it"), ask(name, 20_000)])
            accepted += [name + "-with-it", name]
        except LedgerFullError as error:
            said = str(error)
    (directory / "filler").unlink()
    await ledger.accept([ask("after")])
    pending = [job.request.rollout_id for job in await ledger.pending()]
    print(json.dumps([said, pending == [*accepted, "after"], len(accepted)]))
    await ledger.close()

asyncio.run(main())
"""


def test_a_disk_that_is_really_full_is_told_as_such(tmp_path: Path) -> None:
    own_mounts = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    if shutil.which("unshare") is None or subprocess.run([*own_mounts, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespace can be made here")
    command = [*own_mounts, sys.executable, "-c", _SMALL_DISK, str(tmp_path)]
    answer = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    if answer is None:
        pytest.skip("no file system can be mounted here")
    said, right, count = answer
    assert said == f"{tmp_path}/l.db: the disk is full.\nFree space there; what was accepted is safe."
    assert right
    assert count > 2


async def test_a_finished_rollout_is_insisted_upon_until_there_is_room(tmp_path: Path) -> None:
    ledger = await SqliteLedger.open(LedgerConfig(path=tmp_path / "l.db"))
    await ledger.accept([ask("r0")])
    execute = ledger._writer.opened.connection.execute  # pyright: ignore[reportPrivateUsage]
    in_writer = ledger._writer._thread.submit  # pyright: ignore[reportPrivateUsage]
    pages = in_writer(lambda: execute("PRAGMA page_count").fetchone()[0]).result()
    in_writer(lambda: execute(f"PRAGMA max_page_count = {pages + 1}").fetchone()).result()
    insist = Insistence(pause_seconds=0.01)
    tries = 0

    async def finish() -> int | None:
        nonlocal tries
        tries += 1
        if tries == 3:
            in_writer(lambda: execute("PRAGMA max_page_count = 1000000").fetchone()).result()
        return await ledger.finish(record("r0", 200_000))

    assert await insist(finish) == 1
    assert tries == 3
    assert isinstance(await ledger.get("r0"), Rollout)
    assert (await ledger.usage()).kept == 1
    await ledger.close()


# --- the disk budget ----------------------------------------------------------------------------------------------


async def test_over_its_budget_it_takes_nothing_and_finishes_everything(tmp_path: Path) -> None:
    config = LedgerConfig(path=tmp_path / "l.db", budget_bytes=2_000_000)
    ledger = await SqliteLedger.open(config)
    accepted: list[str] = []
    with pytest.raises(LedgerFullError) as caught:
        for number in range(1000):
            await ledger.accept([ask(f"r{number}", 20_000)])
            accepted.append(f"r{number}")
    assert str(caught.value) == (
        "The ledger's disk budget (ledger.budget_bytes) is used up; what was accepted goes on.\n"
        "Acknowledge records that were used, run 'prorl-gym gc' on a stopped service's ledger, or raise the budget."
    )
    assert 60 < len(accepted) < 100
    assert [answer.duplicate for answer in await ledger.accept([ask("r0", 20_000)])] == [True]
    with pytest.raises(ConflictError):
        await ledger.accept([ask("r0", 20_001)])
    cursors = [await ledger.finish(record(name, 20_000)) for name in accepted]
    usage = await ledger.usage()
    assert usage.full
    assert usage.bytes > config.budget_bytes
    assert (usage.pending, usage.kept) == (0, len(accepted))
    assert await ledger.acknowledge("default", cursors[-1] or 0) == len(accepted)
    usage = await ledger.usage()
    assert not usage.full
    assert usage.bytes < 200_000
    await ledger.accept([ask("again", 20_000)])
    await ledger.close()


async def test_many_records_are_released_in_slices_between_which_others_get_their_turn(tmp_path: Path) -> None:
    ledger = await SqliteLedger.open(LedgerConfig(path=tmp_path / "l.db"))
    names = [f"r{number}" for number in range(600)]
    await ledger.accept([ask(name) for name in names])
    await asyncio.gather(*(ledger.finish(record(name)) for name in names))
    releasing = asyncio.create_task(ledger.acknowledge("default", 600))
    seen: set[int] = set()
    while not releasing.done():
        seen.add((await ledger.usage()).released)
    assert await releasing == 600
    assert len(seen) > 2
    await ledger.close()


async def test_pages_are_given_back_to_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl_gym.rollout.ledger_retention._SPARE_BYTES", 100_000)
    path = tmp_path / "l.db"
    ledger = await SqliteLedger.open(LedgerConfig(path=path))
    names = [f"r{number}" for number in range(100)]
    await ledger.accept([ask(name) for name in names])
    await asyncio.gather(*(ledger.finish(record(name, 50_000)) for name in names))
    await ledger.acknowledge("default", 100)
    await ledger.collect()
    await ledger.close()
    assert path.stat().st_size < 1_000_000


# --- forgetting ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sqlite", "memory"])
async def test_traces_are_forgotten_and_cursors_are_not_used_again(tmp_path: Path, kind: str) -> None:
    clock = Clock()
    config = LedgerConfig(path=tmp_path / "l.db")
    ledger = MemoryLedger(clock) if kind == "memory" else await SqliteLedger.open(config, clock)
    await ledger.accept([ask("a"), ask("b"), ask("pending")])
    assert [await ledger.finish(record(name)) for name in ("a", "b")] == [1, 2]
    clock.now += 15 * DAY
    assert await ledger.collect() == 2
    clock.now += 29 * DAY
    assert await ledger.collect() == 0
    with pytest.raises(GoneError):
        await ledger.get("a")
    clock.now += 2 * DAY
    await ledger.collect()
    assert await ledger.members() == []
    with pytest.raises(NotFoundError) as caught:
        await ledger.get("a")
    assert not isinstance(caught.value, GoneError)
    if isinstance(ledger, SqliteLedger):
        await ledger.close()
        ledger = await SqliteLedger.open(config, clock)
    assert [answer.duplicate for answer in await ledger.accept([ask("a")])] == [False]
    assert await ledger.finish(record("a", at=clock.now)) == 3
    assert [delivery.cursor for delivery in await ledger.finished(None, 2, 10)] == [3]
    assert [job.request.rollout_id for job in await ledger.pending()] == ["pending"]
    await ledger.close()


async def test_a_ledger_collects_when_it_is_opened(tmp_path: Path) -> None:
    clock = Clock()
    config = LedgerConfig(path=tmp_path / "l.db")
    ledger = await SqliteLedger.open(config, clock)
    await ledger.accept([ask("a")])
    await ledger.finish(record("a"))
    await ledger.close()
    clock.now += 15 * DAY
    ledger = await SqliteLedger.open(config, clock)
    while (await ledger.usage()).kept:
        pass
    await ledger.close()


async def test_wishes_for_runs_of_which_nothing_is_left_are_forgotten(tmp_path: Path) -> None:
    clock = Clock()
    ledger = await SqliteLedger.open(LedgerConfig(path=tmp_path / "l.db"), clock)
    await ledger.accept([ask("a", run_id="busy")])
    for run_id in ("busy", "idle"):
        await ledger.set_demand(run_id, Demand(groups=1))
    clock.now += 31 * DAY
    await ledger.collect()
    assert list(await ledger.demands()) == ["busy"]
    await ledger.close()


# --- what a busy service asks ---------------------------------------------------------------------------------------


async def test_no_question_walks_over_everything(tmp_path: Path) -> None:
    """The cost of a call is that of what it names, however much the ledger holds."""
    ledger = await SqliteLedger.open(LedgerConfig(path=tmp_path / "l.db"))
    names = [f"r{number}" for number in range(50)]
    await ledger.accept([ask(name, run_id="run") for name in names])
    for name in names[:40]:
        await ledger.finish(record(name, run_id="run"))
    writer = ledger._writer  # pyright: ignore[reportPrivateUsage]
    in_writer = writer._thread.submit  # pyright: ignore[reportPrivateUsage]
    asked: set[str] = set()
    in_writer(lambda: writer.opened.connection.set_trace_callback(asked.add)).result()
    await ledger.accept([ask("new", run_id="run"), ask("r0", run_id="run")])
    await ledger.jobs(["new", "r1"])
    await ledger.begin("new")
    await ledger.accept_and_begin([ask("at-once", run_id="run"), ask("r0", run_id="run")])
    retry = Retry(attempt=0, kind=FailureKind.ENGINE_TIMEOUT, stage="run", message="x")
    await ledger.fail_attempt("new", retry)
    await ledger.withdraw(["new"])
    await ledger.cancel(["r1"], CancelReason.CLIENT)
    await ledger.finish(record("new", run_id="run").model_copy(update={"attempt": 1}))
    await ledger.get("new")
    await ledger.requests(["new"])
    await ledger.finished("run", 30, 5)
    await ledger.finished(None, 30, 5)
    await ledger.members("run", after=30, limit=5)
    await ledger.members("run", groups=["g"])
    await ledger.acknowledge("run", 5)
    await ledger.collect()
    await ledger.usage()
    in_writer(lambda: writer.opened.connection.set_trace_callback(None)).result()
    await ledger.close()
    with sqlite3.connect(tmp_path / "l.db") as db:
        plans = {
            (row[3], statement)
            for statement in asked
            if statement.split()[0] in ("SELECT", "UPDATE", "DELETE", "INSERT")
            for row in db.execute("EXPLAIN QUERY PLAN " + statement)
        }
    db.close()
    assert len(plans) > 20
    pending = "(cursor=?)"  # by an index on what all pending ones have in common
    walks = [
        (plan, statement)
        for plan, statement in plans
        if (plan.startswith("SCAN") and "VIRTUAL TABLE" not in plan and plan != "SCAN marks") or pending in plan
    ]
    # Wishes are few, and looked at once an hour.
    assert [statement for _, statement in walks if "VALUES" not in statement and "demands" not in statement] == []


# --- texts that cannot be read ----------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["'{\"schema_version\": 99}'", "'no json'", "CAST(x'7bff00fe' AS TEXT)"])
async def test_a_record_that_cannot_be_read_is_told_and_handed_on(tmp_path: Path, damage: str) -> None:
    config = LedgerConfig(path=tmp_path / "l.db")
    ledger = await SqliteLedger.open(config)
    await ledger.accept([ask("bad"), ask("good"), ask("asked")])
    for name in ("bad", "good"):
        await ledger.finish(record(name))
    await ledger.close()
    with sqlite3.connect(config.path) as file:
        file.execute(f"UPDATE records SET record = {damage} WHERE cursor = 1")
        file.execute(f"UPDATE bodies SET body = {damage} WHERE seq = 3")
        file.execute("INSERT INTO demands VALUES ('run', '{\"later\": 1}', 0)")
    file.close()
    ledger = await SqliteLedger.open(config)
    for name in ("bad", "asked"):
        with pytest.raises(UnreadableRecordError, match=f"rollout {name}: its .* cannot be read") as caught:
            await ledger.get(name)
        assert len(str(caught.value).splitlines()) == 2
    assert isinstance(await ledger.get("good"), Rollout)
    assert [delivery.cursor for delivery in await ledger.finished(None, 0, 10)] == [1, 2]
    assert await ledger.demands() == {}
    await ledger.close()


def test_no_log_is_left_beside_a_closed_ledger(tmp_path: Path) -> None:
    """Moving it means moving one file, and the mark that says how many commits it has."""

    async def use() -> None:
        ledger = await SqliteLedger.open(LedgerConfig(path=tmp_path / "l.db"))
        await ledger.accept([ask("a")])
        await ledger.close()

    asyncio.run(use())
    assert sorted(os.listdir(tmp_path)) == ["l.db", "l.db.lock", "l.db.mark"]


# --- a disk that does not answer ------------------------------------------------------------------------------------


async def test_what_was_withdrawn_while_the_disk_was_tried_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = await SqliteLedger.open(LedgerConfig(path=tmp_path / "l.db"))
    await ledger.accept([ask("a")])
    thaw, probe = threading.Event(), Mark.probe

    def hang(mark: Mark) -> None:
        thaw.wait()
        probe(mark)

    with monkeypatch.context() as patch:
        patch.setattr(Mark, "probe", hang)
        patch.setattr(ledger_writer, "_URGENT_SECONDS", 0.1)
        with pytest.raises(StuckDiskError, match="Nothing was done"):
            await ledger.cancel(["a"], CancelReason.CLIENT)
        with pytest.raises(StuckDiskError, match="Nothing was done"):
            await ledger.set_demand("default", Demand(groups=1))
        thaw.set()
    assert await ledger.finish(record("a")) == 1
    assert dict(await ledger.demands()) == {}
    await ledger.close()


async def test_what_is_urgent_waits_for_no_queue(tmp_path: Path) -> None:
    ledger = await SqliteLedger.open(LedgerConfig(path=tmp_path / "l.db"))
    await ledger.accept([ask("a")])
    order: list[str] = []

    async def note(name: str, work: Awaitable[object]) -> None:
        await work
        order.append(name)

    async with asyncio.TaskGroup() as group:
        for number in range(2 * ledger_writer._BATCH):  # pyright: ignore[reportPrivateUsage]
            group.create_task(note(f"accept {number}", ledger.accept([ask(f"r{number}")])))
        group.create_task(note("cancel", ledger.cancel(["a"], CancelReason.CLIENT)))
    assert "cancel" in order[: ledger_writer._BATCH + 1]  # pyright: ignore[reportPrivateUsage]
    await ledger.close()
