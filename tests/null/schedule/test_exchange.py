"""torch's CSV form: what is written is read again, and no text makes trouble. (tests/oracle compares with torch.)"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardwise.schedule import ScheduleError, build, dump, load
from shardwise.schedule.exchange import MAX_CHARACTERS

NAMES = ("gpipe", "1f1b", "interleaved:3", "zb-h1", "zb-h2", "zb-v", "dualpipe-v")


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(NAMES), pp=st.integers(1, 6), m=st.integers(1, 14))
def test_round_trip(name: str, pp: int, m: int) -> None:
    schedule = build(name, pp, m)
    again = load(dump(schedule), pp)
    assert replace(again, name=name, overlaps=schedule.overlaps) == schedule
    if m >= 2 * pp:
        assert again.overlaps is schedule.overlaps
    assert dump(again) == dump(schedule)


def test_form() -> None:
    assert dump(build("1f1b", 2, 2)) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert "(0F3;3B1)OVERLAP_F_B" in dump(build("dualpipe-v", 2, 4)).splitlines()[0]
    assert load(" 0F0 , ,0F1,,0B0,0B1\r\n,1F0,1B0,1F1,1B1\r\n").rows == build("1f1b", 2, 2).rows


def test_two_copies_have_no_such_form() -> None:
    with pytest.raises(ValueError, match=r"2 copies of the weights.*use dualpipe-v"):
        dump(build("dualpipe", 2, 4))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "need 0 F, not 0"),
        (",,,\n", "need 0 F, not 0"),
        ("0F0,0B0,0X1\n1SEND_F0", "rank 0, cell 2: '0X1' is no action.*rank 1, cell 0: 1SEND_F0 is no compute action"),
        ("9999999F0,0B9999999", "10000000 stages and 10000000 micro-batches need 100000000000000 F, not 1"),
        ("99999999999999999999F0", "is no action such as 2F0"),
        ("\uff10F0,0B0", "is no action such as 2F0"),
        ("0F0,0B0\n1F0,1B0\n,", r"ranks hold \[1, 1, 0\] stages"),
        ("0F0,0B0,1F0\n1B0", r"stage 1 runs on ranks \[0, 1\]"),
        ("0F0,2F0,0B0,2B0,0F0", "no rank runs stage 1"),
        ("0F0,0F0,0B0", "1 stages and 1 micro-batches need 1 F, not 2"),
        ("0F0", "stage 0, micro-batch 0: 1 F, 0 B, 0 W, 0 BW"),
        ("0B0,0F0", "deadlock"),
        ("(0F0;0B0)OVERLAP_F_B,0F1,0B1", "0F0 and 0B0 cannot run as one"),
        ("0F0,0B0,(0B1;0F1)OVERLAP_F_B", "overlaps other actions than F and B"),
        ("(0F0)OVERLAP_F_B", "is no action such as"),
        ("0F0,0F1,0B0,(0F2;0B1)OVERLAP_F_B,0F3,0B2,0B3", "0F3 and 0B2 are not written as a pair"),
    ],
)
def test_faults(text: str, fault: str) -> None:
    with pytest.raises(ScheduleError, match=fault):
        load(text)


def test_the_number_of_ranks_and_the_length() -> None:
    with pytest.raises(ScheduleError, match="2 lines for 4 ranks"):
        load(dump(build("1f1b", 2, 2)), 4)
    with pytest.raises(ScheduleError, match=f"at most {MAX_CHARACTERS} are read"):
        load("," * (MAX_CHARACTERS + 1))
    with pytest.raises(ScheduleError, match="and 95 more"):
        load(",".join(["x"] * 100))


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.sampled_from("0123FIWB();,\n OVERLAP_F_B"), max_size=60))
def test_any_text_loads_or_says_why(text: str) -> None:
    try:
        schedule = load(text)
    except ScheduleError:
        return
    assert load(dump(schedule)).rows == schedule.rows


@settings(max_examples=100, deadline=None)
@given(name=st.sampled_from(NAMES), data=st.data())
def test_a_cell_less_is_found(name: str, data: st.DataObject) -> None:
    lines = [line.split(",") for line in dump(build(name, 3, 6)).splitlines()]
    rank = data.draw(st.integers(0, 2))
    place = data.draw(st.integers(0, len(lines[rank]) - 1))
    lost = lines[rank].pop(place)
    assume(lost)
    with pytest.raises(ScheduleError):
        load("\n".join(map(",".join, lines)))
