"""Item 14 of the trainer's contract: the recipes' own tests of their keys."""

import pytest
from test_nemo_rl_recipes import (  # noqa: F401  # pyright: ignore[reportUnusedImport]
    test_keys_are_those_of_the_base_recipe as test_14_recipe_key_sets_equal_the_base_recipe,
)
from test_nemo_rl_recipes import (  # noqa: F401  # pyright: ignore[reportUnusedImport]
    test_keys_of_the_overlay_are_those_of_its_base_recipes as test_14_overlay_key_sets_equal_the_base_recipes,
)

pytestmark = [pytest.mark.gym, pytest.mark.slow]  # with the rest of the contract; needs neither
