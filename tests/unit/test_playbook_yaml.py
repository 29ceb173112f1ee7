"""YAML with places: what is read, where it was, what is refused."""

import time

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnose.located import MAX_BYTES, MAX_DEPTH, Issue, flatten, parse


def issues(text: str | bytes) -> list[Issue]:
    return parse(text if isinstance(text, bytes) else text.encode()).issues


def test_every_value_and_key_knows_its_place() -> None:
    found = parse(b"# note\na: 1\nb:\n  c: [x, {d: 2}]\n")
    assert found.data == {"a": 1, "b": {"c": ("x", {"d": 2})}}
    assert found.issues == []
    assert found.values[("a",)] == (2, 4)
    assert found.keys[("b",)] == (3, 1)
    assert found.keys["b", "c"] == (4, 3)
    assert found.values["b", "c", 1, "d"] == (4, 14)
    assert found.place(("b", "c", 1, "d")) == (4, 14)
    assert found.place(("b", "missing")) == (3, 1)
    assert found.place(("b", "c", 1, "missing")) == (4, 10)
    assert found.place(("missing",)) == (2, 1)


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.floats()
    | st.text(st.characters(codec="ascii"), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abcxyz:- #'\"", max_size=5), inner, max_size=3)
    ),
    max_leaves=12,
)


def lists(value: object) -> object:
    if isinstance(value, tuple):
        return [lists(item) for item in value]
    if isinstance(value, dict):
        return {key: lists(item) for key, item in value.items()}
    return value


@given(plain, st.booleans())
@settings(deadline=None)
def test_agrees_with_the_safe_loader(value: object, flow: bool) -> None:
    text = yaml.safe_dump(value, default_flow_style=flow)
    found = parse(text.encode())
    if any("control character" in issue.message for issue in found.issues):
        return
    assert found.issues == []
    assert repr(lists(found.data)) == repr(yaml.safe_load(text))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8e-5", 8e-5),
        ("1.5e3", 1500.0),
        ("-1E+2", -100.0),
        ("'8e-5'", "8e-5"),
        ("2024-99-99", "2024-99-99"),
        ("~", None),
    ],
)
def test_numbers_and_dates(text: str, value: object) -> None:
    assert parse(f"a: {text}".encode()).data == {"a": value}


def test_merge_keys() -> None:
    text = b"x: &x {p: 1, q: 1}\ny: &y {q: 2, r: 2}\nz: {<<: [*x, *y], p: 0}\n"
    assert parse(text).data == yaml.safe_load(text)
    assert issues("z: {<<: 3}") == [Issue(1, 9, "<< takes a mapping or a list of mappings")]


@pytest.mark.parametrize(
    ("text", "issue"),
    [
        ("a: 1\nb: 2\na: 3\n", (3, 1, "duplicate key 'a' (first in line 1)")),
        ("a:\n\tb: 1\n", (2, 1, "a tab character: indent with spaces")),
        ("a: [1, 2\n", (2, 1, "expected ',' or ']', but got '<stream end>' while parsing a flow sequence")),
        ("a: b: c\n", (1, 5, "mapping values are not allowed here")),
        ("a: 1\n---\nb: 2\n", (2, 1, "a second document: only one is read")),
        ("a: *b\n", (1, 4, "found undefined alias 'b'")),
        ("1: a\n", (1, 1, "a key must be text: write '1' in quotes")),
        ("on: a\n", (1, 1, "a key must be text: write 'on' in quotes")),
        ("? [a]\n: b\n", (1, 3, "a key must be text")),
        (
            "a: !!python/object/apply:os.system [x]",
            (1, 4, "tag 'tag:yaml.org,2002:python/object/apply:os.system'"),
        ),
        ("a: !env X", (1, 4, "tag '!env' is not allowed")),
        ("a: !!int x", (1, 4, "'x' is no int")),
        ("a: !!int ''", (1, 4, "'' is no int")),
        ("a: !!bool x", (1, 4, "'x' is no bool")),
        ("a: " + "9" * 5000, (1, 4, "'999999")),
        ('a: "\\e[2J"', (1, 4, "a control character in a text")),
        ('a: "\\u202e"', (1, 4, "a control character in a text")),
        ('"\\e[2J": a', (1, 1, "a control character in a key")),
        (b"a: 1\nb: \xc3\xa9 \xff", (2, 6, "not UTF-8 text")),
        (b"a: 1\nb: \x07", (2, 4, "character U+0007 is not allowed in YAML")),
        ("a: " + "[" * 50, (1, 35, f"nested deeper than {MAX_DEPTH} levels")),
        ("[" * 1_000_000, (1, 33, f"nested deeper than {MAX_DEPTH} levels")),
        ("- a\n" * 20_000, (10_000, 3, "more than 10000 values")),
        ("a: &a 1\nb: [" + "*a, " * 200 + "]", (2, 405, "more than 100 aliases")),
        ("a: &a [*a]", (1, 1, "aliases make this more than 10000 values or 32 levels")),
        ("&a {<<: *a, b: 1}", (1, 1, "aliases make this more than 10000 values or 32 levels")),
        ("x" * (MAX_BYTES + 1), (1, 1, "larger than 1 MiB")),
    ],
)
def test_refusals(text: str | bytes, issue: tuple[int, int, str]) -> None:
    (found,) = issues(text)
    assert found[:2] == issue[:2]
    assert found.message.startswith(issue[2])
    assert found.message.isprintable()
    assert len(found.message) <= 300


def test_an_alias_bomb_is_refused_at_once() -> None:
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
    )
    start = time.process_time()
    assert [issue.message for issue in issues(bomb)] == [
        "aliases make this more than 10000 values or 32 levels"
    ]
    assert time.process_time() - start < 2


def test_reading_goes_on_after_what_is_wrong() -> None:
    found = parse(b"a: !env X\nb: 1\nb: 2\nc: 3\n---\n")
    assert found.data == {"a": None, "b": 1, "c": 3}
    assert found.broken == {("a",)}
    assert sorted(issue.line for issue in found.issues) == [1, 3, 5]


@given(st.binary(max_size=200) | st.text("ab:-[]{}&*!|>?'\"%@#, \n\t<", max_size=60).map(str.encode))
@settings(deadline=None, max_examples=400)
def test_any_bytes_give_data_or_issues(content: bytes) -> None:
    found = parse(content)
    assert all(issue.line >= 1 and issue.col >= 1 and issue.message.isprintable() for issue in found.issues)


def test_flatten() -> None:
    assert flatten({"a": {"b": {"c": 1}, "d": None}, "e": ("x",), "f.g": True}) == {
        "a.b.c": 1,
        "a.d": None,
        "f.g": True,
    }
