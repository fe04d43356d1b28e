"""Reading the shell's reports: ``nonce, exit code, directory, exported environment``, each ended by NUL.

Lines of code that set the user's traps may precede the nonce. A bash that is about to end reports ``end`` for the exit
code: that it did end, and how, only its process tells. The pipe can be reached by a hostile command, so whatever does
not fit is taken as tampering and never as a result.
"""

import os
from dataclasses import dataclass

_MAX_FIELD = 16 << 10
_MAX_ENVIRONMENT = 256 << 10
_END = b"end"


class TamperedError(Exception):
    """Bytes on the report pipe that the driver did not write."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of one command."""

    exit_code: int
    cwd: str
    state_kept: bool = True
    """Directory and exported variables are known as they were at its end."""


class Reports:
    """Incremental parser. ``expect`` a nonce, ``feed`` bytes, get the completion."""

    def __init__(self) -> None:
        self._nonce: bytes | None = None
        self._fields: list[bytes] = []
        self._partial = bytearray()
        self._too_long = False
        self.environment = b""
        """Bash code that sets the exported variables as they were after the last command that reported them."""
        self.traps = b""
        """Bash code that sets the user's ERR and DEBUG traps."""
        self.end_cwd: str | None = None
        """Directory in which bash said, during the command that runs now, that it ends; ``None``: it did not."""

    def expect(self, nonce: str) -> None:
        """Name the nonce of the command that runs now."""
        self._nonce = nonce.encode()
        self.end_cwd = None

    def feed(self, data: bytes) -> Completion | None:
        """Take bytes; return the completion when they hold it.

        Raises:
            TamperedError: wrong nonce, no command running, malformed or endless fields.
        """
        completion = None
        pieces = data.split(b"\0")
        for index, piece in enumerate(pieces):
            self._append(piece)
            if index < len(pieces) - 1:
                completion = self._end_field() or completion
        if len(self._fields) < 3 and self._partial and self._nonce is None:
            raise TamperedError("bytes while no command runs")
        return completion

    def _append(self, piece: bytes) -> None:
        in_environment = len(self._fields) == 3
        if len(self._partial) + len(piece) <= (_MAX_ENVIRONMENT if in_environment else _MAX_FIELD):
            self._partial += piece
        elif in_environment:
            self._too_long = True  # a giant environment is merely not restored
        else:
            raise TamperedError("endless field")

    def _end_field(self) -> Completion | None:
        field = bytes(self._partial)
        self._partial.clear()
        if len(self._fields) == 3:
            if not self._too_long:
                self.environment = field
                if self._fields[1] == _END:
                    self.end_cwd = os.fsdecode(self._fields[2])
            self._too_long = False
            self._fields.clear()
            return None
        self._fields.append(field)
        return self._completion() if len(self._fields) == 3 else None

    def _completion(self) -> Completion | None:
        traps_and_nonce, code, cwd = self._fields
        traps, newline, nonce = traps_and_nonce.rpartition(b"\n")
        if self._nonce is None or nonce != self._nonce:
            raise TamperedError("wrong nonce")
        if code == _END:
            return None
        if not (code.isdigit() and len(code) <= 3 and int(code) <= 255):
            raise TamperedError("not an exit code")
        self._nonce = None
        self.traps = traps + newline
        return Completion(int(code), os.fsdecode(cwd))
