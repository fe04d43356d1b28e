"""The parts of ``recipes/tiny_dapo`` that need no torch: task, traces, tokenizer, as the service reads them."""

import asyncio
import random
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from tasks import HELD_OUT, Language, Question, held_out, questions, system_prompt, trace, write_tokenizer

from prorl_gym.agents.protocol import Artifacts
from prorl_gym.environments.math.environment import SYSTEM_PROMPT, MathEnvironment
from prorl_gym.inference.chat import Codec, load_codec
from prorl_gym.records import Message

QUESTION = Question(12, "+", 34, "-", 56)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizer")


@pytest.fixture(scope="module")
def language(directory: Path) -> Language:
    return write_tokenizer(directory)


@pytest.fixture(scope="module")
def codec(directory: Path, language: Language) -> Codec:
    return load_codec(str(directory))


TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("python", "finish")]


def test_the_service_accepts_the_template_and_finds_the_form_of_tool_calls(codec: Codec):
    assert codec.parser.name == "hermes"


def test_vocabulary_and_prompt_are_small(language: Language):
    assert language.vocab_size == 503
    assert len(language.prompt(QUESTION)) <= 24


def test_the_system_prompt_is_the_environments_own():
    assert system_prompt() == SYSTEM_PROMPT


def test_the_first_prompt_is_what_the_service_renders(codec: Codec, language: Language):
    messages = [Message(role="system", content=SYSTEM_PROMPT), Message(role="user", content=QUESTION.text)]
    assert codec.first_prompt(messages, TOOLS) == language.prompt(QUESTION)


@pytest.mark.parametrize("value", [46, -46, 0])
def test_a_tool_result_is_what_the_service_appends(codec: Codec, language: Language, value: int):
    message = Message(role="tool", content=str(value), tool_call_id="call00000", name="python")
    assert codec.delta([message], TOOLS) == language.result(value)


def test_a_call_of_a_trace_is_read_as_a_call(codec: Codec, language: Language):
    said = codec.parse(codec.said(language.call("-12+34")), TOOLS)
    assert [(call.name, call.arguments) for call in said.calls] == [("python", '{"code": "-12+34"}')]


@pytest.mark.parametrize(("code", "value"), [("12+34", 46), ("-12-34", -46), ("12+34-5", None), ("12*3", None)])
def test_what_the_tool_would_answer(language: Language, code: str, value: int | None):
    assert language.called(language.call(code)) == value


def test_an_answer_is_no_call(language: Language):
    assert language.called(language.final(46)) is None


def test_each_number_is_tokenized_digit_by_digit(language: Language):
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


def test_the_mode_of_the_traces_is_wrong_and_some_are_right(language: Language):
    rng, asked = random.Random(0), list(islice(questions(0), 2000))
    ends: Counter[str] = Counter()
    for question in asked:
        ids, mask = trace(language, question, rng)
        last = language.decode(ids).rpartition("<|assistant|>")[2]
        ends[{str(question.answer): "right", str(question.halfway): "stop"}.get(last[7:-8], "wrong")] += 1
        assert len(ids) == len(mask)
    assert 0.2 < ends["right"] / 2000 < 0.28
    assert ends["stop"] / 2000 > 0.58


def test_loss_is_on_what_the_assistant_says(language: Language):
    ids, mask = trace(language, QUESTION, random.Random(3))
    spoken = "".join(language.decode([token]) for token, sampled in zip(ids, mask, strict=True) if sampled)
    assert spoken.startswith('<tool_call>{"name": "python", "arguments": {"code": "12+34"}}</tool_call><|end|>')
    assert "<|tool|>" not in spoken


async def test_the_environment_rewards_the_right_answer_alone():
    environment = MathEnvironment()
    task = environment.parse(QUESTION.row)
    rewards = []
    for answer in (QUESTION.answer, QUESTION.halfway):
        artifacts = Artifacts()
        artifacts.answer = f"\\boxed{{{answer}}}"
        async with asyncio.timeout(60):
            rewards.append((await environment.evaluate(task, artifacts, None, None)).reward)  # type: ignore[arg-type]
    assert rewards == [1.0, 0.0]
