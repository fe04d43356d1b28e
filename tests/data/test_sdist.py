"""Source distributions: fetched and read without running them, their faults found, their rows proven."""

import io
import json
import random
import re
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from sdist_support import METADATA, TINY, index, sdist, wheel
from typer.testing import CliRunner

from prorl_gym.cli.main import app
from prorl_gym.data.sdist import row_maker
from prorl_gym.data.sdist.fault_search import (
    Baseline,
    Fault,
    FaultSearch,
    RunSuite,
    SuiteRun,
    apply_mutations,
    measure_baseline,
    strip_locations,
    suite_command,
)
from prorl_gym.data.sdist.row_maker import (
    ProjectReport,
    RowOptions,
    hide_tests,
    open_project,
    quotes_source,
    write_statement,
)
from prorl_gym.data.sdist.source_tree import (
    SourceFile,
    SourceTree,
    applicable_requirements,
    fetch_sdist,
    fetch_wheels,
    find_layout,
    pack_tree,
    read_sdist,
)
from prorl_gym.environments.protocol import Leases
from prorl_gym.environments.row_format import read_rows
from prorl_gym.environments.swe.controls.control_plan import ControlPlan
from prorl_gym.environments.swe.grading import grade
from prorl_gym.environments.swe.swe_row import parse_swe_row
from prorl_gym.errors import ConfigError
from prorl_gym.settings import resolve_settings
from tests.environments.swe.mini import unpack


def tree(files: Mapping[str, str]) -> SourceTree:
    return {name: SourceFile(text.encode()) for name, text in files.items()}


RELEASED = tree(TINY)

# Reading


def archive_of(path: Path, *members: tuple[str, bytes | None, str]) -> Path:
    """Name, content, link target of each member; without content a link, or with an empty target a device."""
    with tarfile.open(path, "w:gz") as archive:
        for name, data, target in members:
            member = tarfile.TarInfo(name)
            if data is None:
                member.type, member.linkname = (tarfile.SYMTYPE, target) if target else (tarfile.CHRTYPE, "")
            member.size = len(data or b"")
            archive.addfile(member, io.BytesIO(data or b""))
    return path


def test_links_devices_and_build_output_are_not_read(tmp_path: Path) -> None:
    path = archive_of(
        tmp_path / "a.tar.gz",
        ("p-1/PKG-INFO", b"x", ""),
        ("p-1/link", None, "/etc/passwd"),
        ("p-1/device", None, ""),
        ("p-1/build/lib/p.py", b"a copy", ""),
        ("p-1/p.egg-info/PKG-INFO", b"x", ""),
        ("p-1/fast.so", b"x", ""),
        ("p-1/a/__pycache__/a.pyc", b"x", ""),
    )
    assert read_sdist(path) == {"PKG-INFO": SourceFile(b"x")}


@pytest.mark.parametrize("name", ["/etc/passwd", "p-1/../../x", "p-1/a/../../../x"])
def test_a_path_that_leaves_the_archive_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="leaves the archive"):
        read_sdist(archive_of(tmp_path / "a.tar.gz", (name, b"x", "")))


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl_gym.data.sdist.source_tree.MAX_BYTES", 1 << 20)
    with pytest.raises(ConfigError, match="more than 1 MiB"):
        read_sdist(archive_of(tmp_path / "a.tar.gz", ("p-1/a", bytes(1 << 20), ""), ("p-1/b", b"x", "")))


@pytest.mark.parametrize("data", [b"", b"no archive", b"\x1f\x8b\x08\x00torn"])
def test_what_is_no_archive_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.tar.gz").write_bytes(data)
    with pytest.raises(ConfigError, match=r"a\.tar\.gz: cannot be read"):
        read_sdist(tmp_path / "a.tar.gz")


def test_packing_gives_the_same_bytes_and_all_files_back(tmp_path: Path) -> None:
    files = {**RELEASED, "run.sh": SourceFile(b"true\n", executable=True)}
    packed = pack_tree(files)
    assert packed == pack_tree(dict(reversed(files.items())))
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        assert archive.getnames() == sorted(files)
        assert archive.getmember("run.sh").mode == 0o755 and archive.getmember("README.md").mode == 0o644


# Layout


def test_packages_and_tests_are_found_in_each_usual_place() -> None:
    package = {"PKG-INFO": METADATA, "setup.py": "", "docs/conf.py": ""}
    layouts = {
        "src": {**package, "src/p/__init__.py": "", "src/p/a.py": "", "tests/test_a.py": "", "tests/helper.py": ""},
        "flat": {**package, "p/__init__.py": "", "p/a.py": "", "testing/test_a.py": "", "conftest.py": ""},
        "inside": {**package, "p/__init__.py": "", "p/a.py": "", "p/tests/test_a.py": "", "p/tests/__init__.py": ""},
        "module": {**package, "p.py": "", "test_p.py": ""},
    }
    found = {name: find_layout(tree(files)) for name, files in layouts.items()}
    assert {name: (one.source_root, one.sources, one.tests, one.test_files) for name, one in found.items()} == {
        "src": ("src", ("src/p/__init__.py", "src/p/a.py"), ("tests",), ("tests/test_a.py", "tests/helper.py")),
        "flat": ("", ("p/__init__.py", "p/a.py"), ("testing",), ("testing/test_a.py", "conftest.py")),
        "inside": ("", ("p/__init__.py", "p/a.py"), ("p/tests",), ("p/tests/test_a.py", "p/tests/__init__.py")),
        "module": ("", ("p.py",), ("test_p.py",), ("test_p.py",)),
    }


@pytest.mark.parametrize(
    "path, line",
    [
        ("pyproject.toml", 'asyncio_mode = "auto"'),
        ("setup.cfg", "asyncio_mode=auto"),
        ("pytest.ini", "asyncio_mode = auto"),
    ],
)
def test_coroutines_without_a_mark_run_where_the_project_configures_it(path: str, line: str) -> None:
    files = {**TINY, path: f"[pytest]\n{line}\n"}
    assert "-o asyncio_mode=auto" in suite_command(find_layout(tree(files)), ["tests"])
    assert "asyncio" not in suite_command(find_layout(RELEASED), ["tests"])


@pytest.mark.parametrize(
    "lacking,complaint", [("PKG-INFO", "no PKG-INFO"), ("tests/", "no tests"), ("src/", "package")]
)
def test_what_a_distribution_lacks_is_named(lacking: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        find_layout(tree({name: text for name, text in TINY.items() if not name.startswith(lacking)}))


def test_requirements_are_those_of_the_sandboxes_python() -> None:
    lines = ["six", 'old<2; python_version < "3.8"', 'new>=1; python_version >= "3.11"', 'x; extra == "test"']
    assert applicable_requirements(lines, "3.11") == ["six", "new>=1"]
    with pytest.raises(ConfigError, match="is no requirement"):
        applicable_requirements(["--index-url=http://somewhere"], "3.11")
    with pytest.raises(ConfigError, match="an address of its own"):
        applicable_requirements(["x @ git+https://example.org/x"], "3.11")


# Fetching


@pytest.mark.slow
@pytest.mark.data
def test_what_requirements_need_is_chosen_by_the_sandboxes_python(tmp_path: Path) -> None:
    needs = ("deep; python_version == '3.9'", "host; python_version != '3.9'", "extra; extra == 'more'")
    for name, requires in (("top", needs), ("deep", ("deeper",)), ("deeper", ()), ("host", ()), ("extra", ())):
        index(tmp_path, wheel(tmp_path, name, requires), name)
    found = fetch_wheels(["top"], "3.9", (tmp_path / "simple").as_uri(), ["Deeper==1.0"])
    assert {"top.py", "deep.py"} <= set(found)
    assert "extra.py" not in found
    assert not [path for path in found if path.startswith("deeper")], "the sandbox has it"


@pytest.mark.data
def test_a_distribution_is_fetched_once_and_checked(tmp_path: Path) -> None:
    packed = sdist(tmp_path / "tiny_shop-1.2.tar.gz")
    cache = tmp_path / "cache"
    kept = fetch_sdist("tiny-shop==1.2", cache, index(tmp_path, packed))
    assert read_sdist(kept) == dict(sorted(RELEASED.items()))
    assert fetch_sdist("tiny-shop==1.2", cache, "file:///nowhere") == kept
    assert [path.name for path in cache.iterdir()] == [kept.name]


@pytest.mark.data
def test_a_file_that_is_not_what_the_index_states_is_refused(tmp_path: Path) -> None:
    packed = sdist(tmp_path / "tiny_shop-1.2.tar.gz")
    with pytest.raises(ConfigError, match="not what the index states"):
        fetch_sdist("tiny-shop==1.2", tmp_path / "cache", index(tmp_path, packed, sha256="0" * 64))
    with pytest.raises(ConfigError, match=r"has no \.tar\.gz on the index"):
        fetch_sdist("tiny-shop==1.3", tmp_path / "cache", (tmp_path / "simple").as_uri())
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("spelled", ["tiny-shop", "tiny-shop>=1", "tiny-shop==1.*", "==1", ""])
def test_only_exact_versions_are_fetched(tmp_path: Path, spelled: str) -> None:
    with pytest.raises(ConfigError, match="no exact version"):
        fetch_sdist(spelled, tmp_path)


# What the agent sees


def test_hidden_tests_are_cut_out_and_the_rest_stays() -> None:
    files = {path: text for path, text in TINY.items() if path.startswith("tests/")}
    hidden = [
        "tests/test_prices.py::test_discount[50-10-45]",
        "tests/test_prices.py::Refused::test_too_much",
        "tests/test_prices.py::Refused::test_negative",
        "tests/test_stock.py::TestStock::test_takes_all",
    ]
    visible = hide_tests(files, hidden)
    assert "test_discount" not in visible["tests/test_prices.py"] and "Refused" not in visible["tests/test_prices.py"]
    assert "def test_total_skips_what_was_given_back" in visible["tests/test_prices.py"]
    assert "parametrize" not in visible["tests/test_prices.py"]
    assert "Common:" not in visible["tests/test_stock.py"].replace("(Common):", "")  # its only test was inherited
    assert "def test_names" in visible["tests/test_stock.py"]
    compile(visible["tests/test_prices.py"], "test_prices.py", "exec")


def test_what_cannot_be_cut_is_left_out_whole() -> None:
    files = {"t/test_a.py": "def make():\n    pass\nfor name in 'ab':\n    globals()['test_' + name] = make\n"}
    assert hide_tests(files, ["t/test_a.py::test_a"]) == {}
    only = {"t/test_b.py": "def test_b():\n    pass\n", "t/__init__.py": "def test_c():\n    pass\nX = 1\n"}
    assert hide_tests(only, ["t/test_b.py::test_b", "t/__init__.py::test_c"]) == {"t/__init__.py": "X = 1\n"}
    crlf = {"t/test_d.py": "def test_d():\r\n    pass\r\n"}
    assert hide_tests(crlf, ["t/test_d.py::test_d"]) == {} and hide_tests(crlf, []) == crlf


def test_a_statement_names_symptoms_without_places() -> None:
    message = 'ValueError: File "/tmp/x/src/shop/prices.py", line 7, in <Price at 0x7f00aa> of prices.py:12, see line 9'
    message += "\n\n a\nb\nc\nd\ne"
    stripped = strip_locations(message)
    assert (
        "prices.py" not in stripped
        and "line 7" not in stripped
        and "line 9" not in stripped
        and "0x7f" not in stripped
        and stripped.count("\n") == 4
    )
    statement = write_statement(
        "shop", "", ["t.py::test_a[1]", "t.py::test_a[2]", "t.py::T::testBigOne"], {"t.py::test_a[2]": stripped}
    )
    assert "- a (2 cases)\n      ValueError" in statement and "- Big One\n" in statement and "run with" not in statement
    assert "run with:\n\n    pytest\n" in write_statement("shop", "pytest", ["t.py::test_a"], {}) + "\n"
    assert quotes_source(f"see {'x' * 8} + {'y' * 8}", [f"    {'x' * 8}  +  {'y' * 8}"]) and not quotes_source(
        "see return x", ["return x"]
    )


# Faults, with a fake in the place of the sandbox


SOURCES = ("src/shop/prices.py", "src/shop/stock.py")
CHECKS = {
    "total": "total([1, 2, 3]) == 6",
    "empty": "total([]) == 0",
    "back": "total([5, -2]) == 5",
    "none": "discount(100, 0) == 100",
    "all": "discount(100, 100) == 0",
    "some": "discount(50, 10) == 45",
    "take": "take({'a': 3}, 'a', 2)",
    "last": "take({'a': 1}, 'a', 1)",
    "few": "not take({'a': 3}, 'a', 4)",
    "names": "names({'b': 1, 'a': 3, 'c': 0}) == ['a', 'b']",
}


async def fake_run(files: SourceTree, seconds: float, trace: bool) -> SuiteRun:
    """Run the checks in this process: the mutants of so simple a program always end."""
    names: dict[str, Any] = {}
    for path in SOURCES:
        exec(compile(files[path].data, path, "exec"), names)
    statuses: dict[str, Any] = {}
    messages: dict[str, str] = {}
    for name, check in CHECKS.items():
        try:
            assert eval(check, names)
            statuses[name] = "passed"
        except Exception as error:
            statuses[name], messages[name] = "failed", repr(error)
    lines = {path: frozenset(range(100)) for path in files} if trace else {}
    return SuiteRun(statuses, messages, lines, 0.1)


def search_of(
    run: RunSuite, baseline: Baseline, files: SourceTree = RELEASED, number: int = 0, max_failing: int = 20
) -> FaultSearch:
    return FaultSearch(files, SOURCES, baseline, run, random.Random(number), max_failing)


async def found(number: int, max_failing: int = 20) -> tuple[list[Fault], FaultSearch]:
    baseline = await measure_baseline(RELEASED, fake_run, 10.0)
    search = search_of(fake_run, baseline, number=number, max_failing=max_failing)
    return [fault async for fault in search.find_faults(4)], search


@pytest.mark.parametrize("number", range(5))
async def test_faults_break_some_tests_and_leave_the_rest(number: int) -> None:
    faults, search = await found(number, max_failing=5)
    sites = [len(fault.mutations) for fault in faults]
    assert len(sites) == 4 and sites[0] == sites[2] == 1 and 2 in (sites[1], sites[3])  # not each pair is fit
    for fault in faults:
        assert set(fault.failing) | set(fault.passing) == set(CHECKS) and not set(fault.failing) & set(fault.passing)
        assert 1 <= len(fault.failing) <= 5
        run = await fake_run(apply_mutations(RELEASED, fault.mutations), 1.0, False)
        assert run.failing == set(fault.failing)
    for fault in faults:
        assert len({mutation.path for mutation in fault.mutations}) == len(fault.mutations)
        for mutation in fault.mutations:  # half a repair is none
            half = await fake_run(apply_mutations(RELEASED, [mutation]), 1.0, False)
            assert half.failing & set(fault.failing)
    assert len({fault.mutations for fault in faults}) == 4
    assert all(reason in ("no test notices", "too much breaks") for reason in search.rejected)


async def test_the_same_seed_finds_the_same_faults() -> None:
    first, second, third = [(await found(number))[0] for number in (1, 1, 2)]
    assert first == second != third


def run_of(statuses: Mapping[str, Any], problem: str = "", **messages: str) -> SuiteRun:
    return SuiteRun(statuses, messages, {SOURCES[0]: frozenset(range(50))}, 0.1, problem)


GOOD = {name: "passed" for name in "abcdefgh"}


@pytest.mark.parametrize(
    "runs,reason",
    [
        ([run_of({}, "the tests took too long")], "the tests took too long"),
        ([run_of({"a": "failed"})], "tests are not found any more"),
        ([run_of(GOOD)], "no test notices"),
        ([run_of(dict.fromkeys(GOOD, "failed"))], "too much breaks"),
        ([run_of({**GOOD, "a": "error"}, a="DeprecationWarning: old")], "only warnings"),
        ([run_of({**GOOD, "a": "failed"}), run_of({**GOOD, "b": "failed"})], "what fails is not the same twice"),
    ],
)
async def test_mutants_that_are_no_good_are_counted_by_reason(runs: list[SuiteRun], reason: str) -> None:
    calls = 0

    async def run(files: SourceTree, seconds: float, trace: bool) -> SuiteRun:
        nonlocal calls
        calls += 1
        return runs[(calls - 1) % len(runs)]

    search = search_of(run, Baseline(frozenset(GOOD), (), {SOURCES[0]: frozenset(range(50))}, 0.1))
    assert [fault async for fault in search.find_faults(1)] == []
    assert set(search.rejected) == {reason} and search.rejected[reason] == calls // len(runs)


async def test_faults_that_hide_each_other_are_not_combined() -> None:
    async def run(files: SourceTree, seconds: float, trace: bool) -> SuiteRun:
        prices, stock = (files[path] != RELEASED[path] for path in SOURCES)
        broken = {"a": "failed"} if prices else {"b": "failed"} if stock else {}
        return run_of({**GOOD, **broken})

    lines = {path: frozenset(range(50)) for path in SOURCES}
    search = search_of(run, Baseline(frozenset(GOOD), (), lines, 0.1))
    assert [len(fault.mutations) async for fault in search.find_faults(4)] == [1, 1, 1, 1]


async def test_flaky_and_failing_tests_of_the_release_are_left_out() -> None:
    runs = iter(
        [
            run_of({**GOOD, "flaky": "passed", "red": "failed"}),
            run_of({**GOOD, "flaky": "failed", "red": "failed"}),
            run_of(GOOD),
        ]
    )

    async def run(files: SourceTree, seconds: float, trace: bool) -> SuiteRun:
        return next(runs)

    baseline = await measure_baseline(RELEASED, run, 1.0)
    assert baseline.stable == set(GOOD) and baseline.flaky == ("flaky",)


async def test_a_copy_of_a_source_keeps_faults_out_of_it() -> None:
    files = {**RELEASED, "old/stock.py": SourceFile(TINY["src/shop/stock.py"].encode())}
    search = search_of(fake_run, await measure_baseline(files, fake_run, 10.0), files)
    paths = {mutation.path async for fault in search.find_faults(6) for mutation in fault.mutations}
    assert paths == {"src/shop/prices.py"}


# The whole way, in real sandboxes


@pytest.mark.release
@pytest.mark.data
@pytest.mark.timeout(300)
async def test_rows_of_a_project_are_solved_by_gold_only_and_are_the_same_again(leases: Leases, tmp_path: Path) -> None:
    url = index(tmp_path, sdist(tmp_path / "tiny_shop-1.2.tar.gz"))
    made: list[list[dict[str, Any]]] = []
    outcomes: list[ProjectReport] = []
    for rows in (2, 1):
        project = await open_project("tiny-shop==1.2", (), tmp_path / "cache", url, leases, RowOptions(rows, seed=3))
        made.append([row async for row in project.make_rows()])
        outcomes.append(project.outcome)
    assert json.dumps(made[0][:1]) == json.dumps(made[1])
    assert outcomes[0].tests == 13 and outcomes[0].flaky == ()
    assert [row["id"] for row in made[0]] == list(outcomes[0].coverage)
    assert all(plan.controlled or plan.sealed for plan in outcomes[0].coverage.values())
    settings = resolve_settings()
    for row in made[0]:
        task = parse_swe_row(row)
        assert (await grade(task, task.gold_patch.encode(), leases, settings)).reward == 1.0
        removed = "".join(f"diff --git a/{path} b/{path}\ndeleted file mode 100644\n" for path in task.tests.files)
        assert (await grade(task, removed.encode(), leases, settings)).reward == 0.0
        assert "shop/" not in task.question
        assert_nothing_is_told(row)


@pytest.mark.data
async def test_rows_without_any_control_are_made_where_there_are_no_others_and_are_named(
    leases: Leases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = [ControlPlan(unknown=("a::b",)), *[ControlPlan()] * 9]

    async def prove(*_: Any) -> ControlPlan:
        return plans.pop(0)

    monkeypatch.setattr(row_maker, "find_controls", prove)
    url = index(tmp_path, sdist(tmp_path / "tiny_shop-1.2.tar.gz"))
    project = await open_project("tiny-shop==1.2", (), tmp_path / "cache", url, leases, RowOptions(1, seed=3))
    rows = [row async for row in project.make_rows()]
    assert [row["id"] for row in rows] == ["tiny-shop-1.2-s3-0"]
    assert project.outcome.coverage["tiny-shop-1.2-s3-0"].uncovered == ("a::b",)
    assert project.outcome.rejected["no test that shows the fault has a control"] == 1


def assert_nothing_is_told(row: Mapping[str, Any]) -> None:
    """The agent's tree has neither the tests that must fail first nor the repair."""
    texts = {name: data.decode() for name, data in unpack(row["archive"]).items()}
    for test in row["tests"]["fail_to_pass"]:
        name = test.partition("[")[0].rpartition("::")[2]
        assert not any(f"def {name}(" in text for text in texts.values()), name
    for line in row["patch"].split("\n"):
        if line.startswith("+") and not line.startswith("+++"):
            assert not any(line[1:] in text.split("\n") for text in texts.values()), line


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_command_makes_rows_and_names_what_it_leaves_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def fetch(name: str, cache: Path, index: str) -> Path:
        return fetch_sdist(name, tmp_path / "cache", index)

    monkeypatch.setattr("prorl_gym.data.sdist.row_maker.fetch_sdist", fetch)
    output = tmp_path / "rows.jsonl"
    arguments = ["prepare", "swe", "--from-sdist", "tiny-shop==9", "--from-sdist", "tiny-shop==1.2"]
    url = index(tmp_path, sdist(tmp_path / "tiny_shop-1.2.tar.gz"))
    result = CliRunner().invoke(app, [*arguments, "--index", url, "--output", str(output)])
    assert result.exit_code == 0, result.output
    assert "tiny-shop==9 is left out" in result.output and "13 tests pass twice" in result.output
    assert re.search(
        r"tiny-shop-1.2-s0-0: of (\d) tests that show the fault \d are sealed, \1 have controls", result.output
    )
    rows = read_rows(output)
    assert [row.name for row in rows] == ["tiny-shop-1.2-s0-0"]
    for row in rows:
        assert parse_swe_row(row.task).source == "generic"
        assert_nothing_is_told(row.task)
