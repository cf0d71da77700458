"""Sub-modules with hooks or adapters, subclasses and exchanged ones, in polyhead.torch's layers: as in torch.nn's."""

import pytest

from optional import torch

if torch is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import polyhead.torch
import torch.nn.utils.parametrizations
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as all_modules
from torch_layers_judge import OURS, pair
from torch_switch_judge import weights_of

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]  # weight_norm by hooks

SIZE, HEADS = 16, 4


class CallsOutProj(nn.MultiheadAttention):
    """torch's, but that it calls out_proj, of which torch reads the weight whatever it is."""

    def forward(self, query, key, value, attn_mask=None, key_padding_mask=None, need_weights=True, is_causal=False):
        assert query is key is value and self.batch_first and attn_mask is None
        x = query.transpose(0, 1)
        heads, weights = F.multi_head_attention_forward(
            x, x, x, SIZE, HEADS, self.in_proj_weight, self.in_proj_bias, None, None, False, self.dropout,
            torch.eye(SIZE), torch.zeros(SIZE), self.training, key_padding_mask, need_weights,
        )  # fmt: skip
        return self.out_proj(heads.transpose(0, 1)), weights


def layers(name, norm_first):
    """torch's and ours, of the same state, biases included; nothing is dropped."""
    torch.manual_seed(0)
    if name == "MultiheadAttention":
        theirs, ours = pair(name, SIZE, HEADS, batch_first=True)
        theirs.__class__ = CallsOutProj
    else:
        options = {"dropout": 0.0, "activation": nn.GELU(), "batch_first": True, "norm_first": norm_first}
        theirs, ours = pair(name, SIZE, HEADS, 24, **options)
        theirs.activation, ours.activation = nn.GELU(), nn.GELU()  # each its own
    for parameter in theirs.parameters():
        if parameter.dim() == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


LAYERS = [("MultiheadAttention", False), ("TransformerEncoderLayer", False), ("TransformerEncoderLayer", True)]
SUBMODULES = [(*layer, path) for layer in LAYERS for path, _ in layers(*layer)[1].named_modules() if path]


@pytest.fixture(autouse=True)
def no_fast_path():
    """torch's of eval wants a weight of every sub-module, and reads it instead of calling."""
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


def test_no_layer_is_left_out():
    assert {name for name, *_ in LAYERS} == OURS.keys()
    assert list(polyhead.torch.FusedMultiHeadAttention(SIZE, HEADS).children()) == []


def changed(outputs, factor):
    """The first of outputs, times factor."""
    return (outputs[0] * factor, *outputs[1:]) if isinstance(outputs, tuple) else outputs * factor


class Adapter(nn.Module):
    """As adapters do it: the module inside stays, and something that is learned is added. It has no weight."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.gain = nn.Parameter(torch.tensor(0.25))

    def forward(self, *arguments, **options):
        out = self.base(*arguments, **options)
        return changed(out, 1 + self.gain)


def adapter(parent, name, log):
    setattr(parent, name, Adapter(getattr(parent, name)))


def adapter_with_a_weight(parent, name, log):
    """As PEFT's LoRA layers, which show the weight of what they wrap."""
    base = getattr(parent, name)
    adapter(parent, name, log)
    if isinstance(base, (nn.Linear, nn.LayerNorm)):
        wrapper = getattr(parent, name)
        wrapper.weight, wrapper.bias = base.weight, base.bias
    elif isinstance(base, nn.Dropout):
        getattr(parent, name).p = base.p


def subclass(parent, name, log):
    module = getattr(parent, name)
    kind = type(module)

    def forward(self, *arguments, **options):
        return changed(kind.forward(self, *arguments, **options), 1.25)

    module.__class__ = type(f"Other{kind.__name__}", (kind,), {"forward": forward})


def forward_of_its_own(parent, name, log):
    """As accelerate does it."""
    module = getattr(parent, name)
    theirs = module.forward
    module.forward = lambda *arguments, **options: changed(theirs(*arguments, **options), 1.25)


def forward_hook(parent, name, log):
    def hook(module, arguments, outputs):
        log.append("forward")
        return changed(outputs, 1.25)

    getattr(parent, name).register_forward_hook(hook)


def forward_pre_hook(parent, name, log):
    def hook(module, arguments, options):
        log.append("forward pre")
        return tuple(each * 1.25 for each in arguments), options

    getattr(parent, name).register_forward_pre_hook(hook, with_kwargs=True)


def backward_hook(parent, name, log):
    def hook(module, grad_inputs, grad_outputs):
        log.append("backward")
        return tuple(None if each is None else each * 1.25 for each in grad_inputs)

    getattr(parent, name).register_full_backward_hook(hook)


def backward_pre_hook(parent, name, log):
    def hook(module, grad_outputs):
        log.append("backward pre")
        return tuple(None if each is None else each * 1.25 for each in grad_outputs)

    getattr(parent, name).register_full_backward_pre_hook(hook)


def exchanged(parent, name, log):
    """Something of the kind, without the attributes."""
    module = getattr(parent, name)
    if isinstance(module, nn.Linear):
        module = nn.Sequential(nn.Linear(module.in_features, module.out_features, bias=False), nn.Tanh())
        nn.init.eye_(module[0].weight)
    elif isinstance(module, nn.LayerNorm):
        module = nn.RMSNorm(SIZE)
    elif isinstance(module, nn.Dropout):
        module = nn.Hardtanh(-0.5, 0.5)
    elif isinstance(module, nn.GELU):
        module = nn.ELU()
    else:  # by one class in both layers
        module = nn.MultiheadAttention(SIZE, HEADS, batch_first=True)
        for parameter in module.parameters():
            nn.init.uniform_(parameter, -0.2, 0.2, generator=torch.Generator().manual_seed(parameter.numel()))
    setattr(parent, name, module)


def weight_norm_by_hooks(parent, name, log):
    module = getattr(parent, name)
    weight = "weight" if hasattr(module, "weight") else "in_proj_weight"
    nn.utils.weight_norm(module, weight, dim=0 if getattr(module, weight).dim() > 1 else None)
    with torch.no_grad():
        getattr(module, f"{weight}_g").mul_(1.25)


def weight_norm_by_parametrization(parent, name, log):
    module = getattr(parent, name)
    weight = "weight" if hasattr(module, "weight") else "in_proj_weight"
    nn.utils.parametrizations.weight_norm(module, weight, dim=0 if getattr(module, weight).dim() > 1 else None)
    with torch.no_grad():
        module.parametrizations[weight].original0.mul_(1.25)


EVERYWHERE = [
    adapter, adapter_with_a_weight, subclass, forward_of_its_own, forward_hook, forward_pre_hook, backward_hook,
    backward_pre_hook, exchanged,
]  # fmt: skip
OF_WEIGHTS = [weight_norm_by_hooks, weight_norm_by_parametrization]


def changes_of(path):
    last = path.split(".")[-1]
    return EVERYWHERE if "dropout" in last or last == "activation" else EVERYWHERE + OF_WEIGHTS


def word(parameter):
    return getattr(parameter, "__name__", str(parameter))


def parent_of(layer, path):
    *above, name = path.split(".")
    return layer.get_submodule(".".join(above)), name


def results(layer, x, log):
    """out, and the gradients by name."""
    log.clear()
    x = x.clone().requires_grad_()
    out = layer(x, x, x)[0] if isinstance(layer, (nn.MultiheadAttention, OURS["MultiheadAttention"])) else layer(x)
    out.backward(*weights_of([out]))
    grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
    layer.zero_grad()
    return {"out": out.detach(), "x": x.grad, **grads}


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name, grad in expected.items():
        assert (got[name] is None) == (grad is None), name
        if grad is not None:
            torch.testing.assert_close(got[name], grad, rtol=1e-4, atol=1e-5 * float(grad.abs().max()), msg=name)


def what_is_fused(path):
    """The operator that the sub-module is part of; and the other one, which stays whole."""
    ops = ["attention_block_forward", "feed_forward_block_forward"]
    return ops if path.split(".")[0] in ("norm1", "self_attn", "dropout1", "out_proj") else ops[::-1]


def compare(name, norm_first, path, change, training):
    """Both layers changed alike give the same, and not what they gave before. Returns the report of ours."""
    theirs, ours = (layer.train(training) for layer in layers(name, norm_first))
    if path.endswith("self_attn.out_proj"):
        theirs.self_attn.__class__ = CallsOutProj
    x = torch.randn(2, 5, SIZE)
    unchanged = results(ours, x, [])
    assert_same(unchanged, results(theirs, x, []))
    logs = [], []
    for layer, log in zip((theirs, ours), logs):
        change(*parent_of(layer, path), log)
    expected = results(theirs, x, logs[0])
    polyhead.torch.report(reset=True)
    got = results(ours, x, logs[1])
    records = polyhead.torch.report(reset=True)
    assert_same(got, expected)
    assert logs[1] == logs[0] and (logs[1] or "hook" not in change.__name__ or "weight" in change.__name__)
    assert any(not torch.equal(got[each], unchanged[each]) for each in ("out", "x"))
    with torch.no_grad():
        out = ours(x, x, x)[0] if name == "MultiheadAttention" else ours(x)
        torch.testing.assert_close(out, expected["out"], rtol=1e-4, atol=1e-4)
    return records


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "name, norm_first, path, change",
    [(*submodule, change) for submodule in SUBMODULES for change in changes_of(submodule[-1])],
    ids=word,
)
def test_every_submodule_has_its_effect(name, norm_first, path, change, training):
    records = compare(name, norm_first, path, change, training)
    not_taken = [record for record in records if record.kernel is None]
    part, other = what_is_fused(path)
    if change is weight_norm_by_parametrization:
        assert not_taken == []
    else:
        assert {record.op for record in not_taken} == {part} and any(path in record.reason for record in not_taken)
    assert name == "MultiheadAttention" or any(record.op == other and record.kernel for record in records)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("register, result", [
    (all_modules.register_module_forward_hook, lambda module, arguments, outputs: changed(outputs, 1.25)),
    (all_modules.register_module_forward_pre_hook, lambda module, arguments: tuple(x * 1.25 for x in arguments)),
    (all_modules.register_module_full_backward_hook, lambda module, grads, _: tuple(
        None if grad is None else grad * 1.25 for grad in grads)),
    (all_modules.register_module_full_backward_pre_hook, lambda module, grads: tuple(
        None if grad is None else grad * 1.25 for grad in grads)),
], ids=["forward", "forward pre", "backward", "backward pre"])  # fmt: skip
@pytest.mark.parametrize("norm_first", [False, True])
def test_hooks_of_all_modules(norm_first, register, result, training):
    """Called for the sub-modules that torch calls: not for out_proj."""
    theirs, ours = (layer.train(training) for layer in layers("TransformerEncoderLayer", norm_first))
    x = torch.randn(2, 5, SIZE)
    unchanged = results(ours, x, [])["x"]
    called = []

    def hook(module, *arguments):
        if isinstance(module, (nn.Linear, nn.LayerNorm, nn.Dropout, nn.GELU)):
            called.append(type(module).__name__)
            return result(module, *arguments)

    handle = register(hook)
    try:
        polyhead.torch.report(reset=True)
        expected, theirs_called = results(theirs, x, []), called[:]
        called.clear()
        got = results(ours, x, [])
    finally:
        handle.remove()
    assert called == theirs_called and len(called) == 8
    assert_same(got, expected)
    assert not torch.equal(got["x"], unchanged)
    reasons = {record.reason for record in polyhead.torch.report(reset=True) if record.kernel is None}
    assert reasons == {"there are hooks of all modules"}


@pytest.mark.parametrize("name", ["dropout", "dropout1", "dropout2"])
def test_a_dropout_in_eval_drops_nothing_while_the_layer_trains(name):
    theirs, ours = layers("TransformerEncoderLayer", True)
    for layer in (theirs, ours):
        layer.train()
        dropout = getattr(layer, name)
        dropout.p = 0.9
        dropout.eval()
    x = torch.randn(2, 5, SIZE)
    assert_same(results(ours, x, []), results(theirs, x, []))


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("options", [{"rope": polyhead.torch.Rope()}, {"add_zero_attn": True}, {"add_bias_kv": True}])
def test_our_own_attention_with_more_in_it(options, norm_first):
    """In place of self_attn: what it adds is there."""
    _, ours = layers("TransformerEncoderLayer", norm_first)
    x = torch.randn(2, 5, SIZE)
    before = ours(x)
    attn = polyhead.torch.MultiheadAttention(SIZE, HEADS, batch_first=True, **options)
    attn.load_state_dict(ours.self_attn.state_dict(), strict=False)
    ours.self_attn = attn
    out = ours(x)
    tokens = ours.norm1(x) if norm_first else x
    summed = x + attn(tokens, tokens, tokens)[0]
    summed = summed if norm_first else ours.norm1(summed)
    inner = ours.linear2(F.gelu(ours.linear1(ours.norm2(summed) if norm_first else summed)))
    expected = summed + inner if norm_first else ours.norm2(summed + inner)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(out, before, rtol=1e-3)


def test_a_norm_over_more_than_the_vector():
    theirs, ours = layers("TransformerEncoderLayer", True)
    for layer in (theirs, ours):
        layer.norm1 = nn.LayerNorm([5, SIZE], elementwise_affine=False)
        layer.norm2 = nn.LayerNorm([5, SIZE])
    x = torch.randn(2, 5, SIZE)
    assert_same(results(ours, x, []), results(theirs, x, []))


@pytest.mark.parametrize("masks", ["causal", "bool", "float", "padding", "both"])
@pytest.mark.parametrize("path", ["self_attn", "norm1"])
def test_masks_of_a_block_in_parts(path, masks):
    theirs, ours = layers("TransformerEncoderLayer", False)
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    padding = torch.arange(5) >= torch.tensor([[5], [3]])
    options = {
        "causal": {"src_mask": hidden, "is_causal": True}, "bool": {"src_mask": hidden},
        "float": {"src_mask": torch.randn(5, 5)}, "padding": {"src_key_padding_mask": padding},
        "both": {"src_mask": hidden, "src_key_padding_mask": padding},
    }[masks]  # fmt: skip
    for layer in (theirs, ours):
        adapter(layer, path, [])
    for x in (torch.randn(2, 5, SIZE), torch.randn(5, SIZE)):
        given = {key: each[1] if x.dim() == 2 and each is padding else each for key, each in options.items()}
        torch.testing.assert_close(ours(x, **given), theirs(x, **given), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "path, change",
    [(path, change) for path in ("self_attn", "linear1", "norm1", "dropout2") for change in changes_of(path)],
    ids=word,
)
def test_the_switch_changes_nothing_of_it(path, change, training):
    """torch's own layer, its attention taken over."""
    layer, _ = layers("TransformerEncoderLayer", False)
    log = []
    change(*parent_of(layer.train(training), path), log)
    x = torch.randn(2, 5, SIZE)
    expected, called = results(layer, x, log), log[:]
    with polyhead.torch.enabled():
        assert_same(results(layer, x, log), expected)
    assert log == called


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("path", ["linear1", "self_attn.out_proj", "norm1"])
def test_compiled_whole_and_reported_when_traced(path, dynamic):
    def not_taken():
        return [record.reason for record in polyhead.torch.report(reset=True) if record.kernel is None]

    _, ours = layers("TransformerEncoderLayer", False)
    adapter(*parent_of(ours, path), [])
    x = torch.randn(2, 5, SIZE, requires_grad=True)
    expected = ours(x)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: ours(x), fullgraph=True, backend="aot_eager", dynamic=dynamic)
    polyhead.torch.report(reset=True)
    torch.testing.assert_close(compiled(x), expected)
    assert any(path in reason for reason in not_taken())
    torch.testing.assert_close(compiled(x), expected)
    assert not_taken() == []


class Quantised(torch.Tensor):
    """int8 and a scale, as libraries of quantisation keep a weight: linear alone knows how to read it."""

    @staticmethod
    def __new__(cls, weight):
        scale = weight.detach().abs().max() / 127
        self = torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)
        self.scale, self.numbers = scale, (weight.detach() / scale).round().to(torch.int8)
        return self

    def dense(self):
        return self.numbers.to(self.dtype) * self.scale

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in (F.linear, torch.nn.functional.multi_head_attention_forward):
            args = tuple(x.dense() if isinstance(x, cls) else x for x in args)
            kwargs = {name: x.dense() if isinstance(x, cls) else x for name, x in (kwargs or {}).items()}
        elif function is torch.Tensor.__getitem__:  # rows of it
            return args[0].dense()[args[1]]
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{function} of a quantised weight")


@pytest.mark.parametrize("path", ["linear1", "linear2", "self_attn.out_proj", "self_attn"])
def test_weights_of_a_class_of_their_own_are_read_by_those_who_can(path):
    theirs, ours = layers("TransformerEncoderLayer", True)
    for layer in (theirs, ours):
        name = "in_proj_weight" if path == "self_attn" else "weight"
        module = layer.get_submodule(path)
        quantised = nn.Parameter(Quantised(getattr(module, name)), requires_grad=False)
        dense = nn.Parameter(quantised.dense(), requires_grad=False)
        setattr(module, name, quantised if layer is ours else dense)
    x = torch.randn(2, 5, SIZE)
    polyhead.torch.report(reset=True)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
    assert "is Quantised" in str(polyhead.torch.report())


@pytest.mark.parametrize("training", [False, True])
def test_an_identity_in_place_of_a_dropout_leaves_the_block_whole(training):
    theirs, ours = layers("TransformerEncoderLayer", False)
    for layer in (theirs, ours):
        for name in ("dropout", "dropout1", "dropout2"):
            setattr(layer, name, nn.Identity())
        layer.train(training)
    x = torch.randn(2, 5, SIZE)
    polyhead.torch.report(reset=True)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
    assert "not taken" not in str(polyhead.torch.report())
