"""``prorl-gym plan``: the nodes, memory, disk and hours that a run needs, from the records of a pilot run."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Self

import typer

from prorl_gym.cli.service_client.service_connection import LOCAL_URL, RunOption, UrlOption, connect
from prorl_gym.errors import ConfigError

if TYPE_CHECKING:
    from prorl_gym.records import Rollout

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class PilotCosts:
    """What one rollout of a pilot run took, on average unless said."""

    rollouts: int
    work_seconds: float
    """In INIT, RUN and EVAL, where it may hold a sandbox; attempts that were made again included."""
    processor_seconds: float
    """In INIT and EVAL, which mostly use the processor."""
    longest_seconds: float
    """Of the longest rollout."""
    sampled_tokens: float
    record_bytes: float
    """Of its record in the ledger, before compression."""

    @classmethod
    def of(cls, rollouts: "Iterable[Rollout]") -> Self:
        """Measure rollouts.

        Raises:
            ConfigError: none did any work.
        """
        work, processor, tokens, sizes = list[float](), 0.0, 0, 0
        for rollout in rollouts:
            work.append(rollout.worked_seconds + sum(retry.seconds for retry in rollout.retries))
            processor += sum(time.seconds for stage, time in rollout.stages.items() if stage != "run")
            tokens += rollout.sampled_tokens + sum(retry.sampled_tokens for retry in rollout.retries)
            sizes += len(rollout.model_dump_json())
        if not sum(work):
            raise ConfigError(
                "plan: the run has no rollout that did any work.", "Run a pilot first, and name it with --run."
            )
        count = len(work)
        return cls(count, sum(work) / count, processor / count, max(work), tokens / count, sizes / count)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run needs."""

    nodes: int
    sandboxes: int
    """At once, on all nodes."""
    hours: float
    tokens_per_second: float
    """That the engines have to sample."""
    busy_cores: float
    """Of each node, by INIT and EVAL."""
    ledger_bytes: float


def plan_for_nodes(costs: PilotCosts, rollouts: int, nodes: int, sandboxes_per_node: int) -> Plan:
    """Return the plan of a run on a number of nodes.

    Every sandbox is in use until the queue is empty; then the run lasts for one more rollout, the longest.
    """
    sandboxes = min(nodes * sandboxes_per_node, rollouts)
    seconds = rollouts * costs.work_seconds / sandboxes
    return Plan(
        nodes=nodes,
        sandboxes=sandboxes,
        hours=(seconds + costs.longest_seconds) / 3600,
        tokens_per_second=rollouts * costs.sampled_tokens / seconds,
        busy_cores=rollouts * costs.processor_seconds / seconds / nodes,
        ledger_bytes=rollouts * costs.record_bytes,
    )


def plan_for_hours(costs: PilotCosts, rollouts: int, hours: float, sandboxes_per_node: int) -> Plan:
    """Return the plan with the fewest nodes that ends in time.

    Raises:
        ConfigError: the longest rollout alone takes longer.
    """
    seconds = hours * 3600 - costs.longest_seconds
    if seconds <= 0:
        raise ConfigError(
            f"plan: the longest rollout took {costs.longest_seconds:.0f} s, more than {hours:g} hours.",
            "Allow more --hours, or bound rollouts with settings.max_seconds.",
        )
    nodes = math.ceil(rollouts * costs.work_seconds / seconds / sandboxes_per_node)
    return plan_for_nodes(costs, rollouts, nodes, sandboxes_per_node)


def plan(
    rollouts: Annotated[int, typer.Argument(min=1, help="Rollouts of the whole run.")],
    run: RunOption = "default",
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes there are: print the hours.")] = None,
    hours: Annotated[float | None, typer.Option(min=0.001, help="Hours it may take: print the nodes.")] = None,
    sandboxes: Annotated[int, typer.Option(min=1, help="Sandboxes at once on a node (runner.run).")] = 64,
    sandbox_mib: Annotated[int, typer.Option(min=1, help="Memory that one sandbox uses, in MiB.")] = 512,
    disk_mib: Annotated[int, typer.Option(min=0, help="Disk that one sandbox uses (root_on: disk), in MiB.")] = 0,
    url: UrlOption = LOCAL_URL,
) -> None:
    """Print the nodes, sandboxes, memory, disk and hours that a run needs, from a pilot run's records.

    Run the pilot with as many rollouts at once on a node as the run will have: stages take longer on a busy node.
    """
    if (nodes is None) == (hours is None):
        raise ConfigError("plan: give either --nodes or --hours.")
    with connect(url) as client:
        costs = PilotCosts.of(one.rollout for one in client.stream(run, 0, follow=False))
    if nodes is not None:
        made = plan_for_nodes(costs, rollouts, nodes, sandboxes)
    else:
        assert hours is not None
        made = plan_for_hours(costs, rollouts, hours, sandboxes)
    per_node = math.ceil(made.sandboxes / made.nodes)
    for line in (
        f"pilot      {costs.rollouts} rollouts of run {run}: {costs.work_seconds:.1f} s each, the longest "
        f"{costs.longest_seconds:.1f} s, {costs.sampled_tokens:.0f} tokens sampled",
        f"nodes      {made.nodes}, with {made.sandboxes} sandboxes at once",
        f"hours      {made.hours:.2f}",
        f"cores      {made.busy_cores:.1f} of each node busy with INIT and EVAL, beside what tools use in RUN",
        f"memory     {per_node * sandbox_mib / 1024:.1f} GiB of each node in sandboxes",
        f"disk       {per_node * disk_mib / 1024:.1f} GiB of each node in sandboxes, "
        f"at most {made.ledger_bytes / _GIB:.2f} GiB of ledger",
        f"engines    {made.tokens_per_second:.0f} sampled tokens per second",
    ):
        typer.echo(line)
