"""polyhead.weights against the frameworks themselves, each where it is installed: their module's forward, and ours."""

import os

import numpy as np
import pytest

import polyhead
from optional import load, needs_torch, torch
from polyhead import weights

transformers = load("transformers") if torch else None
os.environ.setdefault("KERAS_BACKEND", "torch" if torch else "jax")  # its default, TensorFlow, may not be there
keras = load("keras") if torch or load("jax") else None
flax = load("flax")
timm = load("timm") if load("torchvision") else None
needs_transformers = pytest.mark.skipif(transformers is None, reason="transformers is not installed")
needs_keras = pytest.mark.skipif(keras is None, reason="keras is not installed")
needs_flax = pytest.mark.skipif(flax is None, reason="flax is not installed")
onnx, onnxruntime = load("onnx"), load("onnxruntime")
needs_onnxruntime = pytest.mark.skipif(onnx is None or onnxruntime is None, reason="onnxruntime is not installed")
needs_timm = pytest.mark.skipif(timm is None, reason="timm and torchvision are not installed")

BATCH, SEQLEN, SEQLEN_K = 2, 7, 9


def forward(layer, num_heads, query, key=None, value=None, *, rotate=None, append=(), zero=False, **options):
    """Projections by NumPy, attention by polyhead: the layer that the weights were loaded for."""
    layer = {name: np.asarray(array) for name, array in layer.items()}
    key = query if key is None else key
    value = key if value is None else value
    q, k, v = (
        x @ layer[f"{name}_weight"] + layer.get(f"{name}_bias", 0)
        for x, name in ((query, "query"), (key, "key"), (value, "value"))
    )
    if append:
        k, v = (np.concatenate([x, np.repeat(layer[name], len(x), 0)], 1) for x, name in zip((k, v), append))
    if zero:
        k, v = (np.pad(x, [(0, 0), (0, 1), (0, 0)]) for x in (k, v))
    head_dim = q.shape[-1] // num_heads
    q = q.reshape(*q.shape[:2], num_heads, head_dim)
    k = k.reshape(*k.shape[:2], -1, head_dim)
    v = v.reshape(*v.shape[:2], k.shape[2], -1)
    if rotate:
        q, k = rotate(q, k)
    out = polyhead.attention(q, k, v, scale=layer["scale"].item(), **options)
    return out.reshape(*out.shape[:2], -1) @ layer["out_weight"] + layer.get("out_bias", 0)


def inputs(size, seqlen=SEQLEN, seed=0):
    return np.random.default_rng(seed).standard_normal((BATCH, seqlen, size)).astype(np.float32)


def randomized(module):
    """Biases too, which start as zeros."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.2, generator=generator)
    return module.eval()


def assert_close(ours, theirs):
    theirs = theirs.detach().numpy() if torch and isinstance(theirs, torch.Tensor) else np.asarray(theirs)
    assert np.abs(theirs).max() > 0.1
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def loaded(module, source, prefix="", num_heads=4):
    """What load gives, after export has given back what the module has."""
    state = module.state_dict()
    layer = weights.load(state, source, num_heads=num_heads, prefix=prefix)
    for name, array in weights.export(layer, source, num_heads=num_heads, prefix=prefix).items():
        assert torch.equal(array, state[name])
    return layer


@needs_torch
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("extra", [{}, {"add_bias_kv": True}, {"add_zero_attn": True},
                                   {"add_bias_kv": True, "add_zero_attn": True}])  # fmt: skip
@pytest.mark.parametrize("sizes", [{}, {"kdim": 10}, {"vdim": 12}, {"kdim": 10, "vdim": 12}])
def test_torch(sizes, extra, bias):
    mha = randomized(torch.nn.MultiheadAttention(24, 4, bias=bias, batch_first=True, **sizes, **extra))
    source = "torch_kdim_vdim" if sizes else "torch"
    query, key = inputs(24), inputs(sizes.get("kdim", 24), SEQLEN_K, 1)
    value = inputs(sizes.get("vdim", 24), SEQLEN_K, 2)
    layer = weights.load(mha.state_dict(), source, num_heads=4)
    append = ("bias_k", "bias_v") if "add_bias_kv" in extra else ()
    ours = forward(layer, 4, query, key, value, append=append, zero="add_zero_attn" in extra)
    assert_close(ours, mha(*map(torch.from_numpy, (query, key, value)), need_weights=False)[0])
    mha.load_state_dict(weights.export(layer, source, num_heads=4), strict=True)


def half_split(q, k):
    half = q.shape[-1] // 2
    angle = np.arange(q.shape[1])[:, None, None] * 10000.0 ** -(np.arange(half) / half)
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)

    def turn(x):
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    return turn(q), turn(k)


@needs_transformers
class TestTransformers:
    def test_bert(self):
        config = transformers.BertConfig(hidden_size=24, num_attention_heads=4, attn_implementation="eager")
        module = randomized(transformers.models.bert.modeling_bert.BertAttention(config))
        x = inputs(24)
        theirs = module.self(torch.from_numpy(x))[0]
        theirs = module.output.dense(theirs)  # without the residual and its norm
        assert_close(forward(loaded(module, "bert"), 4, x), theirs)

    def test_gpt2(self):
        config = transformers.GPT2Config(n_embd=24, n_head=4, attn_implementation="sdpa")
        module = randomized(transformers.models.gpt2.modeling_gpt2.GPT2Model(config))
        x = inputs(24)
        theirs = module.h[0].attn(torch.from_numpy(x))[0]
        layer = loaded(module, "gpt2", "h.0.attn.")
        assert_close(forward(layer, 4, x, causal=True), theirs)

    @pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2"])
    def test_llama(self, name):
        config = getattr(transformers, f"{name}Config")(
            hidden_size=24, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1, intermediate_size=8,
            vocab_size=16, attn_implementation="sdpa", rope_theta=10000.0,
        )  # fmt: skip
        model = randomized(transformers.AutoModel.from_config(config))
        x = torch.from_numpy(inputs(24))
        positions = torch.arange(SEQLEN)[None]
        theirs = model.layers[0].self_attn(x, model.rotary_emb(x, positions), attention_mask=None)[0]
        layer = loaded(model, "llama", "layers.0.self_attn.")
        assert ("query_bias" in layer) == (name == "Qwen2")
        assert_close(forward(layer, 4, x.numpy(), causal=True, rotate=half_split), theirs)

    def test_t5(self):
        config = transformers.T5Config(d_model=24, num_heads=4, d_kv=5, attn_implementation="eager")
        module = randomized(
            transformers.models.t5.modeling_t5.T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
        )
        x = inputs(24)
        layer = loaded(module, "t5")
        assert layer["scale"] == 1.0
        bias = module.compute_bias(SEQLEN, SEQLEN).detach().numpy()
        assert layer["relative_attention_bias.weight"].shape == (32, 4)
        assert_close(forward(layer, 4, x, attn_bias=bias), module(torch.from_numpy(x))[0])

    def test_gpt_neox(self):
        config = transformers.GPTNeoXConfig(
            hidden_size=24, num_attention_heads=4, num_hidden_layers=1, intermediate_size=8, vocab_size=16,
            rotary_pct=1.0, attn_implementation="sdpa",
        )  # fmt: skip
        model = randomized(transformers.AutoModel.from_config(config))
        x = torch.from_numpy(inputs(24))
        positions = model.rotary_emb(x, torch.arange(SEQLEN)[None])
        theirs = model.layers[0].attention(x, attention_mask=None, position_embeddings=positions)[0]
        layer = loaded(model, "gpt_neox", "layers.0.attention.")
        assert_close(forward(layer, 4, x.numpy(), causal=True, rotate=half_split), theirs)

    def test_bloom(self):
        config = transformers.BloomConfig(hidden_size=24, n_head=4, n_layer=1, hidden_dropout=0, attention_dropout=0)
        module = randomized(transformers.models.bloom.modeling_bloom.BloomAttention(config, layer_idx=0))
        x = torch.from_numpy(inputs(24))
        nothing = torch.zeros(BATCH * 4, 1, SEQLEN)
        mask = torch.full((SEQLEN, SEQLEN), torch.finfo(torch.float32).min).triu(1).expand(BATCH, 1, -1, -1)
        theirs = module(x, torch.zeros_like(x), alibi=nothing, attention_mask=mask)[0]
        layer = loaded(module, "bloom")
        assert_close(forward(layer, 4, x.numpy(), causal=True), theirs)


def to_numpy(tensor):
    return keras.ops.convert_to_numpy(tensor)


@needs_keras
@pytest.mark.parametrize("value_dim", [None, 5])
def test_keras(value_dim):
    mha = keras.layers.MultiHeadAttention(num_heads=4, key_dim=6, value_dim=value_dim)
    query, value = inputs(24), inputs(10, SEQLEN_K, 1)
    mha(query, value)
    rng = np.random.default_rng(0)
    mha.set_weights([rng.normal(0, 0.2, each.shape) for each in mha.get_weights()])
    arrays = {each.path: to_numpy(each) for each in mha.weights}
    layer = weights.load(arrays, "keras", num_heads=4, prefix=f"{mha.name}/")
    assert_close(forward(layer, 4, query, value), to_numpy(mha(query, value)))
    back = weights.export(layer, "keras", num_heads=4, prefix=f"{mha.name}/")
    assert all(np.array_equal(back[name], array) for name, array in arrays.items()) and back.keys() == arrays.keys()


@needs_keras
def test_keras_grouped_query():
    mha = keras.layers.GroupQueryAttention(head_dim=6, num_query_heads=4, num_key_value_heads=2)
    query, value = inputs(24), inputs(10, SEQLEN_K, 1)
    mha(query, value)
    rng = np.random.default_rng(0)
    mha.set_weights([rng.normal(0, 0.2, each.shape) for each in mha.get_weights()])
    layer = weights.load({each.path: to_numpy(each) for each in mha.weights}, "keras", num_heads=4,
                         prefix=f"{mha.name}/")  # fmt: skip
    assert_close(forward(layer, 4, query, value), to_numpy(mha(query, value)))


@needs_flax
def test_flax():
    import flax.linen
    import jax

    mha = flax.linen.MultiHeadDotProductAttention(num_heads=4, qkv_features=20, out_features=14)
    query, value = inputs(24), inputs(10, SEQLEN_K, 1)
    parameters = mha.init(jax.random.key(0), query, value)
    parameters = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), parameters)
    layer = weights.load(parameters, "flax", num_heads=4, prefix="params/")
    assert_close(forward(layer, 4, query, value), mha.apply(parameters, query, value))


@needs_timm
def test_timm():
    from timm.layers import Attention

    module = randomized(Attention(24, num_heads=4, qkv_bias=True))
    x = inputs(24)
    assert_close(forward(loaded(module, "timm"), 4, x), module(torch.from_numpy(x)))


@needs_onnxruntime
@pytest.mark.parametrize("head_dim_v", [6, 5])
def test_onnx_attention(head_dim_v):
    rng = np.random.default_rng(0)
    width = 4 * 6 * 2 + 4 * head_dim_v
    arrays = {"weights": rng.normal(0, 0.2, (24, width)), "bias": rng.normal(0, 0.2, width)}
    arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
    node = onnx.helper.make_node(
        "Attention", ["x", "weights", "bias"], ["y"], domain="com.microsoft", num_heads=4,
        qkv_hidden_sizes=[24, 24, 4 * head_dim_v],
    )  # fmt: skip
    graph = onnx.helper.make_graph(
        [node], "attention", [onnx.helper.make_tensor_value_info("x", 1, [BATCH, SEQLEN, 24])],
        [onnx.helper.make_tensor_value_info("y", 1, None)],
        [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )  # fmt: skip
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    x = inputs(24)
    layer = weights.load(arrays, "onnx_attention", num_heads=4, head_dim=6)
    layer["out_weight"] = np.eye(4 * head_dim_v, dtype=np.float32)  # the node has none
    assert_close(forward(layer, 4, x), session.run(None, {"x": x})[0])
