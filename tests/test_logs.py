"""Structured logs: who a line is about, and what must never be in one."""

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from prorl_gym import logs


@pytest.fixture
def lines() -> Iterator[Any]:
    root = logging.getLogger()
    handlers, level, stream = root.handlers[:], root.level, io.StringIO()
    logs.configure_logging("info", "json", stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    root.handlers[:] = handlers
    root.setLevel(level)


async def test_identity_follows_tasks_and_ends_with_its_block(lines: Any) -> None:
    async def work(name: str) -> None:
        with logs.log_context(stage=name):
            await asyncio.sleep(0)
            logging.getLogger("somebody").info("at work")

    with logs.log_context(rollout_id="r1", group_id=None, attempt=0):
        await asyncio.gather(work("init"), work("run"))
    logging.info("alone")
    first, second, third = lines()
    assert [(line["rollout_id"], line["attempt"], line["stage"]) for line in (first, second)] == [
        ("r1", 0, "init"),
        ("r1", 0, "run"),
    ]
    assert "group_id" not in first
    assert set(third) == {"time", "level", "logger", "message"}


def test_a_traceback_is_a_field_and_one_line(lines: Any) -> None:
    try:
        raise ValueError("line one\nline two")
    except ValueError:
        logging.exception("it broke")
    (line,) = lines()
    assert (line["level"], line["message"]) == ("error", "it broke")
    assert "ValueError: line one\nline two" in line["traceback"]


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("Authorization: Bearer abcdef123456", "abcdef123456"),
        ("no answer from http://user:abcdef123456@host:8000/v1", "abcdef123456"),
        ("no answer from http://user:abc@def123456@host:8000/v1", "def123456"),
        ("authorization=Basic abcdef123456", "abcdef123456"),
        ("calling with api_key=abcdef123456 now", "abcdef123456"),
        ('{"password": "abcdef123456"}', "abcdef123456"),
        ("key sk-abcdefghijkl123456 leaked", "sk-abcdefghijkl123456"),
        ("nvapi-abcdefghijkl_123456", "nvapi-abcdefghijkl_123456"),
        ("the registered s3cr3t-value is here", "s3cr3t-value"),
    ],
)
def test_secrets_are_hidden_in_messages_arguments_and_tracebacks(lines: Any, text: str, hidden: str) -> None:
    logs.register_secret("s3cr3t-value")
    logging.info("%s", text)
    try:
        raise RuntimeError(text)
    except RuntimeError:
        logging.exception("broke")
    written = json.dumps(lines())
    assert hidden not in written
    assert "[hidden]" in written


def test_facts_of_an_event_are_fields_without_secrets(lines: Any) -> None:
    logs.register_secret("s3cr3t-value")
    logging.info("asked", extra={"event": {"host": "s3cr3t-value.example", "port": 443}})
    assert lines()[0]["event"] == {"host": "[hidden].example", "port": 443}


def test_ordinary_words_are_not_hidden() -> None:
    logs.register_secret("the")  # too short to be a secret
    text = "sampled 12 tokens; the token count of task-1234567890123 is fine"
    assert logs.redact(text) == text


def test_a_huge_message_is_shortened(lines: Any) -> None:
    logging.info("x" * 100_000)
    (line,) = lines()
    assert len(line["message"]) < 20_000
    assert line["message"].endswith("(83616 characters left out)")


def test_plain_form_for_people() -> None:
    record = logging.LogRecord("x", logging.WARNING, "", 0, "engine %s is down", ("a",), None)
    with logs.log_context(rollout_id="r1"):
        assert logs.PlainFormatter().format(record).endswith("warning engine a is down [rollout_id=r1]")


def test_quoted_text_forges_no_plain_line_and_drives_no_terminal() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logs.PlainFormatter())
    log = logging.Logger("quotes")
    log.addHandler(handler)
    log.warning("engine says: %s", "a\x1b[2Jb\n12:00:00 error   all is lost\r\x85c")
    first, second = stream.getvalue().rstrip("\n").split("\n")
    assert first.endswith("engine says: a\ufffd[2Jb")
    assert second == "    12:00:00 error   all is lost\ufffd\ufffdc"


@pytest.mark.parametrize(("is_terminal", "shown"), [(True, "a line of text"), (False, '{"time": ')])
def test_a_terminal_gets_text_and_a_file_json(is_terminal: bool, shown: str, lines: Any) -> None:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return is_terminal

    stream = Stream()
    logs.configure_logging(stream=stream)
    logging.info("a line of text")
    assert shown in stream.getvalue()
    assert stream.getvalue().startswith("{") != is_terminal
