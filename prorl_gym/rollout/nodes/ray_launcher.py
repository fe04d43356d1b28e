"""The process of the head that holds the Ray driver: keeps one node on each Ray node with the resource ``prorl_node``.

It is a process of its own because Ray ends a driver's process, without an exception, when its control store is lost.
Its actors are detached and named, so that the next launcher finds them. Ray places and restarts nodes; that a node is
lost is decided by its lease over HTTP.
"""

import hashlib
import logging
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any, cast

import ray as untyped_ray

from prorl_gym.logs import configure_logging, register_secret
from prorl_gym.rollout.nodes.ray_nodes import NodeSupervisor, RayLaunch
from prorl_gym.sandbox.syscalls import set_parent_death_signal

_LOG = logging.getLogger("prorl_gym.rollout.nodes.ray_launcher")  # run by -m

ray = cast(Any, untyped_ray)  # most of its types are unknown

_RESOURCE = "prorl_node"
_WILDCARDS = ("0.0.0.0", "::")
_POLL_SECONDS = 1.0
"""Pause between two looks at Ray's nodes, whose changes Ray does not announce."""
_CALL_SECONDS = 10.0
"""Time for Ray's control store to answer."""
_SLOW_SECONDS = 30.0
"""Time after which an actor that does not start is logged, and one that failed is retried."""


class _Placements:
    """The actors of one head, which nodes reach at ``url``, on the nodes of one Ray cluster."""

    def __init__(self, launch: RayLaunch, url: str) -> None:
        self._launch = launch
        self._url = url
        # Actors that another head address or token was given are not this launcher's: their names differ.
        self._prefix = hashlib.sha256(f"{url} {launch.memory} {launch.token}".encode()).hexdigest()[:8]
        self._starting: dict[str, tuple[Any, float]] = {}
        """Reference that is ready when an actor has started, and when it was made; by name."""
        self._draining: dict[str, Any] = {}
        """Reference that is ready when an actor's node has ended; by name."""
        self._retry_at: dict[str, float] = {}
        """When to make an actor again that failed to start, by name."""
        # What Ray Serve uses, too: nothing public reports which nodes drain.
        self._control_store = ray._raylet.GcsClient(address=ray.get_runtime_context().gcs_address)  # noqa: SLF001

    def reconcile(self) -> None:
        """Make an actor on each node that has none, drain those on draining nodes, remove those without a node."""
        draining: set[str] = set(self._control_store.get_draining_nodes(timeout=_CALL_SECONDS))
        nodes: dict[str, dict[str, Any]] = {
            f"{self._prefix}-{node['NodeID']}": node
            for node in ray.nodes()
            if node["Alive"] and node["Resources"].get(_RESOURCE, 0) >= 1
        }
        present: set[str] = set(ray.util.list_named_actors())
        for name in present - nodes.keys():
            _LOG.info("Ray node of actor %s is gone, or the head has moved: the actor is removed", name)
            self.remove(name)
        self._check_started()
        for name, node in nodes.items():
            is_draining = node["NodeID"] in draining
            if name in present and is_draining:
                self._drain(name, node)
            elif name not in present and not is_draining and time.monotonic() >= self._retry_at.get(name, 0.0):
                self._place(name, node)

    def _place(self, name: str, node: dict[str, Any]) -> None:
        address = node["NodeManagerHostname"] or node["NodeManagerAddress"]
        arguments = ["node", "--head", self._url, "--name", f"{address}-{node['NodeID'][:8]}"]
        actor = (
            ray.remote(NodeSupervisor)
            .options(
                name=name,
                lifetime="detached",
                num_cpus=0,
                resources={_RESOURCE: 1},
                memory=self._launch.memory or int(node["Resources"].get("memory", 0)),
                scheduling_strategy=ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
                    node["NodeID"], soft=False
                ),
                max_restarts=-1,
                max_task_retries=0,
            )
            .remote(arguments, {"PRORL_GYM_TOKEN": self._launch.token})
        )
        self._starting[name] = (actor.ping.remote(), time.monotonic())
        _LOG.info("placing a node on Ray node %s (%s)", node["NodeID"][:8], address)

    def _check_started(self) -> None:
        now = time.monotonic()
        for name, (ready, since) in tuple(self._starting.items()):
            if not ray.wait([ready], timeout=0)[0]:
                if now - since > _SLOW_SECONDS:
                    _LOG.warning(
                        "actor %s has not started for %g s: its Ray node lacks memory, or another actor has its %s",
                        *(name, now - since, _RESOURCE),
                    )
                    self._starting[name] = (ready, now)
                continue
            del self._starting[name]
            try:
                ray.get(ready)
            except ray.exceptions.RayError as error:
                _LOG.warning("actor %s did not start: %s", name, str(error).strip().splitlines()[-1])
                self._retry_at[name] = now + _SLOW_SECONDS

    def _drain(self, name: str, node: dict[str, Any]) -> None:
        if name not in self._draining:
            _LOG.info("Ray node %s drains: its node finishes what it runs", node["NodeID"][:8])
            self._draining[name] = ray.get_actor(name).drain.remote()
        elif ray.wait([self._draining[name]], timeout=0)[0]:
            self.remove(name)

    def remove(self, name: str) -> None:
        """Remove an actor of this head. Its node ends with it."""
        self._starting.pop(name, None)
        self._draining.pop(name, None)
        with suppress(ValueError):  # it ended by itself
            ray.kill(ray.get_actor(name))


def main(parent: int) -> None:
    """Place nodes until SIGTERM, which removes them, or until Ray or the head is gone, which leaves them."""
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent:
        return
    launch = RayLaunch.model_validate_json(sys.stdin.read())
    configure_logging(launch.log_level, launch.log_format)
    register_secret(launch.token)
    # One namespace for each service, whose token outlives its processes.
    namespace = "prorl-gym-" + hashlib.sha256(launch.token.encode()).hexdigest()[:12]
    ray.init(address=launch.address, namespace=namespace, log_to_driver=False, configure_logging=False)
    host = ray.util.get_node_ip_address() if launch.host in _WILDCARDS else launch.host
    placements = _Placements(launch, f"http://{f'[{host}]' if ':' in host else host}:{launch.port}")
    _LOG.info("connected to Ray at %s", launch.address)
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stopping.set())  # in place of Ray's
    while not stopping.wait(_POLL_SECONDS):
        placements.reconcile()
    for name in ray.util.list_named_actors():
        placements.remove(name)


if __name__ == "__main__":
    main(int(sys.argv[1]))
