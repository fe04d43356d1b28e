"""What backends need of images: a name is resolved to read-only directories.

A backend resolves before it starts a sandbox and releases after the sandbox is gone. In between the directories are
pinned: they are not evicted. The pins are file locks, which the death of the process releases.
"""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ResolvedImage:
    """An image that is ready on this node."""

    reference: str
    """As given to ``resolve``."""
    lower_dirs: tuple[str, ...]
    """Absolute paths of unpacked directories, topmost first, as overlayfs takes them. Deletions of one layer from
    those below it are marked as a ``userxattr`` overlay expects: mount them with that option. Empty for ``host``."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables that the image's author set (its PATH, above all); a spec's own win over them."""


class ImageResolver(Protocol):
    """Finds images and fetches them to this node."""

    async def resolve(self, image: str) -> ResolvedImage:
        """Make an image ready and pin it. Concurrent calls fetch and unpack it once.

        Args:
            image: ``host``; the absolute path of an image directory or of a SIF file; ``docker://...``; or a name that
                ``prorl-gym images`` built or imported.

        Raises:
            SandboxError: ``IMAGE_MISSING`` when there is no such image, ``IMAGE_BROKEN`` when it cannot be used,
                ``SANDBOX_UNAVAILABLE`` when the image is not the cause (no room, registry unreachable).
        """
        ...

    def release(self, image: ResolvedImage) -> None:
        """Undo one ``resolve``. Never blocks or fails; without it the image stays pinned until the process ends."""
        ...
