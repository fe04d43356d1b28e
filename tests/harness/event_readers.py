"""Reads streams as clients do: joins the events of each wire to the answer that is not streamed."""

import json
from typing import Any


def parse(stream: bytes) -> list[tuple[str, Any]]:
    """Return names and data of the events; comments are none."""
    events: list[tuple[str, Any]] = []
    for block in stream.decode().split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if lines:
            fields = dict(line.split(": ", 1) for line in lines)
            data = fields["data"]
            events.append((fields.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return events


def join_chat(stream: bytes) -> dict[str, Any]:
    *chunks, (_, done) = parse(stream)
    assert done == "[DONE]"
    message: dict[str, Any] = {"role": None, "content": ""}
    answer: dict[str, Any] = {}
    choice: dict[str, Any] = {"index": 0, "finish_reason": None, "message": message, "logprobs": None}
    for _, chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk"
        answer |= {key: chunk[key] for key in ("id", "created", "model", "usage") if key in chunk}
        for part in chunk["choices"]:
            assert choice["finish_reason"] is None, "nothing comes after the end"
            choice["finish_reason"] = part["finish_reason"]
            for key, value in part["delta"].items():
                if key == "tool_calls":
                    assert [call.pop("index") for call in value] == list(range(len(value)))
                    message[key] = value
                else:
                    message[key] = (message.get(key) or "") + value
    message["content"] = message["content"] or None
    return {"object": "chat.completion", **answer, "choices": [choice]}


def join_responses(stream: bytes) -> dict[str, Any]:
    """Return the response at the end; the events before it must add up to its items."""
    events = parse(stream)
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert all(name == data["type"] for name, data in events)
    items: list[dict[str, Any]] = []
    texts: dict[str, str] = {}
    for name, data in events:
        match name.removeprefix("response."):
            case "output_item.added":
                assert data["output_index"] == len(items)
                items.append(data["item"])
                texts[data["item"]["id"]] = ""
            case kind if kind.endswith(".delta"):
                texts[data["item_id"]] += data["delta"]
            case "output_item.done":
                place, item = data["output_index"], data["item"]
                assert place == len(items) - 1
                assert items[place]["id"] == item["id"]
                assert texts[item["id"]] == _text_of(item)
                items[place] = item
            case _:
                pass
    name, last = events[-1]
    assert name == f"response.{last['response']['status']}"
    assert last["response"]["output"] == items
    assert events[0][1]["response"]["id"] == last["response"]["id"]
    return last["response"]


def _text_of(item: dict[str, Any]) -> str:
    if item["type"] in ("function_call", "custom_tool_call"):
        return item["arguments" if item["type"] == "function_call" else "input"]
    (part,) = item["summary"] if item["type"] == "reasoning" else item["content"]
    return part["text"]


def join_messages(stream: bytes) -> dict[str, Any]:
    events = parse(stream)
    assert all(name == data["type"] for name, data in events)
    message: dict[str, Any] = {}
    blocks: list[dict[str, Any]] = []
    inputs: dict[int, str] = {}
    is_open = False
    for name, data in events:
        match name:
            case "message_start":
                message = data["message"]
            case "content_block_start":
                assert not is_open
                assert data["index"] == len(blocks)
                blocks.append(dict(data["content_block"]))
                is_open = True
            case "content_block_delta":
                assert is_open
                delta = data["delta"]
                kind = delta["type"].removesuffix("_delta")
                if kind == "input_json":
                    inputs[data["index"]] = inputs.get(data["index"], "") + delta["partial_json"]
                else:
                    blocks[data["index"]][kind] += delta[kind]
            case "content_block_stop":
                assert data["index"] == len(blocks) - 1
                is_open = False
            case "message_delta":
                message |= data["delta"] | {"usage": data["usage"]}
            case _:
                assert name in ("message_stop", "ping")
    assert events[-1][0] == "message_stop"
    for place, text in inputs.items():
        blocks[place]["input"] = json.loads(text)
    return message | {"content": blocks}
