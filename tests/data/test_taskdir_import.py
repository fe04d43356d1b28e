"""Reading task directories: what of a Dockerfile can be done, and everything that is refused, with the fix."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from task_directories import BENCH, HARBOR, write_task
from typer.testing import CliRunner

from prorl_gym.cli.main import app
from prorl_gym.data.task_layouts import ImportedTask, read_task
from prorl_gym.environments.taskdir.container import ImportOptions
from prorl_gym.environments.taskdir.dockerfile import CopyStep, RunStep, read_dockerfile
from prorl_gym.environments.taskdir.task_dir_row import SetupRun, TaskFile
from prorl_gym.errors import ConfigError


def imported(folder: Path, **options: object) -> ImportedTask:
    return read_task(folder, ImportOptions.model_validate(options))


def refusal(folder: Path, **options: object) -> str:
    with pytest.raises(ConfigError) as caught:
        imported(folder, **options)
    assert caught.value.fix, "every refusal names the fix"
    return str(caught.value)


def test_a_dockerfile_is_read_in_its_order() -> None:
    recipe = read_dockerfile(HARBOR["environment/Dockerfile"], "Dockerfile")
    assert recipe.image == "python:3.13-slim"
    assert recipe.env == {"GREETING": "hello world", "WHERE": "/app/data"}
    assert recipe.workdir == "/app"
    command = ("/bin/sh", "-c", "mkdir -p made     && echo made > made/file")
    assert recipe.steps == [
        CopyStep(("data/",), "/app/data", is_directory_target=True),
        CopyStep(("tool.sh",), "/usr/local/bin/tool", is_directory_target=False, mode=0o755),
        RunStep(command, cwd="/app", env={"PLACE": "/app", **recipe.env}),
    ]
    assert recipe.notes == ["CMD of the Dockerfile means nothing here"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("RUN <<EOF\necho a\n EOF\nEOF", ("/bin/sh", "-c", "echo a\n EOF")),
        ("RUN <<-EOF\n\techo a\n\tEOF", ("/bin/sh", "-c", "echo a")),
        ("RUN --mount=type=cache,target=/x echo a", ("/bin/sh", "-c", "echo a")),
        ('RUN ["echo", "a b"]', ("echo", "a b")),
        ('RUN ["echo", 1]', ("/bin/sh", "-c", '["echo", 1]')),
        ("RUN cat <<'X' > f\ntext\nX\nUSER root", ("/bin/sh", "-c", "cat <<'X' > f\ntext\nX")),
        ("RUN cat <<<X\nUSER root", ("/bin/sh", "-c", "cat <<<X")),
        ("RUN echo $((1<<X))\nUSER root", ("/bin/sh", "-c", "echo $((1<<X))")),
        ("RUN echo a\\\n\n# no\n  b", ("/bin/sh", "-c", "echo a  b")),
        ('SHELL ["/bin/bash", "-ec"]\nRUN a', ("/bin/bash", "-ec", "a")),
    ],
)
def test_run_of_all_forms(line: str, expected: tuple[str, ...]) -> None:
    (step,) = read_dockerfile(f"FROM a\n{line}\n", "D").steps
    assert step == RunStep(expected, cwd="/", env={})


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ENV A=1 B=\"x y\" C='z'", {"A": "1", "B": "x y", "C": "z"}),
        ("ENV A some  'words'", {"A": "some  words"}),
        ("ENV A=1 C='$A' E=\\$A F=x\\ y", {"A": "1", "C": "$A", "E": "$A", "F": "x y"}),
        ("ARG D\nARG P=1 Q=2\nENV A=$P$Q B=${D:-3} C=${P:+set} E=${D+set}", {"A": "12", "B": "3", "C": "set", "E": ""}),
        ("ENV A=x\\\ny", {"A": "xy"}),
        ("ENV abc=hello\nENV abc=bye def=$abc\nENV ghi=$abc", {"abc": "bye", "def": "hello", "ghi": "bye"}),
        (
            "ENV foo=/bar\nENV A=${foo}x B=\\$foo C=\\${foo} D='it\\'",
            {"foo": "/bar", "A": "/barx", "B": "$foo", "C": "${foo}", "D": "it\\"},
        ),
        ('ENV A="$ $(x) \\n"', {"A": "$ $(x) \\n"}),
    ],
)
def test_env_of_all_forms(line: str, expected: dict[str, str]) -> None:
    assert read_dockerfile(f"FROM a\n{line}\n", "D").env == expected


def test_a_command_has_the_variables_of_its_place() -> None:
    """As in BuildKit: arguments too, and none that is set after it."""
    recipe = read_dockerfile("ARG V=7\nFROM a\nARG V\nENV A=1\nRUN x\nENV A=2 B=3\n", "D")
    (step,) = recipe.steps
    assert isinstance(step, RunStep)
    assert step.setup(recipe.env).command == "env -u B V=7 A=1 /bin/sh -c x"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("RUN x\n", "has no FROM"),
        ("FROM a\nFROM b\n", "D:2: a second stage"),
        ("FROM --platform=linux/arm64 a\n", "FROM --platform=linux/arm64 is not understood"),
        ("# escape=`\nFROM a\n", "D:1: # escape=` is not understood"),
        ("FROM a\nCOPY --from=b x y\n", "D:2: COPY --from is not understood"),
        ("FROM a\nCOPY --exclude=*.md x /y\n", "COPY --exclude is not understood"),
        ("FROM a\nCOPY --chown=1000 x /y\n", "COPY --chown=1000"),
        ("FROM a\nCOPY --chmod=u+x x /y\n", "COPY --chmod=u[+]x is not understood"),
        ("FROM a\nCOPY <<E /y\nE\n", "COPY of a here-document is not understood"),
        ("FROM a\nCOPY x y\n", "'y' is below the image's own directory"),
        ("FROM a\nRUN --mount=type=secret,id=x a\n", "RUN --mount=type=secret,id=x is not understood"),
        ("FROM a\nRUN --network=host a\n", "RUN --network is not understood"),
        ("FROM a\nRUN <<E\n#!/usr/bin/python3\nE\n", "RUN of a script with '#!/usr/bin/python3' is not understood"),
        ("FROM a\nRUN <<E\na\n", "'<<E' does not end"),
        ("FROM a\nADD x.tar.gz /y\n", "D:2: ADD is not understood"),
        ('FROM a\nENTRYPOINT ["/start"]\n', "D:2: ENTRYPOINT is not understood"),
        ("FROM a\n\nUSER agent\n", "D:3: USER agent"),
        ("FROM a\nONBUILD RUN x\n", "D:2: ONBUILD is not understood"),
        ("FROM a\nENV A='x\n", 'D:2: "\'x" is not understood'),
        ("FROM a\nENV PATH=/x:$PATH\n", "D:2: [$]PATH is not set here"),
        ("FROM a\nENV A=1 B=${A#1}\n", "'[$]{A#1}' is not understood"),
        ("FROM a\nARG TARGETARCH\n", "ARG TARGETARCH is that of a builder"),
    ],
)
def test_what_cannot_be_done_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_dockerfile(text, "D")
    assert caught.value.fix


NAMES = st.sampled_from(["FROM", "RUN", "COPY", "ADD", "ENV", "ARG", "WORKDIR", "USER", "CMD", "run", "#", ""])
REST = st.text(alphabet="aA=\\ \"'<${}[],#:-/.\t", max_size=12) | st.sampled_from(["<<E\na\nE", '["a","b"]', "a b"])


@given(st.lists(st.tuples(NAMES, REST)).map(lambda lines: "\n".join(" ".join(line) for line in lines)))
def test_no_dockerfile_breaks_the_reader(text: str) -> None:
    try:
        read_dockerfile(text, "D")
    except ConfigError:
        pass


def test_a_harbor_task(tmp_path: Path) -> None:
    found = imported(write_task(tmp_path / "sum", HARBOR), run="setup", image_map={"python:3.13-slim": "prorl-python"})
    row = found.row
    assert (row.id, row.image, row.workdir, row.memory) == ("sum", "prorl-python", "/app", 2 << 30)
    assert row.question == "Add the numbers in data/numbers.txt; write the sum to answer.txt."
    assert [step.path if isinstance(step, TaskFile) else step.command[:13] for step in row.setup] == [
        "/app/data/numbers.txt",
        "/usr/local/bin/tool",
        "env PLACE=/ap",
    ]
    assert row.verifier.command == "/tests/test.sh"  # as Harbor runs it: its first line names the interpreter
    assert row.verifier.env == {"MODE": "strict"} and row.verifier.seconds == 30.0
    assert {file.path for file in row.verifier.files} == {"/tests/test.sh", "/tests/check.py"}
    assert row.solution is not None and row.solution.files[1].executable
    assert found.settings.run_seconds == 77.0


def test_a_prebuilt_image_needs_no_dockerfile_steps(tmp_path: Path) -> None:
    toml = '[environment]\ndocker_image = "ghcr.io/team/task:1"\nallow_internet = true\n'
    found = imported(write_task(tmp_path / "sum", HARBOR, task_dot_toml=toml))
    assert (found.row.image, found.row.setup) == ("docker://ghcr.io/team/task:1", ())
    assert any("internet" in note for note in found.notes)


def test_the_environment_of_a_prebuilt_image_goes_to_its_working_directory(tmp_path: Path) -> None:
    """As Harbor uploads it where there is no Dockerfile."""
    toml = "[environment]\ndocker_image = 'ghcr.io/team/task:1'\nworkdir = '/srv'\n"
    folder = write_task(tmp_path / "sum", HARBOR, task_dot_toml=toml, environment__Dockerfile=None)
    found = [step.path for step in imported(folder).row.setup if isinstance(step, TaskFile)]
    assert found == ["/srv/data/numbers.txt", "/srv/tool.sh"]


def test_copied_files_keep_who_may_read_them(tmp_path: Path) -> None:
    dockerfile = "FROM a\nWORKDIR /app\nCOPY data/numbers.txt key\nCOPY --chmod=711 tool.sh /app\n"
    folder = write_task(tmp_path / "sum", HARBOR, environment__Dockerfile=dockerfile)
    (folder / "environment/data/numbers.txt").chmod(0o460)
    found = [step.path if isinstance(step, TaskFile) else step.command for step in imported(folder).row.setup]
    assert found == ["/app/key", "chmod 640 /app/key", "/app/tool.sh", "chmod 711 /app/tool.sh"]


def test_a_task_without_network_loses_nothing(tmp_path: Path) -> None:
    toml = "[environment]\ndocker_image = 'ghcr.io/team/task:1'\nnetwork_mode = 'no-network'\n"
    assert not any(
        "internet" in note for note in imported(write_task(tmp_path / "sum", HARBOR, task_dot_toml=toml)).notes
    )


def test_a_built_image_holds_what_run_and_copy_make(tmp_path: Path) -> None:
    dockerfile = f"{HARBOR['environment/Dockerfile']}COPY --from=x tests /t\nENV PATH=/x:$PATH\n"
    folder = write_task(tmp_path / "sum", HARBOR, environment__Dockerfile=dockerfile)
    found = imported(folder, run="built", image_map={"*": "mine"})
    assert (found.row.image, found.row.setup, found.row.env["GREETING"]) == ("mine", (), "hello world")
    assert "PATH" not in found.row.env
    assert "COPY, RUN, ENV PATH of the Dockerfile are taken to be in the image" in found.notes
    assert "COPY may show tests or a solution to the agent" in found.notes


def test_a_terminal_bench_task_hides_what_stands_beside_its_dockerfile(tmp_path: Path) -> None:
    found = imported(write_task(tmp_path / "word", BENCH))
    row = found.row
    assert (row.image, row.verifier.reward) == ("docker://ghcr.io/base:1", "pytest")
    assert row.env == {"TEST_DIR": "/tests", "COLOUR": "blue"}
    placed = {step.path for step in row.setup if not isinstance(step, SetupRun)}
    assert placed == {"/app/Dockerfile", "/app/docker-compose.yaml", "/app/notes.txt"}
    assert "'solution.sh' is not copied to the agent" in found.notes
    assert "'volumes' of the compose file is left out" in found.notes


EXAMPLES = Path(__file__).parents[2] / "environments" / "prorl_taskdir"


@pytest.mark.parametrize(
    "line", ["COPY tests /t", "COPY solution.sh /s", "COPY *.sh /s/", "COPY ./tests/../solution.sh /s"]
)
def test_a_dockerfile_that_shows_the_tests_is_refused(line: str, tmp_path: Path) -> None:
    said = refusal(write_task(tmp_path / "word", BENCH, Dockerfile=f"FROM a\nWORKDIR /app\n{line}\n"))
    assert "would show it to the agent" in said or "leads outside" in said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run": "refuse"}, "RUN 'mkdir -p made && echo made > made/file': a sandbox has no network"),
        ({"instruction_dot_md": None}, "instruction.md: cannot be read"),
        ({"instruction_dot_md": "# canary\n"}, "'question' is wrong"),
        ({"tests__test_dot_sh": None}, "There is no tests/test.sh"),
        ({"task_dot_toml": "a = ["}, "not valid TOML"),
        *(
            ({"task_dot_toml": f"[environment]\ndocker_image = '{image}'"}, f"'{image[:80]}' is no image of a registry")
            for image in ("/etc", "file:///etc/passwd", "docker-daemon://x", "../x", "scratch", "a b")
        ),
        ({"environment__Dockerfile": "FROM scratch\nWORKDIR /app\n"}, "'scratch' is no image of a registry"),
        ({"task_dot_toml": "[verifier]\ntimeout_sec = 'x'"}, "'verifier.timeout_sec' is wrong"),
        ({"task_dot_toml": "[environment]\nmemory = 'much'"}, "'environment.memory' is wrong"),
        ({"task_dot_toml": "[[steps]]\nname = 'a'"}, "several steps"),
        ({"environment__Dockerfile": None}, "has no Dockerfile"),
        ({"environment__Dockerfile": "FROM a\nWORKDIR /app\nCOPY missing /x\n"}, "has no 'missing'"),
        ({"environment__Dockerfile": "FROM a\nWORKDIR /app\nCOPY ../x /x\n"}, "leads outside"),
        ({"environment__Dockerfile": "FROM a\nRUN x\n"}, "names no working directory"),
        ({"environment__Dockerfile": "FROM a\nWORKDIR /app\nCOPY data /tests/\n"}, "COPY to '/tests'"),
        ({"environment__Dockerfile": "FROM a\nWORKDIR /app\nCOPY **/x /y/\n"}, "the pattern '**/x'"),
        ({"environment__Dockerfile": "FROM a\nWORKDIR /app\nENV A=$B\n", "run": "built"}, "ENV A, but no built image"),
        ({"run": "built"}, "COPY, but no built image stands for its FROM"),
        ({"environment___dot_dockerignore": "x"}, ".dockerignore: is not understood"),
        ({"tests___dot_harborignore": "x"}, "tests/.harborignore: is not understood"),
        ({"trajectory_dot_json": "{}"}, "trajectory.json: is not understood"),
        ({"environment__docker-compose_dot_yaml": "{"}, "not valid YAML"),
        *(
            ({"environment__docker-compose_dot_yaml": f"services: {text}"}, message)
            for text, message in [
                ("{main: {}, b: {}}", "several containers (main, b)"),
                ("{web: {}}", "several containers (web)"),
                ("{main: {privileged: true}}", "'services.main.privileged' is wrong"),
                ("{main: {ports: ['80:80']}}", "'services.main.ports' is wrong"),
                ("{main: {command: nginx}}", "'services.main.command' is wrong"),
                ("{main: {volumes: ['./data:/data']}}", "'services.main.volumes.0' is wrong"),
                ("{main: {build: {context: ., args: {A: 1}}}}", "'services.main.build.args' is wrong"),
                ("{main: {build: ..}}", "'services.main.build.context' is wrong"),
                ("{main: {deploy: {resources: {reservations: {}}}}}", "'services.main.deploy.resources.reservations"),
                ("{main: {environment: {A: true}}}", "'services.main.environment"),
                ("{main: {environment: ['A=${B}']}}", "A is '${B}', a variable of the host"),
                ("{main: {image: x}}", "both an image and a Dockerfile"),
                ("{main: {}}\nsecrets: {}", "'secrets' is wrong"),
            ]
        ),
    ],
)
def test_a_task_that_cannot_be_imported(changes: dict[str, str | None], message: str, tmp_path: Path) -> None:
    run = changes.pop("run", "setup")
    assert message in refusal(write_task(tmp_path / "sum", HARBOR, **changes), run=run)


@pytest.mark.parametrize("field", ["run_tests_in_same_shell: true", "test_scripts: [a.sh]"])
def test_a_terminal_bench_field_that_has_a_meaning_is_refused(field: str, tmp_path: Path) -> None:
    folder = write_task(tmp_path / "word", BENCH, task_dot_yaml=f"{BENCH['task.yaml']}{field}\n")
    assert f"'{field.partition(':')[0]}' is wrong" in refusal(folder)


def test_other_parsers_are_refused(tmp_path: Path) -> None:
    changed = BENCH["task.yaml"].replace("pytest", "swebench")
    folder = write_task(tmp_path / "word", BENCH, task_dot_yaml=changed)
    assert "parser_name 'swebench' is not known" in refusal(folder)
    assert imported(folder, test_command="true").row.verifier.reward == "exit"


def test_links_are_not_followed(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "sum", HARBOR)
    os.symlink("/etc/hostname", folder / "tests" / "link")
    assert "it is a link" in refusal(folder, run="setup")
    (folder / "tests" / "link").unlink()
    os.symlink("/etc", folder / "environment" / "data" / "etc")
    assert "cannot be read" in refusal(folder, run="setup")
    (folder / "environment" / "data" / "etc").unlink()
    os.mkfifo(folder / "tests" / "pipe")
    assert "no regular file" in refusal(folder, run="setup")


@pytest.mark.parametrize("name", ["tests", "solution", "environment", "environment/data"])
def test_a_directory_that_is_a_link_is_refused(name: str, tmp_path: Path) -> None:
    folder = write_task(tmp_path / "sum", HARBOR)
    (folder / name).rename(tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", folder / name)
    assert f"{name}: is a link or leads outside" in refusal(folder, run="setup")


def test_where_a_task_is_may_be_a_link(tmp_path: Path) -> None:
    write_task(tmp_path / "word", BENCH)
    os.symlink("word", tmp_path / "link")
    assert imported(tmp_path / "link").row.setup == imported(tmp_path / "word").row.setup


@pytest.mark.parametrize("source", ["alias", "alias/test_outputs.py", "al*", "."])
def test_a_link_to_the_tests_does_not_show_them(source: str, tmp_path: Path) -> None:
    folder = write_task(tmp_path / "word", BENCH, Dockerfile=f"FROM a\nWORKDIR /app\nCOPY {source} /app/\n")
    os.symlink("tests", folder / "alias")
    assert "link" in refusal(folder)


@pytest.mark.parametrize("name", ["../secret", "{out}/secret", "sub/secret"])
def test_a_dockerfile_outside_is_not_read(name: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for place in (tmp_path, tmp_path / "out"):
        (place / "secret").write_text("FROM a\nENV KEY=hunter2\n")
    named = name.format(out=tmp_path / "out")
    compose = BENCH["docker-compose.yaml"].replace("dockerfile: Dockerfile", f"dockerfile: {named}")
    folder = write_task(tmp_path / "word", BENCH, **{"docker-compose_dot_yaml": compose})
    os.symlink(tmp_path / "out", folder / "sub")
    assert "is a link or leads outside" in refusal(folder)


def test_too_much_is_refused(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "sum", HARBOR)
    with open(folder / "environment" / "data" / "big", "wb") as file:
        file.truncate(40 << 20)
    assert "larger than 32 MiB" in refusal(folder, run="setup")


HOSTILE: dict[str, tuple[dict[str, str | None], str]] = {
    "continued lines": ({"environment__Dockerfile": "FROM a\nRUN x \\\n" + "\\\n" * 200_000}, "larger than 256 KiB"),
    "name of an image": ({"environment__Dockerfile": f"FROM {'a' * 200_000}\nWORKDIR /a\n"}, "no image of a registry"),
    "doubled variables": (
        {"environment__Dockerfile": "FROM a\nENV A=0123456789\n" + "ENV A=$A$A\n" * 40},
        "more than 64 KiB out of variables",
    ),
    "digits": ({"task_dot_toml": f"a = {'1' * 100_000}"}, "not valid TOML"),
    "nested tables": ({"task_dot_toml": f"a = {'[' * 50_000}"}, "not valid TOML"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_task_is_refused_by_its_file(case: str, tmp_path: Path) -> None:
    changes, message = HOSTILE[case]
    assert message in refusal(write_task(tmp_path / "sum", HARBOR, **changes), run="setup")


@pytest.mark.parametrize("value", ["1" * 100_000, "[" * 5_000], ids=["digits", "nested"])
def test_a_hostile_task_of_terminal_bench_is_refused_by_its_file(value: str, tmp_path: Path) -> None:
    assert "task.yaml: not valid YAML" in refusal(write_task(tmp_path / "word", BENCH, task_dot_yaml=f"a: {value}"))


def test_directories_in_one_another_are_bounded(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "sum", HARBOR)
    (folder / "tests" / "/".join("d" * 200)).mkdir(parents=True)
    assert "more than 100 directories deep" in refusal(folder, run="setup")


def test_the_command_writes_what_it_can_and_reports_the_rest(tmp_path: Path) -> None:
    write_task(tmp_path / "tasks" / "good", HARBOR)
    write_task(tmp_path / "tasks" / "torn", HARBOR, tests__test_dot_sh=None)
    rows = tmp_path / "rows.jsonl"
    given = ["import-tasks", str(tmp_path / "tasks"), "--output", str(rows), "--run", "setup"]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 1
    assert "torn: There is no tests/test.sh" in done.output
    assert "2 rows read, 1 written, 1 left out." in done.output
    assert "  1 left out: There is no tests/test.sh. (the first: torn)\n" in done.output
    assert "       1 written: 'metadata' of task.toml is left out\n" in done.output
    assert "1 of 2 tasks are in" in done.output
    assert rows.read_text().count("\n") == 1
    again = CliRunner().invoke(app, given)
    assert isinstance(again.exception, ConfigError) and "rows.jsonl exists" in str(again.exception)
    assert "1 of 2 tasks are in" in CliRunner().invoke(app, [*given, "--force"]).output
    (tmp_path / "tasks" / "good").rename(tmp_path / "elsewhere")
    assert "no task was imported" in CliRunner().invoke(app, [*given, "--force"]).output
    assert rows.read_text().count("\n") == 1, "the file is as it was"


def test_two_tasks_of_one_name_do_not_become_one_row_id(tmp_path: Path) -> None:
    places = [str(write_task(tmp_path / place / "sum", BENCH)) for place in "ab"]
    done = CliRunner().invoke(app, ["import-tasks", *places, "--output", str(tmp_path / "rows.jsonl")])
    assert done.exit_code == 1
    assert f"has the name of {places[0]}" in done.output


def test_the_example_rows_are_current(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    options = ["--output", str(rows), "--image-map", "*=default", "--keep", "/app"]
    assert CliRunner().invoke(app, ["import-tasks", str(EXAMPLES / "tasks"), *options]).exit_code == 0
    assert rows.read_text() == (EXAMPLES / "data" / "example.jsonl").read_text(), "its README has the command"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: is no directory"),
        (["."], "holds no tasks"),
        ([".", "--image-map", "x"], "is no pair"),
    ],
)
def test_bad_arguments_are_reported(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["import-tasks", *arguments, "--output", "rows.jsonl"])
    assert isinstance(done.exception, ConfigError) and message in str(done.exception)
    assert not list(tmp_path.iterdir())


def test_other_files_of_a_task_are_its_own_or_named(tmp_path: Path) -> None:
    files = {"environment__docker-compose_dot_yml": "services: {a: {}, b: {}}", "notes_dot_md": "x"}
    files["tests__test_dot_sh"] = "# no pip\n  pip install x\n"
    found = imported(write_task(tmp_path / "sum", HARBOR, **files), run="setup")
    assert found.row.env["GREETING"] == "hello world"
    assert "'notes.md' of the directory is left out" in found.notes
    assert any(note.startswith("its tests run pip") for note in found.notes)
