import sys
from importlib.util import find_spec
from pathlib import Path

# The recipe is a folder of scripts. At the end of the path: its module names are ordinary words.
sys.path.append(str(Path(__file__).parents[2] / "recipes/tiny_dapo"))

# Torch is in the recipe's own environment only, whose interpreter runs these (.ci/run).
collect_ignore = [] if find_spec("torch") else ["test_tiny_dapo_torch.py", "test_tiny_modes_torch.py"]
