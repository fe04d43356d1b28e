"""What a ledger notices: other names of its file, lost commits, damaged records, jumping clocks, a full disk."""

import asyncio
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from prorl_gym.demand import Demand
from prorl_gym.errors import CancelReason, GoneError, ProrlError
from prorl_gym.records import Outcome, Rollout, RolloutRequest, Score
from prorl_gym.rollout import ledger_clock
from prorl_gym.rollout.encoding import decode_rollout
from prorl_gym.rollout.ledger import SqliteLedger
from prorl_gym.rollout.ledger_file import (
    DamagedLedgerError,
    LedgerConfig,
    LedgerError,
    LedgerInUseError,
    UnreadableRecordError,
)

DAY = 86400.0


def ask(rollout_id: str, size: int = 0) -> RolloutRequest:
    return RolloutRequest(rollout_id=rollout_id, run_id="run", environment="noop", task={"text": "x" * size})


def record(rollout_id: str, size: int = 0) -> Rollout:
    return Rollout(
        rollout_id=rollout_id,
        run_id="run",
        group_id=None,
        group_size=1,
        replica=0,
        environment="noop",
        outcome=Outcome(status="completed"),
        score=Score(reward=1.0, detail={"text": "x" * size}),
        accepted_at=1.0,
        finished_at=2.0,
    )


@asynccontextmanager
async def opened(path: Path) -> AsyncGenerator[SqliteLedger]:
    ledger = await SqliteLedger.open(LedgerConfig(path=path))
    try:
        yield ledger
    finally:
        await ledger.close()


_DIE = """
import asyncio, os, signal, sys
from pathlib import Path
from prorl_gym.records import RolloutRequest
from prorl_gym.rollout.ledger import SqliteLedger
from prorl_gym.rollout.ledger_file import LedgerConfig

async def main():
    ledger = await SqliteLedger.open(LedgerConfig(path=Path(sys.argv[1])))
    for number in range(20):
        await ledger.accept([RolloutRequest(rollout_id=f"r{number}", environment="noop", task={})])
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def killed(path: Path) -> None:
    """Accept 20 rollouts, one commit each, and die."""
    assert subprocess.run([sys.executable, "-c", _DIE, str(path)], check=False).returncode == -signal.SIGKILL


# --- one ledger, one service ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [os.symlink, os.link], ids=["symlink", "hard link"])
async def test_another_name_of_a_ledger_in_use_is_refused(tmp_path: Path, make: object) -> None:
    path, twin = tmp_path / "l.db", tmp_path / "elsewhere" / "twin.db"
    twin.parent.mkdir()
    async with opened(path) as ledger:
        await ledger.accept([ask("a")])
        assert callable(make)
        make(path, twin)
        with pytest.raises(LedgerInUseError, match="another service uses it"):
            await SqliteLedger.open(LedgerConfig(path=twin))
        await ledger.accept([ask("b")])


async def test_a_symbolic_link_to_a_directory_is_no_other_ledger(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    async with opened(tmp_path / "real" / "l.db"):
        with pytest.raises(LedgerInUseError):
            await SqliteLedger.open(LedgerConfig(path=tmp_path / "link" / "l.db"))


async def test_a_hard_link_does_not_hide_the_log_of_a_service_that_was_killed(tmp_path: Path) -> None:
    killed(tmp_path / "l.db")
    os.link(tmp_path / "l.db", tmp_path / "twin.db")
    with pytest.raises(LedgerError, match="is another name") as caught:
        await SqliteLedger.open(LedgerConfig(path=tmp_path / "twin.db"))
    assert caught.value.fix == f"Set ledger.path to {tmp_path / 'l.db'}."
    async with opened(tmp_path / "l.db") as ledger:
        assert len(await ledger.pending()) == 20


async def test_a_ledger_may_be_moved(tmp_path: Path) -> None:
    async with opened(tmp_path / "l.db") as ledger:
        await ledger.accept([ask("a")])
    for name in ("l.db", "l.db.mark"):
        (tmp_path / name).rename(tmp_path / f"moved-{name}")
    async with opened(tmp_path / "moved-l.db") as ledger:
        assert len(await ledger.pending()) == 1
    async with opened(tmp_path / "l.db") as fresh:
        assert await fresh.pending() == []


# --- lost commits ---------------------------------------------------------------------------------------------------


def remove_log(path: Path) -> None:
    path.with_name("l.db-wal").unlink()


def cut_log(path: Path) -> None:
    log = path.with_name("l.db-wal")
    os.truncate(log, log.stat().st_size // 2)


def cut_the_last_frame(path: Path) -> None:
    log = path.with_name("l.db-wal")
    os.truncate(log, log.stat().st_size - 1)


def flip_bits(path: Path) -> None:
    log = path.with_name("l.db-wal")
    data = bytearray(log.read_bytes())
    for place in (len(data) // 3, len(data) // 2, len(data) - 100):
        data[place] ^= 4
    log.write_bytes(data)


@pytest.mark.parametrize("damage", [remove_log, cut_log, cut_the_last_frame, flip_bits])
async def test_a_log_that_lost_commits_is_told_at_every_start_until_it_is_settled(
    tmp_path: Path, damage: object
) -> None:
    path = tmp_path / "l.db"
    killed(path)
    assert callable(damage)
    damage(path)
    for _ in range(2):
        with pytest.raises(DamagedLedgerError, match=r"its last \d+ commits are missing") as caught:
            await SqliteLedger.open(LedgerConfig(path=path))
        assert str(path.with_name("l.db.mark")) in caught.value.fix
    path.with_name("l.db.mark").unlink()
    async with opened(path) as ledger:
        kept = len(await ledger.pending())
        assert kept < 20
        await ledger.accept([ask("new")])
    async with opened(path) as ledger:
        assert len(await ledger.pending()) == kept + 1


@pytest.mark.parametrize("empty", [False, True])
async def test_a_missing_or_empty_database_is_not_taken_for_a_new_one(tmp_path: Path, empty: bool) -> None:
    path = tmp_path / "l.db"
    killed(path)
    path.unlink()
    if empty:
        path.touch()
    with pytest.raises(DamagedLedgerError, match=r"is missing or empty, but l\.db\.mark is left of it"):
        await SqliteLedger.open(LedgerConfig(path=path))
    path.with_name("l.db.mark").unlink()
    with pytest.raises(DamagedLedgerError, match=r"but l\.db-wal is left of it"):
        await SqliteLedger.open(LedgerConfig(path=path))
    path.with_name("l.db-wal").unlink()
    async with opened(path) as ledger:
        assert await ledger.pending() == []


async def test_an_older_copy_of_the_file_is_told(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    async with opened(path) as ledger:
        await ledger.accept([ask("a")])
    shutil.copy(path, tmp_path / "copy")
    async with opened(path) as ledger:
        await ledger.accept([ask("b")])
    shutil.copy(tmp_path / "copy", path)
    with pytest.raises(DamagedLedgerError, match="commits are missing"):
        await SqliteLedger.open(LedgerConfig(path=path))


async def test_a_kill_and_a_stop_lose_nothing_and_alarm_nobody(tmp_path: Path) -> None:
    killed(tmp_path / "l.db")
    for _ in range(2):
        async with opened(tmp_path / "l.db") as ledger:
            assert len(await ledger.pending()) == 20


# --- damaged records ------------------------------------------------------------------------------------------------


def change(path: Path, statement: str, *values: object) -> None:
    with sqlite3.connect(path) as db:
        db.execute(statement, values)
    db.close()


@pytest.mark.parametrize("old", [False, True], ids=["with a checksum", "of an earlier release"])
@pytest.mark.parametrize("run", [None, "run"])
async def test_a_damaged_record_is_marked_and_stops_no_other(tmp_path: Path, run: str | None, old: bool) -> None:
    path = tmp_path / "l.db"
    async with opened(path) as ledger:
        await ledger.accept([ask(f"r{number}") for number in range(5)])
        for number in range(5):
            await ledger.finish(record(f"r{number}"))
    if old:
        change(path, "UPDATE records SET crc = NULL")
    change(path, "UPDATE records SET record = replace(record, '\"reward\":1.0', '\"reward\"1.0') WHERE cursor = 3")
    async with opened(path) as ledger:
        found = await ledger.finished(run, 0, 100)
        assert [bool(one.damaged) for one in found] == [False, False, True, False, False]
        told = decode_rollout(found[2].record)
        assert (told.rollout_id, told.outcome.kind, told.reward) == ("r2", "internal", None)
        with pytest.raises(UnreadableRecordError):
            await ledger.get("r2")
        assert await ledger.acknowledge(run, 5) == 5


async def test_a_record_whose_reward_was_changed_is_damaged(tmp_path: Path) -> None:
    """It is good JSON all the same: only its checksum tells."""
    path = tmp_path / "l.db"
    async with opened(path) as ledger:
        await ledger.accept([ask("a")])
        await ledger.finish(record("a"))
    change(path, "UPDATE records SET record = replace(record, '\"reward\":1.0', '\"reward\":0.0')")
    async with opened(path) as ledger:
        (one,) = await ledger.finished(None, 0, 10)
        assert one.damaged == "its checksum is wrong"


async def test_a_damaged_page_stops_no_record_of_another_page(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    async with opened(path) as ledger:
        await ledger.accept([ask(f"r{number}") for number in range(60)])
        for number in range(60):
            await ledger.finish(record(f"r{number}", 3000))
    data = bytearray(path.read_bytes())
    page = data.rfind(b'"schema_version":1,"rollout_id":"r30"') // 8192
    data[page * 8192 : page * 8192 + 64] = os.urandom(64)
    path.write_bytes(data)
    async with opened(path) as ledger:
        found: list[int] = []
        damaged = 0
        while page_of := await ledger.finished("run", found[-1] if found else 0, 16):
            found += [one.cursor for one in page_of]
            damaged += sum(bool(one.damaged) for one in page_of)
        answers = await asyncio.gather(
            ledger.accept([ask("new-1")]), ledger.finished(None, 0, 100), ledger.accept([ask("new-2")])
        )
        assert len(answers[1]) == 60
        assert {job.request.rollout_id for job in await ledger.pending()} == {"new-1", "new-2"}
    assert found == list(range(1, 61))
    assert 0 < damaged < 10


# --- clocks that jump -----------------------------------------------------------------------------------------------


async def test_a_clock_that_jumps_releases_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, now, up = tmp_path / "l.db", [1.8e9], [1000.0]
    monkeypatch.setattr("time.time", lambda: now[0])
    monkeypatch.setattr(ledger_clock, "uptime", lambda: up[0])
    async with opened(path) as ledger:
        await ledger.accept([ask("a")])
        await ledger.finish(record("a"))
        for jump in (40 * DAY, -400 * DAY, 4000 * DAY):
            now[0] += jump
            up[0] += 60
            assert await ledger.collect() == 0
    now[0] += 40 * DAY
    async with opened(path) as ledger:
        assert await ledger.collect() == 0
        assert isinstance(await ledger.get("a"), Rollout)
        up[0] += 15 * DAY
        assert await ledger.collect() == 1
        with pytest.raises(GoneError):
            await ledger.get("a")


async def test_time_that_passes_while_the_service_is_stopped_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    up, boot = [1000.0], ["one"]
    monkeypatch.setattr(ledger_clock, "uptime", lambda: up[0])
    monkeypatch.setattr(ledger_clock, "boot_id", lambda: boot[0])
    async with opened(tmp_path / "l.db") as ledger:
        await ledger.accept([ask("a")])
        await ledger.finish(record("a"))
    up[0], boot[0] = 40 * DAY, "two"  # after a reboot nobody knows how long it was
    async with opened(tmp_path / "l.db") as ledger:
        assert await ledger.collect() == 0
        assert isinstance(await ledger.get("a"), Rollout)
    up[0] += 15 * DAY
    async with opened(tmp_path / "l.db") as ledger:
        await ledger.collect()
        with pytest.raises(GoneError):
            await ledger.get("a")


# --- a disk that is full --------------------------------------------------------------------------------------------

_FULL = """
import asyncio, json, os, subprocess, sys
from pathlib import Path
directory = Path(sys.argv[1])
if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "none", str(directory)], capture_output=True).returncode:
    print("null")
    sys.exit()
from prorl_gym.demand import Demand
from prorl_gym.errors import CancelReason, ProrlError
from prorl_gym.records import Outcome, Rollout, RolloutRequest, Score
from prorl_gym.rollout.ledger import SqliteLedger
from prorl_gym.rollout.ledger_file import LedgerConfig

def ask(name, size=0):
    return RolloutRequest(rollout_id=name, run_id="run", environment="noop", task={"text": "x" * size})

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
    await ledger.accept([ask(f"r{number}") for number in range(40)])
    for number in range(20):
        await ledger.finish(record(f"r{number}"))
    fill()
    said = {}
    try:
        for number in range(200):
            await ledger.accept([ask(f"new{number}", 100000)])
    except ProrlError as error:
        said["accept"] = type(error).__name__
    for number in range(10):
        await ledger.set_demand("run", Demand(groups=number))
        fill()
    said["cancelled"] = await ledger.cancel(["r38", "r39"], CancelReason.CLIENT)
    said["released"] = await ledger.acknowledge("run", 20)
    said["pending"] = (await ledger.usage()).pending >= 20
    said["demand"] = (await ledger.demands())["run"].groups
    await ledger.close()
    print(json.dumps(said))

asyncio.run(main())
"""


def test_a_full_disk_takes_acknowledgements_cancels_and_demands(tmp_path: Path) -> None:
    own_mounts = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    if shutil.which("unshare") is None or subprocess.run([*own_mounts, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespace can be made here")
    command = [*own_mounts, sys.executable, "-c", _FULL, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    if said is None:
        pytest.skip("no file system can be mounted here")
    assert said == {
        "accept": "DiskFullError",
        "cancelled": ["r38", "r39"],
        "released": 20,
        "pending": True,
        "demand": 9,
    }


async def test_asking_what_it_holds_needs_no_disk(tmp_path: Path) -> None:
    """A write that hangs, as on a frozen file system, keeps nobody from asking."""
    async with opened(tmp_path / "l.db") as ledger:
        await ledger.accept([ask("a")])
        writer = ledger._writer  # pyright: ignore[reportPrivateUsage]
        release = asyncio.Event()
        loop = asyncio.get_running_loop()

        def hang() -> None:
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result()

        hanging = loop.run_in_executor(writer._thread, hang)  # pyright: ignore[reportPrivateUsage]
        accepting = asyncio.create_task(ledger.accept([ask("b")]))
        usage = await asyncio.wait_for(ledger.usage(), 5)
        assert (usage.pending, usage.kept) == (1, 0)
        release.set()
        await hanging
        await accepting
        assert (await ledger.usage()).pending == 2


async def test_a_demand_that_cannot_be_written_does_not_hold(tmp_path: Path) -> None:
    """Without the reserve it is refused as before."""
    async with opened(tmp_path / "l.db") as ledger:
        writer = ledger._writer  # pyright: ignore[reportPrivateUsage]
        assert writer.opened.guard is not None
        writer.opened.guard.reserve.release()
        execute = writer.opened.connection.execute
        in_writer = writer._thread.submit  # pyright: ignore[reportPrivateUsage]
        pages = in_writer(lambda: execute("PRAGMA page_count").fetchone()[0]).result()
        in_writer(lambda: execute(f"PRAGMA max_page_count = {pages}").fetchone()).result()
        number = 0
        with pytest.raises(ProrlError, match="the disk is full"):
            for number in range(1000):
                await ledger.set_demand(f"run-{number}", Demand(groups=number))
        held = len(await ledger.demands())
        in_writer(lambda: execute("PRAGMA max_page_count = 1000000").fetchone()).result()
        assert held == number
        assert await ledger.cancel(["nobody"], CancelReason.CLIENT) == []
