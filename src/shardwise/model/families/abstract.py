"""A matrix stack for the whiteboard: blocks of D -> F -> D and nothing else, as in the scaling book's rooflines."""

from __future__ import annotations

from shardwise.model.blocks import column, embedding, head, row, tensor, weight
from shardwise.model.families.common import Heads, Trunk, assemble
from shardwise.model.feed_forward import mlp
from shardwise.model.read import MAX_LAYERS, Reader
from shardwise.model.spec import EMBEDDING, HEAD, LAYER, Block, Model, Op, Role

KEYS = ("D", "F", "L", "G", "V")
"""Width, inner width, blocks, 1 for a gate (three products a block instead of two), vocabulary (0: no ends)."""


def matrices(name: str, read: Reader) -> Model:
    """No norms, no attention, no residual; without a vocabulary the ends hold nothing and do nothing."""
    width, inner = read.integer("D"), read.integer("F")
    layers = read.integer("L", most=MAX_LAYERS)
    gated = read.integer("G", default=0, least=0, most=1)
    vocab = read.integer("V", default=0, least=0)
    trunk = Trunk("mlp", {"h": width, "f": inner, "v": vocab}, Heads(inner, inner, {}), layers, False, 1e-6)
    ends = (embedding(), head(False)) if vocab else (_nothing(EMBEDDING), _nothing(HEAD))
    return assemble(name, read, trunk, [_block(bool(gated))], [LAYER] * layers, ends=ends, rope_theta=0.0)


def _block(gated: bool) -> Block:
    source = tensor("x", "th")
    if gated:
        return Block(LAYER, (source,), mlp()("x", None, "y"), recomputable=True)
    ops = (
        column("mlp.up", source, (tensor("p", "Tf"),), weight("mlp.up", "fh")),
        row("mlp.down", "p", None, "y", weight("mlp.down", "hf")),
    )
    return Block(LAYER, (source,), ops, recomputable=True)


def _nothing(kind: str) -> Block:
    """A unit without parameters, work or saved tensors."""
    made = tensor("x", "th") if kind == EMBEDDING else tensor("loss", "1", Role.ACCUMULATE)
    source = tensor("ids", "T", Role.INDEX) if kind == EMBEDDING else tensor("x", "th")
    return Block(kind, (source,), (Op(name="", kind="nothing", inputs=(source.name,), outputs=(made,)),))
