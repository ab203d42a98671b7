"""Rotary tables: Llama 3.1's stretched wavelengths, by the three cases of its published configuration."""

from __future__ import annotations

import math

import torch

from shardwise.model.hf import load_model
from shardwise.train.nn import rope_tables


def stretched(frequency: float) -> float:
    """factor 8, low 1, high 4 over an original context of 8,192: long waves are stretched, short ones kept."""
    wavelength = 2 * math.pi / frequency
    if wavelength > 8192 / 1:
        return frequency / 8
    if wavelength < 8192 / 4:
        return frequency
    smooth = (8192 / wavelength - 1) / (4 - 1)
    return (1 - smooth) * frequency / 8 + smooth * frequency


def test_llama_31_frequencies() -> None:
    model = load_model("llama-3.1-8b")
    cos, sin = rope_tables(model, 4, torch.float64)
    assert cos.shape == sin.shape == (4, 1, 64)
    wanted = [stretched(500000.0 ** (-2 * i / 128)) for i in range(64)]
    assert any(w != 500000.0 ** (-2 * i / 128) for i, w in enumerate(wanted))
    for position in range(4):
        angles = torch.tensor([position * w for w in wanted], dtype=torch.float64)
        assert torch.allclose(cos[position, 0], angles.cos(), rtol=0, atol=1e-12)
        assert torch.allclose(sin[position, 0], angles.sin(), rtol=0, atol=1e-12)
