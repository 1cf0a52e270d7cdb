"""Links from the pages to files of the repository that are not pages: each such file becomes a page with its text.

    [examples/offline.py](../examples/offline.py)  →  repository/examples/offline.py.html
    [results](../results)                          →  the README of that folder, or the list of its files
"""

from __future__ import annotations

import html
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

LARGEST = 200_000
"""Bytes of a file that is shown; a larger one is named only."""
LEXERS = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".json": "json", ".toml": "toml"}
log = logging.getLogger(__name__)


class RepositoryLinks(SphinxTransform):
    """Replaces links to files and folders by links to the pages that `file_pages` makes."""

    default_priority = 100

    def apply(self, **_: Any) -> None:
        for node in [*self.document.findall(addnodes.download_reference), *self._links_to_folders()]:
            path = self._path(node["reftarget"])
            readme = self.env.path2doc(str(Path(self.env.srcdir) / path / "README.md"))
            if path.suffix == "" and readme in self.env.found_docs:
                page = readme
            elif (Path(self.env.srcdir) / path).exists() and ".." not in path.parts:
                self.env.linked_files.setdefault(self.env.docname, set()).add(path.as_posix())  # type: ignore[attr-defined]
                page = page_name(path.as_posix())
            else:
                log.warning("no file %s in the repository", path, location=node)
                continue
            uri = self.app.builder.get_relative_uri(self.env.docname, page)
            node.replace_self(nodes.reference("", "", *node.children, internal=True, refuri=uri))

    def _links_to_folders(self) -> Iterator[addnodes.pending_xref]:
        for node in self.document.findall(addnodes.pending_xref):
            path = "" if node.get("refdomain") else node["reftarget"].partition("#")[0]
            if path and node["reftype"] == "myst" and (Path(self.env.srcdir) / self._path(path)).is_dir():
                yield node

    def _path(self, target: str) -> PurePosixPath:
        """A link's target, from the root of the repository."""
        return PurePosixPath(os.path.normpath(PurePosixPath(self.env.docname).parent / target))


def page_name(path: str) -> str:
    return f"repository/{path}"


def file_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """One page per linked file or folder."""
    for path in sorted(set().union(*app.env.linked_files.values())):  # type: ignore[attr-defined]
        yield page_name(path), {"title": path, "body": _body(app, path), "parents": []}, "page.html"


def _body(app: Sphinx, path: str) -> str:
    here = Path(app.srcdir) / path
    heading = f"<h1>{html.escape(path)}</h1>\n"
    if here.is_dir():
        names = "".join(f"<li><code>{html.escape(each.name)}</code></li>\n" for each in sorted(here.iterdir()))
        return f"{heading}<p>A folder of the repository, with</p>\n<ul>\n{names}</ul>\n"
    if here.stat().st_size > LARGEST:
        return f"{heading}<p>A file of the repository, {here.stat().st_size} bytes.</p>\n"
    lexer = LEXERS.get(here.suffix, "text")
    return heading + app.builder.highlighter.highlight_block(here.read_text(), lexer)  # type: ignore[attr-defined]


def begin(app: Sphinx) -> None:
    if not hasattr(app.env, "linked_files"):
        app.env.linked_files = {}  # type: ignore[attr-defined]


def forget(app: Sphinx, env: Any, docname: str) -> None:
    env.linked_files.pop(docname, None)


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_transform(RepositoryLinks)
    app.connect("builder-inited", begin)
    app.connect("env-purge-doc", forget)
    app.connect("html-collect-pages", file_pages)
    return {"parallel_read_safe": False}
