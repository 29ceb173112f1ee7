"""The two readers, line by line, and the text layer under them."""

import io
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from diagnose.logs import verl_console, verl_file
from diagnose.logs.model import Record, Rejected
from diagnose.logs.registry import readers
from diagnose.logs.sniff import ENOUGH, sniff
from diagnose.logs.text import MAX_LINE, Line, lines, printable, strip

CONSOLE = Path(__file__).parents[1] / "fixtures" / "logs" / "verl_console.log"


def texts(data: bytes) -> list[tuple[int, str]]:
    return [(line.number, line.text) for line in lines(io.BytesIO(data))]


def console(*text: str, whole: bool = True) -> list[Record | Rejected]:
    found = [Line(number, strip(line)) for number, line in enumerate(text, 1)]
    found[-1] = found[-1]._replace(whole=whole)
    return list(verl_console.records(found))


def file(*text: str) -> list[Record | Rejected]:
    return list(verl_file.records(Line(number, line) for number, line in enumerate(text, 1)))


# text


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"a\nb\n", [(1, "a"), (2, "b")]),
        (b"a\r\n\r\nb", [(1, "a"), (3, "b")]),
        (b" 10%|#\r 20%|##\rmetrics\nnext\n", [(1, "10%|#"), (1, "20%|##"), (1, "metrics"), (2, "next")]),
        (b"\x1b[2m\x1b[36m(x pid=1)\x1b[0m a\x00b\x07\n", [(1, "(x pid=1) ab")]),
        (b"\x1b]0;title\x07a\x1b]8;;http://x\x1b\\b\n", [(1, "ab")]),
        (b"\xef\xbb\xbfa\n", [(1, "a")]),
        ("a\nż\n".encode("utf-16"), [(1, "a"), (2, "ż")]),
        (b"caf\xe9 \xc5\xbc\n", [(1, "caf\ufffd ż")]),
        (b"", []),
        (b"\n\n\x00\n", []),
    ],
)
def test_lines_are_clean_whatever_the_bytes(data: bytes, expected: list[tuple[int, str]]) -> None:
    assert texts(data) == expected


def test_lines_across_read_chunks_are_whole() -> None:
    data = b"".join(b"%d " % n * 3000 + b"\n" for n in range(40))
    assert [(n, text[:2].strip()) for n, text in texts(data)] == [(n + 1, str(n)) for n in range(40)]


def test_a_line_over_the_limit_is_left_out_and_the_next_one_read() -> None:
    long: list[int] = []
    data = b"a\n" + b"x" * (10 * MAX_LINE) + b"\nb\n" + b"y" * (MAX_LINE + 1)
    assert [line.text for line in lines(io.BytesIO(data), long.append)] == ["a", "b"]
    assert long == [2, 4]
    assert [len(text) for _, text in texts(b"x" * MAX_LINE)] == [MAX_LINE]


def test_only_a_last_line_without_a_break_is_not_whole() -> None:
    assert [line.whole for line in lines(io.BytesIO(b"a\nb"))] == [True, False]
    assert [line.whole for line in lines(io.BytesIO(b"a\nb\n"))] == [True, True]


def test_printable_keeps_no_control_and_no_bidi_character() -> None:
    assert printable("a\x1b[31m/b\u202e\x9b\ud800c\u2028\n\u3000d") == "a/bc   d"
    assert printable("x" * 500, 10) == "x" * 9 + "…"


# verl console


def test_console_fixture() -> None:
    with CONSOLE.open("rb") as stream:
        found = list(verl_console.records(lines(stream)))
    assert all(isinstance(item, Record) for item in found)
    records = [item for item in found if isinstance(item, Record)]
    assert [(record.line, record.step) for record in records] == [
        (7, 1),
        (8, 2),
        (10, 2),
        (11, 3),
        (12, 4),
        (14, 4),
    ]
    first, _, validation, broken, last, _ = records
    assert first.data["global_seqlen/mean"] == 101.5
    assert first.data["num_turns/max"] == 2
    assert first.data["actor/ppo_kl"] == -1e-05
    assert len(first.data) == 13
    assert validation.data == {"val-core/toy/sums/reward/mean@1": 0.25, "val-aux/toy/sums/reward/std@1": 0.5}
    assert math.isnan(broken.data["actor/kl_loss"])
    assert broken.data["actor/grad_norm"] == math.inf
    assert math.copysign(1, last.data["perf/throughput"]) == -1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.5", 0.5),
        ("-1.25e-07", -1.25e-07),
        ("1E+3", 1000.0),
        ("7", 7.0),
        ("-0.0", -0.0),
        ("np.float64(2.0)", 2.0),
        ("np.int32(2)", 2.0),
        ("numpy.float32(0.5)", 0.5),
        ("tensor(0.25, device='cuda:0')", 0.25),
        ("inf", math.inf),
        ("-inf", -math.inf),
        ("1e999", math.inf),
    ],
)
def test_console_values(text: str, value: float) -> None:
    (record,) = console(f"step:1 - a/b:{text} - a/c:1")
    assert isinstance(record, Record)
    assert record.data == {"a/b": value, "a/c": 1.0}


@pytest.mark.parametrize("text", ["nan", "NaN", "-nan", "np.float64(nan)", "None", "null"])
def test_console_values_that_are_not_a_number(text: str) -> None:
    (record,) = console(f"step:1 - a/b:{text}")
    assert isinstance(record, Record)
    assert math.isnan(record.data["a/b"])


@pytest.mark.parametrize(
    "text",
    [
        "global_step:5 - a/b:1",
        "training/step:5 - a/b:1",
        "step:5",
        "step:x - a/b:1",
        "first step:1 - add 3, step:2 - divide",
        "we are at step:3 - loss:0.5",
        "Total steps: 4",
    ],
)
def test_console_passes_over_other_peoples_steps(text: str) -> None:
    assert console(text) == []
    assert not verl_console.recognises(text)


@pytest.mark.parametrize(
    ("text", "data", "reason"),
    [
        ("step:1 - a/b:0.5 - a/c:", {"a/b": 0.5}, "1 of 2 values unreadable, such as 'a/c:'"),
        ("step:1 - a/b:0.5 - a/", {"a/b": 0.5}, "1 of 2 values unreadable, such as 'a/'"),
        ("step:1 - a/b:0.5 -", {"a/b": 0.5}, "cut off after 1 values"),
        ("step:1 - a/b:0.(W pid=3) hi - a/c:1", {"a/c": 1.0}, "1 of 2 values unreadable"),
        ("step:1 - a/b:1.5 - a/c:No Log - a/d:2", {"a/b": 1.5, "a/d": 2.0}, "1 of 3 values unreadable"),
        ("step:1 - a/b:1.5.2 - a/d:2", {"a/d": 2.0}, "1 of 2 values unreadable"),
    ],
)
def test_console_keeps_what_is_readable_of_a_damaged_line(
    text: str, data: dict[str, float], reason: str
) -> None:
    record, rejected = console(text)
    assert isinstance(record, Record)
    assert record.data == data
    assert isinstance(rejected, Rejected)
    assert rejected.line == 1
    assert rejected.reason.startswith(reason)


def test_console_rejects_a_metric_line_without_a_readable_value() -> None:
    assert console("step:1 - actor/kl:zero") == [
        Rejected(1, "step:1 without a readable metric: 'actor/kl:zero'")
    ]


def test_console_ignores_what_follows_a_value_after_a_blank() -> None:
    (record,) = console("step:3 - a/b:1 - a/c:2.5 [repeated 4x across cluster]")
    assert isinstance(record, Record)
    assert record.data == {"a/b": 1, "a/c": 2.5}


def test_console_splits_records_that_were_glued_together() -> None:
    one, two = console("> step:1 - a/b:1 step:2 - a/b:2")
    assert isinstance(one, Record)
    assert isinstance(two, Record)
    assert (one.step, one.data) == (1, {"a/b": 1})
    assert (two.step, two.data) == (2, {"a/b": 2})


def test_console_drops_the_last_value_when_the_file_ends_inside_the_line() -> None:
    first, second, rejected = console(
        "step:1 - a/b:1 - a/c:1e-05 - a/d:3", "step:2 - a/b:1 - a/c:1e-0", whole=False
    )
    assert isinstance(first, Record)
    assert isinstance(second, Record)
    assert second.data == {"a/b": 1}
    assert rejected == Rejected(2, "cut off after 1 values")
    *_, complete = console("step:1 - a/b:1 - a/c:1", "step:2 - a/b:1 - a/c:2", whole=False)
    assert isinstance(complete, Record)
    assert complete.data == {"a/b": 1, "a/c": 2}


def test_console_notes_how_many_decimals_are_printed() -> None:
    def decimals(text: str) -> int | None:
        record = console(text)[0]
        assert isinstance(record, Record)
        return record.decimals

    assert decimals("step:1 - a/b:0.125 - a/c:3 - a/d:nan - a/e:-1.000") == 3
    assert decimals("step:1 - a/b:0.125 - a/c:0.25") is None
    assert decimals("step:1 - a/b:0.125 - a/c:1e-05") is None
    assert decimals("step:1 - a/b:3") is None


# verl file logger


def test_file_record() -> None:
    (record,) = file('{"data": {"a/b": 1, "a/c": null, "a/d": "text", "a/e": true, "a/f": NaN}, "step": 3.0}')
    assert isinstance(record, Record)
    assert (record.line, record.step, record.not_numbers) == (1, 3, ("a/d",))
    assert record.data.keys() == {"a/b", "a/c", "a/e", "a/f"}
    assert record.data["a/b"] == record.data["a/e"] == 1
    assert math.isnan(record.data["a/c"])
    assert math.isnan(record.data["a/f"])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("hello", "not JSON: 'hello'"),
        ('{"step": 1, "data": {"a": 1', "not JSON: "),
        ("[" * 100_000, "not JSON: "),
        ('{"step": 1, "data": {"a": ' + "1" * 10_000 + "}}", "not JSON: "),
        ("[1, 2]", 'no object with "step" and "data"'),
        ('{"type": "config"}', 'no object with "step" and "data"'),
        ('{"step": 1, "data": [1]}', 'no object with "step" and "data"'),
        ('{"step": -1, "data": {}}', "step is no whole number ≥ 0: -1"),
        ('{"step": 1.5, "data": {}}', "step is no whole number ≥ 0: 1.5"),
        ('{"step": true, "data": {}}', "step is no whole number ≥ 0: True"),
        ('{"step": NaN, "data": {}}', "step is no whole number ≥ 0: nan"),
        ('{"step": 1e300, "data": {}}', "step is no whole number ≥ 0: 1e+300"),
        ('{"step": "\\u001b[31m", "data": {}}', "step is no whole number ≥ 0: "),
    ],
)
def test_file_rejections(text: str, reason: str) -> None:
    (rejected,) = file(text)
    assert isinstance(rejected, Rejected)
    assert rejected.reason.startswith(reason)
    assert rejected.reason.isprintable()


def test_file_says_when_the_last_line_was_cut() -> None:
    (rejected,) = verl_file.records([Line(4, '{"step": 4, "da', whole=False)])
    assert rejected == Rejected(4, "cut off at the end of the file")


def test_file_keys_are_printable() -> None:
    (record,) = file('{"step": 1, "data": {"a/\\u001b[31mb\\ud800": 1}}')
    assert isinstance(record, Record)
    assert list(record.data) == ["a/b"]


# sniffing

JSON_LINE = '{"step": 1, "data": {"a/b": 1}}'
CONSOLE_LINE = "(TaskRunner pid=1) step:1 - a/b:1"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ([JSON_LINE], "verl-file"),
        ([CONSOLE_LINE], "verl-console"),
        (["chatter"] * 5000 + [CONSOLE_LINE], "verl-console"),
        (['{"type": "config"}', JSON_LINE], "verl-file"),
        ([JSON_LINE] * (ENOUGH - 1) + [CONSOLE_LINE] * ENOUGH, "verl-console"),
        (["chatter", '{"step": 1}'], None),
        ([], None),
    ],
)
def test_sniff(text: list[str], name: str | None) -> None:
    reader = sniff((Line(n, line) for n, line in enumerate(text, 1)), readers())
    assert (reader and reader.name) == name


def test_sniff_stops_when_it_knows() -> None:
    taken = 0

    def endless() -> Iterator[Line]:
        nonlocal taken
        while True:
            taken += 1
            yield Line(taken, JSON_LINE)

    reader = sniff(endless(), readers())
    assert reader is not None
    assert taken == ENOUGH
