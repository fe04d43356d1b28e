"""The parts of ``recipes/tiny_dapo`` that need no torch: questions, traces, tokenizers, as the service reads them."""

import json
import random
from collections import Counter
from itertools import islice

import pytest
from curve import README, tables, with_tables
from tasks import DOMAINS, HELD_OUT, Question, TurnEncoder, held_out, questions, shipped_prompt, trace, write_tokenizer
from tasks.expressions import Expression
from tasks.question import MIXTURE, Kind, call, python_answer
from tasks.repairs import Repair

from prorl_gym.agents.protocol import Artifacts
from prorl_gym.agents.scripted_policy import ScriptedPolicy
from prorl_gym.environments import registry
from prorl_gym.environments.code.environment import results_match
from prorl_gym.environments.protocol import RunContext, ScriptedStep
from prorl_gym.errors import SandboxError
from prorl_gym.inference.tokens.chat_codec import ChatCodec
from prorl_gym.inference.tokens.template_check import load_codec
from prorl_gym.inference.toolcalls.turn_parsing import parse_turn
from prorl_gym.records import Message
from prorl_gym.rollout.scheduling.sandbox_leases import SandboxLeases
from prorl_gym.sandbox.backend_selection import open_backend
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.settings import RolloutSettings, resolve_settings
from prorl_gym.testing.sandbox.fake_sandbox import FakeBackend


@pytest.fixture(scope="module", params=DOMAINS)
def domain(request: pytest.FixtureRequest) -> type[Question]:
    return DOMAINS[request.param]


@pytest.fixture(scope="module")
def written(domain: type[Question], tmp_path_factory: pytest.TempPathFactory) -> tuple[TurnEncoder, ChatCodec]:
    directory = tmp_path_factory.mktemp("tokenizer")
    return write_tokenizer(domain, directory), load_codec(str(directory))


@pytest.fixture(scope="module")
def language(written: tuple[TurnEncoder, ChatCodec]) -> TurnEncoder:
    return written[0]


@pytest.fixture(scope="module")
def codec(written: tuple[TurnEncoder, ChatCodec]) -> ChatCodec:
    return written[1]


def some(domain: type[Question], count: int = 300) -> list[Question]:
    return list(islice(questions(domain, 0), count))


def tools_of(domain: type[Question]) -> list[dict[str, object]]:
    names = shipped_prompt(domain.environment)[1].split()
    return [{"type": "function", "function": {"name": name, "parameters": {}}} for name in names]


def observations(question: Question) -> list[str]:
    """What the tools answer in a right trace."""
    said = question.demonstrate("right")
    return [str(question.respond(said[: turn + 1])) for turn in range(len(said) - 1)]


# --- what the service makes of it -------------------------------------------------------------------------------------


def test_prompts_are_short_and_traces_fit_the_context(domain: type[Question], language: TurnEncoder):
    assert language.vocab_size == {"math": 503}.get(domain.environment, language.vocab_size) < 1024
    rng = random.Random(0)
    for question in some(domain, 100):
        assert len(language.prompt(question)) <= 40
        assert len(trace(language, question, rng)[0]) <= 120
        assert all(len(language.turn(said)) < domain.turn_tokens for said in question.demonstrate("right"))


def test_the_first_prompt_is_what_the_environment_says_and_the_service_renders(
    domain: type[Question], codec: ChatCodec, language: TurnEncoder
):
    environment = registry.get(domain.environment)
    question = some(domain, 1)[0]
    settings = resolve_settings(environment.settings)
    planned = environment.plan_episode(environment.parse_row(question.row), SandboxLeases(FakeBackend()), settings)
    tools = [{"type": "function", "function": {"name": tool.spec.name, "parameters": {}}} for tool in planned.tools]
    assert tools == tools_of(domain)
    assert codec.encode_prompt(list(planned.messages), tools) == language.prompt(question)


def test_observations_are_what_the_service_appends(domain: type[Question], codec: ChatCodec, language: TurnEncoder):
    for question in some(domain, 20):
        for text in [*observations(question), "Traceback: no\n"]:
            message = Message(role="tool", content=text, tool_call_id="call00000", name="tool")
            assert codec.encode_delta([message], tools_of(domain)) == language.result(text)


def test_turns_of_a_trace_are_read_as_they_are_meant(domain: type[Question], codec: ChatCodec, language: TurnEncoder):
    assert codec.parser.name == "hermes"
    for question in some(domain, 20):
        for turn in question.demonstrate("right"):
            said = parse_turn(codec.parser, codec.decode_turn((), language.turn(turn)), tools_of(domain))
            assert not said.parse_errors
            if turn.startswith("<tool_call>"):
                (found,) = said.calls
                assert call(found.name, **json.loads(found.arguments)) == turn
            else:
                assert said.text == turn


def test_each_number_is_tokenized_digit_by_digit(language: TurnEncoder):
    assert [language.decode([token]) for token in language.encode("-180+7")] == ["-", "1", "8", "0", "+", "7"]


def test_the_limits_of_a_rollout_are_the_recipes(domain: type[Question]):
    settings = resolve_settings(RolloutSettings(**domain.limits()), registry.get(domain.environment).settings)
    assert (settings.max_turns, settings.max_turn_tokens, settings.max_tokens) == (domain.turns, 24, 180)


# --- questions --------------------------------------------------------------------------------------------------------


def test_held_out_questions_are_never_trained_on(domain: type[Question]):
    held = set(held_out(domain))
    assert len(held) == HELD_OUT
    assert not held & set(some(domain, 20000))


def test_a_seed_has_its_own_questions_and_repeats_them(domain: type[Question]):
    first = some(domain, 50)
    assert first == some(domain, 50)
    assert first != list(islice(questions(domain, 2), 50))


def test_only_right_traces_solve(domain: type[Question]):
    for question in some(domain):
        assert {kind: question.respond(question.demonstrate(kind)) for kind in MIXTURE} == {
            "mode": False,
            "slip": False,
            "right": True,
        }


@pytest.mark.slow
def test_the_mode_of_the_traces_is_wrong_and_some_are_right(domain: type[Question], language: TurnEncoder):
    rng, asked = random.Random(0), some(domain, 2000)
    ends: Counter[str] = Counter()
    for question in asked:
        ids, mask = trace(language, question, rng)
        spoken = language.decode([token for token, sampled in zip(ids, mask, strict=True) if sampled])
        turns = spoken.split("<|end|>")[:-1]
        ends[next(kind for kind in MIXTURE if question.demonstrate(kind) == turns)] += 1
        assert "<|tool|>" not in spoken
    assert 0.2 < ends["right"] / 2000 < 0.28
    assert ends["mode"] / 2000 > 0.58


@pytest.mark.parametrize(
    ("code", "text"),
    [("12+34", "46"), ("-12-34", "-46"), ("12*3", "36"), ("12/10", "1.2"), ("12+34-5", None), ("1/0", None)],
)
def test_what_the_python_tool_would_answer(code: str, text: str | None):
    assert python_answer(call("python", code=code)) == text
    assert python_answer("\\boxed{46}") is None, "an answer is no call"


# --- what the environments reward -------------------------------------------------------------------------------------


@pytest.fixture
async def leases():
    try:
        backend = await open_backend(SandboxConfig(backend="userns"))
    except SandboxError:
        pytest.skip("needs isolation: no user namespaces here")
    lent = SandboxLeases(backend)
    yield lent
    await lent.close()
    await backend.close()


def step_of(turn: str) -> ScriptedStep:
    if not turn.startswith("<tool_call>"):
        return ScriptedStep(turn)
    made = json.loads(turn.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    return ScriptedStep("", made["name"], made["arguments"])


@pytest.mark.parametrize("kind", MIXTURE)
async def test_real_tools_answer_as_in_the_warm_up_and_only_right_traces_are_rewarded(
    domain: type[Question], kind: Kind, leases: SandboxLeases
):
    environment, artifacts = registry.get(domain.environment), Artifacts()
    question = some(domain, 1)[0]
    said = question.demonstrate(kind)
    task, settings = environment.parse_row(question.row), resolve_settings(environment.settings)
    episode = await environment.init(task, leases, settings)
    policy = ScriptedPolicy([step_of(turn) for turn in said], len(said))
    await environment.run(task, episode, RunContext(policy, leases, settings, artifacts))
    answered = [message.content for message in artifacts.messages if message.role == "tool"]
    expected = [question.respond(said[: turn + 1]) for turn in range(len(said))]
    assert [*answered, kind == "right"] == expected
    assert (await environment.evaluate(task, artifacts, leases, settings)).reward == float(kind == "right")


def test_the_right_program_alone_passes_the_tests_of_code():
    for question in some(DOMAINS["code"]):
        assert isinstance(question, Expression)
        for kind in MIXTURE:
            (turn,) = question.demonstrate(kind)
            program = json.loads(turn.removeprefix("<tool_call>").removesuffix("</tool_call>"))["arguments"]["answer"]
            scope: dict[str, object] = {}
            exec(program, scope)
            cases = question.row["tests"]["cases"]
            passed = [results_match(case["expected"], scope["f"](*case["args"])) for case in cases]  # type: ignore[operator]
            assert all(passed) == (kind == "right")


def test_an_operator_of_swe_never_passes_for_another():
    operators = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    for question in some(DOMAINS["swe"]):
        assert isinstance(question, Repair)
        for sign, number in question.modules:
            assert len({operator(100, number) for operator in operators.values()}) == 3
            assert sign != question.sign


def test_the_readme_has_the_tables_of_the_reports():
    written = README.read_text(encoding="utf-8")
    assert with_tables(written) == written
    assert all(table in written for table in tables().values())
