#!/usr/bin/env python3
"""Small models of Hugging Face transformers by both of torch's exporters, fused: how many attentions and products, how far results move.

  bench/onnx_exports.py                          every architecture; some eight minutes
  bench/onnx_exports.py --models Bert Llama      these alone
  bench/onnx_exports.py --exporters torchscript  one exporter

Weights are random, sizes small, two layers each, batch and sequence open, half a padding mask. Three runs are held against ONNX
Runtime's of the file as it was exported: the fused model in our reference runner and in a session, and a session of the file
itself. What cannot be exported, or is refused by ONNX Runtime as it comes, is named.
"""

import argparse
import collections
import logging
import pathlib
import sys
import tempfile
import warnings

import numpy as np
import onnx
import onnxruntime
import torch
import transformers

import polyhead.onnx

WIDTH, HEADS, BATCH, SEQLEN, LAYERS, WORDS = 32, 4, 2, 7, 2, 64
EXPORTERS = {"torchscript": "eager", "dynamo": "sdpa"}  # and the attention that is exported, where a model has both

BERT = {
    "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": 64,
    "vocab_size": WORDS, "max_position_embeddings": 40,
}  # fmt: skip
EMBEDDED = BERT | {"embedding_size": WIDTH}
PADDED = BERT | {"pad_token_id": 1}
SHORT = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = BERT | SHORT | {"num_key_value_heads": 2}
WIDE = GROUPED | {"head_dim": 8}
CONFIGS = {
    "Albert": EMBEDDED,
    "Bert": BERT,
    "Bloom": {"hidden_size": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "vocab_size": WORDS},
    "Camembert": PADDED,
    "ConvBert": EMBEDDED | {"num_groups": 1, "head_ratio": 2, "conv_kernel_size": 3},
    "DebertaV2": BERT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "DistilBert": {"dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": 64, "vocab_size": WORDS},
    "Electra": EMBEDDED,
    "GPT2": {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "vocab_size": WORDS, "n_positions": 32},
    "GPTNeo": {
        "hidden_size": WIDTH, "num_layers": LAYERS, "num_heads": HEADS, "attention_types": [[["global", "local"], 1]],
        "vocab_size": WORDS, "max_position_embeddings": 32, "window_size": 4,
    },
    "GPTNeoX": BERT | {"rotary_pct": 0.5},
    "Gemma": WIDE,
    "Gemma2": WIDE | {"sliding_window": 4, "query_pre_attn_scalar": 8},
    "Granite": GROUPED,
    "Llama": WIDE,
    "MPNet": BERT,
    "Mistral": WIDE | {"sliding_window": 4},
    "ModernBert": BERT | SHORT | {"cls_token_id": 1, "sep_token_id": 2},
    "OPT": {
        "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "ffn_dim": 64, "vocab_size": WORDS,
        "max_position_embeddings": 32, "word_embed_proj_dim": WIDTH, "pad_token_id": 1,
    },
    "Olmo": GROUPED,
    "Olmo2": GROUPED,
    "Phi": GROUPED,
    "Phi3": GROUPED,
    "Qwen2": GROUPED,
    "Qwen3": WIDE,
    "RemBert": BERT | {"input_embedding_size": WIDTH},
    "RoFormer": EMBEDDED,
    "Roberta": PADDED,
    "SmolLM3": GROUPED,
    "StableLm": GROUPED,
    "Starcoder2": GROUPED,
    "T5Encoder": {"d_model": WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": LAYERS, "num_heads": HEADS, "vocab_size": WORDS},
    "XLMRoberta": PADDED,
}  # fmt: skip


class Tokens(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, mask):
        return self.model(input_ids=x, attention_mask=mask)[0]


def model_of(name: str, sizes: dict, implementation: str) -> Tokens:
    config = getattr(transformers, name.removesuffix("Encoder") + "Config")(**sizes)
    config.use_cache = False
    config._attn_implementation = implementation
    torch.manual_seed(0)
    return Tokens(getattr(transformers, name + "Model")(config).eval())


def export(name: str, exporter: str, path: pathlib.Path) -> dict:
    """The model's file, and inputs."""
    try:
        model = model_of(name, CONFIGS[name], EXPORTERS[exporter])
    except ValueError:  # it has no sdpa
        model = model_of(name, CONFIGS[name], "eager")
    x, mask = torch.randint(3, 60, (BATCH, SEQLEN)), torch.ones(BATCH, SEQLEN, dtype=torch.long)
    mask[1, 5:] = 0
    names = {"input_names": ["x", "mask"], "verbose": False}
    if exporter == "torchscript":
        names["dynamic_axes"] = {each: {0: "batch", 1: "sequence"} for each in ("x", "mask")}
        torch.onnx.export(model, (x, mask), path, opset_version=17, dynamo=False, **names)
    else:
        dims = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
        options = {"opset_version": 18, "dynamo": True, "external_data": False, "dynamic_shapes": (dims, dims)}
        torch.onnx.export(model, (x, mask), path, **options, **names)
    return {"x": x.numpy(), "mask": mask.numpy()}


def options() -> onnxruntime.SessionOptions:
    made = onnxruntime.SessionOptions()
    made.log_severity_level = 4
    made.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    return made


def judge(path: pathlib.Path, inputs: dict) -> tuple[polyhead.onnx.Fusion, int, float]:
    """What became of a model, how many nodes of ours a session of the file itself has, the largest error of the three runs."""
    (expected,) = onnxruntime.InferenceSession(path, options(), providers=["CPUExecutionProvider"]).run(None, inputs)
    fusion = polyhead.onnx.fuse(onnx.load(path), target="polyhead", layers=True)
    session = polyhead.onnx.session(path, options(), layers=True)
    fused = polyhead.onnx.session(fusion.model.SerializeToString(), options())
    results = [fused.run(None, inputs)[0], session.run(None, inputs)[0]]
    try:
        results.append(polyhead.onnx.prepare(fusion.model).run(inputs)[0])
    except Exception as reason:  # of the package onnx, whose evaluator runs the other operators
        print(f"not in the reference runner: {reason}", file=sys.stderr)
    seen = inputs["mask"] > 0
    error = max(float(np.abs(got - expected)[seen].max()) for got in results) / float(np.abs(expected).max())
    return fusion, sum(part.ep_name == "polyhead" for part in session.get_provider_graph_assignment_info()), error


def row_of(fusion: polyhead.onnx.Fusion, num_ours: int, error: float) -> tuple[str, collections.Counter]:
    attentions = [each for each in fusion.candidates if each.is_attention]
    count = collections.Counter(
        attentions=len(attentions), fused=sum(each.fused for each in attentions), products=len(fusion.products),
        fused_products=sum(each.fused for each in fusion.products), ours=num_ours,
    )  # fmt: skip
    stays = sorted({each.reason for each in (*attentions, *fusion.products) if not each.fused})
    more = sum(each.pattern not in ("", "a product") for each in fusion.products)
    cells = [f"{count['fused']} of {count['attentions']}", f"{count['fused_products']} of {count['products']}", str(more)]
    return " | ".join([*cells, str(num_ours), f"{error:.1e}", "; ".join(stays)]), count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=CONFIGS, default=list(CONFIGS), metavar="NAME", help=", ".join(CONFIGS))
    parser.add_argument("--exporters", nargs="+", choices=EXPORTERS, default=list(EXPORTERS))
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}, onnxruntime {onnxruntime.__version__}"
    print(f"{versions}, polyhead {polyhead.__version__}\n")
    print("| model | exporter | attentions fused | products fused | with more than the product | nodes of ours in a session | error | what stays |")
    print("|---|---|---|---|--:|--:|--:|---|")
    total, worst = collections.Counter(), 0.0
    for name in args.models:
        for exporter in args.exporters:
            with tempfile.TemporaryDirectory() as folder:
                path = pathlib.Path(folder) / "model.onnx"
                try:
                    inputs = export(name, exporter, path)
                    fusion, num_ours, error = judge(path, inputs)
                except Exception as reason:  # of torch's exporter, or of ONNX Runtime
                    said = (str(reason).strip() or "no reason").splitlines()[0][:160]
                    print(f"| {name} | {exporter} | not run: {type(reason).__name__}: {said} | | | | | |", flush=True)
                    continue
                row, count = row_of(fusion, num_ours, error)
                print(f"| {name} | {exporter} | {row} |", flush=True)
                total += count + collections.Counter(models=1)
                worst = max(worst, error)
    print(f"\n{total['models']} files: {total['fused']} of {total['attentions']} attentions, {total['fused_products']} of", end=" ")
    print(f"{total['products']} products; in sessions {total['ours']} nodes of ours; largest error {worst:.1e} of an output's largest.")


if __name__ == "__main__":
    main()
