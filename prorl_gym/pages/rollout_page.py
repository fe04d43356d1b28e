"""The page of one rollout's record, turn by turn and token by token."""

from collections.abc import Iterator

from prorl_gym.pages.html_page import load_assets, render_page
from prorl_gym.pages.page_data import (
    GradedPart,
    MessageView,
    ModelCall,
    Rating,
    SegmentView,
    TokenDecoder,
    TrajectoryView,
    pack_trajectories,
)
from prorl_gym.records import Rollout, Segment

ROLLOUT_ASSETS = load_assets(
    ("base.css", "trajectory.css"),
    (
        *("dom.js", "segment.js", "tokens.js", "conversation.js", "graded.js", "comparison.js", "stages.js"),
        *("search.js", "overview.js", "trajectory.js"),
    ),
    "trajectory.html",
)

_SUBMISSION_NAMES = {
    "answer": "Got",
    "program": "Graded program",
    "files": "The agent's last word; its files were graded",
}


def render_rollout(rollout: Rollout, decode: TokenDecoder | None, *others: Rollout) -> str:
    """Return the page as one HTML file; with ``others``, it opens on the first two side by side.

    ``decode`` turns token ids into text, special tokens shown; without it ids are shown. Takes up to a second for a
    long rollout: not for an event loop.
    """
    rollouts = (rollout, *others)
    title = " and ".join(one.rollout_id for one in rollouts)
    data = pack_trajectories([rollout_view(one) for one in rollouts], decode)
    return render_page(ROLLOUT_ASSETS, f"{title} - prorl-gym", {**data, "compare": True} if others else data)


def rollout_view(rollout: Rollout) -> TrajectoryView:
    verdict, rating = _verdict(rollout)
    return TrajectoryView(
        title=f"{rollout.environment} / {rollout.rollout_id}",
        verdict=verdict,
        rating=rating,
        outcome=_outcome(rollout),
        facts=[(name, value) for name, value in _facts(rollout) if value],
        message=rollout.outcome.message,
        environment=rollout.environment,
        why="" if rollout.reward == 1.0 or rollout.why == rollout.outcome.message else rollout.why,
        problem=rollout.row_id or rollout.group_id or "",
        replica=rollout.replica,
        reward=rollout.reward,
        graded=list(_graded(rollout)),
        stages=list(_stages(rollout)),
        segments=[_tokens(segment) for segment in rollout.segments],
        messages=list(_messages(rollout)),
    )


def _stages(rollout: Rollout) -> Iterator[tuple[str, float, float]]:
    """Yield everything from the acceptance to the record: what is in no stage and no attempt is the wait before."""
    earlier = sum(retry.seconds for retry in rollout.retries)
    in_stages = sum(stage.queued + stage.seconds for stage in rollout.stages.values())
    begun_at = rollout.finished_at - in_stages if rollout.begun_at is None else rollout.begun_at
    yield "accepted", max(begun_at - rollout.accepted_at - earlier, 0.0), 0.0
    if earlier:
        yield "attempts", 0.0, earlier
    stages = [(name, rollout.stages[name]) for name in ("init", "run", "eval") if name in rollout.stages]
    for name, stage in stages:
        yield name, stage.queued, stage.seconds


def _graded(rollout: Rollout) -> Iterator[GradedPart]:
    score, submission = rollout.score, rollout.submission
    patch = rollout.git_patch
    if score is not None and score.expected is not None:
        yield GradedPart("Expected", score.expected)
    if patch is not None:
        yield GradedPart("Graded patch", patch, "diff")
    elif submission is not None:
        yield GradedPart(_SUBMISSION_NAMES.get(submission.kind, submission.kind), submission.text)
    if score is not None and score.report:
        yield GradedPart("Test report", score.report, "report")


def _verdict(rollout: Rollout) -> tuple[str, Rating]:
    if rollout.reward is None:
        return "no reward", "none"
    masked = ", masked" if rollout.masked else ""
    return f"reward {rollout.reward:g}{masked}", "none" if masked else "good" if rollout.reward > 0 else "bad"


def _outcome(rollout: Rollout) -> str:
    outcome = rollout.outcome
    detail = outcome.kind or outcome.limit or outcome.reason
    return outcome.status if detail is None else f"{outcome.status} ({detail.value})"


def _facts(rollout: Rollout) -> Iterator[tuple[str, str]]:
    outcome, score, settings = rollout.outcome, rollout.score, rollout.settings
    cause = f", caused by {outcome.cause.value}" if outcome.cause else ""
    yield "Outcome", _outcome(rollout) + cause + (f", in {outcome.stage}" if outcome.stage else "")
    yield "Run", rollout.run_id + (" (evaluation)" if rollout.evaluation else "")
    yield "Group", "" if rollout.group_id is None else rollout.group_id
    yield "Replica", f"{rollout.replica + 1} of {rollout.group_size}" if rollout.group_id is not None else ""
    yield "Row", rollout.row_id + (f", {rollout.row_source}" if rollout.row_source else "")
    yield "Stands in for", rollout.stands_in_for or ""
    yield "Attempt", f"{rollout.attempt}"
    yield "Turns", f"{rollout.turns}"
    total = sum(len(segment.token_ids) for segment in rollout.segments)
    yield "Tokens", f"{total:,}, {rollout.sampled_tokens:,} of them sampled"
    yield "Segments", f"{len(rollout.segments)}" if len(rollout.segments) > 1 else ""
    yield "Took", f"{rollout.finished_at - rollout.accepted_at:,.1f} s from acceptance to record"
    if score is not None:
        for name, value in score.components.items():
            yield f"Reward: {name}", f"{value:g}"
        for name, value in score.detail.items():
            if name not in ("git_patch", "why"):  # shown as a diff, and above the facts
                yield f"Verdict: {name}", f"{value}"
    for retry in rollout.retries:
        yield f"Attempt {retry.attempt} failed", f"{retry.kind.value} in {retry.stage}: {retry.message}"
    if settings is not None:
        yield "Sampling", f"temperature {settings.temperature:g}, top-p {settings.top_p:g}, top-k {settings.top_k}"
        yield "Limits", f"{settings.max_turns} turns, {settings.max_tokens:,} tokens, {settings.run_seconds:g} s"
    yield from rollout.metadata.items()


def _tokens(segment: Segment) -> SegmentView:
    origin = "" if segment.parent is None else f", from segment {segment.parent + 1} ({segment.cause})"
    calls: list[ModelCall] = []
    for call in segment.generations:
        cached = "" if call.cached_tokens is None else f", {call.cached_tokens:,} cached"
        facts = f"{call.engine}, {call.seconds:.2f} s{cached}, {call.finish_reason}"
        calls.append(ModelCall(call.start, call.end, call.turn, facts))
    return SegmentView(
        ids=segment.token_ids,
        mask=segment.mask,
        logprobs=segment.logprobs,
        versions=segment.policy_versions,
        calls=calls,
        note=f"{segment.logprob_kind} log-probs{origin}",
    )


def _messages(rollout: Rollout) -> Iterator[MessageView]:
    """Yield the messages, each with its turn; those before the first sampled one have none."""
    turn = -1
    for position, message in enumerate(rollout.messages):
        if message.role == "assistant" and position >= rollout.prompt_messages:
            turn += 1
        yield MessageView(
            role=message.role,
            text=message.content,
            turn=turn,
            name=message.name or "",
            calls=[(call.name, call.arguments) for call in message.tool_calls],
        )
