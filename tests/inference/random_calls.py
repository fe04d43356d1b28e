"""Random calls whose arguments hold anything: quotes, tags, examples of calls, values of every type."""

import re

from hypothesis import strategies as st

RUN = {
    "command": {"type": "string"},
    "note": {"type": "string"},
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "exact": {"type": "boolean"},
    "kinds": {"type": "array"},
    "options": {"type": "object"},
    "mode": {"enum": ["fast", "1"]},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": {"type": "object", **schema}}}
    for name, schema in {"run": {"properties": RUN}, "look_up": {"properties": {"words": {"type": "string"}}}}.items()
]

EXAMPLE = "<tool_call>\n<function=run>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>"
TAGS = ["<tool_call>", "</tool_call>", "<function=run>", "</function>", "<parameter=x>", "</parameter>", EXAMPLE]
WORDS = ['"', "'", "\n", "\\", "{", "}", "[", "<", "é", "😀", "\x00", "ls -l", "null", "True", "1", "<|python_tag|>"]
NESTED = '{"name": "run", "arguments": {}}'
texts = st.lists(st.sampled_from([*WORDS, *TAGS, NESTED]), max_size=5).map("".join)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-9, 10**6), st.sampled_from([0.5, -1e30]), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(texts, inner, max_size=2)),
    max_leaves=4,
)
BY_TYPE = {
    "string": texts,
    "integer": st.integers(-9, 10**6),
    "number": st.sampled_from([0.5, 1.0, -1e30]),
    "boolean": st.booleans(),
    "array": st.lists(values, max_size=2),
    "object": st.dictionaries(texts, values, max_size=2),
    None: st.sampled_from(["fast", "1"]),
}
calls = st.one_of(
    st.fixed_dictionaries({}, optional={key: BY_TYPE[one.get("type")] for key, one in RUN.items()}).map(
        lambda given: ("run", given)
    ),
    texts.map(lambda words: ("look_up", {"words": words})),
)
turns = st.lists(calls, min_size=1, max_size=3)


def closes_itself(sent):
    """Whether a text ends its own call in the form without escapes: no reader could know."""
    texts = (value for _, given in sent for value in given.values() if isinstance(value, str))
    return any(re.search(r"</parameter>\s*(<parameter=|</function>|</tool_call>)", text) for text in texts)
