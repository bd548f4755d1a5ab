"""Models with an encoder and a decoder."""

from __future__ import annotations

from .family import SEQ, T5, Family, speech, translation

SEQ2SEQ = (
    Family("seq2seq", "t5", "T5ForConditionalGeneration", T5, translation),
    Family("seq2seq", "mt5", "MT5ForConditionalGeneration", T5, translation),
    Family("seq2seq", "bart", "BartForConditionalGeneration", SEQ, translation),
    Family("seq2seq", "mbart", "MBartForConditionalGeneration", SEQ, translation),
    Family("seq2seq", "marian", "MarianMTModel", {**SEQ, "decoder_vocab_size": 256}, translation),
    Family("seq2seq", "pegasus", "PegasusForConditionalGeneration", SEQ, translation),
    Family("seq2seq", "m2m_100", "M2M100ForConditionalGeneration", SEQ, translation),
    Family("seq2seq", "blenderbot", "BlenderbotForConditionalGeneration", SEQ, translation),
    Family(
        "seq2seq",
        "whisper",
        "WhisperForConditionalGeneration",
        {**SEQ, "max_source_positions": 24, "max_target_positions": 32, "num_mel_bins": 16},
        speech,
    ),
    Family("seq2seq", "umt5", "UMT5ForConditionalGeneration", {**T5, "decoder_start_token_id": 0}, translation),
    Family("seq2seq", "longt5", "LongT5ForConditionalGeneration", {**T5, "decoder_start_token_id": 0}, translation),
    Family(
        "seq2seq",
        "switch_transformers",
        "SwitchTransformersForConditionalGeneration",
        {**T5, "num_experts": 4, "decoder_start_token_id": 0},
        translation,
    ),
    Family(
        "seq2seq",
        "led",
        "LEDForConditionalGeneration",
        {
            **SEQ,
            "attention_window": 4,
            "max_encoder_position_embeddings": 128,
            "max_decoder_position_embeddings": 128,
        },
        translation,
    ),
)
