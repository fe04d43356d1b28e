"""Makes tiny checkpoints that vLLM can serve. Runs in the engine's environment (numpy, safetensors), not in ours.

    python make_model.py JOBS.json

Each job is an object with ``directory``, ``tokenizer`` (a directory, copied), ``vocab``, ``stop`` (the id that ends a
turn) and either ``seed`` or ``chain``:

- ``seed``: random weights, for everything that needs a policy whose next token depends on all before it.
- ``chain``: weights that say certain ids one after the other, whatever came before: ``[[7, 10], [10, 11]]`` says 10
  after 7 and 11 after 10. Attention and MLP add nothing; the head holds the embedding of each token's predecessor.

Embeddings and head are never tied: on CPU, vLLM 0.32 keeps a packed copy of a tied head when weights are reloaded.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

HIDDEN, LAYERS, HEADS, KV_HEADS, MLP = 128, 8, 4, 2, 256  # with fewer layers vLLM's HTTP side cannot keep up
HEAD = HIDDEN // HEADS
SPREAD = 0.25
"""Of the head's weights: logits then have a deviation of almost 3, so that weights differ visibly in log-probs."""


def config(vocab, stop):
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "vocab_size": vocab,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": stop,
        "torch_dtype": "float32",
    }


def random_weights(vocab, seed):
    """Every matrix drawn in a fixed order, so that a seed is a model."""
    draw = np.random.default_rng(seed)

    def matrix(rows, columns, deviation):
        return (draw.standard_normal((rows, columns)) * deviation).astype(np.float32)

    inner = HIDDEN**-0.5
    weights = {"model.embed_tokens.weight": matrix(vocab, HIDDEN, 1.0)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        weights |= {
            f"{at}.self_attn.q_proj.weight": matrix(HEADS * HEAD, HIDDEN, inner),
            f"{at}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD, HIDDEN, inner),
            f"{at}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD, HIDDEN, inner),
            f"{at}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD, inner),
            f"{at}.mlp.gate_proj.weight": matrix(MLP, HIDDEN, inner),
            f"{at}.mlp.up_proj.weight": matrix(MLP, HIDDEN, inner),
            f"{at}.mlp.down_proj.weight": matrix(HIDDEN, MLP, MLP**-0.5),
            f"{at}.input_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{at}.post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
        }
    weights["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    weights["lm_head.weight"] = matrix(vocab, HIDDEN, SPREAD)
    return weights


def chain_weights(vocab, chain):
    weights = random_weights(vocab, 0)
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name][:] = 0
    embeddings, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    head[:] = 0
    for before, after in chain:
        head[after] += embeddings[before]  # the logit of the right successor is about HIDDEN, any other far less
    return weights


def make(job):
    directory = Path(job["directory"])
    directory.mkdir(parents=True)
    for source in Path(job["tokenizer"]).iterdir():
        if source.name.startswith(("tokenizer", "chat_template.jinja", "vocab", "merges")):
            shutil.copy(source, directory)
    (directory / "config.json").write_text(json.dumps(config(job["vocab"], job["stop"])))
    chain = job.get("chain")
    weights = random_weights(job["vocab"], job["seed"]) if chain is None else chain_weights(job["vocab"], chain)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    for job in json.loads(Path(sys.argv[1]).read_text()):
        make(job)
