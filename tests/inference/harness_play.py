"""A harness that plays with a session: sends whole histories, keeps what it is answered, and may change it."""

import json

from token_codecs import TOOLS, codec

from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.inference.balance.health_monitor import FailoverOptions
from prorl_gym.inference.tokens.harness_call import HarnessCall, Lineage
from prorl_gym.inference.tokens.harness_session import HarnessSession
from prorl_gym.inference.tokens.prompt_builder import HistoryEntry
from prorl_gym.records import Message
from prorl_gym.settings import RolloutSettings, resolve_settings
from prorl_gym.testing.inference.fake_engine import FakeEngine, Reply, scripted_replies

SYSTEM = Message(role="system", content="You edit files.")
TASK = Message(role="user", content="Rename the function.")
EDIT = {
    "type": "function",
    "function": {
        "name": "edit",
        "description": "Replace text.",
        "parameters": {
            "type": "object",
            "properties": {
                "old": {"type": "string"},
                "new": {"type": "string"},
                "replace_all": {"type": "boolean", "default": False},
            },
        },
    },
}
ALL_TOOLS = [*TOOLS, EDIT]


def tool_call(name="calc", **arguments):
    """A call as the model writes it."""
    written = json.dumps({"name": name, "arguments": arguments or {"term": "2 + 2"}})
    return f"<tool_call>\n{written}\n</tool_call>"


def said(text, end=True, hold=None, name="small"):
    ids = codec(name).tokenizer.encode_trusted(text)
    return Reply((*ids, codec(name).terminator_id) if end else tuple(ids), hold=hold)


def result(call, text="4"):
    return Message(role="tool", content=text, tool_call_id=call.id, name=call.name)


def user(text):
    return Message(role="user", content=text)


def assistant(text):
    return Message(role="assistant", content=text)


class Play:
    """A session over one scripted engine, and what it recorded."""

    def __init__(self, script, name="small", max_model_len=None, thinking="keep", **settings):
        self.engine = FakeEngine("e", script if callable(script) else scripted_replies(script))
        self.pool = EnginePool(
            "policy", failover=FailoverOptions(recovery_seconds=0.1, trial_seconds=0.2), max_model_len=max_model_len
        )
        self.pool.add_engine(self.engine)
        self.codec = codec(name)
        self.session = HarnessSession(
            self.pool,
            self.codec,
            resolve_settings(RolloutSettings(**{"max_turns": 999, "max_tokens": 60_000} | settings)),
            rollout_id="r",
            replica=1,
            thinking=thinking,
        )

    async def ask(self, *messages, tools=ALL_TOOLS, agent="", parent="", **options):
        """Make one call; return the turn."""
        entries = [HistoryEntry(message) for message in messages]
        call = HarnessCall(entries, tools, lineage=Lineage(agent, parent), **options)
        return await self.session.answer(call)

    @property
    def segments(self):
        return self.session.segments()

    @property
    def causes(self):
        return [segment.cause for segment in self.segments]

    def shows(self, segment):
        return self.codec.decode(segment.token_ids)


def shown(turn):
    return turn.parsed.as_message()
