"""Every example row, played as the demo plays it; only the tools' answers are made up here."""

import json

import pytest
from oracle_play import TOKENIZERS, loaded, playing, session

from prorl_gym.environments.playback import fill_step, gold_steps, wrong_steps
from prorl_gym.oracle.oracle_policy import example_files, load_rows
from prorl_gym.records import Message

ROWS = load_rows(example_files())
PROMPTS = [
    json.loads(line)["responses_create_params"]
    for file in example_files()
    for line in file.read_text(encoding="utf-8").splitlines()
]
OBSERVATION = 'a first line\n{"x": "<|im_end|>"}'


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("solve_rate", [0.0, 1.0])
async def test_rows_are_played_turn_by_turn(name, solve_rate):
    codec = loaded(name)
    async with playing(codec, ROWS, solve_rate=solve_rate) as pool:
        for number, prompt in enumerate(PROMPTS):
            messages = [Message(**message) for message in prompt["input"]]
            tools = [
                {"type": "function", "function": {key: tool[key] for key in ("name", "description", "parameters")}}
                for tool in prompt["tools"]
            ]
            row = ROWS.find(messages[-1].content)
            plan = gold_steps(row.environment, row.task) if solve_rate else wrong_steps(row.environment, row.task, 3)
            one = session(pool, codec, f"row-{number}")
            turn = await one.start_conversation(messages, tools)
            for step in plan[:-1]:
                check(turn, step)
                turn = await one.respond([Message(role="tool", content=OBSERVATION, name=step.tool)])
            check(turn, plan[-1])
            (segment,) = one.segments()
            assert len(segment.generations) == len(plan)


def check(turn, step):
    expected = fill_step(step, OBSERVATION)
    assert turn.parse_errors == ()
    assert turn.text.removeprefix("Let me think. ").strip() == expected.text.strip()
    if step.tool is None:
        assert turn.tool_calls == ()
    else:
        (call,) = turn.tool_calls
        assert (call.name, json.loads(call.arguments)) == (step.tool, expected.arguments or {})
