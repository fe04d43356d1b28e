"""Data sets from files: read row by row, converted, counted, written once and whole."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from prorl_gym.cli.main import app
from prorl_gym.environments import prepare
from prorl_gym.environments.math.environment import MathEnvironment
from prorl_gym.environments.prepare import Skipped
from prorl_gym.environments.prepare.pipeline import ConversionReport, RowWriter, convert_rows, read_dataset
from prorl_gym.errors import ConfigError

ROWS: list[dict[str, Any]] = [{"id": "a", "text": "one\u2028line"}, {"id": "b", "list": [1, {"x": None}]}]


def files_of(folder: Path) -> list[Path]:
    """The same rows in every form that can be read."""
    lines = folder / "a.jsonl"
    lines.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS) + "\n\n", encoding="utf-8")
    array = folder / "b.json"
    array.write_text(json.dumps(ROWS), encoding="utf-8")
    nested = folder / "c.json"
    nested.write_text(json.dumps({"data": ROWS}), encoding="utf-8")
    return [lines, array, nested]


def test_rows_are_the_same_from_every_form_of_json(tmp_path: Path) -> None:
    for path in files_of(tmp_path):
        assert [row for _, row in read_dataset(path)] == ROWS, path
    single = tmp_path / "d.json"
    single.write_text('{"id": "a", "text": "one"}')
    assert [row for _, row in read_dataset(single)] == [{"id": "a", "text": "one"}]


@pytest.mark.data
def test_values_of_parquet_come_out_as_json_has_them(tmp_path: Path) -> None:
    import datetime

    import pyarrow as arrow
    import pyarrow.parquet as parquet

    rows = [
        {"id": str(n), "when": datetime.datetime(2024, 1, 2), "tests": ["x", "y"], "deep": {"n": n}, "raw": b"\xff"}
        for n in range(150)
    ]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    placed = list(read_dataset(tmp_path / "a.parquet"))
    assert [row["id"] for _, row in placed] == [str(n) for n in range(150)]
    assert placed[7][0].endswith("a.parquet[8]")
    expected = {"id": "7", "when": "2024-01-02 00:00:00", "tests": ["x", "y"], "deep": {"n": 7}, "raw": "\ufffd"}
    assert json.loads(json.dumps(placed[7][1])) == expected


@pytest.mark.parametrize(
    "name,data,complaint",
    [
        ("a.csv", b"a,b", "unknown kind of file"),
        ("a.jsonl", b'{"a": 1}\n{', r"a\.jsonl:2: not valid JSON"),
        ("a.jsonl", b"[1]\n", r"a\.jsonl:1: expected a JSON object"),
        ("a.jsonl", b"\xff\n", "is not UTF-8"),
        ("a.json", b"3", "expected an array of rows"),
        ("a.json", b"[" * 100_000, "not valid JSON"),
        ("a.json", b"[1]", r"a\.json\[1\]: expected a JSON object"),
        pytest.param("a.parquet", b"PAR1", "not a parquet file", marks=pytest.mark.data),
        ("missing.jsonl", None, "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, data: bytes | None, complaint: str) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=complaint):
        list(read_dataset(tmp_path / name))


class Sums:
    """A converter for the tests."""

    name = "sums"

    def matches(self, row: Mapping[str, Any]) -> bool:
        return "sum" in row

    def convert(self, row: Mapping[str, Any]) -> Mapping[str, Any] | Skipped:
        if not row["sum"]:
            return Skipped("no sum")
        return {"id": row["id"], "question": row["sum"], "answer": row.get("answer", "2"), **row.get("more", {})}


def test_what_is_left_out_is_counted_by_reason() -> None:
    rows: list[dict[str, Any]] = [
        {"id": "1", "sum": "1+1"},
        {"id": "2", "sum": ""},
        {"id": "1", "sum": "again"},
        {"other": True},
        {"id": "3", "sum": "x", "more": {"unknown_field": 1}},
        {"id": "2", "sum": "2+0"},
        {"id": "4", "sum": ""},
    ]
    report = ConversionReport()
    placed = [(f"f:{number}", row) for number, row in enumerate(rows, 1)]
    made = list(convert_rows(placed, [Sums(), Sums()], MathEnvironment(), report))
    assert [row["id"] for row in made] == ["1", "2"]
    assert (report.read, report.written) == (7, 2)
    assert report.skipped == {
        "no sum": 2,
        "its id was there before": 1,
        "no known format": 1,
        "the environment cannot read it": 1,
    }
    assert (
        report.first_examples["no sum"] == "f:2"
        and "unknown_field" in report.first_examples["the environment cannot read it"]
    )


def test_formats_are_found_by_name() -> None:
    assert [one.name for one in prepare.select_converters("swe", "auto")] == ["r2egym", "swebench", "swegym"]
    assert [one.name for one in prepare.select_converters("swe", "swegym")] == ["swegym"]
    with pytest.raises(ConfigError, match="is no format of swe rows"):
        prepare.select_converters("swe", "swebnch")
    with pytest.raises(ConfigError, match="Did you mean 'swe'"):
        prepare.converters_for("sve")


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with pytest.raises(ZeroDivisionError), RowWriter(path, force=False) as file:
        file.write({"a": 1})
        _ = 1 / 0
    assert list(tmp_path.iterdir()) == []
    with RowWriter(path, force=False) as file:
        file.write({"a": "\u2028"})
        assert not path.exists()
    assert path.read_bytes() == b'{"a": "\\u2028"}\n' and [one.name for one in tmp_path.iterdir()] == ["rows.jsonl"]
    with pytest.raises(ConfigError, match=r"rows\.jsonl exists"):
        RowWriter(path, force=False)
    with RowWriter(path, force=True) as file:
        file.write({"b": 2})
    assert path.read_bytes() == b'{"b": 2}\n'
    with pytest.raises(ConfigError, match="cannot be written"):
        RowWriter(tmp_path / "missing" / "rows.jsonl", force=False)


def test_tasks_without_a_solution_are_counted(tmp_path: Path) -> None:
    tests = json.dumps([{"input": "1", "output": "1"}])
    tasks = [{"problem": "Echo.", "tests": tests, "solutions": ["print(input())"]}, {"problem": "Say.", "tests": tests}]
    given = tmp_path / "in.jsonl"
    given.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    output = str(tmp_path / "out.jsonl")
    done = CliRunner().invoke(app, ["prepare", "code", str(given), "--output", output])
    assert "2 rows read, 2 written, 0 left out.\n  1 of these without a solution" in done.output
    done = CliRunner().invoke(app, ["prepare", "code", str(given), "--limit", "1", "--output", output, "--force"])
    assert "of these" not in done.output and "1 row is in" in done.output
