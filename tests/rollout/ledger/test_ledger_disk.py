"""Disks: what is on them before an answer is given, what happens when they are full, and what is given back."""

import asyncio
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import threading
from collections.abc import Awaitable
from pathlib import Path

import pytest
from ledger_writer import (
    DAY,
    ask,
    change,
    child,
    open_with_writer,
    opened,
    record,
    traced,
)

from prorl_gym.demand import Demand
from prorl_gym.errors import CancelReason, ConflictError, FailureKind, GoneError, NotFoundError
from prorl_gym.records import Retry, Rollout
from prorl_gym.rollout.ledger.ledger_config import LedgerConfig, LedgerFullError, StuckDiskError, UnreadableRecordError
from prorl_gym.rollout.ledger.open_ledger import CommitMark
from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger
from prorl_gym.rollout.ledger.writer_thread import WriterLimits

NOW = 1_900_000_000.0


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


# --- commit before answer -------------------------------------------------------------------------------------------

_DIE = """
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

async def main():
    ledger = await SqliteLedger.open(LedgerConfig(path=Path(sys.argv[1])))
    await ledger.add_rollouts([ask("first")])
    if sys.argv[2] == "before":
        together = writer_thread.LedgerWriter._run_batch
        writer_thread.LedgerWriter._run_batch = lambda *a: (together(*a), die())
    else:
        writer_thread.LedgerWriter._end_transaction = die
    await ledger.add_rollouts([ask("second")])
"""


@pytest.mark.parametrize(("moment", "kept"), [("before", ["first"]), ("after", ["first", "second"])])
async def test_the_commit_comes_before_the_answer(path: Path, moment: str, kept: list[str]) -> None:
    """Killed when all is written but the commit, it has nothing; killed before its first answer, it has it all."""
    killed = await asyncio.create_subprocess_exec(*child(_DIE, path, moment))
    assert await killed.wait() == -signal.SIGKILL
    async with opened(path) as ledger:
        assert [job.request.rollout_id for job in await ledger.pending_jobs()] == kept


# --- a disk that is full ------------------------------------------------------------------------------------------

_FILE_LIMIT = """
async def main():
    path = Path(sys.argv[1])
    ledger = await SqliteLedger.open(LedgerConfig(path=path))
    await ledger.add_rollouts([ask("kept")])
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.with_name("l.db-wal").stat().st_size + 16384, hard))
    answers = await asyncio.gather(
        ledger.add_rollouts([ask("half"), ask("too-big", 100_000)]),
        ledger.add_rollouts([ask("with-it")]),
        return_exceptions=True,
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    await ledger.add_rollouts([ask("after", 100_000)])
    pending = [job.request.rollout_id for job in await ledger.pending_jobs()]
    print(json.dumps({"errors": [isinstance(a, LedgerError) and str(a) for a in answers], "pending": pending}))
    await ledger.close()
"""


def test_a_write_that_the_system_refuses_leaves_nothing_half(path: Path) -> None:
    """A real refusal, in the middle of a transaction: all calls that shared it fail, and the next one works."""
    done = subprocess.run(child(_FILE_LIMIT, path), capture_output=True, text=True, check=True)
    said = json.loads(done.stdout)
    assert said["pending"] == ["kept", "after"]
    assert all(error and error.startswith(f"{path}: disk I/O error.\n") for error in said["errors"])


_FULL = """
directory = Path(sys.argv[1]).parent
mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "none", str(directory)]
if subprocess.run(mount, capture_output=True).returncode:
    print("null")
    sys.exit()

from prorl_gym.demand import Demand
from prorl_gym.errors import CancelReason, ProrlError
from prorl_gym.records import Outcome, Rollout, Score

def record(name):
    return Rollout(rollout_id=name, run_id="run", group_id=None, group_size=1, replica=0, environment="noop",
        outcome=Outcome(status="completed"), score=Score(reward=1.0, detail={"text": "x" * 20000}),
        accepted_at=1.0, finished_at=2.0)

def fill():
    with (directory / "filler").open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass

async def main():
    ledger = await SqliteLedger.open(LedgerConfig(path=directory / "l.db"))
    accepted = [f"r{number}" for number in range(40)]
    await ledger.add_rollouts([ask(name) for name in accepted])
    for name in accepted[:20]:
        await ledger.finish(record(name))
    fill()
    said = {}
    try:
        for number in range(200):
            await ledger.add_rollouts([ask(f"new{number}-with-it"), ask(f"new{number}", 100000)])
            accepted += [f"new{number}-with-it", f"new{number}"]
    except ProrlError as error:
        said["accept"] = [type(error).__name__, str(error)]
    for number in range(10):
        await ledger.set_demand("run", Demand(groups=number))
        fill()
    said["cancelled"] = await ledger.cancel(["r38", "r39"], CancelReason.CLIENT)
    said["released"] = await ledger.acknowledge("run", 20)
    said["demand"] = (await ledger.demands())["run"].groups
    (directory / "filler").unlink()
    await ledger.add_rollouts([ask("after")])
    pending = [job.request.rollout_id for job in await ledger.pending_jobs()]
    said["pending"] = pending == [*accepted[20:], "after"]
    await ledger.close()
    print(json.dumps(said))
"""


def test_a_full_disk_takes_acknowledgements_cancels_and_demands(path: Path) -> None:
    """A file system that is really full, in a process with mounts of its own."""
    own_mounts = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    if shutil.which("unshare") is None or subprocess.run([*own_mounts, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespace can be made here")
    done = subprocess.run([*own_mounts, *child(_FULL, path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    if answer is None:
        pytest.skip("no file system can be mounted here")
    assert answer == {
        "accept": ["DiskFullError", f"{path}: the disk is full.\nFree space there; what was accepted is safe."],
        "cancelled": ["r38", "r39"],
        "released": 20,
        "pending": True,
        "demand": 9,
    }


# --- the disk budget ----------------------------------------------------------------------------------------------


async def test_over_its_budget_it_takes_nothing_and_finishes_everything(path: Path) -> None:
    config = LedgerConfig(path=path, budget_bytes=2_000_000)
    ledger = await SqliteLedger.open(config)
    accepted: list[str] = []
    with pytest.raises(LedgerFullError) as caught:
        for number in range(1000):
            await ledger.add_rollouts([ask(f"r{number}", 20_000)])
            accepted.append(f"r{number}")
    assert str(caught.value) == (
        "The ledger's disk budget (ledger.budget_bytes) is used up; what was accepted goes on.\n"
        "Acknowledge records that were used, run 'prorl-gym gc' on a stopped service's ledger, or raise the budget."
    )
    assert 60 < len(accepted) < 100
    assert [answer.duplicate for answer in await ledger.add_rollouts([ask("r0", 20_000)])] == [True]
    with pytest.raises(ConflictError):
        await ledger.add_rollouts([ask("r0", 20_001)])
    cursors = [await ledger.finish(record(name, 20_000)) for name in accepted]
    usage = await ledger.usage()
    assert usage.full
    assert usage.bytes > config.budget_bytes
    assert (usage.pending, usage.kept) == (0, len(accepted))
    assert await ledger.acknowledge("run", cursors[-1] or 0) == len(accepted)
    usage = await ledger.usage()
    assert not usage.full
    assert usage.bytes < 200_000
    await ledger.add_rollouts([ask("again", 20_000)])
    await ledger.close()


async def test_many_records_are_released_in_slices_between_which_others_get_their_turn(ledger: SqliteLedger) -> None:
    names = [f"r{number}" for number in range(600)]
    await ledger.add_rollouts([ask(name) for name in names])
    await asyncio.gather(*(ledger.finish(record(name)) for name in names))
    releasing = asyncio.create_task(ledger.acknowledge("run", 600))
    seen: set[int] = set()
    while not releasing.done():
        seen.add((await ledger.usage()).released)
    assert await releasing == 600
    assert len(seen) > 2


async def test_pages_are_given_back_to_the_file_system(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    ledger, writer = await open_with_writer(LedgerConfig(path=path))
    names = [f"r{number}" for number in range(100)]
    await ledger.add_rollouts([ask(name) for name in names])
    await asyncio.gather(*(ledger.finish(record(name, 50_000)) for name in names))
    await ledger.acknowledge("run", 100)
    now = writer.open_ledger.clock()
    while (await writer.run(lambda tables: tables.retention.collect_garbage(now, spare_bytes=100_000))).more:
        pass
    await ledger.close()
    assert path.stat().st_size < 1_000_000


# --- forgetting ---------------------------------------------------------------------------------------------------


async def test_traces_are_forgotten_and_cursors_are_not_used_again(path: Path) -> None:
    clock = Clock()
    async with opened(path, clock) as ledger:
        await ledger.add_rollouts([ask("a"), ask("b"), ask("pending")])
        assert [await ledger.finish(record(name)) for name in ("a", "b")] == [1, 2]
        clock.now += 15 * DAY
        assert await ledger.collect_garbage() == 2
        clock.now += 29 * DAY
        assert await ledger.collect_garbage() == 0
        with pytest.raises(GoneError):
            await ledger.get("a")
        clock.now += 2 * DAY
        await ledger.collect_garbage()
        assert await ledger.summaries() == []
        with pytest.raises(NotFoundError) as caught:
            await ledger.get("a")
        assert not isinstance(caught.value, GoneError)
    async with opened(path, clock) as ledger:
        assert [answer.duplicate for answer in await ledger.add_rollouts([ask("a")])] == [False]
        assert await ledger.finish(record("a")) == 3
        assert [delivery.cursor for delivery in await ledger.read_records(None, 2, 10)] == [3]
        assert [job.request.rollout_id for job in await ledger.pending_jobs()] == ["pending"]


async def test_a_ledger_collects_when_it_is_opened(path: Path) -> None:
    clock = Clock()
    async with opened(path, clock) as ledger:
        await ledger.add_rollouts([ask("a")])
        await ledger.finish(record("a"))
    clock.now += 15 * DAY
    async with opened(path, clock) as ledger:
        while (await ledger.usage()).kept:
            pass


async def test_wishes_for_runs_of_which_nothing_is_left_are_forgotten(path: Path) -> None:
    clock = Clock()
    async with opened(path, clock) as ledger:
        await ledger.add_rollouts([ask("a", run_id="busy")])
        for run_id in ("busy", "idle"):
            await ledger.set_demand(run_id, Demand(groups=1))
        clock.now += 31 * DAY
        await ledger.collect_garbage()
        assert list(await ledger.demands()) == ["busy"]


# --- what a busy service asks ---------------------------------------------------------------------------------------


async def test_no_question_walks_over_everything(path: Path) -> None:
    """The cost of a call is that of what it names, however much the ledger holds."""
    ledger, writer = await open_with_writer(LedgerConfig(path=path))
    names = [f"r{number}" for number in range(50)]
    await ledger.add_rollouts([ask(name) for name in names])
    for name in names[:40]:
        await ledger.finish(record(name))
    traced_statements = await traced(writer)
    await ledger.add_rollouts([ask("new"), ask("r0")])
    await ledger.next_jobs(["new", "r1"])
    await ledger.begin_attempt("new")
    await ledger.add_and_begin([ask("at-once"), ask("r0")])
    retry = Retry(attempt=0, kind=FailureKind.ENGINE_TIMEOUT, stage="run", message="x")
    await ledger.fail_attempt("new", retry)
    await ledger.withdraw_attempts(["new"])
    await ledger.cancel(["r1"], CancelReason.CLIENT)
    await ledger.finish(record("new").model_copy(update={"attempt": 1}))
    await ledger.get("new")
    await ledger.requests(["new"])
    await ledger.read_records("run", 30, 5)
    await ledger.read_records(None, 30, 5)
    await ledger.summaries("run", after=30, limit=5)
    await ledger.summaries("run", groups=["g"])
    await ledger.acknowledge("run", 5)
    await ledger.collect_garbage()
    await ledger.usage()
    asked = set(traced_statements)
    await ledger.close()
    with sqlite3.connect(path) as db:
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
async def test_a_record_that_cannot_be_read_is_reported_and_delivered(path: Path, damage: str) -> None:
    async with opened(path) as ledger:
        await ledger.add_rollouts([ask("bad"), ask("good"), ask("asked")])
        for name in ("bad", "good"):
            await ledger.finish(record(name))
    change(
        path,
        f"UPDATE records SET record = {damage} WHERE cursor = 1",
        f"UPDATE bodies SET body = {damage} WHERE seq = 3",
        "INSERT INTO demands VALUES ('run', '{\"later\": 1}', 0)",
    )
    async with opened(path) as ledger:
        for name in ("bad", "asked"):
            with pytest.raises(UnreadableRecordError, match=f"rollout {name}: its .* cannot be read") as caught:
                await ledger.get(name)
            assert len(str(caught.value).splitlines()) == 2
        assert isinstance(await ledger.get("good"), Rollout)
        assert [delivery.cursor for delivery in await ledger.read_records(None, 0, 10)] == [1, 2]
        assert await ledger.demands() == {}


# --- a disk that does not answer ------------------------------------------------------------------------------------


async def test_what_was_withdrawn_while_the_disk_was_tried_is_not_kept(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, _ = await open_with_writer(LedgerConfig(path=path), WriterLimits(urgent_seconds=0.1))
    await ledger.add_rollouts([ask("a")])
    thaw, probe = threading.Event(), CommitMark.sync

    def hang(mark: CommitMark) -> None:
        thaw.wait()
        probe(mark)

    with monkeypatch.context() as patch:
        patch.setattr(CommitMark, "sync", hang)
        with pytest.raises(StuckDiskError, match="Nothing was done"):
            await ledger.cancel(["a"], CancelReason.CLIENT)
        with pytest.raises(StuckDiskError, match="Nothing was done"):
            await ledger.set_demand("run", Demand(groups=1))
        thaw.set()
    assert await ledger.finish(record("a")) == 1
    assert dict(await ledger.demands()) == {}
    await ledger.close()


async def test_what_is_urgent_waits_for_no_queue(path: Path) -> None:
    limits = WriterLimits(batch=100)
    ledger, _ = await open_with_writer(LedgerConfig(path=path), limits)
    await ledger.add_rollouts([ask("a")])
    order: list[str] = []

    async def note(name: str, work: Awaitable[object]) -> None:
        await work
        order.append(name)

    async with asyncio.TaskGroup() as group:
        for number in range(2 * limits.batch):
            group.create_task(note(f"accept {number}", ledger.add_rollouts([ask(f"r{number}")])))
        group.create_task(note("cancel", ledger.cancel(["a"], CancelReason.CLIENT)))
    assert "cancel" in order[: limits.batch + 1]
    await ledger.close()
