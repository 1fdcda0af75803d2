"""Build the course as a web site, from README, CLAIMS, CONTRIBUTING, docs/ and the notebooks.

    python build.py [--open]         write docs/_build/html, and show it
    python build.py --translated     the same; then say what is not translated, with exit code 1 if
                                     a page is that was begun
    python build.py --gettext        write docs/_build/gettext, bring the translations up to date

With --output FOLDER it writes there and not to docs/_build.

scripts/site.sh calls it, in an environment that has docs/requirements.txt. The pages are laid out
in a temporary folder, in the same tree as in the repository, so that a link means the same in both.
Then Sphinx builds them once for each language. A warning of Sphinx is an error.

What is added to the pages: under a lesson's title how to run it; under each task its hint and its
solution, folded; for each file of code that a page links to, a page of its own.
"""

import argparse
import ast
import json
import re
import shutil
import sys
import tempfile
import webbrowser
from pathlib import Path

import sphinx.locale
from events import write_player_data
from sphinx.cmd.build import main as run_sphinx
from translations import look_at_translations, merge_translations

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
LOCALE = DOCS / "locale"
PAGES = ["README.md", "CLAIMS.md", "CONTRIBUTING.md"]
BEHIND = ["CLAIMS", "docs/house", "CONTRIBUTING"]  # the last part of the menu
LANGUAGES = ["en", *sorted(path.name for path in LOCALE.iterdir() if path.is_dir())]
LEXERS = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".toml": "toml", ".slurm": "bash"}
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


# --- The pages, as they are in the repository ---


def lay_out(source):
    """Write all pages into the folder `source`."""
    lessons = read_lessons()
    for path in [*(ROOT / name for name in PAGES), *DOCS.glob("*.md")]:
        name = path.relative_to(ROOT)
        text = link_to_pages(source, name, path.read_text(encoding="utf-8"))
        if path.name == "README.md":
            name, text = "index.md", text + tables_of_contents(lessons)
        write(source / name, text)
    for path in sorted((ROOT / "notebooks").glob("lesson_*.ipynb")):
        lay_out_notebook(source, path, lessons)
    for folder in ("_static", "_templates"):
        shutil.copytree(DOCS / folder, source / "docs" / folder)
    for image in DOCS.glob("*.png"):
        shutil.copy(image, source / "docs")
    write_player_data(ROOT, source / "docs" / "_static" / "player_data.js")
    write(source / "docs" / "_static" / "messages.js", f"const MESSAGES = {messages()};\n")
    shutil.copytree(LOCALE, source / "locale")
    shutil.copy(DOCS / "conf.py", source)


def messages():
    """Return the words of docs/errors.md as JSON: [[their parts, the name of the place], ...]."""
    found = []
    for heading in re.findall(r"^### (`.*)$", (DOCS / "errors.md").read_text("utf-8"), re.M):
        place = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")  # as MyST names it
        for words in re.findall("`([^`]+)`", heading):
            found.append([[part.strip() for part in words.split("…")], place])
    return json.dumps(found, ensure_ascii=False)


def write(path, text):
    """Write a file, and make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def link_to_pages(source, page, text):
    """Return the text with links that lead to pages of the site."""

    def change(match):
        words, target, anchor = match[1], match[2], match[3] or ""
        if re.match(r"\w+:", target):
            return match[0]
        file = (ROOT / page.parent / target).resolve()
        if not file.is_relative_to(ROOT) or not file.is_file():
            return match[0]
        if file == ROOT / "README.md":
            target = target.replace("README.md", "index.md")
        elif file.suffix not in (".md", ".ipynb") or "templates" in file.parts:
            make_code_page(source, file)
            target += ".md"
        return f"[{words}]({target}{anchor})"

    return LINK.sub(change, text)


def make_code_page(source, file):
    """Write a page that shows a file of code."""
    name = file.relative_to(ROOT)
    code, fence = file.read_text(encoding="utf-8"), "`" * 7
    lexer = "json" if file.suffix == ".ipynb" else LEXERS.get(file.suffix, "text")
    title = f"---\norphan: true\n---\n# `{name}`\n\n"
    write(source / f"{name}.md", f"{title}{fence}{{code-block}} {lexer}\n{code}\n{fence}\n")


# --- What is added ---


def read_lessons():
    """Return {notebook: (part of README, minutes)}, from the tables of README.

    The title of a part is bold, at the start of a line. The row of a lesson begins with its number,
    has a link to its notebook, and ends with the minutes.
    """
    lessons, part = {}, None
    for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines():
        if match := re.match(r"\*\*(.+?)\.?\*\*", line):
            part = match[1]
        if match := re.match(r"\| *\d\d *\|.*\(notebooks/(\S+)\.ipynb\).*\| *(\d+) *\|$", line):
            lessons[match[1]] = (part, match[2])
    return lessons


def tables_of_contents(lessons):
    """Return the tables of contents, which order the pages and make the site's menu.

    Pages with a script are to play with. Other pages come in the order in which README names them.
    """
    menus = {}
    for notebook, (part, _) in lessons.items():
        menus.setdefault(part, []).append(f"notebooks/{notebook}")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    pages = {f"docs/{path.stem}": path.read_text("utf-8") for path in sorted(DOCS.glob("*.md"))}
    plays = [name for name, text in pages.items() if "<script" in text]
    others = [name for name in pages if name not in [*plays, *BEHIND]]
    named = [name for name in re.findall(r"\((docs/\w+)\.md", readme) if name in others]
    menus["Running it"] = list(dict.fromkeys(named + others))
    menus["To play with"] = plays
    menus["Behind the course"] = BEHIND
    return "".join(
        f"\n\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n" + "\n".join(names) + "\n```\n"
        for title, names in menus.items()
    )


def lay_out_notebook(source, path, lessons):
    """Write a notebook, with how to run it under its title, and hints and solutions."""
    if path.stem not in lessons:
        sys.exit(f"the site was not built: README.md has no row for notebooks/{path.name}")
    notebook = json.loads(path.read_text(encoding="utf-8"))
    number = path.name[len("lesson_") :][:2]
    cells = []
    for cell in notebook["cells"]:
        cells.append(cell)
        text = "".join(cell["source"])
        if cell["cell_type"] == "code":
            task = re.search(r"judge\([\w.]+, (\w+)\)", text)
            cells += [folded(number, task[1])] if task else []
        elif len(cells) == 1:
            title, _, rest = text.partition("\n")
            how = f"{lessons[path.stem][1]} minutes. Run it: `bash scripts/lesson_{number}.sh`."
            how += f" Look at it: [the script](../lessons/{path.stem}.py)."
            cell["source"] = f"{title}\n\n*{how}*\n\n{rest}"
    for cell in cells:
        if cell["cell_type"] == "markdown":
            page = Path("notebooks", path.name)
            cell["source"] = link_to_pages(source, page, "".join(cell["source"]))
    notebook["cells"] = cells
    write(source / "notebooks" / path.name, json.dumps(notebook, ensure_ascii=False))


def folded(number, task):
    """Return a cell with the hint and the solution of a task, folded."""
    path = ROOT / "notebooks" / "solutions" / f"lesson_{number}.py"
    hint, solution = read_solution(path.read_text(encoding="utf-8"), task)
    text = (
        f":::{{dropdown}} Hint\n{hint}\n:::\n\n"
        f":::{{dropdown}} Solution\n```python\n{solution}\n```\n:::\n"
    )
    return {"cell_type": "markdown", "id": f"folded-{task}"[:64], "metadata": {}, "source": text}


def read_solution(text, task):
    """Return the hint and the solution's code, from the text of a file of solutions."""
    hints = ast.literal_eval(text.partition("\nHINTS = ")[2])
    answer = re.search(rf'"{task}": \(\w+, (\w+)\)', text)[1]
    remark, begin = r"(?ms)^(#[^\n]*\n)?", rf"((def|class) {answer}\b|{answer} = )"
    return hints[task], re.search(remark + begin + r".*?(?=\n\n+\S)", text)[0]


# --- Sphinx ---


def call_sphinx(builder, source, target, language="en"):
    """Run Sphinx. Raises SystemExit if it has anything to say against a page."""
    sphinx.locale.translators.clear()  # of the language before, which would be a fallback
    read = source.parent / f"read_{builder}_{language}"
    flags = ["-q", "-W", "--keep-going", "-b", builder, "-D", f"language={language}"]
    if run_sphinx([*flags, "-d", str(read), str(source), str(target)]) != 0:
        sys.exit("the site was not built: mend what the lines above name")


def write_site(source, html):
    """Build the site in all languages, one after the other."""
    for language in LANGUAGES:
        call_sphinx("html", source, html if language == "en" else html / language, language)
    shutil.rmtree(html / "jupyter_execute", ignore_errors=True)  # pictures, to which no page leads


# --- The command ---


def read_flags():
    """Return the flags of the command line; leave with one line and exit code 2 if one is wrong."""
    parser = argparse.ArgumentParser(prog="site.sh", description="Build the course as a web site.")
    parser.error = lambda text: parser.exit(2, f"site.sh: error: {text}\n")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--open", action="store_true", help="show it in the browser")
    what.add_argument("--translated", action="store_true", help="say also what is not translated")
    what.add_argument("--gettext", action="store_true", help="only update the translations")
    where = {"type": Path, "default": DOCS / "_build", "metavar": "FOLDER"}
    parser.add_argument("--output", **where, help="write FOLDER/html, or FOLDER/gettext, or both")
    flags = parser.parse_args()
    flags.output = flags.output.resolve()
    for folder, ours in (("html", "searchindex.js"), ("gettext", "index.pot")):
        place = flags.output / folder
        if place.exists() and not (place / ours).exists():
            parser.error(f"argument --output: {place} is there, and is not of this course")
    return flags


def build(flags):
    """Build what is asked for in a temporary folder, then put it in its place."""
    flags.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=flags.output) as folder:
        source, html, templates = (Path(folder, name) for name in ("source", "html", "gettext"))
        source.mkdir()
        lay_out(source)
        if not flags.gettext:
            write_site(source, html)
        if flags.gettext or flags.translated:
            call_sphinx("gettext", source, templates)
        for new in (html, templates):
            if new.exists():
                shutil.rmtree(flags.output / new.name, ignore_errors=True)
                new.rename(flags.output / new.name)


def main():
    """Build what is asked for; return the exit code."""
    flags = read_flags()
    build(flags)
    templates = flags.output / "gettext"
    if flags.gettext:
        merge_translations(templates, LOCALE)
    print(templates if flags.gettext else flags.output / "html")
    if flags.open:
        webbrowser.open((flags.output / "html" / "index.html").as_uri())
    return 0 if not flags.translated or look_at_translations(templates, LOCALE) else 1


if __name__ == "__main__":
    sys.exit(main())
