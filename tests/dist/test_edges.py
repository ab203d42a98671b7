"""Table 2, executed: all 16 ordered pairs, forward and backward, against what the placements mean."""

from __future__ import annotations

import itertools

import pytest
import torch

from shardwise.collective import Kind, Labels
from shardwise.mesh import Mesh
from shardwise.placement import Edge, I, Local, P, Placement, R, S, dual, transition
from shardwise.train.comm import Comm
from shardwise.train.redistribute import redistribute
from shardwise.train.threads import run_threads
from shardwise.train.world import World
from tests.support.placements import scatter, whole

torch.set_num_threads(1)
ONE_OF_EACH = (I, R, P, S(0))
PAIRS = list(itertools.product(ONE_OF_EACH, (I, R, P, S(1))))
SHAPE = (8, 12, 3)


def world_of(comm: Comm) -> World:
    mesh = Mesh((("pp", 1), ("dp_replicate", 1), ("dp_shard", 1), ("tp", comm.world_size)))
    return World(mesh, comm, Labels())


def through(edge: Edge, n: int, strided: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """How far output and input gradient are from the value and the gradient that go in; `strided`: not contiguous."""
    generator = torch.Generator().manual_seed(0)
    value, gradient = (torch.randn(SHAPE, dtype=torch.float64, generator=generator) for _ in range(2))

    def lay(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 2).contiguous().transpose(0, 2) if strided else x.contiguous()

    def rank(comm: Comm) -> tuple[torch.Tensor, torch.Tensor]:
        world = world_of(comm)
        x = lay(scatter(value, edge.source, comm.rank, n)).requires_grad_()
        before = x.detach().clone()
        y = redistribute(x, edge, world, ("tp",), "edge")
        dy = lay(scatter(gradient, dual(edge.destination), comm.rank, n))
        kept = dy.clone()
        (dx,) = torch.autograd.grad(y, x, dy)
        assert torch.equal(dy, kept), "the edge wrote into an incoming gradient"
        assert torch.equal(x, before), "the edge wrote into its input"
        return y.detach(), dx

    results = run_threads(n, rank)
    output = whole([y for y, _ in results], edge.destination)
    return output - value, whole([dx for _, dx in results], dual(edge.source)) - gradient


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(("source", "destination"), PAIRS, ids=str)
def test_every_pair_keeps_value_and_gradient(source: Placement, destination: Placement, strided: bool, n: int) -> None:
    for error in through(Edge(source, destination), n, strided):
        assert error.abs().max() <= 1e-12


@pytest.mark.parametrize("n", [2, 4])
def test_all_reduce_is_reduce_scatter_then_all_gather(n: int) -> None:
    """P -> S -> I composes to P -> I, forward and backward."""
    value = torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def rank(comm: Comm) -> tuple[torch.Tensor, ...]:
        world = world_of(comm)
        out: list[torch.Tensor] = []
        for chain in ((P, I), (P, S(0), I)):
            x = scatter(value, P, comm.rank, n).requires_grad_()
            y = x
            for a, b in itertools.pairwise(chain):
                y = redistribute(y, Edge(a, b), world, ("tp",), "edge")
            (dx,) = torch.autograd.grad(y, x, value)
            out += [y.detach(), dx]
        return tuple(out)

    for one, one_back, two, two_back in run_threads(n, rank):
        assert torch.equal(one, two)
        assert torch.equal(one_back, two_back)


def test_the_table_is_its_own_dual() -> None:
    """Reading the backward twice gives the forward again, and a collective's dual is the published one."""
    for source, destination in PAIRS:
        edge = Edge(source, destination)
        assert edge.dual.dual == edge
        assert edge.backward == transition(dual(destination), dual(source))
    published = {
        (I, R): (Local.NOTHING, Kind.ALL_REDUCE),  # Megatron's f (Shoeybi et al. 2019, section 3)
        (P, I): (Kind.ALL_REDUCE, Local.NOTHING),  # Megatron's g
        (S(0), R): (Kind.ALL_GATHER, Kind.REDUCE_SCATTER),  # Korthikanti et al. 2022, section 4.2.2
        (P, S(0)): (Kind.REDUCE_SCATTER, Kind.ALL_GATHER),
        (S(0), S(1)): (Kind.ALL_TO_ALL, Kind.ALL_TO_ALL),
    }
    for (source, destination), (forward, backward) in published.items():
        edge = Edge(source, destination)
        assert (edge.forward, edge.backward) == (forward, backward), str(edge)


def test_uneven_cuts_are_refused() -> None:
    def rank(comm: Comm) -> None:
        x = torch.zeros(5, 4)
        redistribute(x, Edge(P, S(0)), world_of(comm), ("tp",), "edge")

    with pytest.raises(RuntimeError, match="cannot cut dim 0"):
        run_threads(2, rank)
