"""Stand-in for Boogu-Image's transformer: the canonical name and place, a much smaller network."""

from __future__ import annotations

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import nn


class BooguImageTransformerBlock(nn.Module):
    """One block; like the real one, its processor owns weights."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size)
        self.to_q = nn.Linear(hidden_size, hidden_size)
        self.img_instruct_attn = nn.Module()
        self.img_instruct_attn.processor = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, hidden_size] -> the same."""
        mixed = self.img_instruct_attn.processor(self.to_q(self.norm(hidden_states)))
        return hidden_states + mixed


class BooguImageTransformer2DModel(ModelMixin, ConfigMixin):
    """The class name that checkpoints and bases record."""

    _no_split_modules = ["BooguImageTransformerBlock"]

    @register_to_config
    def __init__(self, hidden_size: int = 24, num_layers: int = 2, patch_size: int = 2) -> None:
        super().__init__()
        self.x_embedder = nn.Linear(hidden_size, hidden_size)
        self.layers = nn.ModuleList(
            BooguImageTransformerBlock(hidden_size) for _ in range(num_layers)
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, hidden_size] -> the same."""
        hidden_states = self.x_embedder(hidden_states)
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return hidden_states
