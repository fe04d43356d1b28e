"""Imported first by modules that import NeMo Gym: skips them where it is missing, unless it is required."""

import os
import tempfile
from importlib.util import find_spec

import pytest

from prorl_gym.gym_roots import component_roots

REQUIRED = "gym" in os.environ.get("PRORL_GYM_REQUIRE", "").split(",")

if find_spec("nemo_gym") is None and not REQUIRED:
    pytest.skip("NeMo Gym is not installed in this environment", allow_module_level=True)

# mini-swe-agent makes its settings' directory when it is imported, which Gym does: not in the user's home, please.
os.environ.setdefault("MSWEA_GLOBAL_CONFIG_DIR", os.path.join(tempfile.gettempdir(), "mini-swe-agent"))
os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
# As README asks users of NeMo Gym to do.
os.environ.setdefault("NEMO_GYM_EXTRA_ROOTS", os.pathsep.join(component_roots()))
