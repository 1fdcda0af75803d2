"""What the interactive pages say, and show, is what docs/formulas.py computes."""

import json
import re
import shutil
import subprocess

import lesson_11_how_fast as how_fast
import pytest
from conftest import ROOT
from test_site_formulas import DOCS, formulas
from test_site_player import site_events

COST, MEMORY, PLAYER = (
    (DOCS / f"{name}.md").read_text(encoding="utf-8") for name in ("cost_model", "memory", "player")
)
# name, latency in µs, bandwidth in GB/s
TABLE = re.findall(r"(?m)^\| ([^|]+) \| ([\d.]+) µs \| ([\d.]+) GB/s \|", COST)
LINKS = [(name, float(us), float(gb)) for name, us, gb in TABLE]
needs_node = pytest.mark.skipif(not shutil.which("node"), reason="node is not installed")


def ask(page, code, folder="."):
    """Return what the JavaScript `code` returns on a page (see site_page.js)."""
    command = ["node", ROOT / "tests" / "site_page.js", DOCS / f"{page}.md", folder, code]
    answer = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout.replace(r"\u00a0", " ").replace("\u00a0", " "))


def ms(seconds):
    return f"{1e3 * seconds:.3g} ms"


def cost(devices, us, gb, megabytes, compute_ms, overlap=0.0, slowest=1.0, divided=False):
    job = (megabytes * 1e6, compute_ms / 1e3, us / 1e6, gb * 1e9, overlap, slowest, divided)
    return formulas.data_parallel_step(devices, *job)


@needs_node
def test_the_page_on_cost():
    hash = "#devices=8&latency=20&bandwidth=12.5&gradient=100&compute=10&overlap=50&slowest=1.5"
    code = """const figures = root.all("svg");
        const bars = figures[0].texts("interactive-on-bar");
        const waits = figures[0].texts("interactive-on-page");
        const [sentence] = root.texts("interactive-sentence");
        const named = figures[0].attributes["aria-label"] === sentence;
        const [strong] = figures[1].texts("interactive-strong");
        return [sentence, named, bars, waits, strong, root.texts("dd")];"""
    sentence, named, bars, waits, strong, results = ask("cost_model", f'go("{hash}"); {code}')
    step = cost(8, 20, 12.5, 100, 10, 0.5, 1.5)
    sent = f"{step['sent'] / 1e6:.3g} MB"
    prices = f"{100 * 14 * 20e-6 / step['sending']:.0f} %"
    speedup, linear = f"{step['speedup']:.3g}", f"{100 * step['efficiency']:.3g} %"
    assert named and sentence == (
        "Device 7 computes for 15 ms, and the others wait 5 ms for it. Then all wait "
        f"{ms(step['exposed'])} for the rest of an all-reduce of {ms(step['sending'])}. "
        f"Each sends {sent} in 14 messages; {prices} of the sending is the price of messages, the "
        f"rest that of bytes. A step takes {ms(step['step'])}. The speed-up is {speedup}, which "
        f"is {linear} of linear."
    )
    assert bars == ["10 ms", sent] * 7 + ["15 ms", sent]
    late = step["late"] + step["exposed"]
    assert waits == [f"waits {ms(late)}"] * 7 + [f"waits {ms(step['exposed'])}"]
    assert strong == f"8 devices: {speedup}"
    assert results == [ms(step["step"]), speedup, linear, sent, "14"]


@needs_node
def test_the_page_on_memory():
    hash = "#parameters=7500&precision=float32&ranks=4&device=105&activations=30&micro=8&cut=50"
    code = """return [root.texts("interactive-sentence")[0], root.all("svg")[0].texts("text"),
        root.texts("td"), root.texts("figcaption")[0]];"""
    sentence, labels, cells, caption = ask("memory", f'go("{hash}"); {code}')
    job = (7.5e9, "float32", "Adam", 4, 30e9, 8, 0.5)
    held = [formulas.rank_memory(strategy, *job) for strategy in formulas.STRATEGIES]
    totals = [row["total"] / 1e9 for row in held]
    assert 105 in totals, "a bar that ends at the limit fits"
    said = [f"{total:.3g} GB, {'fits' if total <= 105 else 'too big'}" for total in totals]
    assert [text for text in labels if text.endswith(("fits", "too big"))] == said
    assert cells == [f"{part / 1e9:.3g} GB" for row in held for part in row.values()]
    fit, big = sentence.split("4 + 4 + 8 = 16 bytes, 120 GB in all. ")[1].split("Too big: ")
    assert caption.startswith(f"{fit.count('(') - 1} of 7 ways fit")  # "(fully sharded)"
    assert re.findall(r"\(([\d.]+ GB)\)", fit + big) == [
        f"{total:.3g} GB" for total in sorted(totals, key=lambda total: total > 105)
    ]


@needs_node
@pytest.mark.parametrize("page, preset, names", [
    ("cost_model", "links", ("latency", "bandwidth")),
    ("cost_model", "gradients", ("gradient",)),
    ("memory", "models", ("parameters", "activations")),
])  # fmt: skip
def test_the_presets(page, preset, names):
    code = f"""const select = root.all("select").find((one) =>
            one.attributes.id === "interactive-{preset}");
        const numbers = root.all("input").filter((one) => one.attributes.type === "number");
        const sliders = root.all("input").filter((one) => one.attributes.type === "range");
        const values = () => {json.dumps(names)}.map((name) => numbers[sliders.findIndex((one) =>
            one.attributes.id === `interactive-${{name}}`)].value);
        return select.children.slice(1).map((option) => {{
            select.value = option.attributes.value;
            select.fire("change");
            return [option.textContent, ...values()];
        }});"""
    set_by = {name: values for name, *values in ask(page, code)}
    transformers = {"BERT-large": (24, 512, 1024), "GPT-2": (48, 1024, 1600),
        "lesson 13": (40, 2048, 4096), "GPT-3": (96, 2048, 12288)}  # fmt: skip
    models = [25.557032, 340, 1500, 7500, 8053.06368, 175_000]
    sizes = [8 * n * width * (width + 1) / 1e6 for n, width in how_fast.SHAPES.values()]
    if preset == "links":
        assert [(name, *values) for name, values in set_by.items()] == LINKS
    elif preset == "gradients":
        sizes += [number * 4 for number in models[:3]] + [models[4] * 2]
        assert [value for (value,) in set_by.values()] == pytest.approx(sizes)
    else:
        assert [values[0] for values in set_by.values()] == models
        for name, (_, activations) in set_by.items():
            blocks, tokens, width = transformers.get(name.split(",")[0], (0, 0, 0))
            assert activations == float(f"{34 * blocks * tokens * width / 1e9:.3g}")


def test_the_links_are_those_of_lesson_11():
    stored = json.loads((ROOT / "notebooks" / "lesson_11_how_fast.ipynb").read_text("utf-8"))
    text = "".join("".join(out.get("text", "")) for c in stored["cells"] if c["cell_type"] == "code"
        for out in c["outputs"])  # fmt: skip
    found = re.findall(r"(\d) ranks, all-reduce: (\d+) us per message, ([\d.]+) s per GB; wrong.*, "
        r"([\d.]+) \(worst\) where fitted; .*, ([\d.]+) elsewhere", text)  # fmt: skip
    assert [row[0] for row in found] == ["2", "4"]
    for (name, us, gb), (ranks, *price, fitted, elsewhere) in zip(LINKS, found, strict=False):
        assert name == f"gloo, measured in a job of {ranks} processes"
        assert (us, gb) == (float(price[0]), round(1 / float(price[1]), 1)), "write the new fit"
        (row,) = re.findall(rf"(?m)^\| {name} \|.*", COST)
        assert f"{fitted} at most where it was fitted, {elsewhere} elsewhere" in row
    assert {(us, gb) for us, gb, _ in how_fast.LINKS} == {(us, gb) for _, us, gb in LINKS[3:6]}


def test_the_answers_on_cost():
    one, two, three = re.findall(r"<details>.*?</details>", COST)
    few, many = (cost(n, 10, 16, 102.228128, 10) for n in (8, 256))
    sent, messages = ([few[name], many[name]] for name in ("sent", "messages"))
    times = [1e3 * few["sending"], 1e3 * many["sending"]]
    prices = [1e3 * 10e-6 * number for number in messages]
    grown, by_messages = times[1] - times[0], prices[1] - prices[0]
    for text in (
        f"{sent[0] / 1e6:.0f} MB to {sent[1] / 1e6:.0f} MB, a factor of {sent[1] / sent[0]:.2f}:",
        f"from {messages[0]} to {messages[1]}, a factor of {messages[1] / messages[0]:.0f}.",
        f"So of the {grown:.1f} ms by which the all-reduce grows, from {times[0]:.1f} ms",
        f"{by_messages:.1f} are the price of the messages and {grown - by_messages:.1f} that of",
        f"{100 * prices[0] / times[0]:.0f} % of the sending with 8 devices, "
        f"{100 * prices[1] / times[1]:.0f} % with 256",
    ):
        assert text in one
    half = cost(640, 10, 16, 102.228128, 10)
    assert half["messages"] * 10e-6 / half["sending"] == pytest.approx(0.5, abs=0.01)
    assert f"<p>{ms(cost(8, 10, 16, 102.228128, 10, 1)['exposed'])}, and not 0" in two
    for fit, best in zip(LINKS[:2], (6, 9), strict=True):
        steps = {n: 1e3 * cost(n, *fit[1:], 8.404992, 90, 0, 1, True)["step"] for n in range(1, 99)}
        assert min(steps, key=steps.get) == best
        assert f"{best} devices, with a step of {steps[best]:.2f} ms" in three
        if best == 6:
            assert f"5 need {steps[5]:.1f} ms, and 7 need {steps[7]:.2f} ms" in three
    assert f"6 devices need {steps[6]:.1f} ms" in three


def test_the_answers_on_memory():
    one, _, three = re.findall(r"<details>.*?</details>", MEMORY)
    job = (8053.06368e6, "mixed", "Adam")

    def gigabytes(strategy, ranks, part="total"):
        return f"{formulas.rank_memory(strategy, *job, ranks, 11.4e9, 32, 0.7)[part] / 1e9:.1f} GB"

    assert f"whole, {gigabytes('zero2', 1, 'parameters')}, and with 11.4 GB" in one
    assert f"that is {gigabytes('zero2', 10**9)}" in one
    assert f"with 16 ranks it needs {gigabytes('zero3', 16)}" in one
    for schedule, text in (("gpipe", "from {} to {}"), ("1f1b", "stay at {1}")):
        assert text.format(*(gigabytes(schedule, n, "activations") for n in (8, 16))) in three


@needs_node
def test_an_address_sets_all_settings_and_a_link_into_the_page_none():
    code = """const step = () => root.texts("dd")[0];
        const seen = [step()];
        for (const hash of ["#devices=1024", "#how-to-read-it", "#compute=20", "#"]) {
            go(hash);
            seen.push(step(), location.hash);
        }
        return seen;"""
    first, many, _, kept, address, other, _, still, last = ask("cost_model", code)
    assert first == ms(cost(8, 10, 16, 102.228128, 10)["step"])
    assert kept == many == ms(cost(1024, 10, 16, 102.228128, 10)["step"])
    assert "devices=1024" in address
    assert still == other == ms(cost(8, 10, 16, 102.228128, 20)["step"]), "8 devices again"
    assert "devices=8" in last and "compute=20" in last


@needs_node
def test_the_other_language_has_the_same_settings():
    code = 'go("#devices=1024"); language.fire("click"); return [language.hash, location.hash];'
    theirs, ours = ask("cost_model", code)
    assert theirs == ours and "devices=1024" in theirs


@needs_node
def test_numbers_and_words_for_them():
    code = """const { bytes, count, few, time } = interactive;
        go("#devices=1");
        return [few(0.000123), few(0), few(12.345), few(1024), few(999.9), time(2e-10),
            bytes(1.5e15), count(1, "device"), count(1024, "device"),
            ...root.texts("figcaption").slice(1), root.all("svg")[1].texts("interactive-strong")];
    """
    assert ask("cost_model", code) == [
        *("0.000123", "0", "12.3", "1,024", "1,000", "0.0002 µs", "1,500 TB"),
        *("1 device", "1,024 devices", "1 device does the work of 1", ["1 device: 1"]),
    ]


@needs_node
def test_the_player(tmp_path):
    site_events.write_player_data(ROOT, tmp_path / "player_data.js")
    code = """const [choice, controls] = root.all("player-row");
        return Object.values(RECORDED).map((story, index) => {
            const steps = stepsOf(story);
            choice.children[index].fire("click");
            while (root.texts("player-position")[0] !== `step 3 of ${steps.length}`)
                controls.children[2].fire("click");
            const figure = root.all("player-figure")[0];
            figure.scrollWidth = 800;
            root.fire("keydown", { key: "ArrowLeft", target: figure }); // it scrolls
            const caption = root.texts("player-caption")[0];
            return { story, steps, caption };
        });"""
    ring, parallel, buckets, pipeline = ask("player", code, tmp_path)
    sends = "rank 0 sends 64 B to rank 1; rank 1 sends 64 B to rank 2; rank 2 sends 64 B to rank 0."
    assert ring["caption"] == f"Step 3 of 4 (3 store): {sends} Sent so far: 576 B."
    events = [e for e in parallel["story"]["events"] if e["step"] == parallel["story"]["steps"][2]]
    for told in [f"{e['source']} sends {e['nbytes']} B to {e['target']}" for e in events]:
        assert told in parallel["caption"]
    for lanes in (buckets, pipeline):
        assert lanes["caption"] == lanes["steps"][2]["caption"]
        spans = lanes["story"]["spans"]
        grain = max(span["end"] for span in spans) / 100
        for step in lanes["steps"]:
            now = [s for s in spans if s["begin"] <= step["until"] < s["end"] - grain]
            for kind, words in (("compute", "Still computing"), ("wait", "Waiting")):
                names = ", ".join(sorted({s["lane"] for s in now if s["kind"] == kind}))
                told = re.findall(rf"{words}: (.*?)\.", step["caption"])
                assert told == ([names] if names else [])
    told = " ".join(step["caption"] for step in buckets["steps"])
    assert len(re.findall(r"gloo begins all_reduce", told)) == 12
    assert [max(kept) for kept in zip(*(s["kept"] for s in pipeline["steps"]), strict=True)] == [
        *(4, 3, 2, 1)
    ]


@pytest.mark.parametrize("name, scripts", [
    ("interactive", ("interactive", "cost_model", "memory")), ("player", ("player",)),
])  # fmt: skip
def test_every_class_has_its_style(name, scripts):
    code = "".join((DOCS / "_static" / f"{script}.js").read_text("utf-8") for script in scripts)
    style = (DOCS / "_static" / f"{name}.css").read_text("utf-8")
    used = set(re.findall(rf'class: "({name}-[\w-]+)', code))
    assert used and {one for one in used if not re.search(rf"\.{one}\b", style)} == set()
