"""A session of our own loop over one scripted engine."""

from dataclasses import replace

from harness_play import said
from token_codecs import codec

from prorl_gym.inference.balance.engine_pool import EnginePool
from prorl_gym.inference.balance.health_monitor import FailoverOptions
from prorl_gym.inference.tokens.model_session import ModelSession
from prorl_gym.records import Message
from prorl_gym.settings import RolloutSettings, resolve_settings
from prorl_gym.testing.inference.fake_engine import FakeEngine, scripted_replies

RESULT = [Message(role="tool", content="4", tool_call_id="call_0_0", name="calc")]
CALL = '<tool_call>\n{"name": "calc", "arguments": {"term": "2 + 2"}}\n</tool_call>'


class Changed(FakeEngine):
    """A scripted engine whose results are changed on their way."""

    def __init__(self, script, changes):
        super().__init__("e", script)
        self.changes = changes

    async def generate(self, request):
        return replace(await super().generate(request), **self.changes)


class Talk:
    """``script``: texts, replies and errors, or a function of the request; ``changes``: of every result."""

    def __init__(
        self, script, name="small", *, max_model_len=None, changes=None, group_id="", thinking="keep", **settings
    ):
        self.codec = codec(name)
        if not callable(script):
            script = scripted_replies(said(each, name=name) if isinstance(each, str) else each for each in script)
        self.engine = Changed(script, changes or {})
        self.pool = EnginePool("policy", failover=FailoverOptions(recovery_seconds=0.1), max_model_len=max_model_len)
        self.pool.add_engine(self.engine)
        self.session = ModelSession(
            self.pool,
            self.codec,
            resolve_settings(RolloutSettings(**settings)),
            rollout_id="r",
            replica=1,
            group_id=group_id,
            thinking=thinking,
        )

    @property
    def segment(self):
        (segment,) = self.session.segments()
        return segment
