"""The site: `make docs`. Pages are Markdown and notebooks, the API reference comes from docstrings; nothing loads from outside."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_extensions"))

from api_reference import linkcode_resolve as linkcode_resolve  # noqa: E402

import partita  # noqa: E402
from partita.plots.colours import DARK, LIGHT, Theme  # noqa: E402

project = "partita"
author = "the authors of partita"
copyright = "the authors of partita, MIT licence"
release = version = partita.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.githubpages",  # no Jekyll: folders of the site begin with an underscore
    "sphinx.ext.linkcode",
    "sphinx_copybutton",
    "sphinx_design",
    "api_reference",
    "theorem_links",
    "offline",
]
exclude_patterns = ["_build", "_extensions", "_static", "**.ipynb_checkpoints"]
root_doc = "index"
language = "en"
highlight_language = "text"
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]  # types of other libraries, and private ones, are named without a link
linkcode_link_text = "source"

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
myst_links_external_new_tab = False

# Notebooks have no outputs in the repository: the build runs them.
nb_execution_mode = "force"
nb_execution_timeout = 600
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_merge_streams = True
nb_output_stderr = "remove"  # progress, and the note that native kernels are compiled
nb_ipywidgets_js = {}

autodoc_default_options = {"members": True, "member-order": "bysource", "special-members": "__call__"}
autodoc_typehints_format = "short"
autodoc_type_aliases = {name: name for name in ("Array", "ArrayLike", "BoxLike", "DomainLike", "Progress")}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = "partita"
html_logo = "_static/logo.svg"
html_favicon = "_static/logo.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_math_renderer = "mathml"
html_copy_source = False
html_show_sphinx = False


def _variables(theme: Theme, link: str) -> dict[str, str]:
    """furo's names for the colours of figures and studio."""
    return {
        "color-accent": theme.accent,
        "color-brand-primary": link,
        "color-brand-content": link,
        "color-brand-visited": link,
        "color-background-primary": theme.background,
        "color-background-secondary": theme.panel,
        "color-background-hover": theme.panel,
        "color-background-border": theme.rule,
        "color-foreground-primary": theme.ink,
        "color-foreground-secondary": theme.muted,
        "color-foreground-muted": theme.muted,
        "color-foreground-border": theme.soft,
        "color-code-background": theme.panel,
        "color-api-name": theme.accent,
        "color-api-pre-name": theme.accent,
        "color-highlight-on-target": theme.rule,
    }


html_theme_options = {
    "light_css_variables": _variables(LIGHT, LIGHT.series[2]),
    "dark_css_variables": _variables(DARK, DARK.series[5]),
    "top_of_page_buttons": [],
}
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_exclude = ".linenos, .gp, .go"
