"""References to images and what manifests state, read strictly."""

import pytest

from prorl_gym.errors import SandboxError
from prorl_gym.sandbox.images.registry.oci_format import ImageConfig, RegistryReference


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("docker://debian", "docker://docker.io/library/debian:latest"),
        ("docker://team/x:1", "docker://docker.io/team/x:1"),
        ("docker://ghcr.io/a/b/c:v1.2", "docker://ghcr.io/a/b/c:v1.2"),
        ("docker://localhost:5000/a", "docker://localhost:5000/a:latest"),
        (f"docker://h.io/a:tag@sha256:{'0' * 64}", f"docker://h.io/a@sha256:{'0' * 64}"),
    ],
)
def test_references_are_read_as_elsewhere(text: str, read: str) -> None:
    assert str(RegistryReference.parse(text)) == read


@pytest.mark.parametrize(
    "text", ["docker://", "docker://a/../b", "docker://a:b:c", "docker://a@sha256:0", "docker://-a"]
)
def test_wrong_references_are_refused(text: str) -> None:
    with pytest.raises(SandboxError, match="is not a reference"):
        RegistryReference.parse(text)


def test_variables_of_an_image_are_those_that_a_program_can_have() -> None:
    settings = ImageConfig.model_validate({"config": {"Env": ["A=1=2", "B=\0", "=x", "C", "D="]}})
    assert settings.environment == (("A", "1=2"), ("D", ""))
