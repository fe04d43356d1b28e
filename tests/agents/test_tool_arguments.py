import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from prorl_gym.agents.protocol import ToolSpec, arguments_schema
from prorl_gym.agents.tool_arguments import BadArguments, parse_arguments

ROWS = [json.loads(line) for line in Path(__file__).with_name("tool_arguments.jsonl").read_text().splitlines()]
DEFS = {
    "Mode": {"type": "string", "enum": ["1", "2"]},
    "Opt": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "a/b": {"$ref": "#/$defs/Mode"},
}
WRITTEN = 'null true false 0 1 1.0 1.5 2 -0.0 1e3 "" "1" "2" "true" [] [1] [true] [0.0] {} {"a":1} {"a":true}'.split()
VALUES = st.sampled_from(WRITTEN).map(json.loads)
TYPES = st.sampled_from(["string", "boolean", "integer", "number", "array", "object", "null"])
LEAVES = st.one_of(
    st.sampled_from([{}, *({"$ref": f"#/$defs/{name}"} for name in ("Mode", "Opt", "a~1b"))]),
    st.fixed_dictionaries(
        {},
        optional={
            "type": TYPES | st.lists(TYPES, min_size=1, unique=True),
            "enum": st.lists(VALUES, min_size=1, max_size=3),
            "const": VALUES,
        },
    ),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.builds(
        lambda leaf, key, members: {**leaf, key: members},
        *(LEAVES, st.sampled_from(["anyOf", "allOf"]), st.lists(inner | st.booleans(), min_size=1, max_size=3)),
    ),
    max_leaves=6,
)


def tool(schema: Any) -> ToolSpec:
    return ToolSpec("t", "A tool.", {**arguments_schema({"x": schema}), "$defs": DEFS})


@pytest.mark.parametrize("row", ROWS, ids=json.dumps)
def test_arguments_are_read_by_json_schema(row):
    spec, written = tool(row["schema"]), f'{{"x": {row["written"]}}}'
    if "complaint" in row:
        with pytest.raises(BadArguments) as caught:
            parse_arguments(spec, written)
        assert row["complaint"] in str(caught.value)
    else:
        read = parse_arguments(spec, written)["x"]
        assert (read, type(read)) == (row["value"], type(row["value"]))


@settings(max_examples=500, deadline=None, derandomize=True)
@given(schema=SCHEMAS, written=st.sampled_from(WRITTEN))
def test_schemas_accept_what_the_json_schema_library_accepts(schema: Any, written: str) -> None:
    spec = tool(schema)
    is_valid = Draft202012Validator(spec.parameters).is_valid({"x": json.loads(written)})
    try:
        assert parse_arguments(spec, f'{{"x": {written}}}') == {"x": json.loads(written)}
    except BadArguments:
        assert not is_valid
    else:
        assert is_valid
