"""Sphinx's settings of the documentation site: `make site`.

The sources are the Markdown files of the whole repository, so that the pages' links (to CONTRIBUTING.md, to
benchmarks/) are the same on the site as in a checkout. The home page is docs/index.md. Nothing is loaded from the
network.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "docs" / "_ext"), str(ROOT / "src")]

from creditscope import __version__  # noqa: E402

project = "creditscope"
author = "The creditscope authors"
copyright = author
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "mathml", "docstrings", "repository_files", "gallery", "home",
              "notebook"]
root_doc = "docs/index"
include_patterns = ["docs/*.md", "docs/**/*.md", "docs/*.ipynb", "benchmarks/*.md", "benchmarks/*/*.md", "recipes/*.md",
                    "results/*.md", "examples/*.md", "examples/*/*.md", "CONTRIBUTING.md", "SECURITY.md",
                    "CHANGELOG.md"]
exclude_patterns = ["docs/*.head.md", "docs/_*", "site", "build", ".*", "runs", "src", "tests", "**/*.tar.xz"]
smartquotes = False
nitpicky = False

myst_enable_extensions = ["dollarmath", "colon_fence", "deflist", "attrs_inline"]
myst_heading_anchors = 4
myst_links_external_new_tab = False

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_preserve_defaults = True
maximum_signature_line_length = 100
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"creditscope {version}"
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_favicon = "_static/icon.svg"
html_css_files = ["site.css"]
html_js_files = [("search_from_disk.js", {"priority": 900})]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": False}
highlight_language = "text"
pygments_style = "default"
pygments_dark_style = "github-dark"
