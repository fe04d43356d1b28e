"""Sampling and limits: one model, one precedence (request > environment > run > service)."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from prorl_gym.errors import Limit

PositiveInt = Annotated[int, Field(gt=0)]
TrainedSegments = Literal["all", "main", "last", "normalized"]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]  # JSON, and so a record, has no infinity


class RolloutSettings(BaseModel):
    """Settings of a rollout, at any level. ``None`` leaves a field to the next level."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """Sampling temperature, sent to the engine verbatim."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Nucleus mass, sent verbatim."""
    top_k: Annotated[int, Field(ge=-1)] | None = None
    """-1 (or 0): off, and not sent, since some trainers' engines refuse the key."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Seed of the rollout. Each turn of each replica derives its own from it; ``None`` leaves it to the engine."""
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """Stop ids in addition to the template's own terminator. Stop strings are not offered: they cut inside tokens."""
    max_turns: PositiveInt | None = None
    """Model calls in one rollout."""
    max_tokens: PositiveInt | None = None
    """Length of a segment in tokens, first prompt and observations included: of the whole trajectory, unless it is
    compacted (``compact_tokens``) or a harness changes its history."""
    max_turn_tokens: PositiveInt | None = None
    """Tokens sampled in one model call."""
    compact_tokens: Annotated[int, Field(ge=0)] | None = None
    """Length of the context in tokens at which the built-in loop has the policy summarise its work, and goes on from
    the first prompt and the summary; 0: never. Leave room below ``max_tokens`` for a turn, its tools' answers and the
    summary."""
    init_seconds: Seconds | None = None
    """Deadline of INIT; time in the queue is not counted."""
    run_seconds: Seconds | None = None
    """Deadline of RUN; time in the queue is not counted."""
    eval_seconds: Seconds | None = None
    """Deadline of EVAL; time in the queue is not counted."""
    action_seconds: Seconds | None = None
    """Longest time one tool call may take."""
    resume: bool | None = None
    """Log each turn, and let an attempt after a loss resume after the last whole one. Only where the environment says
    that its tools may be run again (``math``, ``code``, ``swe``)."""
    agent: Annotated[str, Field(max_length=80)] | None = None
    """Agent that works on the task: a program in its sandbox, a preset or one of the service's ``agents``; empty: the
    built-in loop."""
    mask_overlong: tuple[Limit, ...] | None = None
    """Limits (``turns``, ``tokens``, ``time``) that mask the rollouts they truncate, so that no loss is computed on
    them (DAPO's overlong filtering, for agents). They are still graded and delivered, with ``Rollout.masked`` set."""
    trained_segments: TrainedSegments | None = None
    """Segments that carry loss, each with the rollout's reward: ``all`` but side calls, the ``main`` one (of the main
    agent's, the one in which most was sampled), or the ``last`` one of the main agent. ``normalized``: as ``all``, with
    the loss of each divided by their number."""


class ResolvedSettings(BaseModel):
    """Complete settings of one rollout: every field has a value. Same meaning as in ``RolloutSettings``.

    Clients read it, so unknown fields, added by a later release, are ignored; ``RolloutSettings`` refuses them.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stop_token_ids: tuple[int, ...]
    max_turns: int
    max_tokens: int
    max_turn_tokens: int
    compact_tokens: int = 0
    init_seconds: float
    run_seconds: float
    eval_seconds: float
    action_seconds: float
    resume: bool = False
    agent: str = ""
    mask_overlong: tuple[Limit, ...] = ()
    trained_segments: TrainedSegments = "all"


SERVICE_DEFAULTS = RolloutSettings(
    temperature=1.0,
    top_p=1.0,
    top_k=-1,
    stop_token_ids=(),
    max_turns=16,
    max_tokens=32768,
    max_turn_tokens=4096,
    compact_tokens=0,
    init_seconds=120.0,
    run_seconds=1800.0,
    eval_seconds=300.0,
    action_seconds=30.0,
    resume=False,
    agent="",
    mask_overlong=(),
    trained_segments="all",
)


def resolve_settings(*levels: RolloutSettings) -> ResolvedSettings:
    """Merge settings, the strongest level first; ``SERVICE_DEFAULTS`` fills what no level sets.

    Callers pass ``request, environment, run, service`` in this order.
    """
    merged: dict[str, object] = {"seed": None}
    for level in reversed((*levels, SERVICE_DEFAULTS)):
        merged.update(level.model_dump(exclude_none=True))
    return ResolvedSettings.model_validate(merged)
