"""One file of a log -> its rows, the settings printed in it, and the program that wrote it."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from creditscope.diagnosis.log import RecordSource
from creditscope.diagnosis.readers import text
from creditscope.diagnosis.readers.blocks import BlockReader
from creditscope.diagnosis.readers.documents import array_of, is_notebook, notebook_texts
from creditscope.diagnosis.readers.events import PREFIX, event_rows
from creditscope.diagnosis.readers.printed import PrintedSettings
from creditscope.diagnosis.readers.refusals import program_of
from creditscope.diagnosis.readers.rows import MAX_SEEN, STEPS, RowCollector, is_read, own_name
from creditscope.diagnosis.readers.shapes import rows_of, table_rows
from creditscope.errors import CreditscopeError
from creditscope.files.jsonlines import Repeated
from creditscope.runs.record import Record
from creditscope.runs.stopped import ended_by

MAX_TALK = 2000
"""Lines in which the name of the program is searched."""


class LogFile:
    """Rows, printed settings and notes of one file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.source: str = f"{file.name}, line"
        self.notes: list[str] = []
        self.rows = RowCollector(self.notes)
        self.printed = PrintedSettings()
        self._blocks = BlockReader()
        self.program = ""
        self._talk = 0
        self.planned: object = None
        """The steps that TRL's state says were planned."""

    def add_record(self, record: Record, path: Path) -> None:
        steps = record.steps() if (self.file.parent / "steps.jsonl").exists() else []
        if not steps:
            raise CreditscopeError(f"{path} has no step yet; wait for the run's first step, or look why it stopped")
        if why := ended_by(steps):
            self.notes.append(f"the run ended early with an error: {why}")
        self.source = RecordSource("steps.jsonl, line")
        for place, step in enumerate(steps, start=1):
            self.rows.add(place, whole_step(step))

    def add(self) -> None:
        """The rows of the file, as its suffix says how they are written."""
        if self.file.suffix in (".json", ".ipynb"):
            self.add_document()
        elif self.file.suffix in (".csv", ".tsv"):
            self.add_table()
        elif self.file.name.startswith(PREFIX):
            self.source = f"{self.file.name}, record"
            for place, entry in event_rows(self.file, self.notes):
                self.rows.add(place, entry)
        else:
            self.add_lines()
        self._add_blocks(self._blocks.end())

    def add_document(self) -> None:
        """TRL's state, an array of rows, or a notebook; a file of JSON lines with this suffix is read by lines."""
        content = text.small_text(self.file, text.MAX_DOCUMENT)
        if self.file.name != "trainer_state.json" and _is_lines(content):
            return self.add_lines()
        document = text.json_of(content, self.file)
        if is_notebook(document):
            return self._add_notebook(document)
        name, rows = array_of(document)
        self.source = f"{self.file.name}, {name} entry"
        self.planned = document.get("max_steps") if isinstance(document, dict) else None
        for place, entry in enumerate(rows, start=1):
            if isinstance(entry, dict):
                self.rows.add(place, entry)
        return None

    def _add_notebook(self, document: dict[str, Any]) -> None:
        self.source = f"{self.file.name}, output line"
        place = 0
        for kind, content in notebook_texts(document):
            if kind == "html":
                place += 1
                for entry in table_rows(content):
                    self.rows.add(place, entry)
                continue
            for line in content.split("\n"):
                if kind == "source":
                    self.printed.see(line)
                elif len(line) <= text.MAX_LINE:
                    place += 1
                    self._add_line(place, line)

    def add_lines(self) -> None:
        for number, line in text.bounded_lines(self.file, self.notes):
            self._add_line(number, line)

    def _add_blocks(self, ended: Iterable[tuple[int, Mapping[str, Any]]]) -> None:
        for place, entry in ended:
            self.rows.add(place, entry)

    def _add_line(self, number: int, line: str) -> None:
        self._talk += 1
        if self._talk <= MAX_TALK and not self.program:
            self.program = program_of(line[:500])
        inside, ended = self._blocks.see(number, line)
        self._add_blocks(ended)
        if inside or self.printed.see(line):
            return
        try:
            for entry in rows_of(line):
                self.rows.add(number, entry)
        except Repeated as error:
            raise CreditscopeError(f"{self.file}, line {number}: {error}") from None

    def add_table(self) -> None:
        lines = (line.replace("\0", "") for _, line in text.bounded_lines(self.file, self.notes))
        reader = csv.reader(lines, delimiter="\t" if self.file.suffix == ".tsv" else ",")
        try:
            names = [column if column in STEPS else own_name(column) for column in next(reader, [])]
            # Known columns alone, so that a header of any length does not slow down each row.
            at = {name: place for place, name in enumerate(names) if is_read(name)}
            for row in reader:
                self.rows.add(reader.line_num, {name: row[place] for name, place in at.items() if place < len(row)})
            self.rows.seen.update(dict.fromkeys(name[:80] for name in names[:MAX_SEEN]))
        except csv.Error as error:
            raise CreditscopeError(f"{self.file}, line {reader.line_num}: not a table: {error}; save it as plain "
                                   f"csv") from None


def whole_step(step: Mapping[str, Any]) -> Mapping[str, Any]:
    """A record keeps NaN apart, under `absent`."""
    absent = step.get("absent")
    return {**absent, **step} if isinstance(absent, dict) else step


def _is_lines(content: str) -> bool:
    """Whether a text is one JSON object per line and not one document."""
    first, _, rest = content.lstrip().partition("\n")
    return first.startswith("{") and first.rstrip().endswith("}") and rest.lstrip().startswith("{")
