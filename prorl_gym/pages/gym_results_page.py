"""The page of a Gym results file: every rollout in it, with an index."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, cast

from pydantic import BaseModel, Field, ValidationError

from prorl_gym.pages.html_page import render_page
from prorl_gym.pages.page_data import (
    GradedKind,
    GradedPart,
    MessageView,
    ModelCall,
    SegmentView,
    TokenDecoder,
    TrajectoryView,
    pack_trajectories,
)
from prorl_gym.pages.rollout_page import ROLLOUT_ASSETS

_MAX_SECONDS = 1e12
"""Times from here on are ignored, infinity and integers that no float can hold among them."""

_Ids = list[Annotated[int, Field(ge=0)]]


class _TokenTriple(BaseModel):
    prompt_token_ids: _Ids
    generation_token_ids: _Ids
    generation_log_probs: list[Annotated[float, Field(allow_inf_nan=False)]]


def render_gym_results(results: Sequence[Mapping[str, Any]], decode: TokenDecoder | None) -> str:
    """Return the page of ``/run`` answers. Without ``decode``, token ids are shown."""
    views = [gym_result_view(result) for result in sorted(results, key=_sort_key)]
    return render_page(ROLLOUT_ASSETS, "Rollouts - prorl-gym", pack_trajectories(views, decode))


def gym_result_view(result: Mapping[str, Any]) -> TrajectoryView:
    reward, replica = result.get("reward"), result.get("_ng_rollout_index")
    verdict, rating = f"reward {reward}", "good" if isinstance(reward, int | float) and reward > 0 else "bad"
    if result.get("mask_sample"):
        verdict, rating = f"masked ({result.get('failure_kind')})", "none"
    title = f"{result.get('environment', '?')} / {_problem(result)}"
    return TrajectoryView(
        title=title if replica is None else f"{title} #{replica}",
        verdict=verdict,
        rating=rating,
        outcome=str(result.get("prorl_outcome", "")),
        facts=[(name, value) for name, value in _facts(result) if value],
        message=str(result.get("mask_reason") or result.get("failure_reason") or ""),
        environment=str(result.get("environment", "")),
        problem=_problem(result),
        replica=replica if isinstance(replica, int) else 0,
        why="" if reward == 1.0 else str(result.get("prorl_why") or ""),
        graded=list(_graded(result)),
        reward=None if result.get("mask_sample") or not isinstance(reward, int | float) else float(reward),
        stages=list(_stages(result)),
        segments=_segments(_items(result)),
        messages=[*_prompt(result), *_messages(_items(result))],
    )


def _sort_key(result: Mapping[str, Any]) -> tuple[float, float]:
    """Order by task, then by repeat; the file has the results in the order in which they finished."""
    given = (result.get(f"_ng_{name}_index") for name in ("task", "rollout"))
    task, repeat = (value if isinstance(value, int | float) else float("inf") for value in given)
    return task, repeat


def _problem(result: Mapping[str, Any]) -> str:
    name = _mapping(result.get("task")).get("id") or result.get("prorl_row_id")
    return str(name or result.get("_ng_task_index", "?"))


def _graded(result: Mapping[str, Any]) -> Iterator[GradedPart]:
    """Yield what was graded, in the order of ``rollout_page``."""
    names: dict[str, tuple[str, GradedKind]] = {
        "expected": ("Expected", "text"),
        "submission": ("Got", "text"),
        "git_patch": ("Graded patch", "diff"),
        "report": ("Test report", "report"),
    }
    for key, (name, kind) in names.items():
        text = result.get(f"prorl_{key}")
        if isinstance(text, str):
            yield GradedPart(name, text, kind)


def _facts(result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    names = {"rollout_id": "Rollout", "turns": "Turns", "sampled_tokens": "Tokens sampled", "total_tokens": "Tokens"}
    for key, name in names.items():
        yield name, str(result.get(f"prorl_{key}", ""))
    for name, value in _mapping(result.get("reward_components")).items():
        yield f"Reward: {name}", f"{value}"


def _stages(result: Mapping[str, Any]) -> Iterator[tuple[str, float, float]]:
    """Yield the stages. The row has one number for all waits, which is shown before the first stage."""
    queued = _seconds(result, "queued")
    for name in ("init", "run", "eval"):
        seconds = _seconds(result, name)
        if seconds or queued:
            yield name, queued, seconds
            queued = 0.0


def _seconds(result: Mapping[str, Any], name: str) -> float:
    value = result.get(f"prorl_{name}_seconds")
    return float(value) if isinstance(value, int | float) and abs(value) < _MAX_SECONDS else 0.0


def _items(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return _mappings(_mapping(result.get("response")).get("output"))


def _segments(items: Sequence[Mapping[str, Any]]) -> list[SegmentView]:
    """Rebuild the flat sequences from the triples as a trainer does: a new one where a prompt continues none."""
    segments: list[SegmentView] = []
    ids: list[int] = []
    for turn, triple in enumerate(_triples(items)):
        start = len(triple.prompt_token_ids)
        if not segments or triple.prompt_token_ids[: len(ids)] != ids:
            segments.append(SegmentView([], [], [], [], []))
            ids = []
        given, sampled = triple.prompt_token_ids[len(ids) :], triple.generation_token_ids
        ids = [*triple.prompt_token_ids, *sampled]
        last = segments[-1]
        segments[-1] = SegmentView(
            ids=ids,
            mask=[*last.mask, *[0] * len(given), *[1] * len(sampled)],
            logprobs=[*last.logprobs, *[0.0] * len(given), *triple.generation_log_probs],
            versions=[-1] * len(ids),
            calls=[*last.calls, ModelCall(start, len(ids), turn)],
        )
    return segments


def _triples(items: Sequence[Mapping[str, Any]]) -> Iterator[_TokenTriple]:
    for item in items:
        if item.get("generation_token_ids"):
            try:
                triple = _TokenTriple.model_validate(item)
            except ValidationError:
                continue  # damaged: show the rest
            if len(triple.generation_token_ids) == len(triple.generation_log_probs):
                yield triple


def _prompt(result: Mapping[str, Any]) -> Iterator[MessageView]:
    given = _mapping(result.get("responses_create_params")).get("input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    for message in _mappings(given):
        yield MessageView(str(message.get("role", "user")), _text(message.get("content")), -1)


def _messages(items: Sequence[Mapping[str, Any]]) -> Iterator[MessageView]:
    """Yield the messages. The items of one model call end with the one that has its tokens."""
    names: dict[str, str] = {}
    turn, begins = -1, True
    for item in items:
        kind = item.get("type")
        if kind == "function_call_output" or item.get("role") in ("user", "system"):
            name = names.get(str(item.get("call_id")), "")
            text = _text(item.get("output") if kind == "function_call_output" else item.get("content"))
            yield MessageView("tool" if kind == "function_call_output" else str(item["role"]), text, turn, name)
            begins = True
            continue
        turn, begins = turn + begins, bool(item.get("generation_token_ids"))
        if kind == "function_call":
            name = str(item.get("name", ""))
            names[str(item.get("call_id"))] = name
            yield MessageView("assistant", "", turn, calls=[(name, str(item.get("arguments", "")))])
        elif text := _text(item.get("content")):
            yield MessageView("assistant", text, turn)


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in _mappings(content))


def _mapping(value: Any) -> Mapping[str, Any]:
    return cast(Mapping[str, Any], value) if isinstance(value, Mapping) else {}


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return [_mapping(item) for item in cast(list[Any], value)] if isinstance(value, list) else []
