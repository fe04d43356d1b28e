"""One backend for all providers of an event loop with the same configuration.

Gym's agents make a provider per rollout. A backend per provider would mean a spawner process, a probe and a reaping of
the scratch directory per rollout.
"""

import asyncio
from collections.abc import Awaitable, Callable
from weakref import WeakKeyDictionary

from prorl_gym.sandbox.choose import open_backend
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.protocol import SandboxBackend
from prorl_gym.sandbox.shielding import finish

Opener = Callable[[SandboxConfig], Awaitable[SandboxBackend]]


class SharedBackend:
    """A backend that is opened by its first user and closed by its last."""

    def __init__(self) -> None:
        self._users = 0
        self._opening: asyncio.Task[SandboxBackend] | None = None

    async def take(self, config: SandboxConfig) -> SandboxBackend:
        """Return the backend; every ``take`` that returned needs one ``give_back``.

        Raises:
            SandboxError: no backend works here.
        """
        self._users += 1
        if self._opening is None:
            self._opening = asyncio.ensure_future(open_backend(config))
        opening = self._opening
        try:
            return await asyncio.shield(opening)
        except BaseException:
            if opening.done() and self._opening is opening and (opening.cancelled() or opening.exception()):
                self._opening = None  # the next one tries again
            await self.give_back()
            raise

    async def give_back(self) -> None:
        """Close the backend when this was the last user."""
        self._users -= 1
        opening = self._opening
        if self._users == 0 and opening is not None:
            self._opening = None
            await finish(_close(opening))


async def _close(opening: "asyncio.Task[SandboxBackend]") -> None:
    (outcome,) = await asyncio.gather(opening, return_exceptions=True)
    if not isinstance(outcome, BaseException):
        await outcome.close()


_shared: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, SharedBackend]] = WeakKeyDictionary()


def shared_backend(config: SandboxConfig) -> SharedBackend:
    """Return the running loop's backend for this configuration, open or not."""
    backends = _shared.setdefault(asyncio.get_running_loop(), {})
    return backends.setdefault(config.model_dump_json(), SharedBackend())
