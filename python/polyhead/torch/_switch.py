"""The switch: torch's own attention, computed by polyhead, for the whole process."""

import contextlib
import functools
import warnings
from collections.abc import Iterator

import torch
import torch.compiler.config
import torch.nn.attention as registry
import torch.nn.functional as F
from torch._C import DispatchKey
from torch.nested._internal import ops as _nested_ops

import polyhead
from polyhead.torch import _aten, _flex_switch, _flex_transformers, _modules, _varlen

NAME = "polyhead"
_TAG = f" {NAME} {polyhead.__version__}"  # caches on disk know a graph by torch's names in it

# (aten's operator, dispatch key, what makes our kernel out of torch's)
_OVER_THEIRS = (
    ("scaled_dot_product_attention", "AutogradCPU", _aten.sdpa),
    ("scaled_dot_product_attention", "CPU", _aten.sdpa),
    ("scaled_dot_product_attention", "FuncTorchVmapMode", _aten.sdpa),
    ("scaled_dot_product_attention", "AutogradNestedTensor", _aten.sdpa_of_nested),
    ("scaled_dot_product_attention", "AutogradMeta", _aten.sdpa_of_meta),
    ("_scaled_dot_product_flash_attention_for_cpu", "CPU", _aten.flash_forward),
    ("_scaled_dot_product_flash_attention_for_cpu_backward", "CPU", _aten.flash_backward),
    ("_native_multi_head_attention", "CPU", _modules.native_multi_head_attention),
    ("_native_multi_head_attention", "NestedTensorCPU", _modules.native_multi_head_attention),
)
# Where torch has nothing for the CPU.
_NEW = [
    ("_flash_attention_forward", _varlen.flash_forward),
    ("_flash_attention_backward", _varlen.flash_backward),
]
if hasattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace"):  # since torch 2.12
    _NEW.append(("_flash_attention_forward_no_dropout_inplace", _varlen.flash_forward_into))

_IN_REGISTRY = hasattr(registry, "restore_flash_attention_impl")  # since torch 2.11
_installed = None  # before that: ours, while it is enabled
_before = None  # the implementation that was active when enable() was called


class _Installed:
    """Our kernels in torch's dispatcher; what torch's registry keeps while they are active."""

    def __init__(self):
        with contextlib.ExitStack() as undo:  # all or nothing
            self._library = library = torch.library.Library("aten", "IMPL")
            undo.callback(_forget_resolved_kernels)
            undo.callback(self._forget_library)
            theirs = [_kernel(name, key) for name, key, _ in _OVER_THEIRS]
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Warning only once for all operators")  # that a kernel is replaced
                for (name, key, ours), kernel in zip(_OVER_THEIRS, theirs):
                    library.impl(name, ours(kernel), key)
            for name, ours in _NEW:
                library.impl(name, ours, "CPU")
            del library
            _forget_resolved_kernels()
            for module, name, ours in (
                (F, "multi_head_attention_forward", _modules.multi_head_attention_forward),
                (_nested_ops, "jagged_scaled_dot_product_attention", _aten.sdpa_of_nested),
            ):
                undo.callback(_Replacement(module, name, ours).end)
            undo.callback(_flex_switch.Installed().end)
            undo.callback(_flex_transformers.Installed().end)
            torch.compiler.config.cache_key_tag += _TAG
            undo.callback(_remove_tag)
            self._undo = undo.pop_all()

    def _forget_library(self):
        self._library = None  # its registrations end with it

    def remove(self):
        self._undo.close()


class _Replacement:
    """A function of torch's that is ours for a while. What others put over it since stays theirs, with torch's below."""

    def __init__(self, module, name, factory):
        self._module, self._name, self._active = module, name, True
        self._theirs = theirs = getattr(module, name)
        ours = factory(theirs)

        @functools.wraps(ours)
        def replacement(*arguments, **options):
            return (ours if self._active else theirs)(*arguments, **options)

        self._replacement = replacement
        setattr(module, name, replacement)

    def end(self):
        self._active = False
        if getattr(self._module, self._name) is self._replacement:
            setattr(self._module, self._name, self._theirs)


def _remove_tag():
    config = torch.compiler.config
    config.cache_key_tag = config.cache_key_tag.replace(_TAG, "", 1)


def _kernel(name, key):
    """aten's kernel as it is now, whatever is registered later."""
    kernel, keys = torch.library.get_kernel(f"aten::{name}", key), torch._C.DispatchKeySet(getattr(DispatchKey, key))
    return functools.partial(kernel.call_boxed, keys)


def _forget_resolved_kernels():
    """Tracing remembers, for each operator and key, which kernel it once found."""
    for name in {name for name, *_ in (*_OVER_THEIRS, *_NEW)}:
        getattr(torch.ops.aten, name).default._dispatch_cache.clear()


def _active():
    if _IN_REGISTRY:
        return registry.current_flash_attention_impl()
    return NAME if _installed else None


def is_enabled():
    return _active() == NAME


def _activate(name):
    global _installed
    if _IN_REGISTRY:
        registry.activate_flash_attention_impl(name)
    else:
        _installed = _Installed()


def _restore():
    global _installed
    if _IN_REGISTRY:
        registry.restore_flash_attention_impl()
    else:
        _installed.remove()
        _installed = None


def enable() -> None:
    """torch's attention runs on polyhead from here on, in the whole process, as its FLASH_ATTENTION backend on the CPU.

    The same as ``torch.nn.attention.activate_flash_attention_impl("polyhead")``, which needs torch 2.11. Enabled twice is
    enabled once. Not to be turned on or off while other threads call torch's attention: its dispatcher may raise there.

    In training and eval, eager and compiled, it takes over `torch.nn.functional.scaled_dot_product_attention` whole
    (dropout, masks and their gradients, any shapes), `torch.nn.MultiheadAttention` and torch.nn's Transformer modules
    with their fast paths and ``need_weights=True``, `torch.nn.attention.varlen`, `torch.nn.attention.flex_attention` (with
    gradients; ``torch.compile(flex_attention)`` too, but not a compiled function that calls it), and what Inductor takes
    for attention. In Hugging Face transformers, where that was imported before, ``attn_implementation="flex_attention"``
    takes attention sinks too (gpt-oss), which it refuses on the CPU.
    Left to torch: float64 (but not with ``need_weights=True``), forward-mode derivatives, nested tensors given to
    scaled_dot_product_attention itself, other devices, and all calls while flash attention is off
    (``sdpa_kernel(SDPBackend.MATH)``). `report` tells what was taken, and why others not.

    What changes besides speed and rounding: a query that sees no key gets 0 where torch.nn.MultiheadAttention gives
    NaN; NaN at visible places is not swallowed; wrong sizes raise an error where torch reads beyond its arrays, and so do
    negative indices in functions given to flex_attention, which torch counts from the end. At
    padded positions the fast path of torch.nn.TransformerEncoder gives 0, as ever; at real positions, what the slow
    path gives.

    Graphs that torch.compile made before keep what they were made with, but for calls of torch's flash kernel, which
    follow the switch. ``torch.compiler.reset()`` makes them anew.

    Examples
    --------
    >>> import torch, polyhead.torch
    >>> polyhead.torch.enable()
    >>> out = torch.nn.functional.scaled_dot_product_attention(*torch.rand(3, 1, 2, 5, 8))
    >>> polyhead.torch.disable()
    """
    global _before
    if is_enabled():
        return
    before = _active()
    try:
        _activate(NAME)
    except BaseException:
        if before is not None:
            _activate(before)
        raise
    _before = before


def disable() -> None:
    """torch's attention is torch's again, or that of the implementation that was active before `enable`."""
    global _before
    if not is_enabled():
        return
    _restore()
    before, _before = _before, None
    if before is not None:
        _activate(before)


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """`enable` for a while: afterwards it is as it was before. Not only for this thread: for the process.

    Examples
    --------
    >>> import torch, polyhead.torch
    >>> layer = torch.nn.TransformerEncoderLayer(16, 2)
    >>> with polyhead.torch.enabled():
    ...     out = layer(torch.rand(5, 1, 16))
    """
    was_enabled = is_enabled()
    enable()
    try:
        yield
    finally:
        enable() if was_enabled else disable()


if _IN_REGISTRY and NAME not in registry.list_flash_attention_impls():
    registry.register_flash_attention_impl(NAME, register_fn=_Installed)
