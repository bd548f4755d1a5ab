"""The model families that :mod:`coverage` builds: exact architectures of transformers, small and with random weights.

A family is a class, its configuration, and the arguments of a call as in its documentation. Configurations keep every
architectural default; only sizes are reduced. Classifiers have 100 classes: with the default of two, there would be too
few errors for the statistics of the error gate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

Inputs = Callable[[Any], dict[str, Any]]


@dataclass(frozen=True)
class Family:
    """``model``: the class in transformers. ``config``: the fields that its configuration sets. ``inputs``: from a
    configuration to the keyword arguments of a call. ``step``: whether a second program takes the returned cache."""

    group: str
    name: str
    model: str
    config: dict[str, Any] = field(default_factory=dict)
    inputs: Inputs = field(default=lambda config: tokens(config))
    step: bool = False


def tokens(config: Any, length: int = 12, batch: int = 2) -> dict[str, Any]:
    """int64 [batch, length] token ids and a mask of ones."""
    ids = torch.randint(5, 200, (batch, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def translation(config: Any) -> dict[str, Any]:
    """Source and target tokens of an encoder-decoder."""
    source = tokens(config)
    target = torch.randint(5, 200, (2, 6), generator=torch.Generator().manual_seed(1))
    return {**source, "decoder_input_ids": target}


def image(size: int) -> Inputs:
    """float32 [2, 3, size, size]."""
    return lambda config: {"pixel_values": _randn(2, 3, size, size)}


def speech(config: Any) -> dict[str, Any]:
    """Log-mel features [2, bins, frames] and target tokens."""
    target = torch.randint(5, 200, (2, 6), generator=torch.Generator().manual_seed(1))
    frames = 2 * config.max_source_positions
    return {"input_features": _randn(2, config.num_mel_bins, frames), "decoder_input_ids": target}


def captioned(size: int, batch: int) -> Inputs:
    """int64 [batch, 12] tokens and float32 [batch, 3, size, size] images; each text is compared with each image."""
    return lambda config: {**tokens(config, batch=batch), "pixel_values": _randn(batch, 3, size, size)}


def masked(size: int, patches: int) -> Inputs:
    """An image and the noise that decides which patches are hidden, float32 [2, patches]."""
    return lambda config: {**image(size)(config), "noise": _randn(2, patches)}


def segment(size: int) -> Inputs:
    """An image and one point to segment."""
    return lambda config: {"pixel_values": _randn(1, 3, size, size), "input_points": torch.tensor([[[[9.0, 9.0]]]])}


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


_SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
_GQA = {**_SMALL, "num_key_value_heads": 2}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
_GPT2 = {"vocab_size": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
_SEQ = {
    **_SPECIAL,
    "vocab_size": 256,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "max_position_embeddings": 128,
    "decoder_start_token_id": 2,
}
_T5 = {"vocab_size": 256, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
_VIT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 64,
    "patch_size": 16,
}
_STAGES = {"embed_dim": 32, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 4, 8], "window_size": 2, "image_size": 64}
_CONV = {"depths": [1, 1, 1, 1], "hidden_sizes": [32, 32, 64, 64]}
_EFFICIENT = {"image_size": 64, "width_coefficient": 0.5, "depth_coefficient": 0.5, "hidden_dim": 640}
_CLIP_TEXT = {**_SMALL, **_SPECIAL}
_CLIP = {"text_config": _CLIP_TEXT, "vision_config": _VIT, "projection_dim": 32}


def _decoder(name: str, model: str, **config: Any) -> Family:
    return Family("decoders", name, f"{model}ForCausalLM", {**_GQA, **_SPECIAL, **config}, step=True)


DECODERS = (
    _decoder("llama", "Llama"),
    _decoder("mistral", "Mistral"),
    _decoder("qwen2", "Qwen2"),
    _decoder("qwen3", "Qwen3", head_dim=16),
    _decoder("gemma", "Gemma", head_dim=16),
    _decoder("gemma2", "Gemma2", head_dim=16),
    _decoder("gemma3_text", "Gemma3", head_dim=16),
    _decoder("phi", "Phi"),
    _decoder("phi3", "Phi3"),
    _decoder("gpt_neox", "GPTNeoX"),
    _decoder("falcon", "Falcon"),
    _decoder("olmo", "Olmo"),
    _decoder("olmo2", "Olmo2"),
    _decoder("granite", "Granite"),
    _decoder("stablelm", "StableLm"),
    _decoder("starcoder2", "Starcoder2"),
    _decoder("cohere", "Cohere"),
    _decoder("smollm3", "SmolLM3"),
    _decoder("helium", "Helium", head_dim=16),
    _decoder("glm4", "Glm4", head_dim=16),
    _decoder("ernie4_5", "Ernie4_5", head_dim=16),
    _decoder("exaone4", "Exaone4"),
    _decoder("seed_oss", "SeedOss", head_dim=16),
    _decoder("nemotron", "Nemotron"),
    _decoder("hunyuan_v1_dense", "HunYuanDenseV1", head_dim=16),
    _decoder("arcee", "Arcee"),
    _decoder("mamba", "Mamba", state_size=8),
    _decoder("opt", "OPT", ffn_dim=128, word_embed_proj_dim=64),
    _decoder("bloom", "Bloom", n_layer=2, n_head=4),
    Family("decoders", "gpt2", "GPT2LMHeadModel", {**_SPECIAL, **_GPT2}, step=True),
    _decoder("mixtral", "Mixtral", num_local_experts=4),
    _decoder("qwen2_moe", "Qwen2Moe", **_EXPERTS, shared_expert_intermediate_size=32),
    _decoder("qwen3_moe", "Qwen3Moe", **_EXPERTS, head_dim=16),
    _decoder("gpt_oss", "GptOss", head_dim=16, num_local_experts=4, num_experts_per_tok=2),
    _decoder(
        "deepseek_v3",
        "DeepseekV3",
        num_key_value_heads=4,
        moe_intermediate_size=32,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
        first_k_dense_replace=1,
    ),
    _decoder(
        "qwen3_next",
        "Qwen3Next",
        **_EXPERTS,
        head_dim=16,
        shared_expert_intermediate_size=32,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        layer_types=["linear_attention", "full_attention"],
    ),
)

ENCODERS = (
    Family("encoders", "bert", "BertModel", _SMALL),
    Family("encoders", "roberta", "RobertaModel", {**_SMALL, **_SPECIAL}),
    Family("encoders", "xlm_roberta", "XLMRobertaModel", {**_SMALL, **_SPECIAL}),
    Family(
        "encoders",
        "distilbert",
        "DistilBertModel",
        {"vocab_size": 256, "dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 4},
    ),
    Family("encoders", "albert", "AlbertModel", {**_SMALL, "embedding_size": 32}),
    Family("encoders", "electra", "ElectraModel", {**_SMALL, "embedding_size": 32}),
    Family("encoders", "deberta", "DebertaModel", _SMALL),
    Family(
        "encoders",
        "deberta_v2",
        "DebertaV2Model",
        {**_SMALL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    ),
    Family("encoders", "mpnet", "MPNetModel", _SMALL),
    Family("encoders", "modernbert", "ModernBertModel", {**_SMALL, **_SPECIAL}),
    Family("encoders", "convbert", "ConvBertModel", {**_SMALL, "embedding_size": 64}),
    Family("encoders", "fnet", "FNetModel", _SMALL, lambda c: {"input_ids": tokens(c)["input_ids"]}),
    Family("encoders", "longformer", "LongformerModel", {**_SMALL, "attention_window": 4}),
)

SEQ2SEQ = (
    Family("seq2seq", "t5", "T5ForConditionalGeneration", _T5, translation),
    Family("seq2seq", "mt5", "MT5ForConditionalGeneration", _T5, translation),
    Family("seq2seq", "bart", "BartForConditionalGeneration", _SEQ, translation),
    Family("seq2seq", "mbart", "MBartForConditionalGeneration", _SEQ, translation),
    Family("seq2seq", "marian", "MarianMTModel", {**_SEQ, "decoder_vocab_size": 256}, translation),
    Family("seq2seq", "pegasus", "PegasusForConditionalGeneration", _SEQ, translation),
    Family("seq2seq", "m2m_100", "M2M100ForConditionalGeneration", _SEQ, translation),
    Family("seq2seq", "blenderbot", "BlenderbotForConditionalGeneration", _SEQ, translation),
    Family(
        "seq2seq",
        "whisper",
        "WhisperForConditionalGeneration",
        {**_SEQ, "max_source_positions": 24, "max_target_positions": 32, "num_mel_bins": 16},
        speech,
    ),
)


def _classifier(name: str, model: str, config: dict[str, Any]) -> Family:
    return Family("vision", name, f"{model}ForImageClassification", {**config, "num_labels": 100}, image(64))


VISION = (
    _classifier("vit", "ViT", _VIT),
    _classifier("deit", "DeiT", _VIT),
    _classifier("beit", "Beit", _VIT),
    _classifier("dinov2", "Dinov2", _VIT),
    Family("vision", "vit_mae", "ViTMAEModel", _VIT, masked(64, 16)),
    Family("vision", "siglip", "SiglipVisionModel", _VIT, image(64)),
    Family("vision", "clip", "CLIPModel", _CLIP, captioned(64, batch=16)),
    _classifier("swin", "Swin", {**_STAGES, "patch_size": 2}),
    _classifier("swinv2", "Swinv2", {**_STAGES, "patch_size": 2}),
    _classifier("convnext", "ConvNext", _CONV),
    _classifier("convnextv2", "ConvNextV2", _CONV),
    _classifier("resnet", "ResNet", {**_CONV, "embedding_size": 32}),
    _classifier("regnet", "RegNet", {**_CONV, "groups_width": 16}),
    _classifier("mobilenet_v2", "MobileNetV2", {"image_size": 64}),
    _classifier("mobilevit", "MobileViT", {"image_size": 64}),
    _classifier("efficientnet", "EfficientNet", _EFFICIENT),
    Family(
        "vision",
        "segformer",
        "SegformerForSemanticSegmentation",
        {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 64, 64], "decoder_hidden_size": 64},
        image(64),
    ),
    _classifier("poolformer", "PoolFormer", {"depths": [1, 1, 1, 1]}),
    Family("vision", "yolos", "YolosForObjectDetection", {**_VIT, "image_size": [64, 64]}, image(64)),
    Family(
        "vision",
        "dpt",
        "DPTForDepthEstimation",
        {**_VIT, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [16, 16, 32, 32]},
        image(64),
    ),
    Family(
        "vision",
        "sam",
        "SamModel",
        {
            "vision_config": {
                **_VIT,
                "output_channels": 32,
                "mlp_dim": 128,
                "global_attn_indexes": [1],
                "window_size": 2,
                "num_pos_feats": 16,
            },
            "prompt_encoder_config": {"hidden_size": 32, "image_size": 64, "patch_size": 16},
            "mask_decoder_config": {
                "hidden_size": 32,
                "mlp_dim": 64,
                "num_attention_heads": 2,
                "iou_head_hidden_dim": 32,
            },
        },
        segment(64),
    ),
)

FAMILIES = (*DECODERS, *ENCODERS, *SEQ2SEQ, *VISION)
