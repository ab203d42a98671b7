"""`check` proves that a schedule, or its rows with communication, is complete and runs to its end.

It knows nothing of how `add_p2p` made the rows: it compares them with what the stages need of one another, and plays
the rule of the point-to-point queue (`graph.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from shardwise.schedule.errors import ScheduleError
from shardwise.schedule.graph import Message, Wire, describe, graph_of
from shardwise.schedule.table import P2P, Action, Op, Row, Schedule, Step


def check(schedule: Schedule, rows: Sequence[Row] | None = None) -> None:
    """Raise `ScheduleError`, with all findings of the first kind found, unless:

    each stage and micro-batch has one F and one BW, or one F, B and W, on the rank of the stage; every input is there
    before its action; and, if `rows` are given: they hold the schedule's actions in its order, each message that
    crosses ranks has one SEND, after its action, and one RECV, and the queues never deadlock.
    """
    _fail(schedule, _actions(schedule))
    if rows is not None:
        _fail(schedule, _order(schedule, rows))
        _fail(schedule, _messages(schedule, rows))
        _fail(schedule, _early_sends(rows))
    graph_of(schedule.rows if rows is None else rows, schedule)


def _fail(schedule: Schedule, findings: Iterator[str]) -> None:
    found = list(findings)
    if found:
        more = f"; and {len(found) - 5} more" if len(found) > 5 else ""
        raise ScheduleError(f"{schedule.name}: {'; '.join(found[:5])}{more}")


def _actions(schedule: Schedule) -> Iterator[str]:
    """Wrong rank, wrong count, or a stage that mixes BW with B and W for one micro-batch."""
    for rank, row in enumerate(schedule.rows):
        held = [{s for s, r in enumerate(copy) if r == rank} for copy in schedule.placement]
        strange = (a for a in row if a.stage not in held[schedule.copy_of(a.micro_batch)])
        yield from (f"rank {rank} runs {a} but holds stages {_held(schedule, rank, a)}" for a in strange)
    count = Counter(action for row in schedule.rows for action in row)
    expected = {(s, i) for s in range(schedule.stages) for i in range(schedule.micro_batches)}
    for stage, i in sorted({(a.stage, a.micro_batch) for a in count} - expected):
        yield f"stage {stage} has no micro-batch {i}"
    for stage, i in sorted(expected):
        f, b, w, bw = (count[Action(op, stage, i)] for op in (Op.F, Op.B, Op.W, Op.BW))
        if (f, b, w, bw) not in {(1, 1, 1, 0), (1, 0, 0, 1)}:
            yield f"stage {stage}, micro-batch {i}: {f} F, {b} B, {w} W, {bw} BW (needs F and BW, or F, B and W)"


def _held(schedule: Schedule, rank: int, action: Action) -> str:
    if schedule.copies == 1:
        return str(schedule.stages_of(rank))
    copy = schedule.copy_of(action.micro_batch)
    stages = tuple(s for s, r in enumerate(schedule.placement[copy]) if r == rank)
    return f"{stages} of copy {copy}, which takes micro-batch {action.micro_batch}"


def _order(schedule: Schedule, rows: Sequence[Sequence[Step]]) -> Iterator[str]:
    if len(rows) != schedule.pp:
        yield f"{len(rows)} rows for {schedule.pp} ranks"
    for rank, (row, original) in enumerate(zip(rows, schedule.rows, strict=False)):
        actions = tuple(step for step in row if isinstance(step, Action))
        if actions != original:
            pairs = zip((*actions, None), (*original, None), strict=False)
            index, (have, want) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
            yield f"rank {rank}, action {index} is {have or 'missing'}, the schedule has {want or 'none'}"


def _messages(schedule: Schedule, rows: Sequence[Sequence[Step]]) -> Iterator[str]:
    """Each output needed on another rank has exactly one SEND and one RECV, and there are no others."""
    needed, sent, received = set(_needed(schedule)), Counter[Wire](), Counter[Wire]()
    for rank, o in _operations(rows):
        if o.send:
            sent[rank, o.peer, o.message] += 1
        else:
            received[o.peer, rank, o.message] += 1
    for count, verb in ((sent, "SEND"), (received, "RECV")):
        for wire in sorted(w for w in needed | set(count) if count[w] != (w in needed)):
            source, target, (tensor, stage, i) = wire
            what = f"{tensor} of stage {stage}, micro-batch {i} from rank {source} to rank {target}"
            yield f"{count[wire]} {verb} instead of {int(wire in needed)}: {what}"


def _needed(schedule: Schedule) -> Iterator[Wire]:
    for i in range(schedule.micro_batches):
        for stage, (lower, upper) in enumerate(pairwise(schedule.placement[schedule.copy_of(i)])):
            if lower != upper:
                yield lower, upper, (Op.F, stage, i)
                yield upper, lower, (Op.B, stage + 1, i)


def _operations(rows: Sequence[Sequence[Step]]) -> Iterator[tuple[int, P2P]]:
    for rank, row in enumerate(rows):
        for step in row:
            if not isinstance(step, Action):
                yield from ((rank, operation) for operation in step)


def _early_sends(rows: Sequence[Sequence[Step]]) -> Iterator[str]:
    """A SEND that stands before the action that makes its tensor would send what is not there."""
    for rank, row in enumerate(rows):
        made: set[Message] = set()
        for step in row:
            if isinstance(step, Action) and step.op is Op.W:
                continue
            if isinstance(step, Action):
                made.add((Op.F if step.op is Op.F else Op.B, step.stage, step.micro_batch))
            else:
                early = (o for o in step if o.send and o.message not in made)
                yield from (f"rank {rank}: {describe(o)} before it is made" for o in early)
