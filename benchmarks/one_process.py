"""What the unit executor costs on one rank, beside a plain loop over the same model: CPU seconds a step.

Two peers, the same weights, tokens, loss and optimizer (fused AdamW with clipping), float32, one thread:

    same ops     our differentiable ops in one autograd graph, from the tokens to the loss, one backward
    plain torch  torch's own functions: linear, rms_norm, scaled_dot_product_attention, cross_entropy, .backward()

Each pair runs the executor and the peer one after the other, in alternating order; the ratio of every pair is one
sample, and the bound is the upper end of the 95 % interval of the mean (Student's t).

    python benchmarks/one_process.py [--pairs 21] [--hidden 256]
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from beside.interval import paired

from shardwise.cluster import parse_cluster
from shardwise.collective import Labels
from shardwise.model.hf import from_config
from shardwise.model.spec import Model
from shardwise.plan.job import PRECISIONS, Job
from shardwise.plan.layout import parse
from shardwise.train.comm import Comm
from shardwise.train.optim import clip_norm
from shardwise.train.rank import Rank, build_rank, train_step
from shardwise.train.threads import run_threads

LAYERS, SEQ_LEN, BATCH, VOCAB = 4, 256, 4, 1024


def make_model(hidden: int) -> Model:
    return from_config(
        {
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": hidden * 11 // 4,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": VOCAB,
        },
        f"llama-{hidden}",
    )


def same_ops(rank: Rank, ids: torch.Tensor, targets: torch.Tensor) -> None:
    """One step of a plain loop over our ops: one graph, one backward."""
    modules, states = rank.executor.modules, rank.states
    for state in states.values():
        state.zero_gradient()
    scale = torch.tensor(1 / targets.numel())
    for mb in range(len(ids)):
        x = modules["embedding"].embedding(ids[mb])
        for i in range(LAYERS):
            x = modules[f"layers.{i}"].layer(x)
        loss = modules["head"].head(x, targets[mb], scale)
        torch.autograd.grad(loss, [next(iter(states["embedding"].slots.values())).parameter], allow_unused=True)
    rank.optimizer.step(clip_norm(states.values(), rank.world))


class PlainTorch:
    """The same model in torch's own functions."""

    def __init__(self, rank: Rank) -> None:
        self.model, self.job = rank.job.model, rank.job
        self.w = {
            s.record.name: s.weight.clone().requires_grad_() for st in rank.states.values() for s in st.slots.values()
        }
        self.cos, self.sin = (x[:, 0] for x in rank.executor.modules["layers.0"].context.rope)
        decay = [{"params": [w for w in self.w.values() if (w.ndim > 1) == m], "weight_decay": 0.1 * m} for m in (0, 1)]
        self.optimizer = torch.optim.AdamW(decay, lr=3e-4, fused=True)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], -1)

    def loss(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        m, w = self.model, self.w
        x = F.embedding(ids.view(-1, SEQ_LEN), w["embedding.weight"])
        b, s, _ = x.shape
        for i in range(m.layers):
            p = f"layers.{i}."
            n = F.rms_norm(x, (m.hidden,), w[p + "attention_norm.weight"], m.norm_eps)
            q, k, v = (
                F.linear(n, w[f"{p}attention.{c}.weight"]).view(b, s, -1, m.head_dim).transpose(1, 2) for c in "qkv"
            )
            o = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True, enable_gqa=True)
            x = x + F.linear(o.transpose(1, 2).reshape(b, s, -1), w[p + "attention.out.weight"])
            n = F.rms_norm(x, (m.hidden,), w[p + "mlp_norm.weight"], m.norm_eps)
            gated = F.silu(F.linear(n, w[p + "mlp.gate.weight"])) * F.linear(n, w[p + "mlp.up.weight"])
            x = x + F.linear(gated, w[p + "mlp.down.weight"])
        x = F.rms_norm(x, (m.hidden,), w["head.norm.weight"], m.norm_eps)
        return F.cross_entropy(F.linear(x, w["head.output.weight"]).flatten(0, 1), targets)

    def step(self, ids: torch.Tensor, targets: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        for mb in range(len(ids)):
            (self.loss(ids[mb], targets[mb]) / len(ids)).backward()
        torch.nn.utils.clip_grad_norm_(self.w.values(), 1.0)
        self.optimizer.step()


def cpu_s(run: Callable[[], object]) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description="The unit executor beside a plain loop, CPU seconds a step.")
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 512])
    options = parser.parse_args()
    if options.pairs < 15:
        parser.error("at least 15 pairs")
    torch.set_num_threads(1)
    what = f"{LAYERS} layers, {BATCH} sequences of {SEQ_LEN}, 2 micro-batches, float32"
    print(f"{what}; {platform.machine()}, torch {torch.__version__}")
    print(f"{'hidden':>6}  {'peer':<12} {'ours CPU s':>10} {'peer CPU s':>10} {'ratio':>7} {'95 % bound':>10}")
    for hidden in options.hidden:
        run_threads(1, partial(measure, hidden, options.pairs), timeout_s=3600)


def measure(hidden: int, pairs: int, comm: Comm) -> None:
    """The rows of one hidden size."""
    job = Job(make_model(hidden), parse_cluster("1xcpu"), SEQ_LEN, BATCH, PRECISIONS["fp32"])
    ids, targets = torch.randint(VOCAB, (2, 2, 2 * SEQ_LEN), generator=torch.Generator().manual_seed(0))
    rank, twin = (build_rank(job, parse("mb=2"), comm, Labels()) for _ in range(2))
    plain = PlainTorch(rank)
    peers = {"same ops": lambda: same_ops(twin, ids, targets), "plain torch": lambda: plain.step(ids, targets)}
    for name, peer in peers.items():
        ours, theirs = partial(cpu_s, lambda: train_step(rank, ids, targets)), partial(cpu_s, peer)
        for warm in (ours, theirs) * 2:
            warm()
        row = paired(ours, theirs, pairs)
        print(f"{hidden:>6}  {name:<12} {row.ours_s:>10.4f} {row.theirs_s:>10.4f} {row.ratio:>7.3f} {row.high:>10.3f}")


if __name__ == "__main__":
    main()
