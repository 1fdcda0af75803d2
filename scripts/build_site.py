"""Build the course as a web site, from README, CLAIMS, CONTRIBUTING, docs/ and the notebooks.

    python build_site.py [--open]         write docs/_build/html, and show it
    python build_site.py --gettext        write the templates, bring the translations up to date
    python build_site.py --translated     say what is not translated; exit code 1 if in a begun page

With --output FOLDER it writes there and not to docs/_build.

site.sh calls it, in an environment that has docs/requirements.txt. The pages are laid out in a
temporary folder, in the same tree as in the repository, so that a link means the same in both. Then
Sphinx builds them once for each language. A warning of Sphinx is an error.

What is added to the pages: under a lesson's title how to run it; under each task its hint and its
solution, folded; for each file of code that a page links to, a page of its own.
"""

import argparse
import ast
import fcntl
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import webbrowser
from pathlib import Path

from babel.messages.pofile import read_po, write_po
from site_events import write_player_data

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = ["README.md", "CLAIMS.md", "CONTRIBUTING.md"]
MENUS = {  # a page that stands in none of them is an error of Sphinx
    "Running it": [
        f"docs/{name}" for name in ("install", "several_machines", "doctor", "gpus", "security")
    ],
    "To play with": ["docs/cost_model", "docs/memory", "docs/player"],
    "Behind the course": ["CLAIMS", "docs/house", "CONTRIBUTING"],
}
LANGUAGES = ["en", *sorted(path.name for path in (DOCS / "locale").glob("*") if path.is_dir())]
LEXERS = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".toml": "toml", ".slurm": "bash"}
# Lines of a translation's header that would change with every update, and tell nothing.
HEADER = re.compile(rb'"(POT-|PO-|Report-|Last-Tr|Language-T|Generated-By).*\n')
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


# --- The pages, as they are in the repository ---


def lay_out(source):
    """Write all pages into the folder `source`."""
    for name in PAGES:
        write(source, name, (ROOT / name).read_text(encoding="utf-8"))
    for path in DOCS.glob("*.md"):
        write(source, f"docs/{path.name}", path.read_text(encoding="utf-8"))
    parts = read_parts()
    for path in sorted((ROOT / "notebooks").glob("lesson_*.ipynb")):
        lay_out_notebook(source, path, parts)
    index = source / "README.md"
    index.write_text(index.read_text(encoding="utf-8") + contents(parts), encoding="utf-8")
    index.rename(source / "index.md")
    for folder in ("_static", "_templates"):
        shutil.copytree(DOCS / folder, source / "docs" / folder)
    write_player_data(ROOT, source / "docs" / "_static" / "player_data.js")
    shutil.copytree(DOCS / "locale", source / "locale")
    shutil.copy(DOCS / "conf.py", source)
    for image in DOCS.glob("*.png"):
        shutil.copy(image, source / "docs")


def write(source, name, text):
    """Write a page; make a page for each file of code that it links to."""
    path = source / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(link_to_pages(source, Path(name), text), encoding="utf-8")


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
    page = source / f"{name}.md"
    if page.exists():
        return
    page.parent.mkdir(parents=True, exist_ok=True)
    code = file.read_text(encoding="utf-8")
    fence = "`" * 7
    lexer = "json" if file.suffix == ".ipynb" else LEXERS.get(file.suffix, "text")
    page.write_text(
        f"---\norphan: true\n---\n# `{name}`\n\n{fence}{{code-block}} {lexer}\n{code}\n{fence}\n",
        encoding="utf-8",
    )


# --- What is added ---


def read_parts():
    """Return {part: {number: (notebook, minutes)}}, from the tables of README."""
    parts, part = {}, None
    for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines():
        if match := re.match(r"\*\*(.+?)\.?\*\*", line):
            part = match[1]
        if match := re.match(r"\| (\d\d) \|.*\]\(notebooks/(\S+)\.ipynb\).*\| (\d+) \|$", line):
            number, notebook, minutes = match.groups()
            parts.setdefault(part, {})[number] = (notebook, minutes)
    return parts


def contents(parts):
    """Return the tables of contents, which order the pages and make the site's menu."""
    menus = {part: [f"notebooks/{name}" for name, _ in all.values()] for part, all in parts.items()}
    menus |= MENUS
    return "".join(
        f"\n\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n" + "\n".join(pages) + "\n```\n"
        for title, pages in menus.items()
        if pages
    )


def lay_out_notebook(source, path, parts):
    """Write a notebook, with how to run it under its title, and hints and solutions."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    number = path.name[len("lesson_") :][:2]
    minutes = next(lessons[number][1] for lessons in parts.values() if number in lessons)
    cells = []
    for cell in notebook["cells"]:
        cells.append(cell)
        text = "".join(cell["source"])
        if cell["cell_type"] == "code":
            task = re.search(r"judge\([\w.]+, (\w+)\)", text)
            cells += [folded(number, task[1])] if task else []
        elif len(cells) == 1:
            title, _, rest = text.partition("\n")
            cell["source"] = f"{title}\n\n{how_to_run(path, number, minutes)}\n{rest}"
    for cell in cells:
        if cell["cell_type"] == "markdown":
            page = Path("notebooks", path.name)
            cell["source"] = link_to_pages(source, page, "".join(cell["source"]))
    notebook["cells"] = cells
    target = source / "notebooks" / path.name
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(notebook, ensure_ascii=False), encoding="utf-8")


def how_to_run(path, number, minutes):
    """Return the paragraph below a lesson's title."""
    return (
        f"*{minutes} minutes. Run it: `bash scripts/lesson_{number}.sh`. Look at it: "
        f"[the script](../lessons/{path.stem}.py), "
        f"[its launcher](../scripts/lesson_{number}.sh), "
        f"[solutions of the tasks](solutions/lesson_{number}.py).*\n"
    )


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
    tree = ast.parse(text)
    assigned, named = {}, {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            assigned[node.targets[0].id] = node.value
            named[node.targets[0].id] = node
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            named[node.name] = node
    hint = ast.literal_eval(assigned["HINTS"])[task]
    tasks = [key.value for key in assigned["TASKS"].keys]
    check_and_answer = assigned["TASKS"].values[tasks.index(task)]
    answer = named[check_and_answer.elts[1].id]
    first, lines = answer.lineno - 1, text.splitlines()
    if lines[first - 1].startswith("#"):  # a remark on the answer
        first -= 1
    return hint, "\n".join(lines[first : answer.end_lineno])


# --- Sphinx ---


def sphinx(builder, source, target, language="en"):
    """Start Sphinx; return the process."""
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", builder]
    command += ["-D", f"language={language}", str(source), str(target)]
    command += ["-d", str(source.parent / f"read_{language}")]
    return subprocess.Popen(command, env={**os.environ, "TMPDIR": str(source.parent)})


def wait_for(jobs):
    """Wait until all have ended, and end them if we are ended. Raises CalledProcessError."""
    try:
        codes = [job.wait() for job in jobs]
    finally:
        for job in jobs:
            job.terminate()
            job.wait()
    if any(codes):
        raise subprocess.CalledProcessError(max(codes), "sphinx")


def build(source, target):
    """Build the site in all languages, side by side. Raises CalledProcessError."""
    html = target / "html"
    places = {code: html if code == "en" else html / code for code in LANGUAGES}
    wait_for([sphinx("html", source, place, code) for code, place in places.items()])
    for place in places.values():  # pictures once more, to which no page leads
        shutil.rmtree(place / "jupyter_execute", ignore_errors=True)


# --- Translations ---


def write_templates(source, target):
    """Write the templates of the translations, *.pot: all that can be translated."""
    wait_for([sphinx("gettext", source, target / "gettext")])


def read_catalog(path):
    """Return the messages of a .pot or .po file."""
    with open(path, "rb") as file:
        return read_po(file)


def untranslated(template, translation):
    """Return (what has no translation, what is translated but no longer in the page)."""
    wanted = {message.id for message in template if message.id}
    done = {message.id for message in translation if message.id and message.string}
    return sorted(wanted - done), sorted(done - wanted)


def look_at_translations(templates):
    """Print what is untranslated or out of date; return whether all begun pages are complete."""
    complete = True
    for language in LANGUAGES[1:]:
        for template in sorted(page_templates(templates)):
            name = template.relative_to(templates).with_suffix(".po")
            path = DOCS / "locale" / language / "LC_MESSAGES" / name
            if not path.exists():
                print(f"{language}  {name.with_suffix('')}: not begun")
                continue
            missing, outdated = untranslated(read_catalog(template), read_catalog(path))
            print(f"{language}  {name.with_suffix('')}: {len(missing)} missing", end="")
            print(f", {len(outdated)} out of date")
            for text in missing:
                print(f"    missing: {text[:70]}")
            complete = complete and not missing and not outdated
    return complete


def page_templates(templates):
    """Return the templates of all pages but those that only show code."""
    return [path for path in templates.rglob("*.pot") if "." not in path.stem]


def merge_translations(templates):
    """Bring the translations in docs/locale up to date: what is new in them is still empty."""
    for language in LANGUAGES[1:]:
        folder = DOCS / "locale" / language / "LC_MESSAGES"
        for path in sorted(folder.rglob("*.po")):
            template = templates / path.relative_to(folder).with_suffix(".pot")
            translation = read_catalog(path)
            translation.update(read_catalog(template), no_fuzzy_matching=True)
            written = io.BytesIO()
            write_po(written, translation, width=100, ignore_obsolete=True)
            path.write_bytes(HEADER.sub(b"", written.getvalue()))


# --- The command ---


def put_in_place(new, place):
    """Move the folder `new` to `place`, and remove what was there. Two runs at once take turns."""
    with (
        open(place.parent / ".lock", "w") as lock,
        tempfile.TemporaryDirectory(dir=place.parent) as old,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        if place.exists():
            place.rename(Path(old, "old"))
        new.rename(place)


def read_flags():
    """Return the flags of the command line; leave with one line and exit code 2 if one is wrong."""
    parser = argparse.ArgumentParser(prog="site.sh", description="Build the course as a web site.")
    parser.error = lambda text: parser.exit(2, f"site.sh: error: {text}\n")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--open", action="store_true", help="show it in the browser")
    what.add_argument("--gettext", action="store_true", help="bring the translations up to date")
    what.add_argument("--translated", action="store_true", help="say what is not translated")
    parser.add_argument(
        "--output",
        type=Path,
        default=DOCS / "_build",
        metavar="FOLDER",
        help="write FOLDER/html, or with --gettext and --translated FOLDER/gettext",
    )
    flags = parser.parse_args()
    flags.in_words = flags.gettext or flags.translated
    flags.place = flags.output.resolve() / ("gettext" if flags.in_words else "html")
    ours = flags.place / ("index.pot" if flags.in_words else "searchindex.js")
    if flags.place.exists() and not ours.exists():
        parser.error(f"argument --output: {flags.place} is there, and is not a site of this course")
    try:
        flags.place.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=flags.place.parent).close()
    except OSError as error:
        parser.error(f"argument --output: can't write in {flags.place.parent}: {error.strerror}")
    return flags


def build_in_folder(flags):
    """Build what is asked for in a temporary folder, then put it in its place."""
    with tempfile.TemporaryDirectory(dir=flags.place.parent) as folder:
        source = Path(folder, "source")
        source.mkdir()
        lay_out(source)
        (write_templates if flags.in_words else build)(source, Path(folder))
        put_in_place(Path(folder, flags.place.name), flags.place)


def main():
    """Build what is asked for; return the exit code."""
    flags = read_flags()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    try:
        build_in_folder(flags)
    except subprocess.CalledProcessError:
        print("the site was not built: mend what the lines above name", file=sys.stderr)
        return 1
    if flags.translated:
        return 0 if look_at_translations(flags.place) else 1
    if flags.gettext:
        merge_translations(flags.place)
    elif flags.open:
        webbrowser.open((flags.place / "index.html").as_uri())
    print(flags.place)
    return 0


def interrupt(number, frame):
    """Handle a signal: leave through each `finally`."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    print("interrupted: nothing was changed", file=sys.stderr)
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
