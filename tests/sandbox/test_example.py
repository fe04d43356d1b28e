"""The example of docs/sandboxes.md, run as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from sandbox_support import kernel_has_user_namespaces

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs/sandboxes.md"


@pytest.mark.skipif(not kernel_has_user_namespaces(), reason="no user namespaces here")
def test_example_runs() -> None:
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    ran = subprocess.run([sys.executable, "-c", found[1]], capture_output=True, text=True, timeout=100, check=False)
    assert ran.stdout.split() == ["hi", "/tmp", "2", "0"], ran.stderr
