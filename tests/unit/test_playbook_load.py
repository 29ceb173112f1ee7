"""Playbooks: the design's example, each mistake at its place, finding them, and what follows from one."""

import json
import shutil
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path
from random import Random

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnose import playbook as playbooks
from diagnose.errors import ExitCode, PlaybookError
from diagnose.playbook import CandidateSpec, InvalidPlaybook, Playbook, load
from diagnose.playbook_model import RecipeSettings
from proxy.specs import BuildSpec, Recipe
from taxonomy.registry import library
from taxonomy.symptoms import SYMPTOM_BY_ID

SCHEMA = Path(playbooks.__file__).parents[1] / "playbooks" / "playbook.schema.json"

EXAMPLE = """\
# yaml-language-server: $schema=./playbook.schema.json
version: 1
name: kl_spike
symptom: kl_divergence_increase          # or: auto (from the logs)
original:
  faulty: logs/incident.jsonl            # any readable format; a list means seeds
  healthy: [logs/healthy_1.jsonl]        # optional
  context: {rollout.backend: vllm, rollout.temperature: 1.0, device: npu}
proxy:
  from: checkpoint
  checkpoint: embedded:qwen3_moe         # or a folder in Hugging Face layout
  experts: 12
  strategy: multi_view
  calibration: {prompts: embedded, tokens: 65536}
engine: {name: local}
recipe: {steps: 60, seeds: 2, old_log_prob: rollout, lr: 8e-5}
candidates: auto                         # or a list of {fault, strength, from_step}
budget: {seconds: 120}
expect: {fault: learning_rate_too_high, verdict: reproduced}
"""

MINIMAL = """\
version: 1
name: short
symptom: auto
original: {faulty: a.jsonl}
proxy: {from: embedded, experts: 12}
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "book.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def issues(tmp_path: Path, text: str) -> list[tuple[int, int, str]]:
    with pytest.raises(InvalidPlaybook) as error:
        load(write(tmp_path, text))
    assert error.value.exit_code is ExitCode.USAGE
    assert str(error.value).splitlines() == [
        f"{tmp_path / 'book.yaml'}:{i.line}:{i.col}: {i.message}" for i in error.value.issues
    ]
    return [(issue.line, issue.col, issue.message) for issue in error.value.issues]


def test_the_example_of_the_design(tmp_path: Path) -> None:
    book = load(write(tmp_path, EXAMPLE))
    assert (book.name, book.symptom, book.engine.name) == ("kl_spike", "kl_divergence_increase", "local")
    assert book.original.faulty == (tmp_path / "logs/incident.jsonl",)
    assert book.original.healthy == (tmp_path / "logs/healthy_1.jsonl",)
    assert book.original.context == {"rollout.backend": "vllm", "rollout.temperature": 1.0, "device": "npu"}
    assert book.candidates is None
    assert book.budget is not None
    assert book.budget.seconds == 120
    assert book.expect is not None
    assert (book.expect.fault, book.expect.verdict) == ("learning_rate_too_high", "reproduced")
    assert book.recipe.recipe() == Recipe(steps=60, lr=8e-5)
    assert book.proxy.build_spec(Path("/models/x"), Path("/out")) == BuildSpec("/models/x", "/out", 12)


def test_what_may_be_left_out(tmp_path: Path) -> None:
    book = load(write(tmp_path, MINIMAL))
    assert book.proxy.checkpoint == "embedded:qwen3_moe"
    assert (book.original.healthy, book.original.context) == ((), {})
    assert (book.budget, book.expect, book.candidates) == (None, None, None)
    assert book.recipe.recipe() == Recipe()
    assert playbooks.needs_permission(book) == []


def test_a_playbook_is_frozen_and_survives_json(tmp_path: Path) -> None:
    text = EXAMPLE.replace("candidates: auto", "candidates: [{fault: stale_weights, from_step: 3}]")
    for content in (EXAMPLE, text, MINIMAL):
        book = load(write(tmp_path, content))
        assert Playbook.model_validate_json(book.model_dump_json(by_alias=True)) == book
    with pytest.raises(ValueError, match="frozen"):
        book.name = "other"


def test_paths_start_from_the_playbooks_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    text = (
        "version: 1\nname: p\nsymptom: auto\n"
        "original: {faulty: [a.jsonl, /abs/b.jsonl, ~/c.jsonl]}\n"
        "proxy: {from: checkpoint, checkpoint: ../model, experts: 8, calibration: {prompts: p.jsonl}}\n"
        "engine: {name: verl, command: [python, train.py], python: bin/python}\n"
    )
    (tmp_path / "sub" / "book.yaml").write_text(text)
    book = load(Path("sub/book.yaml"))
    assert book.original.faulty == (
        tmp_path / "sub/a.jsonl",
        Path("/abs/b.jsonl"),
        Path("/home/someone/c.jsonl"),
    )
    assert book.proxy.checkpoint == f"{tmp_path}/sub/../model"
    assert book.proxy.calibration.prompts == f"{tmp_path}/sub/p.jsonl"
    assert book.engine.python == f"{tmp_path}/sub/bin/python"
    assert book.engine.command == ("python", "train.py")


def test_the_context_may_be_a_hydra_dump(tmp_path: Path) -> None:
    dump = "actor_rollout_ref:\n  rollout: {name: vllm, temperature: 1.0}\ntrainer: {logger: [console], device: npu}\n"
    (tmp_path / "config.yaml").write_text(dump)
    book = load(write(tmp_path, MINIMAL.replace("a.jsonl}", "a.jsonl, context: config.yaml}")))
    assert book.original.context == {
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.temperature": 1.0,
        "trainer.device": "npu",
    }
    nested = load(
        write(tmp_path, MINIMAL.replace("a.jsonl}", "a.jsonl, context: {rollout: {backend: sglang}}}"))
    )
    assert nested.original.context == {"rollout.backend": "sglang"}


def test_every_mistake_is_reported_at_its_place(tmp_path: Path) -> None:
    text = """\
version: 2
name: "a b"
symptom: kl_divergence
original:
  faulty: []
  healthy: 3
  contxt: {}
proxy:
  from: checkpont
  experts: "12"
  strategy: multiview
  alpha: [0, 0, 0]
engine: {name: lokal, command: 7}
recipe: {steps: 0, lr: .nan, old_log_prob: both, exact: 1, foo: 2}
candidates:
  - {fault: lr_too_high, strength: -1}
  - fault: stale_weights
    from_step: 9
    until_step: 5
  - fault: stale_weights
  - oops
budget: {}
expect: {}
extra: 1
"""
    recipe_keys = ", ".join(RecipeSettings.model_fields)
    assert issues(tmp_path, text) == [
        (1, 10, "must be 1, not 2"),
        (2, 7, "must be 1 to 64 letters, digits, '_', '-' or '.', not the text 'a b'"),
        (
            3,
            10,
            "unknown symptom 'kl_divergence'; did you mean kl_divergence_increase or rollout_training_divergence?"
            f" (allowed: auto, {', '.join(SYMPTOM_BY_ID)})",
        ),
        (5, 11, "must not be empty"),
        (6, 12, "must be a path or a list of paths"),
        (7, 3, "unknown key 'contxt'; did you mean context? (allowed: faulty, healthy, context)"),
        (
            9,
            9,
            "must be checkpoint, sibling or embedded, not the text 'checkpont'; did you mean checkpoint?",
        ),
        (10, 12, "must be a whole number, not the text '12'"),
        (
            11,
            13,
            "unknown strategy 'multiview': choose multi_view, merge, frequency, reap, random, first_k, "
            "or some of router+coactivation+context joined by '+'",
        ),
        (12, 10, "must be auto, or three weights ≥ 0, not all 0: router, co-activation, context"),
        (13, 16, "unknown engine 'lokal'; did you mean local? (allowed: local, verl)"),
        (13, 32, "must be a list, not 7"),
        (14, 17, "must be at least 1, not 0"),
        (14, 24, "must be a finite number, not nan"),
        (14, 44, "must be rollout or trainer, not the text 'both'"),
        (14, 57, "must be true or false, not 1"),
        (14, 60, f"unknown key 'foo' (allowed: {recipe_keys})"),
        (
            16,
            13,
            "unknown fault 'lr_too_high'; did you mean router_lr_too_high or learning_rate_too_high?"
            f" ({len(library().cards)} are allowed)",
        ),
        (16, 36, "must be greater than 0, not -1"),
        (19, 17, "before from_step (9)"),
        (20, 5, "the same fault and strength as candidate 2"),
        (21, 5, "must be a mapping, not the text 'oops'"),
        (22, 1, 'missing required key "seconds"'),
        (23, 9, "must name a fault, a verdict or both"),
        (
            24,
            1,
            "unknown key 'extra' (allowed: version, name, title, description, symptom, original, proxy, engine, "
            "recipe, candidates, budget, expect)",
        ),
    ]


def at_mark(tmp_path: Path, text: str) -> tuple[list[tuple[int, int, str]], int, int]:
    """Return the issues of a text, and the place of the mark "‸" in it, which is taken out before."""
    before, _, after = text.partition("‸")
    return issues(tmp_path, before + after), before.count("\n") + 1, len(before) - before.rfind("\n")


@pytest.mark.parametrize(
    ("old", "new", "messages"),
    [
        ("version: 1\n", "‸", ['missing required key "version"']),
        ("original: {faulty: a.jsonl}", "‸original: {}", ['missing required key "faulty"']),
        ("{faulty: a.jsonl}", "‸a.jsonl", ["must be a mapping, not the text 'a.jsonl'"]),
        (" {faulty: a.jsonl}", "‸", ["must be a mapping, not empty"]),
        ("a.jsonl", "[a.jsonl, ‸3]", ["must be text, not 3"]),
        ("a.jsonl", "[‸3]", ["must be text, not 3"]),
        ("a.jsonl", "‸[]", ["must not be empty"]),
        ("a.jsonl", "‸'-'", ["must be a path"]),
        ("a.jsonl", "a, context: ‸[x]", ["must be a mapping, not a list"]),
        ("a.jsonl", "a, context: ‸{x: {y: .nan}}", ["x.y must be a finite number, not nan"]),
        ("a.jsonl", "a, context: ‸no.yaml", ["no.yaml: No such file or directory"]),
        ("a.jsonl", "a, context: ‸.", [".: Is a directory"]),
        ("short", "‸7", ["must be text, not 7"]),
        ("short", "‸../x", ["must be 1 to 64 letters, digits, '_', '-' or '.', not the text '../x'"]),
        ("proxy: {from: embedded, ", "‸proxy: {", ['missing required key "from"']),
        (
            "proxy: {from: embedded, experts: 12}",
            "‸proxy: {from: checkpoint}",
            [
                'missing required key "checkpoint": from: checkpoint needs one',
                'missing required key "experts": how many to keep in each layer',
            ],
        ),
        (
            "proxy: {from: embedded, experts: 12}",
            "‸proxy: {from: sibling}",
            ['missing required key "checkpoint": from: sibling needs one'],
        ),
        (
            "12",
            "12, checkpoint: ‸embedded:qwen",
            [
                "unknown embedded checkpoint 'embedded:qwen'; did you mean embedded:qwen3_moe or embedded:deepseek_v3? "
                "(allowed: embedded:qwen3_moe, embedded:deepseek_v3)"
            ],
        ),
        ("12", "12, checkpoint: ‸''", ["must be a path"]),
        (
            "12",
            "12, alpha: ‸[1, 2]",
            ["must be auto, or three weights ≥ 0, not all 0: router, co-activation, context"],
        ),
        (
            "12",
            "12, alpha: ‸[1, 2, -1]",
            ["must be auto, or three weights ≥ 0, not all 0: router, co-activation, context"],
        ),
        ("a.jsonl", "‸~nobody_of_that_name/x", ["Could not determine home directory."]),
        ("a.jsonl", "a, context: ‸/dev/zero", ["/dev/zero: larger than 1 MiB"]),
        ("12", "‸~", ['missing required key "experts": how many to keep in each layer']),
        ("12", "‸10000000000", ["must be at most 1000000000, not 10000000000"]),
        ("12", "‸true", ["must be a whole number, not true"]),
        ("12", "‸12.0", ["must be a whole number, not 12.0"]),
        ("12", "‸0", ["must be at least 1, not 0"]),
    ],
)
def test_one_mistake(tmp_path: Path, old: str, new: str, messages: list[str]) -> None:
    assert old in MINIMAL
    found, line, col = at_mark(tmp_path, MINIMAL.replace(old, new))
    assert found == [(line, col, message) for message in messages]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engine: {command: ‸[x]}", "the local engine takes no command"),
        ("engine: {name: verl, command: [x, ‸3]}", "must be text, not 3"),
        ("recipe: {steps: ‸5.5}", "must be a whole number, not 5.5"),
        ("recipe: {lr: ‸fast}", "must be a number, not the text 'fast'"),
        (
            "candidates: ‸all",
            'must be "auto" or a list of {fault, strength, from_step, until_step, probability}',
        ),
        ("candidates: ‸{}", "must be a list, not a mapping"),
        ("candidates: ‸[]", "must not be empty"),
        ("candidates: [‸{}]", 'missing required key "fault"'),
        ("candidates: [{fault: stale_weights, from_step: ‸61}]", "after the last step of the recipe (60)"),
        ("candidates: [{fault: stale_weights, probability: ‸2}]", "must be at most 1, not 2"),
        (
            "candidates: [{fault: stale_weights}, ‸{fault: stale_weights, strength: 1}]",
            "the same fault and strength as candidate 1",
        ),
        ("budget: ‸60", "must be a mapping, not 60"),
        ("expect: {verdict: ‸reproducd}", "must be reproduced, reproduced_not_specific, "),
        ("‸candidate: auto", "unknown key 'candidate'; did you mean candidates? (allowed: version, "),
        ("‸version: 1", "duplicate key 'version' (first in line 1)"),
        ("title: ‸!env X", "tag '!env' is not allowed"),
        ("‸---\nx: 1", "a second document: only one is read"),
        ("‸\ttitle: x", "a tab character: indent with spaces"),
    ],
)
def test_one_mistake_in_what_may_be_left_out(tmp_path: Path, text: str, message: str) -> None:
    ((line, col, found),), *place = at_mark(tmp_path, f"{MINIMAL}{text}\n")
    assert [line, col] == place
    assert found.startswith(message)


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}"])
def test_an_empty_playbook_names_what_is_required(tmp_path: Path, text: str) -> None:
    assert [issue[2] for issue in issues(tmp_path, text)] == [
        f'missing required key "{key}"' for key in ("name", "original", "proxy", "symptom", "version")
    ]


def test_a_playbook_that_is_no_mapping(tmp_path: Path) -> None:
    assert issues(tmp_path, "- a\n- b\n") == [(1, 1, "must be a mapping, not a list")]


def test_a_playbook_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(PlaybookError, match=r"absent\.yaml:1:1: No such file or directory"):
        load(tmp_path / "absent.yaml")
    with pytest.raises(PlaybookError, match="Is a directory"):
        load(tmp_path)
    with pytest.raises(InvalidPlaybook, match="1:1: larger than 1 MiB"):
        load(write(tmp_path, "#" * 2_000_000))


@given(st.lists(st.sampled_from(EXAMPLE.splitlines()), max_size=20), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=100)
def test_shuffled_lines_are_a_playbook_or_issues(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], random: Random
) -> None:
    text = "\n".join(line[random.randint(0, 3) :] for line in lines)
    path = tmp_path_factory.getbasetemp() / "shuffled.yaml"
    path.write_text(text)
    try:
        load(path)
    except InvalidPlaybook as error:
        assert error.issues
        height = text.count("\n") + 2
        assert all(1 <= i.line <= height and i.message.isprintable() for i in error.issues)


ODD = [
    "~",
    "''",
    "'-'",
    "~nobody_of_that_name/x",
    "1e400",
    "-1e400",
    ".inf",
    ".nan",
    "0",
    "-1",
    "true",
    "1:30",
]
ODD += [
    "[]",
    "{}",
    "[[]]",
    "[{}]",
    "{a: b}",
    "{1: 2}",
    "[auto]",
    "[x, [y]]",
    "!!binary aGk=",
    "!!float '1'",
    "0x10",
]
ODD += ["/dev/zero", "/", '"\\0"', "auto", "embedded", "embedded:", "router+router", "+", "a/b"]
ODD += ["1" * 400, "-" + "1" * 400, "x" * 5000]
IN_BRACES = [("recipe", key) for key in RecipeSettings.model_fields]
IN_BRACES += [("engine", key) for key in ("name", "command", "python")]
IN_BRACES += [("candidates", key) for key in CandidateSpec.model_fields]


@given(
    st.sampled_from(EXAMPLE.splitlines()[1:]), st.sampled_from([("", ""), *IN_BRACES]), st.sampled_from(ODD)
)
@settings(deadline=None, max_examples=200)
def test_odd_values_are_a_playbook_or_issues(
    tmp_path_factory: pytest.TempPathFactory, line: str, inner: tuple[str, str], value: str
) -> None:
    key, where = line.partition(":")[0], line
    if inner[0]:
        key, where = inner[0], next(line for line in EXAMPLE.splitlines() if line.startswith(inner[0]))
        value = f"{{{inner[1]}: {value}}}"
        value = f"[{value}]" if key == "candidates" else value
    text = EXAMPLE.replace(where, f"{key}: {value}")
    path = tmp_path_factory.getbasetemp() / "odd.yaml"
    path.write_text(text)
    try:
        load(path)
    except InvalidPlaybook as error:
        assert all(issue.message.isprintable() for issue in error.issues)


def test_cards_can_be_held_back(tmp_path: Path) -> None:
    path = write(tmp_path, EXAMPLE)
    with pytest.raises(InvalidPlaybook, match="19:17: unknown fault 'learning_rate_too_high'"):
        load(path, library().without("learning_rate_too_high"))


def test_recipe_settings_are_the_recipe_and_the_seeds() -> None:
    settings_ = RecipeSettings()
    assert settings_.model_dump(exclude={"seeds"}) == asdict(Recipe())
    assert set(RecipeSettings.model_fields) == {field.name for field in fields(Recipe)} | {"seeds"}


def test_candidates(tmp_path: Path) -> None:
    cards = library()
    auto = playbooks.resolve_candidates(load(write(tmp_path, EXAMPLE)), cards)
    assert [c.fault for c in auto] == [
        card.id for card in cards.cards.values() if "kl_divergence_increase" in card.symptoms
    ]
    assert all((c.strength, c.from_step, c.until_step, c.probability) == (1.0, None, 0, 1.0) for c in auto)
    assert len(auto) >= 2

    unknown = load(write(tmp_path, MINIMAL))
    assert [c.fault for c in playbooks.resolve_candidates(unknown, cards)] == list(cards.cards)
    shown = playbooks.resolve_candidates(unknown, cards, ("no_learning", "routing_shift"))
    assert {c.fault for c in shown} == {
        card.id for card in cards.cards.values() if {"no_learning", "routing_shift"} & set(card.symptoms)
    }

    text = (
        MINIMAL + "candidates: [{fault: stale_weights, strength: 2, from_step: 5}, {fault: stale_weights}]\n"
    )
    assert playbooks.resolve_candidates(load(write(tmp_path, text)), cards) == (
        CandidateSpec(fault="stale_weights", strength=2.0, from_step=5),
        CandidateSpec(fault="stale_weights"),
    )


def test_commands_need_permission_and_are_shown_as_lists(tmp_path: Path) -> None:
    text = MINIMAL + 'engine: {name: verl, command: [sh, -c, "rm -rf $HOME; x"], python: python3.12}\n'
    assert playbooks.needs_permission(load(write(tmp_path, text))) == [
        "engine.python: python3.12",
        'engine.command: ["sh", "-c", "rm -rf $HOME; x"]',
    ]


def test_finding_a_playbook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = tmp_path / "shipped"
    (shipped / "more").mkdir(parents=True)
    (shipped / "kl_spike.yaml").write_text(MINIMAL)
    (shipped / "more" / "stale.yaml").write_text(MINIMAL)
    monkeypatch.setattr(playbooks, "files", lambda package: shipped)
    monkeypatch.chdir(tmp_path)
    assert playbooks.find("kl_spike") == shipped / "kl_spike.yaml"
    assert playbooks.find("stale") == shipped / "more" / "stale.yaml"
    mine = write(tmp_path, MINIMAL)
    assert playbooks.find(mine) == mine
    assert playbooks.find("book.yaml") == Path("book.yaml")
    shutil.copy(mine, tmp_path / "kl_spike")
    assert playbooks.find("kl_spike") == Path("kl_spike"), "a file in the working folder comes first"
    for name in ("x" * 5000, "~nobody_of_that_name/x", "a\0b", "\x1b[2J"):
        with pytest.raises(PlaybookError, match="no playbook ") as error:
            playbooks.find(name)
        assert str(error.value).isprintable()
    with pytest.raises(PlaybookError, match="no playbook 'kl_spke'; did you mean kl_spike") as error:
        playbooks.find("kl_spke")
    assert error.value.mend == "name a file or a shipped playbook: kl_spike, stale"


def test_shipped_playbooks_are_valid_and_called_like_their_files() -> None:
    for name, path in playbooks.shipped().items():
        assert load(path).name == name


def test_the_committed_schema_is_the_models() -> None:
    assert json.loads(SCHEMA.read_text(encoding="utf-8")) == playbooks.schema(), (
        "renew it: diagnose schema > playbooks/playbook.schema.json"
    )


def test_the_schema_accepts_what_loads_and_refuses_mistakes(tmp_path: Path) -> None:
    validator = jsonschema.Draft202012Validator(playbooks.schema())
    validator.check_schema(playbooks.schema())
    for text in (EXAMPLE, MINIMAL, MINIMAL + "candidates: [{fault: stale_weights}]"):
        validator.validate(yaml.safe_load(text.replace("8e-5", "8.0e-5")))
    for old, new in (
        ("version: 1", "version: 2"),
        ("auto", "otto"),
        ("experts: 12", "expert: 12"),
        ("name: short", ""),
    ):
        assert list(validator.iter_errors(yaml.safe_load(MINIMAL.replace(old, new))))


def test_reading_a_playbook_needs_no_torch(tmp_path: Path) -> None:
    path = write(tmp_path, EXAMPLE.replace("multi_view", "router+context"))
    code = (
        "import sys, pathlib, diagnose.playbook\n"
        f"diagnose.playbook.load(pathlib.Path({str(path)!r}))\n"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
