"""Reading files of rows."""

from pathlib import Path

import pytest

from prorl_gym.environments.row_format import read_rows
from prorl_gym.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    path = folder / "rows.jsonl"
    path.write_text(text, encoding="utf-8")
    return path


def test_both_forms_are_read(tmp_path: Path):
    gym = '{"responses_create_params": {}, "environment": "math", "task": {"id": "a"}}'
    rows = read_rows(write(tmp_path, f'{gym}\n\n{{"question": "?"}}\n'))
    assert [(row.environment, row.name) for row in rows] == [("math", "a"), (None, f"{tmp_path}/rows.jsonl:3")]
    assert rows[1].task == {"question": "?"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "rows.jsonl: holds no rows"),
        ("{}\n{", "rows.jsonl:2: not valid JSON"),
        ("[" * 100_000, "rows.jsonl:1: not valid JSON"),
        ("[]", "rows.jsonl:1: expected a JSON object"),
        ('{"responses_create_params": {}}', "rows.jsonl:1: 'task' is missing"),
    ],
)
def test_bad_file_is_named(tmp_path: Path, text: str, message: str):
    with pytest.raises(ConfigError) as caught:
        read_rows(write(tmp_path, text))
    assert message in str(caught.value)
    assert str(caught.value).count("\n") == 1


def test_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"none\.jsonl: cannot be read"):
        read_rows(tmp_path / "none.jsonl")


def test_a_row_as_the_service_takes_it_is_read(tmp_path: Path):
    """Environment and task, as ``submit`` takes them and as a scaffolded environment's rows are."""
    (row,) = read_rows(write(tmp_path, '{"environment": "math", "task": {"id": "a", "answer": "2"}}'))
    assert (row.environment, row.name, row.task) == ("math", "a", {"id": "a", "answer": "2"})
