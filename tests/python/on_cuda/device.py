"""The simulated CUDA device, and arrays in its memory as packages for GPUs make them."""

import ctypes
import os

import numpy as np

twin = ctypes.CDLL(os.environ["POLYHEAD_CUDA_TWIN"])
twin.cuda_twin_take_fault.restype = ctypes.c_char_p
TO_DEVICE, TO_HOST, NON_BLOCKING = 1, 2, 1


def check(error):
    if error:
        raise RuntimeError(f"CUDA error {error}: {twin.cuda_twin_take_fault().decode()}")


def pointer(number):
    return ctypes.c_void_p(number)


def synchronize():
    check(twin.cudaDeviceSynchronize())


def new_stream():
    stream = ctypes.c_void_p()
    check(twin.cudaStreamCreateWithFlags(ctypes.byref(stream), NON_BLOCKING))
    return stream.value


def allocate(num_bytes):
    memory = ctypes.c_void_p()
    check(twin.cudaMalloc(ctypes.byref(memory), ctypes.c_size_t(num_bytes)))
    return memory.value or 0


def to_device(x, address, stream=0):
    """Puts the copy on the stream; x must live until it has run."""
    check(twin.cudaMemcpyAsync(pointer(address), pointer(x.ctypes.data), ctypes.c_size_t(x.nbytes), TO_DEVICE, pointer(stream)))


def to_host(address, shape, dtype):
    """What is there once everything has run."""
    synchronize()
    x = np.empty(shape, dtype)
    check(twin.cudaMemcpy(pointer(x.ctypes.data), pointer(address), ctypes.c_size_t(x.nbytes), TO_HOST))
    return x


def is_written(address, num_bytes):
    return bool(twin.cuda_twin_is_written(pointer(address), ctypes.c_size_t(num_bytes)))


class Memory:
    """An array's elements on the device, contiguous."""

    def __init__(self, x, stream=0):
        self.x = np.ascontiguousarray(x)  # the copy reads it
        self.address = allocate(self.x.nbytes)
        to_device(self.x, self.address, stream)

    def __del__(self):
        if self.address:
            twin.cudaFree(pointer(self.address))


class Interface:
    """As Numba's arrays: __cuda_array_interface__ alone."""

    def __init__(self, x, stream=None, **fields):
        self.memory = Memory(x, stream or 0)
        x = self.memory.x
        self.__cuda_array_interface__ = {
            "shape": x.shape, "typestr": x.dtype.str, "data": (self.memory.address, False), "strides": None,
            "stream": stream, "version": 3, **fields,
        }  # fmt: skip


class Exporter:
    """As jax's arrays: DLPack alone. `asked` has the streams that it was asked for."""

    def __init__(self, x, dtype=None, device=0):
        self.memory, self.asked, self.device = Memory(x), [], device
        self.dtype = dtype or str(x.dtype)

    def __dlpack_device__(self):
        return 2, self.device

    def __dlpack__(self, *, stream=None, **_):
        from polyhead import _bind
        from polyhead._cuda_arrays import contiguous_strides

        self.asked.append(stream)
        shape = self.memory.x.shape
        return _bind.cuda_capsule(self, self.memory.address, shape, contiguous_strides(shape), self.dtype, self.device)


def numpy_of(array):
    """Of an array on the device."""
    interface = array.__cuda_array_interface__
    assert interface["strides"] is None
    return to_host(interface["data"][0], interface["shape"], np.dtype(interface["typestr"]))
