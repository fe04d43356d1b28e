"""A blob on its way to the disk: continued where an earlier attempt stopped, never longer than promised, verified."""

import hashlib
import os
from pathlib import Path

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox.images.manifests import Descriptor

_CHUNK = 1 << 20


class PartialBlob:
    """The file of a blob that may be incomplete. The caller holds the lock of its digest.

    Args:
        directory: of all blobs.
        blob: what the manifest promises.
    """

    def __init__(self, directory: Path, blob: Descriptor) -> None:
        self.path = directory / f"{blob.digest.replace(':', '-')}.part"
        self._blob = blob
        self._file = open(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "r+b")
        self._digest = hashlib.sha256()
        self.size = 0
        """Bytes that are here."""

    def load(self) -> None:
        """Take over what an earlier attempt left. Blocks: run it in a thread."""
        while data := self._file.read(_CHUNK):
            self._digest.update(data)
            self.size += len(data)
        if self.size > self._blob.size:
            self.restart()

    def restart(self) -> None:
        """Forget everything: the registry does not continue, or what is here is wrong."""
        self._file.seek(0)
        self._file.truncate()
        self._digest = hashlib.sha256()
        self.size = 0

    def add(self, data: bytes) -> None:
        """Append what came. Blocks: run it in a thread.

        Raises:
            SandboxError: ``IMAGE_BROKEN``, it is more than was promised.
            OSError: the disk is full.
        """
        if self.size + len(data) > self._blob.size:
            self.restart()
            raise _wrong(f"blob {self._blob.digest} is longer than the {self._blob.size} bytes its manifest promises.")
        self._file.write(data)
        self._digest.update(data)
        self.size += len(data)

    @property
    def complete(self) -> bool:
        """Whether all of it is here; ``verify`` says whether it is right."""
        return self.size == self._blob.size

    def verify(self) -> None:
        """Compare with the digest.

        Raises:
            SandboxError: ``IMAGE_BROKEN``, the contents are others; they are forgotten.
        """
        self._file.flush()
        found = f"sha256:{self._digest.hexdigest()}"
        if found != self._blob.digest:
            self.restart()
            raise _wrong(f"blob {self._blob.digest} has other contents ({found}).")

    def close(self) -> None:
        """Close the file; what is in it stays for the next attempt."""
        self._file.close()


def _wrong(what: str) -> SandboxError:
    return SandboxError(
        FailureKind.IMAGE_BROKEN, what, "The registry or a proxy on the way is damaged: ask another one (--mirror)."
    )
