"""Arrays in the memory of a CUDA device: the streams that fill them, and new ones of the same kind.

The binding asks (python/src/place.cc) where query of a call lies there.
"""

from __future__ import annotations

import contextlib
import math
import sys

from polyhead import _bind

_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "bool": 1, "uint8": 1}
_TYPESTRS = {"float64": "<f8", "float32": "<f4", "float16": "<f2", "bool": "|b1", "uint8": "|u1"}
_CUDA, _DEFAULT_STREAM = 2, 1  # as DLPack counts devices and streams


def _package(array):
    """The name of the package that makes arrays of this kind, of those whose own allocator is used; else ""."""
    for kind in type(array).__mro__:
        name = kind.__module__.partition(".")[0]
        if name in _NEW:
            return name
    return ""


def _dtype_of(array):
    """Its name, as "float32"."""
    return str(getattr(array, "dtype", "")).rpartition(".")[2]


def current_stream(array, device):
    """The stream on which the array's package puts its work now; 0: the default stream."""
    if isinstance(array, DeviceArray):
        return array.stream
    package = _package(array)
    if package == "torch":
        return sys.modules["torch"].cuda.current_stream(device).cuda_stream
    if package == "cupy":
        cuda = sys.modules["cupy"].cuda
        with cuda.Device(device):
            return cuda.get_current_stream().ptr
    return 0


def _new_torch(like, shape, dtype, device, stream):
    torch = sys.modules["torch"]
    new = torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)
    if stream != current_stream(like, device):  # else its allocator might hand the memory out again too early
        new.record_stream(torch.cuda.ExternalStream(stream, device=like.device))
    return new


def _new_cupy(like, shape, dtype, device, stream):
    cupy = sys.modules["cupy"]
    with cupy.cuda.Device(device), cupy.cuda.ExternalStream(stream):  # whose order its allocator then keeps
        return cupy.empty(shape, like.dtype if _dtype_of(like) == dtype else dtype)


def _new_numba(like, shape, dtype, device, stream):
    cuda = sys.modules["numba.cuda"]
    with cuda.gpus[device]:
        return cuda.device_array(shape, dtype)


def device_of(array):
    """CUDA's number of the device where it lies; None: on the host, or it is no array."""
    device = _bind.cuda_device(array)
    return None if device < 0 else device


def empty_like(array, shape=None, dtype=None):
    """A new array of its kind, and its shape and dtype or these, contiguous, for work on its package's current stream."""
    device = device_of(array)
    sizes = tuple(array.shape if shape is None else shape)
    return new_array(array, sizes, dtype or _dtype_of(array), device, current_stream(array, device))


_NEW = {"torch": _new_torch, "cupy": _new_cupy, "numba": _new_numba}


def new_array(like, shape, dtype, device, stream):
    """An uninitialised array, contiguous, for work on the stream: by the package of `like`, or a DeviceArray."""
    make = _NEW.get(_package(like))
    return DeviceArray(shape, dtype, device, stream) if make is None else make(like, shape, dtype, device, stream)


def contiguous_strides(shape):
    """In elements."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


class _Memory:
    """Bytes on a device, given back in the order of the stream and of those that may still read them when they go."""

    def __init__(self, num_bytes, device, stream):
        self.device, self.stream, self.readers, self.address = device, stream, set(), 0
        if num_bytes > 0:
            self.address = _bind.cuda_allocate(num_bytes, device, stream)

    def __del__(self):
        address, self.address = self.address, 0
        if not address or _bind is None:
            return
        for reader in self.readers:
            with contextlib.suppress(_bind.Error):  # the stream is gone, and with it what it had to do
                _bind.cuda_order(reader, self.device, self.stream)
        _bind.cuda_free(address, self.device, self.stream)


class DeviceArray:
    """A result on a CUDA device, where query is of a package whose arrays polyhead cannot make.

    Any package that reads DLPack or ``__cuda_array_interface__`` takes it without a copy, as in
    ``jax.dlpack.from_dlpack(out)`` or ``numba.cuda.as_cuda_array(out)``, and `polyhead.attention` does. Whoever asks gets it in
    the order of its stream.

    Attributes
    ----------
    shape : tuple of int
    dtype : str
        "float32", "bfloat16", ...
    device : int
        CUDA's number of the device.
    stream : int
        The stream that fills it.
    """

    def __init__(self, shape: tuple[int, ...], dtype: str, device: int, stream: int) -> None:
        self.shape, self.dtype, self.device, self.stream = tuple(shape), dtype, device, stream
        self._strides = contiguous_strides(self.shape)
        self._memory = _Memory(math.prod(self.shape) * _BYTES[dtype], device, stream)

    @property
    def T(self) -> DeviceArray:
        """The same memory with its dimensions in reverse order."""
        view = DeviceArray.__new__(DeviceArray)
        view.__dict__.update(self.__dict__, shape=self.shape[::-1], _strides=self._strides[::-1])
        return view

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        if self.dtype not in _TYPESTRS:
            raise AttributeError(f"{self.dtype} has no name in __cuda_array_interface__: take __dlpack__")
        self._memory.readers.add(_DEFAULT_STREAM)
        strides = tuple(stride * _BYTES[self.dtype] for stride in self._strides)
        return {
            "shape": self.shape, "typestr": _TYPESTRS[self.dtype], "data": (self._memory.address, False),
            "strides": None if self._strides == contiguous_strides(self.shape) else strides,
            "stream": self.stream or _DEFAULT_STREAM, "version": 3,
        }  # fmt: skip

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, self.device

    def __dlpack__(self, *, stream: int | None = None, **_: object) -> object:
        if stream != -1:  # -1: whoever asks knows better
            reader = _DEFAULT_STREAM if stream is None else stream
            _bind.cuda_order(self.stream, self.device, reader)
            self._memory.readers.add(reader)
        return _bind.cuda_capsule(self, self._memory.address, self.shape, self._strides, self.dtype, self.device)

    def __repr__(self) -> str:
        return f"polyhead.DeviceArray(shape={self.shape}, dtype={self.dtype!r}, device={self.device})"
