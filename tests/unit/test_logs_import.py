"""`read` from end to end: faithful logs, bad logs, any bytes; curves kept and read again; the summary."""

import io
import json
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from diagnose.curves import Curves
from diagnose.errors import DiagnoseError, ExitCode, LogError
from diagnose.logs import MAX_REJECTED, read, read_curves, registry, write_curves
from diagnose.logs.summary import as_json, as_rich, as_text
from taxonomy.metrics import METRIC_BY_NAME

CONSOLE = Path(__file__).parents[1] / "fixtures" / "logs" / "verl_console.log"


def line(step: object, **data: object) -> str:
    return (
        json.dumps({"step": step, "data": {key.replace("__", "/"): value for key, value in data.items()}})
        + "\n"
    )


def log(tmp_path: Path, content: str | bytes, name: str = "run.jsonl") -> Path:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_console_log() -> None:
    imported = read(CONSOLE)
    assert (imported.format, imported.counts.records, imported.counts.rejected) == ("verl-console", 6, 0)
    (run,) = imported.runs
    assert list(run.curves.steps_N) == [1, 2, 3, 4]
    assert list(run.curves.values["actor/entropy"]) == [2.5, 2.25, 2.125, 2.0]
    assert list(run.curves.values["val-core/reward/mean"][[1, 3]]) == [0.25, 0.5]
    assert run.curves.nonfinite == {"actor/kl_loss": (3,), "actor/grad_norm": (3,)}
    assert run.curves.resolution == {}
    assert set(run.unmapped) == {
        "global_seqlen/mean",
        "num_turns/max",
        "training/global_step",
        "actor/entropy_loss",
        "val-aux/toy/sums/reward/std@1",
    }


def test_console_and_file_logger_of_one_run_agree(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    rows = [{"actor/kl_loss": float(rng.lognormal(-8, 3)), "actor/entropy": 2.0 - step} for step in range(12)]
    rows[7]["actor/kl_loss"] = math.nan
    console = "".join(
        f"\x1b[36m(TaskRunner pid=3)\x1b[0m step:{step} - actor/kl_loss:np.float64({row['actor/kl_loss']!r})"
        f" - actor/entropy:{row['actor/entropy']}\n"
        for step, row in enumerate(rows)
    )
    file = "".join(
        line(
            step,
            **{key.replace("/", "__"): None if math.isnan(value) else value for key, value in row.items()},
        )
        for step, row in enumerate(rows)
    )
    (one,) = read(log(tmp_path, console, "a.log")).runs
    (two,) = read(log(tmp_path, file, "a.jsonl")).runs
    assert one.curves.values.keys() == two.curves.values.keys()
    for name, values_N in one.curves.values.items():
        np.testing.assert_array_equal(values_N, two.curves.values[name])
    assert one.curves.nonfinite == two.curves.nonfinite == {"actor/kl_loss": (7,)}


def test_a_rounded_old_console_log(tmp_path: Path) -> None:
    text = "".join(
        f"\x1b[2m\x1b[36m(main_task pid=9)\x1b[0m step:{step} - timing/gen:1.000"
        f" - critic/kl:{0.0004 * step:.3f} - actor/entropy_loss:{0.5 - 0.01 * step:.3f}"
        " - actor/lr(1e-4):0.010\n"
        for step in range(10)
    )
    (run,) = read(log(tmp_path, text)).runs
    assert run.names == {
        "critic/kl": "actor/kl_loss",
        "actor/entropy_loss": "actor/entropy",
        "actor/lr(1e-4)": "actor/lr",
    }
    np.testing.assert_allclose(run.curves.values["actor/lr"], 1e-6)
    assert run.curves.resolution["actor/kl_loss"] == 1e-3
    assert run.curves.resolution["actor/lr"] == pytest.approx(1e-7)


def test_rejected_lines_are_listed_up_to_a_limit_and_all_counted(tmp_path: Path) -> None:
    imported = read(log(tmp_path, line(1, actor__kl_loss=1.0) + "junk\n" * 1000))
    assert len(imported.rejected) == MAX_REJECTED
    assert (imported.rejected[0].line, imported.rejected[0].reason) == (2, "not JSON: 'junk'")
    assert imported.counts.rejected == 1000
    assert imported.counts.lines == 1001


def test_a_huge_line_is_rejected_and_the_rest_read(tmp_path: Path) -> None:
    content = line(1, actor__kl_loss=1.0) + "x" * 10_000_000 + "\n" + line(2, actor__kl_loss=2.0)
    imported = read(log(tmp_path, content))
    assert list(imported.runs[0].curves.steps_N) == [1, 2]
    assert [(item.line, item.reason) for item in imported.rejected] == [(2, "longer than 1 MiB")]


def test_a_huge_progress_bar_before_a_metric_line_costs_nothing(tmp_path: Path) -> None:
    bar = "".join(f" {n}%|###| {n}/9 [00:01]\r" for n in range(100_000))
    imported = read(log(tmp_path, bar + "step:1 - actor/kl_loss:0.5\n"))
    assert imported.counts.rejected == 0
    assert imported.runs[0].curves.values["actor/kl_loss"] == [0.5]


def test_a_last_line_cut_off_is_rejected(tmp_path: Path) -> None:
    whole = "".join(line(step, actor__kl_loss=1.0) for step in range(3))
    imported = read(log(tmp_path, whole + line(3, actor__kl_loss=1.0)[:-9]))
    assert list(imported.runs[0].curves.steps_N) == [0, 1, 2]
    assert imported.rejected[0].reason == "cut off at the end of the file"


def test_utf16_as_written_by_a_windows_shell(tmp_path: Path) -> None:
    imported = read(log(tmp_path, ("noise\r\n" + line(1, actor__kl_loss=0.5)).encode("utf-16")))
    assert imported.runs[0].curves.values["actor/kl_loss"] == [0.5]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"\n\n", "no metric line of a known format (0 lines, 0 metric lines)"),
        (b"hello\nworld\n", "no metric line of a known format (2 lines, 0 metric lines)"),
        (bytes(range(256)) * 64, "this is binary data"),
        (b"\x00" * 4096, "this is binary data"),
        (b"\x1f\x8b\x08\x00rest", "the compressed file is cut off"),
        (b"PAR1rest", ""),
        (b"x" * 10_000_000, "(1 line, 0 metric lines, 1 longer than 1 MiB)"),
        (line(1, actor__kl_loss=1.0)[:-4].encode(), "no metric line of a known format"),
        (
            b"".join(line(n, actor__kl_loss=None, actor__entropy=None).encode() for n in range(3, 9)),
            "every value of actor/kl_loss, actor/entropy is NaN or infinite, from step 3 on (6 lines, ",
        ),
        (
            b"step:1 - my/metric:0.5 - your/metric:1",
            "none of its 2 keys is a known metric with numbers: my/metric, your/metric (1 line, 1 metric line, 0",
        ),
        (
            line(1, actor__kl_loss="0.5").encode(),
            "its only key is not a known metric with numbers: actor/kl_loss (1 line, ",
        ),
    ],
)
def test_unusable_logs_say_why(tmp_path: Path, content: bytes, message: str) -> None:
    path = log(tmp_path, content)
    with pytest.raises(LogError) as error:
        read(path)
    assert message in str(error.value)
    assert str(error.value).startswith(str(path))
    assert error.value.exit_code is ExitCode.LOGS
    assert str(error.value).isprintable()


def test_paths_that_are_no_log(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="no file in this folder may be a log"):
        read(tmp_path)
    with pytest.raises(LogError, match="No such file"):
        read(tmp_path / "absent.log")
    with pytest.raises(LogError, match="no such file"):
        read("a\0b")
    with pytest.raises(LogError) as error:
        read("ab\x1b[2Jsent")
    assert "\x1b" not in str(error.value)
    with pytest.raises(LogError, match="the file is empty"):
        read(os.devnull)


def test_a_format_can_be_named(tmp_path: Path) -> None:
    path = log(tmp_path, line(1, actor__kl_loss=1.0))
    assert read(path, "verl-file").format == "verl-file"
    with pytest.raises(LogError, match=r"no metric line \(1 line, 0 metric lines, 0 rejected\)"):
        read(path, "verl-console")
    with pytest.raises(DiagnoseError, match=r"known: .*verl-console, verl-file, .*wandb"):
        read(path, "logbook")


def test_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "stdin", SimpleNamespace(buffer=io.BytesIO(line(4, actor__kl_loss=1.0).encode()))
    )
    imported = read("-")
    assert (imported.source, imported.runs[0].curves.source) == ("stdin", "stdin")
    assert list(imported.runs[0].curves.steps_N) == [4]


def test_a_named_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(line(4, actor__kl_loss=1.0).encode()))
    writer.start()
    imported = read(pipe)
    writer.join()
    assert list(imported.runs[0].curves.steps_N) == [4]


def test_a_pipe_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diagnose.logs.source.MAX_STREAM", 1 << 20)
    with pytest.raises(LogError, match="more than 1 MiB from a pipe"):
        read("/dev/zero")


SPLICES = [
    "step:1 - ",
    "step:7 - actor/kl_loss:0.5 - ",
    "actor/kl_loss:np.float64(nan)",
    " - ",
    ":",
    '{"step": 3, "data": {"actor/kl_loss": 1.5}}',
    '{"step": ',
    '"data": {',
    "null",
    "}}",
    "\n",
    "\r",
    "\x1b[36m(TaskRunner pid=1)\x1b[0m ",
    "\x00",
    "é",
    "9" * 400,
    "1e9999",
    "val-core/a b/reward/mean@4:1",
]


@given(
    st.one_of(
        st.binary(max_size=400),
        st.lists(st.one_of(st.sampled_from(SPLICES), st.text(max_size=5)), max_size=40).map(
            lambda parts: "".join(parts).encode("utf-8", "surrogatepass")
        ),
        st.lists(st.sampled_from(SPLICES), max_size=20).map(lambda parts: "".join(parts).encode("utf-16")),
    )
)
@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_give_curves_or_a_log_error(tmp_path: Path, content: bytes) -> None:
    path = log(tmp_path, content)
    try:
        imported = read(path)
    except LogError as error:
        assert str(error).isprintable()
        return
    assert any(np.isfinite(v).any() for run in imported.runs for v in run.curves.values.values())
    for run in imported.runs:
        assert set(run.names.values()) == set(run.curves.values) <= METRIC_BY_NAME.keys()
        assert all(key.isprintable() for key in [*run.names, *run.unmapped])
        assert not any(np.isinf(values).any() for values in run.curves.values.values())
    assert all(item.reason.isprintable() for item in imported.rejected)
    json.dumps(as_json(imported), allow_nan=False)
    assert as_text(imported).replace("\n", "").isprintable()


@pytest.mark.parametrize(
    "unit", ["step:1 - ", "a/b:", " - ", "np.float64(", "[", "\x1b", "\x1b]", "val-", "1"]
)
def test_no_line_takes_more_than_linear_time(tmp_path: Path, unit: str) -> None:
    """Eight times the text may take many times as long on a crowded machine, not sixty-four."""

    def seconds(length: int) -> float:
        text = "step:1 - actor/kl_loss:0.5\n" + unit * (length // len(unit)) + "\n"
        path = log(tmp_path, text)
        start = time.process_time()
        read(path)
        return time.process_time() - start

    def least(length: int) -> float:
        return min(
            seconds(length) for _ in range(3)
        )  # a collection of garbage in between is no cost of the text

    assert least(800_000) < 0.05 + 24 * least(100_000)


# curves that are kept

finite = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def curves(draw: st.DrawFn) -> Curves:
    steps = sorted(draw(st.sets(st.integers(0, 10**6), max_size=6)))
    names = draw(st.lists(st.sampled_from(sorted(METRIC_BY_NAME)), unique=True, max_size=4))
    values, nonfinite = {}, {}
    for name in names:
        cells = draw(
            st.lists(
                st.one_of(finite, st.sampled_from(["gap", "bad"])), min_size=len(steps), max_size=len(steps)
            )
        )
        values[name] = np.array(
            [math.nan if isinstance(cell, str) else cell for cell in cells], dtype=np.float64
        )
        bad = tuple(step for step, cell in zip(steps, cells, strict=True) if cell == "bad")
        if bad:
            nonfinite[name] = bad
    return Curves(
        draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=10)),
        np.array(steps, dtype=np.float64),
        values,
        nonfinite,
        tuple(draw(st.lists(st.tuples(st.just("resume"), st.integers(0, 99)), max_size=2))),
        draw(st.dictionaries(st.sampled_from(names), st.sampled_from([1e-3, 1e-7]))) if names else {},
    )


@given(curves())
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_curves_are_kept_without_loss(tmp_path: Path, kept: Curves) -> None:
    path = tmp_path / "faulty_0.jsonl"
    write_curves(kept, path)
    again = read_curves(path)
    assert (again.source, again.nonfinite, again.events, again.resolution) == (
        kept.source,
        kept.nonfinite,
        kept.events,
        kept.resolution,
    )
    assert again.steps_N.tobytes() == kept.steps_N.tobytes()
    assert list(again.values) == list(kept.values)
    for name, values_N in kept.values.items():
        np.testing.assert_array_equal(again.values[name], values_N)
        np.testing.assert_array_equal(np.signbit(again.values[name]), np.signbit(values_N))


def test_kept_curves_are_a_log_like_any_other(tmp_path: Path) -> None:
    (run,) = read(CONSOLE).runs
    path = tmp_path / "faulty_0.jsonl"
    write_curves(run.curves, path)
    imported = read(path)
    assert (imported.format, imported.counts.rejected) == ("verl-file", 0)
    assert imported.runs[0].curves.nonfinite == run.curves.nonfinite
    for name, values_N in run.curves.values.items():
        np.testing.assert_array_equal(imported.runs[0].curves.values[name], values_N)


@pytest.mark.parametrize(
    "content", ["", "hello", '{"step": 1, "data": {}}', '{"curves": 1}', '{"curves": {}}']
)
def test_a_file_that_holds_no_curves(tmp_path: Path, content: str) -> None:
    with pytest.raises(LogError, match="not curves of a run folder"):
        read_curves(log(tmp_path, content))
    with pytest.raises(LogError, match="No such file"):
        read_curves(tmp_path / "absent")


# summary

TWO_RUNS = "".join(
    [
        "noise\n",
        *[line(step, actor__kl_loss=0.5, my__key=1) for step in range(1, 13)],
        line(6, actor__kl_loss=0.25),
        line(1, actor__kl_loss=None, actor__entropy=1.0),
        "more noise\n",
        line(2, actor__kl_loss=0.5, actor__entropy=1.0),
    ]
)


def test_summary_as_json(tmp_path: Path) -> None:
    summary = as_json(read(log(tmp_path, TWO_RUNS)))
    assert (summary["schema"], summary["format"], summary["records"], summary["rejected"]) == (
        1,
        "verl-file",
        15,
        2,
    )
    one, two = summary["runs"]
    assert one == {
        "steps": 12,
        "first_step": 1,
        "last_step": 12,
        "metrics": {"actor/kl_loss": {"raw": "actor/kl_loss", "unit": "nat", "n": 12, "nonfinite": 0}},
        "unmapped": ["my/key"],
        "rejected": [{"line": 1, "reason": "not JSON: 'noise'"}],
        "events": [{"kind": "resume", "step": 6}],
        "duplicates": 0,
        "conflicts": 0,
        "replaced": 1,
        "out_of_order": 0,
    }
    assert two["metrics"]["actor/kl_loss"] == {
        "raw": "actor/kl_loss",
        "unit": "nat",
        "n": 1,
        "nonfinite": 1,
    }
    assert two["rejected"] == [{"line": 16, "reason": "not JSON: 'more noise'"}]


def test_summary_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    log(tmp_path, TWO_RUNS)
    assert as_text(read("run.jsonl")) == (
        "run.jsonl: verl-file, 2 runs, 17 lines, 15 metric lines, 2 rejected\n"
        "\n"
        "run 1 of 2: 12 steps, 1 to 12 (lines 2 to 14)\n"
        "  metric         unit  values  not finite  read from\n"
        "  actor/kl_loss  nat       12\n"
        "  resume at step 6\n"
        "  1 step trained again after a resume: the later values count\n"
        "  1 key not used: my/key\n"
        "  line 1 rejected: not JSON: 'noise'\n"
        "\n"
        "run 2 of 2: 2 steps, 1 to 2 (lines 15 to 17)\n"
        "  metric         unit  values  not finite  read from\n"
        "  actor/kl_loss  nat        1           1\n"
        "  actor/entropy  nat        2\n"
        "  line 16 rejected: not JSON: 'more noise'\n"
    )


def test_summary_for_a_console_takes_keys_literally(tmp_path: Path) -> None:
    text = line(1, **{"actor__kl_loss": 0.5, "[red]x[__red]": 1, "\x1b[2Jy": 2})
    console = Console(width=100, file=io.StringIO(), color_system="truecolor", force_terminal=True)
    console.print(as_rich(read(log(tmp_path, text))))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "[red]x[/red], y" in shown
    assert "\x1b[2J" not in shown


# third-party readers


def test_readers_of_other_packages_are_found_and_broken_ones_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = dict(registry.readers())

    def load_good() -> None:
        register = registry.reader("zz", "Their format", lambda text: False, known["verl-file"].aliases)
        register(lambda found: iter(()))

    def load_bad() -> None:
        raise ImportError("no such module")

    points = [SimpleNamespace(name="good", load=load_good), SimpleNamespace(name="bad", load=load_bad)]
    monkeypatch.setattr(registry, "_registered", dict(known))
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == registry.GROUP else [])
    with pytest.warns(UserWarning, match="log reader 'bad' can't be loaded: no such module"):
        found = registry.readers.__wrapped__()
    assert list(found) == [*known, "zz"]


def test_importing_the_readers_needs_no_torch() -> None:
    code = (
        "import diagnose.logs.summary, sys; print(sorted({'torch', 'rich', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
