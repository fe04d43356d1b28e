"""Collecting in the ledger of a service that is stopped: what the service does by itself, and all room given back."""

from dataclasses import dataclass

from prorl_gym.rollout.ledger_file import LedgerConfig, LedgerError, LedgerInUseError, translated
from prorl_gym.rollout.ledger_open import OpenLedger, open_ledger_file
from prorl_gym.rollout.ledger_retention import Collected, Retention
from prorl_gym.rollout.ledger_store import LedgerStore
from prorl_gym.rollout.protocol import LedgerUsage


@dataclass(frozen=True, slots=True)
class Swept:
    """What was done, or would be."""

    records: int
    """Expired and released."""
    traces: int
    """Forgotten."""
    bytes_before: int
    """Of the file."""
    bytes_after: int
    left: LedgerUsage


def sweep(config: LedgerConfig, *, dry_run: bool) -> Swept:
    """Release what has expired, forget old traces, and give back what is free.

    Args:
        config: the ledger, and how long it keeps what.
        dry_run: only count.

    Raises:
        LedgerError: there is no such file, or a service uses it.
    """
    if not config.path.exists():
        raise LedgerError(f"{config.path}: there is no such ledger.", "Name the file, or the service's --config.")
    before = config.path.stat().st_size
    try:
        opened = open_ledger_file(config, upgrade=not dry_run)
    except LedgerInUseError as error:
        raise LedgerInUseError(error.what, "That service collects by itself, at its start and every hour.") from None
    try:
        with translated(config.path):
            store = LedgerStore(opened.connection, opened.clock, lambda: 0)
            retention = Retention(opened.connection, store, config)
            done = retention.collectable(opened.clock()) if dry_run else _collect(opened, retention)
            left = retention.usage()
            if not dry_run:
                _give_back(opened, left.bytes)
    finally:
        opened.close()
    return Swept(done.records, done.traces, before, config.path.stat().st_size, left)


def _collect(opened: OpenLedger, retention: Retention) -> Collected:
    records = traces = 0
    more = True
    while more:
        if opened.lease is not None:
            opened.lease.renew()
        opened.begin()
        part = retention.collect(opened.clock(), spare_bytes=0)
        opened.commit()
        records, traces, more = records + part.records, traces + part.traces, part.more
    return Collected(records, traces, more=False)


def _give_back(opened: OpenLedger, used: int) -> None:
    """Write a file anew that cannot give pages back one by one: one of release 1."""
    (pages,) = opened.connection.execute("PRAGMA page_count").fetchone()
    (size,) = opened.connection.execute("PRAGMA page_size").fetchone()
    if pages * size > used:
        opened.connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        opened.connection.execute("VACUUM")
