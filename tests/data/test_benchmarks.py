"""The benchmarks of NeMo Gym that we bring: made of rows in the columns of the published data sets."""

import base64
import json
import pickle
import sys
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from prorl_gym.cli.installation import gym_root
from prorl_gym.cli.main import app
from prorl_gym.data import benchmarks
from prorl_gym.data.benchmarks import BENCHMARKS, Benchmark, benchmark_file
from prorl_gym.data.converters import select_converters
from prorl_gym.environments.stem.environment import StemRow
from prorl_gym.environments.swe.swe_row import parse_swe_row
from prorl_gym.errors import ConfigError

DIFF = "--- a/{0}\n+++ b/{0}\n@@ -1 +1 @@\n-x = 1\n+x = 2\n"


def problem(date: str, **more: Any) -> dict[str, Any]:
    """A row of LiveCodeBench."""
    hidden = [{"input": "5\n", "output": "10\n", "testtype": "stdin"}]
    return {
        "question_title": "Double",
        "question_content": "Read an integer and print its double.",
        "platform": "atcoder",
        "question_id": f"abc-{date}",
        "contest_id": "abc",
        "contest_date": f"{date}T00:00:00",
        "starter_code": "",
        "difficulty": "easy",
        "public_test_cases": json.dumps([{"input": "2\n", "output": "4\n", "testtype": "stdin"}]),
        "private_test_cases": base64.b64encode(zlib.compress(pickle.dumps(json.dumps(hidden)))).decode(),
        "metadata": "{}",
        **more,
    }


def question(number: int, *wrong: str) -> dict[str, Any]:
    """A row of GPQA."""
    one, two, three = wrong or ("gluon", "W boson", "Higgs boson")
    return {
        "Record ID": f"rec{number}",
        "Question": f"Which particle carries force {number}?",
        "Correct Answer": "photon\n",
        "Incorrect Answer 1": one,
        "Incorrect Answer 2": two,
        "Incorrect Answer 3": three,
        "High-level domain": "Physics",
    }


PUBLISHED: dict[str, list[dict[str, Any]]] = {
    "prorl_aime25": [
        {"problem_idx": 1, "problem": "What is $2^9 + 76$?", "answer": 588, "problem_type": ["Algebra"]},
        {"problem_idx": 2, "problem": "How many subsets has a set of 6?", "answer": 64, "problem_type": ["Counting"]},
    ],
    "prorl_gpqa_diamond": [question(1), question(2)],
    "prorl_livecodebench": [problem("2024-07-31"), problem("2024-08-01"), problem("2025-05-31"), problem("2025-06-01")],
    "prorl_swebench_verified": [
        {
            "repo": "pallets/flask",
            "instance_id": "pallets__flask-5014",
            "base_commit": "7ee9ceb71e868944a46e1ff00b506772a53a4f1d",
            "patch": f"diff --git a/src/a.py b/src/a.py\n{DIFF.format('src/a.py')}",
            "test_patch": f"diff --git a/tests/t.py b/tests/t.py\n{DIFF.format('tests/t.py')}",
            "problem_statement": "Require a non-empty name.",
            "hints_text": "",
            "created_at": "2023-03-04T18:36:21Z",
            "version": "2.3",
            "FAIL_TO_PASS": '["tests/t.py::test_empty"]',
            "PASS_TO_PASS": '["tests/t.py::test_name"]',
            "environment_setup_commit": "182ce3dd15dfa3537391c3efaf9c3ff407d134d4",
            "difficulty": "<15 min fix",
        }
    ],
}
"""Rows of each data set with the columns that it has on the hub."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, where NeMo Gym looks for a benchmark's rows."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def prepared(name: str, *options: str) -> tuple[list[dict[str, Any]], str]:
    """Return the rows that the command makes of the published ones, and what it prints."""
    Path("published.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PUBLISHED[name]))
    done = CliRunner().invoke(app, ["prepare", name, "published.jsonl", *options])
    assert done.exit_code == 0, done.output
    return rows_of(benchmark_file(name)), done.output


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_rows_are_written_where_gym_looks_for_them(name: str, folder: Path):
    rows, output = prepared(name)
    assert f"are in benchmarks/{name}/data/{name}.jsonl" in output.replace(" is in ", " are in ")
    assert ("Published are" in output) == (BENCHMARKS[name].size is not None)
    assert {row["agent_ref"]["name"] for row in rows} == {f"{name}_agent"}
    assert {row["environment"] for row in rows} == {BENCHMARKS[name].environment}
    assert all(row["responses_create_params"]["input"][-1]["role"] == "user" for row in rows)


def test_an_existing_file_is_kept_unless_it_is_to_be_replaced(folder: Path):
    prepared("prorl_aime25")
    figures = benchmark_file("prorl_aime25").with_name("prorl_aime25_metrics.json")
    figures.write_text("{}")
    with pytest.raises(ConfigError, match="exists"):
        CliRunner().invoke(app, ["prepare", "prorl_aime25", "published.jsonl"], catch_exceptions=False)
    assert figures.exists()
    prepared("prorl_aime25", "--force")
    assert not figures.exists(), "Gym would compare the new rows with the figures of the old ones, and end"


def test_contests_outside_the_window_are_left_out(folder: Path):
    rows, _ = prepared("prorl_livecodebench")
    assert [row["task"]["id"] for row in rows] == ["abc-2024-08-01", "abc-2025-05-31"]
    assert [case["stdout"] for case in rows[0]["task"]["tests"]["cases"]] == ["4\n", "10\n"]
    assert rows[0]["task"]["time_limit"] == 6.0


def test_swe_bench_rows_name_what_the_official_harness_needs(folder: Path):
    (row,), _ = prepared("prorl_swebench_verified")
    task = parse_swe_row(row["task"])
    assert (task.source, task.id) == ("swebench", "pallets__flask-5014")
    assert task.tests.fail_to_pass == ("tests/t.py::test_empty",)
    prompt = json.dumps(row["responses_create_params"])
    assert "Require a non-empty name." in prompt and "x = 2" not in prompt and "test_empty" not in prompt


def shuffled(row: dict[str, Any]) -> StemRow:
    converter = next(one for one in select_converters("stem") if one.matches(row))
    assert converter.name == "gpqa"
    made = converter.convert(row)
    assert isinstance(made, dict)
    return StemRow.model_validate(made)


@pytest.mark.parametrize("wrong", [(), ("Both A and B", "gluon", "none of the above")], ids=["plain", "of others"])
def test_options_are_in_an_order_of_their_own(wrong: tuple[str, ...]):
    rows = [shuffled(question(number, *wrong)) for number in range(60)]
    assert all(row.shown_options()["ABCD".index(row.right_letter())] == "photon" for row in rows)
    places = Counter(row.right_letter() for row in rows)
    assert set(places) == set("ABCD") and max(places.values()) < 30, places
    assert [shuffled(question(number, *wrong)) for number in range(60)] == rows


def test_a_question_without_all_its_options_is_left_out():
    made = next(one for one in select_converters("stem") if one.name == "gpqa").convert(
        question(1) | {"Correct Answer": ""}
    )
    assert made == "no question or no options"


class Hub:
    """What ``datasets.load_dataset`` was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def load_dataset(self, repository: str, subset: str | None, *, split: str, revision: str | None) -> Any:
        self.asked.append((repository, subset, split, revision))
        return PUBLISHED[next(name for name, one in BENCHMARKS.items() if one.repository == repository)]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Stand-in for the hub: there is no network in tests."""
    fake = Hub()
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=fake.load_dataset))  # pyright: ignore[reportArgumentType]
    return fake


@pytest.mark.parametrize(("name", "benchmark"), BENCHMARKS.items())
def test_gym_prepares_the_same_rows_from_the_hub(name: str, benchmark: Benchmark, folder: Path, hub: Hub):
    from_files, _ = prepared(name)
    prepare: Callable[[], Path] = import_module(f"prorl_gym.gym_root.benchmarks.{name}.prepare").prepare
    assert prepare() == benchmark_file(name), "Gym compares this with the path in its configuration"
    assert hub.asked == [(benchmark.repository, benchmark.subset, benchmark.split, benchmark.revision)]
    assert rows_of(benchmark_file(name)) == from_files


def test_a_data_set_that_cannot_be_loaded_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*asked: Any, **options: Any) -> Any:
        raise RuntimeError("401: gated")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=refuse))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"Idavidrein/gpqa: cannot be loaded \(RuntimeError: 401: gated\)") as caught:
        CliRunner().invoke(app, ["prepare", "prorl_gpqa_diamond"], catch_exceptions=False)
    assert "HF_TOKEN" in caught.value.fix
    assert not benchmark_file("prorl_gpqa_diamond").exists()
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="downloading needs the package"):
        CliRunner().invoke(app, ["prepare", "prorl_gpqa_diamond"], catch_exceptions=False)


@pytest.mark.gym  # which brings `datasets`
def test_the_real_library_loads_a_data_set_of_this_shape(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Of a local directory in the form of the hub's: a table of each subset, named in the card."""
    monkeypatch.setenv("HF_HOME", str(folder / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(folder / "cache"))
    rows = PUBLISHED["prorl_gpqa_diamond"]
    repository = folder / "gpqa"
    repository.mkdir()
    (repository / "diamond.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    card = {"configs": [{"config_name": "gpqa_diamond", "data_files": "diamond.jsonl"}]}
    (repository / "README.md").write_text(f"---\n{yaml.safe_dump(card)}---\n")
    local = replace(BENCHMARKS["prorl_gpqa_diamond"], repository=str(repository))
    assert [row for _, row in benchmarks.read_benchmark(local, ())] == rows


@pytest.mark.parametrize("name", BENCHMARKS)
def test_what_gym_reads_of_a_benchmark_agrees(name: str):
    folder = gym_root() / "benchmarks" / name
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    agent = config[f"{name}_agent"]["responses_api_agents"]["prorl_rollout_agent"]
    (dataset,) = agent["datasets"]
    assert (agent["environment"], agent["evaluation"]) == (BENCHMARKS[name].environment, True)
    assert dataset["jsonl_fpath"] == str(benchmark_file(name))
    assert (gym_root() / dataset["prepare_script"]).exists()
    manifest = yaml.safe_load((folder / "manifest.yaml").read_text(encoding="utf-8"))
    assert (manifest["name"], manifest["datasets"]) == (name, [dataset])
    relay = yaml.safe_load((folder / "environment_server.yaml").read_text(encoding="utf-8"))
    (server,) = relay.values()
    assert server["environment_servers"]["legacy_agent"]["agent_server"]["name"] == f"{name}_agent"
    hidden = gym_root().with_name("gym_root_before_0_7") / f"benchmarks/{name}/environment_server.yaml"
    assert yaml.safe_load(hidden.read_text(encoding="utf-8")) is None


def test_no_benchmark_is_forgotten():
    assert {folder.name for folder in (gym_root() / "benchmarks").iterdir()} == set(BENCHMARKS)
