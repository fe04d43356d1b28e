"""Building images: through Apptainer, and the python tool's stock image from what is kept, without a network."""

import asyncio
import io
import os
import tarfile
from pathlib import Path

import pytest

from prorl_gym.errors import ConfigError, FailureKind, SandboxError
from prorl_gym.sandbox.images import python_image
from prorl_gym.sandbox.images.image_import import build_definition, run_command
from prorl_gym.sandbox.images.store import ImageStore

DEFINITION = """Bootstrap: scratch

%setup
    mkdir -p "${APPTAINER_ROOTFS:-$SINGULARITY_ROOTFS}/bin" "${APPTAINER_ROOTFS:-$SINGULARITY_ROOTFS}/etc"
    echo made > "${APPTAINER_ROOTFS:-$SINGULARITY_ROOTFS}/etc/made"
"""


@pytest.fixture
def definition(place: Path) -> Path:
    path = place / "tiny.def"
    path.write_text(DEFINITION)
    return path


@pytest.mark.apptainer
@pytest.mark.root  # without root a build from scratch needs subordinate uids
async def test_definition_becomes_an_image(store: ImageStore, definition: Path) -> None:
    await build_definition(store, definition, "tiny", seconds=60)
    root = Path((await store.resolve("tiny")).lower_dirs[0])
    assert (root / "etc/made").read_text() == "made\n"
    assert not [name for name in os.listdir(store.layers.directory) if name.startswith(".making-")]


@pytest.mark.apptainer
async def test_wrong_definition_is_reported(store: ImageStore, place: Path) -> None:
    (place / "wrong.def").write_text("Bootstrap: nonsense\n")
    with pytest.raises(ConfigError, match=r"build of .*wrong\.def failed"):
        await build_definition(store, place / "wrong.def", "wrong", seconds=60)
    assert store.records.list_records() == []


async def test_definition_that_is_not_there_is_named(store: ImageStore) -> None:
    with pytest.raises(SandboxError, match=r"/no/such\.def") as caught:
        await build_definition(store, Path("/no/such.def"), "x", seconds=60)
    assert caught.value.kind is FailureKind.IMAGE_MISSING


async def test_slow_program_is_killed_with_its_children() -> None:
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    with pytest.raises(ConfigError, match="sh was not done after 0 s"):
        await run_command(["sh", "-c", f"exec 9>/proc/{os.getpid()}/fd/{writing}; sleep 60 & sleep 60"], seconds=0.3)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        async with asyncio.timeout(10):
            assert await asyncio.to_thread(pipe.read) == b""  # the end comes when the last holder is dead


async def test_missing_program_is_named() -> None:
    with pytest.raises(ConfigError, match="no-such-program is not installed"):
        await run_command(["no-such-program"], seconds=1)


def test_what_names_the_builders_interpreter_leaves_no_trace() -> None:
    """Digests of programs differ with their first line, so they must not stand in what the image's digest covers."""
    record = "../../bin/tool,sha256=differs,229\ntool/__init__.py,sha256=same,3\ntool/bin/data,sha256=same,1\n"
    kept = "tool/__init__.py,sha256=same,3\ntool/bin/data,sha256=same,1\n"
    assert python_image.without_programs(record) == kept


def test_every_wheel_is_pinned_by_version_and_contents() -> None:
    wheels = python_image.locked_wheels()
    assert {name.partition("==")[0] for name in wheels.values()} >= {
        "ipython",
        "numpy",
        "sympy",
        "matplotlib",
        "pytest",
        "ipykernel",
    }
    assert all(digest.startswith("sha256:") and len(digest) == 71 for digest in wheels)


@pytest.mark.root
async def test_changed_package_is_refused(store: ImageStore, place: Path) -> None:
    with tarfile.open(place / "bookworm.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("var/cache/apt/archives/x_1_all.deb"), io.BytesIO())
    (place / "bookworm.lock").write_text("x_1_all.deb sha256:0\n")
    with pytest.raises(ConfigError, match=r"bookworm\.tar does not match bookworm\.lock"):
        await python_image.build(store, place)


def test_no_day_of_a_build_is_in_the_image() -> None:
    built = "root:*:20779:0:99999:7:::\ndaemon:!:20780:0:99999:7:::\n"
    assert python_image.with_fixed_day(built) == "root:*:19675:0:99999:7:::\ndaemon:!:19675:0:99999:7:::\n"
