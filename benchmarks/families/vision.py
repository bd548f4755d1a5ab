"""Models of images and videos, some with texts."""

from __future__ import annotations

from typing import Any

from .family import (
    CLIP,
    CLIP_TEXT,
    CONV,
    EFFICIENT,
    SMALL,
    STAGES,
    VIT,
    Family,
    captioned,
    features,
    image,
    masked,
    segment,
)

_PYRAMID = {"hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4]}
_VIDEO = features(1, 4, 3, 64, 64, name="pixel_values")


def _classifier(name: str, model: str, config: dict[str, Any]) -> Family:
    return Family("vision", name, f"{model}ForImageClassification", {**config, "num_labels": 100}, image(64))


VISION = (
    _classifier("vit", "ViT", VIT),
    _classifier("deit", "DeiT", VIT),
    _classifier("beit", "Beit", VIT),
    _classifier("dinov2", "Dinov2", VIT),
    Family("vision", "vit_mae", "ViTMAEModel", VIT, masked(64, 16)),
    Family("vision", "siglip", "SiglipVisionModel", VIT, image(64)),
    Family("vision", "clip", "CLIPModel", CLIP, captioned(64, batch=16)),
    _classifier("swin", "Swin", {**STAGES, "patch_size": 2}),
    _classifier("swinv2", "Swinv2", {**STAGES, "patch_size": 2}),
    _classifier("convnext", "ConvNext", CONV),
    _classifier("convnextv2", "ConvNextV2", CONV),
    _classifier("resnet", "ResNet", {**CONV, "embedding_size": 32}),
    _classifier("regnet", "RegNet", {**CONV, "groups_width": 16}),
    _classifier("mobilenet_v2", "MobileNetV2", {"image_size": 64}),
    _classifier("mobilevit", "MobileViT", {"image_size": 64}),
    _classifier("efficientnet", "EfficientNet", EFFICIENT),
    Family(
        "vision",
        "segformer",
        "SegformerForSemanticSegmentation",
        {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 64, 64], "decoder_hidden_size": 64},
        image(64),
    ),
    _classifier("poolformer", "PoolFormer", {"depths": [1, 1, 1, 1]}),
    Family("vision", "yolos", "YolosForObjectDetection", {**VIT, "image_size": [64, 64]}, image(64)),
    Family(
        "vision",
        "dpt",
        "DPTForDepthEstimation",
        {**VIT, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [16, 16, 32, 32]},
        image(64),
    ),
    Family(
        "vision",
        "sam",
        "SamModel",
        {
            "vision_config": {
                **VIT,
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
    Family("vision", "levit", "LevitModel", {"image_size": 64}, image(64)),
    Family("vision", "pvt", "PvtModel", {**_PYRAMID, "image_size": 64}, image(64)),
    Family("vision", "pvt_v2", "PvtV2Model", {**_PYRAMID, "image_size": 64}, image(64)),
    _classifier("focalnet", "FocalNet", {"image_size": 64, "embed_dim": 32, "depths": [1, 1, 1, 1]}),
    Family(
        "vision",
        "hiera",
        "HieraModel",
        {"image_size": [64, 64], "embed_dim": 32, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 4, 8]},
        image(64),
    ),
    _classifier("bit", "Bit", {"embedding_size": 32, "hidden_sizes": [128] * 4, "depths": [1, 1, 1, 1]}),
    _classifier("mobilenet_v1", "MobileNetV1", {"depth_multiplier": 0.25}),
    _classifier("mobilevitv2", "MobileViTV2", {"width_multiplier": 0.5}),
    Family("vision", "glpn", "GLPNForDepthEstimation", {**_PYRAMID, "decoder_hidden_size": 32}, image(64)),
    Family("vision", "vitdet", "VitDetModel", VIT, image(64)),
    Family("vision", "dinov3_vit", "DINOv3ViTModel", VIT, image(64)),
    Family("vision", "ijepa", "IJepaModel", VIT, image(64)),
    Family("vision", "videomae", "VideoMAEModel", {**VIT, "num_frames": 4}, _VIDEO),
    Family("vision", "timesformer", "TimesformerModel", {**VIT, "num_frames": 4}, _VIDEO),
    Family("vision", "superpoint", "SuperPointForKeypointDetection", {}, features(1, 3, 64, 64, name="pixel_values")),
    Family(
        "vision",
        "swin2sr",
        "Swin2SRForImageSuperResolution",
        {"image_size": 32, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
        image(32),
    ),
    Family(
        "vision",
        "detr",
        "DetrForObjectDetection",
        {
            "use_timm_backbone": False,
            "use_pretrained_backbone": False,
            "d_model": 64,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "num_queries": 10,
            "num_labels": 100,
        },
        image(64),
    ),
    Family(
        "vision",
        "depth_anything",
        "DepthAnythingForDepthEstimation",
        {"neck_hidden_sizes": [16, 32, 32, 64], "fusion_hidden_size": 32, "head_in_index": -1},
        image(126),
    ),
    Family(
        "vision",
        "upernet",
        "UperNetForSemanticSegmentation",
        {
            "hidden_size": 32,
            "auxiliary_in_channels": 64,
            "num_labels": 100,
            "backbone_config": {
                **CONV,
                "model_type": "convnext",
                "out_features": ["stage1", "stage2", "stage3", "stage4"],
            },
        },
        image(64),
    ),
    Family(
        "vision",
        "vitpose",
        "VitPoseForPoseEstimation",
        {
            "num_labels": 17,
            "backbone_config": {
                **VIT,
                "model_type": "vitpose_backbone",
                "image_size": [64, 48],
                "patch_size": [16, 16],
                "out_features": ["stage2"],
            },
        },
        features(2, 3, 64, 48, name="pixel_values"),
    ),
    Family(
        "vision",
        "blip",
        "BlipModel",
        {
            "text_config": {**CLIP_TEXT, "encoder_hidden_size": 64, "projection_dim": 32},
            "vision_config": VIT,
            "projection_dim": 32,
        },
        captioned(64, batch=16),
    ),
    Family("vision", "vilt", "ViltModel", {**SMALL, "image_size": 64, "patch_size": 16}, captioned(64, batch=2)),
    Family("vision", "git", "GitModel", {**SMALL, "vision_config": VIT}, captioned(64, batch=2)),
    Family(
        "vision",
        "groupvit",
        "GroupViTModel",
        {
            "text_config": CLIP_TEXT,
            "vision_config": {
                **VIT,
                "depths": [1, 1, 1],
                "num_hidden_layers": 3,
                "num_group_tokens": [8, 4, 0],
                "num_output_groups": [8, 4, 0],
            },
            "projection_dim": 32,
        },
        captioned(64, batch=16),
    ),
    Family(
        "vision",
        "clipseg",
        "CLIPSegForImageSegmentation",
        {
            **CLIP,
            "reduce_dim": 16,
            "extract_layers": [0, 1],
            "decoder_num_attention_heads": 2,
            "decoder_intermediate_size": 32,
        },
        captioned(64, batch=2),
    ),
)
