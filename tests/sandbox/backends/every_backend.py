"""Tests for every backend: a module of one backend imports them all, and they run on its ``backend_name``."""

import pytest
from sandbox_support import run_check
from test_base_image import image
from test_ipython import (
    test_displayed_pictures_come_back,
    test_magics_and_shell_lines_work,
    test_mount_cannot_be_written,
    test_python_tool_is_ipython,
)
from test_killed import (
    test_killed_service_leaves_nothing,
    test_killed_spawner_takes_its_sandboxes_along,
    test_service_and_spawner_killed_at_once,
)
from test_root import (
    test_git_commits_without_an_identity,
    test_git_works_in_the_directory_of_another_uid,
    test_python_has_its_short_name,
)

from prorl_gym.sandbox.service.namespace_backend import NamespaceBackend
from prorl_gym.testing.sandbox.conformance import CHECKS, Check

__all__ = [
    "image",
    "test_conformance",
    "test_displayed_pictures_come_back",
    "test_git_commits_without_an_identity",
    "test_git_works_in_the_directory_of_another_uid",
    "test_killed_service_leaves_nothing",
    "test_killed_spawner_takes_its_sandboxes_along",
    "test_magics_and_shell_lines_work",
    "test_mount_cannot_be_written",
    "test_python_has_its_short_name",
    "test_python_tool_is_ipython",
    "test_service_and_spawner_killed_at_once",
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_conformance(check: Check, backend: NamespaceBackend) -> None:
    await run_check(check, backend)
