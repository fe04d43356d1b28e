"""The durable ledger: conformance, durability, and what it says about a bad file."""

import asyncio
import os
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from ledger_writer import ledger_and_writer, lift_page_limit, limit_pages, open_with_writer, query

from prorl_gym.errors import ConflictError, NotFoundError, ShuttingDownError
from prorl_gym.records import RolloutRequest
from prorl_gym.rollout.ledger.ledger_config import LedgerConfig, LedgerError
from prorl_gym.rollout.ledger.open_ledger import network_filesystem
from prorl_gym.rollout.ledger.sql_schema import LEDGER_SCHEMA
from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger
from prorl_gym.rollout.ledger.writer_thread import LedgerTables
from prorl_gym.rollout.protocol import Ledger
from prorl_gym.testing.rollout.ledger_conformance import CHECKS, Check
from prorl_gym.testing.rollout.memory_ledger import MemoryLedger


@pytest.fixture(params=["sqlite", "memory"])
async def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Ledger]:
    made: Ledger = (
        MemoryLedger() if request.param == "memory" else await SqliteLedger.open(LedgerConfig(path=tmp_path / "l.db"))
    )
    yield made
    await made.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_conformance(ledger: Ledger, check: Check) -> None:
    await check(ledger)


def make(rollout_id: str, **task: object) -> RolloutRequest:
    return RolloutRequest(rollout_id=rollout_id, environment="noop", task=dict(task))


async def test_reopened_file_knows_everything(tmp_path: Path) -> None:
    config = LedgerConfig(path=tmp_path / "l.db")
    first = await SqliteLedger.open(config)
    await first.add_rollouts([make("a", x=1), make("b")])
    await first.begin_attempt("a")
    await first.close()
    second = await SqliteLedger.open(config)
    assert [job.request for job in await second.pending_jobs()] == [make("a", x=1), make("b")]
    assert [pending.restarts for pending in await second.recover()] == [1, 0]
    await second.close()


async def test_concurrent_calls_share_commits_and_refusals_stay_apart(tmp_path: Path) -> None:
    ledger = await SqliteLedger.open(LedgerConfig(path=tmp_path / "l.db"))
    await ledger.add_rollouts([make("taken", x=1)])
    calls = [ledger.add_rollouts([make(f"r{i}")]) for i in range(50)]
    calls.insert(25, ledger.add_rollouts([make("lost"), make("taken", x=2)]))
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(r) for r in results if isinstance(r, Exception)] == [ConflictError]
    assert {job.request.rollout_id for job in await ledger.pending_jobs()} == {"taken", *(f"r{i}" for i in range(50))}
    await ledger.close()


async def test_a_call_that_fails_after_a_write_undoes_its_own_alone(tmp_path: Path) -> None:
    async with ledger_and_writer(LedgerConfig(path=tmp_path / "l.db")) as (ledger, writer):

        def write_and_fail(tables: LedgerTables) -> None:
            tables.retention.set_policy_version("broken", 1)
            raise LookupError("after a write")

        results = await asyncio.gather(
            ledger.add_rollouts([make("before")]),
            writer.run(write_and_fail),
            ledger.set_policy_version("policy", 7),
            ledger.get("unknown"),
            ledger.add_rollouts([make("after")]),
            return_exceptions=True,
        )
        assert [type(one) for one in results if isinstance(one, Exception)] == [LookupError, NotFoundError]
        assert await ledger.policy_versions() == {"policy": 7}
        assert {job.request.rollout_id for job in await ledger.pending_jobs()} == {"before", "after"}
        assert (await ledger.usage()).pending == 2


async def test_no_page_is_copied_for_a_record_that_is_written(tmp_path: Path) -> None:
    """A savepoint copies every page that changes in it; most transactions need none."""
    async with ledger_and_writer(LedgerConfig(path=tmp_path / "l.db")) as (ledger, writer):
        statements: list[str] = []
        trace = writer.open_ledger.connection.set_trace_callback
        await writer.run(lambda _: trace(statements.append))
        await ledger.add_and_begin([make("a")])
        with pytest.raises(NotFoundError):
            await ledger.get("unknown")
        await writer.run(lambda _: trace(None))
        assert any(one.startswith("INSERT INTO rollouts") for one in statements)
        assert not any("SAVEPOINT" in one for one in statements)


async def test_a_caller_that_goes_away_does_not_stop_the_writer(tmp_path: Path) -> None:
    ledger = await SqliteLedger.open(LedgerConfig(path=tmp_path / "l.db"))
    gone = asyncio.create_task(ledger.add_rollouts([make("gone")]))
    stays = asyncio.create_task(ledger.add_rollouts([make("stays")]))
    await asyncio.sleep(0)
    gone.cancel()
    await stays
    assert {job.request.rollout_id for job in await ledger.pending_jobs()} == {"gone", "stays"}
    await ledger.close()


async def test_close_writes_what_waits(tmp_path: Path) -> None:
    config = LedgerConfig(path=tmp_path / "l.db")
    ledger = await SqliteLedger.open(config)
    waiting = [asyncio.create_task(ledger.add_rollouts([make(f"r{i}")])) for i in range(20)]
    await asyncio.sleep(0)
    await ledger.close()
    await asyncio.gather(*waiting)
    again = await SqliteLedger.open(config)
    assert len(await again.pending_jobs()) == 20
    await again.close()


async def test_file_is_private_and_durable(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    ledger, writer = await open_with_writer(LedgerConfig(path=path))
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.with_name("l.db-wal").exists()
    assert await query(writer, "PRAGMA synchronous") == 2
    assert await query(writer, "PRAGMA journal_mode") == "wal"
    await ledger.close()


# --- bad files, and what is said about them -------------------------------------------------------------------------


async def complaint(path: Path) -> str:
    with pytest.raises(LedgerError) as caught:
        await SqliteLedger.open(LedgerConfig(path=path))
    return str(caught.value).replace(str(path.parent), "DIR")


async def test_missing_directory(tmp_path: Path) -> None:
    assert await complaint(tmp_path / "no" / "l.db") == (
        "DIR/l.db: the directory DIR does not exist.\nMake it, or set ledger.path."
    )


async def test_not_a_database(tmp_path: Path) -> None:
    (tmp_path / "l.db").write_bytes(b"hello, this is certainly no database" * 100)
    assert await complaint(tmp_path / "l.db") == (
        "DIR/l.db: not a ledger, or damaged (file is not a database).\nMove it away, or restore it from a backup."
    )


@pytest.mark.parametrize("table", ["notes", "schema_version"])
async def test_another_database(tmp_path: Path, table: str) -> None:
    with sqlite3.connect(tmp_path / "l.db") as other:
        other.execute(f"CREATE TABLE {table} (x)")
    other.close()
    assert await complaint(tmp_path / "l.db") == (
        "DIR/l.db: an SQLite file, but not a ledger.\nSet ledger.path to a file of its own."
    )


def set_schema(path: Path, version: int) -> None:
    with sqlite3.connect(path) as file:
        file.execute("UPDATE schema_version SET version = ?", (version,))
    file.close()


@pytest.mark.parametrize("version", [LEDGER_SCHEMA - 1, LEDGER_SCHEMA + 1], ids=["older", "newer"])
async def test_another_schema_is_refused_and_the_file_keeps_its_rollouts(tmp_path: Path, version: int) -> None:
    path = tmp_path / "l.db"
    ledger = await SqliteLedger.open(LedgerConfig(path=path))
    await ledger.add_rollouts([make("kept")])
    await ledger.close()
    set_schema(path, version)
    assert await complaint(path) == (
        f"DIR/l.db: its ledger schema is {version}; this version of prorl-gym needs {LEDGER_SCHEMA}.\n"
        "Start with another state directory, or use the version of prorl-gym that wrote the file."
    )
    set_schema(path, LEDGER_SCHEMA)
    ledger = await SqliteLedger.open(LedgerConfig(path=path))
    assert [job.request.rollout_id for job in await ledger.pending_jobs()] == ["kept"]
    await ledger.close()


async def test_damaged_file_is_reported_at_the_call(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    ledger = await SqliteLedger.open(LedgerConfig(path=path))
    await ledger.add_rollouts([make(f"r{i}", text="x" * 4000) for i in range(50)])
    await ledger.close()
    pages = bytearray(path.read_bytes())
    pages[4096:] = os.urandom(len(pages) - 4096)
    path.write_bytes(pages)
    with pytest.raises(LedgerError, match="not a ledger, or damaged"):
        ledger = await SqliteLedger.open(LedgerConfig(path=path))
        try:
            await ledger.pending_jobs()
        finally:
            await ledger.close()


async def test_a_broken_schema_whose_names_are_no_text_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    await (await SqliteLedger.open(LedgerConfig(path=path))).close()
    named = path.read_bytes().replace(b"schema_version", b"\xffchema_version")
    path.write_bytes(named.replace(b"CREATE TABLE", b"CREATE TABEL"))
    assert "not a ledger, or damaged" in await complaint(path)


async def test_full_disk_refuses_and_keeps_what_was_accepted(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    ledger, writer = await open_with_writer(LedgerConfig(path=path))
    await ledger.add_rollouts([make("kept")])
    await limit_pages(writer, 2)
    with pytest.raises(LedgerError) as caught:
        await ledger.add_rollouts([make("too-big", text="x" * 100_000)])
    assert str(caught.value) == f"{path}: the disk is full.\nFree space there; what was accepted is safe."
    await lift_page_limit(writer)
    await ledger.add_rollouts([make("after")])
    assert [job.request.rollout_id for job in await ledger.pending_jobs()] == ["kept", "after"]
    await ledger.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_unwritable_directory(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "cannot be made (Permission denied)" in asyncio.run(complaint(tmp_path / "l.db"))


async def test_directory_without_files(tmp_path: Path) -> None:
    """``/proc`` refuses new files, even for root."""
    with pytest.raises(LedgerError, match=r"/proc/l\.db\.lock: cannot be made"):
        await SqliteLedger.open(LedgerConfig(path=Path("/proc/l.db")))


async def test_second_process_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    ledger = await SqliteLedger.open(LedgerConfig(path=path))
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _OPEN_ONCE, str(path), stdout=asyncio.subprocess.PIPE
    )
    said, _ = await child.communicate()
    assert said.decode().strip() == (
        f"{path}: another service uses it (process {os.getpid()}). | Stop that one, or set another ledger.path."
    )
    await ledger.close()
    await (await SqliteLedger.open(LedgerConfig(path=path))).close()


async def test_a_closed_ledger_is_shut(tmp_path: Path) -> None:
    ledger = await SqliteLedger.open(LedgerConfig(path=tmp_path / "l.db"))
    await ledger.close()
    with pytest.raises(ShuttingDownError):
        await ledger.add_rollouts([make("r0")])


async def pending_ids(path: Path) -> set[str]:
    ledger = await SqliteLedger.open(LedgerConfig(path=path))
    ids = {job.request.rollout_id for job in await ledger.pending_jobs()}
    await ledger.close()
    return ids


_OPEN_ONCE = """
import asyncio, sys
from pathlib import Path
from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger
from prorl_gym.rollout.ledger.writer_thread import LedgerTables
from prorl_gym.rollout.ledger.ledger_config import LedgerConfig
try:
    asyncio.run(SqliteLedger.open(LedgerConfig(path=Path(sys.argv[1]))))
except Exception as error:
    print(str(error).replace(chr(10), " | "))
"""

_ACCEPT_FOREVER = """
import asyncio, sys
from pathlib import Path
from prorl_gym.records import RolloutRequest
from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger
from prorl_gym.rollout.ledger.writer_thread import LedgerTables
from prorl_gym.rollout.ledger.ledger_config import LedgerConfig

async def client(ledger, name):
    for i in range(100_000):
        request = RolloutRequest(rollout_id=f"{name}-{i}", environment="noop", task={"i": i})
        await ledger.add_rollouts([request])
        print(request.rollout_id, flush=True)

async def main():
    ledger = await SqliteLedger.open(LedgerConfig(path=Path(sys.argv[1])))
    await asyncio.gather(*(client(ledger, f"c{n}") for n in range(8)))

asyncio.run(main())
"""


@pytest.mark.parametrize("seed", range(3))
def test_sigkill_loses_nothing_that_was_acknowledged(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "l.db"
    child = subprocess.Popen([sys.executable, "-c", _ACCEPT_FOREVER, str(path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    heard = [child.stdout.readline() for _ in range(random.Random(seed).randrange(1, 400))]
    child.send_signal(signal.SIGKILL)
    heard += child.stdout.readlines()
    child.wait()
    acknowledged = {line.decode().strip() for line in heard if line.endswith(b"\n")}
    kept = asyncio.run(pending_ids(path))
    assert len(acknowledged) > 0
    assert acknowledged <= kept


@pytest.mark.parametrize(
    ("place", "kind"),
    [("/data/ledger", "nfs4"), ("/data", "nfs4"), ("/", None), ("/database", None), ("/data/local disk", None)],
)
def test_network_file_systems_are_recognised(place: str, kind: str | None) -> None:
    mounts = (
        "22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n"
        "40 22 0:50 / /data rw - nfs4 server:/export rw\n"
        "41 40 0:51 / /data/local\\040disk rw - xfs /dev/vdb rw\n"
        "garbage\n"
    )
    assert network_filesystem(Path(place), mounts) == kind


def on_nfs(path: Path) -> str:
    return "nfs4"


async def test_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl_gym.rollout.ledger.open_ledger.network_filesystem", on_nfs)
    assert await complaint(tmp_path / "l.db") == (
        "DIR/l.db: lies on a network file system (nfs4), where SQLite's log is not safe.\n"
        "Set ledger.path to a local disk, or ledger.allow_network_filesystem: true (slower, safe by a lease)."
    )
    await (await SqliteLedger.open(LedgerConfig(path=tmp_path / "l.db", allow_network_filesystem=True))).close()
