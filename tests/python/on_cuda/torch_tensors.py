"""CUDA tensors of torch's build for the CPU, to which on_cuda/torch_device.cc is a device, and what a test file of them needs."""

import ctypes
import functools
import gc
import time
import types

import numpy as np
import pytest
import torch
import torch.utils.dlpack
from device import allocate, pointer, synchronize, to_device, to_host, twin
from torch.utils._pytree import tree_map

import polyhead
from polyhead import _bind
from polyhead._cuda_arrays import contiguous_strides

TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16", torch.uint8: "uint8",
         torch.int64: "int64", torch.int32: "int32", torch.bool: "bool", torch.float64: "float64"}  # fmt: skip
made = []  # dtypes of new tensors


class Owner:
    """As torch's allocator: memory goes in the order of the stream that torch works on."""

    stream = 0

    def __init__(self, address):
        self.address = address

    def __del__(self):
        if self.address:
            twin.cudaFreeAsync(pointer(self.address), pointer(Owner.stream))


def set_stream(stream):
    Owner.stream = stream
    ctypes.CDLL(None).torch_device_set_stream(pointer(stream))


def new_tensor(shape, dtype):
    """On cuda:0, contiguous, unwritten."""
    size = int(np.prod(shape)) * dtype.itemsize
    owner = Owner(allocate(size))
    return torch.utils.dlpack.from_dlpack(_bind.cuda_capsule(owner, owner.address, tuple(shape), contiguous_strides(shape), TYPES[dtype], 0))


def empty_strided(size, stride, *, dtype=None, layout=None, device=None, pin_memory=None):
    """Memory in the order of the strides, which leave no gaps."""
    made.append(dtype)
    order = sorted(range(len(size)), key=lambda n: (-stride[n], n))
    dense = new_tensor([size[n] for n in order], dtype or torch.float32)
    return dense.permute([order.index(n) for n in range(len(size))]) if len(size) > 1 else dense


def cuda(tensor):
    x = tensor.detach().contiguous()
    there = new_tensor(x.shape, x.dtype)
    there.host = x.view(torch.uint8).numpy() if x.dtype in (torch.bfloat16, torch.bool) else x.numpy()
    to_device(there.host, there.data_ptr())
    synchronize()
    return there.requires_grad_(tensor.requires_grad)


def host(tensor):
    """Of any strides without gaps."""
    synchronize()
    sizes = [1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))]
    storage = torch.empty(sizes, dtype=tensor.dtype)
    raw = to_host(tensor.data_ptr(), (storage.numel() * storage.itemsize,), np.uint8)
    storage.view(torch.uint8).copy_(torch.from_numpy(raw))
    return storage.as_strided(tensor.shape, tensor.stride())


@pytest.fixture(scope="module", autouse=True)
def device():
    """What torch's build for CUDA has, of what is needed here."""
    torch.cuda._lazy_init = lambda: None
    torch.cuda.current_stream = lambda device=None: types.SimpleNamespace(cuda_stream=Owner.stream)
    library, keys = torch.library.Library("aten", "IMPL"), torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    for name in ("as_strided", "view", "_reshape_alias"):  # whatever the device
        kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
        library.impl(name, functools.partial(kernel.call_boxed, keys), "CUDA")
    library.impl("empty_strided", empty_strided, "CUDA")
    library.impl("empty.memory_format", lambda size, dtype=None, **_: new_tensor(size, dtype), "CUDA")
    yield library


WAITS = {"_local_scalar_dense", "nonzero", "_unique2", "equal"}
NOT_COMPOSED = ("_to_copy", "arange", "arange.start_step", "clamp", "copy_", "fill_.Scalar", "zero_")  # torch has them of parts that need a device


def _peeked(tensor):
    """As host(), of what may not be written yet."""
    synchronize()
    storage = torch.empty([1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))], dtype=tensor.dtype)
    if tensor.numel():
        ctypes.memmove(storage.data_ptr(), tensor.data_ptr(), storage.nbytes)
    return storage.as_strided(tensor.shape, tensor.stride()) if tensor.numel() else torch.empty(tensor.shape, dtype=tensor.dtype)


def _on_host(op, *args, **kwargs):
    """The operator on the host, for what torch's build for the CPU cannot compute on a CUDA device; none that waits for it."""
    assert op._schema.name.removeprefix("aten::") not in WAITS, f"{op} waits for the device"
    arguments, copies = op._schema.arguments, {}

    def as_tensor(argument, x):
        return torch.tensor(x) if str(argument.type) == "Tensor" and isinstance(x, (int, float)) else x

    def moved(x):
        if not (isinstance(x, torch.Tensor) and x.is_cuda):
            return x
        return copies.setdefault(id(x), (x, _peeked(x)))[1]

    asked = kwargs.get("device")
    back = asked.type == "cuda" if asked is not None else None
    here = {name: torch.device("cpu") if name == "device" and x is not None else tree_map(moved, x) for name, x in kwargs.items()}
    args = [as_tensor(*each) for each in zip(arguments, args)]
    out = op(*tree_map(moved, args), **here)
    written = {}
    for argument, x in [*zip(arguments, args), *((each, kwargs.get(each.name)) for each in arguments[len(args) :])]:
        if argument.alias_info is not None and argument.alias_info.is_write and id(x) in copies:
            there, here = copies[id(x)]
            if here.numel():
                raw = np.frombuffer(bytes(here.untyped_storage()), np.uint8)
                to_device(raw, there.data_ptr())
                synchronize()
            written[id(here)] = there
    back = bool(copies) if back is None else back
    return tree_map(lambda x: written.get(id(x), cuda(x) if back and isinstance(x, torch.Tensor) else x), out)


@pytest.fixture
def host_operators(device):
    library = torch.library.Library("_", "IMPL")
    library.fallback(_on_host, "CUDA")
    named = torch.library.Library("aten", "IMPL")
    for name in NOT_COMPOSED:
        packet, _, overload = name.partition(".")
        named.impl(name, functools.partial(_on_host, getattr(getattr(torch.ops.aten, packet), overload or "default")), "CUDA")
    yield
    for each in (named, library):
        each._destroy()


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    deadline = time.monotonic() + 5  # autograd's thread may hold the last tensors for a moment
    while (left := twin.cuda_twin_num_allocations()) and time.monotonic() < deadline:
        gc.collect()
        synchronize()
        time.sleep(0.001)
    assert left == 0


BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def assert_close(got, want, dtype=torch.float32):
    torch.testing.assert_close(host(got).float(), want.float(), rtol=BOUNDS[dtype], atol=BOUNDS[dtype])


def assert_refused(refused):
    """Calls, and what stands in the sentence of each. Nothing of theirs is left when this returns."""
    while refused:
        call, sentence = refused.pop()
        with pytest.raises((polyhead.Error, ValueError)) as error:
            call()
        assert sentence in str(error.value)
        del error, call
