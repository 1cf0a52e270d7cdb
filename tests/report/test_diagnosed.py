"""The diagnosis as the first block of a page."""

from __future__ import annotations

import re

from creditscope.diagnosis.engine import Diagnosis
from creditscope.diagnosis.finding import Finding
from creditscope.report.diagnosed import block

HOSTILE = "</p><script>alert(1)</script><img src=x onerror=alert(1)>\u202e\x1b"
CAUSE = Finding(rule="learning rate", state="broken", sentence="It is 0.1",
                evidence=("line 3: lr 0.1", "line 4: lr 0.1"), why="θ ← θ − η·g",
                change="learning_rate=1e-6", expect="KL falls within 10 steps")
FOUND = [CAUSE, Finding(rule="length drift", state="broken", sentence="Answers are short", onset=12,
                        follows=("learning rate",)),
         Finding(rule="entropy", state="watch", sentence="Entropy falls", onset=20, follows=("learning rate",)),
         Finding(rule="sampler", state="unknown", sentence="no reading", settles="use_vllm"),
         Finding(rule="loss", state="fine", sentence="The loss is 0")]


def test_the_block_leads_with_the_headline_and_shows_the_remedy_the_evidence_and_the_chain() -> None:
    html = block(Diagnosis(FOUND))
    text = re.sub("<[^>]+>", " ", html)
    for part in ("learning rate: It is 0.1.", "Change learning_rate=1e-6", "Expect KL falls within 10 steps",
                 "line 3: lr 0.1 line 4: lr 0.1", "Then step 12 length drift, step 20 entropy",
                 "entropy: Entropy falls. Follows from learning rate.", "sampler: no reading. Settled by: use_vllm.",
                 "✓ fine: 1 question : loss"):
        assert " ".join(part.split()) in " ".join(text.split())
    assert html.index("headline") < html.index("<dl>") < html.index("Then")
    assert text.count("learning_rate=1e-6") == 1  # on a phone the first screen has no room to say it twice
    assert '<p class="state"><span class="shape" aria-hidden="true">✗</span>broken</p>' in html


def test_a_run_that_cannot_be_judged_says_why() -> None:
    html = block(Diagnosis(FOUND[3:], unread="no reward is logged; columns: loss, lr"))
    assert "cannot judge: no reward is logged; columns: loss, lr." in html
    assert 'data-state="unknown"' in html
    assert "data-first" not in html


def test_hostile_text_in_any_field_of_a_finding_stays_text() -> None:
    for state in ("broken", "unknown", "fine"):
        bad = Finding(rule=HOSTILE, state=state, sentence=HOSTILE, evidence=(HOSTILE,), why=HOSTILE, change=HOSTILE,
                      expect=HOSTILE, settles=HOSTILE, assumes={HOSTILE: HOSTILE})
        html = block(Diagnosis([bad], unread=HOSTILE))
        assert "<script" not in html
        assert "<img" not in html
        assert "\u202e" not in html
        assert "&lt;script&gt;" in html
