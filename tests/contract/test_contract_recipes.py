"""Item 14 of the trainer's contract: the recipes' own test of their keys."""

import pytest
from test_nemo_rl_recipes import test_key_set_is_that_of_the_base_recipe

pytestmark = [pytest.mark.gym, pytest.mark.slow]  # with the rest of the contract; needs neither

test_14_recipe_key_sets_equal_the_base_recipe = test_key_set_is_that_of_the_base_recipe
del test_key_set_is_that_of_the_base_recipe
