#!/usr/bin/env python3
"""A suite of polyhead.programs, a row each, as its functions are traced:

  bench/ready_programs.py > ready.txt && polyhead bench --suite ready.txt --direction forward,backward
"""

import functools
import shlex

import numpy as np

from polyhead import programs
from polyhead._program_call import program_arguments

SEQLEN = 2048
NUMBERS = {
    "sliding_window": {"window": 256},
    "band": {"width": 128},
    "streaming_llm": {"window": 256},
    "longformer": {"window": 512, "dilation": 2},
    "global_tokens": {"width": 128},
    "sparse_strided": {"stride": 128},
    "sparse_fixed": {"block": 128, "summary": 8},
    "chunked": {"chunk": 512},
    "block_causal": {"block": 64},
    "block_diffusion": {"length": SEQLEN // 2, "block": 32},
    "big_bird": {"block": 64},
    "tree": {"past": 1024},
    "natten_1d": {"size": SEQLEN, "kernel": 129},
    "natten_2d": {"height": 32, "width": 64, "kernel": 7},
    "natten_3d": {"depth": 8, "height": 16, "width": 16, "kernel": 5},
    "morton": {"reach": 4},
    "swin_windows": {"width": 64, "window": 8, "shift": 4},
    "sliding_tiles": {"width": 64, "tile": 8, "reach": 1},
    "axial": {"width": 64},
    "random": {"part": 0.3},
    "relative": {"longest": SEQLEN},
    "swin": {"width": 64},
    "softcap": {"cap": 30.0},
    "sigmoid_attention": {"length": SEQLEN},
    "relu_attention": {"length": SEQLEN},
}
CAPTURED = {
    "prefix_lm": {"prefix": "i32[b] 0..1024"},
    "window_of_head": {"window": "i64[h] 64..512"},
    "padding": {"lengths": "i64[b] 1024..2048"},
    "keep": {"kept": "bool[b, k]"},
    "global_tokens": {"is_global": "bool[k]"},
    "documents": {"doc": "i64[b, k] 0..9 rising"},
    "shared_prefix": {"branch": "i64[k] -1..6 rising"},
    "big_bird": {"table": "bool[h, 32, 32]"},
    "flamingo": {"image": "i64[q] 0..7 rising", "first": "i64[8] 0..1024", "last": "i64[8] 1024..2048"},
    "tree": {"ancestor": "bool[q, 1024]"},
    "flash_mask": {"last": "i64[b, k] 0..2048 rising"},
    "images_or_causal": {"image": "i64[b, k] -1..5 rising"},
    "alibi": {"slope": "f32[h] 0..1"},
    "t5": {"table": "f32[32, h]"},
    "relative": {"table": "f32[h, 4095]"},
    "relative_clipped": {"table": "f32[h, 33]"},
    "swin": {"table": "f32[16129, h]"},
    "deberta": {"content_to_position": "f32[b, h, q, 32]", "position_to_content": "f32[b, h, k, 32]"},
    "pair_bias": {"bias": "f32[b, h, q, k]"},
    "graphormer": {"distance": "i32[b, q, k] 0..8", "table": "f32[h, 9]"},
    "forgetting": {"log_forget": "f32[b, h, k] -8..0 rising"},
    "temperature": {"tau": "f32[h] 0..1"},
    "kerple_log": {"r1": "f32[h] 0..1", "r2": "f32[h] 0..1"},
    "kerple_power": {"r1": "f32[h] 0..1", "r2": "f32[h] 0..1"},
    "sandwich": {"ratio": "f32[h] 0..1"},
}
DTYPES = {"f32": np.float32, "i32": np.int32, "i64": np.int64, "bool": np.bool_}


def problem(name: str) -> str:
    """A line of a suite."""
    captured = CAPTURED.get(name, {})
    kinds = {tensor: drawn.split("[")[0] for tensor, drawn in captured.items()}
    arrays = {tensor: np.empty((0,) * (captured[tensor].count(",") + 1), DTYPES[kind]) for tensor, kind in kinds.items()}
    function = functools.partial(getattr(programs, name), **NUMBERS.get(name, {}))
    what = "mask" if name in programs.MASKS else "score"
    text, _ = program_arguments(**{"score": None, "mask": None, what: function}, captured=arrays)
    words = [f"1x8x{SEQLEN}x64", f"--{what}", "; ".join(text.split("\n"))]
    if captured:
        words += ["--captured", "; ".join(f"{tensor}: {drawn}" for tensor, drawn in captured.items())]
    return shlex.join(words + (["--normalizer", "none"] if name in programs.WEIGHTS else []))


def main():
    for name in (*programs.MASKS, *programs.SCORES, *programs.WEIGHTS):
        print(f"# {name}\n{problem(name)}")


if __name__ == "__main__":
    main()
