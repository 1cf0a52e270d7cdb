"""One word for one thing: RUN is a record's folder, PATH a log, a file or a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

Runs = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
Paths = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="PATH")]
OnePath = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")]
