"""`prorl-gym prepare swe`: rows of the public collections, from parquet files of their shape to rows of ours."""

import json
from pathlib import Path

import pytest
from test_swe_row import R2E_GYM, SWE_BENCH, SWE_GYM
from typer.testing import CliRunner

from prorl_gym.cli.main import app
from prorl_gym.environments.row_format import read_rows
from prorl_gym.environments.swe.swe_row import parse_swe_row
from prorl_gym.errors import ConfigError

pytestmark = pytest.mark.data

COLLECTIONS = {"swebench": SWE_BENCH, "swegym": SWE_GYM, "r2egym": R2E_GYM}


def run(*arguments: str | Path) -> str:
    """Run the command in this process; its errors are raised."""
    result = CliRunner().invoke(app, ["prepare", *map(str, arguments)], catch_exceptions=True)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("name", sorted(COLLECTIONS))
def test_a_row_means_the_same_after_the_conversion(tmp_path: Path, name: str) -> None:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    source, output = tmp_path / "in.parquet", tmp_path / "out.jsonl"
    parquet.write_table(arrow.Table.from_pylist([COLLECTIONS[name]]), source)
    run("swe", source, "--output", output)
    (row,) = read_rows(output)
    before, after = parse_swe_row(COLLECTIONS[name]), parse_swe_row(row.task)
    assert row.environment == "swe" and row.name == before.id and after.source == name
    for field in ("id", "question", "image", "base_commit", "tests", "gold_patch"):
        assert getattr(after, field) == getattr(before, field), field
    assert {"hints_text", "created_at"}.isdisjoint(row.task)


def test_bad_rows_and_copies_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [
        SWE_BENCH,
        {**SWE_BENCH, "instance_id": "b__b-2", "base_commit": "no commit"},
        SWE_BENCH,
        {**SWE_BENCH, "instance_id": "c__c-3", "patch": ""},
        {**SWE_BENCH, "instance_id": "d__d-4", "FAIL_TO_PASS": "[]"},
        {"instance_id": "e__e-5"},
        SWE_GYM,
    ]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = run("swe", source, "--output", output, "--bare")
    assert "7 rows read, 2 written, 5 left out." in said
    for line in ("2 left out: a field is missing or wrong", "1 left out: no gold patch", "1 left out: no known format"):
        assert line in said
    assert f"its id was there before (the first: {source}:3" in said
    assert [json.loads(line)["id"] for line in output.read_text().splitlines()] == [
        SWE_BENCH["instance_id"],
        SWE_GYM["instance_id"],
    ]


def test_one_format_and_a_limit(tmp_path: Path) -> None:
    source, output = tmp_path / "in.json", tmp_path / "out.jsonl"
    source.write_text(json.dumps([SWE_GYM, SWE_BENCH, {**SWE_BENCH, "instance_id": "f__f-6"}]))
    said = run("swe", source, "--output", output, "--format", "swebench", "--limit", "1", "--agent", "my_agent")
    assert "1 left out: a row of swegym" in said and len(read_rows(output)) == 1
    assert json.loads(output.read_text())["agent_ref"]["name"] == "my_agent"


def test_a_command_that_makes_nothing_leaves_nothing(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"question": "of another kind"}\n')
    with pytest.raises(ConfigError, match="No row was made"):
        run("swe", source, "--output", output)
    with pytest.raises(ConfigError, match="cannot be made from source distributions"):
        run("math", "--from-sdist", "a==1", "--output", output)
    with pytest.raises(ConfigError, match="Nothing to prepare"):
        run("swe", "--output", output)
    assert not output.exists()
