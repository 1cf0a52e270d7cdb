"""A reward that pays for length alone: the fault of the gallery's run `hacked-reward`.

    cd docs/gallery
    python pays_length.py problems.jsonl          # the packaged task's problems, as prompt and answer
    creditscope lab train --task jsonl:problems.jsonl --reward pays_length:score --max-tokens 120
"""

import json
import sys
from itertools import islice
from pathlib import Path

LIMIT = 240
"""Characters that earn the whole reward."""


def score(text, row):
    """min(characters / LIMIT, 1), whatever the answer says."""
    return min(len(text) / LIMIT, 1.0)


def write_problems(file, problems=1000):
    """JSON lines with prompt and answer, of the packaged task."""
    from creditscope.tasks.arithmetic import Arithmetic

    with Path(file).open("w") as out:
        for problem in islice(Arithmetic().problems("train", 0), problems):
            out.write(json.dumps({"prompt": problem.prompt, "answer": problem.answer}) + "\n")


if __name__ == "__main__":
    write_problems(sys.argv[1])
