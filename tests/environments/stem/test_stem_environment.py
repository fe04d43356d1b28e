"""The environment as a rollout meets it: prompts, tools, trajectories, and a judge on engines of its own."""

import time
from pathlib import Path
from typing import Any

import pytest
from stem_support import GRADER, Nothing

from prorl_gym.api import build
from prorl_gym.api.config import ServiceConfig
from prorl_gym.contrib.search import PROVIDER_VARIABLE, CorpusSearch, SearchTool
from prorl_gym.environments.judge import Judge
from prorl_gym.environments.playback import play_script, wrong_steps
from prorl_gym.environments.protocol import ScriptedStep
from prorl_gym.environments.stem.environment import StemEnvironment
from prorl_gym.errors import FailureKind
from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.inference.protocol import GenerationRequest
from prorl_gym.inference.tokens.template_check import load_codec
from prorl_gym.records import RolloutRequest
from prorl_gym.rollout.protocol import Finished, Job
from prorl_gym.rollout.scheduling.model_source import ModelPolicySource
from prorl_gym.settings import resolve_settings
from prorl_gym.testing.inference.fake_engine import FakeEngine, Reply
from prorl_gym.testing.rollout.fake_rollout import EmptyBackend

CHOICE = {
    "question": "Which is a noble gas?",
    "kind": "choice",
    "options": ["oxygen", "argon", "chlorine", "nitrogen", "hydrogen"],
    "answer": "B",
    "shuffle": True,
}
BARE = [
    CHOICE,
    {"question": "How fast?", "kind": "numeric", "answer": "9.81 m/s^2"},
    {"question": "What is it?", "kind": "text", "answer": "argon"},
    {"question": "Which function?", "kind": "expression", "answer": "\\frac{x}{2}"},
]


async def test_options_are_shown_with_letters_and_the_gold_one_is_not_marked():
    environment = StemEnvironment(GRADER)
    task = environment.parse_row(CHOICE)
    episode = await environment.init(task, Nothing(), resolve_settings(environment.settings))
    lines = episode.messages[1].content.splitlines()
    assert lines[:2] == [CHOICE["question"], ""]
    assert lines[2:] == [f"({letter}) {text}" for letter, text in zip("ABCDE", task.shown_options(), strict=True)]
    marked = environment.parse_row({**CHOICE, "answer": "D"})
    other = await environment.init(marked, Nothing(), resolve_settings(environment.settings))
    assert other.messages == episode.messages


async def test_search_is_a_tool_only_where_the_service_enables_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "corpus.jsonl"
    file.write_text('{"title": "Gases", "text": "Argon is a noble gas."}')

    async def tools() -> list[str]:
        environment = StemEnvironment(GRADER)
        episode = await environment.init(
            environment.parse_row(CHOICE), Nothing(), resolve_settings(environment.settings)
        )
        assert ("search tool" in episode.messages[0].content) == ("search" in [one.spec.name for one in episode.tools])
        return [tool.spec.name for tool in episode.tools]

    monkeypatch.delenv(PROVIDER_VARIABLE, raising=False)
    assert await tools() == ["python", "finish"]
    monkeypatch.setenv(PROVIDER_VARIABLE, f"corpus:{file}")
    assert await tools() == ["python", "search", "finish"]
    steps = [
        ScriptedStep("", "search", {"query": "noble gas"}),
        ScriptedStep("", "finish", {"answer": "\\boxed{\\text{argon}}"}),
    ]
    played = await play_script(StemEnvironment(GRADER, SearchTool(CorpusSearch(file))), CHOICE, steps, Nothing())
    assert played.score.reward == 1.0
    assert "Argon is a noble gas." in played.artifacts.messages[3].content


@pytest.mark.parametrize("row", BARE, ids=lambda row: row["kind"])
async def test_rows_without_trajectories_have_bare_ones(row: dict[str, Any]):
    environment = StemEnvironment(GRADER)
    assert (await play_script(environment, row, environment.gold_steps(row), Nothing())).score.reward == 1.0
    for seed in range(4):
        assert (await play_script(environment, row, wrong_steps(environment, row, seed), Nothing())).score.reward == 0.0
    assert (await play_script(environment, row, (), Nothing())).score.reward == 0.0


@pytest.mark.parametrize(
    ("said", "reward"), [('{{"mark": "{mark}", "verdict": "equivalent"}}', 1.0), ("I would say equivalent.", None)]
)
async def test_a_rollout_is_judged_on_engines_of_their_own(said: str, reward: float | None):
    """The policy's engine never sees what the judge is asked, and a judge that rambles is no reward."""
    codec = load_codec("small")

    def reply(text: str) -> Reply:
        return Reply((*codec.tokenizer.encode_untrusted(text), codec.terminator_id))

    def judged(request: GenerationRequest) -> Reply:
        mark = codec.decode(request.prompt_ids).partition("BEGIN ")[2][:16]
        return reply(said.format(mark=mark))

    policy, judge = FakeEngine("p", lambda request: reply("It is \\boxed{Ar}.")), FakeEngine("j", judged)
    row = {"question": "What is it?", "kind": "text", "answer": "argon", "judge": True}
    request = RolloutRequest(environment="stem", task=row)
    async with EnginePool("policy") as pool, EnginePool("judge") as judges:
        pool.add_engine(policy)
        judges.add_engine(judge)
        runner = build.InProcessRunner(
            lambda name: StemEnvironment(GRADER),
            ModelPolicySource(pool, codec),
            EmptyBackend(),
            judge=Judge(judges, codec),
        )
        await runner.accept(Job(request=request, accepted_at=time.time()))
        rollout = await anext(event.rollout async for event in runner.events() if isinstance(event, Finished))
    assert len(policy.requests) == 1
    assert len(judge.requests) == (1 if reward else 3)  # twice about the answer, once about the reference answer
    assert (rollout.score.reward if rollout.score else None) == reward
    if reward is None:
        assert (rollout.outcome.status, rollout.outcome.kind) == ("failed", FailureKind.GRADER_FAILED)


async def test_a_service_lends_its_judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lent: list[Any] = []
    runner = build.InProcessRunner

    def noted(*arguments: Any, judge: Any = None, **options: Any) -> Any:
        lent.append(judge)
        return runner(*arguments, judge=judge, **options)

    async def no_sandboxes(_: object) -> EmptyBackend:
        return EmptyBackend()

    monkeypatch.setattr(build, "InProcessRunner", noted)
    monkeypatch.setattr(build, "open_backend", no_sandboxes)
    pool = {"engines": ["http://127.0.0.1:1"], "model": "m", "tokenizer": "small"}
    for judge in ({}, {"judge": pool}):
        config = ServiceConfig.model_validate({"inference": pool, "state": str(tmp_path), **judge})
        await (await build.build_service(config)).close()
    assert lent[0] is None
    assert isinstance(lent[1], Judge)
