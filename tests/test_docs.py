"""Generated pages are current, and what the README says can be pasted."""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import json
import re
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

from creditscope import METHODS
from creditscope.claims.verdict import ClaimVerdict
from creditscope.cli.localise import mark
from creditscope.credit import find_estimator
from creditscope.credit.tools import Tools
from creditscope.optimizer.brakes import Recall
from creditscope.optimizer.probe import Probe
from creditscope.tasks.worker import check_steps
from makers import load_script, make

ROOT = Path(__file__).resolve().parent.parent


def generator() -> ModuleType:
    return load_script(ROOT / "docs" / "generate.py")


def test_the_page_of_methods_is_current() -> None:
    assert generator().methods_page() == (ROOT / "docs" / "methods.md").read_text(), "run: make docs"


def test_the_page_of_the_record_is_current() -> None:
    assert generator().record_page() == (ROOT / "docs" / "record.md").read_text(), "run: make docs"


def test_the_page_of_the_doctor_is_current() -> None:
    assert generator().doctor_page() == (ROOT / "docs" / "doctor.md").read_text(), "run: make docs"


def test_the_page_of_trainers_is_current() -> None:
    assert generator().trainers_page() == (ROOT / "docs" / "trainers.md").read_text(), "run: make docs"


@pytest.mark.nightly
def test_the_page_of_credit_is_current() -> None:
    assert generator().credit_page() == (ROOT / "docs" / "credit.md").read_text(), "run: make docs"


@pytest.mark.slow
def test_what_the_page_of_credit_says_of_seven_lines_and_of_many_turns_is_current(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """Each estimator's text, seven rows of the table, and the ladder; the whole page takes 17 s of enumeration."""
    pages = generator()
    survey = importlib.import_module("survey")
    quick = [line for line in survey.LINES if line.spec in ("outcome", "leave_one_out", "optimal_token", "monte_carlo",
                                                            "prefix_tree") or line.name == "step_return"]
    assert len(quick) == 7
    monkeypatch.setattr(survey, "LINES", quick)
    page = (ROOT / "docs" / "credit.md").read_text().splitlines()
    found = "".join((*pages.estimators_section(), *pages.exactness_section(survey), *pages.LAWS,
                     *pages.turns_section(survey))).splitlines()
    assert [line for line in found if line not in page] == [], "run: make docs"
    for line in quick:
        row = next(row for row in page if row.startswith(f"| {line.name} | ") and "biased" in row)
        assert survey.verdict(line) in row, "run: make docs"


def without_rounding(text: str) -> str:
    """The last digits differ from machine to machine."""
    return re.sub(r"\b\d+(\.\d+)?e-\d\d\b", "tiny", text)


@pytest.mark.nightly
def test_the_page_of_claims_and_the_papers_verdicts_are_what_the_evidence_says() -> None:
    pages = generator()
    found = without_rounding(pages.claims_page())
    assert found == without_rounding((ROOT / "docs" / "claims.md").read_text()), "run: make docs"
    assert pages.papers_page() == (ROOT / "docs" / "papers.md").read_text(), "run: make docs"


@pytest.mark.slow
def test_the_page_of_claims_says_of_every_run_what_the_evidence_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the exact verdicts, which take seconds and are tested in tests/claims."""
    pages = generator()
    monkeypatch.setattr(pages, "run_exact", list)
    found, page = (without_rounding(text).partition("\n## ")[2].splitlines()
                   for text in (pages.claims_page(), (ROOT / "docs" / "claims.md").read_text()))
    assert len(found) > 200
    assert {line for line in found if line not in page} == {"No verdict yet."}, "run: make docs"
    ours, told = (verdicts_of_runs(pages.VERDICTS.search(text)[0])
                  for text in (pages.papers_page(), (ROOT / "docs" / "papers.md").read_text()))
    assert len(told) > 10
    assert ours == told, "run: make docs"


def test_a_model_has_a_column_once_results_has_runs_of_it() -> None:
    pages = generator()
    ours = [ClaimVerdict(claim="P1.5", definition="", subject=subject, outcome="holds", reason="", observed=2.0)
            for subject in ("tiny · arithmetic · p1_grpo", "qwen-0.5b · gsm8k:data · p1_grpo")]
    assert list(pages.columns(ours)) == ["closed forms", "packaged model", "Qwen2.5-Coder-0.5B"]
    assert list(pages.columns(ours[:1])) == ["closed forms", "packaged model"]


def verdicts_of_runs(table: str) -> dict[str, list[str]]:
    """Claim -> cells of the table in papers.md, without the column of closed forms and claims that are in no other."""
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()]
    assert rows[0][2] == "closed forms"
    return {row[0]: [row[1], *row[3:]] for row in rows[2:] if any(cell.strip(" |") for cell in row[3:])}


def test_every_row_on_localisation_is_that_of_the_committed_outcome() -> None:
    """Identity: the tables of docs/results.md against what `creditscope papers localise --json` printed."""
    section = (ROOT / "docs" / "results.md").read_text().partition("## Does credit point at the wrong step?")[2]
    tables = {"planted": "### Arithmetic", "own": "### The same groups", "processbench": "### ProcessBench"}
    for name, heading in tables.items():
        body = section.partition(heading)[2].partition("\n##")[0]
        rows = {cells[0]: cells[1:] for line in body.splitlines() if line.startswith("| ") and "[" in line
                for cells in [[cell.strip() for cell in line.strip("|").split(" | ")]]}
        found = localised(name)
        assert rows == {label: found[label] for label in rows}
        # A later estimator that is uniform by construction is said in the text.
        assert {label.split(",")[0] for label in found.keys() - rows.keys()} <= {"optimal_sequence"}


def localised(table: str) -> dict[str, list[str]]:
    """Label -> cells, of every committed outcome that has the table."""
    rows = {}
    for path in sorted((ROOT / "results" / "localise").glob("*.json")):
        for row in json.loads(path.read_text())["tables"].get(table, []):
            cells = [f"{mean['mean']:.3f} [{mean['low']:.3f}, {mean['high']:.3f}]"
                     for mean in (row["size"], row["blame"], row["hit"])]
            critic = " (critic: model)" if "critic" in path.stem and row["name"].startswith("gae") else ""
            label = row["name"] + critic + mark(row["name"]).replace("*", "\\*")
            rows[label] = [*cells, f"{row['silent']}/{row['n']}"]
    return rows


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 250


@pytest.mark.conformance
@pytest.mark.slow
def test_the_page_of_conformance_is_current() -> None:
    pytest.importorskip("trl")

    def without_rounding(text: str) -> str:  # the last digits differ from machine to machine
        return re.sub(r"\| (0|< 1e-1\d) \|", "| tiny |", text)

    page = without_rounding(generator().conformance_page())
    assert page == without_rounding((ROOT / "docs" / "conformance.md").read_text()), "run: make docs"


def test_the_readmes_snippet_prints_what_the_readme_shows() -> None:
    readme = (ROOT / "README.md").read_text()
    snippet = re.search(r"```python\n(import torch\n.*?)```\n\n```\n(.*?)```", readme, re.DOTALL)
    assert snippet is not None
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(snippet[1], {"__name__": "__main__"})
    assert out.getvalue() == snippet[2]


def lab_snippets() -> list[str]:
    """The Python blocks of the lab's section on credit: an estimator, then a reward function that judges steps."""
    page = (ROOT / "docs" / "lab.md").read_text()
    section = page[page.index("## Credit"):page.index("## The run directory")]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


def test_the_lab_s_estimator_of_ones_own_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_module.py").write_text(lab_snippets()[0])
    monkeypatch.chdir(tmp_path)
    chosen = find_estimator("my_module:mine,power=0.5")
    batch = make([1, 0, 0], [0, 0, 0], [2, 3, 1])
    credit = chosen(METHODS["dr_grpo"], batch, Tools())
    assert chosen.row.needs == ("entropy",)
    assert batch.entropy is not None
    assert credit[0, 0].item() == pytest.approx(2 / 3 * batch.entropy[0, 0].item() ** 0.5)


def test_the_lab_s_judge_of_steps_gives_steps_that_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(lab_snippets()[1])
    text = "1 + 1 = 2\n2 + 2 = 5\n"
    reward, steps = load_script(tmp_path / "judge.py").score(text, {"answer": "5", "right_lines": ["1 + 1 = 2"]})
    assert (reward, check_steps(steps, len(text))) == (1.0, [(0, 10, 1.0, None), (10, 20, 0.0, None)])


def test_the_example_without_a_baseline_gives_the_reward_where_the_group_is_mixed() -> None:
    batch = make([1, 0, 1, 1], [0, 0, 1, 1], [2, 1, 1, 2])
    credit = load_script(ROOT / "examples" / "no_baseline.py").no_baseline(METHODS["dr_grpo"], batch, Tools())
    assert credit.tolist() == [[1, 1], [0, 0], [0, 0], [0, 0]]


@pytest.mark.slow
def test_the_example_of_ones_own_loop_finds_overshoot_and_the_brake_lowers_it() -> None:
    example = load_script(ROOT / "examples" / "own_loop.py")
    example.sample = partial(example.sample, prompts=1, group=6)  # a fifth of the example's batch
    plain, braked = next(example.plain(steps=1)), next(example.braked(steps=1))
    assert plain["overshoot/distance"] > 2 * braked["overshoot/distance"] > 0
    assert plain["overshoot/after"] > 0.4 > braked["overshoot/after"]
    assert 0 < plain["optimizer/scale_change"] < 0.1
    # Five lines, the microscope's among them: the arrows in the page count them.
    assert (ROOT / "examples" / "own_loop.py").read_text().count("← ") == 5


def optimizer_snippets() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "optimizer.md").read_text(), re.DOTALL)


def test_the_optimizer_page_s_loops_run_as_they_stand_and_the_probe_prints_its_readings(
        capsys: pytest.CaptureFixture[str]) -> None:
    batch = make([1, 0, 1], [0, 0, 0], [2, 3, 2])
    theta = torch.nn.Parameter(batch.logp.clone())
    model = torch.nn.ParameterDict({"theta": theta})

    def forward() -> torch.Tensor:
        return theta * 1.0

    names = {"model": model, "method": METHODS["grpo"], "rollouts": batch, "forward": forward, "Probe": Probe,
             "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1), "Recall": Recall, "logp": forward()}
    for snippet in optimizer_snippets():
        exec(snippet, names)
    assert not torch.equal(theta, batch.logp)
    printed = ast.literal_eval(capsys.readouterr().out)
    assert {"overshoot/4/kl", "overshoot/kl", "update/cosine", "optimizer/scale_change"} <= printed.keys()


def test_every_link_in_the_pages_leads_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_python_file_that_a_page_names_exists() -> None:
    """`lab/train.py` below src/creditscope or the root; a bare `ratios.py` is in the folder named before it."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    files = {f"/{path.relative_to(ROOT).as_posix()}" for folder in ("src", "tests", "docs", "examples", "benchmarks",
             "recipes") for path in (ROOT / folder).rglob("*.py")}
    wrong = [f"{page.name}: {name}" for page in pages for name in re.findall(r"`((?:\w+/)*\w+\.py)", page.read_text())
             if "NAME" not in name and name != "my_module.py" and not any(file.endswith(f"/{name}") for file in files)]
    assert not wrong, wrong
