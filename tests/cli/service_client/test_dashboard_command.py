import stat
import webbrowser
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest
from typer.testing import CliRunner

from prorl_gym.cli.main import app
from prorl_gym.errors import ConfigError


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PRORL_GYM_TOKEN", "a&b c")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("PRORL_GYM_URL", raising=False)


def test_the_token_stands_behind_the_hash_only() -> None:
    result = CliRunner().invoke(app, ["dashboard", "--url", "http://node7:9000/"])
    assert (result.exit_code, result.stdout) == (0, "http://node7:9000/#token=a%26b%20c\n")


def test_the_browser_is_not_started_with_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def note(address: str) -> bool:
        opened.append(address)
        return True

    monkeypatch.setattr(webbrowser, "open", note)
    for _ in range(2):
        result = CliRunner().invoke(app, ["dashboard", "--open"])
        assert result.exit_code == 0
    assert "token" not in opened[0]
    page = Path(unquote(urlparse(opened[0]).path))
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    assert result.stdout.strip() in page.read_text()


def test_without_a_browser_the_address_is_there_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webbrowser, "open", lambda address: False)
    result = CliRunner().invoke(app, ["dashboard", "--open"])
    assert result.exit_code == 1
    assert "#token=" in result.stdout
    assert "by hand" in result.stderr


def test_a_state_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    result = CliRunner().invoke(app, ["dashboard", "--open"])
    assert isinstance(result.exception, ConfigError)
    assert "#token=" in result.stdout
