"""Train the small tokenizer of the demo and the tests on this repository's own text.

Byte-level BPE, so that every text can be encoded and decoding gives it back exactly; ChatML control tokens and a
Hermes-style tool template. The corpus is the committed text below ``CORPUS``, in sorted order; the same corpus gives
the same files. ``corpus.json`` beside the result tells what it was trained on.

    python scripts/train_tokenizer.py [--output DIR] [--vocabulary 4096] [FILE ...]
"""

import argparse
import hashlib
import json
import subprocess
from collections.abc import Mapping, Sequence
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
    given = {file.name: file.read_text(encoding="utf-8") for file in arguments.files}
    corpus = given or committed_text()
    arguments.output.mkdir(parents=True, exist_ok=True)
    train(list(corpus.values()), arguments.vocabulary).save(str(arguments.output / "tokenizer.json"))
    write_json(arguments.output / "tokenizer_config.json", settings())
    write_json(arguments.output / "corpus.json", fingerprints(corpus))


def train(texts: Sequence[str], vocabulary: int) -> Tokenizer:
    """Train a byte-level BPE on ``texts``, in the order given."""
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
    tokenizer.train_from_iterator(map(without_control, texts), trainer)
    return tokenizer


def without_control(text: str) -> str:
    """Return the text with the control strings taken out: they are tokens already."""
    for control in CONTROL:
        text = text.replace(control, "")
    return text


def committed_text() -> dict[str, str]:
    """Return the text files of the corpus by name, sorted, as the last commit has them."""
    entries = git("ls-tree", "-r", "-z", "HEAD", "--", *CORPUS).split("\0")
    # "mode type object\tname"; links have another mode
    listed = [entry.partition("\t") for entry in entries if entry.startswith("100")]
    objects = {name: details.split()[2] for details, _, name in listed}
    wanted = sorted(name for name in objects if Path(name).suffix in SUFFIXES and "oracle/tokenizer" not in name)
    return {name: git("cat-file", "blob", objects[name]) for name in wanted}


def git(*arguments: str) -> str:
    """Run git in the repository and return what it prints."""
    return subprocess.run(["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True).stdout


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


def fingerprints(corpus: Mapping[str, str]) -> dict[str, str]:
    """Return the SHA-256 of each text of the corpus."""
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in corpus.items()}


def write_json(path: Path, value: object) -> None:
    """Write indented JSON with a final newline."""
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
