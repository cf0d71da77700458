"""polyhead.torch.fuse: attention that modules write out, in training and inference, with torch's own numbers."""

import math

import pytest
from optional import torch

if torch is None:
    pytest.skip("torch is not installed: its modules are not fused", allow_module_level=True)
pytest.importorskip("onnx", reason="onnx is not installed: graphs are compared in its words")
import polyhead.torch  # noqa: E402

F = torch.nn.functional
B, H, G, S, D = 2, 4, 2, 7, 8
HIDDEN = torch.ones(S, S, dtype=torch.bool).triu(1)


def repeated(x):
    return x[:, :, None].expand(-1, -1, H // G, -1, -1).reshape(B, H, S, D)


def by_hand(m, q, k, v):
    return F.dropout((q @ k.transpose(-2, -1) / math.sqrt(D)).softmax(-1), 0.0, m.training) @ v


def causal(m, q, k, v):
    scores = torch.matmul(q * D**-0.5, k.transpose(2, 3))
    mask = torch.tril(torch.ones(S, S)) == 0
    return torch.softmax(scores.masked_fill(mask, -math.inf), dim=-1) @ v


def biased(m, q, k, v):
    return F.softmax(torch.einsum("bhid,bhjd->bhij", q, k) * D**-0.5 + m.bias, dim=-1, dtype=torch.float32) @ v


def chosen(m, q, k, v):
    scores = torch.where(m.keep, q @ k.mT, -math.inf)
    return scores.softmax(-1) @ v


def softcapped(m, q, k, v):
    return ((q @ k.mT / 5).tanh() * 5).softmax(-1) @ v


def grouped(m, q, k, v):
    k, v = repeated(k[:, :G]), repeated(v[:, :G])
    return (q @ k.transpose(-1, -2)).softmax(-1) @ v


def three_dims(m, q, k, v):
    q, k, v = (x.reshape(B * H, S, D) for x in (q, k, v))
    return torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v).view(B, H, S, D)


# What each becomes: words of the pattern.
FUSED = {by_hand: "scale 0.353553", causal: "causal", biased: "added mask", chosen: "boolean mask", softcapped: "softcap",
         grouped: "repeated heads", three_dims: "scale 1"}  # fmt: skip


def weights_used(m, q, k, v):
    weights = (q @ k.mT).softmax(-1)
    return weights @ v + weights.mean()


def temperature(m, q, k, v):
    return (q @ k.mT * m.bias[0, 0, 0]).softmax(-1) @ v


def over_queries(m, q, k, v):
    return (q @ k.mT).softmax(-2) @ v


def finite(m, q, k, v):
    return (q @ k.mT).masked_fill(m.keep.logical_not(), -1e9).softmax(-1) @ v


def in_place(m, q, k, v):
    scores = q @ k.mT
    out = scores.softmax(-1) @ v
    scores.add_(1)
    return out


STAYS = {
    weights_used: "is also read by",
    temperature: "which has a gradient of its own",
    over_queries: "runs over axis",
    finite: "unseen_rows zero",
    in_place: "is also read by",
}


class Layer(torch.nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.packed, self.out = torch.nn.Linear(H * D, 3 * H * D), torch.nn.Linear(H * D, H * D)
        self.bias = torch.nn.Parameter(torch.linspace(-1, 1, H * S * S).view(H, S, S))
        self.register_buffer("keep", ~HIDDEN)
        self.attend = attend

    def forward(self, x):
        q, k, v = (part.view(B, S, H, D).transpose(1, 2) for part in self.packed(x).chunk(3, dim=-1))
        return x + self.out(self.attend(self, q, k, v).transpose(1, 2).reshape(B, S, H * D))


def outcome(module, x):
    """The output, and gradients of x and of all parameters."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    out = module(x)
    out.square().mean().backward()
    return [out, x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]


def compared(*attends, **options):
    """The report of a module that has all these, whose numbers are torch's."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    module, x = torch.nn.Sequential(*map(Layer, attends)), torch.randn(B, S, H * D)
    expected = outcome(module, x)
    fusion = polyhead.torch.fuse(module, **options)
    got = outcome(module, x)
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(b, a, rtol=2e-5, atol=2e-6)
    return fusion


def test_fused():
    polyhead.torch.report(reset=True)
    fusion = compared(*FUSED)
    assert fusion.num_fused == len(FUSED) == len(fusion.candidates), str(fusion)
    for words, candidate in zip(FUSED.values(), fusion.candidates, strict=True):
        assert words in candidate.pattern and "torch_fuse_test.py:" in candidate.place, str(fusion)
    counts = {}
    for record in polyhead.torch.report():
        if record.reason is None:
            counts[record.op] = counts.get(record.op, 0) + record.count
    assert counts == {"attention_forward": len(FUSED), "attention_backward": len(FUSED)}


def test_stays():
    fusion = compared(*STAYS)
    assert fusion.num_fused == 0 and len(fusion.candidates) == len(STAYS), str(fusion)
    for words, candidate in zip(STAYS.values(), fusion.candidates, strict=True):
        assert words in candidate.reason, str(fusion)


def test_what_is_written_in_place_stays():
    def written(m, q, k, v):
        out = (q @ k.mT).softmax(-1) @ v
        k.add_(1)
        return out

    fusion = compared(lambda m, q, k, v: written(m, q, k.clone(), v))
    assert fusion.num_fused == 0 and "in place" in fusion.candidates[0].reason, str(fusion)


def test_rows_that_see_nothing_may_be_zero():
    assert compared(finite, unseen_rows="zero").num_fused == 1
    with pytest.raises(polyhead.Error, match='unseen_rows is "drop"'):
        polyhead.torch.fuse(torch.nn.Tanh(), unseen_rows="drop")


def test_dropout_and_the_way_back():
    """Weights drop at random in training alone; state and parameters are the module's; revert() runs what was written."""
    torch._dynamo.reset()
    dropping = lambda m, q, k, v: F.dropout((q @ k.mT).softmax(-1), 0.5, m.training) @ v  # noqa: E731
    torch.manual_seed(0)
    module, x = Layer(dropping), torch.randn(B, S, H * D)
    names = list(module.state_dict())
    fusion = polyhead.torch.fuse(module)
    first, second = module(x), module(x)
    assert fusion.num_fused == 1 and "dropout" in str(fusion) and not torch.equal(first, second)
    module.eval()
    torch.testing.assert_close(module(x), module(x), rtol=0, atol=0)
    assert fusion.num_fused == 2 and list(module.state_dict()) == names
    fused = module(x)
    fusion.revert()
    torch.testing.assert_close(module(x), fused, rtol=2e-5, atol=2e-5)
