"""What the field's rules of thumb say comes out of the search, without having been put in.

Sources: PTD-P is Narayanan et al. 2104.04473 (table 1, takeaways 1 and 2); for the torus, the scaling book (J. Austin
et al., How To Scale Your Model, chapters on training and on TPUs).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.cluster import Cluster, Level, level_of_group, parse_cluster
from shardwise.model.hf import gpt, load_model
from shardwise.plan.job import PRECISIONS, Job
from shardwise.plan.layout import Layout
from shardwise.search.limits import read_limits
from shardwise.search.phrases import strides
from shardwise.search.recipe import field_recipe
from shardwise.search.solve import solve

pytestmark = pytest.mark.golden

PTD = read_limits(
    ["zero=0 cp=1 sp=0 recompute=full"],
    [f"schedule={name}" for name in ("zb-h1", "zb-h2", "zb-v", "dualpipe-v", "dualpipe")],
)
"""What Megatron-LM had in 2021: 1F1B or interleaved, whole layers recomputed, no ZeRO."""

TABLE_1 = ((30, 3072, 32, 64, 512, 1), (40, 6144, 48, 256, 1024, 1), (80, 12288, 96, 1536, 2304, 8))
"""layers, hidden, heads, GPUs, batch, and the pipeline that was used: the models of 3.6B, 18.4B and 145.6B."""


def best(job: Job) -> Layout:
    return solve(job, keep=1).best[0].layout


def step_s(model: str, cluster: Cluster) -> float:
    """The best step of 4,096 tokens for each device, without tensor, context or pipeline parallelism."""
    job = Job(load_model(model), cluster, 4096, cluster.world_size)
    return solve(job, keep=1, limits=read_limits(["tp=1 cp=1 pp=1"], [])).best[0].step.total_s


def crossing(cluster: Cluster, layout: Layout) -> set[str]:
    """Axes whose groups reach over the outermost level."""
    stride = strides(layout)
    wide = [(axis, degree) for axis, degree in layout.mesh.degrees if degree > 1]
    return {axis for axis, n in wide if level_of_group(cluster, [(stride[axis], n)]) is cluster.levels[-1]}


def test_ptd_p_keeps_tensor_parallelism_inside_a_node_and_deepens_the_pipeline() -> None:
    """Takeaway 1, on 8-GPU nodes; and no step of theirs is more than a fifth behind the best one of the same means."""
    stages: list[int] = []
    for layers, hidden, heads, devices, batch, pp in TABLE_1:
        cluster = parse_cluster(f"{devices // 8}x8xa100")
        job = Job(gpt(layers, hidden, heads), cluster, 2048, batch, PRECISIONS["fp16"])
        layout = solve(job, keep=1, limits=PTD).best[0].layout
        assert layout.tp <= 8
        assert layout.pp >= pp
        stages.append(layout.pp)
    assert stages == sorted(set(stages))


@pytest.mark.parametrize(("model", "batch"), [("llama-3.1-8b", 512), ("mixtral-8x7b", 1024)])
def test_only_the_pipeline_or_replicas_lie_over_a_slow_link(model: str, batch: int) -> None:
    """Two data centres of eight nodes each, 12.5 Gb/s a device between them."""
    inside = parse_cluster("16x8xh100")
    levels = (inside.levels[0], replace(inside.levels[1], size=64), Level("wan", 128, 1.5625, 5e-3))
    cluster = replace(inside, levels=levels)
    layout = best(Job(load_model(model), cluster, 8192, batch))
    assert crossing(cluster, layout) in ({"pp"}, {"dp_replicate"})


def test_a_torus_wants_no_pipeline() -> None:
    """The scaling book: FSDP, with tensor parallelism where the batch has few tokens a chip."""
    job = Job(load_model("gemma-2-27b"), parse_cluster("v5p:16x16x24"), 8192, 6144)
    layout = best(job)
    assert layout.pp == 1
    assert layout.zero == 3
    recipe = field_recipe(job)
    assert recipe is not None
    assert recipe.layout.pp == 1


def test_experts_like_a_switch_better_than_a_torus() -> None:
    """The same chips with as many bytes a second, over the links of a torus or through a switch, state and experts cut
    over all of them: the dense model does not care, an all-to-all has to cross the middle of the torus."""
    torus = parse_cluster("v5p:8x8x8")
    links = 6 * torus.levels[0].bandwidth_GBps_per_device
    switch = replace(torus, levels=(Level("switch", 512, links, torus.levels[0].latency_s),))
    dense, routed = (step_s(m, torus) / step_s(m, switch) for m in ("qwen3-32b", "qwen3-235b-a22b"))
    assert dense == pytest.approx(1, abs=0.05)
    assert routed > 1.2
