"""The web site: it builds without a warning, its links lead somewhere, and it is found by words."""

import ast
import importlib
import json
import re
import shutil
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import pytest
from conftest import ROOT

sys.path.append(str(ROOT / "scripts"))
build_site = importlib.import_module("build_site")
SITE = ["bash", str(ROOT / "scripts" / "site.sh")]
NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebooks").glob("lesson_*.ipynb"))


class Page(HTMLParser):
    """What a page links to, what it loads, its anchors, and its pictures."""

    def __init__(self, path):
        super().__init__()
        self.links, self.loads, self.anchors, self.pictures = [], [], set(), []
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)
        without_code = re.sub(r"(?s)<(pre|script|style).*?</\1>", "", self.text)
        self.words = re.sub("<[^>]*>", "", without_code)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.anchors.add(values.get("id"))
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "link" and values.get("rel") not in ("canonical", "author"):
            self.loads.append(values["href"])
        elif "src" in values:
            self.loads.append(values["src"])
        if tag == "img":
            self.pictures.append((values["src"], values.get("alt") or ""))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site in a folder with a space; return {path: Page} and the folder."""
    folder = tmp_path_factory.mktemp("a site")
    run = subprocess.run([*SITE, "--output", folder], capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stderr[-3000:]
    html = folder.resolve() / "html"
    assert [path.name for path in folder.iterdir() if path.name != ".lock"] == ["html"]
    return html, {path: Page(path) for path in html.rglob("*.html")}


def test_every_link_and_every_picture_is_there(site):
    html, pages = site
    assert len(pages) > 4 * len(NOTEBOOKS)
    wrong = []
    for path, page in pages.items():
        for link in page.links + page.loads:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            known = {""} if "=" not in parts.fragment else {parts.fragment}  # settings
            if target in pages:
                known |= pages[target].anchors
            if not target.is_file() or parts.fragment not in known:
                wrong.append(f"{path.relative_to(html)}: {link}")
    assert wrong == []


def test_nothing_is_loaded_from_another_host(site):
    html, pages = site
    loaded = [link for page in pages.values() for link in page.loads]
    assert [link for link in loaded if urlsplit(link).scheme not in ("", "data")] == []
    styles = "".join(path.read_text(encoding="utf-8") for path in html.rglob("*.css"))
    assert re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", styles) == []


@pytest.mark.parametrize("language", ["", "zh_CN"])
def test_every_lesson_has_its_page(site, language):
    html, pages = site
    for notebook in NOTEBOOKS:
        number = notebook[len("lesson_") :][:2]
        page = pages[html / language / "notebooks" / f"{notebook}.html"]
        stored = (ROOT / "notebooks" / f"{notebook}.ipynb").read_text(encoding="utf-8")
        drawn = [alt for source, alt in page.pictures if "_images" in source]
        assert len(drawn) == stored.count('"image/png"') > 0
        assert all(len(alt.split()) > 7 or re.search("[一-鿿]{8}", alt) for alt in drawn)
        tasks = len(re.findall(r"print\(judge\(", stored))
        assert page.text.count("<details") == 2 * tasks > 0
        assert f"bash scripts/lesson_{number}.sh" in page.words
        for end in (f"lesson_{number}.sh.html", f"{notebook}.py.html", f"lesson_{number}.py.html"):
            assert [link for link in page.links if link.endswith(end)], end


def letters(text):
    """Return the text without spaces and signs: the site sets other quotation marks."""
    return re.sub(r"\W", "", text)


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_under_each_task_are_its_own_hint_and_solution(site, notebook):
    html, pages = site
    text = unescape(re.sub("<[^>]*>", "", pages[html / "notebooks" / f"{notebook}.html"].text))
    folded = [letters(part) for part in re.split(r"\bHint\n", text)[1:]]
    number = notebook[len("lesson_") :][:2]
    solutions = (ROOT / "notebooks" / "solutions" / f"lesson_{number}.py").read_text("utf-8")
    hints = ast.literal_eval(solutions.partition("\nHINTS = ")[2])
    answers = re.findall(r'"(\w+)": \(\w+, (\w+)\)', solutions.partition("\nTASKS = ")[2])
    assert list(hints) == [task for task, _ in answers] and len(folded) == len(hints)
    for part, (task, answer) in zip(folded, answers, strict=True):
        code = re.search(rf"(?ms)^((def|class) {answer}\b.*?|{answer} = .*?)\n\n", solutions)[1]
        assert letters(hints[task]) in part
        assert letters(code) in part


def words_of(html):
    """Return {word: pages that contain it} of the site's search."""
    text = (html / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    words = {}
    for word, found in [*index["terms"].items(), *index["titleterms"].items()]:
        numbers = [found] if isinstance(found, int) else found
        words.setdefault(word, set()).update(index["docnames"][number] for number in numbers)
    return words


def test_the_search_finds_words(site):
    words = words_of(site[0])
    assert "notebooks/lesson_06_checkpoint_map_location" in words["map_loc"]  # as it stems the word
    assert "notebooks/lesson_02_launch_ddp" in words["bucket"]
    assert {"notebooks/lesson_02_launch_ddp", "index"} <= words["torchrun"]
    assert "notebooks/lesson_03_spawn_ddp" in words_of(site[0] / "zh_CN")["进程"]


# A search as the page makes it: the scripts of the built site, and its index.
SEARCH = """
const fs = require("fs"), vm = require("vm");
const folder = process.argv[1];
const element = { classList: { contains: () => false }, addEventListener: () => {} };
const document = { documentElement: { dataset: { content_root: "./" } }, body: element,
  addEventListener: () => {}, getElementById: () => null, querySelector: () => null };
const stub = { document, URLSearchParams, console, addEventListener: () => {},
  DOCUMENTATION_OPTIONS: {}, SPHINX_HIGHLIGHT_ENABLED: false, location: {}, _ready: () => {} };
stub.window = stub;
vm.createContext(stub);
for (const script of ["_static/language_data.js", "_static/searchtools.js", "searchindex.js"]) {
  vm.runInContext(fs.readFileSync(`${folder}/${script}`, "utf8"), stub);
}
stub.words = JSON.parse(process.argv[2]);
const found = vm.runInContext(`words.map(word => {
  const [, terms, excluded, highlight] = Search._parseQuery(word);
  return Search._performSearch(word, terms, excluded, highlight, new Set()).map(hit => hit[0]);
})`, stub);
console.log(JSON.stringify(found));
"""


@pytest.mark.skipif(not shutil.which("node"), reason="node is not installed")
@pytest.mark.parametrize("language", ["", "zh_CN"])
def test_what_is_typed_is_found(site, language):
    words = ["map_location", "bucket", "torchrun", "DistributedSampler"]
    words += ["进程组", "启动进程", "梯度", "桶"] * (language == "zh_CN")
    command = ["node", "-e", SEARCH, site[0] / language, json.dumps(words)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = dict(zip(words, map(set, json.loads(run.stdout)), strict=True))
    assert "notebooks/lesson_06_checkpoint_map_location" in found["map_location"]
    assert "notebooks/lesson_02_launch_ddp" in found["bucket"] & found["torchrun"]
    assert all(found.values()), found


def test_the_chinese_pages_are_chinese(site):
    html, pages = site
    folder = ROOT / "docs" / "locale" / "zh_CN" / "LC_MESSAGES"
    for path in folder.rglob("*.po"):
        name = path.relative_to(folder).with_suffix(".html")
        text = re.sub(
            r"(?s)<(pre|script|style).*?</\1>|<[^>]*>", "", pages[html / "zh_CN" / name].text
        )
        assert len(re.findall("[一-鿿]", text)) > 0.3 * len(re.findall(r"\w", text)), name


def test_each_page_leads_to_itself_in_the_other_language(site):
    html, pages = site
    for path, page in pages.items():
        name = path.relative_to(html)
        chinese = name.parts[0] == "zh_CN"
        other = html / name.relative_to("zh_CN") if chinese else html / "zh_CN" / name
        places = {(path.parent / link).resolve() for link in page.links}
        assert other in places and "aria-current" in page.text, name
    untranslated = html / "zh_CN" / "notebooks" / f"{NOTEBOOKS[-1]}.html"
    assert "本页还没有译文" in pages[untranslated].text
    assert "本页还没有译文" not in pages[html / "zh_CN" / "index.html"].text


def test_translations_that_are_begun_are_complete(capsys):
    run = subprocess.run([*SITE, "--translated"], capture_output=True, text=True, timeout=500)
    print(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr
    assert len(run.stdout.splitlines()) >= len(NOTEBOOKS)


def test_what_is_missing_or_outdated_is_seen(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "locale" / "zh_CN" / "LC_MESSAGES"
    folder.mkdir(parents=True)
    monkeypatch.setattr(build_site, "DOCS", tmp_path)
    monkeypatch.setattr(build_site, "LANGUAGES", ["en", "zh_CN"])
    (tmp_path / "page.pot").write_text('msgid "one"\nmsgstr ""\n\nmsgid "two"\nmsgstr ""\n')
    assert build_site.look_at_translations(tmp_path)  # not begun
    for text, good in (
        ('msgid "one"\nmsgstr "一"\n\nmsgid "two"\nmsgstr "二"\n', True),
        ('msgid "one"\nmsgstr "一"\n\nmsgid "two"\nmsgstr ""\n', False),
        ('msgid "one"\nmsgstr "一"\n', False),
        (
            'msgid "one"\nmsgstr "一"\n\nmsgid "two"\nmsgstr "二"\n\nmsgid "old"\nmsgstr "旧"\n',
            False,
        ),
    ):
        (folder / "page.po").write_text(text)
        assert build_site.look_at_translations(tmp_path) is good
    assert "page: 1 missing, 0 out of date\n    missing: two" in capsys.readouterr().out
