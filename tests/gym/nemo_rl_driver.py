"""What NeMo-RL does with NeMo Gym, without NeMo-RL: start the servers of a recipe, post all rows at once, stop.

Run as a program: ``nemo_rl_driver.py CONFIG ROWS ANSWERS``, by an interpreter that has NeMo Gym. ``CONFIG`` is
``env.nemo_gym`` of a resolved recipe with what NeMo-RL writes into it; ``ANSWERS`` gets a line for each row.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any


def main(config: Path, rows: Path, answers: Path) -> None:
    """Write the answers of ``/run`` to the rows, in the order in which they come."""
    from nemo_gym.cli import GlobalConfigDictParserConfig, RunHelper
    from nemo_gym.rollout_collection import RolloutCollectionHelper
    from nemo_gym.server_utils import BaseServerConfig
    from omegaconf import OmegaConf

    section: Any = json.loads(config.read_text())
    helper = RunHelper()
    parse = GlobalConfigDictParserConfig(
        dotenv_path=config.parent / "nemo_gym_env.yaml",
        initial_global_config_dict=OmegaConf.create(section),
        skip_load_from_cli=True,
    )
    helper.start(parse)
    head = BaseServerConfig(**section["head_server"])

    examples = [json.loads(line) for line in rows.read_text().splitlines()]

    async def collect() -> None:
        with answers.open("w") as file:
            for task in RolloutCollectionHelper().run_examples(examples=examples, head_server_config=head):
                try:
                    row, result = await task
                    answer = {"row": row, "result": result}
                except Exception as error:  # NeMo-RL reads the status off it
                    answer = {"status": getattr(error, "status", None), "error": str(error)}
                file.write(json.dumps(answer) + "\n")

    try:
        asyncio.run(collect())
    finally:
        helper.shutdown()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
