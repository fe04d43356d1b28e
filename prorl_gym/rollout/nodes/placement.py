"""Which node takes an attempt. Pure: no clock, no I/O.

A group stays on one node while that node has a job slot, since its members start the same sandbox. Otherwise nodes that
can begin INIT at once go before those with a queue, nodes that hold the task's image before those that would fetch it,
and the node with the most free job slots wins.
"""

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from prorl_gym.records import RolloutRequest

_IMAGE_KEYS = ("image", "docker_image", "image_name")
"""Where rows name their image."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node as placement sees it."""

    name: str
    free: int
    """Free job slots."""
    queued: int = 0
    """Attempts there that cannot begin INIT yet."""
    images: AbstractSet[str] = frozenset()
    """References of the images it holds."""
    groups: AbstractSet[str] = frozenset()
    """Groups (``group_key``) of the attempts that it has in hand."""


def choose_node(nodes: Iterable[NodeView], request: RolloutRequest) -> str | None:
    """Return the name of the node for an attempt; ``None``: none has a job slot."""
    group, image = group_key(request), image_of(request)

    def rank(node: NodeView) -> tuple[bool, bool, bool, int, str]:
        return (
            group is None or group not in node.groups,
            node.queued > 0,
            image is not None and image not in node.images,
            -node.free,
            node.name,
        )

    chosen = min((node for node in nodes if node.free), key=rank, default=None)
    return None if chosen is None else chosen.name


def group_key(request: RolloutRequest) -> str | None:
    """Return a name of the request's group that is unique over all runs; ``None``: it has no group."""
    return None if request.group_id is None else f"{request.run_id}/{request.group_id}"


def image_of(request: RolloutRequest) -> str | None:
    """Return the image that the task's row names, if it does."""
    return next((str(request.task[key]) for key in _IMAGE_KEYS if request.task.get(key)), None)
