"""The parts of ``recipes/tiny_dapo`` that need no torch: task, traces, tokenizer, as the service reads them."""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from tasks import HELD_OUT, Question, TurnEncoder, held_out, questions, system_prompt, trace, write_tokenizer

from prorl_gym.agents.protocol import Artifacts
from prorl_gym.environments.math.environment import SYSTEM_PROMPT, MathEnvironment, MathGrader
from prorl_gym.environments.worker_pool import WorkerPool
from prorl_gym.inference.tokens.chat_codec import ChatCodec
from prorl_gym.inference.tokens.template_check import load_codec
from prorl_gym.records import Message

QUESTION = Question(12, "+", 34, "-", 56)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizer")


@pytest.fixture(scope="module")
def language(directory: Path) -> TurnEncoder:
    return write_tokenizer(directory)


@pytest.fixture(scope="module")
def codec(directory: Path, language: TurnEncoder) -> ChatCodec:
    return load_codec(str(directory))


TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("python", "finish")]


def test_the_service_accepts_the_template_and_finds_the_form_of_tool_calls(codec: ChatCodec):
    assert codec.parser.name == "hermes"


def test_vocabulary_and_prompt_are_small(language: TurnEncoder):
    assert language.vocab_size == 503
    assert len(language.prompt(QUESTION)) <= 24


def test_the_system_prompt_is_the_environments_own():
    assert system_prompt() == SYSTEM_PROMPT


def test_the_first_prompt_is_what_the_service_renders(codec: ChatCodec, language: TurnEncoder):
    messages = [Message(role="system", content=SYSTEM_PROMPT), Message(role="user", content=QUESTION.text)]
    assert codec.encode_prompt(messages, TOOLS) == language.prompt(QUESTION)


@pytest.mark.parametrize("value", [46, -46, 0])
def test_a_tool_result_is_what_the_service_appends(codec: ChatCodec, language: TurnEncoder, value: int):
    message = Message(role="tool", content=str(value), tool_call_id="call00000", name="python")
    assert codec.encode_delta([message], TOOLS) == language.result(value)


def test_a_call_of_a_trace_is_read_as_a_call(codec: ChatCodec, language: TurnEncoder):
    said = codec.parse_turn(codec.decode_turn(language.call("-12+34")), TOOLS)
    assert [(call.name, call.arguments) for call in said.calls] == [("python", '{"code": "-12+34"}')]


@pytest.mark.parametrize(("code", "value"), [("12+34", 46), ("-12-34", -46), ("12+34-5", None), ("12*3", None)])
def test_what_the_tool_would_answer(language: TurnEncoder, code: str, value: int | None):
    assert language.tool_answer(language.call(code)) == value


def test_an_answer_is_no_call(language: TurnEncoder):
    assert language.tool_answer(language.final(46)) is None


def test_each_number_is_tokenized_digit_by_digit(language: TurnEncoder):
    assert [language.decode([token]) for token in language.encode("-180+7")] == ["-", "1", "8", "0", "+", "7"]


def test_no_question_is_answered_by_luck():
    for question in islice(questions(0), 2000):
        other = question.halfway + question.c if question.second == "-" else question.halfway - question.c
        assert question.answer not in (question.halfway, other)


def test_held_out_questions_are_never_trained_on():
    held = set(held_out())
    assert len(held) == HELD_OUT
    assert not held & set(islice(questions(0), 20000))


def test_a_seed_has_its_own_questions_and_repeats_them():
    first = list(islice(questions(1), 50))
    assert first == list(islice(questions(1), 50))
    assert first != list(islice(questions(2), 50))


def test_the_mode_of_the_traces_is_wrong_and_some_are_right(language: TurnEncoder):
    rng, asked = random.Random(0), list(islice(questions(0), 2000))
    ends: Counter[str] = Counter()
    for question in asked:
        ids, mask = trace(language, question, rng)
        last = language.decode(ids).rpartition("<|assistant|>")[2]
        ends[{str(question.answer): "right", str(question.halfway): "stop"}.get(last[7:-8], "wrong")] += 1
        assert len(ids) == len(mask)
    assert 0.2 < ends["right"] / 2000 < 0.28
    assert ends["stop"] / 2000 > 0.58


def test_loss_is_on_the_tokens_of_the_assistant(language: TurnEncoder):
    ids, mask = trace(language, QUESTION, random.Random(3))
    spoken = "".join(language.decode([token]) for token, sampled in zip(ids, mask, strict=True) if sampled)
    assert spoken.startswith('<tool_call>{"name": "python", "arguments": {"code": "12+34"}}</tool_call><|end|>')
    assert "<|tool|>" not in spoken


@pytest.fixture
def workers() -> Iterator[WorkerPool]:
    pool = WorkerPool("prorl_gym.environments.math.answer_equality:grade")
    yield pool
    pool.close()


async def test_the_environment_rewards_the_right_answer_alone(workers: WorkerPool):
    environment = MathEnvironment(MathGrader(workers))
    task = environment.parse_row(QUESTION.row)
    rewards = []
    for answer in (QUESTION.answer, QUESTION.halfway):
        artifacts = Artifacts()
        artifacts.answer = f"\\boxed{{{answer}}}"
        async with asyncio.timeout(60):
            rewards.append((await environment.evaluate(task, artifacts, None, None)).reward)  # type: ignore[arg-type]
    assert rewards == [1.0, 0.0]
