"""Runs in a worker process: the harness of SWE-bench writes the test script of a row and reads the log of its run.

The package is the authority on its rows: commands, parser and report are its own. Releases before 5 contain each
repository's commands and parser; from 5 on a row has ``eval_script``, ``log_parser`` and ``eval_type``. It runs in a
process of its own because importing it takes seconds and much memory, and its parsers read hostile text.
"""

import importlib
import tempfile
from typing import Any

# A worker may write no file, but the package needs the path of a writable directory at import.
tempfile.tempdir = "/tmp"

_TESTBED = "testbed"


def call(body: dict[str, Any]) -> dict[str, Any]:
    """Serve one request: ``{"row"}`` for the script, ``{"row", "log", "exit_code"}`` for the report on a log file.

    Raises ``LookupError``: the row lacks fields that this release needs; the message names them.
    """
    spec = _test_spec(body["row"])
    if "log" not in body:
        return {"script": spec.eval_script}
    log, exit_code = body["log"], body["exit_code"]
    grading = importlib.import_module("swebench.harness.grading")
    prediction = {"instance_id": spec.instance_id, "model_name_or_path": "", "model_patch": "applied"}
    report = grading.get_eval_report(spec, prediction, log, include_tests_status=True)[spec.instance_id]
    found, readable = grading.get_logs_eval(spec, log)
    tests = report.get("tests_status", {})
    repaired = tests.get("FAIL_TO_PASS", {}).get("success", ())
    return {
        # Releases before 5 count a test that is skipped neither as repaired nor as failed.
        "resolved": bool(report["resolved"]) and len(repaired) == len(spec.FAIL_TO_PASS),
        "readable": bool(readable and report["patch_successfully_applied"]),
        "tests": tests,
        # A test command that fails although no test failed did not write this log.
        "contradiction": exit_code != 0 and not {"FAILED", "ERROR"} & set(found.values()),
    }


def _test_spec(row: dict[str, Any]) -> Any:
    try:
        scripts = importlib.import_module("swebench.harness.test_spec.create_scripts")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("swebench.harness."):
            raise
        missing = [name for name in ("eval_script", "log_parser", "eval_type") if not row.get(name)]
        if missing:
            needs = f"the row has no {', '.join(missing)}, which this release of swebench needs"
            raise LookupError(needs) from None
        return importlib.import_module("swebench.harness.utils").make_test_spec({"image": "", **row})
    # A release before 5. Its own ``make_test_spec`` would fetch requirements from the network.
    constants = importlib.import_module("swebench.harness.constants")
    specs = constants.MAP_REPO_VERSION_TO_SPECS.get(row["repo"], {}).get(row["version"])
    if specs is None:
        raise LookupError(f"swebench has no version {row['version']} of {row['repo']}")
    script = scripts.make_eval_script_list(row, specs, _TESTBED, f"/{_TESTBED}", row["base_commit"], row["test_patch"])
    spec = importlib.import_module("swebench.harness.test_spec.test_spec")
    return spec.TestSpec(
        instance_id=row["instance_id"],
        repo=row["repo"],
        version=row["version"],
        repo_script_list=[],
        eval_script_list=script,
        env_script_list=[],
        arch="x86_64",
        FAIL_TO_PASS=row["FAIL_TO_PASS"],
        PASS_TO_PASS=row["PASS_TO_PASS"],
        language=constants.MAP_REPO_TO_EXT[row["repo"]],
        docker_specs={},
        namespace=None,
    )
