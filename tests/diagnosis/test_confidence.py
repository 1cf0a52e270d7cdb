"""The counts that `doctor --why` shows: whole, of rules that exist, and told without a number that was not counted."""

from __future__ import annotations

import pytest

from creditscope.cli.main import main
from creditscope.diagnosis.confidence import INPUTS, counts, told
from creditscope.diagnosis.rules import RULES
from diagnosis.makers_doctor import LOGS


def test_the_counts_are_of_rules_that_exist_and_add_up() -> None:
    table = counts()
    assert table["rules"].keys() <= RULES.keys()
    assert table["runs"].keys() == INPUTS.keys()
    for rule, seen in table["rules"].items():
        assert seen.keys() <= INPUTS.keys(), rule
        for which, each in seen.items():
            assert 0 < each["named"] >= each["right"] + each["healthy"], rule
            assert each["healthy"] <= table["runs"][which]["healthy"], rule
    for which, size in table["runs"].items():
        assert sum(seen[which]["named"] for seen in table["rules"].values() if which in seen) <= sum(size.values())


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_has_its_counts_or_says_that_it_was_never_named(rule: str) -> None:
    assert ("never named first" in told(rule)) == (rule not in counts()["rules"])


def test_the_doctor_shows_the_counts_of_bad_findings_with_why_alone(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, shown in (([], False), (["--why"], True)):
        with pytest.raises(SystemExit, match="0"):
            main(["doctor", str(LOGS / "trl-fall"), "--plain", *flags])
        printed = " ".join(capsys.readouterr().out.split())  # lines may be folded
        assert ("in the clinic (held-out runs)" in printed) is shown
