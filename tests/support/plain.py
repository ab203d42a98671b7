"""One process, plain torch: a Llama by torch's own functions and autograd, with nothing of ours in it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from shardwise.model.spec import Model

Weights = dict[str, torch.Tensor]


def rotate(x: torch.Tensor, theta: float) -> torch.Tensor:
    """x [b, heads, s, d]: complex rotation of (first half, second half)."""
    half = x.shape[-1] // 2
    frequency = 1.0 / theta ** (torch.arange(half, dtype=torch.float64) / half)
    angle = torch.outer(torch.arange(x.shape[2], dtype=torch.float64), frequency)
    wide = x.double()
    z = torch.complex(wide[..., :half], wide[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], -1).to(x.dtype)


def logits(model: Model, w: Weights, ids: torch.Tensor) -> torch.Tensor:
    """ids [b, s] -> [b, s, v]"""
    x = F.embedding(ids, w["embedding.weight"])
    b, s, _ = x.shape
    for i in range(model.layers):
        p = f"layers.{i % len(model.chain)}."
        n = F.rms_norm(x, (model.hidden,), w[p + "attention_norm.weight"], model.norm_eps)
        q, k, v = (
            F.linear(n, w[f"{p}attention.{c}.weight"]).view(b, s, -1, model.head_dim).transpose(1, 2) for c in "qkv"
        )
        q, k = rotate(q, model.rope_theta), rotate(k, model.rope_theta)
        groups = model.heads // model.kv_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = q @ k.transpose(-1, -2) / model.head_dim**0.5
        mask = torch.ones(s, s, dtype=torch.bool).triu(1)
        o = scores.masked_fill(mask, float("-inf")).softmax(-1) @ v
        x = x + F.linear(o.transpose(1, 2).reshape(b, s, -1), w[p + "attention.out.weight"])
        n = F.rms_norm(x, (model.hidden,), w[p + "mlp_norm.weight"], model.norm_eps)
        gated = F.silu(F.linear(n, w[p + "mlp.gate.weight"])) * F.linear(n, w[p + "mlp.up.weight"])
        x = x + F.linear(gated, w[p + "mlp.down.weight"])
    x = F.rms_norm(x, (model.hidden,), w["head.norm.weight"], model.norm_eps)
    return F.linear(x, w["embedding.weight" if model.tied else "head.output.weight"])


def loss(model: Model, w: Weights, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean over the valid tokens of the whole batch. ids, targets [b, s]"""
    return F.cross_entropy(logits(model, w, ids).flatten(0, 1), targets.flatten(), ignore_index=-100)
