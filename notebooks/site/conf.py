"""Sphinx's side of the site (`./run_all.sh site`; drehr_utils/use/site.py lays out the pages).

A page stands where its source does in the checkout, so that the texts' relative links to each other hold. A link to a
module leads to its page in the API, one to a table or another file to a copy of it.
"""

import html
import re
import shutil
from pathlib import Path
from urllib.parse import unquote

from docutils.nodes import SkipNode
from latex2mathml.converter import convert
from sphinx.pycode import ModuleAnalyzer

from drehr_utils import __version__
from drehr_utils.use.site import anchor_key, module_of

project, author, version = "drehr_utils", "The maintainers of drehr_utils", __version__
html_title = "DR.EHR, notebook by notebook"
extensions = ["myst_nb", "sphinx.ext.viewcode"]
root_doc = "README"
MENU = {
    "Notebooks": "notebooks/*",
    "Data": "data/README\ndata/models/*/README",
    "Project": "CONTRIBUTING\nCHANGELOG\napi/index",
}
COPIED = {"data", "figures", "tests", "CITATION.cff", "LICENSE", "environment.yml", "run_all.sh"}

html_theme, html_static_path, html_css_files = "sphinx_book_theme", ["static"], ["site.css"]
html_theme_options = {
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "navbar_persistent": [],  # the sidebar has a search
}
html_copy_source, html_show_copyright, html_show_sphinx = False, False, False
html_math_renderer = "mathml"  # a browser's own: no script from elsewhere

nb_execution_mode = "off"
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_all_links_external = True  # as written: `follow` sees to them, as to those in a table that a notebook shows
myst_heading_anchors, myst_heading_slug_func = 6, anchor_key
suppress_warnings = ["config.cache"]  # of that function, which can't be pickled
add_module_names = False
python_maximum_signature_line_length = 90
python_display_short_literal_types = True
python_use_unqualified_type_names = True
viewcode_follow_imported_members = False


def add_menu(app, docname, source):
    if docname == root_doc:
        for caption, pages in MENU.items():
            source[0] += f"\n```{{toctree}}\n:hidden:\n:glob:\n:caption: {caption}\n\n{pages}\n```\n"


def source_of(app, module):
    """For viewcode, which would import the module."""
    path = Path(app.config.checkout, *module.split(".")).with_suffix(".py")
    analyzer = ModuleAnalyzer.for_file(path, module)
    analyzer.find_tags()
    return analyzer.code, analyzer.tags


def follow(app, docname, template, context, doctree):
    """Where a page's links to files of the checkout lead on the site."""
    checkout, env = Path(app.config.checkout), app.env

    def place(match):
        link, text = html.unescape(match[1]), html.unescape(re.sub("<.*?>", "", match[2]))
        name, _, anchor = link.partition("#")
        path = (checkout / docname).parent.joinpath(unquote(name)).resolve()
        if re.match("[a-z]+:", link) or not name or not path.exists() or not path.is_relative_to(checkout):
            return match[0]
        file, uri = path.relative_to(checkout), ""
        page = file.with_suffix("").as_posix()
        if file.parts[0] == "drehr_utils":
            page = f"api/{module_of(file)}" if file.suffix else "api/index"
            named = f"{module_of(file)}.{text.partition('.')[2]}"
            uri = f"#{named}" if named in env.domaindata["py"]["objects"] else ""
        if page in env.all_docs:
            if anchor:
                slugs = env.metadata[page].get("myst_slugs", {})
                uri = "#" + slugs.get(anchor_key(unquote(anchor)), ("", anchor))[1]
            return match[0].replace(match[1], html.escape(app.builder.get_relative_uri(docname, page) + uri))
        if not path.is_file() or file.parts[0] not in COPIED or file.parts[1:2] in [("cache",), ("public",)]:
            return match[0]  # the check for dead links will say so
        (app.outdir / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, app.outdir / file)
        return match[0]

    body = context.get("body", "")
    context["body"] = re.sub(r'<a\b[^>]*?href="([^"]*)"[^>]*>(.*?)</a>', place, body, flags=re.DOTALL)


def mathml(block):
    def visit(self, node):
        formula = convert(node.astext(), display="block" if block else "inline")
        self.body.append(f'<div class="equation">{formula}</div>' if block else formula)
        raise SkipNode

    return visit, None


def setup(app):
    app.add_config_value("checkout", "", "env", str)
    app.add_html_math_renderer("mathml", mathml(False), mathml(True))
    app.connect("source-read", add_menu)
    app.connect("viewcode-find-source", source_of)
    app.connect("html-page-context", follow)
