"""Which backend is tried, and what the configuration refuses."""

import dataclasses
import os
from pathlib import Path

import pytest
from sandbox_support import fails_as

from prorl_gym.config import load_config
from prorl_gym.errors import ConfigError, FailureKind, SandboxError
from prorl_gym.sandbox import backend_selection
from prorl_gym.sandbox.backend_selection import backend_candidates, open_backend
from prorl_gym.sandbox.config import ImagesConfig, LimitsConfig, SandboxConfig
from prorl_gym.sandbox.images.store import ImageStore
from prorl_gym.sandbox.protocol import ProbeResult, SandboxLimits, SandboxSpec
from prorl_gym.sandbox.service.local_backend import LocalBackend
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend


@pytest.mark.parametrize(
    ("config", "installed", "names"),
    [
        ({}, (), ["userns"]),
        ({}, ("apptainer",), ["userns", "apptainer-plain"]),
        ({"image": "/"}, ("apptainer",), ["apptainer", "userns", "apptainer-plain"]),
        ({"image": "/"}, ("singularity",), ["apptainer", "userns", "apptainer-plain"]),
        ({"image": "/"}, (), ["userns"]),
        ({"backend": "userns", "image": "/"}, ("apptainer",), ["userns"]),
        ({"backend": "apptainer"}, (), ["apptainer"]),
        ({"backend": "apptainer-plain"}, (), ["apptainer-plain"]),
    ],
)
def test_order_of_candidates(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    config: dict[str, str],
    installed: tuple[str, ...],
    names: list[str],
) -> None:
    for program in installed:
        (tmp_path / program).write_text("")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [name for name, _ in backend_candidates(SandboxConfig.model_validate(config))] == names


async def test_the_first_that_works_is_taken_and_the_log_has_the_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def probe(backend: NamespaceBackend) -> ProbeResult:
        works = backend.name == "apptainer-plain"
        return ProbeResult(backend.name, works, "1.4.5" if works else f"{backend.name} is refused.")

    monkeypatch.setattr(NamespaceBackend, "probe", probe)
    monkeypatch.setattr(backend_selection, "find_apptainer", lambda _: "/usr/bin/any")
    with caplog.at_level("INFO"):
        backend = await open_backend(SandboxConfig(image="/"))
    await backend.close()
    assert [record.getMessage() for record in caplog.records] == [
        "sandboxes: apptainer does not work here: apptainer is refused.",
        "sandboxes: userns does not work here: userns is refused.",
        "sandboxes: apptainer-plain, since this user may not create user namespaces, but Apptainer works (1.4.5)",
    ]


@pytest.mark.slow
async def test_a_wrong_image_is_no_reason_for_weaker_backends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, scratch: Path, ground: Path
) -> None:
    """``apptainer-plain`` takes images of other owners and SIF files: it must not be chosen for them."""
    monkeypatch.setattr(backend_selection, "find_apptainer", lambda _: "/usr/bin/any")
    file = ground / "wrong.sif"
    file.write_bytes(b"x")
    with pytest.raises(SandboxError, match=r"no sandbox backend works as configured: image .* is a file"):
        await open_backend(SandboxConfig(image=str(file), scratch=scratch))
    refused = [record.getMessage() for record in caplog.records if "does not work here" in record.getMessage()]
    assert [line.split()[1] for line in refused] == ["apptainer", "userns"]


async def test_local_only_with_the_flag() -> None:
    with fails_as(FailureKind.SANDBOX_UNAVAILABLE) as caught:
        await open_backend(SandboxConfig(backend="local"))
    assert "allow_unsafe_local" in caught.value.fix
    backend = await open_backend(SandboxConfig(backend="local", allow_unsafe_local=True))
    assert isinstance(backend, LocalBackend)
    await backend.close()


@pytest.mark.slow
async def test_nothing_works_names_cause_and_fix(ground: Path) -> None:
    taken = ground / "taken"
    taken.touch()
    with pytest.raises(SandboxError) as caught:
        await open_backend(SandboxConfig(backend="userns", scratch=taken))
    assert str(caught.value).splitlines() == [
        f"no sandbox backend works here: scratch directory {taken} is not a directory (symbolic links are refused).",
        "Remove it, or set sandbox.scratch to another directory.",
    ]


@pytest.mark.slow
async def test_configured_store_resolves_and_is_closed_with_the_backend(
    monkeypatch: pytest.MonkeyPatch, ground: Path
) -> None:
    closed: list[Path] = []
    close = ImageStore.close

    async def note_close(store: ImageStore) -> None:
        closed.append(store.config.store_directory())
        await close(store)

    monkeypatch.setattr(ImageStore, "close", note_close)
    place, scratch = ground / "store-of-choose", ground / "scratch-of-choose"
    images = ImagesConfig(directory=place)
    backend = await open_backend(SandboxConfig(backend="userns", scratch=scratch, images=images))
    with fails_as(FailureKind.IMAGE_MISSING) as caught:
        await backend.start_sandbox(SandboxSpec(image="a-name-that-no-store-has"))
    assert "a-name-that-no-store-has" in caught.value.what
    await backend.close()
    await backend.close()
    assert closed == [place]


def test_limits_are_those_of_the_protocol() -> None:
    assert set(LimitsConfig.model_fields) == {field.name for field in dataclasses.fields(SandboxLimits)}
    assert LimitsConfig().to_limits() == SandboxLimits()
    assert LimitsConfig(memory=1 << 20).to_limits() == SandboxLimits(memory=1 << 20)


@pytest.mark.parametrize("uid", [0, -1, 2**32 - 1])
def test_uid_must_not_be_roots(uid: int) -> None:
    with pytest.raises(ConfigError, match="'uid' is wrong"):
        load_config(SandboxConfig, {"uid": uid})


def test_what_a_spec_leaves_open_is_the_configurations() -> None:
    config = SandboxConfig(image="/images/base", limits=LimitsConfig(processes=7, output=100))
    asked = SandboxSpec(limits=SandboxLimits(output=200))
    limits = SandboxLimits(processes=7, output=200)
    assert config.apply_defaults(asked) == SandboxSpec("/images/base", python_tool="session", limits=limits)
    assert config.apply_defaults(SandboxSpec(image="host", python_tool="kernel")).image == "host"
    assert config.apply_defaults(SandboxSpec(image="host", python_tool="kernel")).python_tool == "kernel"


@pytest.mark.slow
async def test_a_configured_image_is_the_one_that_runs(tiny_image: Path, scratch: Path) -> None:
    backend = await open_backend(SandboxConfig(backend="userns", image=str(tiny_image), scratch=scratch))
    box = await backend.start_sandbox(SandboxSpec())
    assert (await box.exec(["cat", "/data/kept/file"], timeout=10)).stdout == b"kept"
    await backend.close()


def test_a_shared_cache_that_is_not_ours_to_write_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "shared" / "ipython").mkdir(parents=True)
    monkeypatch.setenv("PRORL_GYM_CACHE", str(tmp_path / "shared"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert SandboxConfig().ipython_cache_dir() == tmp_path / "shared" / "ipython"
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # pyright: ignore
    assert SandboxConfig().ipython_cache_dir() == tmp_path / "home" / ".cache" / "prorl-gym" / "ipython"
    assert SandboxConfig(cache=tmp_path / "own").ipython_cache_dir() == tmp_path / "own" / "ipython"
