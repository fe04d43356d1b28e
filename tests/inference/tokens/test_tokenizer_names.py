"""What a tokenizer may be called, and what is said about anything else."""

import logging

import pytest

from prorl_gym.errors import ConfigError
from prorl_gym.inference.tokens import tokenizer as module
from prorl_gym.inference.tokens.tokenizer import load_tokenizer, quiet_logs

KEYS = "Set 'inference.tokenizer' (in NeMo Gym: +prorl_tokenizer=DIR; on the command line: --tokenizer DIR)."
UNKNOWN = "tokenizer '{}': not 'small', no directory, no 'owner/name' on a hub."


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("smal", [UNKNOWN.format("smal"), f"Did you mean 'small'? {KEYS}"]),
        ("my-model", [UNKNOWN.format("my-model"), KEYS]),
        ("./none", ["tokenizer './none': no such directory.", KEYS]),
        ("", ["tokenizer '': no such directory.", KEYS]),
    ],
)
def test_what_cannot_be_on_a_hub_is_refused_without_asking_one(
    monkeypatch: pytest.MonkeyPatch, name: str, lines: list[str]
) -> None:
    monkeypatch.setattr(module, "is_reachable", pytest.fail)
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(name)
    assert str(caught.value).splitlines() == lines


def test_hub_that_is_not_there_is_one_message(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "is_reachable", lambda name: False)
    with pytest.raises(ConfigError) as caught:
        load_tokenizer("nobody/no-such-model-anywhere")
    assert str(caught.value).splitlines() == [
        "tokenizer 'nobody/no-such-model-anywhere': no such directory, and the hub cannot be reached.",
        KEYS,
    ]
    assert caplog.records == []


def test_the_client_s_warnings_are_kept_down_for_a_while_only() -> None:
    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    with quiet_logs():
        assert not logging.getLogger("huggingface_hub.utils._http").isEnabledFor(logging.WARNING)
    assert logger.level == before
