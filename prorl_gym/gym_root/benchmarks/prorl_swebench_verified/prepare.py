# SPDX-FileCopyrightText: Copyright (c) 2026 the prorl-gym authors
# SPDX-License-Identifier: Apache-2.0

"""For ``gym eval prepare``, which takes it from the working directory only; ``prorl-gym prepare`` needs none there."""

from pathlib import Path

from prorl_gym.cli.prepare import prepare as prepare_rows
from prorl_gym.data.benchmarks import benchmark_file


def prepare() -> Path:
    """Download the data set, write the benchmark's rows and return their file."""
    prepare_rows("prorl_swebench_verified", force=True)
    return benchmark_file("prorl_swebench_verified")
