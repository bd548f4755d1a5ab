"""The denoisers and the decoder of ``gpu.py``, from diffusers, with random weights, in float16."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

DENOISERS = {"sd15unet": 2, "sdvae": 1, "ditxl": 8}  # -> images


def denoiser(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model in eval mode and the keyword arguments of a call. Raises ``ImportError`` without diffusers."""
    import diffusers

    torch.manual_seed(0)
    images, generator = DENOISERS[name], torch.Generator().manual_seed(1)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(images, *shape, generator=generator).half()

    if name == "sd15unet":  # Stable Diffusion 1.5 at 512 x 512, with and without the text
        model: nn.Module = diffusers.UNet2DConditionModel(cross_attention_dim=768, attention_head_dim=8, sample_size=64)
        inputs = {"sample": randn(4, 64, 64), "encoder_hidden_states": randn(77, 768), "timestep": torch.tensor([10])}
    elif name == "sdvae":  # its decoder
        blocks = {
            "block_out_channels": (128, 256, 512, 512),
            "down_block_types": ("DownEncoderBlock2D",) * 4,
            "up_block_types": ("UpDecoderBlock2D",) * 4,
        }
        model = diffusers.AutoencoderKL(**blocks, latent_channels=4, layers_per_block=2).decoder
        return model.half().eval(), {"sample": randn(4, 64, 64)}
    else:  # DiT-XL/2 at 256 x 256
        sizes = {"num_attention_heads": 16, "attention_head_dim": 72, "num_layers": 28, "patch_size": 2}
        model = diffusers.DiTTransformer2DModel(
            **sizes, in_channels=4, out_channels=8, sample_size=32, num_embeds_ada_norm=1000
        )
        inputs = {
            "hidden_states": randn(4, 32, 32),
            "timestep": torch.full((images,), 10),
            "class_labels": torch.arange(images),
        }
    return model.half().eval(), {**inputs, "return_dict": False}


class Positional(nn.Module):
    """A model whose tensors are positional arguments, and whose result is one tensor."""

    def __init__(self, model: nn.Module, inputs: dict[str, Any]):
        super().__init__()
        self.model, self.inputs = model, inputs

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Return the first result."""
        rest = iter(tensors)
        call = {k: next(rest) if isinstance(v, torch.Tensor) else v for k, v in self.inputs.items()}
        result = self.model(**call)
        return result[0] if isinstance(result, tuple) else result


def tensors(inputs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Return the arguments that are tensors, in order."""
    return tuple(v for v in inputs.values() if isinstance(v, torch.Tensor))
