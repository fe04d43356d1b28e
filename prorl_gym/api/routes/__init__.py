"""The routes, one module per subject; each adds its own over an ``AppContext``."""

from typing import Annotated

from fastapi import Path, Query

IDENTIFIER = r"^[A-Za-z0-9][A-Za-z0-9._:\-]{0,127}$"

RunQuery = Annotated[
    str | None, Query(pattern=IDENTIFIER, description="Only records of this run.", examples=["step-7"])
]
GroupQuery = Annotated[
    str | None, Query(pattern=IDENTIFIER, description="Only records of this group.", examples=["prompt-3"])
]
PrefixQuery = Annotated[
    str | None, Query(pattern=IDENTIFIER, description="Only rollouts whose id has this prefix.", examples=["a7"])
]
RolloutPath = Annotated[str, Path(pattern=IDENTIFIER, description="Id of a rollout.", examples=["a7"])]
RunPath = Annotated[str, Path(pattern=IDENTIFIER, description="Id of a run.", examples=["step-7"])]
PoolQuery = Annotated[str, Query(max_length=64, description="Pool of engines.", examples=["policy"])]
