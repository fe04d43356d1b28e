"""Small task directories of both layouts, written for tests."""

from collections.abc import Mapping
from pathlib import Path

DOCKERFILE = """\
# syntax=docker/dockerfile:1
FROM python:3.13-slim AS base
ARG PLACE=/app
ENV GREETING="hello world" \\
    WHERE=$PLACE/data
WORKDIR ${PLACE}
COPY data/ ./data/
COPY --chmod=755 tool.sh /usr/local/bin/tool
RUN mkdir -p made \\
    # a comment in between
    && echo made > made/file
CMD ["bash"]
"""

TEST_SH = """\
#!/bin/bash
if python3 /tests/check.py; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""

CHECK = """\
import os, pathlib, sys
assert os.environ["MODE"] == "strict" and os.getcwd() == "/app"
said = pathlib.Path("/app/answer.txt")
sys.exit(0 if said.exists() and said.read_text().strip() == "42" else 1)
"""

HARBOR = {
    "task.toml": """\
version = "1.0"
[metadata]
difficulty = "easy"
[verifier]
timeout_sec = 30.0
env = { MODE = "strict" }
[agent]
timeout_sec = 77.0
[environment]
memory = "2G"
""",
    "instruction.md": "<!-- canary 123 -->\n\nAdd the numbers in data/numbers.txt; write the sum to answer.txt.\n",
    "environment/Dockerfile": DOCKERFILE,
    "environment/data/numbers.txt": "40\n2\n",
    "environment/tool.sh": '#!/bin/sh\necho "$GREETING from tool"\n',
    "tests/test.sh": TEST_SH,
    "tests/check.py": CHECK,
    "solution/solve.sh": '#!/bin/bash\nsource "$(dirname "$0")/helper.sh"\nadd data/numbers.txt > answer.txt\n',
    "solution/helper.sh": "add() { awk '{s += $1} END {print s}' \"$1\"; }\n",
}

BENCH = {
    "task.yaml": """\
instruction: |-
  Write the word done to /app/out.txt.
parser_name: pytest
max_agent_timeout_sec: 60.0
max_test_timeout_sec: 30.0
difficulty: easy
""",
    "Dockerfile": "FROM ghcr.io/base:1\nWORKDIR /app\nCOPY . /app\n",
    "docker-compose.yaml": """\
services:
  client:
    build:
      dockerfile: Dockerfile
    image: ${NAME}
    command: ["sh", "-c", "sleep infinity"]
    environment:
      - TEST_DIR=${T_BENCH_TEST_DIR}
      - COLOUR=blue
    volumes:
      - ${T_BENCH_TASK_LOGS_PATH}:${T_BENCH_CONTAINER_LOGS_PATH}
""",
    "notes.txt": "to be copied\n",
    "run-tests.sh": """\
echo "=== short test summary info ==="
for word in done; do
  if [ "$(cat /app/out.txt)" = "$word" ]; then echo "PASSED $TEST_DIR/test_outputs.py::test_$word"
  else echo "FAILED $TEST_DIR/test_outputs.py::test_$word - AssertionError"; fi
done
""",
    "tests/test_outputs.py": "# the script stands in for pytest\n",
    "solution.sh": "#!/bin/bash\necho done > /app/out.txt\n",
}


def write_task(folder: Path, files: Mapping[str, str], **changes: str | None) -> Path:
    """Write a task; ``changes`` are by file name, with ``__`` for a slash and ``_dot_`` for a point; None: left out."""
    wanted: dict[str, str | None] = {**files}
    wanted |= {name.replace("__", "/").replace("_dot_", "."): text for name, text in changes.items()}
    for name, text in wanted.items():
        if text is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
            (folder / name).chmod(0o755 if name.endswith(".sh") else 0o644)
    return folder
