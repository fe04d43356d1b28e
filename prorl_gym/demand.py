"""How many groups a trainer still needs of a run, and what happens to the others: ``PUT /v1/runs/{run}/demand``.

Without a demand, every accepted rollout runs to its end. With one, the service counts *informative groups* (their
rewards differ, so that a group-relative advantage is not zero) and stops redundant ones once enough are complete.
Evaluation and rollouts without a group are never stopped. The rules avoid a selection by the length of the text:

* a group is stopped, kept or completed as a whole: no member is cut because its siblings were faster;
* extra replicas only race a straggler in INIT or EVAL, and the race ends when either begins to sample.

``docs/scheduling.md`` describes what is stopped when, and what each option costs.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from prorl_gym.settings import Seconds

NonNegativeInt = Annotated[int, Field(ge=0)]


class DemandModel(BaseModel):
    """Base: refuses unknown fields, since a misspelt one would be ignored silently."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class RedundantHandling(DemandModel):
    """Treatment of the members of a group that is no longer needed, by the stage they are in.

    Queued members are not started. Members in EVAL always finish: they are nearly done. A group is completed if this
    would cut none of its members. Groups accepted when enough are complete are not dropped: they wait for a demand
    that needs them, for ``park_seconds`` at most.
    """

    init: Literal["finish", "kill"] = "kill"
    """Members whose sandbox and task are being set up."""
    run: Literal["finish", "park", "kill"] = "park"
    """Members whose agent is running. ``park``: the agent stops before its next model call, frees its slot, keeps its
    sandbox and tokens, and goes on when a later demand needs its group. A group that has begun is then kept whole,
    whatever ``init`` is: members in INIT are parked when they reach RUN, queued ones wait."""
    park_seconds: Seconds = 600.0
    """Longest time a group is kept; then the members that are left are cancelled."""


class Demand(DemandModel):
    """Groups that a trainer needs of a run from now on; each demand replaces the one before."""

    groups: NonNegativeInt = Field(examples=[64])
    """Informative groups needed, including those completed after ``after``. 0: none."""
    after: NonNegativeInt = Field(default=0, examples=[41])
    """Cursor of the last record that the trainer has used: groups complete by then no longer count."""
    spare: NonNegativeInt = 0
    """Groups to complete beyond ``groups`` before the rest is redundant: choosing among them later reduces the bias to
    fast prompts that any early stop has."""
    version: NonNegativeInt | None = Field(default=None, examples=[8])
    """Policy version of the step that needs the groups. One above the pool's raises the version that is current for
    groups; one below it is refused: the version of ``GET /v1/policy`` is right, whatever other runs have counted."""
    pool: Annotated[str, Field(min_length=1, max_length=64)] = "policy"
    """Pool of engines that the run samples from, which defines its current version; not ``policy`` if its rollouts
    name an ``inference_url``."""
    max_staleness: NonNegativeInt | None = Field(default=None, examples=[1])
    """Longest distance between the current version and the oldest token of a group; one verdict for the whole group.
    It bounds how many groups begin (``(max_staleness + 1) * groups`` informative ones begun and not used, at least
    ``groups + spare``; running ones count by the recent share of informative groups; each begins as a whole),
    cancels those that a new version makes too stale, and marks records delivered too late.
    Evaluation and rollouts without a group are exempt."""
    redundant: RedundantHandling = RedundantHandling()
    replace: Annotated[int, Field(ge=0, le=16)] = 2
    """Most replacements in a group: rollouts that replace members which infrastructure failed for good. A replacement
    is the failed request, including its seed, under another id, ``<id>:r1``."""
    extra: Annotated[int, Field(ge=0, le=16)] = 0
    """Extra replicas of a group (``<id>:x1``) that may race stragglers in INIT or EVAL."""
    straggler_factor: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 3.0
    """A straggler has taken more than this many times the median of the stage in its environment."""
    straggler_seconds: Seconds = 30.0
    """A straggler has also taken at least this long."""
    epsilon: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-6
    """Rewards that differ by no more than this are equal."""
