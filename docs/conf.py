"""The site of these pages, of the notebooks and of the docstrings."""

import inspect
import os
import re
import shutil
from pathlib import Path

from docutils import nodes
from sphinx import addnodes

os.environ["JAX_PLATFORMS"] = "cpu"  # the docstrings are read by importing effjax
ROOT = Path(__file__).resolve().parent.parent
shutil.copytree(ROOT / "notebooks", ROOT / "docs/notebooks", dirs_exist_ok=True)

project = "effjax"
author = "The effjax authors"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["README.md"]  # a list of the pages for readers of the repository
# Pages of the site that stand for files of the repository.
PAGES = {
    "README.md": "index.md",
    "docs/README.md": "index.md",
    "CHANGELOG.md": "reference/changelog.md",
}
linkcheck_anchors = False  # of GitHub, which makes them by scripts
html_theme = "sphinx_book_theme"
html_title = project
html_static_path = ["style"]
html_css_files = ["site.css"]
html_theme_options = {"navbar_persistent": []}  # the sidebar has a search field

nb_execution_mode = "off"  # notebooks have their outputs
myst_enable_extensions = ["dollarmath"]
myst_fence_as_directive = ["math"]
myst_heading_anchors = 3

nitpicky = True
default_role = "py:obj"  # what `has a page` is a link, and all else code
nitpick_ignore_regex = [("py:obj", ".*")]
autodoc_default_options = {"members": True, "special-members": "__call__"}
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say more
napoleon_use_param = False  # arguments may share a description
napoleon_use_rtype = False
napoleon_custom_sections = [
    (name, "params_style") for name in ("Attributes", "Further arguments", "Further fields")
]


def setup(app):
    app.connect("source-read", link_files)
    app.connect("doctree-read", link_names)
    app.connect("autodoc-skip-member", skip_member)
    app.connect("autodoc-process-docstring", mark_what_is_kept)
    app.connect("autodoc-process-signature", sign)


def link_files(app, docname, source):
    """Point relative links, which hold in the repository, to pages of the site.

    Other files of docs, such as pictures and JSON, become downloads. MyST warns of the rest.
    """
    folder = (ROOT if docname.startswith("notebooks/") else ROOT / "docs") / Path(docname).parent

    def on_site(link):
        file = (folder / link[0]).resolve()
        if not file.is_relative_to(ROOT):
            return link[0]
        name = file.relative_to(ROOT).as_posix()
        page = PAGES.get(name, name.removeprefix("docs/"))
        return f"/{page}" if page.rpartition(".")[0] in app.env.found_docs else link[0]

    source[0] = re.sub(r"(?<=\]\()[^)#\s]+", on_site, source[0])


def link_names(app, doctree):
    """Names of effjax in code lead to the reference, where they are in it."""
    to = {"refdomain": "py", "reftype": "obj", "refdoc": app.env.docname}
    for code in list(doctree.findall(nodes.literal)):
        linked = isinstance(code.parent, (nodes.reference, addnodes.pending_xref))
        if not linked and re.fullmatch(r"effjax(\.\w+)+", name := code.astext()):
            code.replace_self(addnodes.pending_xref("", code.deepcopy(), reftarget=name, **to))


def mark_what_is_kept(app, what, name, found, options, lines):
    lines[:] = [re.sub(r"^Kept for the backward pass:", r"**\g<0>**", line) for line in lines]


def sign(app, what, name, found, options, signature, returns):
    """Classes by their own arguments, of which Flax's metaclasses know nothing or too much."""
    if not signature:
        return
    if what == "class":
        of_init = inspect.signature(found.__init__).parameters
        hidden = {"self", "parent", "name"} if "parent" in of_init else {"self"}
        plain = [p.replace(annotation=p.empty) for n, p in of_init.items() if n not in hidden]
        signature = str(inspect.Signature(plain))
    signature = re.sub(r"<class '[\w.]*?(\w+)'>", r"\1", signature)
    return re.sub(r"<[^<>]*(<locals>)?[^<>]*>", "…", signature), None


def skip_member(app, what, name, found, skip, options):
    """Not the fields of tuples, which are described with their class, nor dtypes in fields."""
    is_field = (getattr(found, "__doc__", None) or "").startswith("Alias for field number")
    return skip or is_field or isinstance(found, type)
