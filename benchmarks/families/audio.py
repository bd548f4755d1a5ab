"""Models of waveforms and spectrograms."""

from __future__ import annotations

from .family import SEQ, SMALL, SPECIAL, Family, features, randn, tokens

_WAVES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "conv_dim": [32] * 7,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
_WAVE = features(2, 4000)

AUDIO = (
    Family("audio", "wav2vec2", "Wav2Vec2Model", {**_WAVES, "vocab_size": 32}, _WAVE),
    Family("audio", "hubert", "HubertModel", _WAVES, _WAVE),
    Family("audio", "wavlm", "WavLMModel", _WAVES, _WAVE),
    Family("audio", "unispeech_sat", "UniSpeechSatModel", _WAVES, _WAVE),
    Family("audio", "data2vec_audio", "Data2VecAudioModel", _WAVES, _WAVE),
    Family("audio", "sew", "SEWModel", {**_WAVES, "conv_dim": [32] * 13}, _WAVE),
    Family(
        "audio",
        "audio_spectrogram_transformer",
        "ASTModel",
        {**SMALL, "max_length": 128, "num_mel_bins": 32},
        features(2, 128, 32),
    ),
    Family(
        "audio",
        "speech_to_text",
        "Speech2TextForConditionalGeneration",
        {
            **SEQ,
            "max_source_positions": 64,
            "max_target_positions": 64,
            "input_feat_per_channel": 16,
            "conv_channels": 32,
        },
        lambda c: {"input_features": randn(2, 64, 16), "decoder_input_ids": tokens(c)["input_ids"]},
    ),
    Family(
        "audio",
        "moonshine",
        "MoonshineForConditionalGeneration",
        {
            **SPECIAL,
            "vocab_size": 256,
            "hidden_size": 64,
            "intermediate_size": 128,
            "encoder_num_hidden_layers": 2,
            "decoder_num_hidden_layers": 2,
            "encoder_num_attention_heads": 4,
            "decoder_num_attention_heads": 4,
        },
        lambda c: {"input_values": randn(2, 4000), "decoder_input_ids": tokens(c)["input_ids"]},
    ),
    Family(
        "audio",
        "encodec",
        "EncodecModel",
        {"num_filters": 8, "hidden_size": 32, "codebook_size": 64, "codebook_dim": 32, "upsampling_ratios": [4, 2]},
        features(1, 1, 640),
    ),
    Family(
        "audio",
        "dac",
        "DacModel",
        {
            "encoder_hidden_size": 8,
            "downsampling_ratios": [2, 2],
            "decoder_hidden_size": 32,
            "upsampling_ratios": [2, 2],
            "n_codebooks": 2,
            "codebook_size": 64,
            "codebook_dim": 8,
            "hidden_size": 32,
        },
        features(1, 1, 640),
    ),
    Family(
        "audio",
        "parakeet",
        "ParakeetEncoder",
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "num_mel_bins": 16,
            "subsampling_conv_channels": 16,
        },
        features(2, 64, 16, name="input_features"),
    ),
)
