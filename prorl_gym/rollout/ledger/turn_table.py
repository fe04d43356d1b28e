"""The table of logged turns, from which a later attempt resumes. In the writer thread, inside a transaction.

Where no rollout is to be resumed nothing is ever written here, and then nothing is looked up either.
"""

import json
import sqlite3
import zlib
from collections.abc import Sequence
from contextlib import suppress

from prorl_gym.inference.tokens.turn_log import LoggedTurn
from prorl_gym.rollout.ledger.queries import IN_JSON_LIST
from prorl_gym.rollout.protocol import TurnEnded

MAX_TURN_BYTES = 8 << 20
"""Most bytes of one rollout's turns, compressed; later ones are not kept. About a million sampled tokens."""


class TurnTable:
    """Turns of pending rollouts, by rollout and number.

    Args:
        connection: to the open file.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection
        (self._is_used,) = connection.execute("SELECT EXISTS (SELECT 1 FROM turns)").fetchone()

    def add(self, ended: TurnEnded) -> None:
        """Write a turn in place of this and all later ones. See ``Ledger.log_turn`` for what is left out.

        Raises:
            ValueError: it holds half a surrogate pair.
        """
        body = zlib.compress(ended.turn.model_dump_json().encode(), 1)
        self._is_used = True
        query = "SELECT seq FROM rollouts WHERE rollout_id = ? AND begun = ? AND cursor IS NULL"
        for (seq,) in self._db.execute(query, (ended.rollout_id, ended.attempt)).fetchall():
            self._db.execute("DELETE FROM turns WHERE seq = ? AND number >= ?", (seq, ended.number))
            self._db.execute(
                "INSERT INTO turns SELECT ?1, ?2, ?3, ?4 FROM (SELECT count(*) AS n, total(length(body)) AS bytes"
                " FROM turns WHERE seq = ?1) WHERE n = ?2 AND bytes + length(?4) <= ?5",
                (seq, ended.number, ended.attempt, body, MAX_TURN_BYTES),
            )

    def read(self, rollout_ids: Sequence[str]) -> dict[str, tuple[LoggedTurn, ...]]:
        """Return the turns of these, from the first; what follows a damaged one is left out."""
        if not self._is_used:
            return {}
        found: dict[str, list[LoggedTurn]] = {}
        query = f"SELECT rollout_id, number, body FROM turns JOIN rollouts USING (seq) WHERE rollout_id {IN_JSON_LIST}"
        for rollout_id, number, body in self._db.execute(f"{query} ORDER BY seq, number", [json.dumps(rollout_ids)]):
            turns = found.setdefault(rollout_id, [])
            if len(turns) == number:
                with suppress(ValueError, zlib.error):
                    turns.append(LoggedTurn.model_validate_json(zlib.decompress(body)))
        return {rollout_id: tuple(turns) for rollout_id, turns in found.items()}

    def delete(self, seqs: Sequence[int]) -> None:
        """Delete the turns of these."""
        if self._is_used:
            self._db.execute(f"DELETE FROM turns WHERE seq {IN_JSON_LIST}", [json.dumps(seqs)])

    def delete_unless_added(self, seq: int, attempt: int) -> None:
        """Delete the turns of a rollout whose attempt failed and added none: what it resumed may be why it failed."""
        if self._is_used:
            added = "SELECT 1 FROM turns WHERE seq = ?1 AND attempt = ?2"
            self._db.execute(f"DELETE FROM turns WHERE seq = ?1 AND NOT EXISTS ({added})", (seq, attempt))
