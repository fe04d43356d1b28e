"""The tests that ask for a real backend once more, as an ordinary user: started as root is the other half."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from sandbox_support import SANDBOX_UID

HERE = Path(__file__).parent
NOBODY = 65534
"""Apptainer by itself runs for users with an account, which this uid has everywhere."""


NO_BASE_IMAGE = "not sif_file_is_used and not working_directory_of_an_image"
"""The base image belongs to the sandboxes' uid, and plain Apptainer needs a user with an account: somebody else."""


FILES = [
    pytest.param(["test_attacks.py"], id="attacks"),
    pytest.param(["guest/test_kernel_surface.py"], id="kernel surface"),
    pytest.param(["test_attacks_on_the_guest.py"], id="attacks on the guest"),
    pytest.param(["test_sigkill.py"], id="SIGKILL"),
    pytest.param(["service/test_loss.py"], id="losses"),
    pytest.param(["spawner/test_system_v.py"], id="System V"),
    pytest.param(["spawner/test_proc.py"], id="proc"),
    pytest.param(["test_root.py"], id="root"),
    pytest.param(["test_killed.py"], id="killed"),
    pytest.param(["service/test_interpreter.py"], id="interpreter"),
    pytest.param(["spawner/test_spawner_dies.py"], id="dying spawners"),
    pytest.param(["test_escapes.py"], id="escapes"),
    pytest.param(["test_hostile_image.py"], id="hostile images"),
    pytest.param(["test_hostile_guest.py"], id="hostile guests"),
    pytest.param(["guest/test_hidden_memory.py"], id="hidden memory"),
    pytest.param(["test_torture.py"], id="torture"),
    pytest.param(["test_cycles.py"], id="cycles"),
    pytest.param(["test_breach.py"], id="limits"),
    pytest.param(["service/egress/test_egress.py"], id="egress"),
    pytest.param(["test_conformance.py", "--all"], id="conformance"),
    pytest.param(["backends/test_bwrap.py", "--all"], id="bwrap", marks=pytest.mark.bwrap),
    pytest.param(["backends/test_plain.py", "--all", "-k", NO_BASE_IMAGE], id="plain", marks=pytest.mark.apptainer),
]


def test_the_files_exist() -> None:
    """The slow test below would say so as well, long after the change that moved one."""
    assert not [param.values[0][0] for param in FILES if not (HERE / param.values[0][0]).is_file()]


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("arguments", FILES)
def test_as_normal_user(arguments: list[str], request: pytest.FixtureRequest) -> None:
    file, *options = arguments
    if request.config.getoption("--all"):
        options.append("--both-backends")
    uid = NOBODY if file in ("backends/test_plain.py", "spawner/test_system_v.py") else SANDBOX_UID
    with tempfile.TemporaryDirectory(prefix="prorl-gym-user-", dir="/var/tmp") as directory:
        os.chmod(directory, 0o755)
        for name in ("home", "tmp"):
            os.mkdir(f"{directory}/{name}", 0o700)
            os.chown(f"{directory}/{name}", uid, uid)
        result = subprocess.run(
            [
                *(sys.executable, str(HERE / "become_user.py"), directory, str(uid)),
                *("-m", "pytest", f"tests/sandbox/{file}", *options, "-q", "-p", "no:cacheprovider"),
                f"--basetemp={directory}/tmp/pytest",
            ],
            capture_output=True,
            text=True,
            timeout=230,
            check=False,
        )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
