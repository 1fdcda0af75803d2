"""The web site: it builds without a warning, its links lead somewhere, and a browser shows it."""

import ast
import json
import re
import shutil
import subprocess
import sys
import time
from html import unescape
from urllib.parse import quote, unquote, urlsplit

import lesson_11_how_fast as how_fast
import pytest
from conftest import ROOT

sys.path.append(str(ROOT / "docs" / "build"))
import translations

SITE = ["bash", ROOT / "scripts" / "site.sh"]
NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebooks").glob("lesson_*.ipynb"))


class Page:
    """The text of a page, its words, and what it links to, what it loads, its anchors, its alts."""

    def __init__(self, path):
        self.text = path.read_text(encoding="utf-8")
        text = re.sub(r"(?s)<(pre|script|style)\b(?![^>]*src=).*?</\1>", "", self.text)
        self.words = re.sub("<[^>]*>", "", text)
        tags = [(tag, dict(re.findall(r'([\w-]+)="([^"]*)"', values)))
                for tag, values in re.findall(r"<(\w+)\s([^>]*)>", text)]  # fmt: skip
        self.anchors = {values.get("id") for _, values in tags}
        self.links = [unescape(one["href"]) for tag, one in tags if tag == "a" and "href" in one]
        self.loads = [one["href"] for tag, one in tags if tag == "link" and one["rel"] != "author"]
        self.loads += [one["src"] for _, one in tags if "src" in one]
        self.alts = [one.get("alt", "") for _, one in tags if "_images" in one.get("src", "")]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build the site in a folder with a space; return what the builder said, and the folder."""
    folder = tmp_path_factory.mktemp("a site")
    command = [*SITE, "--translated", "--output", folder]
    run = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert {path.name for path in folder.iterdir()} == {"gettext", "html"}, run.stderr
    return run, folder / "html"


@pytest.fixture(scope="module")
def html(built):
    return built[1]


@pytest.fixture(scope="module")
def pages(html):
    """Return {path: Page}."""
    return {path: Page(path) for path in html.rglob("*.html")}


# --- The pages ---


def test_every_link_leads_somewhere_and_nothing_is_loaded_from_another_host(html, pages):
    assert len(pages) > 4 * len(NOTEBOOKS)
    wrong = []
    for path, page in pages.items():
        for link in page.links + page.loads:
            parts = urlsplit(link)
            if parts.scheme and (link in page.links or parts.scheme == "data"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            known = {""} if "=" not in parts.fragment else {parts.fragment}  # settings
            if target in pages:
                known |= pages[target].anchors
            if not target.is_file() or parts.fragment not in known:
                wrong.append(f"{path.relative_to(html)}: {link}")
    assert not list(html.rglob("jupyter_execute")), "the pictures once more"
    styles = "".join(path.read_text(encoding="utf-8") for path in html.rglob("*.css"))
    assert wrong + re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", styles) == []


def test_the_menu_has_every_page(html, pages):
    menu = pages[html / "index.html"].text.partition('class="sidebar-tree"')[2]
    parts = {}
    for part in menu.partition("</aside>")[0].split('"caption-text">')[1:]:
        links = re.findall(r'class="reference internal" href="([^"#]*)\.html"', part)
        parts[part.partition("<")[0]] = links
    *lessons, runs, plays, behind = parts.values()
    assert lessons[0] == [f"notebooks/{notebook}" for notebook in NOTEBOOKS[:3]]
    all_lessons = [name for part in lessons for name in part]
    assert sorted(all_lessons) == [f"notebooks/{notebook}" for notebook in NOTEBOOKS]
    assert plays == ["docs/cost_model", "docs/memory", "docs/player"]
    assert behind == ["CLAIMS", "docs/house", "CONTRIBUTING"]
    docs = {f"docs/{path.stem}" for path in (ROOT / "docs").glob("*.md")}
    assert {*runs, *plays, *behind} == docs | {"CLAIMS", "CONTRIBUTING"}


@pytest.mark.parametrize("language", ["", "zh_CN"])
def test_every_lesson_has_its_page(html, pages, language):
    for notebook in NOTEBOOKS:
        page = pages[html / language / "notebooks" / f"{notebook}.html"]
        stored = (ROOT / "notebooks" / f"{notebook}.ipynb").read_text(encoding="utf-8")
        assert len(page.alts) == stored.count('"image/png"') > 0
        assert all(len(alt.split()) > 7 or re.search("[一-鿿]{8}", alt) for alt in page.alts)
        tasks = len(re.findall(r"print\(judge\(", stored))
        folded = stored.count('"hide-input"') + stored.count("<details>")
        assert page.text.count("<details") == 2 * tasks + folded > 0
        assert f"bash scripts/{notebook[:9]}.sh" in page.words
        assert f"../lessons/{notebook}.py.html" in page.links


def letters(text):
    """Return the text without spaces and signs: the site sets other quotation marks."""
    return re.sub(r"\W", "", text)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda name: name[7:9])
def test_under_each_task_are_its_own_hint_and_solution(html, pages, notebook):
    text = unescape(re.sub("<[^>]*>", "", pages[html / "notebooks" / f"{notebook}.html"].text))
    folded = [letters(part) for part in re.split(r"\bHint\n", text)[1:]]
    solutions = (ROOT / "notebooks" / "solutions" / f"{notebook[:9]}.py").read_text("utf-8")
    hints = ast.literal_eval(solutions.partition("\nHINTS = ")[2])
    answers = re.findall(r'"(\w+)": \(\w+, (\w+)\)', solutions.partition("\nTASKS = ")[2])
    assert list(hints) == [task for task, _ in answers] and len(folded) == len(hints)
    for part, (task, answer) in zip(folded, answers, strict=True):
        code = re.search(rf"(?ms)^((def|class) {answer}\b.*?|{answer} = .*?)\n\n", solutions)[1]
        assert letters(hints[task]) in part
        assert letters(code) in part


# --- Translations ---


def test_the_chinese_pages_are_chinese(html, pages):
    folder = ROOT / "docs" / "locale" / "zh_CN" / "LC_MESSAGES"
    for path in folder.rglob("*.po"):
        name = path.relative_to(folder).with_suffix(".html")
        words = pages[html / "zh_CN" / name].words
        assert len(re.findall("[一-鿿]", words)) > 0.3 * len(re.findall(r"\w", words)), name


def test_each_page_leads_to_itself_in_the_other_language(html, pages):
    for path, page in pages.items():
        name = path.relative_to(html)
        chinese = name.parts[0] == "zh_CN"
        other = html / name.relative_to("zh_CN") if chinese else html / "zh_CN" / name
        places = {(path.parent / link).resolve() for link in page.links}
        assert other.resolve() in places and "aria-current" in page.text, name
    untranslated = html / "zh_CN" / "notebooks" / f"{NOTEBOOKS[-1]}.html"
    assert "本页还没有译文" in pages[untranslated].text
    assert "本页还没有译文" not in pages[html / "zh_CN" / "index.html"].text


def test_translations_that_are_begun_are_complete(built):
    run, _ = built
    assert run.returncode == 0, run.stdout + run.stderr
    assert len(run.stdout.splitlines()) > len(NOTEBOOKS)


@pytest.mark.parametrize("translated, good", [
    ({}, True),  # not begun
    ({"one": "一", "two": "二"}, True), ({"one": "一", "two": ""}, False), ({"one": "一"}, False),
    ({"one": "一", "two": "二", "old": "旧"}, False),
])  # fmt: skip
def test_what_is_missing_or_outdated_is_seen(tmp_path, capsys, translated, good):
    folder = tmp_path / "zh_CN" / "LC_MESSAGES"
    folder.mkdir(parents=True)
    (tmp_path / "page.pot").write_text('msgid "one"\nmsgstr ""\n\nmsgid "two"\nmsgstr ""\n')
    if translated:
        messages = [f'msgid "{one}"\nmsgstr "{other}"\n' for one, other in translated.items()]
        (folder / "page.po").write_text("\n".join(messages), encoding="utf-8")
    assert translations.look_at_translations(tmp_path, tmp_path) is good
    said = capsys.readouterr().out
    assert ("page: 1 missing, 0 out of date\n    missing: two" in said) == ("two" in said)


# --- The command ---


def test_a_folder_of_somebody_else_stays(tmp_path):
    (tmp_path / "html").mkdir()
    (tmp_path / "html" / "mine").touch()
    run = subprocess.run([*SITE, "--output", tmp_path], capture_output=True, text=True)
    assert re.fullmatch(r"site.sh: error: argument --output: .* is there.*\n", run.stderr)
    assert run.returncode == 2
    assert [path.name for path in tmp_path.rglob("*")] == ["html", "mine"]


# --- In a browser ---

SHOWN = ["index", "notebooks/lesson_03_spawn_ddp", "docs/cost_model", "docs/memory", "docs/player"]
SHOWN += ["zh_CN/notebooks/lesson_03_spawn_ddp"]
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
# The keys, as WebDriver writes them.
END, HOME, LEFT, RIGHT = "\ue010", "\ue011", "\ue012", "\ue014"


@pytest.fixture(scope="module")
def browser(html, tmp_path_factory):
    """Start a browser without a window; it opens the site's files."""
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    service = shutil.which("chromedriver")
    if not chromium or not service:
        pytest.skip("needs Chromium and its driver (Debian: chromium and chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in [*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(service))
    driver.site = html.as_uri()
    yield driver
    driver.quit()


def show(browser, page, width=1300, scheme="light"):
    """Open a page in a window of this width."""
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get("about:blank")  # so that a page is loaded, also if it is the same again
    requests(browser)
    browser.get(f"{browser.site}/{page}")


def requests(browser):
    """Return the addresses that the browser has asked for since the last call."""
    log = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [one["params"] for one in log if one["method"] == "Network.requestWillBeSent"]
    return [one["request"]["url"] for one in sent]


def texts(browser, css):
    """Return the texts of all elements that `css` selects."""
    code = "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)"
    return [text.replace("\xa0", " ") for text in browser.execute_script(code, css)]


def wait_for(browser, css, wanted):
    """Wait until one of these elements has a text with `wanted` in it."""
    end = time.monotonic() + 30
    while not any(wanted in text for text in texts(browser, css)):
        assert time.monotonic() < end, texts(browser, css)
        time.sleep(0.05)


def click(browser, css):
    browser.execute_script("document.querySelector(arguments[0]).click()", css)


def press(browser, css, key):
    browser.find_element("css selector", css).send_keys(key)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1300, 390])
def test_pages_in_a_browser(browser, width, scheme):
    for page in SHOWN:
        show(browser, f"{page}.html", width, scheme)
        asked = [url for url in requests(browser) if not url.startswith("data:")]
        assert [url for url in asked if not url.startswith(browser.site)] == []
        assert len(asked) > 5 and browser.get_log("browser") == [], page
        wide, room, back = browser.execute_script("""const page = document.documentElement;
            const back = getComputedStyle(document.body).backgroundColor;
            return [page.scrollWidth, page.clientWidth, back.match(/\\d+/g).map(Number)];""")
        assert wide <= room <= width, f"{page}: one has to scroll sideways"
        assert (sum(back[:3]) < 3 * 128) == (scheme == "dark"), page


def cost(browser, **changes):
    """Return what the formulas say to the settings at the beginning, with changes."""
    job = {"devices": 8, "size": 102.228128e6, "compute": 0.01, "latency": 10e-6, "bandwidth": 16e9}
    job |= {"overlap": 0, "slowest": 1, "divided": False, **changes}
    return browser.execute_script("return dataParallelStep(arguments[0])", job)


def ms(seconds):
    return f"{1e3 * seconds:.3g} ms"


def test_a_slider_changes_the_sentence(browser):
    show(browser, "docs/cost_model.html#devices=8&overlap=50&slowest=1.5")
    for share in (0.5, 1):
        step = cost(browser, slowest=1.5, overlap=share)
        speedup, linear = f"{step['speedup']:.3g}", f"{100 * step['efficiency']:.3g} %"
        sent, price = f"{step['sent'] / 1e6:.3g} MB", 14 * 10e-6 / step["sending"]
        late, exposed, sending = (ms(step[name]) for name in ("late", "exposed", "sending"))
        waits = f"Then all wait {exposed} for the rest of an all-reduce of {sending}. Each sends"
        (sentence,) = texts(browser, ".interactive-sentence")
        assert sentence == (
            f"Device 7 computes for 15 ms, and the others wait {late} for it. "
            f"{waits if share < 1 else 'The all-reduce is over by then. Each sends'} "
            f"{sent} in 14 messages; {100 * price:.0f} % of the sending is the price of messages, "
            f"the rest that of bytes. A step takes {ms(step['step'])}. The speed-up is {speedup}, "
            f"which is {linear} of linear."
        )
        assert texts(browser, "dd") == [ms(step["step"]), speedup, linear, sent, "14"]
        assert texts(browser, ".interactive-on-bar") == ["10 ms", sent] * 7 + ["15 ms", sent]
        waits = texts(browser, "svg .interactive-on-page")
        assert waits[:7] == [f"waits {ms(step['late'] + step['exposed'])}"] * 7
        press(browser, "#interactive-overlap", END)
    assert "overlap=100" in browser.current_url
    press(browser, "#interactive-devices", HOME)
    assert texts(browser, "figcaption")[1] == "1 device does the work of 1"


def test_the_page_on_memory(browser):
    settings = "parameters=7500&precision=float32&ranks=4&device=105&activations=30&micro=8"
    show(browser, f"docs/memory.html#{settings}&tensor=2&stages=2&zero=2&between=tokens")
    held = browser.execute_script("""const mixture = { data: 1, tensor: 2, stages: 2, zero: 2 };
        const ways = ["data", "zero1", "zero2", "zero3", "tensor", "gpipe", "1f1b"];
        const state = { parameters: 7.5e9, precision: "float32", optimizer: "Adam", given: 30e9,
            tokens: 2048, width: 4096, heads: 32, layers: 40, again: "attention",
            between: "tokens", micro_batches: 8, schedule: "1f1b" };
        return [...ways.map((way) => layout(way, 4)), mixture].map(
            (used) => Object.values(rankMemory({ ...state, ...used })))
    """)
    assert texts(browser, "details td") == [f"{part / 1e9:.3g} GB" for row in held for part in row]
    names = ["data parallel", *(f"ZeRO {n}" for n in (1, 2)), "ZeRO 3 (fully sharded)", "tensor"]
    names += ["GPipe pipeline", "1F1B pipeline", "mixture 1 \u00d7 2 \u00d7 2"]
    assert texts(browser, "tbody th") == names
    totals = [row[-1] / 1e9 for row in held]
    assert 105 in totals, "a bar that ends at the limit fits"
    said = [f"{total:.3g} GB, {'fits' if total <= 105 else 'too big'}" for total in totals]
    assert [text for text in texts(browser, "svg text") if text.endswith(("fits", "big"))] == said
    fits = [total for total in totals if total <= 105]
    assert texts(browser, "figcaption") == [f"{len(fits)} of 8 ways fit into 105 GB"]
    (sentence,) = texts(browser, ".interactive-sentence")
    _, sentence = sentence.split("4 + 4 + 8 = 16 bytes, 120 GB in all. ")
    assert sentence.startswith("A micro-batch leaves 30 GB of activations. What fits on 4 ranks")
    said = re.findall(r"\(([\d.]+) GB\)", sentence)
    assert said == [f"{total:.3g}" for total in sorted(totals, key=lambda total: total > 105)]
    press(browser, "#interactive-device", HOME)
    assert "On 4 ranks with 8 GB each nothing fits" in texts(browser, ".interactive-sentence")[0]


def test_what_cannot_be_cut_so_often_is_said(browser):
    show(browser, "docs/memory.html#ranks=48&tensor=10&stages=2&device=300")
    (sentence,) = texts(browser, ".interactive-sentence")
    assert (
        "A row of 2,048 tokens leaves 11.4 GB of activations in 40 blocks of width 4,096."
        in sentence
    )
    assert sentence.endswith(
        "Not possible: tensor (32 heads for 48 parts), GPipe pipeline (40 blocks for 48 stages), "
        "1F1B pipeline (40 blocks for 48 stages)."
    )
    short = [text for text in texts(browser, "svg text") if "too few" in text]
    assert [text.split(", ")[1] for text in short] == ["too few heads", *["too few blocks"] * 2]
    assert texts(browser, "figcaption") == ["5 of 8 ways fit into 300 GB"]
    (steps,) = texts(browser, ".interactive-key")
    assert "the pipelines 32, the mixture 64." in steps  # 2 replicas, 32 in each
    assert steps.endswith(
        "The mixture has 2 data with ZeRO 3 \u00d7 10 tensor \u00d7 2 pipeline ranks, "
        "and leaves 8 ranks idle."
    )
    show(browser, "docs/memory.html#ranks=4&tensor=4&stages=2&layers=0")
    (sentence,) = texts(browser, ".interactive-sentence")
    assert "All this is without activations." in sentence
    assert sentence.endswith("Not possible: mixture 1 \u00d7 4 \u00d7 2 (needs 8 ranks).")


def folds(browser):
    """Return which folds of the controls are open."""
    code = "return [...document.querySelectorAll('.interactive-fold')].map((fold) => fold.open)"
    return browser.execute_script(code)


def test_an_address_that_sets_something_in_a_fold_opens_it(browser):
    show(browser, "docs/memory.html")
    assert folds(browser) == [False, False]
    assert len(texts(browser, ".interactive-fold #interactive-heads + input")) == 1
    presets(browser, "models", "parameters")  # also changes what is in a fold
    assert folds(browser) == [False, False]
    browser.execute_script("location.hash = '#zero=0'")
    wait_for(browser, "tbody th", "mixture 4 \u00d7 2 \u00d7 1")
    assert folds(browser) == [False, True]
    show(browser, "docs/memory.html#width=1024&zero=3")
    assert folds(browser) == [True, False]


def presets(browser, name, *sliders):
    """Choose each preset in turn; return {its name: values of the sliders}."""
    code = """const [name, sliders] = arguments;
        const select = document.querySelector(`#interactive-${name}`);
        return [...select.options].slice(1).map((option) => {
            select.value = option.value;
            select.dispatchEvent(new Event("change", { bubbles: true }));
            const value = (one) => document.querySelector(`#interactive-${one} + input`).value;
            return [option.textContent, sliders.map((one) => Number(value(one)))];
        });"""
    return dict(browser.execute_script(code, name, sliders))


def test_the_presets(browser):
    show(browser, "docs/cost_model.html")
    page = (ROOT / "docs" / "cost_model.md").read_text(encoding="utf-8")
    rows = re.findall(r"(?m)^\| ([^|]+) \| ([\d.]+) µs \| ([\d.]+) GB/s \|", page)
    links = {name: [float(us), float(gb)] for name, us, gb in rows}
    assert presets(browser, "links", "latency", "bandwidth") == links and len(links) == 7
    gradients = presets(browser, "gradients", "gradient").values()
    show(browser, "docs/memory.html")
    names = ("parameters", "layers", "width", "heads", "tokens", "activations")
    models = {name: dict(zip(names, values, strict=True))
              for name, values in presets(browser, "models", *names).items()}  # fmt: skip
    million = [25.557032, 340, 1500, 6738.41152, 7500, 8053.06368, 175_000]
    assert [model["parameters"] for model in models.values()] == million
    sizes = [8 * n * width * (width + 1) / 1e6 for n, width in how_fast.SHAPES.values()]
    sizes += [4 * million[0], 4 * million[1], 4 * million[2], 2 * million[5]]
    assert [size for (size,) in gradients] == pytest.approx(sizes)
    shapes = [(24, 1024, 16, 512), (48, 1600, 25, 1024), (32, 4096, 32, 2048)]
    shapes += [(40, 4096, 32, 2048), (96, 12288, 96, 2048)]
    found = [tuple(model[name] for name in names[1:5]) for model in models.values()]
    assert [shape for shape in found if shape[0]] == shapes
    assert [model["activations"] for model in models.values()] == [0] * 7


def test_an_address_sets_all_settings_and_a_link_into_the_page_none(browser):
    show(browser, "docs/cost_model.html")
    assert texts(browser, "dd")[0] == ms(cost(browser)["step"])
    browser.execute_script("location.hash = '#devices=1024'")
    many = ms(cost(browser, devices=1024)["step"])
    wait_for(browser, "dd", many)
    click(browser, "[href='#how-to-read-it']")
    wait_for(browser, "dd", many)
    assert "devices=1024" in browser.current_url
    browser.execute_script("location.hash = '#compute=20'")
    wait_for(browser, "dd", ms(cost(browser, compute=0.02)["step"]))  # 8 devices again
    click(browser, "#task-2 a")
    half = ms(cost(browser, overlap=0.5)["step"])
    wait_for(browser, "dd", half)
    assert texts(browser, ".interactive-task")[0].startswith("Task 2. Eight devices compute")
    click(browser, ".languages a")
    wait_for(browser, "dd", half)
    assert "zh_CN/docs/cost_model.html#task=2&" in browser.current_url
    said = browser.execute_script("""const { bytes, count, few, time } = interactive;
        return [few(0.000123), few(0), few(12.345), few(1024), few(999.9), time(2e-10),
            bytes(1.5e15), count(1, "device"), count(1024, "device")].join("; ")""")
    numbers = "0.000123; 0; 12.3; 1,024; 1,000; 0.0002 µs; 1,500 TB; 1 device; 1,024 devices"
    assert said.replace("\xa0", " ") == numbers


def buttons_of_stories(browser):
    return browser.find_elements("css selector", "#player [aria-label=story] button")


def test_the_player_plays_and_answers_the_keyboard(browser):
    show(browser, "docs/player.html")
    stories = browser.execute_script("return Object.values(RECORDED).map(stepsOf)")
    for button, steps in zip(buttons_of_stories(browser), stories, strict=True):
        button.click()
        last = len(steps) - 1
        for key, at in ((RIGHT, 1), (LEFT, 0), (END, last), (LEFT, last - 1), (HOME, 0)):
            press(browser, ":focus", key)
            assert texts(browser, ".player-position") == [f"step {at + 1} of {len(steps)}"]
            assert texts(browser, ".player-caption") == [steps[at]["caption"]]
    browser.execute_script("const wait = setTimeout; setTimeout = (act) => wait(act, 1)")
    press(browser, ":focus", " ")
    assert "Pause" in texts(browser, "#player button")
    wait_for(browser, ".player-position", "step 3 of")
    press(browser, ":focus", " ")
    assert "Play" in texts(browser, "#player button")
    show(browser, "docs/player.html", width=390)  # the figure is wider: there the arrows scroll it
    (buckets,) = [button for button in buttons_of_stories(browser) if "buckets" in button.text]
    buckets.click()
    press(browser, ":focus", RIGHT)
    assert texts(browser, ".player-position")[0].startswith("step 1 of")


def test_the_search_finds(browser):
    show(browser, "index.html")
    press(browser, "input.sidebar-search", "map_location\n")
    wait_for(browser, "#search-results li a", "Lesson 06")
    for word, lesson in (("进程组", "第 03 课"), ("梯度", "第 02 课"), ("桶", "第 02 课")):
        show(browser, f"zh_CN/search.html?q={quote(word)}")
        wait_for(browser, "#search-results li a", lesson)


def test_the_search_finds_a_message_with_its_numbers_and_paths(browser):
    pasted = (
        "[rank3]: RuntimeError: [/__w/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting"
        " 1800000ms for recv operation to complete"
    )
    show(browser, f"search.html?q={quote(pasted)}")
    wait_for(browser, ".search-message a", "Timed out waiting … for recv operation")
    places = browser.execute_script("return MESSAGES.map(([parts, place]) => place)")
    browser.find_element("css selector", ".search-message a").click()
    for place in places:
        assert browser.find_elements("id", place), place
