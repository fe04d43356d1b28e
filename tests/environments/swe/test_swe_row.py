"""Rows of four formats: read as they are published, refused with the field's name when they are wrong."""

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_gym.environments.playback import task_text
from prorl_gym.environments.swe.swe_row import git_diff, parse_swe_row
from prorl_gym.errors import FailureKind, TaskError
from tests.environments.swe.mini import row

SWE_BENCH: dict[str, Any] = {
    "repo": "astropy/astropy",
    "instance_id": "astropy__astropy-12907",
    "base_commit": "d16bfe05a744909de4b27f5875fe0d4ed41ce607",
    "patch": "diff --git a/astropy/x.py b/astropy/x.py\n",
    "test_patch": "diff --git a/astropy/tests/test_x.py b/astropy/tests/test_x.py\n",
    "problem_statement": "Separability is wrong.\n",
    "hints_text": "",
    "created_at": "2022-03-03T15:14:54Z",
    "version": "4.3",
    "FAIL_TO_PASS": '["a.py::test_a", "b.py::test_b[x y]"]',
    "PASS_TO_PASS": "[]",
    "environment_setup_commit": "298ccb478e6bf092953bca67a3d29dc6c35f6752",
    "difficulty": "15 min - 1 hour",
}
SWE_GYM: dict[str, Any] = {
    **{key: value for key, value in SWE_BENCH.items() if key not in ("environment_setup_commit", "difficulty")},
    "repo": "getmoto/moto",
    "instance_id": "getmoto__moto-5752",
    "FAIL_TO_PASS": ["tests/test_ssm/test_ssm.py::test_x", "tests/it's.py::test_y"],
    "PASS_TO_PASS": ["tests/test_ssm/test_ssm.py::test_z"],
}
R2E_GYM: dict[str, Any] = {
    "repo_name": "pillow",
    "docker_image": "namanjain12/pillow_final:1234567890abcdef1234567890abcdef12345678",
    "commit_hash": "1234567890abcdef1234567890abcdef12345678",
    "parsed_commit_content": json.dumps(
        {
            "file_diffs": [
                {"header": {"file": {"path": "src/a.py"}}, "old_file_content": "a\n", "new_file_content": "b"},
                {"header": {"file": {"path": "new.py"}}, "old_file_content": "", "new_file_content": "n\n"},
                {"header": {"file": {"path": "same.py"}}, "old_file_content": "a", "new_file_content": "a"},
                {"header": None},
            ],
            "old_commit_hash": "0" * 40,
        }
    ),
    "execution_result_content": json.dumps(
        {"test_file_names": ["test_1.py"], "test_file_codes": ["def test(): pass\n"], "new_commit_res_stdout": "..."}
    ),
    "expected_output_json": json.dumps(
        {"T.\u001b[1mtest_a\u001b[0m": "PASSED", "T.test_b - why": "PASSED", "c": "FAILED"}
    ),
    "problem_statement": "[ISSUE] It breaks.",
    "modified_files": ["src/a.py"],
    "prompt": "not for the agent",
}


def test_swe_bench():
    task = parse_swe_row(SWE_BENCH)
    assert (task.id, task.source, task.workdir) == ("astropy__astropy-12907", "swebench", "/testbed")
    assert task.image == "docker://swebench/sweb.eval.x86_64.astropy_1776_astropy-12907:latest"
    assert task.base_commit == SWE_BENCH["base_commit"]
    assert task.tests.fail_to_pass == ("a.py::test_a", "b.py::test_b[x y]")
    assert (task.tests.pass_to_pass, task.tests.parser, task.tests.command) == ((), "swebench", "")
    assert (task.tests.patch, task.gold_patch) == (SWE_BENCH["test_patch"], SWE_BENCH["patch"])
    assert task.question == task_text(SWE_BENCH) + "\n" == "Separability is wrong.\n"
    assert task.raw is SWE_BENCH
    assert parse_swe_row({**SWE_BENCH, "FAIL_TO_PASS": ["x"], "docker_image": "/images/mine"}).image == "/images/mine"


@pytest.mark.parametrize("without", ["nothing", "version"])
def test_swe_gym(without: str):
    task = parse_swe_row({key: value for key, value in SWE_GYM.items() if key != without})
    assert (task.id, task.source, task.tests.parser) == ("getmoto__moto-5752", "swegym", "pytest")
    assert task.image == "docker://xingyaoww/sweb.eval.x86_64.getmoto_s_moto-5752:latest"
    assert shlex.split(task.tests.command)[-2:] == ["tests/test_ssm/test_ssm.py", "tests/it's.py"]


def test_r2e_gym(tmp_path: Path):
    task = parse_swe_row(R2E_GYM)
    assert (task.id, task.source, task.base_commit) == ("pillow__1234567890ab", "r2egym", "")
    assert task.image == f"docker://{R2E_GYM['docker_image']}"
    assert dict(task.tests.files) == {"r2e_tests/test_1.py": "def test(): pass\n"}
    assert (task.tests.fail_to_pass, task.tests.pass_to_pass) == (("T.test_a", "T.test_b"), ())
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a.py").write_text("a\n")
    subprocess.run(["git", "apply"], input=task.gold_patch.encode(), cwd=tmp_path, check=True)
    assert {path.name: path.read_text() for path in tmp_path.rglob("*.py")} == {"a.py": "b", "new.py": "n\n"}
    as_objects = {key: json.loads(R2E_GYM[key]) for key in R2E_GYM if str(R2E_GYM[key]).startswith("{")}
    assert parse_swe_row({**R2E_GYM, **as_objects}).tests == task.tests


def test_r2e_gym_without_test_texts_takes_those_of_the_image():
    plan = parse_swe_row({**R2E_GYM, "execution_result_content": "{}"}).tests
    assert (dict(plan.files), plan.build) == ({}, "cp -r /r2e_tests r2e_tests")


def test_generic():
    task = parse_swe_row(
        row(archive="", path="/srv/tree.tar.gz", sha256="0" * 64, workdir="/opt/my-code", base_commit="1" * 40)
    )
    assert (task.id, task.source, task.workdir, task.base_commit) == ("t1", "generic", "/opt/my-code", "1" * 40)
    assert (task.path, task.sha256) == ("/srv/tree.tar.gz", "0" * 64)
    assert (task.tests.command, task.tests.seconds) == ("true", 300.0)
    assert parse_swe_row(row(patch="+x")).gold_patch == parse_swe_row(row(patch="+x\n")).gold_patch == "+x\n"


def _without(base: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in base.items() if name != key}


TESTS = row()["tests"]


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (_without(SWE_BENCH, "FAIL_TO_PASS"), "required key 'FAIL_TO_PASS' is missing"),
        (_without(SWE_BENCH, "base_commit"), "required key 'base_commit' is missing"),
        ({**SWE_BENCH, "FAIL_TO_PASS": "[]"}, "'FAIL_TO_PASS'"),
        ({**SWE_BENCH, "FAIL_TO_PASS": "[" * 100_000}, "'FAIL_TO_PASS' is wrong: is text, but no JSON"),
        ({**SWE_BENCH, "PASS_TO_PASS": 3}, "'PASS_TO_PASS'"),
        ({**SWE_BENCH, "base_commit": "--upload-pack=x"}, "'base_commit'"),
        (_without(R2E_GYM, "commit_hash"), "'commit_hash'"),
        ({**R2E_GYM, "expected_output_json": "{}"}, "'expected_output_json'"),
        ({**R2E_GYM, "expected_output_json": '{"a": "FAILED"}'}, "names no test that passes"),
        (row(patch_="x"), "unknown key 'patch_'"),
        (row(question=""), "'question'"),
        (_without(row(), "tests"), "required key 'tests' is missing"),
        (row(tests={**TESTS, "comand": "x"}), "unknown key 'tests.comand'"),
        (row(tests={**TESTS, "parser": "swebench"}), "'tests.parser'"),
        (row(tests={**TESTS, "fail_to_pass": []}), "'tests.fail_to_pass'"),
        (row(tests={**TESTS, "files": {"../x": ""}}), "'tests.files"),
        (row(tests={**TESTS, "files": {"/x": ""}}), "'tests.files"),
        (row(tests={**TESTS, "removed": [".git/x"]}), "'tests.removed"),
        (row(workdir="testbed"), "'workdir'"),
        (row(workdir="/"), "'workdir'"),
        (row(workdir="/a/../b"), "'workdir'"),
        (row(archive="?"), "'archive' is wrong: must be base64 of a tar.gz"),
        (row(archive="AAAA", path="/x", sha256="0" * 64), "exclude each other"),
        (row(path="/x"), "'path' and 'sha256' belong together"),
        (row(path="x", sha256="0" * 64), "'path'"),
        (row(base_commit="main"), "'base_commit'"),
    ],
)
def test_bad_row_reports_what_is_wrong(bad: dict[str, Any], named: str):
    with pytest.raises(TaskError) as caught:
        parse_swe_row(bad)
    assert caught.value.kind is FailureKind.BAD_ROW
    assert named in caught.value.what
    assert str(bad.get("id") or bad.get("instance_id") or bad.get("docker_image")) in caught.value.what
    assert len(str(caught.value)) < 1000


@settings(max_examples=50, deadline=None)
@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3)),
    st.data(),
)
def test_a_wrong_value_of_a_field_is_a_bad_row_or_harmless(value: Any, data: Any):
    base = data.draw(st.sampled_from([SWE_BENCH, R2E_GYM, row(archive="")]))
    key = data.draw(st.sampled_from(sorted(base)))
    try:
        parse_swe_row({**base, key: value})
    except TaskError as error:
        assert error.kind is FailureKind.BAD_ROW


def test_text_difference_of_files_that_come_go_and_have_no_end(tmp_path: Path):
    cases = {"a": ("x\ny", "x\nz"), "b": ("", "n"), "c": ("o\n", ""), "d": ("1\u2028\n2\n", "1\u2028\n3\n")}
    for name, (old, _) in cases.items():
        if old:
            (tmp_path / name).write_text(old)
    patch = "".join(git_diff(name, old, new) for name, (old, new) in cases.items())
    subprocess.run(["git", "apply"], input=patch.encode(), cwd=tmp_path, check=True)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "x\nz", "b": "n", "d": "1\u2028\n3\n"}
