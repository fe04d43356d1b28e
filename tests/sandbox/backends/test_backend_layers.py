"""Images of several directories, as a store's resolver gives them."""

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from sandbox_support import closing, fails_as, give_to_sandboxes

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.images.store import ResolvedImage
from prorl_gym.sandbox.protocol import SandboxSpec
from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.sandbox.spawner.spawner_protocol import BackendName

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Named:
    """A resolver of fixed names that counts what is still pinned."""

    def __init__(self) -> None:
        self.images: dict[str, tuple[str, ...]] = {}
        self.pinned = 0

    async def resolve(self, image: str) -> ResolvedImage:
        if image not in self.images:
            raise SandboxError(FailureKind.IMAGE_MISSING, f"no image {image}.", "Build it.")
        self.pinned += 1
        return ResolvedImage(image, self.images[image], (("AUTHOR", "image"), ("BOTH", "image")))

    def release(self, image: ResolvedImage) -> None:
        self.pinned -= 1


@pytest.fixture(scope="module")
def named() -> Named:
    return Named()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def layered(backend_name: BackendName, scratch: Path, named: Named) -> AsyncIterator[NamespaceBackend]:
    async with closing(NamespaceBackend(backend_name, SandboxConfig(scratch=scratch), named)) as backend:
        yield backend


def layer(ground: Path, name: str, files: dict[str, str]) -> str:
    path = Path(tempfile.mkdtemp(dir=ground, prefix=name))
    for file, text in files.items():
        (path / file).parent.mkdir(parents=True, exist_ok=True)
        (path / file).write_text(text)
    give_to_sandboxes(path)
    return str(path)


async def read(backend: NamespaceBackend, image: str, script: str) -> str:
    async with closing(await backend.start_sandbox(SandboxSpec(image=image))) as box:
        result = await box.exec(["/bin/bash", "-ec", script], timeout=20)
        assert result.exit_code == 0, result
        return result.stdout.decode()


async def test_the_topmost_layer_wins(layered: NamespaceBackend, named: Named, ground: Path, tiny_image: Path) -> None:
    task = layer(ground, "task", {"data/kept/file": "task's", "testbed/new": "new"})
    named.images["task"] = (task, str(tiny_image))
    script = "cat /data/kept/file /testbed/new /data/doomed/deep/file; rm -rf /data; mkdir /data; ls /data"
    assert await read(layered, "task", script) == "task'snewold"
    with open(f"{task}/testbed/new") as file:  # noqa: ASYNC230
        assert file.read() == "new"


async def test_many_layers_of_any_name(layered: NamespaceBackend, named: Named, ground: Path, tiny_image: Path) -> None:
    name = "odd:name,with\\every=sign-"
    layers = [layer(ground, f"{name}{number:03d}{'x' * 100}-", {f"n/{number}": ""}) for number in range(60)]
    assert sum(map(len, layers)) > 4096  # would not fit into one page of mount options
    named.images["many"] = (*layers, str(tiny_image))
    assert len((await read(layered, "many", "ls /n")).split()) == 60


async def test_a_bad_layer_is_named_and_nothing_stays_pinned(
    layered: NamespaceBackend, named: Named, ground: Path, tiny_image: Path
) -> None:
    named.images["torn"] = (str(ground / "gone"), str(tiny_image))
    with fails_as(FailureKind.IMAGE_MISSING) as caught:
        await layered.start_sandbox(SandboxSpec(image="torn"))
    assert caught.value.what == f"image torn: {ground}/gone: No such file or directory."
    assert named.pinned == 0


async def test_unknown_image_is_the_resolvers_word(layered: NamespaceBackend) -> None:
    with pytest.raises(SandboxError, match="no image nobody knows"):
        await layered.start_sandbox(SandboxSpec(image="nobody knows"))


async def test_an_image_brings_its_variables_and_the_specs_win(
    layered: NamespaceBackend, named: Named, tiny_image: Path
) -> None:
    named.images["with variables"] = (str(tiny_image),)
    box = await layered.start_sandbox(SandboxSpec(image="with variables", env={"BOTH": "spec"}))
    shown = await box.exec(["bash", "-c", "echo $AUTHOR $BOTH"], timeout=10)
    await box.close()
    assert shown.stdout == b"image spec\n"
