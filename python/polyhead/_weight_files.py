"""Files of arrays: .safetensors and .npz. Nothing in a file is trusted, and nothing in it is run."""

import collections.abc
import json
import math
import os
import pathlib
import secrets
import sys
import zipfile
from typing import Any

import numpy as np

from polyhead._bind import Error


def read(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """All arrays of a .safetensors or .npz file. Nothing in the file is trusted, and nothing in it is run.

    Parameters
    ----------
    path : str or path
        .safetensors needs the package safetensors; bfloat16 in either needs ml_dtypes.

    Returns
    -------
    dict of str to NumPy array

    Raises
    ------
    polyhead.Error
        A file that is truncated or malformed, or an array of a type that NumPy does not have.
    ModuleNotFoundError, OSError
    """
    path = pathlib.Path(path)
    read_file, _ = _kind(path)
    if path.exists() and not path.is_file():  # a pipe could block for ever
        raise Error(f"{path} is not a regular file")
    return read_file(path)


def write(path: str | os.PathLike[str], arrays: collections.abc.Mapping[str, Any]) -> None:
    """Writes arrays to a .safetensors or .npz file, which appears whole or not at all, in place of an older one.

    Parameters
    ----------
    path : str or path
    arrays : mapping of str to array
        What `load` and `export` return, the scale among them; whatever `numpy.asarray` takes as numbers, and torch.

    Raises
    ------
    polyhead.Error
        An array that such files do not hold: objects, text.
    ModuleNotFoundError, OSError
    """
    path = pathlib.Path(path)
    _, write_file = _kind(path)
    numpy_arrays = {name: _numpy(name, array) for name, array in flat(arrays, "arrays").items()}
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            write_file(file, numpy_arrays)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def flat(arrays, argument, prefix=""):
    """A mapping, and mappings in it, as one dict."""
    if not isinstance(arrays, collections.abc.Mapping):
        raise TypeError(f"{argument} has type {type(arrays).__name__}, must be a mapping of names to arrays")
    found = {}
    for name in arrays:
        array = arrays[name]
        if isinstance(array, collections.abc.Mapping):
            found |= flat(array, argument, f"{prefix}{name}/")
        else:
            found[f"{prefix}{name}"] = array
    return found


def _kind(path):
    if path.suffix not in _KINDS:
        raise Error(f"path ends in {path.suffix!r}, must end in .safetensors or .npz")
    return _KINDS[path.suffix]


def needs(package, reason):
    try:
        return __import__(package)
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(f"{reason}: python -m pip install {package}") from missing


def _numpy(name, array):
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        array = array.detach().cpu()
        if array.dtype == torch.bfloat16:
            dtype = needs("ml_dtypes", f"{name} is bfloat16").bfloat16
            return array.contiguous().view(torch.int16).numpy().view(dtype)
    array = np.asarray(array)
    if array.dtype.kind not in "biufc" and array.dtype.name != "bfloat16":
        raise Error(f"{name} has dtype {array.dtype}, must be numbers or bool")
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return array if array.flags.c_contiguous else array.copy(order="C")


# --- .safetensors: 8 bytes of header length, a JSON header, the arrays' bytes without gaps ---

_DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "I64": np.int64, "I32": np.int32, "I16": np.int16,
    "I8": np.int8, "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
    "C64": np.complex64,
}  # fmt: skip
_ML_DTYPES = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}


def _safetensors_dtype(path, name, text):
    if text in _DTYPES:
        return np.dtype(_DTYPES[text])
    if text in _ML_DTYPES:
        return np.dtype(getattr(needs("ml_dtypes", f"{path}: {name!r} is {text}"), _ML_DTYPES[text]))
    raise Error(f"{path}: {name!r} is {text}, which NumPy does not have")


def _read_safetensors(path):
    safetensors = needs("safetensors", ".safetensors files need the package safetensors")
    try:
        with safetensors.safe_open(path, "np") as file:  # checks all of the header; its NumPy has no bfloat16
            names = list(file.keys())
    except safetensors.SafetensorError as error:
        raise Error(f"{path}: {error}") from None
    arrays = {}
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length), object_pairs_hook=lambda pairs: _unique(path, pairs))
        for name in names:
            entry = header[name]
            dtype, count = _safetensors_dtype(path, name, entry["dtype"]), math.prod(entry["shape"])
            file.seek(8 + length + entry["data_offsets"][0])
            elements = np.fromfile(file, dtype, count)
            if elements.size != count:
                raise Error(f"{path}: ends inside {name!r}")
            arrays[name] = elements.reshape(entry["shape"])
    return arrays


def _unique(path, pairs):
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise Error(f"{path}: its header names something twice")
    return entries


def _write_safetensors(file, arrays):
    needs("safetensors", ".safetensors files need the package safetensors")
    from safetensors.numpy import save

    file.write(save(arrays))


# --- .npz: a zip of .npy files ---


def _read_npz(path):
    arrays = {}
    with open(path, "rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                for member in archive.infolist():
                    name = member.filename.removesuffix(".npy")
                    if name == member.filename or name in arrays:
                        raise Error(f"{path}: {member.filename!r} is no array, or one that is there twice")
                    with archive.open(member) as data:
                        arrays[name] = _read_npy(data, member.file_size, f"{path}: {name!r}")
        except (Error, MemoryError, ModuleNotFoundError):
            raise
        except Exception as error:  # zipfile, zlib and NumPy each have errors of their own for a malformed file
            raise Error(f"{path}: {error}") from None
    return arrays


def _read_npy(file, size_bytes, where):
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise Error(f"{where} has .npy version {version[0]}.{version[1]}, takes 1.0 and 2.0")
    header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran_order, dtype = header(file)
    if dtype.hasobject:
        raise Error(f"{where} holds Python objects (pickle), which are never read")
    expected = math.prod(shape) * dtype.itemsize
    if expected != size_bytes - file.tell():  # before memory is asked for
        found = size_bytes - file.tell()
        raise Error(f"{where} has shape {shape} of {dtype}, {expected} bytes, and {found} bytes of data")
    data = file.read(expected)
    if len(data) != expected:
        raise Error(f"{where} ends after {len(data)} of {expected} bytes")
    array = np.frombuffer(bytearray(data), dtype).reshape(shape, order="F" if fortran_order else "C")
    if dtype == np.dtype("V2"):  # how NumPy saves bfloat16
        array = array.view(needs("ml_dtypes", f"{where} is bfloat16").bfloat16)
    return array


def _write_npz(file, arrays):
    with zipfile.ZipFile(file, "w", allowZip64=True) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


_KINDS = {".safetensors": (_read_safetensors, _write_safetensors), ".npz": (_read_npz, _write_npz)}
