"""Task directories are read as Harbor itself reads and plays them (``.ci/oracles``), or refused by name."""

import json
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from task_directories import HARBOR, write_task

from prorl_gym.data.task_layouts import read_task
from prorl_gym.environments.taskdir.container import ImportOptions
from prorl_gym.errors import ConfigError

pytestmark = [pytest.mark.oracles, pytest.mark.slow]

Oracles = Callable[..., dict[str, Any]]
Reading = dict[str, Any]
TEXT = st.sampled_from(
    ["", "x", "root", "0", "/srv", "/a/../b", "1.5G", "2g", " 64M", "512K", "1T", "${X}", "${X:-d}", "a'b"]
)
PLAIN = {
    "integer": st.sampled_from([0, 1, 64, 4096, -1]),
    "number": st.sampled_from([0.0, 0.5, 30, 600.0, 7200.0, 7201.0, -1.0, float("inf"), float("nan")]),
    "boolean": st.booleans(),
    "string": TEXT,
}
SECTIONS = ("agent", "verifier", "environment", "solution")
OF_OLD = {  # fields that Harbor renames, and some that it does not know
    "version": st.sampled_from(["1.0", "1.4", "2.0"]),
    "environment.memory": TEXT | PLAIN["integer"],
    "environment.storage": TEXT,
    "agent.env": st.just({"A": "1"}),
    "agent.environment_mode": st.just("shared"),
    "solution.timeout_sec": st.just(1.0),
    "verifier.command": st.just("true"),
    "unheard_of": st.just(1),
}


def values(schema: Mapping[str, Any], all_: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """Return values that a JSON schema of pydantic allows, ``null`` apart, which TOML does not have."""
    if "$ref" in schema:
        return values(all_[schema["$ref"].rpartition("/")[2]], all_)
    if "anyOf" in schema:
        return st.one_of([values(one, all_) for one in schema["anyOf"] if one != {"type": "null"}])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if schema.get("type") == "array":
        return st.lists(values(schema["items"], all_), max_size=2)
    if "properties" in schema:
        parts = {name: values(part, all_) for name, part in schema["properties"].items()}
        needed = {name: parts.pop(name) for name in schema.get("required", ())}
        return st.fixed_dictionaries(needed, optional=dict(list(parts.items())[:3]))
    if schema.get("type") == "object":
        inner = schema.get("additionalProperties")
        held = values(inner, all_) if isinstance(inner, dict) else TEXT
        return st.dictionaries(st.sampled_from(["A", "B_C", "D-E"]), held, max_size=2)
    return PLAIN[schema["type"]]


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {toml(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value) if isinstance(value, str | bool) else repr(value)


def toml_lines(given: Mapping[str, Any]) -> str:
    return "".join(f"{name} = {toml(value)}\n" for name, value in sorted(given.items(), key=lambda one: "." in one[0]))


def is_set(value: Any) -> bool:
    return True


def is_no_root(user: Any) -> bool:
    return user not in ("root", 0)


def has_odd_variables(env: Mapping[str, str]) -> bool:
    return any("${" in value or "-" in name for name, value in env.items())


def is_no_time(seconds: float) -> bool:
    return not 0 < seconds < float("inf")


DEPARTURES: dict[str, Callable[[Any], bool]] = {
    "multi_step_reward_strategy": is_set,
    "steps": bool,
    "version": lambda version: version not in ("1.0", "1.4"),
    "schema_version": lambda version: version not in ("1.0", "1.4"),
    **{name: is_set for name in OF_OLD if name not in ("version", "environment.memory", "environment.storage")},
    **{f"{part}.network_mode": lambda mode: mode == "allowlist" for part in ("agent", "verifier", "environment")},
    **{f"{part}.allowed_hosts": is_set for part in ("agent", "verifier", "environment")},
    **{f"{part}.user": is_no_root for part in ("agent", "verifier")},
    **{f"{part}.env": has_odd_variables for part in ("verifier", "environment", "solution")},
    "agent.timeout_sec": is_no_time,
    "verifier.timeout_sec": lambda seconds: is_no_time(seconds) or seconds > 7200,
    "verifier.environment_mode": lambda mode: mode == "separate",
    **{f"verifier.{name}": is_set for name in ("environment", "collect")},
    "environment.gpus": bool,
    "environment.memory": lambda memory: memory in (" 64M", "512K") or not isinstance(memory, str),
    "environment.memory_mb": lambda size: size < 64,
    "environment.workdir": lambda path: path[:1] not in ("", "/"),
    **{f"environment.{name}": is_set for name in ("gpu_types", "tpu", "mcp_servers", "skills_dir", "healthcheck")},
}
"""Fields, and values of them, that Harbor takes and we refuse by name: a sandbox cannot honour them."""
LEFT_OUT = {"task", "metadata", "source", "artifacts"}
LEFT_OUT |= {f"environment.{name}" for name in ("build_timeout_sec", "cpus", "storage", "storage_mb")}
"""What is not read, right or wrong; the importer prints it."""
NAMED_AS = {"seconds": "verifier.timeout_sec", "run_seconds": "agent.timeout_sec", "memory": "environment.memory"}
"""Fields of a row in the place of a task's."""


@pytest.fixture(scope="module")
def fields(oracles: Oracles) -> dict[str, st.SearchStrategy[Any]]:
    """Values of each field that Harbor's own model declares, by its dotted name, and of ``OF_OLD``."""
    schema = oracles(schema=True)["answer"]
    all_ = schema["$defs"]
    found = dict(schema["properties"])
    for section in SECTIONS:
        inner = all_[found.pop(section)["$ref"].rpartition("/")[2]]["properties"]
        found |= {f"{section}.{name}": part for name, part in inner.items()}
    found["schema_version"] = {"enum": ["1.0", "1.4", "1.5"]}
    return {name: values(part, all_) for name, part in found.items()} | OF_OLD


def ours(folder: Path) -> Reading:
    """Return how we read a task, in Harbor's words. Raises ``ConfigError``."""
    found = read_task(folder, ImportOptions(image_map={"python:3.13-slim": "base"}, run="setup"))
    row = found.row
    assert row.solution is not None
    return {
        "instruction": row.question,
        "image": row.image.removeprefix("docker://"),
        "env": row.env,
        "memory_mb": row.memory and row.memory >> 20,
        "workdir": row.workdir,
        "agent seconds": found.settings.run_seconds,
        "seconds": row.verifier.seconds,
        "tests": {file.path: file.data.hex() for file in row.verifier.files},
        "test command": (row.verifier.command, row.verifier.env),
        "solution": {file.path: file.data.hex() for file in row.solution.files},
        "solution command": row.solution.command,
        "left out": {
            name for name in LEFT_OUT if f"'{name.rpartition('.')[2]}' of task.toml is left out" in found.notes
        },
    }


def harbors(played: dict[str, Any]) -> Reading:
    config, solution, tests = played["config"], played["solution"], played["tests"]
    environment, solving = config["environment"], {**solution["env"]}
    del solving["DEBIAN_FRONTEND"]  # a departure: nothing can be installed
    ((test,), (solve,)) = ([line[1:].partition(")")[0] for line in one["commands"]] for one in (tests, solution))
    return {
        "instruction": played["instruction"].strip(),  # a departure: the space around it is dropped
        "image": environment["docker_image"] or "base",
        "env": {"GREETING": "hello world", "WHERE": "/app/data", **played["env"]},
        "memory_mb": environment["memory_mb"] or None,
        "workdir": environment["workdir"] or "/app",
        "agent seconds": config["agent"]["timeout_sec"],
        "seconds": config["verifier"]["timeout_sec"],
        "tests": tests["files"],
        "test command": (test, tests["env"]),
        "solution": solution["files"],
        "solution command": "".join(f"export {name}={shlex.quote(value)}; " for name, value in solving.items()) + solve,
    }


LINES = ["# canary x", "<!-- CANARY -->", "<b>canary</b>", " #canary\t", "", "do it", "then\x0cthat", "<!-- canary"]
FILES = st.dictionaries(
    st.sampled_from(["tests/sub/a.py", "tests/.hidden", "solution/deep/er/x", "tests/__pycache__/a.pyc", "notes.txt",
                     "tests/sub/.harborignore", "solution/.harborignore", "tests/test.bat"]),
    st.sampled_from(["a.py\n", "x\r\n"]), max_size=2,
)  # fmt: skip


@settings(
    max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_task_is_read_as_harbor_plays_it_or_refused_by_name(
    data: Any, oracles: Oracles, fields: dict[str, st.SearchStrategy[Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(fields)), max_size=3, unique=True))
    given_ = {name: data.draw(fields[name]) for name in names}
    end = data.draw(st.sampled_from(["\n", "\r\n", "\r"]))
    instruction = end.join([*data.draw(st.lists(st.sampled_from(LINES), max_size=4)), "the task", ""])
    files = data.draw(FILES)
    place = tmp_path_factory.mktemp("harbor")
    for name in ("agent", "verifier"):
        (place / "logs" / name).mkdir(parents=True)
    folder = write_task(place / "sum", {**HARBOR, **files, "task.toml": toml_lines(given_)})
    (folder / "instruction.md").write_bytes(instruction.encode())
    said = oracles(ask="play", task=str(folder), logs=str(place / "logs"))
    try:
        found = ours(folder)
    except ConfigError as error:
        named = str(error).removeprefix(str(folder))
        event("refused by both" if "error" in said else "refused by us")
        refused = [name for name, value in given_.items() if name in DEPARTURES and DEPARTURES[name](value)]
        refused += [name for name in files if name.endswith(".harborignore")]
        assert "error" in said or any(is_named(name, named) for name in refused), (named, given_)
        return
    left_out = found.pop("left out")
    assert left_out == given_.keys() & LEFT_OUT
    if "error" in said:
        event("refused by Harbor for what is left out")
        assert left_out, said
    else:
        event("read alike")
        assert found == harbors(said["answer"])


def is_named(field: str, message: str) -> bool:
    """Whether a refusal names a field of ``task.toml``, or a file."""
    found = re.match(r": '([\w.]+)' is wrong", message)
    named = NAMED_AS.get(found[1], found[1]) if found else message
    return field in named or named in field or ("steps" in message and field == "steps")
