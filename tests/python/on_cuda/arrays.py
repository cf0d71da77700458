"""polyhead.attention on arrays in a GPU's memory."""

import copy
import ctypes
import subprocess
import sys
import types

import numpy as np
import pytest
from device import (
    Exporter, Interface, Memory, allocate, check, is_written, new_stream, numpy_of, pointer, synchronize, to_host, twin,
)

import polyhead
from polyhead import __main__ as command
from polyhead import _bind

KINDS = [Interface, Exporter]


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = twin.cuda_twin_num_allocations()
    yield
    synchronize()
    assert twin.cuda_twin_num_allocations() == before


def operands(seqlen_q=5, seqlen_k=70, dtype=np.float32):
    random = np.random.default_rng(1)
    shapes = [(2, seqlen_q, 4, 16), (2, seqlen_k, 2, 16), (2, seqlen_k, 2, 16)]
    return [random.standard_normal(shape, np.float32).astype(dtype) for shape in shapes]


def assert_close(got, want, bound=2e-5):
    assert got.shape == want.shape
    np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), rtol=bound, atol=bound)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_forward(kind, dtype):
    arrays = operands(dtype=dtype)
    lengths = np.array([70, 33])
    options = {"causal": True, "align": "bottom_right", "return_logsumexp": True}
    want = polyhead.attention(*arrays, seqlens_k=lengths, **options)
    got = polyhead.attention(*map(kind, arrays), seqlens_k=kind(lengths), **options)
    for x, y in zip(got, want, strict=True):
        assert type(x) is polyhead.DeviceArray and x.dtype == str(y.dtype) and (x.device, x.stream) == (0, 0)
        assert_close(numpy_of(x), y, 2e-5 if dtype == np.float32 else 2e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_backward(kind):
    arrays = operands()
    bias = np.random.default_rng(2).standard_normal((4, 5, 70), np.float32)
    out, logsumexp = polyhead.attention(*arrays, attn_bias=bias, return_logsumexp=True)
    grad_out = np.random.default_rng(3).standard_normal(out.shape, np.float32)
    needs = ("query", "key", "value", "attn_bias")
    want = polyhead.attention_backward(grad_out, *arrays, out, logsumexp, attn_bias=bias, needs=needs)
    there = [kind(x) for x in (grad_out, *arrays, out, logsumexp)]
    got = polyhead.attention_backward(*there, attn_bias=kind(bias), needs=needs)
    assert list(got) == list(want)
    for name in needs:
        assert_close(numpy_of(got[name]), want[name], 1e-4)
    into = {"query": Interface(np.zeros_like(arrays[0]))}
    written = polyhead.attention_backward(*there, attn_bias=kind(bias), needs=("query",), into=into)
    assert written["query"] is into["query"]
    assert_close(numpy_of(into["query"]), want["query"], 1e-4)


def test_results_go_on_as_inputs():
    arrays = operands(seqlen_q=70)[1:]
    first = polyhead.attention(arrays[0], arrays[0], arrays[1])
    want = polyhead.attention(first, arrays[0], arrays[1])
    key, value = map(Interface, arrays)
    got = polyhead.attention(polyhead.attention(key, key, value), key, value)
    assert_close(numpy_of(got), want)


def test_bfloat16_by_dlpack():
    bits = [(x.view(np.uint32) >> 16).astype(np.uint16) for x in operands()]
    wide = [(x.astype(np.uint32) << 16).view(np.float32) for x in bits]
    out = polyhead.attention(*(Exporter(x, "bfloat16") for x in bits))
    assert out.dtype == "bfloat16"
    with pytest.raises(AttributeError, match="bfloat16 has no name in __cuda_array_interface__"):
        out.__cuda_array_interface__
    got = (to_host(out._memory.address, out.shape, np.uint16).astype(np.uint32) << 16).view(np.float32)
    assert_close(got, polyhead.attention(*wide), 1e-2)


def test_nothing_waits_and_everything_is_in_order():
    """On a stream of its own: inputs that another stream fills, a workspace, and results that are there later."""
    arrays = operands(seqlen_k=600)
    want = polyhead.attention(*arrays)
    mine, theirs = new_stream(), new_stream()
    query, key = Interface(arrays[0], theirs), Interface(arrays[1], theirs)
    value = Exporter(arrays[2])
    out = polyhead.attention(query, key, value, stream=mine)
    assert value.asked == [mine] and out.stream == mine
    assert not is_written(out._memory.address, want.nbytes)
    reader = new_stream()
    capsule = out.__dlpack__(stream=reader)
    del out, query, key  # memory goes when the streams have come so far
    copied = np.zeros_like(want)
    memory = Memory(copied)
    address = allocate(8)
    check(twin.cudaStreamSynchronize(pointer(reader)))
    del capsule
    check(twin.cudaStreamSynchronize(pointer(mine)))
    check(twin.cudaFree(pointer(address)))
    del memory
    for stream in (mine, theirs, reader):
        check(twin.cudaStreamDestroy(pointer(stream)))


def test_the_default_stream_is_named_as_dlpack_wants_it():
    arrays = [Exporter(x) for x in operands()]
    polyhead.attention(*arrays)
    assert [each.asked for each in arrays] == [[1], [1], [1]]


def test_out_is_written_in_place():
    arrays = operands()
    out = Interface(np.zeros_like(arrays[0]))
    assert polyhead.attention(*map(Interface, arrays), out=out) is out
    assert_close(numpy_of(out), polyhead.attention(*arrays))
    read_only = Interface(arrays[0])
    read_only.__cuda_array_interface__["data"] = (read_only.memory.address, True)
    with pytest.raises(polyhead.Error, match="out is read-only, must be writable"):
        polyhead.attention(*map(Interface, arrays), out=read_only)


def test_strides_in_bytes():
    query, key, value = operands()
    backwards = Interface(query)
    strides = tuple(8 * s if n == 1 else s for n, s in enumerate(query.strides))
    interface = backwards.__cuda_array_interface__
    interface["shape"], interface["strides"] = (1, 1, 4, 16), strides
    got = polyhead.attention(backwards, Interface(key[:1]), Interface(value[:1]))
    assert_close(numpy_of(got), polyhead.attention(query[:1, :1], key[:1], value[:1]))


def test_a_program_reads_captures_there():
    arrays, slope = operands(), np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
    score = "score - slope[h] * abs(q - k)"
    got = polyhead.attention(*map(Interface, arrays), score=score, captured={"slope": Interface(slope)})
    assert_close(numpy_of(got), polyhead.attention(*arrays, score=score, captured={"slope": slope}))
    told = polyhead.explain(*map(Interface, arrays), score=score, captured={"slope": Interface(slope)})
    assert told.kernel == "cuda_sm80" and told.program and told.blocks is None
    with pytest.raises(polyhead.Error, match="slope is in CPU memory, must be on CUDA device 0 as query"):
        polyhead.attention(*map(Interface, arrays), score=score, captured={"slope": slope})


class FakeCupyArray(Interface):
    __module__ = "cupy"
    dtype = np.dtype(np.float32)


def test_cupys_allocator_and_stream(monkeypatch):
    """Of a package of that name, with what is used of it."""
    made, entered, own, mine = [], [], new_stream(), new_stream()

    class Context:
        def __init__(self, number):
            entered.append(number)

        __enter__ = __exit__ = lambda self, *_: None

    def empty(shape, dtype):
        made.append((shape, str(np.dtype(dtype)), entered[-1]))
        return FakeCupyArray(np.zeros(shape, dtype))

    cupy = types.SimpleNamespace(empty=empty, cuda=types.SimpleNamespace(
        Device=Context, ExternalStream=Context, get_current_stream=lambda: types.SimpleNamespace(ptr=own)))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    arrays = operands(seqlen_k=600)
    for stream in (own, mine):
        made.clear()
        there = [FakeCupyArray(x, own) for x in arrays]
        given = {} if stream == own else {"stream": stream}
        out, logsumexp = polyhead.attention(*there, return_logsumexp=True, **given)
        assert type(out) is type(logsumexp) is FakeCupyArray and set(entered) <= {0, own, mine}
        assert made[:2] == [((2, 5, 4, 16), "float32", stream), ((2, 4, 5), "float32", stream)]
        assert [x[1:] for x in made[2:]] == [("uint8", stream)]  # the workspace
        check(twin.cudaStreamSynchronize(pointer(stream)))
        assert_close(numpy_of(out), polyhead.attention(*arrays))
        del there, out, logsumexp
    for stream in (own, mine):
        check(twin.cudaStreamDestroy(pointer(stream)))


def test_numbas_allocator(monkeypatch):
    class FakeNumbaArray(Interface):
        __module__ = "numba.cuda.cudadrv.devicearray"

    class Gpu:
        __enter__ = __exit__ = lambda self, *_: None

    cuda = types.SimpleNamespace(gpus=[Gpu()], device_array=lambda shape, dtype: FakeNumbaArray(np.zeros(shape, dtype)))
    monkeypatch.setitem(sys.modules, "numba.cuda", cuda)
    arrays = operands()
    out = polyhead.attention(*map(FakeNumbaArray, arrays))
    assert type(out) is FakeNumbaArray
    assert_close(numpy_of(out), polyhead.attention(*arrays))


@pytest.fixture
def two_devices():
    twin.cuda_twin_set_devices(2, 8, 0)
    yield
    check(twin.cudaSetDevice(0))
    twin.cuda_twin_set_devices(1, 8, 0)


def test_another_device(two_devices):
    arrays = operands()
    check(twin.cudaSetDevice(1))
    there = [Exporter(x, device=1) for x in arrays]
    interfaces = [Interface(x) for x in arrays]
    check(twin.cudaSetDevice(0))
    for query, key, value in (there, interfaces):
        out = polyhead.attention(query, key, value)
        assert out.device == 1
        assert_close(numpy_of(out), polyhead.attention(*arrays))
    number = ctypes.c_int(-1)
    check(twin.cudaGetDevice(ctypes.byref(number)))
    assert number.value == 0
    for other, is_on in ((Exporter(arrays[1]), "CUDA device 0"), (Interface(arrays[1]), "CUDA device 0"), (arrays[1], "in CPU memory")):
        with pytest.raises(polyhead.Error, match=f"key is (on )?{is_on}, must be on CUDA device 1 as query"):
            polyhead.attention(there[0], other, there[2])


def refusals():
    query, key, value = operands()
    odd = dict(Interface(key).__cuda_array_interface__)
    yield (query, Interface(key), value), {}, "key is on CUDA device 0, must be in CPU memory"
    yield (query, Exporter(key), value), {}, "key is on CUDA device 0, must be in CPU memory"
    there = [Interface(x) for x in (query, key, value)]
    yield there, {"seqlens_k": np.array([1, 2])}, "seqlens_k is in CPU memory, must be on CUDA device 0 as query"
    yield there, {"device": "cpu"}, "query is not on the CPU, where this call computes"
    yield (query, key, value), {"device": "cuda"}, "query is not on cuda, where this call computes"
    yield there, {"out": query}, "out is in CPU memory, must be on CUDA device 0 as query"
    yield there, {"stream": 1 << 40}, "stream is not a stream of CUDA here"
    yield (there[0], Interface(key, mask=odd), there[2]), {}, "key has a mask, must be an array without one"
    yield (there[0], Interface(key, typestr=">f4"), there[2]), {}, "key has dtype >f4, must be as query"
    yield (there[0], Interface(key, strides=(3, 2, 1, 2)), there[2]), {}, "key has stride 2 in dimension 3, must be a multiple"
    yield [Interface(x.astype(np.float64)) for x in (query, key, value)], {}, "cuda_sm80 (dtype is float64, takes float32"


def test_what_is_refused_by_a_sentence():
    for arrays, options, sentence in refusals():
        with pytest.raises(polyhead.Error) as error:
            polyhead.attention(*arrays, **options)
        assert sentence in str(error.value)
        del error
    with pytest.raises(polyhead.Error, match=r"outs\[0\] is on CUDA device 0, must be in CPU memory"):
        polyhead.merge([Interface(np.zeros((1, 2, 3, 4), np.float32))], [np.zeros((1, 3, 2), np.float32)])


def test_explain_and_info():
    query, key, value = operands()
    told = polyhead.explain(query, key, value)
    assert told.reasons["cuda_sm80"] == "computes on cuda, the call's tensors are on cpu" and "cuda_sm80" not in told.kernel
    for arrays, options in (([query, key, value], {"device": "cuda"}), (list(map(Interface, (query, key, value))), {})):
        told = polyhead.explain(*arrays, **options)
        assert told.kernel == "cuda_sm80"
        assert told.reasons["reference"] == "computes on cpu, the call's tensors are on cuda"
    rows = command.cuda_rows()
    version = _bind.cuda_machine()["runtime_version"]
    text = f"{version // 1000}.{version % 1000 // 10}"
    assert rows == {"cuda": f"built with CUDA {text}, the driver serves {text}", "gpu 0": "simulated, compute capability 8.0, 80.0 GiB"}
    twin.cuda_twin_set_devices(1, 7, 5)
    reason = "the GPU's compute capability is 7.5, takes 8.0 and up"
    rows = command.cuda_rows()
    assert rows["cuda"].startswith(f"{reason}; built with")
    assert rows["gpu 0"] == f"simulated, compute capability 7.5, 80.0 GiB; cannot be used: {reason}"
    twin.cuda_twin_set_driver_version(0)
    assert command.cuda_rows() == {"cuda": "no NVIDIA driver is installed here"}
    assert polyhead.explain(query, key, value, device="cuda").reasons["cuda_sm80"] == "no NVIDIA driver is installed here"
    twin.cuda_twin_set_driver_version(version)
    twin.cuda_twin_set_devices(1, 8, 0)


def test_the_command_lists_devices():
    if not command.COMMAND.exists():
        pytest.skip("this build has no command")
    told = subprocess.run([command.COMMAND, "info", "--format", "csv"], capture_output=True, text=True, check=True).stdout
    assert "CUDA," in told


class DeviceMatrix(Interface):
    """With what packages' arrays have besides: shape, dtype and a transposed view."""

    def __init__(self, x):
        super().__init__(x)
        self.shape, self.dtype = x.shape, x.dtype

    @property
    def T(self):
        view, (rows, columns) = copy.copy(self), self.shape
        view.shape, size = (columns, rows), self.dtype.itemsize
        view.__cuda_array_interface__ = {
            **self.__cuda_array_interface__, "shape": view.shape, "strides": (size, columns * size),
        }  # fmt: skip
        return view


def dense(array):
    """Of an array on the device with any strides."""
    interface = array.__cuda_array_interface__
    dtype = np.dtype(interface["typestr"])
    if interface["strides"] is None:
        return numpy_of(array)
    assert len(interface["shape"]) == 2 and interface["strides"][0] == dtype.itemsize
    return to_host(interface["data"][0], interface["shape"][::-1], dtype).T


LAYER_WEIGHTS = {"query_weight": (12, 8), "key_weight": (12, 4), "value_weight": (12, 4), "out_weight": (8, 12),
                 "query_bias": (8,), "out_bias": (12,)}  # fmt: skip


def drawn(shapes, dtype=np.float32):
    random = np.random.default_rng(7)
    return {name: random.standard_normal(shape, np.float32).astype(dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("kind", ["layer", "block"])
def test_attention_layers(kind, dtype):
    """Forward and all gradients, dropout's bits and lengths included."""
    norm = {"norm_weight": (12,), "norm_bias": (12,)} if kind == "block" else {}
    weights = drawn(LAYER_WEIGHTS | norm, dtype)
    made = polyhead.MultiHeadAttention if kind == "layer" else polyhead.AttentionBlock
    drops = {"dropout_p": 0.3, "output_dropout_p": 0.2}
    here, there = (made(each, 4, 2, **drops) for each in (weights, {n: DeviceMatrix(x) for n, x in weights.items()}))
    x, grad_out = drawn({"x": (2, 5, 12), "grad_out": (2, 5, 12)}, dtype).values()
    lengths = np.array([5, 3])
    call = {"causal": True, "align": "top_left", "training": True, "dropout_seed": 5, "output_dropout_seed": 6}
    want = here.forward(x, seqlens_k=lengths, **call)
    got = there.forward(Interface(x), seqlens_k=Interface(lengths), **call)
    bound = 1e-4 if dtype == np.float32 else 2e-2
    assert type(got) is polyhead.DeviceArray
    assert_close(numpy_of(got), want, bound)
    wants, gots = here.backward(grad_out), there.backward(Interface(grad_out))
    assert list(gots) == list(wants)
    for name in wants:
        assert_close(dense(gots[name]), wants[name], 5 * bound)


def test_feed_forward_block():
    shapes = {"weight1": (12, 20), "bias1": (20,), "weight2": (20, 12), "bias2": (12,), "norm_weight": (12,)}
    weights = drawn(shapes)
    options = {"activation": "silu", "norm": "rms", "inner_dropout_p": 0.3}
    here, there = (
        polyhead.FeedForwardBlock(each, **options) for each in (weights, {n: DeviceMatrix(x) for n, x in weights.items()})
    )
    x, grad_out = drawn({"x": (2, 5, 12), "grad_out": (2, 5, 12)}).values()
    call = {"training": True, "inner_dropout_seed": 5}
    assert_close(numpy_of(there.forward(Interface(x), **call)), here.forward(x, **call), 1e-4)
    wants, gots = here.backward(grad_out), there.backward(Interface(grad_out))
    assert list(gots) == list(wants)
    for name in wants:
        assert_close(dense(gots[name]), wants[name], 5e-4)
    again = polyhead.FeedForwardBlock({**weights, **{name: gots[name] for name in ("weight1", "weight2")}}, **options)
    with pytest.raises(polyhead.Error, match="in CPU memory, must be on CUDA device 0 as query"):
        again.forward(Interface(x))


def test_layers_refuse_by_a_sentence():
    weights = drawn(LAYER_WEIGHTS)
    here, there = (
        polyhead.MultiHeadAttention(each, 4, 2) for each in (weights, {n: DeviceMatrix(x) for n, x in weights.items()})
    )
    x = drawn({"x": (2, 5, 12)})["x"]
    on_device = Interface(x)
    pages = dict(cache=here.new_cache(4, 2), page_table=Interface(np.zeros((2, 2), np.int64)), seqlens_k=Interface(np.array([1, 1])))
    refused = [
        (lambda: there.forward(x), "query_weight is on CUDA device 0, must be in CPU memory"),
        (lambda: here.forward(on_device), "query_weight is in CPU memory, must be on CUDA device 0 as query"),
        (lambda: there.forward(on_device, caches=here.new_caches(2, 5)), "caches.key is in CPU memory, must be on CUDA device 0 as query"),
        (lambda: there.forward(on_device, **pages), "key is in CPU memory, must be on CUDA device 0 as query"),
    ]
    for call, sentence in refused:
        with pytest.raises(polyhead.Error, match=sentence) as error:
            call()
        del error
    with pytest.raises(TypeError, match="must be a NumPy array, or one on a CUDA device"):
        polyhead.MultiHeadAttention({**weights, "query_weight": [[1.0]]}, 4, 2)


def test_transposed_results_are_views():
    array = polyhead.DeviceArray((2, 3), "float32", 0, 0)
    view = array.T
    assert view.shape == (3, 2) and view.T.shape == (2, 3)
    assert view.__cuda_array_interface__["strides"] == (4, 12) and array.__cuda_array_interface__["strides"] is None
    assert view.__cuda_array_interface__["data"] == array.__cuda_array_interface__["data"]
