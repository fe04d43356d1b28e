from prorl_gym.records import Message, ToolCall
from prorl_gym.trainers.responses_items import last_answer, messages_from_items

ITEMS = [
    {"role": "system", "content": "Solve."},
    {"role": "user", "content": [{"type": "input_text", "text": "2+"}, {"type": "input_text", "text": "2?"}]},
    {"type": "reasoning", "summary": []},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hm."}]},
    {"type": "function_call", "call_id": "c", "name": "python", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "4"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "4"}]},
]


def test_items_become_turns():
    assert messages_from_items(ITEMS) == [
        Message(role="system", content="Solve."),
        Message(role="user", content="2+2?"),
        Message(role="assistant", content="Hm.", tool_calls=(ToolCall(id="c", name="python", arguments="{}"),)),
        Message(role="tool", content="4", tool_call_id="c"),
        Message(role="assistant", content="4"),
    ]


def test_a_text_or_a_call_alone_is_a_turn():
    assert messages_from_items("hello") == [Message(role="user", content="hello")]
    assert messages_from_items(ITEMS[4:5])[0].tool_calls[0].name == "python"


def test_last_answer_is_the_last_text_of_the_assistant():
    assert last_answer(ITEMS) == "4"
    assert last_answer(ITEMS[:2]) is None
    assert last_answer([*ITEMS[:6], ITEMS[2]]) is None, "the last turn did not end its thoughts"


def test_strange_items_do_not_raise():
    assert messages_from_items(
        [{}, {"type": "function_call"}, {"role": 3, "content": 5}, {"type": "message", "content": None}]
    )
