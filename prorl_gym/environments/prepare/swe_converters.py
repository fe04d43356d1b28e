"""Converters of SWE collections: rows are kept as published, without the columns that a rollout does not need."""

from collections.abc import Mapping, Sequence
from typing import Any

from prorl_gym.environments.prepare import Converter, UnusableRowError
from prorl_gym.environments.swe.swe_row import Source, parse_swe_row
from prorl_gym.errors import TaskError

_SWE_BENCH = (
    *("instance_id", "repo", "version", "base_commit", "environment_setup_commit", "problem_statement", "patch"),
    *("test_patch", "FAIL_TO_PASS", "PASS_TO_PASS", "docker_image", "image_name"),
)
_R2E_GYM = (
    *("instance_id", "docker_image", "repo_name", "commit_hash", "problem_statement", "parsed_commit_content"),
    *("execution_result_content", "expected_output_json"),
)


def _converter(name: Source, fields: Sequence[str], *required_fields: frozenset[str]) -> Converter:
    """Return the converter of one collection.

    Args:
        name: of the collection.
        fields: columns that are kept, where a row has them.
        required_fields: a row of the collection has a value in each column of one of these sets.
    """

    def matches(row: Mapping[str, Any]) -> bool:
        return any(all(row.get(name) not in (None, "") for name in names) for names in required_fields)

    def read(row: Mapping[str, Any]) -> Mapping[str, Any]:
        kept = {name: row[name] for name in fields if row.get(name) is not None}
        try:
            task = parse_swe_row(kept)
        except TaskError:
            raise UnusableRowError("a field is missing or wrong") from None
        if task.source != name:
            raise UnusableRowError(f"a row of {task.source}")
        if not task.gold_patch.strip():
            raise UnusableRowError("no gold patch")
        return {"id": task.id, **kept}

    return Converter(name, matches, read)


CONVERTERS = (
    _converter("r2egym", _R2E_GYM, frozenset({"expected_output_json", "docker_image"})),
    _converter("swebench", _SWE_BENCH, frozenset({"instance_id", "test_patch", "environment_setup_commit"})),
    _converter("swegym", _SWE_BENCH, frozenset({"instance_id", "test_patch", "repo"})),
)
