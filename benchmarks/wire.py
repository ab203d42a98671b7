"""Bytes on the wire beside the ledger's minimum: gloo ranks, each in a network namespace of its own.

Every namespace has one link, a veth pair to a bridge, and only gloo's connections use it: ranks find each other by a
file. What a rank sends is read from its link's counters. Headers are taken off by the packet, 66 bytes each: Ethernet
14, IPv4 20, TCP with timestamps 32. A packet is what the rank's kernel hands the link, with one header, whether or not
it would be cut further on. Segments that TCP sent again are taken off too, by its own counter; a busy machine has some.
A window of one step is taken from a longer one, so that opening, closing and waiting, and the barriers around both,
fall out.

The minimum that one rank sends in a collective of n ranks over S bytes: (n-1)/n S of an all-gather, a reduce-scatter
or an all-to-all, 2 (n-1)/n S of an all-reduce (Chan et al. 2007, section 4), S of a send. Which ones there are, and of
how many bytes, is the predicted ledger's: no rank is asked what it sends.

Runs as root of a user namespace of its own, so nothing outside is touched and nothing is left over. Exits with 2 where
the system allows none or lacks a tool, with 4 where a rank is off by more than the bound.

    python benchmarks/wire.py [--steps 4] [--only ZeRO] [--precision bf16 fp32] [--bound 0.03]
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import shutil
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardwise.account.comm import predict_ledger
from shardwise.cluster import parse_cluster
from shardwise.collective import Collective, Kind, Labels
from shardwise.model.hf import from_config
from shardwise.plan.job import PRECISIONS, Job
from shardwise.plan.layout import parse
from shardwise.train.distributed import close_world, open_world
from shardwise.train.launch import launch
from shardwise.train.rank import build_rank, train_step

LAYOUTS = {
    "data parallel": "dp=2 zero=0 mb=2",
    "ZeRO-1": "dp=2 zero=1 mb=2",
    "ZeRO-2": "dp=2 zero=2 mb=2",
    "ZeRO-3": "dp=2 zero=3 mb=2",
    "tensor parallel": "tp=2 sp=0 mb=2",
    "with sequence parallel": "tp=2 mb=2",
    "with full recompute": "tp=2 mb=2 recompute=full",
    "1F1B": "pp=2 mb=2",
    "interleaved": "pp=2 schedule=interleaved:2 mb=2",
    "ZB-H1": "pp=2 schedule=zb-h1 mb=2",
    "ZB-V": "pp=2 schedule=zb-v mb=2",
    "DualPipe": "pp=2 schedule=dualpipe mb=2",
    "data parallel, 4 ranks": "dp=4 zero=0 mb=1",
    "ZeRO-3, 4 ranks": "dp=4 zero=3 mb=1",
    "HSDP": "dp_replicate=2 dp_shard=2 zero=3 mb=1",
    "tensor parallel, 4 ranks": "tp=4 mb=2",
    "1F1B, 4 ranks": "pp=4 mb=1",
    "tensor x pipeline": "tp=2 pp=2 mb=2",
}
CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
}
SEQ_LEN, BATCH = 128, 8
LINK, HEADER_BYTES = "wire", 14 + 20 + 32
SEGMENT_BYTES = 1500 - 20 - 32
MIB = 2**20
CLONE_NEWNET = 0x40000000
INSIDE = "SHARDWISE_WIRE_INSIDE"
TOOLS = ("unshare", "nsenter", "ip")
SETTLE_S = 0.05
"""After a barrier, for the last of its packets."""


class Count(NamedTuple):
    """What a link has sent, headers and all."""

    bytes: int
    packets: int
    resent: int
    """segments sent again"""

    @property
    def payload(self) -> int:
        return self.bytes - HEADER_BYTES * self.packets - SEGMENT_BYTES * self.resent

    def less(self, other: Count) -> Count:
        return Count(*(a - b for a, b in zip(self, other, strict=True)))


# --------------------------------------------------------------------------------------------------------- namespaces


def enter() -> None:
    """Start again as root of a new user and network namespace; exits with 2 where that is not to be had."""
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        refuse(f"{', '.join(missing)} not found: install util-linux and iproute2")
    command = ["unshare", "--map-root-user", "--net"]
    trial = [*command, "ip", "link", "add", "hub", "type", "bridge"]
    tried = subprocess.run(trial, check=False, capture_output=True, text=True)
    if tried.returncode:
        refuse(f"no network namespace with a bridge in it: {tried.stderr.strip()}")
    os.environ[INSIDE] = "1"
    os.execvp(command[0], [*command, sys.executable, *sys.argv])


def refuse(why: str) -> None:
    print(f"cannot measure here: {why}", file=sys.stderr)
    raise SystemExit(2)


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)


def no_chatter() -> None:
    """No IPv6 in this namespace: it would look for neighbours and routers on the links."""
    switch = Path("/proc/sys/net/ipv6/conf/default/disable_ipv6")
    if switch.exists():
        switch.write_text("1")


def plug_in(rank: int) -> None:
    """Take this process into a namespace of its own, with a link to the bridge in its parent's."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
    no_chatter()
    parent, port = os.getppid(), f"port{rank}"
    ip(f"link add {LINK} type veth peer name {port} netns {parent}")
    ip(f"address add 10.0.0.{rank + 1}/24 dev {LINK}")
    ip("link set lo up")
    ip(f"link set {LINK} up")
    plug = ["ip", "link", "set", port, "master", "hub", "up"]
    subprocess.run(["nsenter", "--target", str(parent), "--net", *plug], check=True)
    os.environ["GLOO_SOCKET_IFNAME"] = LINK


def sent() -> Count:
    """Once all ranks are here. From /proc: /sys shows the namespace in which it was mounted."""
    dist.barrier()
    time.sleep(SETTLE_S)
    lines = (line.partition(":") for line in Path("/proc/self/net/dev").read_text().splitlines())
    link = next(after.split() for name, _, after in lines if name.strip() == LINK)
    names, values = (
        line.split() for line in Path("/proc/self/net/snmp").read_text().splitlines() if line[:4] == "Tcp:"
    )
    return Count(int(link[8]), int(link[9]), int(values[names.index("RetransSegs")]))


# ---------------------------------------------------------------------------------------------------------- one layout


def job_of(text: str, precision: str) -> Job:
    cluster = parse_cluster(f"{parse(text).world_size}xcpu")
    return Job(from_config(CONFIG, "llama-256"), cluster, SEQ_LEN, BATCH, PRECISIONS[precision])


def predicted(job: Job, text: str, rank: int) -> int:
    """Bytes that one rank has to send in a step."""
    return sum(count * least(collective) for collective, count in predict_ledger(job, parse(text), rank).items())


def least(collective: Collective) -> int:
    n, payload = len(collective.ranks), collective.payload_bytes
    share = (n - 1) * payload // n
    return {Kind.ALL_REDUCE: 2 * share, Kind.SEND: payload, Kind.RECV: 0}.get(collective.kind, share)


def measure(rank: int, world_size: int, init_method: str, text: str, precision: str, steps: int) -> Count:
    """What one rank sends in `steps` steps, headers and all."""
    torch.set_num_threads(1)
    plug_in(rank)
    job = job_of(text, precision)
    built = build_rank(job, parse(text), open_world("gloo", rank, world_size, init_method), Labels())
    tokens = torch.randint(CONFIG["vocab_size"], (built.micro_batches, built.layout.mb * SEQ_LEN))
    readings = [sent()]
    for count in (1, 1, 1 + steps):  # the first one opens what is opened late
        for _ in range(count):
            train_step(built, tokens if built.needs_ids else None, tokens if built.needs_targets else None)
        readings.append(sent())
    close_world()
    ip(f"link delete {LINK}")  # the kernel would take its time, and its peer's name be taken
    _, short, long = (after.less(before) for before, after in pairwise(readings))
    return long.less(short)


def main() -> None:
    parser = argparse.ArgumentParser(description="Bytes on the wire beside the least that the ledger predicts.")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--only", default="", help="rows whose name or layout has this in it")
    parser.add_argument("--precision", nargs="+", default=["bf16"], choices=["bf16", "fp32", "fp64"])
    parser.add_argument("--bound", type=float, default=0.03)
    options = parser.parse_args()
    if INSIDE not in os.environ:
        enter()
    no_chatter()
    ip("link add hub type bridge")
    ip("link set hub up")
    print(f"{CONFIG['num_hidden_layers']} layers of {CONFIG['hidden_size']}, {BATCH} sequences of {SEQ_LEN} a step;")
    print(f"{platform.machine()}, torch {torch.__version__}, gloo; MiB that all ranks send in a step, headers apart")
    heads = "".join(f" {head:>8}" for head in ("least", "sent", "ratio", "worst", "headers", "again"))
    print(f"{'':<24} {'layout':<40} {'dtype':<5}{heads}")
    far = 0
    for name, text in LAYOUTS.items():
        if options.only in f"{name} {text}":
            for precision in options.precision:
                far += not row(name, text, precision, options.steps, options.bound)
    raise SystemExit(4 if far else 0)


def row(name: str, text: str, precision: str, steps: int, bound: float) -> bool:
    """Print one; whether every rank is within the bound."""
    n, job = parse(text).world_size, job_of(text, precision)
    counts: list[Count] = launch(n, measure, (text, precision, steps), timeout_s=300)
    wanted = [predicted(job, text, rank) for rank in range(n)]
    found = [count.payload / steps for count in counts]
    headers = sum(HEADER_BYTES * count.packets for count in counts) / steps
    again = sum(SEGMENT_BYTES * count.resent for count in counts) / steps
    ratios = [f / w for f, w in zip(found, wanted, strict=True)]
    worst = max(ratios, key=lambda r: abs(r - 1))
    print(
        f"{name:<24} {text:<40} {precision:<5} {sum(wanted) / MIB:>8.3f} {sum(found) / MIB:>8.3f} "
        f"{sum(found) / sum(wanted):>8.4f} {worst:>8.4f} {headers / MIB:>8.3f} {again / MIB:>8.3f}",
        flush=True,
    )
    return abs(worst - 1) <= bound


if __name__ == "__main__":
    main()
