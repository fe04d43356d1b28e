from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from token_codecs import BOUNDED

from prorl_gym.inference.toolcalls.argument_schema import accepts

DEFS = {
    "Mode": {"type": "string", "enum": ["1", "2"]},
    "Opt": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "a/b": {"$ref": "#/$defs/Mode"},
}
VALUES = st.sampled_from([None, True, False, 0, 1, 1.0, 1.5, 2, -0.0, 1e3, "", "1", "2", "true", [], [1], {}, {"a": 1}])
TYPES = st.sampled_from(["string", "boolean", "integer", "number", "array", "object", "null"])
LEAVES = st.one_of(
    st.sampled_from([{}, True, False, *({"$ref": f"#/$defs/{name}"} for name in ("Mode", "Opt", "a~1b"))]),
    st.builds(lambda kind: {"type": kind}, st.one_of(TYPES, st.lists(TYPES, min_size=1, unique=True))),
    st.builds(lambda values: {"enum": values}, st.lists(VALUES, min_size=1, max_size=3)),
    st.builds(lambda value: {"const": value}, VALUES),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.builds(
        lambda leaf, key, members: {**(leaf if isinstance(leaf, dict) else {}), key: members},
        *(inner, st.sampled_from(["anyOf", "allOf"]), st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=6,
)


@settings(BOUNDED, max_examples=500)
@given(value=VALUES, schema=SCHEMAS)
def test_schemas_accept_what_the_json_schema_library_accepts(value, schema):
    root = {"$defs": DEFS, "properties": {"x": schema}}
    by_library = Draft202012Validator({"$defs": DEFS, "allOf": [schema]}).is_valid(value)
    assert accepts(value, schema, root) is by_library


def test_what_is_not_understood_constrains_nothing():
    references = ({"$ref": to} for to in ("https://elsewhere/schema", 5, "#/$defs/none", "#/properties/x"))
    odd = {"anyOf": "x", "allOf": 5, "oneOf": {}, "enum": "a"}
    for schema in ({"type": "float"}, {"type": {}}, *references, odd, 5):
        assert accepts(1.5, schema, {"properties": {"x": schema}}), schema


def test_each_schema_is_asked_once() -> None:
    """Or references to itself would take 200**10 steps."""
    schema = {"allOf": [{"$ref": "#"}] * 200 + [{"type": "string"}]}
    assert accepts("x", schema, schema)
    assert not accepts(1, schema, schema)
