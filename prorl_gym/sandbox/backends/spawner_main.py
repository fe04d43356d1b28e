"""Entry of the spawner's process: the spawner, with every backend whose sandboxes it forks.

``python -m prorl_gym.sandbox.backends.spawner_main SOCKET SCRATCH UID GID CGROUP``
"""

import sys

from prorl_gym.sandbox.backends import apptainer, userns
from prorl_gym.sandbox.spawner.spawner import Backends, run_spawner

BACKENDS = Backends(
    init_mains={"userns": userns.run_init, "apptainer": apptainer.run_init},
    supervised={"apptainer-plain": apptainer.build_plain_command},
)

if __name__ == "__main__":
    run_spawner(sys.argv[1:], BACKENDS)
