"""A small decoder: RoPE, RMSNorm, GELU, an untied head. One code path trains it and samples from it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

CONTEXT = 192
WIDTH, LAYERS = 96, 3


@dataclass(frozen=True, slots=True)
class Shape:
    """What a decoder may differ in."""

    heads: int = 4
    gated: bool = False
    """SwiGLU instead of GELU: with it, the decoder is a Llama that other engines serve."""

    @property
    def head(self) -> int:
        """Width of a head."""
        return WIDTH // self.heads

    @property
    def inner(self) -> int:
        """Width of the feed-forward network."""
        return 256 if self.gated else 4 * WIDTH


TINY, LLAMA = Shape(), Shape(heads=3, gated=True)


class Cache:
    """Keys and values of sequences. What a padding token writes behind the end of its sequence is never read.

    Args:
        slots: how many sequences it holds, of ``CONTEXT`` tokens.
        model: whose keys and values.
    """

    def __init__(self, slots: int, model: "Decoder") -> None:
        shape, kind = model.shape, model.head.weight.dtype
        self._keys = torch.zeros(LAYERS, slots, shape.heads, CONTEXT + 1, shape.head, dtype=kind)
        self._values = torch.zeros_like(self._keys)

    def extend(self, layer: int, place: "CachePositions", keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write the keys and values of new tokens; return those of the sequences up to them."""
        for held, new in ((self._keys, keys), (self._values, values)):
            # Indices around a slice: the batch and the positions come first, the heads behind them.
            held[layer, place.slots[:, None], :, place.positions] = new.transpose(1, 2)
        return self._keys[layer, place.slots, :, : place.seen], self._values[layer, place.slots, :, : place.seen]


class CachePositions:
    """Where the tokens of a batch go in a cache.

    Args:
        cache: holds what came before.
        slots: of the cache, one for each row.
        starts: position of each row's first token.
        length: of the padded rows.
    """

    def __init__(self, cache: Cache, slots: Tensor, starts: Tensor, length: int) -> None:
        self.cache, self.slots = cache, slots
        self.positions = (starts[:, None] + torch.arange(length)).clamp(max=CONTEXT)
        self.seen = int(self.positions.max()) + 1
        self.visible = (torch.arange(self.seen) <= self.positions[..., None])[:, None]


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a norm.

    Args:
        layer: its number.
        shape: of the decoder.
    """

    def __init__(self, layer: int, shape: Shape) -> None:
        super().__init__()
        self._layer, self._shape = layer, shape
        inner = shape.inner
        self.norm_in, self.norm_up = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, inner, bias=False)
        self.down = nn.Linear(inner, WIDTH, bias=False)
        if shape.gated:
            self.gate = nn.Linear(WIDTH, inner, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, place: CachePositions | None) -> Tensor:
        """Return the residual stream after this block."""
        heads = (self._shape.heads, self._shape.head)
        split = (part.unflatten(-1, heads).transpose(1, 2) for part in self.qkv(self.norm_in(x)).chunk(3, -1))
        q, k, v = split
        q, k = q * cos + _rotated(q) * sin, k * cos + _rotated(k) * sin
        if place is None:
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            k, v = place.cache.extend(self._layer, place, k, v)
            mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=place.visible)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(self._widened(self.norm_up(x)))

    def _widened(self, x: Tensor) -> Tensor:
        if self._shape.gated:
            return functional.silu(self.gate(x)) * self.up(x)
        return functional.gelu(self.up(x))


class Decoder(nn.Module):
    """Token ids to logits.

    Args:
        vocab_size: of the tokenizer.
        seed: of the initial weights.
        shape: see there.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, vocab_size: int, seed: int = 0, shape: Shape = TINY) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.shape = shape
        self.embedding = nn.Embedding(vocab_size, WIDTH)
        self.blocks = nn.ModuleList([Block(layer, shape) for layer in range(LAYERS)])
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.5 * parameter.shape[1] ** -0.5)
        angles = torch.arange(CONTEXT + 1)[:, None] * 10000.0 ** (-torch.arange(0, shape.head, 2) / shape.head)
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)

    def forward(self, ids: Tensor, place: CachePositions | None = None) -> Tensor:
        """Return logits ``[batch, length, vocabulary]``.

        Args:
            ids: ``[batch, length]``, padded on the right.
            place: where they go on in a cache; without one they are whole sequences.
        """
        return self.head(self.hidden(ids, place))

    def hidden(self, ids: Tensor, place: CachePositions | None = None) -> Tensor:
        """Return what the head turns into logits, ``[batch, length, WIDTH]``."""
        at = torch.arange(ids.shape[1])[None] if place is None else place.positions
        cos, sin = self.cos[at][:, None], self.sin[at][:, None]
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, cos, sin, place)
        return self.norm(x)


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
