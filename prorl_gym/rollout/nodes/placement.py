"""Which node takes an attempt. Pure: no clock, no I/O.

A group stays on one node while that node has a job slot, since its members start the same sandbox. Otherwise nodes that
can begin INIT at once go before those with a queue, nodes that hold the task's image before those that would fetch it,
and the node with the most free job slots wins.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from prorl_gym.client.wire_models import Capacity
from prorl_gym.records import RolloutRequest

_IMAGE_KEYS = ("image", "docker_image", "image_name")
"""Where rows name their image."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node as placement sees it."""

    name: str
    capacity: Capacity
    """What it reported last, jobs sent since then counted."""
    images: AbstractSet[str] = frozenset()
    """References of the images it holds."""
    groups: AbstractSet[str] = frozenset()
    """Groups (``group_key``) of the attempts that it has in hand."""
    is_draining: bool = False
    """It takes no more attempts."""


def choose_node(nodes: Sequence[NodeView], request: RolloutRequest) -> str | None:
    """Return the name of the node for an attempt; ``None``: none has a job slot."""
    group, image = group_key(request), image_of(request)

    def rank(node: NodeView) -> tuple[bool, bool, bool, int, str]:
        return (
            group is None or group not in node.groups,
            node.capacity.queued > 0,
            image is not None and image not in node.images,
            -node.capacity.free,
            node.name,
        )

    open_nodes = [node for node in nodes if node.capacity.free > 0 and not node.is_draining]
    return min(open_nodes, key=rank).name if open_nodes else None


def group_key(request: RolloutRequest) -> str | None:
    """Return a name of the request's group that is unique over all runs; ``None``: it has no group."""
    return None if request.group_id is None else f"{request.run_id}/{request.group_id}"


def image_of(request: RolloutRequest) -> str | None:
    """Return the image that the task's row names, if it does."""
    return next((str(request.task[key]) for key in _IMAGE_KEYS if request.task.get(key)), None)
