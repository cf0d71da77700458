"""ggml's attention, through the shared libraries of the package llama-cpp-python (pip install --no-deps llama-cpp-python).

Keys and values are [B, G, Sk, D] of a ggml type: f16, or blocks of 32 numbers with a scale (q8_0, q4_0). ggml aborts the
process where it refuses. Declarations: ggml/include/ggml.h and ggml-cpu.h.
"""

import ctypes
import functools
import importlib.util
import pathlib

import numpy as np
from problem import Operands, Problem
from rivals import Refusal

TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8}
BITS = {"f16": 16, "q4_0": 4.5, "q8_0": 8.5}
GRAPH_BYTES = 1 << 24  # of the graph and of what describes tensors


class _InitParams(ctypes.Structure):
    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


class _Plan(ctypes.Structure):
    _fields_ = [
        ("work_size", ctypes.c_size_t), ("work_data", ctypes.c_void_p), ("n_threads", ctypes.c_int),
        ("threadpool", ctypes.c_void_p), ("abort_callback", ctypes.c_void_p), ("abort_callback_data", ctypes.c_void_p),
        ("use_ref", ctypes.c_bool),
    ]  # fmt: skip


@functools.cache
def _libraries():
    """libggml-base and libggml-cpu, their functions declared."""
    spec = importlib.util.find_spec("llama_cpp")
    folders = [pathlib.Path(f) / "lib" for f in spec.submodule_search_locations] if spec else []
    folder = next((f for f in folders if (f / "libggml-cpu.so").exists()), None)
    if folder is None:
        raise Refusal("ggml's libraries are not installed (pip install --no-deps llama-cpp-python)")
    base, cpu = (ctypes.CDLL(str(folder / f"libggml-{name}.so"), ctypes.RTLD_GLOBAL) for name in ("base", "cpu"))
    pointer, size, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
    for library, name, result, arguments in (
        (base, "ggml_init", pointer, [_InitParams]),
        (base, "ggml_free", None, [pointer]),
        (base, "ggml_new_tensor_4d", pointer, [pointer, number, size, size, size, size]),
        (base, "ggml_get_data", pointer, [pointer]),
        (base, "ggml_quantize_chunk", ctypes.c_size_t, [number, pointer, pointer, size, size, size, pointer]),
        (base, "ggml_flash_attn_ext", pointer, [pointer, pointer, pointer, pointer, pointer, real, real, real]),
        (base, "ggml_new_graph", pointer, [pointer]),
        (base, "ggml_build_forward_expand", None, [pointer, pointer]),
        (cpu, "ggml_cpu_init", None, []),
        (cpu, "ggml_graph_plan", _Plan, [pointer, number, pointer]),
        (cpu, "ggml_graph_compute", number, [pointer, ctypes.POINTER(_Plan)]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    cpu.ggml_cpu_init()
    return base, cpu


class _Attention:
    """A graph of one node over memory of its own, which lives as long as this."""

    def __init__(self, p: Problem, x: Operands, kind: str, threads: int):
        self.base, self.cpu = _libraries()
        kept_bytes = int(p.batch * p.num_heads_kv * p.seqlen_k * p.head_dim * BITS[kind] / 4)  # keys and values
        self.kept_bytes = kept_bytes
        self.context = self.base.ggml_init(_InitParams(kept_bytes + 3 * x.query.size * 4 + GRAPH_BYTES, None, False))
        query = self._tensor(x.query.astype(np.float32), "f32")
        key, value = (self._tensor(t.astype(np.float32), kind) for t in (x.key, x.value))
        scale = p.head_dim**-0.5
        out = self.base.ggml_flash_attn_ext(self.context, query, key, value, None, scale, 0.0, 0.0)
        self.graph = self.base.ggml_new_graph(self.context)
        self.base.ggml_build_forward_expand(self.graph, out)
        self.plan = self.cpu.ggml_graph_plan(self.graph, threads, None)
        self.work = np.empty(max(self.plan.work_size, 1) + 64, np.uint8)
        self.plan.work_data = self.work.ctypes.data
        numbers = ctypes.cast(self.base.ggml_get_data(out), ctypes.POINTER(ctypes.c_float))
        self.out = np.ctypeslib.as_array(numbers, (p.batch, p.seqlen_q, p.num_heads, p.head_dim))

    def __del__(self):
        if getattr(self, "context", None):
            self.base.ggml_free(self.context)

    def _tensor(self, array: np.ndarray, kind: str):
        """[B, H, S, D], whose innermost dim ggml names first."""
        array = np.ascontiguousarray(array)
        tensor = self.base.ggml_new_tensor_4d(self.context, TYPES[kind], *reversed(array.shape))
        data, columns = self.base.ggml_get_data(tensor), array.shape[3]
        if kind == "f32":
            ctypes.memmove(data, array.ctypes.data, array.nbytes)
        else:
            rows = array.size // columns
            self.base.ggml_quantize_chunk(TYPES[kind], array.ctypes.data, data, 0, rows, columns, None)
        return tensor

    def __call__(self) -> np.ndarray:
        status = self.cpu.ggml_graph_compute(self.graph, ctypes.byref(self.plan))
        if status != 0:
            raise RuntimeError(f"ggml_graph_compute returned {status}")
        return self.out


def ggml(p: Problem, x: Operands, kind: str, threads: int):
    from rivals_cache import Kept

    if p.dtype != "f32":
        raise Refusal("takes queries in f32 only")
    attention = _Attention(p, x, kind, threads)
    return Kept(attention, lambda out: [out.transpose(0, 2, 1, 3).copy()], attention.kept_bytes)
