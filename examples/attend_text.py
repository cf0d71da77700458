#!/usr/bin/env python3
"""Attention on real text at BERT-large's size: what each kernel of this machine takes, and who looks at whom.

  examples/attend_text.py                      this repository's documentation
  examples/attend_text.py --text novel.txt     any text
  examples/attend_text.py --picture map.png    where to draw the attention map (default: demo/attention.png)

The words of the text become vectors (one fixed random vector a word, plus its position), and those become queries,
keys and values by fixed random projections. In half of the heads query and key share a projection, so there equal
words should look at each other; the picture shows whether they do. Times here are a first impression, on whatever
else this machine is doing; bench/peers.py measures with care.
"""

import argparse
import dataclasses
import importlib.util
import os
import pathlib
import re
import sys
import time
import zlib

import numpy as np
import polyhead

HEADS, HEAD_DIM = 16, 64
HIDDEN = HEADS * HEAD_DIM
LENGTHS = (384, 2048)
SHARING_HEADS = HEADS // 2  # the first ones: query and key have the same projection
REFERENCE_QUERIES = 64  # of the long text, whose whole reference would take a minute
PICTURE_WORDS = 40
SECONDS_A_KERNEL = 0.3
MAX_ERROR = {"float32": 1e-4, "bfloat16": 5e-2}  # a kernel beyond this is wrong; `polyhead verify` is far stricter
REPOSITORY = pathlib.Path(__file__).resolve().parents[1]


# --- text to operands ------------------------------------------------------------------------------------------------


def read_words(path: pathlib.Path | None, count: int) -> tuple[list[str], str]:
    """The first `count` words of a file, or of this repository's documentation; and what to call it."""
    paths = [path] if path else [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
    try:
        text = "\n".join(each.read_text(encoding="utf-8", errors="replace") for each in paths)
    except OSError as error:
        sys.exit(f"attend_text.py: {error}")
    code_and_links = r"(?ms)^```.*?^```$|`[^`\n]*`|\[[^]\n]*\]\([^)\n]*\)|\bhttps?://\S+"
    prose = re.sub(code_and_links, " ", text)
    words = re.findall(r"[^\W\d_]+(?:['-][^\W\d_]+)*", prose)
    name = str(path) if path else "this repository's documentation"
    if not words:
        sys.exit(f"attend_text.py: {name} has no words")
    if len(words) < count:
        name += f" (its {len(words)} words repeated)"
    return [words[i % len(words)] for i in range(count)], name


def embed(words: list[str]) -> np.ndarray:
    """[words, HIDDEN]: a random vector that depends on the word alone, plus a little of sines of its position."""
    known: dict[str, np.ndarray] = {}
    for word in map(str.lower, words):
        if word not in known:
            known[word] = np.random.default_rng(zlib.crc32(word.encode())).standard_normal(HIDDEN)
    position = np.arange(len(words))[:, None] / 10000 ** (np.arange(HIDDEN // 2) / (HIDDEN // 2))
    hidden = np.stack([known[word.lower()] for word in words])
    return hidden + 0.3 * np.concatenate([np.sin(position), np.cos(position)], axis=1)


def project(hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """query, key, value [1, words, HEADS, HEAD_DIM], float32."""
    rng = np.random.default_rng(0)
    to_query, to_key, to_value = (rng.standard_normal((HIDDEN, HIDDEN)) / np.sqrt(HIDDEN) for _ in range(3))
    shared = SHARING_HEADS * HEAD_DIM
    to_query[:, :shared] = to_key[:, :shared]
    shape = (1, len(hidden), HEADS, HEAD_DIM)
    query, key, value = ((hidden @ weight).astype(np.float32).reshape(shape) for weight in (to_query, to_key, to_value))
    return query, key, value


# --- the table -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Line:
    name: str
    seconds: float
    error: float
    extra_bytes: int | None


def fastest(call) -> tuple[float, np.ndarray]:
    """Seconds of the fastest of some calls, and what it returns."""
    start = time.perf_counter()
    out = call()
    best, end = time.perf_counter() - start, start + SECONDS_A_KERNEL
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best, out


def exact_rows(query, key, value) -> tuple[slice, np.ndarray]:
    """Some rows of the output (of a short text all), by the float64 reference; and which."""
    rows = slice(None, None, max(1, query.shape[1] // REFERENCE_QUERIES) if query.shape[1] > 512 else 1)
    wide = (array.astype(np.float64) for array in (query[:, rows], key, value))
    return rows, polyhead.attention(*wide, kernel="reference")


def measure_kernels(query, key, value, exact) -> list[Line | str]:
    """A line for each kernel of this machine, or the reason why there is none."""
    rows, truth = exact
    found: list[Line | str] = []
    for kernel in polyhead.kernels():
        explanation = polyhead.explain(query, key, value, kernel=kernel)
        if explanation.kernel != kernel:
            found.append(f"{kernel}: {explanation.reasons[kernel]}")
        elif kernel == "reference" and query.shape[1] > 512:
            found.append("reference: plain loops, timed on the short text only")
        else:
            seconds, out = fastest(lambda: polyhead.attention(query, key, value, kernel=kernel))
            error = np.abs(out[:, rows].astype(np.float64) - truth).max()
            found.append(Line(kernel, seconds, error, explanation.workspace_bytes))
    return found


def torch_extra_bytes(call, out_bytes: int) -> int:
    """The most memory that a torch call holds beside its output."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler prints lines of its own
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    held = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most - out_bytes


def measure_torch(query, key, value, exact) -> Line | str:
    if importlib.util.find_spec("torch") is None:
        return "torch: not installed"
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    def tensor(array):
        if array.dtype == np.float32:
            return torch.from_numpy(array).transpose(1, 2).contiguous()
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16).transpose(1, 2).contiguous()

    operands = [tensor(array) for array in (query, key, value)]
    with torch.inference_mode():
        seconds, out = fastest(lambda: scaled_dot_product_attention(*operands))
        extra_bytes = torch_extra_bytes(lambda: scaled_dot_product_attention(*operands), out.nbytes)
    rows, truth = exact
    error = np.abs(out.transpose(1, 2)[:, rows].double().numpy() - truth).max()
    return Line(f"torch {torch.__version__}", seconds, error, extra_bytes)


def peak_gflops(dtype: str) -> float | None:
    """What one core's multiply-add units can do at best; None if the package cannot tell."""
    native = getattr(polyhead, "_core", polyhead._bind)
    probe = getattr(native, "measured_peak_gflops", None)
    return probe(dtype) if probe else None


def print_table(title: str, flops: float, peak: float | None, lines: list[Line | str]) -> None:
    print(f"\n{title}")
    print(f"  {'':20}{'time':>12}{'GFLOP/s':>11}{'of peak':>10}{'extra memory':>15}{'largest error':>16}")
    for line in lines:
        if isinstance(line, str):
            print(f"  {line}")
            continue
        gflops = flops / line.seconds * 1e-9
        share = f"{gflops / peak:.1%}" if peak else "-"
        extra = f"{line.extra_bytes / 1024:,.0f} KiB" if line.extra_bytes is not None else "-"
        time_ms = f"{line.seconds * 1e3:.2f} ms"
        print(f"  {line.name:20}{time_ms:>12}{gflops:>11.1f}{share:>10}{extra:>15}{line.error:>16.1e}")


def dtypes() -> list[np.dtype]:
    if importlib.util.find_spec("ml_dtypes") is None:
        print("\nbfloat16 is left out: ml_dtypes is not installed")
        return [np.dtype(np.float32)]
    import ml_dtypes

    return [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)]


# --- the picture -----------------------------------------------------------------------------------------------------


def same_word(words: list[str]) -> np.ndarray:
    """[words, words]: whether two places hold the same word."""
    lower = np.array([word.lower() for word in words])
    return lower[:, None] == lower[None, :]


def liveliest_passage(words: list[str]) -> int:
    """Where PICTURE_WORDS words begin among which most long words come again."""
    same = same_word(words) & ~np.eye(len(words), dtype=bool) & np.array([len(word) > 4 for word in words])
    starts = range(max(1, len(words) - PICTURE_WORDS + 1))
    return max(starts, key=lambda at: same[at : at + PICTURE_WORDS, at : at + PICTURE_WORDS].sum())


def tell_links(words: list[str], weights: np.ndarray) -> None:
    """What the weights of the heads say about equal words, in figures."""
    same = same_word(words)
    again = same.sum(axis=1) > 1
    share = (weights * same).sum(axis=-1)[:, again].mean(axis=-1)
    by_chance = same[again].mean()
    sharing, others = share[:SHARING_HEADS].mean(), share[SHARING_HEADS:].mean()
    print(f"\nWords that come again give {sharing:.0%} of their attention to themselves and their repetitions")
    print(f"in the heads whose query and key share a projection; {others:.1%} in others, {by_chance:.1%} by chance.")


def draw_map(words: list[str], weights: np.ndarray, path: pathlib.Path) -> None:
    """One head's weights between the words of one passage."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    at = liveliest_passage(words)
    shown = words[at : at + PICTURE_WORDS]
    square = weights[at : at + len(shown), at : at + len(shown)]
    figure, axis = plt.subplots(figsize=(11, 10.6), layout="constrained")
    image = axis.imshow(square, cmap="magma_r", vmin=0)
    elsewhere = same_word(shown) & ~np.eye(len(shown), dtype=bool)
    rows, columns = np.nonzero(elsewhere)
    axis.scatter(columns, rows, s=75, facecolors="none", edgecolors="#1f9e89", linewidths=1.2,
                 label="the same word at another place")  # fmt: skip
    axis.set_xticks(range(len(shown)), shown, rotation=90, fontsize=9)
    axis.set_yticks(range(len(shown)), shown, fontsize=9)
    axis.set_xlabel("looked at (key)")
    axis.set_ylabel("looking (query)")
    axis.set_title(
        f"Attention weights of head 1 of {HEADS}, whose query and key share a projection\n"
        f"words {at + 1} to {at + len(shown)} of {len(words)}; each row of all {len(words)} sums to 1",
        fontsize=11,
    )
    figure.legend(loc="outside lower right", frameon=False)
    figure.colorbar(image, ax=axis, shrink=0.7, pad=0.02, label="weight")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, bbox_inches="tight", pad_inches=0.25)
    plt.close(figure)


# --- all of it -------------------------------------------------------------------------------------------------------


def show_tables(words: list[str]) -> list[str]:
    """Prints the tables; the kernels whose error is not that of rounding."""
    wrong = []
    threads = polyhead._bind.build_info()["threads"]
    for dtype in dtypes():
        one_core = peak_gflops(dtype.name)
        peak = one_core * threads if one_core else None
        for length in LENGTHS:
            query, key, value = (array.astype(dtype) for array in project(embed(words[:length])))
            exact = exact_rows(query, key, value)
            lines = measure_kernels(query, key, value, exact)
            wrong += [
                f"{line.name}'s error is {line.error:.1e} ({length} words, {dtype.name})"
                for line in lines
                if isinstance(line, Line) and not line.error <= MAX_ERROR[dtype.name]
            ]
            lines.append(measure_torch(query, key, value, exact))
            title = f"{length} words, {HEADS} heads of {HEAD_DIM}, {dtype.name}, {threads} threads"
            title += f", measured peak {peak:.0f} GFLOP/s" if peak else ""
            print_table(title, 4.0 * HEADS * length**2 * HEAD_DIM, peak, lines)
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--picture", type=pathlib.Path, metavar="PNG", default=REPOSITORY / "demo" / "attention.png")
    options = parser.parse_args()
    words, name = read_words(options.text, max(LENGTHS))
    print(f"The first words of {name}: {' '.join(words[:12])} ...")
    wrong = show_tables(words)
    short = words[: LENGTHS[0]]
    _, weights = polyhead.attention(*project(embed(short)), return_weights=True)
    tell_links(short, weights[0])
    if importlib.util.find_spec("matplotlib") is None:
        print("No picture: matplotlib is not installed")
    else:
        draw_map(short, weights[0, 0], options.picture)
        print(f"The attention map of head 1: {options.picture}")
    if wrong:
        sys.exit("\n".join(["attend_text.py: WRONG", *wrong]))


if __name__ == "__main__":
    main()
