"""Denoisers of videos, and the autoencoders of images, videos and sound, from diffusers."""

from __future__ import annotations

import torch

from .diffusion import BLOCKS, DIT, HEADS, MASK, PART, POOLED, STREAMS, TEXT, TIME, of_diffusers
from .family import randn

_CODER = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
_VAE = {**_CODER, **BLOCKS, "latent_channels": 4}
_LATENTS = {"hidden_states": randn(1, 4, 2, 8, 8), "timestep": TIME}
_IMAGE = {"sample": randn(1, 3, 32, 32)}
_CLIP = {"sample": randn(1, 3, 9, 16, 16)}

_VIDEOS = (
    of_diffusers(
        "latte",
        "LatteTransformer3DModel",
        {
            **DIT,
            "caption_channels": 32,
            "cross_attention_dim": 64,
            "out_channels": 8,
            "video_length": 2,
            "num_embeds_ada_norm": 16,
            "norm_type": "ada_norm_single",
            "attention_bias": True,
            "activation_fn": "gelu-approximate",
            "norm_elementwise_affine": False,
        },
        _LATENTS,
        TEXT,
    ),
    of_diffusers(
        "cogvideox",
        "CogVideoXTransformer3DModel",
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 16,
            "text_embed_dim": 32,
            "num_layers": 2,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 9,
            "max_text_seq_length": 7,
        },
        TEXT,
        hidden_states=randn(1, 3, 4, 8, 8),
        timestep=TIME,
    ),
    of_diffusers(
        "ltx",
        "LTXVideoTransformer3DModel",
        {**HEADS, "in_channels": 8, "out_channels": 8, "cross_attention_dim": 64, "num_layers": 2}
        | {"caption_channels": 32},
        TEXT,
        MASK,
        hidden_states=randn(1, 32, 8),
        timestep=TIME,
        num_frames=2,
        height=4,
        width=4,
    ),
    of_diffusers(
        "wan",
        "WanTransformer3DModel",
        {
            **HEADS,
            "patch_size": (1, 2, 2),
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 32,
            "freq_dim": 32,
            "ffn_dim": 64,
            "num_layers": 2,
            "rope_max_seq_len": 32,
        },
        _LATENTS,
        TEXT,
    ),
    of_diffusers(
        "hunyuan_video",
        "HunyuanVideoTransformer3DModel",
        {
            **STREAMS,
            "in_channels": 4,
            "out_channels": 4,
            "num_single_layers": 1,
            "num_refiner_layers": 1,
            "text_embed_dim": 32,
            "pooled_projection_dim": 32,
            "rope_axes_dim": (4, 6, 6),
        },
        _LATENTS,
        TEXT,
        POOLED,
        encoder_attention_mask=torch.ones(1, 7),
        guidance=PART,
    ),
    of_diffusers(
        "mochi",
        "MochiTransformer3DModel",
        {
            **HEADS,
            "num_layers": 2,
            "pooled_projection_dim": 32,
            "in_channels": 4,
            "time_embed_dim": 32,
            "text_embed_dim": 32,
            "max_sequence_length": 16,
        },
        _LATENTS,
        TEXT,
        MASK,
    ),
    of_diffusers(
        "allegro",
        "AllegroTransformer3DModel",
        {
            "num_attention_heads": 4,
            "attention_head_dim": 24,
            "num_layers": 2,
            "patch_size": 2,
            "patch_size_t": 1,
            "in_channels": 4,
            "out_channels": 4,
            "cross_attention_dim": 96,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 2,
            "caption_channels": 32,
        },
        _LATENTS,
        TEXT,
        encoder_attention_mask=torch.ones(1, 7),
        attention_mask=torch.ones(1, 2, 8, 8),
        image_rotary_emb=None,
    ),
)
_CODERS = (
    of_diffusers("vae", "AutoencoderKL", _VAE, _IMAGE),
    of_diffusers(
        "vae_asymmetric",
        "AsymmetricAutoencoderKL",
        {**_CODER, "down_block_out_channels": (32, 64), "up_block_out_channels": (32, 64), "norm_num_groups": 8},
        _IMAGE,
    ),
    of_diffusers(
        "vae_tiny",
        "AutoencoderTiny",
        {"encoder_block_out_channels": (32, 32), "decoder_block_out_channels": (32, 32)}
        | {"num_encoder_blocks": (1, 2), "num_decoder_blocks": (2, 1)},
        _IMAGE,
    ),
    of_diffusers(
        "vae_dc",
        "AutoencoderDC",
        {
            "in_channels": 3,
            "latent_channels": 4,
            "attention_head_dim": 16,
            "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "decoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "encoder_block_out_channels": (32, 64),
            "decoder_block_out_channels": (32, 64),
            "encoder_qkv_multiscales": ((), (5,)),
            "decoder_qkv_multiscales": ((), (5,)),
            "encoder_layers_per_block": (1, 1),
            "decoder_layers_per_block": (1, 1),
        },
        _IMAGE,
    ),
    of_diffusers(
        "vae_temporal",
        "AutoencoderKLTemporalDecoder",
        {"block_out_channels": (32, 64), "down_block_types": ("DownEncoderBlock2D",) * 2},
        sample=randn(2, 3, 32, 32),
        num_frames=2,
    ),
    of_diffusers(
        "vae_cogvideox",
        "AutoencoderKLCogVideoX",
        {"block_out_channels": (16,) * 4, "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 2},
        _CLIP,
    ),
    of_diffusers(
        "vae_ltx",
        "AutoencoderKLLTXVideo",
        {
            "latent_channels": 8,
            "block_out_channels": (8,) * 4,
            "decoder_block_out_channels": (8,) * 4,
            "layers_per_block": (1,) * 5,
            "decoder_layers_per_block": (1,) * 5,
            "patch_size": 1,
        },
        sample=randn(1, 3, 9, 32, 32),
    ),
    of_diffusers(
        "vae_wan",
        "AutoencoderKLWan",
        {"base_dim": 8, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1, "temperal_downsample": [False, True, True]},
        _CLIP,
    ),
    of_diffusers(
        "vae_oobleck",
        "AutoencoderOobleck",
        {
            "encoder_hidden_size": 12,
            "decoder_channels": 12,
            "decoder_input_channels": 6,
            "downsampling_ratios": [2, 4],
            "channel_multiples": [1, 2],
        },
        sample=randn(1, 2, 128),
    ),
)

VIDEO = (*_VIDEOS, *_CODERS)
