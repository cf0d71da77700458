"""Models in ONNX Runtime with their attention on our kernels: `polyhead.onnx.session`."""

from __future__ import annotations

import os
import pathlib
import threading
from typing import TYPE_CHECKING, Any

import polyhead

if TYPE_CHECKING:
    import onnxruntime

_LIBRARY = "libpolyhead_onnxruntime.so"
_PROVIDER = "polyhead"
_lock = threading.Lock()


def library_path() -> str:
    """Where the library is that ONNX Runtime loads: custom operators (1.19 or later), an execution provider (1.23 or later).

    ``options.register_custom_ops_library(polyhead.onnx.library_path())`` has nodes of these operators computed by
    polyhead: ONNX's Attention of opsets 23 to 25, and what `fuse` emits. A node that it cannot compute is an error, with
    the reason, when the session is made. With the configuration entry ``polyhead.domains`` set to ``polyhead``, what `fuse`
    emits alone; set to ``all``, MultiHeadAttention and GroupQueryAttention of com.microsoft too, but then ONNX Runtime finds
    no other operator of this domain, and models into which its optimizer puts one, such as FusedMatMul, fail to load.

    ``onnxruntime.register_execution_provider_library("polyhead", polyhead.onnx.library_path())`` makes the provider
    known that `session` adds: it also finds attention that is written out, and leaves to ONNX Runtime what it cannot
    compute.

    Raises
    ------
    polyhead.Error
        A package that was built without it.
    """
    path = pathlib.Path(__file__).with_name(_LIBRARY)
    if not path.is_file():
        raise polyhead.Error(f"{_LIBRARY} is not in this package: it was built with POLYHEAD_ONNXRUNTIME=OFF")
    return str(path)


def session(
    model: str | os.PathLike[str] | bytes,
    options: onnxruntime.SessionOptions | None = None,
    *,
    layers: bool | None = None,
    **kwargs: Any,
) -> onnxruntime.InferenceSession:
    """An ONNX Runtime session of a model as it is, its attention computed by polyhead on ONNX Runtime's own threads.

    Attention is found when the session is made: ONNX's Attention, what `fuse` emits, and, from ONNX Runtime 1.23 on,
    MultiHeadAttention and GroupQueryAttention of com.microsoft, and where it is written out, as `fuse` finds it. What cannot be computed here stays with ONNX Runtime, and its log says why at severity 1
    (information). With the entry ``session.record_ep_graph_assignment_info`` set to ``1``,
    ``get_provider_graph_assignment_info()`` of the session lists what runs here (ONNX Runtime 1.24 or later).

    Parameters
    ----------
    model : path or bytes
        As InferenceSession takes it.
    options : onnxruntime.SessionOptions, optional
        Not used for another session: the provider is added to them.
    layers : bool, optional
        Whether products around attention, with bias, activation, residual and norm, are computed here too. Default: they are, but for
        those of small matrices with a bias at most, of which a call with few rows takes ONNX Runtime less time.
    **kwargs
        Passed on to InferenceSession. ``providers`` is not among them.

    Returns
    -------
    onnxruntime.InferenceSession

    Raises
    ------
    polyhead.Error
        onnxruntime is not installed or older than 1.19, or this package was built without the library for it.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise polyhead.Error("session needs onnxruntime 1.19 or later: pip install onnxruntime") from error
    if "providers" in kwargs:
        raise polyhead.Error("providers cannot be given: the session has polyhead's, and the CPU's behind it")
    options = onnxruntime.SessionOptions() if options is None else options
    if hasattr(onnxruntime, "get_ep_devices"):
        options.add_session_config_entry("polyhead.domains", "polyhead")
        options.add_provider_for_devices(_devices(onnxruntime), {} if layers is None else {"layers": str(int(layers))})
    else:
        kwargs["providers"] = ["CPUExecutionProvider"]
    options.register_custom_ops_library(library_path())
    return onnxruntime.InferenceSession(model if isinstance(model, bytes) else os.fspath(model), options, **kwargs)


def _devices(onnxruntime):
    """The CPU as our provider's device, which is registered once in a process."""
    with _lock:
        for _ in range(2):
            found = [device for device in onnxruntime.get_ep_devices() if device.ep_name == _PROVIDER]
            if found:
                return found[:1]
            onnxruntime.register_execution_provider_library(_PROVIDER, library_path())
    raise polyhead.Error("ONNX Runtime shows no CPU to the execution provider")
