"""Images without a store: ``host``, and paths of unpacked directories, which stay where they are."""

from prorl_gym.sandbox.images.protocol import ResolvedImage
from prorl_gym.sandbox.protocol import HOST_USR


class PlainPaths:
    """An ``ImageResolver`` that takes every name for a path. The spawner checks it, as the uid that will use it."""

    async def resolve(self, image: str) -> ResolvedImage:
        """Return the path as the only directory."""
        return ResolvedImage(image, () if image == HOST_USR else (image,))

    def release(self, image: ResolvedImage) -> None:
        """Nothing is pinned."""
