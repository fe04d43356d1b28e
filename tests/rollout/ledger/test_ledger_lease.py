"""Ledgers on network file systems: a lease with a heartbeat, an epoch that fences, a rollback journal."""

import asyncio
import os
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ledger_writer import ask, child, ledger_and_writer, opened, query

from prorl_gym.rollout.ledger.lease import Lease, LeaseHolder
from prorl_gym.rollout.ledger.ledger_config import FencedError, LedgerConfig, LedgerError
from prorl_gym.rollout.ledger.open_ledger import network_filesystem
from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger


def on_nfs(path: Path, mountinfo: str | None = None) -> str:
    return "nfs4"


@pytest.fixture(autouse=True)
def everything_is_nfs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl_gym.rollout.ledger.open_ledger.network_filesystem", on_nfs)


def config(path: Path, seconds: float = 60.0) -> LedgerConfig:
    return LedgerConfig(path=path, allow_network_filesystem=True, lease_seconds=seconds, busy_seconds=10)


def lease_file(path: Path) -> Path:
    return path.with_name(path.name + ".lease")


def let_it_go_stale(path: Path, seconds: float = 3600) -> None:
    """As if its holder had been silent for so long."""
    heard = time.time() - seconds
    os.utime(lease_file(path), (heard, heard))


def from_elsewhere(path: Path) -> None:
    """As if the holder were on another host, where its process cannot be checked."""
    holder = LeaseHolder.model_validate_json(lease_file(path).read_bytes())
    lease_file(path).write_text(holder.model_copy(update={"boot": "another", "host": "elsewhere"}).model_dump_json())


async def test_it_has_a_rollback_journal_that_is_synced(tmp_path: Path, path: Path) -> None:
    async with ledger_and_writer(config(path)) as (ledger, writer):
        assert await query(writer, "PRAGMA journal_mode") == "truncate"
        assert await query(writer, "PRAGMA synchronous") == 3
        await ledger.add_rollouts([ask("a")])
        assert not (tmp_path / "l.db-wal").exists()
        assert lease_file(path).stat().st_mode & 0o777 == 0o600
    assert not lease_file(path).exists()


async def test_a_ledger_can_be_moved_to_a_network_file_system_and_back(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, kind in enumerate((None, "nfs4", None)):
        monkeypatch.setattr("prorl_gym.rollout.ledger.open_ledger.network_filesystem", lambda path, kind=kind: kind)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
        async with ledger_and_writer(config(path)) as (ledger, writer):
            assert await query(writer, "PRAGMA journal_mode") == ("truncate" if kind else "wal")
            await ledger.add_rollouts([ask(f"r{number}")])
            assert len(await ledger.pending_jobs()) == number + 1


async def test_who_has_a_heartbeat_keeps_it(path: Path) -> None:
    async with opened(config(path)) as ledger:
        from_elsewhere(path)
        with pytest.raises(LedgerError) as caught:
            await SqliteLedger.open(config(path))
        assert str(caught.value) == (
            f"{path}: another service uses it (process {os.getpid()} on elsewhere, heartbeat 0 s ago).\n"
            "Stop that one, or try again when it has been silent for 60 s (ledger.lease_seconds)."
        )
        assert await ledger.pending_jobs() == []


async def test_a_stale_lease_is_taken_and_its_holder_is_fenced_off(path: Path) -> None:
    async with opened(config(path)) as old:
        await old.add_rollouts([ask("by-old")])
        from_elsewhere(path)
        let_it_go_stale(path)
        async with ledger_and_writer(config(path)) as (new, writer):
            assert await query(writer, "SELECT epoch FROM marks") == 2
            with pytest.raises(FencedError) as caught:
                await old.add_rollouts([ask("too-late")])
            assert str(caught.value) == (
                f"{path}: this service does not hold the ledger any more (process {os.getpid()} on "
                f"{os.uname().nodename}).\n"
                "Stop this service: what it accepted is in the ledger, and goes on with the one that holds it."
            )
            with pytest.raises(FencedError):
                await old.pending_jobs()
            await new.add_rollouts([ask("by-new")])
            assert [job.request.rollout_id for job in await new.pending_jobs()] == ["by-old", "by-new"]
        assert not lease_file(path).exists()


async def test_an_old_holder_does_not_release_what_is_another_ones(path: Path) -> None:
    old = await SqliteLedger.open(config(path))
    from_elsewhere(path)
    let_it_go_stale(path)
    async with opened(config(path)) as new:
        await old.close()
        assert lease_file(path).exists()
        await new.add_rollouts([ask("a")])


async def test_a_head_that_cannot_renew_stops_by_itself_and_goes_on_when_it_can(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "clock_gettime", lambda clock: now)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    async with ledger_and_writer(config(path, 100)) as (ledger, writer):
        now = 1069.0
        await ledger.add_rollouts([ask("in-time")])
        now = 1071.0
        with pytest.raises(FencedError, match=r"l\.db\.lease: could not be renewed for 7\d s"):
            await ledger.add_rollouts([ask("late")])
        lease = writer.open_ledger.lease
        assert lease is not None
        lease.renew()
        await ledger.add_rollouts([ask("again")])
        assert [job.request.rollout_id for job in await ledger.pending_jobs()] == ["in-time", "again"]


async def test_a_heartbeat_is_given_by_itself(path: Path) -> None:
    async with opened(config(path, 0.5)) as ledger:
        began = time.monotonic()
        beats: set[int] = set()
        while len(beats) < 4:
            beats.add(lease_file(path).stat().st_mtime_ns)
            await ledger.usage()
        assert time.monotonic() - began < 5


async def test_a_lease_file_that_was_removed_or_written_over_is_lost(tmp_path: Path) -> None:
    spoilers: list[Callable[[Path], object]] = [Path.unlink, lambda path: path.write_text("[" * 5000)]
    for number, spoil in enumerate(spoilers):
        path = tmp_path / f"l{number}.db"
        async with ledger_and_writer(config(path)) as (ledger, writer):
            spoil(lease_file(path))
            lease = writer.open_ledger.lease
            assert lease is not None
            with pytest.raises(FencedError):
                lease.renew()
            with pytest.raises(FencedError, match="does not hold the ledger any more"):
                await ledger.add_rollouts([ask("a")])


async def test_a_takeover_that_was_interrupted_is_made_again(path: Path) -> None:
    """The lease file has the new epoch, the database does not: the next one's is above both."""
    async with opened(config(path)):
        pass
    Lease.acquire(path, 60, 1)
    from_elsewhere(path)
    let_it_go_stale(path)
    async with ledger_and_writer(config(path)) as (_, writer):
        assert await query(writer, "SELECT epoch FROM marks") == 3


# --- with processes -------------------------------------------------------------------------------------------------

_HOLD = """
open_ledger.network_filesystem = lambda path: "nfs4"

async def main():
    path, name, seconds = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    sys.stdin.readline()
    try:
        ledger = await SqliteLedger.open(
            LedgerConfig(path=path, allow_network_filesystem=True, lease_seconds=seconds, busy_seconds=20)
        )
        await ledger.add_rollouts([ask(name)])
        print("held", flush=True)
    except LedgerError as error:
        print(error.what, flush=True)
        return
    while sys.stdin.readline():
        try:
            await ledger.add_rollouts([ask(name + "-late")])
            print("wrote", flush=True)
        except LedgerError as error:
            print(error.what, flush=True)
    await ledger.close()
"""


async def start(path: Path, name: str, seconds: float) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*child(_HOLD, path, name, str(seconds)), stdin=pipe, stdout=pipe)


async def say(service: asyncio.subprocess.Process) -> str:
    """Let it go on by a step and return what it says."""
    assert service.stdin is not None
    assert service.stdout is not None
    service.stdin.write(b"\n")
    return (await service.stdout.readline()).decode().strip()


async def end(*children: asyncio.subprocess.Process) -> None:
    for one in children:
        if one.returncode is None:
            one.kill()
            await one.wait()


async def test_of_two_that_race_for_a_stale_lease_one_wins(path: Path) -> None:
    first = await SqliteLedger.open(config(path))
    await first.add_rollouts([ask("first")])
    from_elsewhere(path)
    let_it_go_stale(path)
    children = [await start(path, f"racer{number}", 60) for number in range(3)]
    try:
        said = await asyncio.gather(*map(say, children))
        assert sorted(answer == "held" for answer in said) == [False, False, True]
        assert sum("another service uses it" in answer for answer in said) == 2
        with pytest.raises(FencedError):
            await first.add_rollouts([ask("late")])
    finally:
        await first.close()
        await end(*children)
    with sqlite3.connect(path) as file:
        names = [row[0] for row in file.execute("SELECT rollout_id FROM rollouts ORDER BY seq")]
    file.close()
    assert names == ["first", f"racer{said.index('held')}"]


async def test_who_was_killed_on_this_host_is_followed_at_once_and_who_hangs_is_fenced(path: Path) -> None:
    killed, hung = await start(path, "killed", 60), await start(path, "hung", 1.0)
    try:
        assert await say(killed) == "held"
        killed.send_signal(signal.SIGKILL)
        await killed.wait()
        assert await say(hung) == "held"
        hung.send_signal(signal.SIGSTOP)
        let_it_go_stale(path)
        async with opened(config(path)) as ledger:
            hung.send_signal(signal.SIGCONT)
            said = await say(hung)
            assert "does not hold the ledger any more" in said or "could not be renewed" in said
            assert [job.request.rollout_id for job in await ledger.pending_jobs()] == ["killed", "hung"]
    finally:
        await end(killed, hung)


# --- which file systems these are -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "network"),
    [
        *((kind, True) for kind in ("nfs4", "lustre", "fuse.sshfs", "fuse.somethingnew", "9p")),
        *((kind, False) for kind in ("ext4", "tmpfs", "overlay", "fuse.fuse-overlayfs", "fuseblk")),
    ],
)
def test_kinds(kind: str, network: bool) -> None:
    found = network_filesystem(Path("/data"), f"40 22 0:50 / /data rw - {kind} server:/export rw\n")
    assert found == (kind if network else None)
