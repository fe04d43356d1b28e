"""The page about the configuration says what the code reads."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "configuration_page.py"


def test_the_committed_page_is_current() -> None:
    spec = spec_from_file_location("configuration_page", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.page() == script.PAGE.read_text(encoding="utf-8"), "run: python scripts/configuration_page.py"
    assert "| `inference.engines` | **required** |" in script.page()
