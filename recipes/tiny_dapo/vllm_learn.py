"""The recipe on a real vLLM: ``python vllm_learn.py --service PATH/TO/prorl-gym --vllm "$(.ci/vllm)"``.

The decoder has the shape of a Llama (``model.LLAMA``) and is written as a checkpoint that vLLM serves. Each update
writes another one, which the running server loads in place (``reload_weights``, a route of vLLM's development mode).
vLLM for CPU computes in float32, the learner in float64: the bound of the mismatch is wider than with the recipe's own
engine.
"""

import asyncio
import json
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any, cast

import torch
from aiohttp import ClientSession
from engine import MODEL
from evaluate import account_of, accuracy
from learn import say
from model import CONTEXT, LLAMA, WIDTH, Block, Decoder
from processes import Process, server
from safetensors.torch import save_file
from stack import script_parser, stack, start_weights, write_report
from tasks import Sum, held_out, write_tokenizer
from train import RUN, Learner

from prorl_gym.free_ports import free_ports

MAX_MISMATCH = 1e-3
"""In nats: above float32, far below what a wrong mask or version shows."""
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
FLAGS = (
    *("--served-model-name", MODEL, "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager"),
    *("--max-model-len", str(CONTEXT), "--max-num-seqs", "32", "--max-logprobs", "8"),
    # On CPU, vLLM 0.32 dies of a seeded call whose prompt it computes in pieces ("CPU Generator does not use offset").
    *("--no-enable-chunked-prefill", "--max-num-batched-tokens", "8192"),
    *("--enable-prompt-tokens-details", "--disable-uvicorn-access-log"),
)


def config(decoder: Decoder, end: int) -> dict[str, object]:
    """Return the decoder's ``config.json``."""
    shape = decoder.shape
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": WIDTH,
        "intermediate_size": shape.inner,
        "num_hidden_layers": len(decoder.blocks),
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "head_dim": shape.head,
        "vocab_size": decoder.head.out_features,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-12,  # the decoder's own is that of float64
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": end,
        "torch_dtype": "float32",
    }


def llama_weights(decoder: Decoder) -> dict[str, torch.Tensor]:
    """Return the decoder's weights under Llama's names."""
    found = {
        "model.embed_tokens.weight": decoder.embedding.weight,
        "model.norm.weight": decoder.norm.weight,
        "lm_head.weight": decoder.head.weight,
    }
    for number, block in enumerate(cast("Iterable[Block]", decoder.blocks)):
        queries, keys, values = block.qkv.weight.chunk(3)
        parts = {
            "self_attn.q_proj": queries,
            "self_attn.k_proj": keys,
            "self_attn.v_proj": values,
            "self_attn.o_proj": block.out.weight,
            "mlp.gate_proj": block.gate.weight,
            "mlp.up_proj": block.up.weight,
            "mlp.down_proj": block.down.weight,
            "input_layernorm": block.norm_in.weight,
            "post_attention_layernorm": block.norm_up.weight,
        }
        found |= {f"model.layers.{number}.{name}.weight": value for name, value in parts.items()}
    return {name: value.detach().float().contiguous() for name, value in found.items()}


@dataclass
class VllmLearner(Learner):
    """Gives its weights to vLLM as a checkpoint."""

    checkpoint: Path = Path()
    reloads: int = 0

    async def load_weights(self) -> None:
        """Write the checkpoint, and have the server load it in place."""
        save_file(llama_weights(self.model), self.checkpoint / "model.safetensors", metadata={"format": "pt"})
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(self.checkpoint)}}
        async with ClientSession(self.engine, raise_for_status=True) as session:
            await session.post("/collective_rpc", json=body)
        self.reloads += 1


@contextmanager
def vllm_server(python: Path, checkpoint: Path, out: Path, home: Path) -> Iterator[str]:
    """Run vLLM on a checkpoint; yield its address, ending in ``/v1``."""
    (port,) = free_ports(1)
    env = SETTINGS | {"VLLM_CACHE_ROOT": str(home / "cache"), "VLLM_CONFIG_ROOT": str(home / "config")}
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint), *FLAGS]
    command += ["--port", str(port)]
    started = re.compile("Application startup complete")
    with server(Process("vllm", command, out / "vllm.log", announced=started, env=env)):
        yield f"http://127.0.0.1:{port}/v1"


async def learn(running: Any, learner: VllmLearner, updates: int, questions: int) -> dict[str, Any]:
    """Learn; return the figures."""
    client, asked = learner.client, held_out(Sum, questions)
    await learner.publish()
    before = [await accuracy(client, f"before-{kind}", asked, kind) for kind in (0.0, 1.0)]
    say(f"before: greedy {before[0]:.2f}, sampled {before[1]:.2f}")
    steps = []
    async for step in learner.learn(updates):
        steps.append(step)
        say(
            f"update {len(steps)}: reward {step.reward:.2f}, mismatch {step.mismatch.max_abs_diff:.1e}, "
            f"kl {step.mismatch.kl:.1e}, {step.seconds:.1f} s ({step.waited:.1f} s waiting)"
        )
    await client.cancel(runs=[RUN])
    after = [await accuracy(client, f"after-{kind}", asked, kind) for kind in (0.0, 1.0)]
    account = await account_of(client, RUN, learner.submitted)
    return {
        "before": {"greedy": before[0], "sampled": before[1]},
        "after": {"greedy": after[0], "sampled": after[1]},
        "reloads": learner.reloads,
        "rollouts": account.submitted,
        "lost": account.lost,
        "ends": dict(account.ends),
        "steps": [asdict(step) for step in steps],
    }


def main() -> None:
    """Learn once and write the report."""
    parser = script_parser(__doc__, Path("results/tiny_vllm"), updates=10, questions=64)
    parser.add_argument("--vllm", type=Path, required=True, help="the interpreter of vLLM's environment")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    started = monotonic()
    with tempfile.TemporaryDirectory(prefix="prorl-vllm-") as place:
        work = Path(place)
        work.chmod(0o755)
        language = write_tokenizer(Sum, work / "tokenizer")
        decoder = start_weights(language, arguments.seed, arguments.out / f"llama-{arguments.seed}.pt", LLAMA)
        checkpoint = work / "checkpoint"
        write_tokenizer(Sum, checkpoint)
        (checkpoint / "config.json").write_text(json.dumps(config(decoder, language.end)), encoding="utf-8")
        save_file(llama_weights(decoder), checkpoint / "model.safetensors", metadata={"format": "pt"})
        with (
            vllm_server(arguments.vllm, checkpoint, arguments.out, work) as engine,
            stack(arguments.service, work, arguments.out, engine) as running,
        ):

            async def session() -> dict[str, Any]:
                async with running.client() as client:
                    learner = VllmLearner(
                        client,
                        running.engine,
                        decoder,
                        Sum,
                        arguments.seed,
                        max_mismatch=MAX_MISMATCH,
                        checkpoint=checkpoint,
                    )
                    return await learn(running, learner, arguments.updates, arguments.questions)

            found = asyncio.run(session())
    mismatch = max(step["mismatch"]["max_abs_diff"] for step in found["steps"])
    report = {"seed": arguments.seed, "largest_mismatch": mismatch, "seconds": round(monotonic() - started), **found}
    write_report(arguments.out / "report.json", report)
    problem = found["lost"] > 0
    say(f"vllm: {'FAIL lost rollouts' if problem else 'done'}: {found['before']} -> {found['after']}, {mismatch:.1g}")
    sys.exit(problem)


if __name__ == "__main__":
    main()
