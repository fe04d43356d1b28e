"""What a ledger notices: other names of its file, lost commits, damaged records, jumping clocks, a stuck disk."""

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from ledger_writer import DAY, ask, change, child, hanging_disk, lift_page_limit, limit_pages, opened, record

from prorl_gym.demand import Demand
from prorl_gym.errors import CancelReason, GoneError, ProrlError
from prorl_gym.records import Rollout
from prorl_gym.rollout.ledger import open_ledger
from prorl_gym.rollout.ledger.ledger_config import (
    DamagedLedgerError,
    LedgerConfig,
    LedgerError,
    LedgerInUseError,
    UnreadableRecordError,
)
from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger
from prorl_gym.rollout.ledger.writer_thread import LedgerWriter

_DIE = """
async def main():
    ledger = await SqliteLedger.open(LedgerConfig(path=Path(sys.argv[1])))
    for number in range(20):
        await ledger.add_rollouts([ask(f"r{number}")])
    os.kill(os.getpid(), signal.SIGKILL)
"""


def killed(path: Path) -> None:
    """Accept 20 rollouts, one commit each, and die."""
    assert subprocess.run(child(_DIE, path), check=False).returncode == -signal.SIGKILL


# --- one ledger, one service ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [os.symlink, os.link], ids=["symlink", "hard link"])
async def test_another_name_of_a_ledger_in_use_is_refused(
    tmp_path: Path, path: Path, make: Callable[[Path, Path], None]
) -> None:
    twin = tmp_path / "elsewhere" / "twin.db"
    twin.parent.mkdir()
    async with opened(path) as ledger:
        await ledger.add_rollouts([ask("a")])
        make(path, twin)
        with pytest.raises(LedgerInUseError, match="another service uses it"):
            await SqliteLedger.open(LedgerConfig(path=twin))
        await ledger.add_rollouts([ask("b")])


async def test_a_hard_link_does_not_hide_the_log_of_a_service_that_was_killed(tmp_path: Path, path: Path) -> None:
    killed(path)
    os.link(path, tmp_path / "twin.db")
    with pytest.raises(LedgerError, match="is another name") as caught:
        await SqliteLedger.open(LedgerConfig(path=tmp_path / "twin.db"))
    assert caught.value.fix == f"Set ledger.path to {tmp_path / 'l.db'}."
    for _ in range(2):  # a kill and a stop raise no alarm
        async with opened(path) as ledger:
            assert len(await ledger.pending_jobs()) == 20


async def test_a_ledger_may_be_moved(tmp_path: Path, path: Path) -> None:
    async with opened(path) as ledger:
        await ledger.add_rollouts([ask("a")])
    for name in ("l.db", "l.db.mark"):
        (tmp_path / name).rename(tmp_path / f"moved-{name}")
    async with opened(tmp_path / "moved-l.db") as ledger:
        assert len(await ledger.pending_jobs()) == 1
    async with opened(path) as fresh:
        assert await fresh.pending_jobs() == []


# --- lost commits ---------------------------------------------------------------------------------------------------


def cut_log(log: Path) -> None:
    os.truncate(log, log.stat().st_size // 2)


def cut_the_last_frame(log: Path) -> None:
    os.truncate(log, log.stat().st_size - 1)


def flip_bits(log: Path) -> None:
    data = bytearray(log.read_bytes())
    for place in (len(data) // 3, len(data) // 2, len(data) - 100):
        data[place] ^= 4
    log.write_bytes(data)


@pytest.mark.parametrize("damage", [Path.unlink, cut_log, cut_the_last_frame, flip_bits])
async def test_a_log_that_lost_commits_is_told_at_every_start_until_it_is_settled(
    path: Path, damage: Callable[[Path], None]
) -> None:
    killed(path)
    damage(path.with_name("l.db-wal"))
    for _ in range(2):
        with pytest.raises(DamagedLedgerError, match=r"its last \d+ commits are missing") as caught:
            await SqliteLedger.open(LedgerConfig(path=path))
        assert str(path.with_name("l.db.mark")) in caught.value.fix
    path.with_name("l.db.mark").unlink()
    async with opened(path) as ledger:
        kept = len(await ledger.pending_jobs())
        assert kept < 20
        await ledger.add_rollouts([ask("new")])
    async with opened(path) as ledger:
        assert len(await ledger.pending_jobs()) == kept + 1


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
        assert await ledger.pending_jobs() == []


async def test_an_older_copy_of_the_file_is_reported(tmp_path: Path, path: Path) -> None:
    async with opened(path) as ledger:
        await ledger.add_rollouts([ask("a")])
    shutil.copy(path, tmp_path / "copy")
    async with opened(path) as ledger:
        await ledger.add_rollouts([ask("b")])
    shutil.copy(tmp_path / "copy", path)
    with pytest.raises(DamagedLedgerError, match="commits are missing"):
        await SqliteLedger.open(LedgerConfig(path=path))


# --- damaged records ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", [None, "run"])
async def test_a_damaged_record_is_marked_and_stops_no_other(path: Path, run: str | None) -> None:
    async with opened(path) as ledger:
        await ledger.add_rollouts([ask(f"r{number}") for number in range(5)])
        for number in range(5):
            await ledger.finish(record(f"r{number}"))
    change(path, "UPDATE records SET record = replace(record, '\"reward\":1.0', '\"reward\"1.0') WHERE cursor = 3")
    async with opened(path) as ledger:
        found = await ledger.read_records(run, 0, 100)
        assert [bool(one.damage) for one in found] == [False, False, True, False, False]
        rollout = Rollout.model_validate_json(found[2].record)
        assert (rollout.rollout_id, rollout.outcome.kind, rollout.reward) == ("r2", "internal", None)
        with pytest.raises(UnreadableRecordError):
            await ledger.get("r2")
        assert await ledger.acknowledge(run, 5) == 5


async def test_a_record_whose_reward_was_changed_is_damaged(path: Path) -> None:
    """It is good JSON all the same: only its checksum tells."""
    async with opened(path) as ledger:
        await ledger.add_rollouts([ask("a")])
        await ledger.finish(record("a"))
    change(path, "UPDATE records SET record = replace(record, '\"reward\":1.0', '\"reward\":0.0')")
    async with opened(path) as ledger:
        (one,) = await ledger.read_records(None, 0, 10)
        assert one.damage == "its checksum is wrong"


async def test_a_damaged_page_stops_no_record_of_another_page(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    async with opened(path) as ledger:
        await ledger.add_rollouts([ask(f"r{number}") for number in range(60)])
        for number in range(60):
            await ledger.finish(record(f"r{number}", 3000))
    data = bytearray(path.read_bytes())
    page = data.rfind(b'"schema_version":1,"rollout_id":"r30"') // 8192
    data[page * 8192 : page * 8192 + 64] = os.urandom(64)
    path.write_bytes(data)
    async with opened(path) as ledger:
        found: list[int] = []
        damaged = 0
        while page_of := await ledger.read_records("run", found[-1] if found else 0, 16):
            found += [one.cursor for one in page_of]
            damaged += sum(bool(one.damage) for one in page_of)
        answers = await asyncio.gather(
            ledger.add_rollouts([ask("new-1")]), ledger.read_records(None, 0, 100), ledger.add_rollouts([ask("new-2")])
        )
        assert len(answers[1]) == 60
        assert {job.request.rollout_id for job in await ledger.pending_jobs()} == {"new-1", "new-2"}
    assert found == list(range(1, 61))
    assert 0 < damaged < 10


# --- clocks that jump -----------------------------------------------------------------------------------------------


async def test_a_clock_that_jumps_releases_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, up = [1.8e9], [1000.0]
    monkeypatch.setattr("time.time", lambda: now[0])
    monkeypatch.setattr(open_ledger, "uptime", lambda: up[0])
    async with opened(path) as ledger:
        await ledger.add_rollouts([ask("a")])
        await ledger.finish(record("a"))
        for jump in (40 * DAY, -400 * DAY, 4000 * DAY):
            now[0] += jump
            up[0] += 60
            assert await ledger.collect_garbage() == 0
    now[0] += 40 * DAY
    async with opened(path) as ledger:
        assert await ledger.collect_garbage() == 0
        assert isinstance(await ledger.get("a"), Rollout)
        up[0] += 15 * DAY
        assert await ledger.collect_garbage() == 1
        with pytest.raises(GoneError):
            await ledger.get("a")


async def test_time_that_passes_while_the_service_is_stopped_counts(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    up, boot = [1000.0], ["one"]
    monkeypatch.setattr(open_ledger, "uptime", lambda: up[0])
    monkeypatch.setattr(open_ledger, "boot_id", lambda: boot[0])
    async with opened(path) as ledger:
        await ledger.add_rollouts([ask("a")])
        await ledger.finish(record("a"))
    up[0], boot[0] = 40 * DAY, "two"  # after a reboot the time that passed is unknown
    async with opened(path) as ledger:
        assert await ledger.collect_garbage() == 0
        assert isinstance(await ledger.get("a"), Rollout)
    up[0] += 15 * DAY
    async with opened(path) as ledger:
        await ledger.collect_garbage()
        with pytest.raises(GoneError):
            await ledger.get("a")


# --- a disk that is stuck or full ------------------------------------------------------------------------------------


async def test_asking_what_it_holds_needs_no_disk(ledger: SqliteLedger, writer: LedgerWriter) -> None:
    """A write that hangs, as on a frozen file system, blocks no reads."""
    await ledger.add_rollouts([ask("a")])
    async with hanging_disk(writer):
        accepting = asyncio.create_task(ledger.add_rollouts([ask("b")]))
        usage = await asyncio.wait_for(ledger.usage(), 5)
        assert (usage.pending, usage.kept) == (1, 0)
    await accepting
    assert (await ledger.usage()).pending == 2


async def test_a_demand_that_cannot_be_written_does_not_hold(ledger: SqliteLedger, writer: LedgerWriter) -> None:
    """Without the reserve it is refused as before."""
    assert writer.open_ledger.reserve is not None
    writer.open_ledger.reserve.release()
    await limit_pages(writer, 0)
    number = 0
    with pytest.raises(ProrlError, match="the disk is full"):
        for number in range(1000):
            await ledger.set_demand(f"run-{number}", Demand(groups=number))
    held = len(await ledger.demands())
    await lift_page_limit(writer)
    assert held == number
    assert await ledger.cancel(["nobody"], CancelReason.CLIENT) == []
