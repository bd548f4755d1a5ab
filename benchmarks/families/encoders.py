"""Models of whole texts, tables and series."""

from __future__ import annotations

from .family import GQA, SMALL, SPECIAL, Family, features, ids_only

ENCODERS = (
    Family("encoders", "bert", "BertModel", SMALL),
    Family("encoders", "roberta", "RobertaModel", {**SMALL, **SPECIAL}),
    Family("encoders", "xlm_roberta", "XLMRobertaModel", {**SMALL, **SPECIAL}),
    Family(
        "encoders",
        "distilbert",
        "DistilBertModel",
        {"vocab_size": 256, "dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 4},
    ),
    Family("encoders", "albert", "AlbertModel", {**SMALL, "embedding_size": 32}),
    Family("encoders", "electra", "ElectraModel", {**SMALL, "embedding_size": 32}),
    Family("encoders", "deberta", "DebertaModel", SMALL),
    Family(
        "encoders",
        "deberta_v2",
        "DebertaV2Model",
        {**SMALL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    ),
    Family("encoders", "mpnet", "MPNetModel", SMALL),
    Family("encoders", "modernbert", "ModernBertModel", {**SMALL, **SPECIAL}),
    Family("encoders", "convbert", "ConvBertModel", {**SMALL, "embedding_size": 64}),
    Family("encoders", "fnet", "FNetModel", SMALL, ids_only),
    Family("encoders", "longformer", "LongformerModel", {**SMALL, "attention_window": 4}),
    Family(
        "encoders", "xlnet", "XLNetModel", {"vocab_size": 256, "d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 128}
    ),
    Family("encoders", "roformer", "RoFormerModel", SMALL),
    Family("encoders", "squeezebert", "SqueezeBertModel", {**SMALL, "embedding_size": 64}),
    Family("encoders", "mobilebert", "MobileBertModel", {**SMALL, "intra_bottleneck_size": 32, "embedding_size": 32}),
    Family("encoders", "rembert", "RemBertModel", {**SMALL, "input_embedding_size": 32}),
    Family(
        "encoders",
        "funnel",
        "FunnelModel",
        {"vocab_size": 256, "d_model": 64, "n_head": 4, "d_head": 16, "d_inner": 128, "block_sizes": [1, 1]},
    ),
    Family("encoders", "ibert", "IBertModel", SMALL),
    Family("encoders", "esm", "EsmModel", {**SMALL, "pad_token_id": 1}),
    Family("encoders", "layoutlm", "LayoutLMModel", SMALL),
    Family(
        "encoders",
        "layoutlmv3",
        "LayoutLMv3Model",
        {**SMALL, "visual_embed": False, "coordinate_size": 8, "shape_size": 16, "pad_token_id": 1},
    ),
    Family("encoders", "eurobert", "EuroBertModel", {**GQA, **SPECIAL}),
    Family("encoders", "splinter", "SplinterModel", SMALL),
    Family("encoders", "xmod", "XmodModel", {**SMALL, **SPECIAL, "default_language": "en_XX"}),
    Family("encoders", "big_bird", "BigBirdModel", {**SMALL, "attention_type": "original_full"}),
    Family("encoders", "roc_bert", "RoCBertModel", {**SMALL, "enable_pronunciation": False, "enable_shape": False}),
    Family(
        "encoders",
        "perceiver",
        "PerceiverModel",
        {
            "num_latents": 16,
            "d_latents": 64,
            "d_model": 64,
            "num_blocks": 1,
            "num_self_attends_per_block": 2,
            "num_self_attention_heads": 4,
            "num_cross_attention_heads": 4,
        },
        features(2, 12, 64, name="inputs"),
    ),
    Family(
        "encoders",
        "patchtst",
        "PatchTSTModel",
        {
            "num_input_channels": 3,
            "context_length": 32,
            "patch_length": 8,
            "patch_stride": 8,
            "d_model": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 64,
        },
        features(2, 32, 3, name="past_values"),
    ),
)
