"""Models of texts with images, and encoders of their parts."""

from __future__ import annotations

from typing import Any

import torch

from .family import GQA, SMALL, SPECIAL, VIT, Family, Inputs, captioned, features, image, randn, tokens

_IMAGE = 250  # the token that stands for a part of an image
_TEXT = {**GQA, **SPECIAL, "head_dim": 16}
_SIGLIP = {**VIT, "model_type": "siglip_vision_model"}
_PAIR = {"text_config": {**SMALL, **SPECIAL}, "vision_config": VIT, "projection_dim": 32}


def _with_image(count: int, **more: Any) -> Inputs:
    """int64 [2, 24] tokens, of which ``count`` stand for an image, and float32 [2, 3, 64, 64] images."""

    def made(config: Any) -> dict[str, Any]:
        words = tokens(config.text_config, 24)
        words["input_ids"][:, 2 : 2 + count] = _IMAGE
        return {**words, "pixel_values": randn(2, 3, 64, 64), **more}

    return made


MULTIMODAL = (
    Family(
        "multimodal",
        "llava",
        "LlavaForConditionalGeneration",
        {
            "text_config": {**_TEXT, "model_type": "llama"},
            "vision_config": {**VIT, "model_type": "clip_vision_model"},
            "image_token_index": _IMAGE,
            "vision_feature_select_strategy": "full",
            "vision_feature_layer": -1,
        },
        _with_image(17),
    ),
    Family(
        "multimodal",
        "gemma3",
        "Gemma3ForConditionalGeneration",
        {
            "text_config": {**_TEXT, "model_type": "gemma3_text"},
            "vision_config": _SIGLIP,
            "mm_tokens_per_image": 16,
            "image_token_index": _IMAGE,
        },
        _with_image(16),
    ),
    Family(
        "multimodal",
        "internvl",
        "InternVLForConditionalGeneration",
        {
            "text_config": {**_TEXT, "model_type": "qwen2"},
            "vision_config": {**VIT, "model_type": "internvl_vision", "image_size": [64, 64], "patch_size": [16, 16]},
            "image_token_id": _IMAGE,
            "downsample_ratio": 0.5,
        },
        _with_image(4),
    ),
    Family(
        "multimodal",
        "aya_vision",
        "AyaVisionForConditionalGeneration",
        {
            "text_config": {**_TEXT, "model_type": "cohere2"},
            "vision_config": _SIGLIP,
            "image_token_index": _IMAGE,
            "downsample_factor": 2,
            "alignment_intermediate_size": 64,
        },
        _with_image(4),
    ),
    Family(
        "multimodal",
        "mistral3",
        "Mistral3ForConditionalGeneration",
        {
            "text_config": {**_TEXT, "model_type": "mistral"},
            "vision_config": {**VIT, "model_type": "pixtral"},
            "image_token_index": _IMAGE,
            "spatial_merge_size": 2,
        },
        _with_image(4, image_sizes=torch.tensor([[64, 64], [64, 64]])),
    ),
    Family(
        "multimodal",
        "smolvlm",
        "SmolVLMForConditionalGeneration",
        {
            "text_config": {**_TEXT, "model_type": "llama"},
            "vision_config": VIT,
            "image_token_id": _IMAGE,
            "scale_factor": 2,
        },
        _with_image(4, pixel_values=randn(2, 1, 3, 64, 64)),
    ),
    Family(
        "multimodal",
        "qwen2_vl",
        "Qwen2VLForConditionalGeneration",
        {
            "text_config": {**_TEXT, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
            "vision_config": {"depth": 2, "embed_dim": 32, "num_heads": 2, "hidden_size": 64},
        },
        lambda c: tokens(c.text_config),
    ),
    Family("multimodal", "pixtral", "PixtralVisionModel", VIT, image(64)),
    Family(
        "multimodal",
        "siglip2",
        "Siglip2VisionModel",
        {**VIT, "num_patches": 16},
        lambda c: {
            "pixel_values": randn(2, 16, 768),
            "pixel_attention_mask": torch.ones(2, 16, dtype=torch.int64),
            "spatial_shapes": torch.tensor([[4, 4], [4, 4]]),
        },
    ),
    Family(
        "multimodal",
        "altclip",
        "AltCLIPModel",
        {**_PAIR, "text_config": {**SMALL, **SPECIAL, "project_dim": 32}},
        captioned(64, batch=16),
    ),
    Family("multimodal", "chinese_clip", "ChineseCLIPModel", _PAIR, captioned(64, batch=16)),
    Family(
        "multimodal",
        "voxtral",
        "VoxtralEncoder",
        {
            "num_mel_bins": 16,
            "max_source_positions": 24,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
        features(2, 16, 48, name="input_features"),
    ),
)
