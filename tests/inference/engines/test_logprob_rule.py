import logging

import pytest

from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.engines.logprob_rule import LogprobRule
from prorl_gym.testing.inference.engine_conformance import request

OFF_POLICY = [{"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 20}, {"temperature": 0.0}]
ADDRESS = "http://h/v1"


@pytest.mark.parametrize("changes", OFF_POLICY)
def test_raw_logprobs_of_another_distribution_are_refused_when_asked(changes):
    rule = LogprobRule("policy", require_processed_logprobs=True)
    with pytest.raises(EngineError, match="raw log-probs are not those of sampling at temperature") as caught:
        rule.check(request(**changes), "raw", ADDRESS)
    assert caught.value.kind is FailureKind.ENGINE_REFUSED


@pytest.mark.parametrize(
    ("changes", "kind"),
    [({}, "raw"), ({"temperature": 0.7}, "processed"), ({"temperature": 0.0, "priority": 1}, "raw")],
    ids=["plain sampling", "processed", "evaluation"],
)
def test_what_is_right_or_not_learnt_from_passes(changes, kind, caplog):
    LogprobRule("policy", require_processed_logprobs=True).check(request(**changes), kind, ADDRESS)
    assert not caplog.records


def test_a_pool_is_warned_once(caplog):
    caplog.set_level(logging.WARNING)
    rule = LogprobRule("policy")
    for address in (ADDRESS, "http://other/v1"):
        rule.check(request(temperature=0.5), "raw", address)
    (record,) = caplog.records
    assert record.getMessage().splitlines() == [
        "pool policy, engine http://h/v1: its raw log-probs are not those of sampling at temperature 0.5, top_p 1, "
        "top_k -1.",
        "Start it with --logprobs-mode processed_logprobs and set 'logprob_kind: processed', or sample at "
        "temperature 1.",
    ]
