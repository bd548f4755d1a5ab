"""The model families that :mod:`coverage` builds: exact architectures of transformers and diffusers,
small, with random weights."""

from .audio import AUDIO
from .decoders import DECODERS
from .diffusion import DIFFUSION
from .encoders import ENCODERS
from .family import Family
from .multimodal import MULTIMODAL
from .seq2seq import SEQ2SEQ
from .video import VIDEO
from .vision import VISION

FAMILIES = (*DECODERS, *ENCODERS, *SEQ2SEQ, *VISION, *AUDIO, *MULTIMODAL, *DIFFUSION, *VIDEO)

__all__ = ["FAMILIES", "Family"]
