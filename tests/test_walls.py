"""The walls: what records refuse, how settings merge, what configuration says about mistakes, the bootstrap."""

import json
from collections.abc import Callable
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from sample_records import record

from prorl_gym.config import ConfigModel, load_config
from prorl_gym.errors import (
    CancelReason,
    Cause,
    ConfigError,
    FailureKind,
    GraderError,
    Limit,
    ProrlError,
    RolloutError,
    cause_of,
)
from prorl_gym.gym_roots import has_environment_servers
from prorl_gym.records import (
    NOT_SAMPLED,
    SCHEMA_VERSION,
    Outcome,
    Rollout,
    RolloutRequest,
    Score,
    Segment,
)
from prorl_gym.settings import SERVICE_DEFAULTS, RolloutSettings, resolve_settings

# --- errors ---------------------------------------------------------------------------------------------------------


def test_every_failure_has_one_cause_and_only_infrastructure_is_retried() -> None:
    by_cause = {cause: {kind for kind in FailureKind if cause_of(kind) is cause} for cause in Cause}
    assert by_cause[Cause.POLICY] == {FailureKind.SANDBOX_LIMIT, FailureKind.SANDBOX_BROKEN_BY_AGENT}
    assert by_cause[Cause.TASK] == {
        FailureKind.BAD_ROW,
        FailureKind.UNKNOWN_ENVIRONMENT,
        FailureKind.IMAGE_MISSING,
        FailureKind.IMAGE_BROKEN,
        FailureKind.PROMPT_TOO_LONG,
    }
    for kind in FailureKind:
        assert RolloutError(kind, "x").retryable is (kind in by_cause[Cause.INFRASTRUCTURE])
    assert GraderError("x").kind is FailureKind.GRADER_FAILED


@given(what=st.text(), fix=st.text())
@settings(max_examples=50, derandomize=True)
def test_a_message_never_has_more_than_two_lines(what: str, fix: str) -> None:
    assert len(str(ProrlError(what, fix)).split("\n")) <= 2


# --- records --------------------------------------------------------------------------------------------------------


def request(**fields: Any) -> RolloutRequest:
    return RolloutRequest.model_validate({"environment": "math", "task": {}, **fields})


rollout = partial(record, "r", reward=None)


GENERATION = {"start": 1, "end": 3, "turn": 0, "finish_reason": "stop", "engine": "e", "seconds": 0.1}


def segment(**fields: Any) -> Segment:
    base = {
        "token_ids": [5, 6, 7],
        "mask": [0, 1, 1],
        "logprobs": [0.0, -1.0, -2.0],
        "policy_versions": [NOT_SAMPLED, 3, 4],
        "generations": [GENERATION],
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "logprob_kind": "raw",
    }
    return Segment.model_validate(base | fields)


@pytest.mark.parametrize("rollout_id", ["", ".", "../x", "a b", "a/b", "-x", "x" * 129, "é", "a\n"])
def test_hostile_ids_are_refused(rollout_id: str) -> None:
    with pytest.raises(ValidationError):
        request(rollout_id=rollout_id)


REFUSED: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    *((request, {"replica": number}) for number in (1, -1)),
    (request, {"group_size": 0}),
    (request, {"unknown": 1}),
    (request, {"settings": {"top_p": 0}}),
    (request, {"settings": {"run_seconds": float("inf")}}),
    (segment, {"mask": [0, 1]}),
    (segment, {"logprobs": [0.0, -1.0]}),
    (segment, {"policy_versions": [NOT_SAMPLED, 3]}),
    (segment, {"token_ids": [5, -6, 7]}),
    (segment, {"mask": [0, 2, 1]}),
    (segment, {"logprobs": [0.0, float("nan"), -1.0]}),
    (segment, {"logprobs": [0.0, float("-inf"), -1.0]}),
    (segment, {"policy_versions": [NOT_SAMPLED, NOT_SAMPLED, 4]}),
    (segment, {"policy_versions": [1, 3, 4]}),
    *((segment, {"generations": [{**GENERATION, "start": 2, "end": end}]}) for end in (4, 1)),
    (Outcome, {"status": "failed"}),
    (Outcome, {"status": "truncated"}),
    (Outcome, {"status": "cancelled"}),
    (Outcome, {"status": "completed", "kind": FailureKind.INTERNAL}),
    (Outcome, {"status": "truncated", "limit": Limit.TIME, "reason": CancelReason.CLIENT}),
    (Outcome, {"status": "lost"}),
]


@pytest.mark.parametrize(("build", "fields"), REFUSED, ids=lambda value: getattr(value, "__name__", str(value)))
def test_records_that_contradict_themselves_are_refused(build: Callable[..., Any], fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        build(**fields)


OUTCOMES = [
    *(Outcome(status="failed", kind=kind) for kind in FailureKind),
    *(Outcome(status="truncated", limit=limit) for limit in Limit),
    *(Outcome(status="cancelled", reason=reason) for reason in CancelReason),
    Outcome(status="completed"),
]


@pytest.mark.parametrize("outcome", OUTCOMES, ids=lambda o: f"{o.status}-{o.kind or o.limit or o.reason}")
def test_a_reward_stands_only_where_it_says_something_about_the_policy(outcome: Outcome) -> None:
    allowed = outcome.status in ("completed", "truncated") or outcome.cause is Cause.POLICY
    assert outcome.may_have_reward is allowed
    assert rollout(outcome=outcome).reward is None
    if allowed:
        assert rollout(outcome=outcome, score=Score(reward=0.0)).reward == 0.0
    else:
        with pytest.raises(ValidationError, match="cannot have a reward"):
            rollout(outcome=outcome, score=Score(reward=0.0))


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_is_a_number(reward: float) -> None:
    with pytest.raises(ValidationError):
        Score(reward=reward)


def test_components_add_up() -> None:
    assert Score(reward=0.3, components={"a": 0.1, "b": 0.2}).reward == 0.3
    with pytest.raises(ValidationError, match="components add up to"):
        Score(reward=1.0, components={"a": 0.1})


def test_fields_of_a_later_release_are_ignored_where_clients_read_and_refused_where_they_ask() -> None:
    news = {"later": {"x": 1}}
    generation = {**GENERATION, "start": 0, "end": 1, **news}
    segment = {"token_ids": [1], "mask": [1], "logprobs": [-0.5], "policy_versions": [0], "generations": [generation]}
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprob_kind": "raw"}
    message = {"role": "assistant", "content": "x", "tool_calls": [{"id": "c", "name": "n", "arguments": "", **news}]}
    record = rollout().model_dump(mode="json") | {
        "outcome": {"status": "completed", **news},
        "score": {"reward": 1.0, **news},
        "segments": [segment | sampling | news],
        "messages": [message | news],
        "settings": resolve_settings().model_dump(mode="json") | news,
        "stages": {"run": {"seconds": 1.0, **news}},
        "retries": [{"attempt": 0, "kind": "internal", "stage": "run", "message": "", **news}],
    }
    read = Rollout.model_validate_json(json.dumps(record | news))
    assert (read.turns, read.reward, len(read.retries)) == (1, 1.0, 1)
    for strict in (request, RolloutSettings):
        with pytest.raises(ValidationError, match="Extra inputs"):
            strict(**news)


def test_a_newer_schema_is_refused_and_records_survive_json() -> None:
    record = rollout(segments=[segment()], score=Score(reward=1.0))
    assert Rollout.model_validate_json(record.model_dump_json()) == record
    assert (record.turns, record.sampled_tokens) == (1, 2)
    with pytest.raises(ValidationError, match="is newer than"):
        rollout(schema_version=SCHEMA_VERSION + 1)


# --- settings -------------------------------------------------------------------------------------------------------

levels = st.builds(
    RolloutSettings,
    temperature=st.none() | st.floats(0, 2),
    max_turns=st.none() | st.integers(1, 99),
    stop_token_ids=st.none() | st.just(()) | st.just((1, 2)),
    seed=st.none() | st.integers(0, 9),
)


@given(chosen=st.lists(levels, max_size=4))
@settings(max_examples=100, derandomize=True)
def test_the_strongest_level_that_sets_a_field_wins(chosen: list[RolloutSettings]) -> None:
    resolved = resolve_settings(*chosen)
    for name in ("temperature", "max_turns", "stop_token_ids", "seed", "run_seconds"):
        values = [getattr(level, name) for level in (*chosen, SERVICE_DEFAULTS)]
        assert getattr(resolved, name) == next((value for value in values if value is not None), None)


# --- config ---------------------------------------------------------------------------------------------------------


class Inner(ConfigModel):
    port: int = 1
    host: str = "h"


class Outer(ConfigModel):
    name: str
    inner: Inner = Inner()
    many: tuple[Inner, ...] = ()
    maybe: Inner | None = None


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({}, "F: required key 'name' is missing.\nAdd it."),
        ({"nam": "x"}, "F: unknown key 'nam'.\nDid you mean 'name'?"),
        ({"name": "x", "iner": {}}, "F: unknown key 'iner'.\nDid you mean 'inner'?"),
        ({"name": "x", "inner": {"prot": 1}}, "F: unknown key 'inner.prot'.\nDid you mean 'port'?"),
        ({"name": "x", "maybe": {"prot": 1}}, "F: unknown key 'maybe.prot'.\nDid you mean 'port'?"),
        ({"name": "x", "many": [{}, {"hots": 1}]}, "F: unknown key 'many.1.hots'.\nDid you mean 'host'?"),
        ({"name": "x", "zzz": 1}, "F: unknown key 'zzz'.\nValid keys here: inner, many, maybe, name."),
        (
            {"name": "x", "inner": {"port": "high"}},
            "F: 'inner.port' is wrong: Input should be a valid integer, unable to parse string as an integer.\n"
            "Found 'high'.",
        ),
    ],
)
def test_config_mistakes_are_named(source: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(Outer, source, "F")
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read (No such file or directory).\nCheck the path."),
        ("- a\n", "expected keys and values, found list."),
        ("a: [\n", "not valid YAML"),
        ("name: x\ninner:\n  port: 3\n", ""),
    ],
)
def test_config_files(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "c.yaml"
    if text is not None:
        file.write_text(text)
    if not message:
        assert load_config(Outer, file).inner.port == 3
        return
    with pytest.raises(ConfigError) as caught:
        load_config(Outer, file)
    assert str(caught.value).startswith(f"{file}: {message}")


# --- roots for NeMo Gym ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("module", "known"), [("base_environment_server.py", True), ("registry.py", False)])
def test_whether_gym_has_environment_servers_is_seen_without_its_import(
    module: str, known: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "nemo_gym"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('the command line must not import it')")
    (package / module).touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("sys.meta_path", [object(), PathFinder])  # a finder of somebody else's need not have find_spec
    assert has_environment_servers() is known
    monkeypatch.setattr("sys.meta_path", [])
    assert has_environment_servers() is True  # no Gym: nothing to hide from it
