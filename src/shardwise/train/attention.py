"""Rotary embedding and causal attention, with an explicit list of what it saves whatever kernel runs inside.

`kernel_of` picks the kernel: torch's for CPUs or for GPUs, or one of ours, over blocks of queries, which runs on both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

Rope = tuple[torch.Tensor, torch.Tensor]
"""(cos, sin) [s, 1, d / 2]"""


@dataclass(frozen=True, slots=True)
class Scores:
    """How scores are made: sequences of `seq_len`, heads of `head_dim`; `scale` None is 1 / sqrt(head_dim).

    `window`: keys that a query sees at most, itself among them; `cap`: cap * tanh(score / cap) (Gemma 2, 2408.00118).
    """

    seq_len: int
    head_dim: int
    scale: float | None = None
    window: int | None = None
    cap: float | None = None

    @property
    def factor(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """[T, heads * d] -> [b, s, heads, d], a view."""
        return x.view(-1, self.seq_len, x.shape[1] // self.head_dim, self.head_dim)


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, back: bool = False) -> None:
    """Rotary embedding in place (Su et al. 2021, eq. 34; halves as in Llama's published weights).

    x [b, s, heads, d]; cos, sin [s, 1, d / 2]. `back` turns the other way: the transpose, for gradients.
    """
    first, second = x.chunk(2, -1)
    turned = first * sin
    sign = 1 if back else -1
    first.mul_(cos).addcmul_(second, sin, value=sign)
    second.mul_(cos)
    if back:
        second.sub_(turned)
    else:
        second.add_(turned)


def turned_(x: torch.Tensor, rope: Rope | None, scores: Scores) -> torch.Tensor:
    """x [T, heads * d] itself, its rotation (if there is one) written into it."""
    if rope is not None:
        rotate_(scores.split(x), *rope)
    return x


class _Attention(torch.autograd.Function):
    """Rotary embedding and causal attention with grouped kv heads; saves q, k, v as rotated, the output and its LSE."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rope: Rope | None, scores: Scores
    ) -> torch.Tensor:
        # Nobody else holds q and k: they are fresh outputs of the products, or of their norms.
        turned_(q, rope, scores)
        turned_(k, rope, scores)
        kernel = _KERNELS[kernel_of(q.device.type, q.dtype, scores)]
        o, lse, *random = kernel.forward(q, k, v, scores)
        ctx.save_for_backward(q, k, v, o, lse)
        # A few bytes that no account names and nothing reads, for nothing is dropped out: not among what is saved.
        ctx.random = random
        ctx.rope, ctx.scores, ctx.run_backward = rope, scores, kernel.backward
        return o

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        q, k, v, o, lse = ctx.saved_tensors
        dq, dk, dv = ctx.run_backward(gradients[0], (q, k, v, o, lse, *ctx.random), ctx.scores)  # [b, s, heads, d]
        if ctx.rope is not None:
            rotate_(dq, *ctx.rope, back=True)
            rotate_(dk, *ctx.rope, back=True)
        return dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape), None, None


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rope: Rope | None, scores: Scores) -> torch.Tensor:
    """q [T, a * d / tp], k, v [T, kv * d / tp] -> [T, a * d / tp]. Writes the rotation into q and k."""
    return _Attention.apply(q, k, v, rope, scores)


# --------------------------------------------------------------------------------------------------------- which kernel

KernelName = Literal["flash on a CPU", "flash on a GPU", "blocked"]

FLASH_DTYPES = (torch.bfloat16, torch.float16)
FLASH_HEAD_DIM, FLASH_MULTIPLE = 256, 8
"""Of torch's flash kernel for GPUs: the widest head, and what its width is a multiple of."""


def kernel_of(device: str, dtype: torch.dtype, scores: Scores) -> KernelName:
    """Which one a type of device takes. torch's know no window and no cap; that for CPUs takes every floating dtype."""
    if scores.window is not None or scores.cap is not None:
        return "blocked"
    if device != "cuda":
        return "flash on a CPU"  # of meta tensors too: its output and its sums have the sizes of the others'
    fits = scores.head_dim <= FLASH_HEAD_DIM and scores.head_dim % FLASH_MULTIPLE == 0
    return "flash on a GPU" if dtype in FLASH_DTYPES and fits else "blocked"


Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class _Kernel(NamedTuple):
    """`forward(q, k, v, scores)`: (output [T, a * d], its log-sum-exp of T * a), and what its backward wants beside.
    `backward(gradient, (q, k, v, *what forward made), scores)`: gradients [b, s, heads, d]."""

    forward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Scores], tuple[torch.Tensor, ...]]
    backward: Callable[[torch.Tensor, tuple[torch.Tensor, ...], Scores], Gradients]


# ------------------------------------------------------------------------------------------------------ torch's kernels


def _flash_on_gpu(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores) -> tuple[torch.Tensor, ...]:
    """Behind the sums come the state and the offset of a random generator."""
    heads = (scores.split(x).transpose(1, 2) for x in (q, k, v))  # [b, heads, s, d]
    made = torch.ops.aten._scaled_dot_product_flash_attention(*heads, 0.0, True, scale=scores.scale)
    out, lse, _, _, _, _, seed, offset, _ = made
    return out.transpose(1, 2).reshape(q.shape), lse, seed, offset


def _flash_on_gpu_backward(gradient: torch.Tensor, saved: tuple[torch.Tensor, ...], scores: Scores) -> Gradients:
    *values, lse, seed, offset = saved
    heads = (scores.split(x).transpose(1, 2) for x in (gradient, *values))
    rows = None, None, scores.seq_len, scores.seq_len  # of sequences that all have one length
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        *heads, lse, *rows, 0.0, True, seed, offset, scale=scores.scale
    )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores) -> tuple[torch.Tensor, torch.Tensor]:
    heads = (scores.split(x).transpose(1, 2) for x in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*heads, 0.0, True, scale=scores.scale)
    return out.transpose(1, 2).reshape(q.shape), lse


def _flash_backward(gradient: torch.Tensor, saved: tuple[torch.Tensor, ...], scores: Scores) -> Gradients:
    *values, lse = saved
    heads = (scores.split(x).transpose(1, 2) for x in (gradient, *values))
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *heads, lse, 0.0, True, scale=scores.scale
    )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


# ---------------------------------------------------------------------------------------------------------- our kernel
#
# A block is head_dim queries of every sequence, so that the scores of all its heads take as many elements as q; the
# declaration of "attention.core" can then name them. Sums run in the accumulation dtype.


def _by_heads(x: torch.Tensor, scores: Scores, kv_heads: int) -> torch.Tensor:
    """A wide copy [b * kv, s * g, d] of x [T, kv * g * d]: queries of one position and kv head lie together."""
    parts = scores.split(x).unflatten(2, (kv_heads, -1)).transpose(1, 2)  # [b, kv, s, g, d]
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(parts.shape, dtype=wide).copy_(parts).flatten(2, 3).flatten(0, 1)


def _by_tokens(x: torch.Tensor, like: torch.Tensor, scores: Scores, kv_heads: int) -> torch.Tensor:
    """The way back: a copy [b, s, heads, d] in the dtype of `like` [T, heads * d]."""
    out = torch.empty_like(like)
    parts = scores.split(out).unflatten(2, (kv_heads, -1)).transpose(1, 2)
    parts.copy_(x.view(parts.shape))
    return scores.split(out)


@dataclass(frozen=True, slots=True)
class _Block:
    """Some queries and the keys that they see: their ranges in a sequence."""

    start: int
    stop: int
    low: int
    scores: Scores

    def queries(self, x: torch.Tensor, groups: int) -> torch.Tensor:
        return x[:, self.start * groups : self.stop * groups]

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, self.low : self.stop]

    def room(self, buffer: torch.Tensor, n: int, groups: int) -> torch.Tensor:
        """[n, queries * groups, keys] in a flat buffer."""
        rows, keys = (self.stop - self.start) * groups, self.stop - self.low
        return buffer[: n * rows * keys].view(n, rows, keys)

    def fill(self, room: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Scores as the softmax takes them."""
        torch.bmm(q, k.transpose(1, 2), out=room).mul_(self.scores.factor)
        if self.scores.cap is not None:
            room.div_(self.scores.cap).tanh_().mul_(self.scores.cap)
        self._hide(room, later=True)
        if self.scores.window is not None:
            self._hide(room, later=False)
        return room

    def _hide(self, room: torch.Tensor, later: bool) -> None:
        """Keys behind a query's own place, or ahead of its window."""
        rows, keys, first = self.stop - self.start, self.stop - self.low, self.start - self.low
        hidden = torch.ones(rows, keys, dtype=torch.bool, device=room.device)
        if later:
            hidden.triu_(first + 1)
        else:
            hidden.tril_(first - (self.scores.window or 0))
        room.unflatten(1, (rows, -1)).masked_fill_(hidden[:, None], float("-inf"))


def _blocks(scores: Scores) -> Iterator[_Block]:
    for start in range(0, scores.seq_len, scores.head_dim):
        low = 0 if scores.window is None else max(0, start - scores.window + 1)
        yield _Block(start, min(start + scores.head_dim, scores.seq_len), low, scores)


def _blocked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores) -> tuple[torch.Tensor, torch.Tensor]:
    kv_heads = k.shape[1] // scores.head_dim
    qs, ks, vs = (_by_heads(x, scores, kv_heads) for x in (q, k, v))
    lse = qs.new_empty(qs.shape[:2])
    buffer = qs.new_empty(qs.numel())
    for block in _blocks(scores):
        _block_forward(block, qs, block.keys(ks), block.keys(vs), lse, buffer)
    del ks, vs, buffer
    return _by_tokens(qs, q, scores, kv_heads).view(q.shape), lse


def _block_forward(
    block: _Block, qs: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lse: torch.Tensor, buffer: torch.Tensor
) -> None:
    """A block's log-sum-exp into its part of `lse`, its output into the place of its queries, which are done with."""
    groups = qs.shape[1] // block.scores.seq_len
    mine, summed = block.queries(qs, groups), block.queries(lse, groups)
    p = block.fill(block.room(buffer, qs.shape[0], groups), mine, keys)
    torch.logsumexp(p, -1, out=summed)
    p.sub_(summed[..., None]).exp_()
    torch.bmm(p, values, out=mine)


def _blocked_backward(gradient: torch.Tensor, saved: tuple[torch.Tensor, ...], scores: Scores) -> Gradients:
    """Dao et al. (2205.14135), algorithm 4, over blocks of queries."""
    q, k, v, o, lse = saved
    kv_heads = k.shape[1] // scores.head_dim
    qs, gs, ks, vs = (_by_heads(x, scores, kv_heads) for x in (q, gradient, k, v))
    dq = _by_heads(o, scores, kv_heads).mul_(gs)
    delta = dq.sum(-1)  # [b * kv, s * g]
    dk, dv = torch.zeros_like(ks), torch.zeros_like(vs)
    buffers = qs.new_empty(qs.numel()), qs.new_empty(qs.numel())
    for block in _blocks(scores):
        _block_backward(block, (qs, gs, lse, delta), (block.keys(ks), block.keys(vs)), (dq, dk, dv), buffers)
    del qs, gs, ks, vs, delta, buffers
    pairs = ((dq, q), (dk, k), (dv, v))
    found = [_by_tokens(x, like, scores, kv_heads) for x, like in pairs]
    return found[0], found[1], found[2]


def _block_backward(
    block: _Block,
    by_query: tuple[torch.Tensor, ...],
    by_key: tuple[torch.Tensor, torch.Tensor],
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    buffers: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """A block's part of dq [b * kv, s * g, d], set, and of dk and dv [b * kv, s, d], added.

    `by_query`: queries, the output's gradient, log-sum-exp and delta; `by_key`: the block's keys and values.
    """
    dq, dk, dv = gradients
    groups = dq.shape[1] // block.scores.seq_len
    mine, g, lse, delta = (block.queries(x, groups) for x in by_query)
    (keys, values), (factor, cap) = by_key, (block.scores.factor, block.scores.cap)
    p, ds = (block.room(buffer, dq.shape[0], groups) for buffer in buffers)
    block.fill(p, mine, keys).sub_(lse[..., None]).exp_()
    block.keys(dv).baddbmm_(p.transpose(1, 2), g)
    torch.bmm(g, values.transpose(1, 2), out=ds).sub_(delta[..., None]).mul_(p)
    if cap is not None:
        # d tanh = 1 - tanh^2
        torch.bmm(mine, keys.transpose(1, 2), out=p).mul_(factor / cap).tanh_().square_()
        ds.addcmul_(ds, p, value=-1)
    block.keys(dk).baddbmm_(ds.transpose(1, 2), mine, alpha=factor)
    torch.bmm(ds, keys, out=block.queries(dq, groups)).mul_(factor)


_KERNELS: dict[KernelName, _Kernel] = {
    "flash on a CPU": _Kernel(_flash, _flash_backward),
    "flash on a GPU": _Kernel(_flash_on_gpu, _flash_on_gpu_backward),
    "blocked": _Kernel(_blocked, _blocked_backward),
}
