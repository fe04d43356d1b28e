"""What counts as a reward in a verifier's files."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from task_directories import HARBOR, write_task

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
        ({}, None),
        ({"reward.json": ""}, None),
        ({"reward.txt": "nan"}, None),
        ({"reward.txt": "1.01"}, None),
        ({"reward.json": '{"score": 1}'}, 1.0),
        ({"reward.json": "1", "reward.txt": "1.0"}, 1.0),
        ({"reward.json": "0.3333333", "reward.txt": "0.33"}, 0.3333333),
        ({"reward.json": "1", "reward.txt": "0"}, None),
        ({"reward.json": "0", "reward.txt": "1"}, None),
        ({"reward.json": "1", "reward.txt": "5"}, None),
        ({"reward.json": "torn", "reward.txt": "1"}, None),
        ({"reward.json": '{"reward": -1}', "reward.txt": "1"}, None),
        ({"reward.json": '{"score": "1", "passed": 3}', "reward.txt": "1"}, None),
        ({"reward.json": '{"correctness": 1, "style": 0.5}'}, None),
        ({"reward.json": '{"score": 1.0, "passed": 3}', "reward.txt": "1.0"}, 1.0),
        ({"reward.json": '{"reward": 0.5, "style": 1}', "reward.txt": "0.5"}, 0.5),
        ({"reward.json": '{"reward": 1, "style": NaN}'}, None),
    ],
)
async def test_a_reward_is_a_number_from_nought_to_one_that_nothing_contradicts(
    logs: dict[str, str], expected: float | None
) -> None:
    assert await run_verifier(cast(Sandbox, Left(logs)), TASK, 1.0) == expected


BOM = "\ufeff"
NUMBERS = [
    "0",
    "1.",
    "+1",
    ".99",
    "-0.5",
    "1e-1",
    "1_0e-1",
    "NaN",
    "1e999",
    "9" * 400,
    "7",
    "true",
    "null",
    '"1"',
    "[1]",
]
FORMS = ["X", "", "{}", "[", '{"reward": X}', '{"reward": X, "style": Y}', '{"score": X}', '{"a": X, "b": Y}']


@pytest.fixture(scope="module")
def harbor_task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task beside the logs of its verifier."""
    place = tmp_path_factory.mktemp("harbor")
    (place / "verifier").mkdir()
    return write_task(place / "sum", HARBOR)


@pytest.mark.oracles
@pytest.mark.slow
@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    file=st.sampled_from(["reward.txt", "reward.json"]),
    form=st.sampled_from(FORMS) | st.sampled_from(FORMS) | st.text(alphabet='01.e+-_ "{}:\xa0', max_size=6),
    numbers=st.tuples(st.sampled_from(NUMBERS), st.sampled_from(NUMBERS)),
    around=st.tuples(st.sampled_from(["", BOM, " "]), st.sampled_from(["", "\n", "\r\n \t", "x"])),
)
def test_a_reward_is_read_as_harbor_reads_it(
    file: str, form: str, numbers: tuple[str, str], around: tuple[str, str], oracles: Any, harbor_task: Path
) -> None:
    text = form.replace("X", numbers[0]).replace("Y", numbers[1]).join(around)
    log = harbor_task.parent / "verifier" / file
    log.write_text(text.removeprefix(BOM), encoding="utf-8", newline="")
    said = oracles(ask="reward", task=str(harbor_task), logs=str(harbor_task.parent)).get("answer", {})
    log.unlink()
    rewards = said.get("rewards", {})
    expected = rewards.get("reward", next(iter(rewards.values()), None) if len(rewards) == 1 else None)
    if file == "reward.json":  # a departure: a number alone counts there, too
        with suppress(ValueError):
            bare = json.loads(text.removeprefix(BOM))
            expected = bare if isinstance(bare, int | float) and not isinstance(bare, bool) else expected
    # Departures: a byte-order mark is no part of a text, and a reward is from 0 to 1.
    expected = expected if expected is not None and 0 <= expected <= 1 else None
    assert asyncio.run(run_verifier(cast(Sandbox, Left({file: text})), TASK, 1.0)) == expected


@pytest.mark.parametrize(("code", "error"), [(127, GraderError), (2, SpoiledStateError)])
async def test_an_image_without_tar_is_not_the_agents_doing(code: int, error: type[Exception]) -> None:
    class Bare(Left):
        async def exec(self, command: Sequence[str], **options: Any) -> ExecResult:
            return ExecResult(exit_code=code, stdout=b"", stderr=b"")

    sandbox = cast(Sandbox, Bare({}))
    with pytest.raises(error):
        await copy_kept_paths(sandbox, sandbox, ("/app",))


HEADER = "=========== short test summary info ============\n"
END = "============ 2 passed in 0.01s =============\n"


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
        (f"{HEADER}PASSED t.py::a\nSUBFAILED(b=1) t.py::a - no\n=== 1 failed, 1 passed in 0.01s ===\n", 0.0),
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
