"""Encoders: ViT (Dosovitskiy et al. 2020, https://arxiv.org/abs/2010.11929) with torchvision's tensor names and
BERT (Devlin et al. 2018, https://arxiv.org/abs/1810.04805) with those of Hugging Face's ``BertModel``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Bert", "VisionTransformer", "bert", "vit", "vit_b_16"]


def _heads(x: Tensor, heads: int) -> Tensor:
    """[N, S, D] to [N, heads, S, D / heads]."""
    return x.view(*x.shape[:-1], heads, -1).transpose(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Tensor | None = None) -> Tensor:
    y = F.scaled_dot_product_attention(_heads(q, heads), _heads(k, heads), _heads(v, heads), attn_mask=mask)
    return y.transpose(1, 2).flatten(2)


class SelfAttention(nn.Module):
    """Multi-head attention with the parameters of ``nn.MultiheadAttention``."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.randn(3 * width, width) * width**-0.5)
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = F.linear(x, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        return self.out_proj(_attend(q, k, v, self.heads))


class ViTBlock(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int, hidden: int):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width, eps=1e-6)
        self.self_attention = SelfAttention(width, heads)
        self.ln_2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(width, hidden), nn.GELU(), nn.Dropout(0.0), nn.Linear(hidden, width), nn.Dropout(0.0)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attention(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class ViTEncoder(nn.Module):
    """Position embedding, blocks and the final norm, on tokens float[N, S, D]."""

    def __init__(self, tokens: int, depth: int, width: int, heads: int, hidden: int):
        super().__init__()
        self.pos_embedding = nn.Parameter(torch.randn(1, tokens, width) * 0.02)
        self.layers = nn.Sequential()
        for i in range(depth):
            self.layers.add_module(f"encoder_layer_{i}", ViTBlock(width, heads, hidden))
        self.ln = nn.LayerNorm(width, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return self.ln(self.layers(x + self.pos_embedding))


class VisionTransformer(nn.Module):
    """Images float[N, 3, image, image] to logits float[N, num_classes]; ``patch`` divides ``image``."""

    def __init__(self, image: int, patch: int, depth: int, width: int, heads: int, hidden: int, num_classes: int):
        super().__init__()
        self.conv_proj = nn.Conv2d(3, width, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.encoder = ViTEncoder((image // patch) ** 2 + 1, depth, width, heads, hidden)
        self.heads = nn.Sequential()
        self.heads.add_module("head", nn.Linear(width, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_proj(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1)
        return self.heads(self.encoder(x)[:, 0])


def vit(
    image: int = 32, patch: int = 8, depth: int = 2, width: int = 64, heads: int = 4, num_classes: int = 10
) -> VisionTransformer:
    """A ViT of any size, small by default; its MLP is four times as wide as the model."""
    return VisionTransformer(image, patch, depth, width, heads, 4 * width, num_classes)


def vit_b_16(num_classes: int = 1000) -> VisionTransformer:
    """Return a ViT from images float32[N, 3, 224, 224] to logits float32[N, num_classes]."""
    return vit(224, 16, 12, 768, 12, num_classes)


class BertEmbeddings(nn.Module):
    """The sum of word, position and token type embeddings, normalised."""

    def __init__(self, vocab: int, positions: int, width: int):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab, width)
        self.position_embeddings = nn.Embedding(positions, width)
        self.token_type_embeddings = nn.Embedding(2, width)
        self.LayerNorm = nn.LayerNorm(width, eps=1e-12)

    def forward(self, ids: Tensor, types: Tensor) -> Tensor:
        x = self.word_embeddings(ids) + self.token_type_embeddings(types)
        return self.LayerNorm(x + self.position_embeddings.weight[: ids.shape[1]])


class BertSelfAttention(nn.Module):
    """Multi-head attention with a mask, without the output projection."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.heads = heads

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return _attend(self.query(x), self.key(x), self.value(x), self.heads, mask)


class BertOutput(nn.Module):
    """Projection, residual, norm."""

    def __init__(self, inner: int, width: int):
        super().__init__()
        self.dense = nn.Linear(inner, width)
        self.LayerNorm = nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(x) + residual)


class BertLayer(nn.Module):
    """Post-norm attention and MLP."""

    def __init__(self, width: int, heads: int, hidden: int):
        super().__init__()
        self.attention = nn.ModuleDict({"self": BertSelfAttention(width, heads), "output": BertOutput(width, width)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(width, hidden)})
        self.output = BertOutput(hidden, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.attention["output"](self.attention["self"](x, mask), x)
        return self.output(F.gelu(self.intermediate["dense"](x)), x)


class BertEncoder(nn.Module):
    """A stack of layers on hidden states float[N, S, D]."""

    def __init__(self, depth: int, width: int, heads: int, hidden: int):
        super().__init__()
        self.layer = nn.ModuleList(BertLayer(width, heads, hidden) for _ in range(depth))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layer:
            x = layer(x, mask)
        return x


class Bert(nn.Module):
    """Token ids int64[N, S], attention mask int64[N, S] (1: a token, 0: padding) and token types int64[N, S] to hidden
    states float[N, S, D] and the pooled first token float[N, D]."""

    def __init__(self, vocab: int, positions: int, depth: int, width: int, heads: int, hidden: int):
        super().__init__()
        self.embeddings = BertEmbeddings(vocab, positions, width)
        self.encoder = BertEncoder(depth, width, heads, hidden)
        self.pooler = nn.ModuleDict({"dense": nn.Linear(width, width)})

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embeddings(input_ids, token_type_ids)
        x = self.encoder(x, attention_mask[:, None, None, :].bool())
        return x, torch.tanh(self.pooler["dense"](x[:, 0]))


def bert(
    vocab: int = 128, positions: int = 64, depth: int = 2, width: int = 64, heads: int = 4, hidden: int = 128
) -> Bert:
    """A BERT of any size, small by default; ``bert(30522, 512, 12, 768, 12, 3072)`` is the base model."""
    return Bert(vocab, positions, depth, width, heads, hidden)
