"""`make accept`: the spine's promises, checked with real incidents, real builds and real training (about half an hour).

Incidents are recorded anew from the embedded original, with seeds and strengths that no replay and no margin has
seen. Replays whose content key is the same (same proxy, recipe, seed, fault and injection step) are shared between
the incidents of one call, as a resumed run would share them; each of them is really run once.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from diagnose.prepare import Overrides, open_run, prepare
from diagnose.scoring import evaluate
from diagnose.session import load
from diagnose.store import RunFolder
from taxonomy import registry

DIAGNOSE = [sys.executable, "-m", "diagnose"]
TRUTH = "learning_rate_too_high"
PLAYBOOK = """version: 1
name: accept
symptom: kl_divergence_increase
original: {{faulty: {faulty}, healthy: [{root}/healthy_1.jsonl, {root}/healthy_2.jsonl]}}
proxy: {{from: checkpoint, checkpoint: "embedded:qwen3_moe", experts: 12}}
recipe: {{steps: 60, seeds: 2}}
budget: {{seconds: 3600}}
"""


def call(*words: str, timeout: float = 1800) -> subprocess.CompletedProcess[str]:
    """Run the command line and return what it said."""
    return subprocess.run([*DIAGNOSE, *words], capture_output=True, text=True, timeout=timeout, check=False)


def shipped(*parts: str) -> Path:
    """Return a file of the shipped playbooks."""
    import playbooks

    return Path(playbooks.__file__).parent.joinpath(*parts)


class Bench:
    """One scratch folder, its table, and the pool of replays made so far."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.pool = scratch / "pool"
        (self.pool / "runs").mkdir(parents=True, exist_ok=True)
        self.table = Table("check", "wanted", "got", "holds", title="acceptance of the spine")
        self.failed = 0

    def row(self, check: str, wanted: str, got: str, holds: bool) -> None:
        """Add a line and print it at once."""
        self.failed += not holds
        self.table.add_row(check, wanted, got, "yes" if holds else "NO")
        print(f"{check}: {got} ({'holds' if holds else 'DOES NOT HOLD'})", flush=True)

    def record(
        self, name: str, seed: int, fault: str = "", strength: float = 1.0, from_step: int = 1
    ) -> Path:
        """Record an incident, unless this scratch folder has it already."""
        log = self.scratch / "logs" / f"{name}.jsonl"
        if not log.with_suffix(".manifest.json").exists():
            words = ["record", "--checkpoint", "embedded:qwen3_moe", "--seed", str(seed), "--out", str(log)]
            if fault:
                words += ["--fault", fault, "--strength", str(strength), "--from-step", str(from_step)]
                words += ["--answers", str(log.with_suffix(".answer.json"))]
            done = call(*words)
            assert done.returncode == 0, done.stderr
        return log

    def diagnose(self, name: str, log: Path) -> tuple[dict[str, Any], int, RunFolder]:
        """Diagnose an incident with the replays of the pool; return the answer, exit code and run folder."""
        playbook = self.scratch / f"{name}.yaml"
        playbook.write_text(PLAYBOOK.format(faulty=log, root=shipped("logs", "kl_spike")))
        home = self.scratch / "runs" / name
        shutil.rmtree(home, ignore_errors=True)
        folder = open_run(prepare(playbook, Overrides()), home)
        for part in ("proxy", "runs"):
            if (self.pool / part).exists():
                shutil.copytree(self.pool / part, home / part, dirs_exist_ok=True)
        done = call("run", "--resume", str(home), "--json")
        shutil.copytree(home / "proxy", self.pool / "proxy", dirs_exist_ok=True)
        for run in (home / "runs").iterdir():
            # A run id does not name the injection step; keep the newest, the key decides whether it is reused.
            shutil.copytree(run, self.pool / "runs" / run.name, dirs_exist_ok=True)
        return json.loads(done.stdout), done.returncode, folder


def strengths(bench: Bench) -> None:
    """Three other seeds, half and twice the strength: the fault first, or in a set of two, in five of six."""
    good, lines = 0, []
    for seed in (501, 502, 503):
        for strength in (0.5, 2.0):
            name = f"lr-x{strength:g}-s{seed}"
            answer, _, _ = bench.diagnose(name, bench.record(name, seed, TRUTH, strength, 21))
            first = answer["ranking"][0]
            named = [first["fault"], *first["rivals"]]
            hit = first["fault"] == TRUTH or (TRUTH in named and len(named) == 2)
            good += hit
            lines.append(f"{name}: {first['fault']} ({answer['verdict']}, rivals {len(first['rivals'])})")
    bench.row(
        "strengths", "≥ 5 of 6 first or in a set of two", f"{good} of 6; " + "; ".join(lines), good >= 5
    )


def healthy(bench: Bench) -> None:
    """Ten unseen healthy seeds end `no_fault`."""
    verdicts = []
    for seed in range(601, 611):
        name = f"healthy-s{seed}"
        answer, code, _ = bench.diagnose(name, bench.record(name, seed))
        verdicts.append(answer["verdict"] if code == 0 else f"{answer['verdict']} (exit {code})")
    clean = verdicts.count("no_fault")
    bench.row("healthy logs", "10 of 10 no_fault", f"{clean} of 10", clean == 10)


def deleted(bench: Bench) -> None:
    """The incident's own fault out of the library: nothing may be called specific."""
    _, _, folder = bench.diagnose("deleted", shipped("logs", "kl_spike", "incident.jsonl"))
    session = load(folder)
    full = registry.library()
    less = full.without(TRUTH)
    kept = tuple(item for item in session.candidates if item.fault != TRUTH)
    from dataclasses import replace

    import diagnose.scoring as scoring

    scoring.library = lambda: less  # type: ignore[attr-defined]
    result = evaluate(replace(session, candidates=kept), folder, {}, 0.0, "")
    scoring.library = lambda: full  # type: ignore[attr-defined]
    verdict = result.score.verdict.value
    bench.row("fault deleted from the library", "not reproduced (specific)", verdict, verdict != "reproduced")


def short(bench: Bench) -> None:
    """Four steps are no evidence."""
    done = call("run", "kl_spike", "--steps", "4", "--out", str(bench.scratch / "runs" / "short"), "--json")
    verdict = json.loads(done.stdout)["verdict"]
    bench.row(
        "four steps", "inconclusive, exit 5", f"{verdict}, exit {done.returncode}", done.returncode == 5
    )


def malformed(bench: Bench) -> None:
    """A typo in a playbook is named with its place."""
    bad = bench.scratch / "bad.yaml"
    text = shipped("kl_spike.yaml").read_text().replace("kl_divergence_increase", "kl_divergence_incraese")
    bad.write_text(text)
    done = call("run", str(bad))
    said = " ".join(done.stderr.split())
    holds = done.returncode == 2 and "bad.yaml:8:10: unknown symptom" in said and "allowed:" in said
    bench.row("malformed playbook", "exit 2, file:line:col", f"exit {done.returncode}, {said[-300:]}", holds)


def killed(bench: Bench) -> None:
    """Kill -9 of the viewer loses nothing; kill -9 of the runner and --resume end in the same verdict."""
    home = bench.scratch / "runs" / "killed"
    shutil.rmtree(home, ignore_errors=True)
    viewer = subprocess.Popen(
        [*DIAGNOSE, "run", "kl_spike", "--out", str(home)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while not list(home.glob("runs/*/outcome.json")):
        time.sleep(0.5)
    viewer.send_signal(signal.SIGKILL)
    viewer.wait()
    before = len(list(home.glob("runs/*/outcome.json")))
    while len(list(home.glob("runs/*/outcome.json"))) < before + 3:
        time.sleep(0.5)
    os.kill(int((home / "runner.pid").read_text().split()[0]), signal.SIGKILL)
    time.sleep(2)
    kept = len(list(home.glob("runs/*/outcome.json")))
    done = call("run", "--resume", str(home), "--json")
    answer = json.loads(done.stdout)
    undisturbed = call("run", "kl_spike", "--out", str(bench.scratch / "runs" / "undisturbed"), "--json")
    calm = json.loads(undisturbed.stdout)
    same = all(answer[key] == calm[key] for key in ("verdict", "reasons", "ranking"))
    got = (
        f"runner went on to {kept} runs after the viewer's death; resumed: {answer['verdict']}, same: {same}"
    )
    bench.row("kill -9", "the undisturbed answer after --resume", got, same)
    first = answer["ranking"][0]
    alone = first["fault"] == TRUTH and not first["rivals"]
    got = f"{first['fault']}, rivals {first['rivals']}, {answer['verdict']}"
    bench.row("kl_spike", "the true fault first and alone", got, alone)


CHECKS = {
    "malformed": malformed,
    "short": short,
    "killed": killed,
    "deleted": deleted,
    "strengths": strengths,
    "healthy": healthy,
}


def main() -> None:
    """Print the table; exit 1 where a promise does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scratch", type=Path, default=Path("build/accept"))
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=f"of: {', '.join(CHECKS)} (default: all)")
    arguments = parser.parse_args()
    bench = Bench(arguments.scratch.absolute())
    for name in arguments.checks or CHECKS:
        CHECKS[name](bench)
    Console(width=160).print(bench.table)
    sys.exit(bench.failed > 0)


if __name__ == "__main__":
    main()
