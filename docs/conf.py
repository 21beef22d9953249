import sys
from pathlib import Path

from mechanic import __version__

sys.path.insert(0, str(Path(__file__).parent))  # notebook_pages

project = "Mechanic"
copyright = "the mechanic developers"  # noqa: A001
release = __version__
extensions = [
    "myst_parser",
    "notebook_pages",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
myst_enable_extensions = ["amsmath", "attrs_block", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "Mechanic"
html_static_path = ["_static"]
html_css_files = ["mechanic.css"]
html_favicon = "_static/favicon.svg"
copybutton_selector = "div:not(.output) > div.highlight pre"  # not what a notebook has printed
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
nitpicky = True
linkcheck_ignore = [r"https?://"]  # the pages' own links; others need the network
# Of torch, JAX, Optax and the standard library; nothing is fetched to resolve them.
foreign = "torch|jax|optax|PyTree|collections|typing|numpy|npt|Optimizer|Tensor|ParamsT|ProcessGroup|Array|Any|Floats"
private = (
    r"mechanic\.torch\.(wrapped|factory)\.BaseT|mechanic\.torch\.factory\.Mechanic(Of|Options)"  # in signatures only
)
nitpick_ignore_regex = [(r"py:.*", rf"({foreign}).*"), (r"py:.*", private)]
autodoc_typehints = "signature"
autodoc_member_order = "bysource"


def captions_have_a_level(app, pagename, templatename, context, doctree):
    """In the navigation, where Sphinx makes headings of captions without saying of which level."""
    if tree := context.get("furo_navigation_tree"):
        context["furo_navigation_tree"] = tree.replace('role="heading"', 'role="heading" aria-level="2"')


def setup(app):
    app.connect("html-page-context", captions_have_a_level, priority=900)  # after the theme
