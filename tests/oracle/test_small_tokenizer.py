"""The tokenizer that ships with the package, and the script that made it."""

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_gym.inference.tokens.tokenizer import SMALL_DIRECTORY, load_tokenizer

SOURCE = Path(__file__).parents[2] / "scripts" / "train_tokenizer.py"
SCRIPT = SimpleNamespace(**runpy.run_path(str(SOURCE)))
TOKENIZER = load_tokenizer("small")


@settings(derandomize=True, max_examples=200, deadline=None, database=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_every_text_comes_back_exactly(text):
    assert TOKENIZER.decode(TOKENIZER.encode_untrusted(text)) == text


def test_its_size_and_control_tokens():
    assert 2000 <= TOKENIZER.vocab_size <= 4096
    assert tuple(sorted(TOKENIZER.control_ids, key=TOKENIZER.control_ids.__getitem__)) == SCRIPT.CONTROL


def test_vocabulary_with_gaps_ends_after_its_largest_id(tmp_path):
    for file in SMALL_DIRECTORY.iterdir():
        if file.is_file() and file.name != "tokenizer.json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    definition = json.loads((SMALL_DIRECTORY / "tokenizer.json").read_text())
    vocabulary = definition["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.get)
    vocabulary[last] = 50_000
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    with_gap = load_tokenizer(str(tmp_path))
    assert with_gap.vocab_size == 50_001
    assert max(with_gap.encode_untrusted(with_gap.decode([50_000]))) == 50_000


def test_digits_are_single_tokens():
    assert len(TOKENIZER.encode_untrusted("1234")) == 4


def test_no_path_of_a_machine_is_in_it():
    for name in json.loads((SMALL_DIRECTORY / "corpus.json").read_text()):
        assert not Path(name).is_absolute()


def test_training_is_deterministic():
    first, second = (SCRIPT.train([SOURCE.read_text()] * 2, 600).to_str() for _ in range(2))
    assert first == second
    assert json.loads(first)["model"]["merges"]


def test_the_committed_files_are_the_scripts_own_form():
    assert json.loads((SMALL_DIRECTORY / "tokenizer_config.json").read_text()) == SCRIPT.settings()
