"""The operators `torch.ops.polyhead.*` of schemas.txt: kernels, and what each of torch's machineries asks of them.

On the CPU, and, in a build with CUDA kernels, on CUDA devices.

Every call of a polyhead kernel from torch goes through these, so profilers and graphs show it.
"""

import hashlib
import pathlib
import re

import torch
import torch.compiler.config

import polyhead
from polyhead.torch import _batching, _block_ops, _cpp, _fake, _fallback
from polyhead.torch._options import NUM_SHARED, PROGRAM



def _read_schemas():
    """{name: (arguments) -> results} of schemas.txt."""
    text = (pathlib.Path(__file__).parent / "schemas.txt").read_text(encoding="ascii")
    schemas = re.sub(r"\n +", " ", text).splitlines()
    return {line[: line.index("(")]: line[line.index("(") :] for line in schemas if line and not line.startswith("#")}


SCHEMAS = _read_schemas()
_in_cpp = _cpp.load()  # which defines them too; or raises
_library = torch.library.Library("polyhead", "FRAGMENT" if _in_cpp else "DEF")
if not _in_cpp:
    for _name, _schema in SCHEMAS.items():
        _library.define(_name + _schema)
# Compiled graphs on disk call by these schemas, but torch's cache looks for a graph by the operators' names alone.
_digest = hashlib.sha256(repr(SCHEMAS).encode()).hexdigest()
torch.compiler.config.cache_key_tag += f" polyhead's operators {_digest[:16]}"


def _on_cpu_alone(name):
    def refuse(*arguments, **options):
        raise polyhead.Error(f"polyhead::{name} computes on the CPU alone, and was given CUDA tensors")

    return refuse


for _name in [name for name in SCHEMAS if name not in _block_ops.FAKES]:
    _function = _name.replace(".", "_")
    # Without one in C++: all of another build, dropout_mask, and before torch 2.10 those that take a list or a string.
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"polyhead::{_name}", "CPU"):
        _library.impl(_name, getattr(_fallback, _function), "CPU")
    if _name == "dropout_mask":
        _library.impl(_name, _on_cpu_alone(_name), "CUDA")
    elif not (_name.startswith("merge_") or torch._C._dispatch_has_kernel_for_dispatch_key(f"polyhead::{_name}", "CUDA")):
        _library.impl(_name, getattr(_fallback, _function), "CUDA")
    torch.library.register_fake(f"polyhead::{_name}", getattr(_fake, _function), lib=_library)
    if "." in _name and not _name.endswith(".program"):
        _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")
for _name in _block_ops.FAKES:
    for _key in ("CPU", "CUDA"):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"polyhead::{_name}", _key):
            _library.impl(_name, _block_ops.KERNELS[_name], _key)
    torch.library.register_fake(f"polyhead::{_name}", _block_ops.FAKES[_name], lib=_library)
    if _name.endswith("_backward"):
        _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")
for _name in ("attention_forward", "attention_backward"):
    for _overload in (_name, f"{_name}.program"):
        torch.library.register_vmap(f"polyhead::{_overload}", getattr(_batching, _name), lib=_library)


def implementation() -> str:
    """How the operators run: "C++", on torch's own threads, or "Python", over the binding and on polyhead's threads."""
    return "C++" if _in_cpp else "Python"


attention_forward = torch.ops.polyhead.attention_forward.default
attention_backward = torch.ops.polyhead.attention_backward.default


def forward_of(options):
    """The overload of attention_forward that takes these options."""
    return attention_forward if len(options) <= PROGRAM else torch.ops.polyhead.attention_forward.program


def backward_of(options):
    return attention_backward if len(options) <= NUM_SHARED else torch.ops.polyhead.attention_backward.program


attention_forward_cached = torch.ops.polyhead.attention_forward.cached


# For _autograd.py alone. Called without the Python frame of OpOverload.__call__.
forward_below_autograd = torch.ops.polyhead.attention_forward.below_autograd._op
forward_inference = torch.ops.polyhead.attention_forward.inference._op
backward_below_autograd = torch.ops.polyhead.attention_backward.below_autograd._op
merge_forward = torch.ops.polyhead.merge_forward.default
merge_backward = torch.ops.polyhead.merge_backward.default
dropout_mask = torch.ops.polyhead.dropout_mask.default
attention_block_forward = torch.ops.polyhead.attention_block_forward.default
attention_block_backward = torch.ops.polyhead.attention_block_backward.default
feed_forward_block_forward = torch.ops.polyhead.feed_forward_block_forward.default
feed_forward_block_backward = torch.ops.polyhead.feed_forward_block_backward.default


def cast_for_autocast(*tensors):
    """As torch casts for its own attention: float tensors, but not float64, to autocast's dtype."""
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return tuple(
        each.to(dtype)
        if each is not None and each.is_floating_point() and each.dtype != torch.float64 else each
        for each in tensors
    )


_AUTOCAST = ("AutocastCPU", "AutocastCUDA")
_on_cpu, _on_cuda = (torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, each)) for each in _AUTOCAST)
_autocast_keys = _on_cpu | _on_cuda


def below_autocast():
    return torch._C._ExcludeDispatchKeyGuard(_autocast_keys)


def implement_autocast(name, function):
    for key in _AUTOCAST:
        _library.impl(name, function, key)


def _cast(query, key, value, *options):
    with below_autocast():
        return forward_of(options)(*cast_for_autocast(query, key, value), *options)


for _overload in ("attention_forward", "attention_forward.program"):
    implement_autocast(_overload, _cast)


def implement_autograd(name, function):
    _library.impl(name, function, "Autograd")


def implement_cuda(name, function):
    _library.impl(name, function, "CUDA")
