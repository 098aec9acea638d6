"""Writes a small transformer with a symbolic batch and length as ONNX.

    python3 export_transformer.py transformer.onnx                   # torch 2.x

Two layers of an encoder over tokens, with seeded weights, exported by the exporter that traces.
"""

import sys

import torch
from torch import nn

VOCABULARY, WIDTH, HEADS, LAYERS = 64, 32, 4, 2


class Block(nn.Module):
    """Attention and a feed-forward net, each with a sum around it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.projection, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        parts = self.projection(self.first(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        weights = (query @ key.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5).softmax(-1)
        x = x + self.out((weights @ value).transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.narrow(nn.functional.gelu(self.wide(self.second(x))))


class Transformer(nn.Module):
    """Tokens to the probabilities of the next ones, as logits."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens)))


torch.manual_seed(17)
torch.onnx.export(
    Transformer().eval(),
    (torch.zeros(2, 5, dtype=torch.int64),),
    sys.argv[1],
    input_names=["tokens"],
    output_names=["logits"],
    dynamic_axes={"tokens": {0: "batch", 1: "length"}, "logits": {0: "batch", 1: "length"}},
    opset_version=17,
    dynamo=False,
)
