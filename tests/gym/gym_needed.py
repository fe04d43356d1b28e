"""Imported first by modules that import NeMo Gym: skips them where it is missing, unless it is required."""

import os
from importlib.util import find_spec

import pytest

if find_spec("nemo_gym") is None and "gym" not in os.environ.get("PRORL_GYM_REQUIRE", ""):
    pytest.skip("NeMo Gym is not installed in this environment", allow_module_level=True)
