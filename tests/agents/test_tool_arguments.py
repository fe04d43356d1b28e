import json
from pathlib import Path

import pytest

from prorl_gym.agents.protocol import ToolSpec, arguments_schema
from prorl_gym.agents.tool_arguments import BadArguments, parse_arguments

ROWS = [json.loads(line) for line in Path(__file__).with_name("tool_arguments.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("row", ROWS, ids=json.dumps)
def test_arguments_are_read_by_json_schema(row):
    schema = {**arguments_schema({"x": row["schema"]}), "$defs": {"Mode": {"enum": ["1", "2"]}}}
    spec, written = ToolSpec("t", "A tool.", schema), f'{{"x": {row["written"]}}}'
    if "complaint" in row:
        with pytest.raises(BadArguments) as caught:
            parse_arguments(spec, written)
        assert f"'x' {row['complaint']}" in str(caught.value)
    else:
        read = parse_arguments(spec, written)["x"]
        assert (read, type(read)) == (row["value"], type(row["value"]))
