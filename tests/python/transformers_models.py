"""Tiny Hugging Face models with random weights, made of their configs: nothing is downloaded."""

import copy

from optional import torch

VOCABULARY = 99
SEQLEN = 11
IDS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=None)
SIZES = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=37, vocab_size=VOCABULARY,
    max_position_embeddings=64,
)  # fmt: skip
GROUPED = SIZES | IDS | dict(num_key_value_heads=2, head_dim=8)
VISION = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=37, image_size=12, patch_size=4
)  # fmt: skip

# name: (the model's class, its config's class, sizes)
ENCODERS = {
    "bert": ("BertForMaskedLM", "BertConfig", SIZES),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", SIZES),
    "electra": ("ElectraForMaskedLM", "ElectraConfig", SIZES | dict(embedding_size=16)),
    "distilbert": (
        "DistilBertForMaskedLM", "DistilBertConfig",
        dict(vocab_size=VOCABULARY, dim=32, n_layers=2, n_heads=4, hidden_dim=37, max_position_embeddings=64),
    ),
    "modernbert": (
        "ModernBertForMaskedLM", "ModernBertConfig",
        SIZES | dict(
            local_attention=6, global_attn_every_n_layers=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            cls_token_id=1, sep_token_id=2,
        ),
    ),
}  # fmt: skip
DECODERS = {
    "gpt2": (
        "GPT2LMHeadModel", "GPT2Config",
        IDS | dict(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", SIZES | IDS),
    "opt": ("OPTForCausalLM", "OPTConfig", SIZES | IDS | dict(ffn_dim=37, word_embed_proj_dim=32)),
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "mistral": ("MistralForCausalLM", "MistralConfig", GROUPED | dict(sliding_window=5)),
    # torch's product of groups wants rows of 16 bytes.
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", GROUPED | dict(num_local_experts=2, intermediate_size=48)),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", GROUPED),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", GROUPED),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", GROUPED),
    "gemma2": (
        "Gemma2ForCausalLM", "Gemma2Config",
        GROUPED | dict(sliding_window=5, attn_logit_softcapping=0.5, query_pre_attn_scalar=4),
    ),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", GROUPED | dict(sliding_window=5, query_pre_attn_scalar=4)),
    "phi": ("PhiForCausalLM", "PhiConfig", SIZES | IDS),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", SIZES | IDS | dict(num_key_value_heads=2, sliding_window=5)),
    "gpt_oss": (
        "GptOssForCausalLM", "GptOssConfig",
        GROUPED | dict(sliding_window=5, num_local_experts=2, num_experts_per_tok=2, intermediate_size=48),
    ),
    "granite": ("GraniteForCausalLM", "GraniteConfig", GROUPED | dict(attention_multiplier=0.3)),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", GROUPED),
}  # fmt: skip
SEQ2SEQ = {
    "t5": (
        "T5ForConditionalGeneration", "T5Config",
        IDS | dict(
            vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4, decoder_start_token_id=0
        ),
    ),
    "bart": (
        "BartForConditionalGeneration", "BartConfig",
        IDS | dict(
            vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=37, decoder_ffn_dim=37, max_position_embeddings=64,
            decoder_start_token_id=1, forced_eos_token_id=None,
        ),
    ),
    "whisper": (
        "WhisperForConditionalGeneration", "WhisperConfig",
        IDS | dict(
            vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=37, decoder_ffn_dim=37, max_source_positions=20,
            max_target_positions=64, num_mel_bins=8, decoder_start_token_id=1, suppress_tokens=None,
            begin_suppress_tokens=None,
        ),
    ),
}  # fmt: skip
OTHERS = {
    "vit": ("ViTModel", "ViTConfig", VISION),
    "siglip_vision": ("SiglipVisionModel", "SiglipVisionConfig", VISION),
    "clip": (
        "CLIPModel", "CLIPConfig",
        dict(text_config=SIZES | IDS | dict(eos_token_id=2), vision_config=VISION, projection_dim=16),
    ),
    "wav2vec2": (
        "Wav2Vec2Model", "Wav2Vec2Config",
        dict(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=37, conv_dim=(16, 16),
            conv_stride=(4, 4), conv_kernel=(8, 8), num_feat_extract_layers=2, num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2, mask_time_prob=0.0,
        ),
    ),
}  # fmt: skip
MODELS = ENCODERS | DECODERS | SEQ2SEQ | OTHERS


def make(transformers, name, **changes):
    """(the model in eager, the same model under "polyhead")."""
    model_class, config_class, sizes = MODELS[name]
    models = []
    for implementation in ("eager", "polyhead"):
        config = getattr(transformers, config_class)(**copy.deepcopy(sizes | changes))
        models.append(getattr(transformers, model_class)._from_config(config, attn_implementation=implementation))
    generator = torch.Generator().manual_seed(0)
    for part, parameter in models[0].named_parameters():
        # Larger than models begin with, so that the weights of attention are far from equal.
        if parameter.dim() > 1 or part.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5, generator=generator)
    models[1].load_state_dict(models[0].state_dict())
    return tuple(model.eval() for model in models)


def inputs(name):
    """(arguments of the model, bool [B, S]: where its output counts, or None for everywhere)."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (3, SEQLEN), generator=generator)
    mask = torch.ones(3, SEQLEN, dtype=torch.long)
    mask[1, :3] = mask[2, :8] = 0  # padding on the left
    if name in ENCODERS or name in ("t5", "bart"):
        mask = mask.flip(1)
    ids = ids * mask
    text = {"input_ids": ids, "attention_mask": mask}
    if name in ("t5", "bart"):
        return text | {"decoder_input_ids": torch.randint(3, VOCABULARY, (3, 7), generator=generator)}, None
    if name == "whisper":
        features = torch.randn(3, 8, 40, generator=generator)
        return {"input_features": features, "decoder_input_ids": ids[:, :7] + 3 * (1 - mask[:, :7])}, None
    if name == "wav2vec2":
        return {"input_values": torch.randn(2, 300, generator=generator)}, None
    image = {"pixel_values": torch.randn(3, 3, 12, 12, generator=generator)}
    if name == "clip":
        return text | image, None
    return (image, None) if name in OTHERS else (text, mask.bool())


def cache_name(transformers):
    """How models and `generate` call the argument, and outputs the attribute, that is the cache."""
    version = tuple(map(int, transformers.__version__.split(".")[:2]))
    return "cache" if version >= (5, 24) else "past_key_values"


def main_output(outputs):
    for name in ("logits", "logits_per_image", "last_hidden_state"):
        if name in outputs:
            return outputs[name]
    raise KeyError(f"no output to compare among {list(outputs)}")
