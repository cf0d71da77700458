"""The models of bench/torch_training.py: random weights, random tokens, one training step as a function."""

import dataclasses
from typing import Callable

import torch
from torch import nn

GOALS = {"TransformerEncoder": 1.3}  # times as fast a step with the switch on, at least


@dataclasses.dataclass(frozen=True)
class Size:
    """A stack of nn.TransformerEncoderLayer; with a vocabulary, BERT's embeddings before and its word scores behind."""

    layers: int
    width: int
    heads: int
    feedforward: int
    batch: int
    seqlen: int
    vocabulary: int = 0
    dropout: float = 0.1

    def __str__(self):
        words = f", vocabulary {self.vocabulary}" if self.vocabulary else ""
        return (
            f"{self.layers} layers, {self.width} wide, {self.heads} heads, feedforward {self.feedforward}{words}, "
            f"B={self.batch}, S={self.seqlen}, dropout {self.dropout}, float32"
        )


SIZES = {
    "TransformerEncoder": Size(layers=6, width=512, heads=8, feedforward=2048, batch=4, seqlen=512),
    "BERT-base": Size(layers=12, width=768, heads=12, feedforward=3072, batch=2, seqlen=512, vocabulary=30522),
}
TINY = {
    "TransformerEncoder": Size(layers=2, width=32, heads=4, feedforward=64, batch=2, seqlen=16),
    "BERT-base": Size(layers=2, width=32, heads=4, feedforward=64, batch=2, seqlen=16, vocabulary=50),
}


class _Bert(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.words = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Parameter(torch.randn(size.seqlen, size.width))
        self.norm = nn.LayerNorm(size.width)
        self.dropout = nn.Dropout(size.dropout)
        self.encoder = _encoder(size, "gelu")
        self.read = nn.Linear(size.width, size.vocabulary)

    def forward(self, tokens):
        return self.read(self.encoder(self.dropout(self.norm(self.words(tokens) + self.places))))


def _encoder(size: Size, activation: str) -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        size.width, size.heads, size.feedforward, size.dropout, activation, batch_first=True
    )
    return nn.TransformerEncoder(layer, size.layers, enable_nested_tensor=False)


def inductor():
    """Inductor as a backend of its own: graphs are kept by backend, so each contender has its own graphs."""
    return lambda graph, inputs: torch._inductor.compile(graph, inputs)


def training_step(size: Size, compiled: bool) -> Callable[[], torch.Tensor]:
    """Forward, loss, backward, AdamW."""
    torch.manual_seed(0)
    if size.vocabulary:
        model = _Bert(size)
        inputs, wanted = torch.randint(0, size.vocabulary, (2, size.batch, size.seqlen))
    else:
        model = _encoder(size, "relu")
        inputs, wanted = torch.randn(2, size.batch, size.seqlen, size.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    forward = torch.compile(model, backend=inductor()) if compiled else model

    def step():
        out = forward(inputs)
        if size.vocabulary:
            loss = nn.functional.cross_entropy(out.flatten(0, 1), wanted.flatten())
        else:
            loss = nn.functional.mse_loss(out, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
