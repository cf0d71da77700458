"""docs/troubleshooting.md quotes sentences of ours: each is provoked here, or found in the sources, word for word."""

import pathlib
import re

import numpy as np
import pytest

import polyhead
from polyhead import _bind
from polyhead.__main__ import MISSING
from optional import needs_torch, torch

ROOT = pathlib.Path(__file__).parents[2]
QUERY, KEY = np.ones((1, 3, 4, 8), np.float32), np.ones((1, 5, 4, 8), np.float32)
WIDE = QUERY.astype(np.float64)
CU_SEQLENS = {"cu_seqlens_q": np.array([0, 3]), "cu_seqlens_k": np.array([0, 5])}


def quoted():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    return re.findall(r"^> `(.*)`$", page, re.M)


def layer():
    weights = {f"{name}_weight": np.eye(8, dtype=np.float32) for name in ("query", "key", "value")}
    return polyhead.MultiHeadAttention(weights, 2)


CALLS = (
    lambda: polyhead.attention(QUERY, KEY, KEY, causal=True),
    lambda: polyhead.attention(QUERY.transpose(0, 2, 1, 3), KEY, KEY),
    lambda: polyhead.attention(QUERY, KEY, KEY, dropout_p=0.1),
    lambda: polyhead.attention(QUERY, KEY, KEY, attn_mask=np.ones((3, 5))),
    lambda: polyhead.attention(QUERY[0], KEY[0], KEY[0], attn_mask=np.ones((3, 5), bool), **CU_SEQLENS),
    lambda: polyhead.attention(WIDE, WIDE, WIDE, kernel="cpu_generic"),
    lambda: polyhead.attention(QUERY, KEY, KEY, kernel="cpu_avx9"),
    lambda: polyhead.attention(QUERY, KEY, KEY, device="cuda"),
    lambda: layer().backward(QUERY),
)


def sentences_of_calls():
    for call in CALLS:
        with pytest.raises(polyhead.Error) as error:
            call()
        yield str(error.value)


def sentences_of_reports():
    """What the switch and the layers say they left to torch, and what convert left alone."""
    import polyhead.torch as ours

    class Mine(torch.nn.MultiheadAttention):
        pass

    ours.report(reset=True)
    x = torch.ones(1, 2, 4, 8)
    with ours.enabled():
        torch.nn.functional.scaled_dot_product_attention(x.double(), x.double(), x.double())
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            torch.nn.functional.scaled_dot_product_attention(x, x, x)
    hooked = ours.TransformerEncoderLayer(8, 2, batch_first=True)
    hooked.linear1.register_forward_hook(lambda *_: None)
    hooked(x[0])
    for record in ours.report(reset=True):
        yield record.reason or ""
    reason = ours.convert(torch.nn.ModuleList([Mine(8, 2)]))[0].reason
    yield reason.replace(f"{Mine.__module__}.{Mine.__qualname__}", "Mine")


def sentences_of_sources():
    """Of what cannot be provoked here: f-strings, with "..." where something is put in, and the lack of the command."""
    yield MISSING.splitlines()[0]
    for path in ("__init__.py", "_cpp.py"):
        text = (ROOT / "python" / "polyhead" / "torch" / path).read_text()
        for literal in re.findall(r'f"([^"]*)"', text):
            yield re.sub(r"\{[^}]*\}", "...", literal)


@needs_torch
def test_every_quoted_sentence_is_said():
    said = [*sentences_of_calls(), *sentences_of_reports(), *sentences_of_sources()]
    sentences = quoted()
    assert len(sentences) >= 15
    if _bind.cuda_machine()["runtime_version"]:  # a build with CUDA kernels says what else is missing
        sentences.remove("device is cuda, this build has no kernel for it")
    for sentence in sentences:
        start = sentence.removesuffix("...").rstrip()
        assert any(each == sentence or (start != sentence and each.startswith(start)) for each in said), sentence
