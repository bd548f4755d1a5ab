"""Denoisers of images and sound, from diffusers.

Times are small: the sines of a large one amplify its last bit, so that errors would measure chance.
"""

from __future__ import annotations

from typing import Any

import torch

from .family import Family, randn

TIME, PART = torch.tensor([3]), torch.tensor([0.004])  # a step, and the fraction of a denoising
BLOCKS = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8}
_CROSS = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 32,
    "attention_head_dim": 8,
    **BLOCKS,
}
HEADS = {"num_attention_heads": 4, "attention_head_dim": 16}
DIT = {**HEADS, "num_layers": 2, "patch_size": 2, "in_channels": 4, "sample_size": 8}
STREAMS = {**HEADS, "patch_size": 1, "in_channels": 16, "num_layers": 1, "num_single_layers": 2}
_FLUX = {**STREAMS, "joint_attention_dim": 32}
TEXT = {"encoder_hidden_states": randn(1, 7, 32)}
MASK = {"encoder_attention_mask": torch.ones(1, 7, dtype=torch.bool)}
POOLED = {"pooled_projections": randn(1, 32)}
_LATENT = {"hidden_states": randn(1, 4, 8, 8), "timestep": TIME}
_TOKENS = {"hidden_states": randn(1, 16, 16), "timestep": PART}
_SAMPLE = {"sample": randn(1, 4, 16, 16), "timestep": TIME}


def _places(tokens: int, axes: int) -> torch.Tensor:
    """float32 [tokens, axes] positions."""
    return torch.arange(float(tokens * axes)).reshape(tokens, axes) % 4


def of_diffusers(name: str, model: str, config: dict[str, Any], *inputs: dict[str, Any], **more: Any) -> Family:
    """A family of diffusers and its keyword arguments: those of ``inputs``, and ``more``."""
    found = {k: v for part in inputs for k, v in part.items()} | more
    return Family("diffusion", name, model, config, lambda _: found, library="diffusers")


_UNETS = (
    of_diffusers(
        "ddpm",
        "UNet2DModel",
        {
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            **BLOCKS,
        },
        sample=randn(1, 3, 16, 16),
        timestep=TIME,
    ),
    of_diffusers("stable_diffusion", "UNet2DConditionModel", _CROSS, _SAMPLE, TEXT),
    of_diffusers(
        "stable_diffusion_xl",
        "UNet2DConditionModel",
        {
            **_CROSS,
            "use_linear_projection": True,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 8,
            "transformer_layers_per_block": (1, 2),
            "projection_class_embeddings_input_dim": 80,
        },
        _SAMPLE,
        TEXT,
        added_cond_kwargs={"text_embeds": randn(1, 32), "time_ids": randn(1, 6)},
    ),
    of_diffusers(
        "controlnet",
        "ControlNetModel",
        {k: v for k, v in _CROSS.items() if k != "up_block_types"} | {"conditioning_embedding_out_channels": (16, 32)},
        _SAMPLE,
        TEXT,
        controlnet_cond=randn(1, 3, 32, 32),
    ),
    of_diffusers("t2i_adapter", "T2IAdapter", {"channels": [32, 64], "num_res_blocks": 1}, x=randn(1, 3, 64, 64)),
    of_diffusers(
        "video_unet",
        "UNet3DConditionModel",
        {
            **_CROSS,
            "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
            "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
        },
        TEXT,
        sample=randn(1, 4, 4, 16, 16),
        timestep=TIME,
    ),
    of_diffusers(
        "stable_video",
        "UNetSpatioTemporalConditionModel",
        {
            "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
            "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
            "block_out_channels": (32, 64),
            "layers_per_block": 1,
            "cross_attention_dim": 32,
            "num_attention_heads": 8,
            "projection_class_embeddings_input_dim": 96,
            "addition_time_embed_dim": 32,
        },
        sample=randn(1, 2, 8, 16, 16),
        timestep=TIME,
        encoder_hidden_states=randn(1, 1, 32),
        added_time_ids=randn(1, 3),
    ),
    of_diffusers(
        "stable_cascade",
        "StableCascadeUNet",
        {
            "in_channels": 4,
            "out_channels": 4,
            "conditioning_dim": 32,
            "block_out_channels": (32, 64),
            "num_attention_heads": (0, 4),
            "down_num_layers_per_block": (1, 1),
            "up_num_layers_per_block": (1, 1),
            "down_blocks_repeat_mappers": (1, 1),
            "up_blocks_repeat_mappers": (1, 1),
            "block_types_per_layer": (
                ("SDCascadeResBlock", "SDCascadeTimestepBlock"),
                ("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"),
            ),
            "clip_text_pooled_in_channels": 32,
            "clip_text_in_channels": 32,
            "clip_image_in_channels": 32,
            "clip_seq": 2,
            "switch_level": (False,),
            "timestep_ratio_embedding_dim": 16,
        },
        sample=randn(4, 4, 16, 16),
        timestep_ratio=torch.tensor([0.1, 0.35, 0.6, 0.85]),
        clip_text_pooled=randn(4, 1, 32),
        clip_text=randn(4, 7, 32),
        clip_img=randn(4, 1, 32),
    ),
)
_TRANSFORMERS = (
    of_diffusers(
        "dit", "DiTTransformer2DModel", {**DIT, "num_embeds_ada_norm": 16}, _LATENT, class_labels=torch.tensor([3])
    ),
    of_diffusers(
        "pixart",
        "PixArtTransformer2DModel",
        {**DIT, "cross_attention_dim": 64, "caption_channels": 32, "use_additional_conditions": False},
        _LATENT,
        TEXT,
    ),
    of_diffusers(
        "stable_diffusion_3",
        "SD3Transformer2DModel",
        {
            **DIT,
            "caption_projection_dim": 64,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 32,
            "out_channels": 4,
        },
        _LATENT,
        TEXT,
        POOLED,
    ),
    of_diffusers(
        "flux",
        "FluxTransformer2DModel",
        {**_FLUX, "pooled_projection_dim": 32, "axes_dims_rope": [4, 4, 8]},
        _TOKENS,
        TEXT,
        POOLED,
        txt_ids=_places(7, 3),
        img_ids=_places(16, 3),
    ),
    of_diffusers(
        "flux2",
        "Flux2Transformer2DModel",
        {**_FLUX, "timestep_guidance_channels": 32, "axes_dims_rope": [4, 4, 4, 4]},
        _TOKENS,
        TEXT,
        txt_ids=_places(7, 4),
        img_ids=_places(16, 4),
        guidance=PART,
    ),
    of_diffusers(
        "chroma",
        "ChromaTransformer2DModel",
        {
            **_FLUX,
            "axes_dims_rope": [4, 4, 8],
            "approximator_hidden_dim": 32,
            "approximator_layers": 1,
            "approximator_num_channels": 16,
        },
        _TOKENS,
        TEXT,
        txt_ids=_places(7, 3),
        img_ids=_places(16, 3),
        attention_mask=torch.ones(1, 23, dtype=torch.bool),
    ),
    of_diffusers(
        "qwen_image",
        "QwenImageTransformer2DModel",
        {
            **HEADS,
            "in_channels": 16,
            "out_channels": 4,
            "num_layers": 2,
            "joint_attention_dim": 32,
            "axes_dims_rope": (4, 6, 6),
        },
        _TOKENS,
        TEXT,
        encoder_hidden_states_mask=torch.ones(1, 7, dtype=torch.int64),
        img_shapes=[(1, 4, 4)],
    ),
    of_diffusers(
        "z_image",
        "ZImageTransformer2DModel",
        {
            "in_channels": 4,
            "dim": 64,
            "n_layers": 2,
            "n_refiner_layers": 1,
            "n_heads": 4,
            "n_kv_heads": 4,
            "cap_feat_dim": 32,
            "axes_dims": [4, 6, 6],
            "axes_lens": [64, 32, 32],
        },
        x=[randn(4, 1, 8, 8)],
        t=PART,
        cap_feats=[randn(7, 32)],
    ),
    of_diffusers(
        "sana",
        "SanaTransformer2DModel",
        {
            **DIT,
            "patch_size": 1,
            "out_channels": 4,
            "num_cross_attention_heads": 4,
            "cross_attention_head_dim": 16,
            "cross_attention_dim": 64,
            "caption_channels": 32,
        },
        _LATENT,
        TEXT,
    ),
    of_diffusers(
        "lumina2",
        "Lumina2Transformer2DModel",
        {
            "in_channels": 4,
            "hidden_size": 64,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "num_attention_heads": 4,
            "num_kv_heads": 2,
            "multiple_of": 16,
            "axes_dim_rope": (4, 6, 6),
            "axes_lens": (16, 16, 16),
            "cap_feat_dim": 32,
        },
        _LATENT,
        TEXT,
        MASK,
    ),
    of_diffusers(
        "auraflow",
        "AuraFlowTransformer2DModel",
        {
            **HEADS,
            "sample_size": 8,
            "num_mmdit_layers": 1,
            "num_single_dit_layers": 1,
            "caption_projection_dim": 64,
            "joint_attention_dim": 32,
            "pos_embed_max_size": 16,
        },
        _LATENT,
        TEXT,
        timestep=PART,
    ),
    of_diffusers(
        "cogview3",
        "CogView3PlusTransformer2DModel",
        {**DIT, "out_channels": 4, "text_embed_dim": 32, "time_embed_dim": 32, "condition_dim": 8},
        _LATENT,
        TEXT,
        original_size=torch.tensor([[8.0, 8.0]]),
        target_size=torch.tensor([[8.0, 8.0]]),
        crop_coords=torch.zeros(1, 2),
    ),
    of_diffusers(
        "hidream",
        "HiDreamImageTransformer2DModel",
        {
            **STREAMS,
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 4,
            "num_single_layers": 1,
            "caption_channels": [32, 32],
            "text_emb_dim": 64,
            "axes_dims_rope": (4, 6, 6),
            "max_resolution": (8, 8),
            "llama_layers": (0, 1),
            "num_routed_experts": 4,
            "num_activated_experts": 2,
        },
        hidden_states=randn(1, 4, 8, 8),
        timesteps=PART,
        encoder_hidden_states_t5=randn(1, 7, 32),
        encoder_hidden_states_llama3=randn(2, 1, 7, 32),
        pooled_embeds=randn(1, 64),
    ),
    of_diffusers(
        "muse",
        "UVit2DModel",
        {
            "hidden_size": 32,
            "vocab_size": 32,
            "codebook_size": 24,
            "cond_embed_dim": 32,
            "encoder_hidden_size": 32,
            "micro_cond_encode_dim": 8,
            "micro_cond_embed_dim": 40,
            "block_out_channels": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "block_num_heads": 4,
            "intermediate_size": 64,
            "num_res_blocks": 1,
        },
        TEXT,
        input_ids=torch.arange(64).reshape(1, 8, 8) % 24,
        pooled_text_emb=randn(1, 32),
        micro_conds=randn(1, 5),
    ),
    of_diffusers(
        "unclip_prior",
        "PriorTransformer",
        {**HEADS, "num_layers": 2, "embedding_dim": 32, "num_embeddings": 7},
        TEXT,
        hidden_states=randn(1, 32),
        timestep=TIME,
        proj_embedding=randn(1, 32),
    ),
    of_diffusers(
        "stable_audio",
        "StableAudioDiTModel",
        {
            **HEADS,
            "sample_size": 16,
            "in_channels": 4,
            "num_layers": 2,
            "num_key_value_attention_heads": 2,
            "out_channels": 4,
            "cross_attention_dim": 32,
            "time_proj_dim": 16,
            "global_states_input_dim": 32,
            "cross_attention_input_dim": 32,
        },
        TEXT,
        hidden_states=randn(1, 4, 16),
        timestep=torch.tensor([3.0]),
        global_hidden_states=randn(1, 1, 32),
        rotary_embedding=(randn(17, 8).cos(), randn(17, 8).sin()),
    ),
)
DIFFUSION = (*_UNETS, *_TRANSFORMERS)
