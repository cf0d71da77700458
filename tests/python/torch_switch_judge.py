"""What torch's attention should give: its own formula in float64; and how far from it a result in its dtype may be."""

import copy
import contextlib

import polyhead
from optional import torch

DTYPES = [] if torch is None else [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SEED = 5


@contextlib.contextmanager
def counted():
    """The switch on, the report begun anew; yields a list that holds its records afterwards."""
    records = []
    with polyhead.torch.enabled():
        polyhead.torch.report(reset=True)
        try:
            yield records
        finally:
            records += polyhead.torch.report(reset=True)


def assert_taken(records, backward, dtype=None):
    """Everything ran on a kernel of ours, and gradients did if there were any; float64 may be torch's, said so."""
    assert records
    if dtype == torch.float64 and any(record.kernel is None for record in records):
        assert all("float64" in record.reason for record in records if record.kernel is None)
        return
    assert [record for record in records if record.kernel is None] == []
    assert {record.op for record in records} == {"attention_forward"} | ({"attention_backward"} if backward else set())
    assert all(record.count > 0 and record.kernel in polyhead.kernels() for record in records)


def drawn_seed():
    """The seed that the next call with dropout will draw, after torch.manual_seed(SEED)."""
    torch.manual_seed(SEED)
    return int(torch.randint(0, 2**63 - 1, ()))


def kept(shape, dropout_p):
    """What dropout keeps in a call right after torch.manual_seed(SEED)."""
    return torch.from_numpy(polyhead.dropout_mask(shape, dropout_p, drawn_seed()))


def in_double(x):
    """A deep copy in float64, detached, that requires a gradient where x does."""
    if isinstance(x, torch.Tensor):
        y = x.detach().clone()
        y = y.double() if y.is_floating_point() else y
        return y.requires_grad_(x.requires_grad)
    if isinstance(x, torch.nn.Module):
        return copy.deepcopy(x).double()
    if isinstance(x, (list, tuple)):
        return type(x)(map(in_double, x))
    return {name: in_double(each) for name, each in x.items()} if isinstance(x, dict) else x


def gradients(outputs, inputs, seed=0):
    """Of a random weighting of the outputs, by those of the inputs that require one."""
    outputs = [out for out in outputs if out is not None and out.requires_grad]
    inputs = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    if not outputs or not inputs:
        return []
    return torch.autograd.grad(outputs, inputs, weights_of(outputs, seed), allow_unused=True)


def weights_of(outputs, seed=0):
    """As bfloat16 has them, so that all dtypes weigh alike."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(out.shape, generator=generator).bfloat16().to(out.dtype) for out in outputs]


def assert_exact(got, yardstick, exact, what="", allowed=None, logits=1.0):
    """Each tensor's largest error is at most 3 times that of the same formula in the same dtype, plus a few roundings.

    allowed: for each tensor, what else its elements may be off by. logits: a bound of the scores; their rounding, by as
    many units of float32, becomes a relative error of the weights. What cancels within a gradient may be as large as
    the largest of the tensors.
    """
    largest = max((float(truth.abs().max()) for truth in exact if truth is not None and truth.numel()), default=0.0)
    assert len(got) == len(exact)
    for index, (ours, theirs, truth) in enumerate(zip(got, yardstick, exact)):
        name = f"{what} tensor {index}"
        if truth is None:
            assert ours is None, name
            continue
        assert ours.shape == truth.shape and ours.dtype == theirs.dtype, name
        if not truth.numel():
            continue
        size = truth.abs().max()
        roundings = 200 if ours.dtype == torch.float64 else 4  # the truth is in float64 itself
        bound = 3 * (theirs.double() - truth).abs().max() + roundings * torch.finfo(ours.dtype).eps * largest
        if ours.dtype != torch.float64:
            bound = bound + logits * torch.finfo(torch.float32).eps * size
        if allowed is not None:
            bound = bound + 2 * torch.as_tensor(allowed[index]).max()
        error = (ours.double() - truth).abs().max()
        assert error <= bound, f"{name}: error {error:.3g}, bound {bound:.3g}, largest value {size:.3g}"


def relative_errors(got, exact):
    """Each tensor's largest error over the largest value of all of them."""
    largest = max((float(truth.abs().max()) for truth in exact if truth is not None and truth.numel()), default=0.0)
    return [
        float((x.double() - truth).abs().max()) / largest
        for x, truth in zip(got, exact)
        if truth is not None and truth.numel() and largest
    ]


def assert_no_worse(ours, theirs, what=""):
    """Relative errors of many tensors, as they are scattered: the median at most 1.5 times theirs, the largest 3 times.

    For dtypes in which a single tensor's error is a matter of luck.
    """
    assert len(ours) == len(theirs) > 0
    ours, theirs = torch.tensor(ours), torch.tensor(theirs)
    figures = [(x.median().item(), x.max().item()) for x in (ours, theirs)]
    assert figures[0][0] <= 1.5 * figures[1][0] and figures[0][1] <= 3 * figures[1][1], f"{what}: {figures}"


def rounding_of_out(query, key, bias, out, grad_out, scale, dtype):
    """By how much gradients of query, key and bias move when out, which they are taken with, is rounded to dtype.

    dS = P * (dP - delta) with delta = rowsum(grad_out * out): where weights are near 0 or 1, what is left of the
    difference is this rounding alone. All in float64 and of [..., H, S, D] tensors that broadcast.
    """
    leaves = [x.detach().abs().requires_grad_() for x in (query, key)]
    scores = scale * query.detach() @ key.detach().mT
    sizes = scale * leaves[0] @ leaves[1].mT
    if bias is not None:
        leaves.append(bias.detach().clone().requires_grad_())
        scores, sizes = scores + bias.detach(), sizes + leaves[2]
    weights = scores.softmax(-1).nan_to_num(0.0)
    delta = torch.finfo(dtype).eps / 2 * (grad_out.abs() * out.detach().abs()).sum(-1, keepdim=True)
    return torch.autograd.grad(sizes, leaves, (weights * delta).expand_as(sizes))
