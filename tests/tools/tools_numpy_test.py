"""Files that NumPy and safetensors wrote, computed by the command, and its files read by them.

python3 tools_numpy_test.py PATH_OF_POLYHEAD. Skipped, with the reason, where NumPy is missing.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

SKIPPED = 77  # tests/CMakeLists.txt: SKIP_RETURN_CODE
try:
    import numpy as np
except ImportError as error:
    print(f"tools_numpy_test: {error}")
    sys.exit(SKIPPED)
try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None
try:
    import safetensors.numpy as safetensors
except ImportError:
    safetensors = None

COMMAND = os.path.abspath(sys.argv[1])


def attention(query, key, value, causal=False, mask=None):
    """The formula, in float64; [B, S, H, D]."""
    q, k, v = (x.astype(np.float64).transpose(0, 2, 1, 3) for x in (query, key, value))
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(q.shape[-1])
    if causal:
        scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -np.inf)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return (weights @ v).transpose(0, 2, 1, 3)


def gradients(query, key, value, grad_out, bias):
    """Of query, key, value and bias, in float64; the bias is [1, H, 1, Sk]."""
    q, k, v, grad = (x.astype(np.float64).transpose(0, 2, 1, 3) for x in (query, key, value, grad_out))
    batch, heads, group = len(q), q.shape[1], q.shape[1] // k.shape[1]
    wide_k, wide_v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scale = 1 / np.sqrt(q.shape[-1])
    weights = np.exp(q @ wide_k.transpose(0, 1, 3, 2) * scale + bias)
    weights /= weights.sum(-1, keepdims=True)
    grad_weights = grad @ wide_v.transpose(0, 1, 3, 2)
    grad_scores = weights * (grad_weights - (grad * (weights @ wide_v)).sum(-1, keepdims=True))

    def of_group(wide):
        return wide.reshape(batch, heads // group, group, *wide.shape[2:]).sum(2).transpose(0, 2, 1, 3)

    grad_query = (grad_scores @ wide_k * scale).transpose(0, 2, 1, 3)
    grad_key = of_group(grad_scores.transpose(0, 1, 3, 2) @ q * scale)
    grad_value = of_group(weights.transpose(0, 1, 3, 2) @ grad)
    return grad_query, grad_key, grad_value, grad_scores.sum((0, 2), keepdims=True)


class Files(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        rng = np.random.default_rng(1)
        self.query = rng.standard_normal((2, 9, 4, 16))
        self.key = rng.standard_normal((2, 9, 2, 16))
        self.value = rng.standard_normal((2, 9, 2, 8))

    def run_command(self, *arguments):
        ran = subprocess.run([COMMAND, "run", *map(str, arguments), "--format", "json"], capture_output=True, text=True)
        self.assertEqual(ran.returncode, 0, ran.stderr)
        return json.loads(ran.stdout)

    def save(self, name, array):
        np.save(self.folder / name, array)
        return self.folder / name

    def run_npy(self, dtype, *options, order="C"):
        paths = [self.save(f"{name}.npy", np.asarray(getattr(self, name).astype(dtype), order=order))
                 for name in ("query", "key", "value")]
        out = self.folder / "out.npy"
        self.run_command("--query", paths[0], "--key", paths[1], "--value", paths[2], "--out", out, "--force", *options)
        return np.load(out)

    def rounded(self, dtype):
        return [x.astype(dtype).astype(np.float64) for x in (self.query, self.key, self.value)]

    def test_npy_of_every_dtype(self):
        for dtype, tolerance in ((np.float32, 1e-6), (np.float64, 1e-14), (np.float16, 2e-3)):
            out = self.run_npy(dtype)
            self.assertEqual(out.dtype, dtype)
            np.testing.assert_allclose(out, attention(*self.rounded(dtype)), atol=tolerance)

    def test_fortran_order(self):
        np.testing.assert_array_equal(self.run_npy(np.float32, order="F"), self.run_npy(np.float32))

    def test_bfloat16(self):
        if ml_dtypes is None:
            self.skipTest("ml_dtypes is not installed")
        out = self.run_npy(ml_dtypes.bfloat16, "--dtype", "bf16")
        self.assertEqual(out.dtype, np.dtype("V2"))
        out = out.view(ml_dtypes.bfloat16).astype(np.float64)
        np.testing.assert_allclose(out, attention(*self.rounded(ml_dtypes.bfloat16)), atol=2e-2)

    def test_mask_and_causal(self):
        mask = np.random.default_rng(2).random((2, 1, 1, 9)) < 0.5
        mask[..., 0] = True
        out = self.run_npy(np.float32, "--causal", "--attn-mask", self.save("mask.npy", mask))
        np.testing.assert_allclose(out, attention(*self.rounded(np.float32), causal=True, mask=mask), atol=1e-6)

    def test_lengths_are_those_of_the_file(self):
        lengths = self.save("lengths.npy", np.array([4, 9], np.int64))
        out = self.run_npy(np.float32, "--seqlens-k", lengths)
        mask = np.arange(9)[None, None, None, :] < np.array([4, 9])[:, None, None, None]
        np.testing.assert_allclose(out, attention(*self.rounded(np.float32), mask=mask), atol=1e-6)

    def test_packed(self):
        cu = self.save("cu.npy", np.array([0, 9, 18], np.int32))
        paths = [self.save(f"packed_{name}.npy", getattr(self, name).astype(np.float32).reshape(18, -1, getattr(self, name).shape[3]))
                 for name in ("query", "key", "value")]
        out = self.folder / "packed.npy"
        self.run_command("--query", paths[0], "--key", paths[1], "--value", paths[2], "--cu-seqlens-q", cu,
                         "--cu-seqlens-k", cu, "--out", out)
        np.testing.assert_allclose(np.load(out).reshape(2, 9, 4, 8), attention(*self.rounded(np.float32)), atol=1e-6)

    def test_gradients(self):
        rng = np.random.default_rng(3)
        grad_out, bias = rng.standard_normal((2, 9, 4, 8)), rng.standard_normal((1, 4, 1, 9))
        wanted = gradients(self.query, self.key, self.value, grad_out, bias)
        names = ("query", "key", "value", "attn_bias")
        arrays = {name: getattr(self, name) for name in names[:3]}
        arrays.update(attn_bias=bias, grad_out=grad_out)
        if safetensors is not None:
            path, out = self.folder / "in.safetensors", self.folder / "gradients.safetensors"
            safetensors.save_file({name: a.astype(np.float32) for name, a in arrays.items()}, path)
            self.run_command("--input", path, "--gradients", "--out", out)
            results = safetensors.load_file(out)
            self.assertEqual(sorted(results), sorted(["out", *(f"grad_{name}" for name in names)]))
            for name, want in zip(names, wanted):
                np.testing.assert_allclose(results[f"grad_{name}"], want, atol=2e-6, err_msg=name)
        options = []
        for name, array in arrays.items():
            options += [f"--{name.replace('_', '-')}", self.save(f"{name}.npy", array)]
        told = self.run_command(*options, "--gradients")["rows"]
        for row, want in zip(told[1:], wanted):
            self.assertAlmostEqual(row["min"], want.min(), places=12, msg=row["tensor"])
            self.assertAlmostEqual(row["max"], want.max(), places=12, msg=row["tensor"])

    def test_unusual_arrays_are_refused(self):
        good = self.save("good.npy", self.query.astype(np.float32))
        for array in (self.query.astype(">f4"), self.query.astype(np.complex64), np.array([{"a": 1}], dtype=object),
                      np.zeros(3, [("a", "<f4")])):
            path = self.folder / "bad.npy"
            np.save(path, array, allow_pickle=True)
            ran = subprocess.run([COMMAND, "run", "--query", path, "--key", good, "--value", good], capture_output=True, text=True)
            self.assertEqual(ran.returncode, 2)
            self.assertIn("bad.npy", ran.stderr)

    def test_safetensors(self):
        if safetensors is None:
            self.skipTest("safetensors is not installed")
        path, out = self.folder / "in.safetensors", self.folder / "out.safetensors"
        arrays = {name: getattr(self, name).astype(np.float32) for name in ("query", "key", "value")}
        arrays["attn_mask"] = np.tri(9, dtype=bool)[None, None]
        safetensors.save_file({**arrays, "other": np.zeros(3, np.uint8)}, path, metadata={"who": "test"})
        self.run_command("--input", path, "--logsumexp", "--weights", "head", "--column-sums", "--out", out)
        results = safetensors.load_file(out)
        self.assertEqual(sorted(results), ["attn_weights", "column_sums", "logsumexp", "out"])
        np.testing.assert_allclose(results["out"], attention(*self.rounded(np.float32), causal=True), atol=1e-6)
        np.testing.assert_allclose(results["attn_weights"].sum(-1), 1, atol=1e-6)
        np.testing.assert_allclose(results["column_sums"], results["attn_weights"].sum(2), atol=1e-5)

    def test_safetensors_bfloat16(self):
        if safetensors is None or ml_dtypes is None:
            self.skipTest("safetensors or ml_dtypes is not installed")
        out = self.folder / "bf16.safetensors"
        self.run_command("2x4x9x8", "--dtype", "bf16", "--out", out)
        result = safetensors.load_file(out)["out"]
        self.assertEqual(result.dtype, ml_dtypes.bfloat16)
        self.assertEqual(result.shape, (2, 9, 4, 8))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
