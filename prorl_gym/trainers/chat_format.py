"""Records as chats to fine-tune on: the common ``{"messages": [...]}`` form, with a mark on each message."""

from collections.abc import Sequence
from typing import Any, Literal

from prorl_gym.records import SUMMARY_CONTINUATION, SUMMARY_REQUEST, Message, Rollout
from prorl_gym.trainers.sampled_turns import count_prompt_messages


def to_chat(rollout: Rollout, train_key: Literal["train", "weight"] = "train") -> dict[str, Any]:
    """Return a rollout as a chat.

    Trained are the turns that the policy sampled: not those of the prompt (few-shot examples), and not those with a
    malformed tool call, which is answered by a message in the user's role.

    Args:
        rollout: with its messages.
        train_key: ``"train": true`` or ``false``, or ``"weight": 1`` or ``0``.
    """
    trained = trained_message_indices(rollout)
    messages = [
        {**message.to_chat(), train_key: (index in trained) if train_key == "train" else int(index in trained)}
        for index, message in enumerate(rollout.messages)
    ]
    return {
        "messages": messages,
        **({"tools": rollout.tools} if rollout.tools else {}),
        "rollout_id": rollout.rollout_id,
        "group_id": rollout.group_id,
        "environment": rollout.environment,
        "reward": rollout.reward,
    }


def trained_message_indices(rollout: Rollout) -> set[int]:
    """Return the indices of messages to train on."""
    messages = rollout.messages
    prompt = count_prompt_messages(rollout)
    return {
        index
        for index, message in enumerate(messages)
        if index >= prompt and message.role == "assistant" and not _is_malformed_call(messages, index)
    }


def _is_malformed_call(messages: Sequence[Message], turn: int) -> bool:
    """Return whether a turn is answered by a message in the user's role: an error about a malformed call."""
    following = next((message for message in messages[turn + 1 :] if message.role != "tool"), None)
    return (
        following is not None
        and following.role == "user"
        and following not in (SUMMARY_REQUEST, SUMMARY_CONTINUATION)  # a complaint comes before the request
    )
