"""The routes, one module per subject; each adds its own over an ``AppContext``."""

from typing import Annotated

from fastapi import Depends, Path, Query

from prorl_gym.client.wire_models import MAX_VERSION
from prorl_gym.rollout.protocol import RewardClass, RolloutFilter

IDENTIFIER = r"^[A-Za-z0-9][A-Za-z0-9._:\-]{0,127}$"

RunQuery = Annotated[
    str | None, Query(pattern=IDENTIFIER, description="Only records of this run.", examples=["step-7"])
]
GroupQuery = Annotated[
    str | None, Query(pattern=IDENTIFIER, description="Only records of this group.", examples=["prompt-3"])
]
PrefixQuery = Annotated[
    str | None, Query(pattern=IDENTIFIER, description="Only rollouts whose id has this prefix.", examples=["a7"])
]
RolloutPath = Annotated[str, Path(pattern=IDENTIFIER, description="Id of a rollout.", examples=["a7"])]
RunPath = Annotated[str, Path(pattern=IDENTIFIER, description="Id of a run.", examples=["step-7"])]
PoolQuery = Annotated[str, Query(max_length=64, description="Pool of engines.", examples=["policy"])]
OffsetQuery = Annotated[int, Query(ge=0, le=100_000, description="How many to skip.")]
_WordQuery = Annotated[str | None, Query(max_length=256, description="Only rollouts with exactly this.")]


def _wanted_rollouts(
    run: RunQuery = None,
    group: GroupQuery = None,
    prefix: PrefixQuery = None,
    environment: _WordQuery = None,
    problem: _WordQuery = None,
    evaluation: Annotated[bool | None, Query(description="Only rollouts of an evaluation, or only the others.")] = None,
    status: _WordQuery = None,
    detail: _WordQuery = None,
    why: Annotated[str | None, Query(max_length=1024, description="Only rollouts with exactly this reason.")] = None,
    version: Annotated[
        int | None, Query(ge=0, le=MAX_VERSION, description="Only rollouts whose oldest policy version is this.")
    ] = None,
    reward: Annotated[RewardClass | None, Query(description="Only rewards above zero, others, or none.")] = None,
    text: Annotated[
        str | None, Query(max_length=256, description="Part of an id, a problem, a group, a detail or a reason.")
    ] = None,
) -> RolloutFilter:
    return RolloutFilter(
        run_id=run,
        group_id=group,
        prefix=prefix,
        environment=environment,
        problem=problem,
        evaluation=evaluation,
        status=status,
        detail=detail,
        why=why,
        version=version,
        reward=reward,
        text=text,
    )


WantedRollouts = Annotated[RolloutFilter, Depends(_wanted_rollouts)]
"""Parameters of a route that choose rollouts."""
