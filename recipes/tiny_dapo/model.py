"""A small decoder: RoPE, RMSNorm, GELU, an untied head. One code path trains it and samples from it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

CONTEXT = 192
WIDTH, LAYERS, HEADS = 96, 3, 4
HEAD = WIDTH // HEADS


@dataclass(slots=True)
class Cache:
    """Keys and values of ``slots`` sequences; what a padding token writes behind the last position is never read."""

    keys: Tensor
    values: Tensor

    @classmethod
    def empty(cls, slots: int) -> "Cache":
        """Return room for so many sequences of ``CONTEXT`` tokens."""
        shape = (LAYERS, slots, HEADS, CONTEXT + 1, HEAD)
        return cls(torch.zeros(shape), torch.zeros(shape))


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)])
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)


class Decoder(nn.Module):
    """Token ids to logits.

    Args:
        vocab_size: of the tokenizer.
        seed: of the initial weights.
    """

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(vocab_size, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.5 * parameter.shape[1] ** -0.5)
        frequencies = 10000.0 ** (-torch.arange(0, HEAD, 2) / HEAD)
        angles = torch.arange(CONTEXT + 1)[:, None] * frequencies
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)

    def forward(
        self, ids: Tensor, positions: Tensor | None = None, cache: Cache | None = None, slots: Tensor | None = None
    ) -> Tensor:
        """Return logits ``[batch, length, vocabulary]``.

        Args:
            ids: ``[batch, length]``, padded on the right.
            positions: of the ids in their sequences; from 0 by default.
            cache: holds what came before; the new keys and values are written into it.
            slots: of the cache, one for each row.
        """
        if positions is None:
            positions = torch.arange(ids.shape[1]).expand_as(ids)
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        visible = None
        if cache is not None:
            seen = int(positions.max()) + 1
            visible = (torch.arange(seen) <= positions[..., None])[:, None]
        x = self.embedding(ids)
        for layer, block in enumerate(self.blocks):
            q, k, v = (
                part.unflatten(-1, (HEADS, HEAD)).transpose(1, 2)
                for part in block.qkv(block.norms[0](x)).chunk(3, dim=-1)
            )
            q, k = q * cos + _rotated(q) * sin, k * cos + _rotated(k) * sin
            if cache is not None:
                # Indices around a slice: the batch and the positions come first, the heads behind them.
                cache.keys[layer, slots[:, None], :, positions] = k.transpose(1, 2)
                cache.values[layer, slots[:, None], :, positions] = v.transpose(1, 2)
                k, v = cache.keys[layer, slots, :, :seen], cache.values[layer, slots, :, :seen]
            mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=cache is None)
            x = x + block.out(mixed.transpose(1, 2).flatten(2))
            x = x + block.down(functional.gelu(block.up(block.norms[1](x))))
        return self.head(self.norm(x))


def _rotated(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def padded(rows: Sequence[Sequence[float]], kind: torch.dtype = torch.long) -> Tensor:
    """Return rows of different lengths as one tensor, zeros at their ends."""
    tensor = torch.zeros((len(rows), max(map(len, rows))), dtype=kind)
    for place, row in enumerate(rows):
        tensor[place, : len(row)] = torch.as_tensor(row, dtype=kind)
    return tensor


def token_logprobs(model: Decoder, ids: Tensor) -> Tensor:
    """Return the log-prob of each token given those before it, ``[batch, length]``; 0 for the first."""
    logits = model(ids[:, :-1])
    chosen = logits.gather(-1, ids[:, 1:, None]).squeeze(-1) - logits.logsumexp(-1)
    return functional.pad(chosen, (1, 0))
