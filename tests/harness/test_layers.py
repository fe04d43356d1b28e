"""Presets by name and their layers: what is unpacked, kept and said to be missing. No index is asked."""

import io
import os
import stat
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from prorl_gym.agents.command_config import CommandConfig
from prorl_gym.errors import ConfigError, FailureKind, TaskError
from prorl_gym.harness.layers import NpmLayer, Preset, find_interpreter, install_preset
from prorl_gym.harness.presets import PRESETS
from prorl_gym.harness.programs import find_program

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


def preset(layer: NpmLayer) -> Preset:
    return Preset("mine", "1.2.3", "responses", layer, CommandConfig(argv=("$layer/a/tool",)))


def put_package(layers: Path, name: str, files: dict[str, bytes]) -> None:
    """Put a package where earlier downloads are."""
    (layers / "downloads").mkdir(exist_ok=True)
    with tarfile.open(layers / "downloads" / name, "w:gz") as packed:
        for path, data in files.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(data), 0o600
            packed.addfile(entry, io.BytesIO(data))


@pytest.fixture
def no_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")


@pytest.mark.usefixtures("no_programs")
def test_a_layer_is_made_of_what_was_fetched_before(tmp_path: Path):
    put_package(tmp_path, "scope-tool-1.2.3.tgz", {"package/bin/tool": b"\x7fELF...", "package/note": b"text"})
    made = install_preset(preset(NpmLayer({"a": "@scope/tool@1.2.3"})), tmp_path)
    assert made == tmp_path / "mine-1.2.3"
    assert (made / "a" / "note").read_bytes() == b"text"
    assert stat.S_IMODE(os.stat(made / "a" / "bin" / "tool").st_mode) == 0o755
    assert stat.S_IMODE(os.stat(made / "a" / "note").st_mode) == 0o644
    assert stat.S_IMODE(os.stat(made).st_mode) == 0o755


@pytest.mark.usefixtures("no_programs")
def test_a_folder_of_a_package_and_packages_below_others(tmp_path: Path):
    machine, arch = os.uname().machine, {"x86_64": "x64", "aarch64": "arm64"}[os.uname().machine]
    put_package(tmp_path, f"tool-1-{arch}.tgz", {f"package/vendor/{machine}/tool": b"1", "package/other": b"2"})
    put_package(tmp_path, "part-2.tgz", {"package/part": b"3"})
    layer = NpmLayer({"a": "tool@1-{arch}", "a/parts/part": "part@2"}, {"a": "vendor/{machine}"})
    made = install_preset(preset(layer), tmp_path)
    assert sorted(str(path.relative_to(made)) for path in made.rglob("*") if path.is_file()) == [
        "a/parts/part/part",
        "a/tool",
    ]


@pytest.mark.usefixtures("no_programs")
def test_an_installed_layer_is_left_alone(tmp_path: Path):
    (tmp_path / "mine-1.2.3").mkdir()
    assert install_preset(preset(NpmLayer({"a": "tool@1"})), tmp_path) == tmp_path / "mine-1.2.3"


@pytest.mark.usefixtures("no_programs")
def test_without_npm_nothing_is_left_and_the_fix_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"npm is not installed\.\nInstall npm"):
        install_preset(preset(NpmLayer({"a": "tool@1"})), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["downloads"]
    assert list((tmp_path / "downloads").iterdir()) == []


@pytest.mark.usefixtures("no_programs")
@pytest.mark.parametrize("path", ["../outside", "package/../../outside"])
def test_a_package_writes_nowhere_else(tmp_path: Path, path: str):
    put_package(tmp_path, "tool-1.tgz", {path: b"x"})
    with pytest.raises(ConfigError, match="cannot be unpacked"):
        install_preset(preset(NpmLayer({"a": "tool@1"})), tmp_path)
    assert not list(tmp_path.parent.glob("outside"))


def test_a_copied_interpreter_works_without_the_original(tmp_path: Path):
    found = find_interpreter([VERSION])
    found.copy_to(tmp_path / "python")
    program = str(tmp_path / "python" / "bin" / "python3")
    script = "import json, sys; print(sys.prefix, json.__file__)"
    said = subprocess.run([program, "-I", "-c", script], capture_output=True, text=True, check=True, env={}, cwd="/")
    assert all(path.startswith(str(tmp_path)) for path in said.stdout.split())


def test_an_interpreter_of_another_version_is_refused():
    with pytest.raises(ConfigError, match=r"no Python 2\.0 that runs\.\nName one with --python"):
        find_interpreter(["2.0"], sys.executable)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_is_pinned_and_mounts_its_layer(name: str, tmp_path: Path):
    found = PRESETS[name]
    assert found.name == name
    assert found.version.count(".") == 2
    assert not found.is_installed(tmp_path)
    layer = f"{found.layer_of or name}-{found.version}"
    assert found.mounted(tmp_path).mounts == {"/.prorl/agent": str(tmp_path / layer)}
    assert not found.layer_of or found.layer is PRESETS[found.layer_of].layer
    assert any("$layer" in argument for argument in found.command.argv)
    assert any("$task" in argument for argument in found.command.argv)


MINE = CommandConfig(argv=("mine",))


def test_the_configuration_goes_before_presets(tmp_path: Path):
    for name in ("mine", "codex"):
        assert find_program(name, {"mine": MINE, "codex": MINE}, tmp_path) is MINE


def test_an_installed_preset_comes_with_its_layer(tmp_path: Path):
    (tmp_path / "codex-0.169.0").mkdir()
    found = find_program("codex", {}, tmp_path)
    assert [mount.source for mount in found.sandbox_mounts()] == [str(tmp_path / "codex-0.169.0")]


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("codex", "Run: prorl-gym agents install codex --directory LAYERS"),
        ("codec", "Did you mean 'codex'?"),
        ("zzz", "Known: claude-code, codex, mine, mini-swe-agent, miniswe-sandboxed, opencode, openhands, qwen-code."),
    ],
)
def test_what_is_not_there_names_the_fix(name: str, fix: str, tmp_path: Path):
    with pytest.raises(TaskError) as caught:
        find_program(name, {"mine": MINE}, tmp_path)
    assert (caught.value.kind, caught.value.fix) == (FailureKind.BAD_ROW, fix.replace("LAYERS", str(tmp_path)))
