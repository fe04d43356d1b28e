"""What counts as a reward in a verifier's files."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from prorl_gym.environments.taskdir.environment import LOGS, run_verifier
from prorl_gym.environments.taskdir.task_dir_row import TaskDirRow
from prorl_gym.sandbox.protocol import Sandbox

TASK = TaskDirRow.model_validate(
    {"question": "q", "verifier": {"files": [{"path": "/tests/t", "data": ""}], "command": "t", "reward": "file"}}
)


class Left:
    """A sandbox in which the verifier leaves these files of logs."""

    def __init__(self, logs: Mapping[str, str]) -> None:
        self._files = {f"{LOGS}/{name}": text.encode() for name, text in logs.items()}

    async def write_file(self, path: str, data: bytes, mode: int = 0o644) -> None:
        pass

    async def exec(self, command: Sequence[str], **options: Any) -> SimpleNamespace:
        return SimpleNamespace(exit_code=0, timed_out=False)

    async def read_file(self, path: str, *, limit: int) -> bytes:
        if path not in self._files:
            raise FileNotFoundError(path)
        return self._files[path]


@pytest.mark.parametrize(
    ("logs", "expected"),
    [
        ({"reward.txt": "0"}, 0.0),
        ({"reward.txt": "1.0\n"}, 1.0),
        ({"reward.json": '{"reward": 0.25}'}, 0.25),
        ({"reward.json": "0.25"}, 0.25),
        ({"reward.json": '{"score": 1}'}, 1.0),
        ({}, None),
        ({"reward.json": ""}, None),
        ({"reward.json": "true"}, None),
        ({"reward.json": "1e999"}, None),
        ({"reward.json": "7"}, None),
        ({"reward.txt": "1.01"}, None),
        ({"reward.txt": "1e308"}, None),
        ({"reward.json": '{"reward": -0.5}'}, None),
        ({"reward.json": "NaN"}, None),
        ({"reward.json": "1", "reward.txt": "1.0"}, 1.0),
        ({"reward.json": "0.3333333", "reward.txt": "0.33"}, 0.3333333),
        ({"reward.json": "1", "reward.txt": "0"}, None),
        ({"reward.json": "0", "reward.txt": "1"}, None),
        ({"reward.json": "1", "reward.txt": "5"}, None),
        ({"reward.json": "torn", "reward.txt": "1"}, None),
    ],
)
async def test_a_reward_is_a_number_from_nought_to_one_that_nothing_contradicts(
    logs: dict[str, str], expected: float | None
) -> None:
    assert await run_verifier(cast(Sandbox, Left(logs)), TASK, 1.0) == expected
