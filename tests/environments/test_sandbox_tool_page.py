"""The first block of ``docs/tools.md``, run: a tool of one's own in a real sandbox."""

import re
from pathlib import Path
from typing import Any

from prorl_gym.environments.protocol import Leases
from prorl_gym.settings import SERVICE_DEFAULTS, resolve_settings

PAGE = Path(__file__).parents[2] / "docs" / "tools.md"
ROW = {
    "question": "How many apples are there?",
    "tables": "CREATE TABLE shop (thing, count); INSERT INTO shop VALUES ('apple', 3), ('pear', 5);",
    "answer": "3",
}


async def test_the_tool_queries_the_tables_of_its_row(leases: Leases) -> None:
    names: dict[str, Any] = {}
    found = re.search(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert found is not None
    exec(found[1], names)
    environment = names["ShopEnvironment"]()
    task = environment.parse_row(ROW)
    episode = await environment.init(task, leases, resolve_settings(SERVICE_DEFAULTS))
    sql, finish = episode.tools
    assert (sql.spec.name, finish.spec.name) == ("sql", "finish")
    assert (await sql({"query": "SELECT * FROM shop ORDER BY count"})).text == "apple 3\npear 5\n"
    assert "no such table: shops" in (await sql({"query": "SELECT * FROM shops"})).text
    assert [(await environment.grade(task, answer, leases)).reward for answer in ("3", "5")] == [1.0, 0.0]
