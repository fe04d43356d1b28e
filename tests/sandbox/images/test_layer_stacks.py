"""Stacks of layers show in a sandbox's root what Apptainer, by umoci's library, unpacks of them."""

import gzip
import io
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, event, given, settings
from hypothesis import strategies as st
from images_support import MANIFEST, digest_of, directory, entry, layer, manifest, symlink

from prorl_gym.errors import SandboxError
from prorl_gym.sandbox.images.unpack import LayerLimits, unpack_tar

pytestmark = [pytest.mark.apptainer, pytest.mark.slow]

PATHS = st.sampled_from(["t/a", "t/b", "t/a/x", "t/a/y", "t/b/x", "t/a/x/z"])
MODES = st.sampled_from([0o644, 0o755, 0o600, 0o4755])
ENTRIES = st.one_of(
    st.builds(lambda name, mode, text: entry(name, text, mode=mode), PATHS, MODES, st.sampled_from([b"1", b"22"])),
    st.builds(directory, PATHS, st.sampled_from([0o755, 0o700])),
    st.builds(symlink, PATHS, st.sampled_from(["b", "/t/a", "gone"])),
    st.builds(lambda name, link: entry(name, kind=tarfile.LNKTYPE, link=link), PATHS, PATHS),
    st.builds(lambda name: entry("/.wh.".join(name.rsplit("/", 1))), PATHS),
    st.builds(lambda name: entry(f"{name}/.wh..wh..opq"), PATHS),
)
LIST = """
import json, os, sys
found = {}
for place, folders, files in os.walk(sys.argv[1]):
    # A departure: overlayfs lists a deletion in a directory of one layer only, as a name that nothing has.
    for path in filter(os.path.lexists, (os.path.join(place, name) for name in folders + files)):
        is_link, is_file = os.path.islink(path), os.path.isfile(path)
        content = os.readlink(path) if is_link else open(path).read() if is_file else "/"
        mode = os.lstat(path).st_mode & 0o1777 if is_file and not is_link else 0
        found[os.path.relpath(path, sys.argv[1])] = [content, mode, os.lstat(path).st_nlink if is_file else 0]
print(json.dumps(found))
"""


def apptainers(place: Path, layers: Sequence[bytes]) -> dict[str, Any] | None:
    """Return the files that Apptainer makes of an image; ``None`` if it refuses it."""
    ids = [digest_of(gzip.decompress(data)) for data in layers]
    system = {"architecture": "amd64", "os": "linux", "config": {}, "rootfs": {"type": "layers", "diff_ids": ids}}
    config = json.dumps(system).encode()
    blobs = [*layers, config, manifest(layers, config)]
    (place / "blobs/sha256").mkdir(parents=True)
    for data in blobs:
        (place / "blobs/sha256" / digest_of(data).partition(":")[2]).write_bytes(data)
    index = {"mediaType": MANIFEST, "digest": digest_of(blobs[-1]), "size": len(blobs[-1])}
    (place / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    (place / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [index]}))
    program = shutil.which("apptainer") or "singularity"
    command = [program, "build", "--sandbox", "--disable-cache", f"{place}/out", f"oci:{place}"]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        return None
    return json.loads(subprocess.check_output(["python3", "-c", LIST, place / "out/t"]))


def ours(place: Path, layers: Sequence[bytes]) -> dict[str, Any]:
    """Return what overlayfs shows of the layers. Raises ``SandboxError``: one of them is refused."""
    lower: list[str] = []
    for number, data in enumerate(layers):
        (place / f"{number}").mkdir()
        unpack_tar(io.BytesIO(gzip.decompress(data)), str(place / f"{number}"), LayerLimits(1 << 20, 1000))
        lower.insert(0, f"{place}/{number}")
    (place / "empty").mkdir()  # overlayfs wants two
    options = f"lowerdir={':'.join([*lower, f'{place}/empty'])},userxattr"
    script = f'mount -t overlay -o {options} o /mnt && exec python3 -c "$0" /mnt/t'
    spaces = ["--mount"] if os.geteuid() == 0 else ["--map-root-user", "--mount"]
    return json.loads(subprocess.check_output(["unshare", *spaces, "sh", "-ec", script, LIST]))


def whole(entries: Sequence[Any]) -> bytes:
    """Return a layer that has the directories of its deletions before them: where there are none, we make some."""
    parts = [directory("t")]
    for info, data in entries:
        if "/.wh." in info.name:
            parts += [directory(parent.as_posix()) for parent in reversed(Path(info.name).parents[:-1])]
        parts.append((info, data))
    return layer(*parts)


@settings(max_examples=40, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
@given(st.lists(st.lists(ENTRIES, min_size=1, max_size=5), min_size=1, max_size=3))
def test_a_stack_is_read_as_apptainer_reads_it(stack: list[list[Any]]) -> None:
    layers = [whole(entries) for entries in stack]
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        for name in ("theirs", "ours"):
            Path(folder, name).mkdir()
        theirs = apptainers(Path(folder, "theirs"), layers)
        try:
            found = ours(Path(folder, "ours"), layers)
        except SandboxError:
            event("refused by us")
            return
    if theirs is None:
        event("refused by Apptainer")
    else:
        event("read")
        assert found == theirs
