"""The durable ledger: conformance, durability, and what it says about a bad file."""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from ledger_conformance import CHECKS, Check
from ledger_writer import change, child, opened, query, traced

from prorl_gym.errors import ConflictError, NotFoundError
from prorl_gym.records import RolloutRequest
from prorl_gym.rollout.ledger.ledger_config import LedgerConfig, LedgerError
from prorl_gym.rollout.ledger.open_ledger import network_filesystem
from prorl_gym.rollout.ledger.sql_schema import LEDGER_SCHEMA
from prorl_gym.rollout.ledger.sqlite_ledger import SqliteLedger
from prorl_gym.rollout.ledger.writer_thread import LedgerTables, LedgerWriter
from prorl_gym.testing.rollout.memory_ledger import MemoryLedger


@pytest.fixture(params=["sqlite", "memory"])
async def any_ledger(request: pytest.FixtureRequest, path: Path) -> AsyncIterator[SqliteLedger]:
    made = MemoryLedger() if request.param == "memory" else await SqliteLedger.open(LedgerConfig(path=path))
    yield made
    await made.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_conformance(any_ledger: SqliteLedger, check: Check) -> None:
    await check(any_ledger)


def make(rollout_id: str, **task: object) -> RolloutRequest:
    return RolloutRequest(rollout_id=rollout_id, environment="noop", task=dict(task))


async def test_concurrent_calls_share_commits_and_refusals_stay_apart(ledger: SqliteLedger) -> None:
    await ledger.add_rollouts([make("taken", x=1)])
    calls = [ledger.add_rollouts([make(f"r{i}")]) for i in range(50)]
    calls.insert(25, ledger.add_rollouts([make("lost"), make("taken", x=2)]))
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(r) for r in results if isinstance(r, Exception)] == [ConflictError]
    assert {job.request.rollout_id for job in await ledger.pending_jobs()} == {"taken", *(f"r{i}" for i in range(50))}


async def test_a_call_that_fails_after_a_write_undoes_its_own_alone(ledger: SqliteLedger, writer: LedgerWriter) -> None:
    def write_and_fail(tables: LedgerTables) -> None:
        tables.set_policy_version("broken", 1)
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


async def test_no_page_is_copied_for_a_record_that_is_written(ledger: SqliteLedger, writer: LedgerWriter) -> None:
    """A savepoint copies every page that changes in it; most transactions need none."""
    statements = await traced(writer)
    await ledger.add_and_begin([make("a")])
    with pytest.raises(NotFoundError):
        await ledger.get("unknown")
    assert any(one.startswith("INSERT INTO rollouts") for one in statements)
    assert not any("SAVEPOINT" in one for one in statements)


async def test_close_writes_what_waits(path: Path, ledger: SqliteLedger) -> None:
    waiting = [asyncio.create_task(ledger.add_rollouts([make(f"r{i}")])) for i in range(20)]
    await asyncio.sleep(0)
    await ledger.close()
    await asyncio.gather(*waiting)
    async with opened(path) as again:
        assert len(await again.pending_jobs()) == 20


async def test_file_is_private_and_durable(tmp_path: Path, ledger: SqliteLedger, writer: LedgerWriter) -> None:
    path = tmp_path / "l.db"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.with_name("l.db-wal").exists()
    assert await query(writer, "PRAGMA synchronous") == 2
    assert await query(writer, "PRAGMA journal_mode") == "wal"


# --- bad files, and what is said about them -------------------------------------------------------------------------


async def complaint(path: Path) -> str:
    with pytest.raises(LedgerError) as caught:
        await SqliteLedger.open(LedgerConfig(path=path))
    return str(caught.value).replace(str(path.parent), "DIR")


def write_text(path: Path) -> None:
    path.write_bytes(b"hello, this is certainly no database" * 100)


DAMAGED = "Move it away, or restore it from a backup."
FOREIGN = "DIR/l.db: an SQLite file, but not a ledger.\nSet ledger.path to a file of its own."


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (write_text, f"DIR/l.db: not a ledger, or damaged (file is not a database).\n{DAMAGED}"),
        (lambda path: change(path, "CREATE TABLE notes (x)"), FOREIGN),
        (lambda path: change(path, "CREATE TABLE schema_version (x)"), FOREIGN),
        (lambda path: path.parent.rmdir(), "DIR/l.db: the directory DIR does not exist.\nMake it, or set ledger.path."),
    ],
    ids=["text", "another database", "another schema_version", "no directory"],
)
async def test_what_is_no_ledger_is_refused(path: Path, write: Callable[[Path], None], said: str) -> None:
    write(path)
    assert await complaint(path) == said


async def test_a_broken_schema_whose_names_are_no_text_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    async with opened(path):
        pass
    named = path.read_bytes().replace(b"schema_version", b"\xffchema_version")
    path.write_bytes(named.replace(b"CREATE TABLE", b"CREATE TABEL"))
    assert "not a ledger, or damaged" in await complaint(path)


async def test_a_second_service_is_refused(path: Path) -> None:
    async with opened(path):
        assert await complaint(path) == (
            f"DIR/l.db: another service uses it (process {os.getpid()}).\nStop that one, or set another ledger.path."
        )


@pytest.mark.parametrize("version", [LEDGER_SCHEMA - 1, LEDGER_SCHEMA + 1], ids=["older", "newer"])
async def test_another_schema_is_refused_and_the_file_keeps_its_rollouts(path: Path, version: int) -> None:
    async with opened(path) as ledger:
        await ledger.add_rollouts([make("kept")])
    change(path, f"UPDATE schema_version SET version = {version}")
    assert await complaint(path) == (
        f"DIR/l.db: its ledger schema is {version}; this version of prorl-gym needs {LEDGER_SCHEMA}.\n"
        "Start with another state directory, or use the version of prorl-gym that wrote the file."
    )
    change(path, f"UPDATE schema_version SET version = {LEDGER_SCHEMA}")
    async with opened(path) as ledger:
        assert [job.request.rollout_id for job in await ledger.pending_jobs()] == ["kept"]


async def test_damaged_file_is_reported_at_the_call(tmp_path: Path) -> None:
    path = tmp_path / "l.db"
    async with opened(path) as ledger:
        await ledger.add_rollouts([make(f"r{i}", text="x" * 4000) for i in range(50)])
    pages = bytearray(path.read_bytes())
    pages[4096:] = os.urandom(len(pages) - 4096)
    path.write_bytes(pages)
    with pytest.raises(LedgerError, match="not a ledger, or damaged"):
        async with opened(path) as ledger:
            await ledger.pending_jobs()


async def test_directory_without_files() -> None:
    """``/proc`` refuses new files, even for root."""
    with pytest.raises(LedgerError, match=r"/proc/l\.db\.lock: cannot be made"):
        await SqliteLedger.open(LedgerConfig(path=Path("/proc/l.db")))


_ACCEPT_FOREVER = """
async def client(ledger, name):
    for i in range(100_000):
        await ledger.add_rollouts([ask(f"{name}-{i}")])
        print(f"{name}-{i}", flush=True)

async def main():
    ledger = await SqliteLedger.open(LedgerConfig(path=Path(sys.argv[1])))
    await asyncio.gather(*(client(ledger, f"c{n}") for n in range(8)))
"""


@pytest.mark.parametrize("seed", range(3))
async def test_sigkill_loses_nothing_that_was_acknowledged(path: Path, seed: int) -> None:
    pipe = asyncio.subprocess.PIPE
    service = await asyncio.create_subprocess_exec(*child(_ACCEPT_FOREVER, path), stdout=pipe)
    assert service.stdout is not None
    heard = [await service.stdout.readline() for _ in range(random.Random(seed).randrange(1, 400))]
    service.kill()
    heard += (await service.stdout.read()).splitlines(keepends=True)
    await service.wait()
    acknowledged = {line.decode().strip() for line in heard if line.endswith(b"\n")}
    async with opened(path) as ledger:
        kept = {job.request.rollout_id for job in await ledger.pending_jobs()}
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


async def test_network_file_system_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl_gym.rollout.ledger.open_ledger.network_filesystem", lambda path: "nfs4")
    assert await complaint(path) == (
        "DIR/l.db: lies on a network file system (nfs4), where SQLite's log is not safe.\n"
        "Set ledger.path to a local disk, or ledger.allow_network_filesystem: true (slower, safe by a lease)."
    )
    async with opened(LedgerConfig(path=path, allow_network_filesystem=True)):
        pass
