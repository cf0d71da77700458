"""What rounding keys and values to a format costs: errors of attention's results against those of the unrounded.

    python bench/format_error.py [--seed 1]

Prints a Markdown table. Each row: a format, the number of neighbours that share a scale, and, for three kinds of keys, the root
mean square of the error of the result, where scores have a standard deviation of 3 and values are N(0, 1). Keys and queries are
turned by the Hadamard matrix or not; values are not.
"""

import argparse

import ml_dtypes
import numpy as np

import polyhead

LARGEST = {"int8": 127, "float8_e4m3fn": 448, "float8_e5m2": 57344, "uint8": 7}
FORMATS = [("int8", None), ("int8", 64), ("float8_e4m3fn", None), ("float8_e5m2", None), ("uint8", 32)]
H, S, D = 8, 1024, 128


def stored(x, name, group):
    """What is stored, and its scales, as src/cache/place.h rounds."""
    groups = x.reshape(*x.shape[:-1], -1, group or x.shape[-1])
    scales = (np.abs(groups).max(-1) / LARGEST[name]).astype("e" if name == "uint8" else "f")
    numbers = np.clip(groups / scales[..., None].astype("f"), -LARGEST[name], LARGEST[name])
    if name.startswith("float8"):
        return numbers.astype(getattr(ml_dtypes, name)).reshape(x.shape), scales
    numbers = np.rint(numbers).astype(np.int8).reshape(x.shape)
    if name == "uint8":
        numbers = (numbers[..., ::2] & 15 | numbers[..., 1::2] << 4).view(np.uint8)
    return numbers, scales


def hadamard(dim):
    matrix = np.ones((1, 1))
    while len(matrix) < dim:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (matrix / np.sqrt(dim)).astype("f")


def keys_of(kind, rng):
    key = rng.standard_normal((1, S, H, D))
    if kind == "four channels x 8":
        key[..., :4] *= 8
    if kind == "bias of 30 to 90":
        key[..., :4] += rng.uniform(30, 90, (1, 1, H, 4))
    return key.astype("f")


def errors(kind, name, group, turned, rng):
    query, value = (rng.standard_normal((1, rows, H, D)).astype("f") for rows in (64, S))
    key = keys_of(kind, rng)
    scores = np.einsum("bqhd,bkhd->bhqk", query, key, dtype="d")
    scores -= scores.mean(-1, keepdims=True)
    scale = 3 / scores.std()
    truth = np.exp(scores * scale)
    truth = np.einsum("bhqk,bkhd->bqhd", truth / truth.sum(-1, keepdims=True), value)
    matrix = hadamard(D) if turned else np.eye(D, dtype="f")
    key, query = key @ matrix, query @ matrix
    numbers, sides = [], {}
    for side, x in (("key_scales", key), ("value_scales", value)):
        rounded, sides[side] = stored(x, name, group)
        numbers.append(rounded)
    got = polyhead.attention(query, *numbers, **sides, scale=scale)
    return np.sqrt(((got - truth) ** 2).mean())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    seed = parser.parse_args().seed
    kinds = ("N(0, 1)", "four channels x 8", "bias of 30 to 90")
    print("| format | group | Hadamard |", " | ".join(kinds), "|")
    print("|---|---|---|" + "---|" * len(kinds))
    for name, group in FORMATS:
        for turned in (False, True):
            row = [errors(kind, name, group, turned, np.random.default_rng(seed)) for kind in kinds]
            print(f"| {name} | {group or 'all'} | {'yes' if turned else 'no'} |", " | ".join(f"{x:.4f}" for x in row), "|")


if __name__ == "__main__":
    main()
