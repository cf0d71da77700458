"""polyhead.weights.read and write: both kinds of files there and back; truncated, hostile and random ones refused."""

import io
import json
import os
import struct
import zipfile

import ml_dtypes
import numpy as np
import pytest

import polyhead
from optional import needs_torch, torch
from polyhead import weights

safetensors = pytest.importorskip("safetensors", reason="safetensors is not installed")

ARRAYS = {
    "layer.0.query": np.arange(12, dtype=np.float32).reshape(3, 4),
    "half": np.array([[1.5, -0.0]], np.float16),
    "brain": np.array([1, 2.5, np.nan], ml_dtypes.bfloat16),
    "transposed": np.arange(6.0).reshape(2, 3).T,
    "big_endian": np.arange(3, dtype=">f4"),
    "scale": 0.125,
    "none": np.zeros((0, 3)),
    "ids": np.array([1, -2]),
    "mask": np.array([True, False]),
    "file": np.ones(2),  # the name of an argument of numpy.savez
}


@pytest.mark.parametrize("ending", ["safetensors", "npz"])
def test_there_and_back(tmp_path, ending):
    path = tmp_path / f"weights.{ending}"
    path.write_text("older")
    weights.write(path, ARRAYS)
    found = weights.read(str(path))
    assert set(found) == set(ARRAYS)
    for name, array in ARRAYS.items():
        expected = np.asarray(array)
        assert found[name].dtype == expected.dtype.newbyteorder("=") and found[name].shape == expected.shape
        assert found[name].tobytes() == expected.astype(found[name].dtype).tobytes()
        assert found[name].flags.writeable
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_other_libraries_read_them(tmp_path):
    weights.write(tmp_path / "a.npz", {"x/y": ARRAYS["half"]})
    with np.load(tmp_path / "a.npz", allow_pickle=False) as archive:
        np.testing.assert_array_equal(archive["x/y"], ARRAYS["half"])
    np.savez_compressed(tmp_path / "b.npz", a=np.asfortranarray(ARRAYS["transposed"]), b=ARRAYS["ids"])
    found = weights.read(tmp_path / "b.npz")
    np.testing.assert_array_equal(found["a"], ARRAYS["transposed"])
    np.testing.assert_array_equal(found["b"], ARRAYS["ids"])
    weights.write(tmp_path / "a.safetensors", {"x": ARRAYS["half"]})
    with safetensors.safe_open(tmp_path / "a.safetensors", "np") as file:
        np.testing.assert_array_equal(file.get_tensor("x"), ARRAYS["half"])


@needs_torch
def test_torch_both_ways(tmp_path):
    state = torch.nn.MultiheadAttention(8, 2).bfloat16().state_dict()
    for ending in "safetensors", "npz":
        weights.write(tmp_path / f"mha.{ending}", state)
        layer = weights.load(weights.read(tmp_path / f"mha.{ending}"), "torch", num_heads=2)
        assert layer["query_weight"].dtype == ml_dtypes.bfloat16
        expected = state["in_proj_weight"][:8].T.contiguous().view(torch.int16).numpy()
        np.testing.assert_array_equal(layer["query_weight"].view(np.int16), expected)


def refusal(path):
    with pytest.raises(polyhead.Error) as caught:
        weights.read(path)
    assert str(caught.value).startswith(f"{path}") and "\n" not in str(caught.value)
    return str(caught.value)


def safetensors_bytes(header, data=b"\0" * 16):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype="F32", shape=(4,), offsets=(0, 16)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


HOSTILE = {
    "empty": b"",
    "short": b"\1\2",
    "header of 2^64 - 1 bytes": b"\xff" * 8 + b"{}",
    "header beyond the file": struct.pack("<Q", 100) + b"{}",
    "no JSON": safetensors_bytes(b"{'a'}"),
    "no object": safetensors_bytes(b"[1, 2]"),
    "offsets beyond the data": safetensors_bytes({"a": entry(offsets=(0, 32))}),
    "offsets backwards": safetensors_bytes({"a": entry(offsets=(16, 0))}),
    "a shape of another size": safetensors_bytes({"a": entry(shape=(5,))}),
    "a shape beyond 2^64": safetensors_bytes({"a": entry(shape=(2**40, 2**40))}),
    "a negative size": safetensors_bytes({"a": entry(shape=(-4,))}),
    "overlap": safetensors_bytes({"a": entry(), "b": entry()}),
    "gap": safetensors_bytes({"a": entry(shape=(2,), offsets=(0, 8))}),
    "unknown type": safetensors_bytes({"a": entry("Q7")}),
    "deep": safetensors_bytes(b'{"a":' * 5000 + b"1" + b"}" * 5000),
    "named twice": safetensors_bytes(
        b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_safetensors(tmp_path, what):
    path = tmp_path / "a.safetensors"
    path.write_bytes(HOSTILE[what])
    refusal(path)


def npy(header, data=b"", version=b"\1\0"):
    text = header.encode()
    return b"\x93NUMPY" + version + struct.pack("<H", len(text)) + text + data


def npz(*members):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in members:
            archive.writestr(name, data)
    return file.getvalue()


def header(descr="<f4", shape="(4,)", order="False"):
    return f"{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {shape}, }}\n"


def pickled():
    file = io.BytesIO()
    np.save(file, np.array([{}, print], object), allow_pickle=True)
    return file.getvalue()


HOSTILE_NPZ = {
    "empty": (b"", "not a zip file"),
    "no zip": (b"hello", "not a zip file"),
    "no array": (npz(("a.npy", b"hello")), "magic"),
    "another file": (npz(("readme.txt", b"hello")), "no array"),
    "pickle": (npz(("a.npy", pickled())), r"Python objects \(pickle\)"),
    "terabytes": (npz(("a.npy", npy(header(shape="(1099511627776,)")))), "bytes of data"),
    "too much data": (npz(("a.npy", npy(header(), b"\0" * 20))), "16 bytes, and 20 bytes of data"),
    "too little data": (npz(("a.npy", npy(header(), b"\0" * 12))), "16 bytes, and 12 bytes of data"),
    "a negative size": (npz(("a.npy", npy(header(shape="(-4,)"), b"\0" * 16))), "a.npz"),
    "code": (npz(("a.npy", npy("__import__('os').abort()\n"))), "a.npz"),
    "brackets": (npz(("a.npy", npy("(" * 9000))), "a.npz"),
    "unknown type": (npz(("a.npy", npy(header("<q9"), b"\0" * 16))), "a.npz"),
    "version 9": (npz(("a.npy", npy(header(), b"\0" * 16, b"\x09\0"))), "a.npz"),
}


@pytest.mark.parametrize("what", HOSTILE_NPZ)
def test_hostile_npz(tmp_path, what):
    path = tmp_path / "a.npz"
    data, words = HOSTILE_NPZ[what]
    path.write_bytes(data)
    with pytest.raises(polyhead.Error, match=words):
        weights.read(path)
    refusal(path)


@pytest.mark.filterwarnings("ignore::UserWarning")  # numpy, of headers that look like Python 2's
@pytest.mark.parametrize("ending", ["safetensors", "npz"])
def test_damaged_files(tmp_path, ending):
    """Cut anywhere, or a byte changed: arrays, or one sentence. POLYHEAD_TEST_COUNT tries more."""
    path = tmp_path / f"a.{ending}"
    weights.write(path, {"a": np.arange(6.0).reshape(2, 3), "b": np.ones(3, ml_dtypes.bfloat16)})
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for n in range(int(os.environ.get("POLYHEAD_TEST_COUNT", "400"))):
        data = bytearray(whole)
        if n % 4 == 0:
            data = data[: rng.integers(len(data))]
        for _ in range(rng.integers(0 if n % 4 == 0 else 1, 4)):
            if data:
                data[rng.integers(len(data))] = rng.integers(256)
        path.write_bytes(data)
        try:
            weights.read(path)
        except polyhead.Error:
            refused += 1
    assert refused > 100


def test_what_is_no_file_of_arrays(tmp_path):
    with pytest.raises(polyhead.Error, match="path ends in '.pt', must end in .safetensors or .npz"):
        weights.read(tmp_path / "model.pt")
    with pytest.raises(FileNotFoundError):
        weights.read(tmp_path / "missing.npz")
    with pytest.raises(FileNotFoundError):
        weights.read(tmp_path / "missing.safetensors")
    os.mkfifo(tmp_path / "pipe.npz")
    with pytest.raises(polyhead.Error, match="is not a regular file"):
        weights.read(tmp_path / "pipe.npz")
    for ending in "safetensors", "npz":
        path = tmp_path / f"a.{ending}"
        with pytest.raises(polyhead.Error, match="a has dtype object, must be numbers or bool"):
            weights.write(path, {"b": np.ones(2), "a": np.array([{}])})
        with pytest.raises(polyhead.Error, match="must be numbers or bool"):
            weights.write(path, {"a": "text"})
        with pytest.raises(TypeError, match="arrays has type list, must be a mapping"):
            weights.write(path, [1])
        assert not path.exists()
