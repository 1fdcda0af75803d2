"""How Sphinx builds the site. build/build.py calls it, and lays out the pages before."""

import functools
import re
from pathlib import Path

import sphinx.search
from docutils.nodes import SkipNode
from latex2mathml.converter import convert
from myst_nb.sphinx_ import Parser
from myst_parser.parsers.sphinx_ import MystParser
from sphinx.search.en import SearchEnglish

HERE = Path(__file__).parent
# The name of each language, and what stands on a page that is not translated. Each but English has
# a folder in docs/locale.
LANGUAGES = {
    "en": ("English", ""),
    "zh_CN": ("简体中文", "本页还没有译文，以下为英文原文。"),  # noqa: RUF001
}

project = "Lockstep"
author = "the authors of Lockstep"
html_title = "Lockstep"
extensions = ["myst_nb", "sphinx_copybutton", "sphinx_design"]
exclude_patterns = ["locale"]

# The pages: notebooks with their stored outputs, and Markdown.
nb_execution_mode = "off"
nb_render_markdown_format = "myst"
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 4
copybutton_selector = "div.highlight pre"
copybutton_exclude = ".linenos, .gp, .go"

# The look. Furo takes its fonts from the reader's system.
html_theme = "furo"
html_favicon = "docs/_static/favicon.svg"
html_static_path = ["docs/_static"]
templates_path = ["docs/_templates"]
html_css_files = ["site.css"]
html_js_files = ["search_from_a_file.js", "messages.js", "search_messages.js"]
html_math_renderer = "mathml"
html_copy_source = False
html_use_index = False
html_show_sphinx = False
html_show_copyright = False
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/language.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
html_context = {
    "languages": LANGUAGES,
    "translated": {
        path.relative_to(folder).with_suffix("").as_posix()
        for folder in HERE.glob("locale/*/LC_MESSAGES")
        for path in folder.rglob("*.po")
    },
}

# Translations: one file for each page.
locale_dirs = ["locale"]
gettext_compact = False
gettext_location = False


class SearchWords(SearchEnglish):
    """Finds words as in English. Each is cut to its stem once: pages repeat each other's words."""

    stem = functools.cache(SearchEnglish.stem)


class SearchChinese(SearchWords):
    """Finds Chinese by its pairs of characters, and all other words as in English.

    (Sphinx's own cuts the pages into words of a dictionary, and what is typed not at all.)
    """

    lang = "zh"
    js_splitter_code = (HERE / "docs" / "_static" / "split_chinese.js").read_text(encoding="utf-8")

    def split(self, text):
        """Return the words of `text`; of Chinese the characters and the pairs of neighbours."""
        words = []
        for part in re.findall(r"[\u4e00-\u9fff]+|[^\W\u4e00-\u9fff]+", text):
            if re.match(r"[\u4e00-\u9fff]", part):
                words += part
                words += [part[i : i + 2] for i in range(len(part) - 1)]
            else:
                words.append(part)
        return words


sphinx.search.languages.update(en=SearchWords, zh=SearchChinese)


class NotebookParser(Parser):
    """Reads a notebook; and a paragraph of one that was translated, which is Markdown."""

    def parse(self, inputstring, document):
        if inputstring.lstrip().startswith("{"):
            super().parse(inputstring, document)
        else:
            MystParser.parse(self, inputstring, document)


def formula(writer, node, display):
    """Write a formula as MathML."""
    writer.body.append(convert(node.astext(), display=display))


def inline_formula(writer, node):
    formula(writer, node, "inline")
    raise SkipNode


def formula_on_its_own_line(writer, node):
    formula(writer, node, "block")
    raise SkipNode


def setup(app):
    app.add_source_parser(NotebookParser, override=True)
    app.add_html_math_renderer("mathml", (inline_formula, None), (formula_on_its_own_line, None))
