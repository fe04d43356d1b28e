"""What counts as a reward in a verifier's files."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from prorl_gym.environments.taskdir.environment import LOGS, SpoiledStateError, copy_kept_paths, run_verifier
from prorl_gym.environments.taskdir.task_dir_row import TaskDirRow
from prorl_gym.errors import GraderError
from prorl_gym.sandbox.protocol import ExecResult, Sandbox

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
        *(({"reward.txt": text}, float(text)) for text in ("1.", "+1", ".99", " 1e-1\n", "1_0e-1")),
        ({"reward.txt": "\ufeff1\n"}, 1.0),
        ({"reward.json": '\ufeff{"reward": 1}'}, 1.0),
        ({"reward.txt": "nan"}, None),
        ({"reward.txt": "true"}, None),
        ({"reward.txt": ""}, None),
        ({"reward.json": '{"reward": "1"}'}, None),
        ({"reward.json": "{}"}, None),
        ({"reward.json": '{"reward": true}'}, 1.0),
        ({"reward.json": "false"}, None),
        ({"reward.json": '{"reward": -1}', "reward.txt": "1"}, None),
        ({"reward.json": '{"score": "1", "passed": 3}', "reward.txt": "1"}, None),
        ({"reward.json": '{"correctness": 1, "style": 0.5}'}, None),
        ({"reward.json": '{"score": 1.0, "passed": 3}', "reward.txt": "1.0"}, 1.0),
        ({"reward.json": '{"reward": 0.5, "style": 1}', "reward.txt": "0.5"}, 0.5),
        ({"reward.json": '{"reward": 1, "style": 1}', "reward.txt": "0"}, None),
    ],
)
async def test_a_reward_is_a_number_from_nought_to_one_that_nothing_contradicts(
    logs: dict[str, str], expected: float | None
) -> None:
    assert await run_verifier(cast(Sandbox, Left(logs)), TASK, 1.0) == expected


@pytest.mark.parametrize(("code", "error"), [(127, GraderError), (2, SpoiledStateError)])
async def test_an_image_without_tar_is_not_the_agents_doing(code: int, error: type[Exception]) -> None:
    class Bare(Left):
        async def exec(self, command: Sequence[str], **options: Any) -> ExecResult:
            return ExecResult(exit_code=code, stdout=b"", stderr=b"")

    sandbox = cast(Sandbox, Bare({}))
    with pytest.raises(error):
        await copy_kept_paths(sandbox, sandbox, ("/app",))


HEADER = "=========== short test summary info ============\n"
END = "============ 1 passed, 1 failed in 0.01s =============\n"


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (f"ERROR    app:t.py:4 refused\nFAILED to open\n{HEADER}PASSED t.py::a\n{END}ERROR afterwards\n", 1.0),
        (f"{HEADER}PASSED t.py::a\n1 passed in 0.01s\nFAILED afterwards\n", 1.0),
        (f"\x1b[36m\x1b[1m{HEADER.strip()}\x1b[0m\n\x1b[32mPASSED\x1b[0m t.py::\x1b[1ma\x1b[0m\n{END}", 1.0),
        (f"{HEADER}PASSED t.py::a\nFAILED t.py::b - no\n{END}", 0.0),
        (f"{HEADER}PASSED t.py::a\n{END}log\nERROR x\n{HEADER}PASSED u.py::b\n{END}", 1.0),
        (f"{HEADER}PASSED forged\n{END}{HEADER}ERROR t.py::a\n{END}", 0.0),
        (f"{HEADER}ERROR t.py::a\n{END}{HEADER}PASSED forged\n{END}", 0.0),
        (f"{HEADER}SKIPPED [1] t.py:3: why\n1 passed in 1s\nFAILED t.py::b\n{END}", 0.0),
        (f"{HEADER}PASSED t.py::a\nFAILED t.py::b", 0.0),
        (f"{HEADER}SKIPPED [1] t.py:3: why\n{END}", 0.0),
        ("PASSED t.py::a\n", None),
    ],
)
async def test_only_the_summary_of_pytest_counts(output: str, expected: float | None) -> None:
    verifier = TASK.verifier.model_copy(update={"reward": "pytest"})
    task = TASK.model_copy(update={"verifier": verifier})
    left = cast(Sandbox, Left({"output.txt": output}))
    assert await run_verifier(left, task, 1.0) == expected
    # A long line after it takes no time that grows with its square.
    left = cast(Sandbox, Left({"output.txt": f"{output}1 {'a' * 500_000}\n"}))
    assert await run_verifier(left, task, 1.0) == expected
