"""Train the small tokenizer of the demo and the tests on this repository's own text.

Byte-level BPE, so that every text can be encoded and decoding gives it back exactly; ChatML control tokens and a
Hermes-style tool template. The corpus is the tracked text below ``CORPUS``, in sorted order; the same corpus gives
the same files. ``corpus.json`` beside the result tells what it was trained on.

    python scripts/train_tokenizer.py [--output DIR] [--vocabulary 4096] [FILE ...]
"""

import argparse
import hashlib
import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "prorl_gym" / "oracle" / "tokenizer"
CORPUS = ("README.md", "LICENSE", "docs", "environments", "prorl_gym", "scripts", "tests")
SUFFIXES = {".md", ".py", ".yaml", ".jsonl", ".toml", ""}
CONTROL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)

# Words with their leading blank, single digits, runs of punctuation, newlines, blanks.
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def main() -> None:
    """Train and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="corpus; by default the repository's own text")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--vocabulary", type=int, default=4096)
    arguments = parser.parse_args()
    files = arguments.files or tracked_text()
    arguments.output.mkdir(parents=True, exist_ok=True)
    train(files, arguments.vocabulary).save(str(arguments.output / "tokenizer.json"))
    write_json(arguments.output / "tokenizer_config.json", settings())
    write_json(arguments.output / "corpus.json", fingerprints(files))


def train(files: Sequence[Path], vocabulary: int) -> Tokenizer:
    """Train a byte-level BPE on ``files``, in the order given."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        special_tokens=list(CONTROL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(files), trainer)
    return tokenizer


def texts(files: Sequence[Path]) -> Iterator[str]:
    """Yield the corpus, with the control strings taken out: they are tokens already."""
    for file in files:
        text = file.read_text(encoding="utf-8")
        for control in CONTROL:
            text = text.replace(control, "")
        yield text


def tracked_text() -> list[Path]:
    """Return the tracked text files of the corpus, sorted."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--", *CORPUS], check=True, capture_output=True, text=True
    ).stdout
    paths = sorted(name for name in listed.split("\0") if name)
    kept = [ROOT / name for name in paths if Path(name).suffix in SUFFIXES and "oracle/tokenizer" not in name]
    return [path for path in kept if path.is_file() and not path.is_symlink()]


def settings() -> dict[str, object]:
    """Return what ``transformers`` reads beside the vocabulary."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 131072,
    }


def fingerprints(files: Sequence[Path]) -> dict[str, str]:
    """Return the SHA-256 of each file of the corpus."""
    return {
        str(file.relative_to(ROOT) if file.is_relative_to(ROOT) else file.name): hashlib.sha256(
            file.read_bytes()
        ).hexdigest()
        for file in files
    }


def write_json(path: Path, value: object) -> None:
    """Write indented JSON with a final newline."""
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
