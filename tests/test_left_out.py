"""What readers of live wires leave out is logged once for each source, and counted each time."""

import logging

import pytest

from prorl_gym.left_out import count_left_out, left_out_counts, unknown_fields


def test_each_is_counted_and_each_name_logged_once_for_a_source(caplog: pytest.LogCaptureFixture) -> None:
    before = left_out_counts()["engine"]
    with caplog.at_level(logging.INFO, "prorl_gym.left_out"):
        for source in ("http://a", "http://b", "http://a"):
            count_left_out("engine", source, ["choice.new\n", "choice.new\n"])
    assert left_out_counts()["engine"] == before + 6
    what = "left out 'choice.new?', which is not known or cannot be used here"
    assert caplog.messages == [f"engine http://a: {what}", f"engine http://b: {what}"]


def test_a_source_that_invents_names_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "prorl_gym.left_out"):
        for number in range(1000):
            count_left_out("agent_program", "inventive", [f"{number} " + "x" * 10_000])
    assert len(caplog.messages) == 64
    assert max(map(len, caplog.messages)) < 250


def test_fields_that_hold_nothing_are_no_loss() -> None:
    fields = {"known": 1, "null": None, "empty": [], "none": {}, "new": 0.5}
    assert list(unknown_fields(fields, frozenset({"known"}), "choice.")) == ["choice.new"]
