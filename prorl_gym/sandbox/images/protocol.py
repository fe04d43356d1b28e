"""What backends ask of images: a name in, read-only directories out.

A backend resolves before it starts a sandbox and releases after the sandbox is gone. Between the two the directories
stay where they are: nothing prunes them. A process that dies without releasing has released: the pins are file locks.
"""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ResolvedImage:
    """An image that is ready on this node."""

    reference: str
    """What was asked for."""
    lower: tuple[str, ...]
    """Absolute paths of unpacked directories, topmost first, as overlayfs takes them. Deletions of one layer from
    those below it are marked as a ``userxattr`` overlay expects: mount them with that option. Empty for ``host``."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables that the image's author set (its PATH, above all); a spec's own win over them."""


class ImageResolver(Protocol):
    """Knows where images are, and brings them here."""

    async def resolve(self, image: str) -> ResolvedImage:
        """Make an image ready and pin it. However many ask, it is fetched and unpacked once.

        Args:
            image: ``host``; the absolute path of an image directory or of a SIF file; ``docker://...``; or a name that
                ``prorl-gym images`` built or imported.

        Raises:
            SandboxError: ``IMAGE_MISSING`` when there is no such image, ``IMAGE_BROKEN`` when it cannot be used,
                ``SANDBOX_UNAVAILABLE`` when it is not the image's fault (no room, registry unreachable).
        """
        ...

    def release(self, image: ResolvedImage) -> None:
        """Take back one ``resolve``. Never blocks and never fails; without it the image is kept until we end."""
        ...
