"""A server of ours that cannot start says so in two lines."""

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from pydantic import BaseModel

from prorl_gym.errors import ConfigError, ProrlError
from prorl_gym.gym_root.server_start import run_server, running_service

LINES = ["tokenizer 'x': no.", "Set +prorl_tokenizer=DIR."]


class Server(BaseModel):
    def model_post_init(self, context: object, /) -> None:
        raise ConfigError(*LINES)


def fails() -> None:
    raise ConfigError(*LINES)


@pytest.mark.parametrize("start", [fails, Server])
def test_error_of_ours_is_two_lines(start: type[Server], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run_server(start)
    assert caught.value.code == 2
    assert capsys.readouterr().err.splitlines() == LINES


def test_defect_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        run_server(lambda: 1 // 0)


async def test_start_error_of_the_service_has_no_traceback_of_uvicorn(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    @asynccontextmanager
    async def service() -> AsyncGenerator[None]:
        fails()
        yield

    log = logging.getLogger("uvicorn.error")
    try:
        with pytest.raises(ProrlError):
            async with running_service(service()):
                raise AssertionError("not reached")
        log.error("Traceback (most recent call last)\n...")
        log.error("Application startup failed.")
    finally:
        for added in [*log.filters]:
            log.removeFilter(added)
    assert capsys.readouterr().err.splitlines() == LINES
    assert [record.getMessage() for record in caplog.records] == ["Application startup failed."]
