"""The event file: what is written is what is read, whatever state the file was left in."""

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from diagnose.events import (
    EndEvent,
    EventLog,
    NoteEvent,
    RunEvent,
    SessionEvent,
    StageEvent,
    StepEvent,
    Tail,
    VerdictEvent,
    from_line,
)

text = st.text(max_size=30)
events = st.one_of(
    st.builds(
        SessionEvent,
        name=text,
        symptom=text,
        candidates=st.lists(text, max_size=3).map(tuple),
        seeds=st.lists(st.integers(0, 99), max_size=3).map(tuple),
        steps=st.integers(0, 99),
    ),
    st.builds(StageEvent, stage=text, status=text, detail=text),
    st.builds(RunEvent, run=text, fault=st.none() | text, seed=st.integers(0, 99), status=text, reason=text),
    st.builds(
        StepEvent,
        run=text,
        step=st.integers(1, 99),
        steps=st.integers(1, 99),
        data=st.dictionaries(text, st.none() | st.floats(allow_nan=False, allow_infinity=False), max_size=3),
    ),
    st.builds(NoteEvent, text=text, level=text, mend=text),
    st.builds(VerdictEvent, verdict=text, summary=text),
    st.builds(EndEvent, status=text, exit_code=st.integers(0, 130)),
)


@given(events)
def test_every_event_survives_its_line(event):
    line = event.to_line()
    assert "\n" not in line
    assert from_line(line) == event


def test_non_finite_numbers_are_null():
    event = StepEvent(run="r", step=1, steps=2, data={"a": math.nan, "b": math.inf, "c": 1.0})
    assert json.loads(event.to_line())["data"] == {"a": None, "b": None, "c": 1.0}


def test_unknown_kinds_and_fields_are_ignored_and_broken_lines_survived():
    assert from_line('{"kind": "dance", "t": 1}') is None
    assert from_line('{"kind": "note", "t": 1') is None
    assert from_line('{"kind": "note", "t": 1}') is None  # a field is missing
    assert from_line("[]") is None
    assert from_line('{"kind": "note", "t": 1, "text": "x", "colour": "red"}') == NoteEvent(t=1, text="x")


def test_a_tail_hands_out_each_event_once_and_waits_for_half_a_line(tmp_path):
    path = tmp_path / "events.jsonl"
    tail = Tail(path)
    assert tail.poll() == []
    line = NoteEvent(text="grüße").to_line().encode() + b"\n"
    with path.open("ab", buffering=0) as file:
        file.write(line + line[:-12])  # ends inside a two-byte character's string
        assert [event.text for event in tail.poll()] == ["grüße"]
        file.write(line[-12:])
        assert [event.text for event in tail.poll()] == ["grüße"]
        assert tail.poll() == []


def test_a_new_writer_does_not_glue_its_first_event_to_a_torn_line(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"t":1,"kind":"note","text":"whole"}\n{"t":2,"kind":"no')
    log = EventLog(path)
    log.append(NoteEvent(text="after"))
    log.close()
    assert [event.text for event in Tail(path).poll()] == ["whole", "after"]
