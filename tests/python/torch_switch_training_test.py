"""Training with the switch on: the same losses as without it."""

import pytest

from optional import torch

if torch is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import polyhead.torch
from torch_switch_judge import assert_taken, counted

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 200
VOCABULARY, WIDTH, HEADS, SEQLEN, BATCH = 32, 32, 4, 24, 8


class Model(torch.nn.Module):
    """A language model, small enough to learn a few texts by heart."""

    def __init__(self, dtype):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH, dtype=dtype)
        self.place = torch.nn.Parameter(torch.randn(SEQLEN, WIDTH, dtype=torch.float32).mul(0.1).to(dtype))
        layer = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.0, batch_first=True, dtype=dtype)
        self.encoder = torch.nn.TransformerEncoder(layer, 2)
        self.read = torch.nn.Linear(WIDTH, VOCABULARY, dtype=dtype)

    def forward(self, tokens):
        hidden = torch.ones(SEQLEN, SEQLEN, dtype=torch.bool).triu(1)
        return self.read(self.encoder(self.embed(tokens) + self.place, mask=hidden, is_causal=True))


def losses(dtype):
    torch.manual_seed(0)
    model = Model(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    texts = torch.randint(0, VOCABULARY, (BATCH, SEQLEN + 1))
    found = []
    for _ in range(STEPS):
        said = model(texts[:, :-1]).flatten(0, 1).float()
        loss = torch.nn.functional.cross_entropy(said, texts[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return torch.tensor(found)


@pytest.mark.parametrize("dtype, apart", [(torch.float32, 5e-4), (torch.bfloat16, 1e-2)])
def test_200_steps_with_and_without(dtype, apart):
    """From one seed, without dropout: rounding alone tells the curves apart."""
    without = losses(dtype)
    with counted() as records:
        ours = losses(dtype)
    assert_taken(records, backward=True)
    assert sum(record.count for record in records if record.op == "attention_backward") == 2 * STEPS
    assert without[-10:].mean() < 0.6 * without[:10].mean()  # something is learnt
    smooth = (ours - without).unfold(0, 10, 10).mean(1).abs().max()
    print(f"{dtype}: largest difference {(ours - without).abs().max():.3g}, of means over 10 steps {smooth:.3g}")
    assert smooth < apart * without[0]
    torch.testing.assert_close(ours[:10], without[:10], rtol=20 * torch.finfo(dtype).eps, atol=0)
