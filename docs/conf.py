"""The configuration of the manual, which `make docs` builds with Sphinx."""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]

import dray  # noqa: E402

project = "dray"
author = "the authors of dray"
version = release = dray.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "manual.sphinx_extension"]
exclude_patterns = ["README.md"]
nitpicky = True

myst_heading_anchors = 4
myst_links_external_new_tab = False

autodoc_typehints = "signature"
autodoc_member_order = "bysource"

html_theme = "furo"
html_title = "dray"
html_use_index = False
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
html_favicon = "../api/page/static/icon.svg"
html_theme_options = {"navigation_with_keys": False}
html_static_path = ["static"]
# Docstrings put names in single backquotes, and don't link types.
default_role = "code"
nitpick_ignore_regex = [("py:.*", ".*")]
