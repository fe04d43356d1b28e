from prorl_gym.inference.toolcalls.argument_schema import accepts


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
