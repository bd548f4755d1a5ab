"""Models of transformers built as their documentation writes the call: keywords, caches, ``ModelOutput``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch.utils import _pytree as pytree
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

import npusim
from npu_compiler.support.errors import InputError

from ..support.sweeps import IN_FULL

IDS = torch.tensor([[5, 9, 3, 17, 40, 8, 21]])
DECODER: dict[str, Any] = dict(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)


def tensors(result: Any) -> list[torch.Tensor]:
    return [v for v in pytree.tree_leaves(result) if isinstance(v, torch.Tensor)]


def copied(value: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, torch.clone, value)


def agrees(model: torch.nn.Module, *args: Any, fallback: bool = False, **kwargs: Any) -> Any:
    """Builds ``model``, into one partition without ``fallback``, and compares a call; returns PyTorch's result."""
    model.eval()
    with torch.no_grad():
        wanted = model(*copied(args), **copied(kwargs))
    built = npusim.build(model, copied(args), example_kwargs=copied(kwargs), fallback=fallback)
    found = built(*copied(args), **copied(kwargs))
    assert type(found) is type(wanted)
    if isinstance(wanted, dict):
        assert list(found) == list(wanted)
    ours, theirs = tensors(found), tensors(wanted)
    assert len(ours) == len(theirs) > 0
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-4, atol=1e-4)
    return wanted


CAUSAL = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**DECODER, head_dim=8, sliding_window=5)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64)),
}


@pytest.mark.parametrize("family", [pytest.param("llama", marks=IN_FULL), "gemma3", "gpt2"])
def test_a_prompt_and_a_step_with_the_cache_object(family: str) -> None:
    torch.manual_seed(0)
    model = CAUSAL[family]()
    prompt = agrees(model, IDS)
    cache = prompt.past_key_values
    step = agrees(model, IDS[:, :1], past_key_values=cache)
    assert type(step.past_key_values) is type(cache) is hf.DynamicCache
    assert step.past_key_values.get_seq_length() == IDS.shape[1] + 1


def test_mamba_returns_its_states() -> None:
    torch.manual_seed(0)
    sizes = {k: DECODER[k] for k in ("vocab_size", "hidden_size", "num_hidden_layers")}
    result = agrees(hf.MambaForCausalLM(hf.MambaConfig(**sizes, state_size=4)), IDS)
    assert result.cache_params is not None


def test_encoder_and_decoder() -> None:
    torch.manual_seed(0)
    model = hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    )
    first = agrees(model, input_ids=IDS, decoder_input_ids=IDS[:, :3])
    second = agrees(
        model,
        encoder_outputs=(first.encoder_last_hidden_state,),
        decoder_input_ids=IDS[:, :1],
        past_key_values=first.past_key_values,
    )
    assert isinstance(second.past_key_values, hf.EncoderDecoderCache)


def test_a_built_prompt_feeds_a_built_step() -> None:
    """The cache that a built model returns is one that a built model takes, with numpy arrays as with tensors."""
    torch.manual_seed(0)
    model = CAUSAL["llama"]().eval()
    with torch.no_grad():
        prompt = model(IDS)
        wanted = model(IDS[:, :1], past_key_values=copied(prompt.past_key_values)).logits
    first = npusim.build(model, IDS)
    second = npusim.build(model, IDS[:, :1], example_kwargs={"past_key_values": prompt.past_key_values})
    for ids, as_tensor in ((IDS, lambda v: v), (IDS.numpy(), torch.from_numpy)):
        cache = first(ids).past_key_values
        logits = second(ids[:, :1], past_key_values=cache).logits
        torch.testing.assert_close(as_tensor(logits), wanted, rtol=1e-4, atol=1e-4)


def test_the_export_recipe_of_transformers_keeps_its_cache() -> None:
    """TorchExportableModuleWithStaticCache writes its buffers through the attributes of a cache object."""
    torch.manual_seed(0)
    model = CAUSAL["llama"]().eval()
    model.generation_config = hf.GenerationConfig(
        use_cache=True, cache_implementation="static", cache_config={"batch_size": 1, "max_cache_len": 8}
    )
    recipe = TorchExportableModuleWithStaticCache(model)
    call = {"input_ids": IDS[:, :1], "cache_position": torch.tensor([0])}
    built = npusim.build(recipe, example_kwargs=call, fallback=False)
    assert recipe.static_cache.layers[0].keys is recipe.key_cache_0 and not recipe.key_cache_0.any()
    with torch.no_grad():
        for i in range(4):
            call = {"input_ids": IDS[:, i : i + 1], "cache_position": torch.tensor([i])}
            torch.testing.assert_close(built(**call), recipe(**call), rtol=1e-4, atol=1e-4)


def test_image_and_text() -> None:
    """LLaVA counts the image's tokens in an assertion; what is left to PyTorch is ``masked_scatter``."""
    torch.manual_seed(0)
    vision = hf.CLIPVisionConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=32, patch_size=8
    )
    config = hf.LlavaConfig(vision_config=vision, text_config=hf.LlamaConfig(**DECODER), image_token_id=6)
    model = hf.LlavaForConditionalGeneration(config)
    ids = torch.cat([torch.full((1, 16), 6), IDS], 1)
    agrees(model, fallback=True, input_ids=ids, pixel_values=torch.randn(1, 3, 32, 32))


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_cache_that_is_passed_in_is_the_one_that_comes_back(kind: str) -> None:
    """Generation loops go on with the object that they passed in, as well as with the one that they got."""
    torch.manual_seed(0)
    model = CAUSAL["llama"]().eval()

    def new_cache() -> Any:
        if kind == "dynamic":
            return hf.DynamicCache(config=model.config)
        return hf.StaticCache(config=model.config, max_cache_len=12)

    ours, theirs = new_cache(), new_cache()
    with torch.no_grad():
        model(IDS, past_key_values=ours)
        model(IDS, past_key_values=theirs)
    built = npusim.build(model, IDS[:, :1], example_kwargs={"past_key_values": copied(ours)}, fallback=False)
    for ids in (IDS[:, :1], IDS[:, 1:2]):
        with torch.no_grad():
            wanted = model(ids, past_key_values=theirs)
        found = built(ids, past_key_values=ours)
        assert found.past_key_values is ours
        torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-4, atol=1e-4)
        for our, their in zip(ours.layers, theirs.layers, strict=True):
            torch.testing.assert_close(our.keys, their.keys, rtol=1e-4, atol=1e-4)
    with pytest.raises(InputError, match="'past_key_values' has the structure DynamicCache"):
        built(IDS[:, :1], past_key_values=hf.DynamicCache())
