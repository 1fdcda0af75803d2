"""The site's scripts, run by node without a page: they compute and tell what the lessons do.

Where there is a browser, tests/test_site.py tries the pages themselves.
"""

import json
import re
import shutil
import subprocess
import sys
from io import BytesIO
from itertools import product

import lesson_11_how_fast as how_fast
import lesson_12_pipeline_parallel as pipeline
import lesson_18_sharding as sharding
import pytest
import torch
from conftest import ROOT
from IPython.core.pylabtools import print_figure
from nbtools import pictures
from nbtools.record import Saved
from PIL import Image
from proofs import lesson_12 as proof_12
from proofs import lesson_18 as proof_18
from torch.nn.functional import gelu, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

sys.path.append(str(ROOT / "docs" / "build"))
import events

DOCS = ROOT / "docs"
COST, MEMORY, PLAYER = (
    (DOCS / f"{name}.md").read_text(encoding="utf-8") for name in ("cost_model", "memory", "player")
)
# name, latency in µs, bandwidth in GB/s
ROWS = re.findall(r"(?m)^\| ([^|]+) \| ([\d.]+) µs \| ([\d.]+) GB/s \|", COST)
LINKS = [(name, float(us), float(gb)) for name, us, gb in ROWS]
needs_node = pytest.mark.skipif(not shutil.which("node"), reason="node is not installed")
CALLS = """
const script = require(process.argv[1]);
const calls = JSON.parse(require("fs").readFileSync(0));
console.log(JSON.stringify(calls.map(([name, ...values]) => script[name](...values))));
"""


def node(script, calls):
    """Return what the functions of a script return; `calls` is a list of (name, arguments ...)."""
    command = ["node", "-e", CALLS, DOCS / "_static" / f"{script}.js"]
    return json.loads(subprocess.check_output(command, input=json.dumps(calls), text=True))


def costs(*jobs):
    """Return what a step costs, for each (devices, µs, GB/s, MB, ms, overlap, slowest, divided)."""
    calls = []
    for devices, us, gb, megabytes, ms, overlap, slowest, divided in jobs:
        link = {"latency": us / 1e6, "bandwidth": gb * 1e9, "overlap": overlap}
        work = {"size": megabytes * 1e6, "compute": ms / 1e3, "slowest": slowest}
        job = {"devices": devices, **link, **work, "divided": divided}
        calls.append(("dataParallelStep", job))
    return node("cost_model_formulas", calls)


def printed_by(notebook):
    """Return what a notebook has stored that it prints; nbval compares it with a run."""
    stored = json.loads((ROOT / "notebooks" / f"{notebook}.ipynb").read_text("utf-8"))
    outputs = [out for cell in stored["cells"] for out in cell.get("outputs", [])]
    return "".join("".join(out.get("text", "")) for out in outputs)


BEGINNING = {"parameters": 40 * 12 * 4096**2, "precision": "mixed", "optimizer": "Adam"}
BEGINNING |= {"layers": 40, "width": 4096, "heads": 32, "tokens": 2048, "again": "attention"}
BEGINNING |= {"between": "whole", "given": 0, "micro_batches": 32}  # the page's, on 8 ranks


def memories(*jobs):
    """Return what a rank keeps, for each (way, ranks, what differs from the page's beginning).

    A way is the name of one, or (data, tensor, stages, stage of ZeRO) of a mixture.
    """
    names = [(way, ranks) for way, ranks, _ in jobs if isinstance(way, str)]
    layouts = iter(node("memory_formulas", [("layout", *name) for name in names]))
    calls = []
    for way, _, changes in jobs:
        if isinstance(way, str):
            used = next(layouts)
        else:
            used = dict(zip(("data", "tensor", "stages", "zero"), way, strict=True))
        calls.append(("rankMemory", {"schedule": "1f1b"} | BEGINNING | used | changes))
    return node("memory_formulas", calls)


def state(held):
    """Return what a rank keeps between two steps."""
    return held["total"] - held["activations"]


# --- The formulas are those of the lessons, and of their sources ---


@needs_node
def test_a_step_is_that_of_lesson_11():
    jobs = product((1, 2, 7, 256), LINKS, (0.004096, 102.2), (10, 100), (False, True))
    jobs = [(n, us, gb, mb, ms, divided) for n, (_, us, gb), mb, ms, divided in jobs]
    apart, beside = (costs(*((*job[:5], f, 1, job[5]) for job in jobs)) for f in (0, 1))
    for (n, us, gb, mb, ms, divided), *steps in zip(jobs, apart, beside, strict=True):
        cost = how_fast.all_reduce_cost(n, mb * 1e6)
        sending = how_fast.predict_all_reduce((us / 1e6, 1e-9 / gb), n, mb * 1e6)
        alone, share = (ms / 1e3, ms / 1e3 / n) if divided else (n * ms / 1e3, ms / 1e3)
        speedups = how_fast.predict_speedup(alone, share, sending)
        for step, speedup in zip(steps, speedups, strict=True):
            both = (step["speedup"], step["efficiency"], step["step"])
            assert both == pytest.approx((speedup, speedup / n, alone / speedup))
            assert (step["messages"], step["sent"]) == pytest.approx(cost)
            assert (step["share"], step["late"]) == (pytest.approx(share), 0)
            assert (step["sending"], step["hidden"] + step["exposed"]) == pytest.approx(
                (sending, sending)
            )


@needs_node
def test_a_slow_device_and_a_part_of_the_overlap():
    """The page: step = c + sending - min(f sending, c), where c is that of the slowest device."""
    link = (2, 0, 0.001, 1)  # two devices send 1 MB each, in 1 s
    names = ("share", "late", "hidden", "exposed", "step", "speedup")
    for job, wanted in {
        (1000, 0.25, 1.5, False): [1, 0.5, 0.25, 0.75, 2.25, 2 / 2.25],
        (200, 0.5, 2, False): [0.2, 0.2, 0.4, 0.6, 1, 0.4],
        (1000, 0, 3, True): [0.5, 1, 0, 1, 2.5, 1 / 2.5],
    }.items():
        (step,) = costs((*link, *job))
        assert [step[name] for name in names] == pytest.approx(wanted)


@needs_node
def test_memory_is_that_of_zero():
    """arXiv:1910.02054, figure 1: 7.5 billion parameters on 64 devices; section 5: what is cut."""
    figure = {"data": 120, "zero1": 31.4, "zero2": 16.6, "zero3": 1.9}
    held = memories(*((way, 64, {"parameters": 7.5, "layers": 0}) for way in figure))
    assert [round(row["total"], 1) for row in held] == [*figure.values()]
    parts = {"data": [4, 4, 8], "zero1": [4, 4, 1], "zero2": [4, 0.5, 1], "zero3": [0.5, 0.5, 1]}
    one = {"parameters": 1, "precision": "float32", "given": 3}
    held = memories(*((way, 8, one) for way in parts))
    for row, three in zip(held, parts.values(), strict=True):
        assert [*row.values()] == [*three, 3, sum(three) + 3]


@needs_node
def test_bytes_for_one_parameter():
    """SGD keeps nothing, momentum one number, Adam two; mixed precision a copy (ZeRO, 3.1)."""
    wanted = {
        "float32": {"SGD": [4, 4, 0], "momentum": [4, 4, 4], "Adam": [4, 4, 8]},
        "mixed": {"SGD": [2, 2, 4], "momentum": [2, 2, 8], "Adam": [2, 2, 12]},
    }
    asked = [(precision, optimizer) for precision in wanted for optimizer in wanted[precision]]
    told = node("memory_formulas", [("bytesPerParameter", *one) for one in asked])
    assert told == [wanted[precision][optimizer] for precision, optimizer in asked]


@needs_node
def test_memory_is_that_of_lessons_12_and_13():
    """Lesson 12 says 112 GB; `table` is that of lesson 13, for 40 blocks of width 4,096."""
    seven = {"parameters": 7, "precision": "float32", "layers": 0}
    (adam,) = memories(("data", 1, seven))
    assert adam["total"] == 112
    table = {(8, 1, 1, 0): (129, 91), (8, 1, 1, 3): (16, 91), (4, 2, 1, 0): (64, 118)}
    table |= {(2, 4, 1, 0): (32, 172), (1, 8, 1, 0): (16, 279)}
    held = memories(*((way, 8, {}) for way in table))
    told = []
    for (data, *_), row in zip(table, held, strict=True):
        rows_of_a_replica = 64 // data
        told.append((state(row) / 1e9, rows_of_a_replica * row["activations"] / 1e9))
    assert [(round(one), round(other)) for one, other in told] == [*table.values()]


@needs_node
def test_what_a_stage_keeps_is_that_of_lesson_12():
    ways = {
        "gpipe": pipeline.all_forward_then_all_backward,
        "1f1b": pipeline.one_forward_one_backward,
    }
    jobs = list(product(ways, (1, 3, 4), (2, 4, 8)))
    held = memories(*((way, n, {"given": 12, "micro_batches": m}) for way, n, m in jobs))
    for (way, n, micro), row in zip(jobs, held, strict=True):
        kept = max(proof_12.alive_at_most(ways[way](rank, n, micro)) for rank in range(n))
        assert row["activations"] == pytest.approx(12 / n * kept)


@needs_node
def test_a_mixture_divides_by_tensor_and_stages_and_where_zero_says_so_by_data():
    for zero, by_data in enumerate(((1, 1, 1), (1, 1, 3), (1, 3, 3), (3, 3, 3))):
        (held,) = memories(((3, 2, 5, zero), 30, {"parameters": 30, "between": "tokens"}))
        parts = [30 * n / 10 / data for n, data in zip((2, 2, 12), by_data, strict=True)]
        assert [held[kind] for kind in ("parameters", "gradients", "optimizer")] == parts
        assert held["activations"] == pytest.approx(40 * 2048 * 4096 * 34 / 2)  # 5 of 5 stages


@needs_node
def test_memory_is_what_four_ranks_of_lesson_18_keep():
    """Its numbers have 8 bytes, twice those of float32; Adam counts steps, 4 bytes a module."""
    found = re.findall(r"(?m)^stage (\d): ({.*})$", printed_by("lesson_18_sharding"))
    assert [stage for stage, _ in found] == ["1", "2", "3"]
    counts = proof_18.modules_of(sharding.Transformer())
    padded = sum(-(-count // 4) * 4 for count in counts)
    for parameters, most in ((padded, 0), (sum(counts), 8 * (padded - sum(counts)))):
        numbers = {"parameters": parameters, "precision": "float32", "layers": 0}
        for (stage, text), held in zip(
            found, memories(*((f"zero{stage}", 4, numbers) for stage, _ in found)), strict=True
        ):
            for kind, kept in json.loads(text.replace("'", '"')).items():
                steps = 4 * len(counts) if kind == "optimizer" else 0
                assert 0 <= kept - steps - 2 * held[kind] <= most, (stage, kind)


@needs_node
def test_activations_are_those_of_the_paper():
    """arXiv:2205.05198: the table of a layer's bytes, and what selective recomputation saves."""
    s, h, a, t = 2048, 12288, 96, 8
    shape = {"width": h, "heads": a, "tokens": s, "precision": "mixed"}
    matrices = 5 * a * s / h
    table = {
        ("nothing", "whole", 1): 34 + matrices,
        ("nothing", "whole", t): 10 + 24 / t + matrices / t,
        ("nothing", "tokens", t): 34 / t + matrices / t,
        ("attention", "whole", t): 10 + 24 / t,
        ("attention", "tokens", t): 34 / t,
        ("all", "whole", t): 2,
        ("all", "tokens", t): 2 / t,
    }
    asked = [
        ("blockActivations", shape | {"again": again, "between": between}, parts)
        for again, between, parts in table
    ]
    told = node("memory_formulas", asked)
    assert told == pytest.approx([s * h * share for share in table.values()])
    (wide,) = node("memory_formulas", [(*asked[3][:1], asked[3][1] | {"precision": "float32"}, t)])
    assert wide == 2 * told[3] - 2 * s * h  # two masks between the cuts have 1 byte as before
    assert matrices == 80 and 5 * 128 * s / 20480 == 64  # GPT-3 and MT-NLG: 70 % and 65 % of it


def dropout(x):
    """Drop as a GPU does, with a mask of 1 byte; on a CPU that of nn.Dropout is a tensor like x."""
    return torch.native_dropout(x, 0.1, True)[0]


class Block(torch.nn.Module):
    """The layer of the paper, with all its dropouts; `keeps`: attention keeps its matrices."""

    def __init__(self, width, heads, keeps):
        super().__init__()
        self.heads, self.keeps = heads, keeps
        for name in ("query", "key", "value", "out"):
            setattr(self, name, torch.nn.Linear(width, width))
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
        self.norm_1, self.norm_2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)

    def forward(self, x):
        y = self.norm_1(x)
        parts = [layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
                 for layer in (self.query, self.key, self.value)]  # fmt: skip
        if self.keeps:
            query, key, value = parts
            mixed = dropout(torch.softmax(query @ key.transpose(-2, -1), -1)) @ value
        else:
            mixed = scaled_dot_product_attention(*parts)
        x = x + dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + dropout(self.down(gelu(self.up(self.norm_2(x)))))


@needs_node
@pytest.mark.parametrize("precision", ("mixed", "float32"))
@pytest.mark.parametrize("again", ("nothing", "attention", "all"))
def test_activations_are_what_autograd_keeps(again, precision):
    tokens, width, heads = 64, 96, 4
    kind = torch.bfloat16 if precision == "mixed" else torch.float32
    block = Block(width, heads, again == "nothing").to(kind)
    x = torch.randn(1, tokens, width, dtype=kind, requires_grad=True)
    with Saved(*block.parameters()) as saved:
        result = checkpoint(block, x, use_reentrant=True) if again == "all" else block(x)
    shape = {"width": width, "heads": heads, "tokens": tokens, "precision": precision}
    shape |= {"again": again, "between": "whole"}
    (told,) = node("memory_formulas", [("blockActivations", shape, 1)])
    norms = 0 if again == "all" else 2 * 2 * tokens * kind.itemsize  # mean and spread, for each
    logarithms = 4 * heads * tokens if again == "attention" else 0  # in place of the matrices
    assert saved.most == told + norms + logarithms
    result.sum().backward()
    assert saved.now == 0


# --- What the pages say ---


@needs_node
def test_the_answers_on_cost():
    one, two, three = re.findall(r"<details>.*?</details>", COST)
    resnet = (10, 16, 102.228128, 10)
    few, many, half = costs(*((n, *resnet, 0, 1, False) for n in (8, 256, 640)))
    sent = [step["sent"] / 1e6 for step in (few, many)]
    times = [1e3 * step["sending"] for step in (few, many)]
    prices = [1e-2 * step["messages"] for step in (few, many)]  # ms: 10 µs each
    grown, by_messages = times[1] - times[0], prices[1] - prices[0]
    for text in (
        f"{sent[0]:.0f} MB to {sent[1]:.0f} MB, a factor of {sent[1] / sent[0]:.2f}:",
        f"from {few['messages']} to {many['messages']}, a factor of {prices[1] / prices[0]:.0f}.",
        f"{grown:.1f} ms by which the all-reduce grows, from {times[0]:.1f} ms to {times[1]:.1f}",
        f"{by_messages:.1f} are the price of the messages and {grown - by_messages:.1f} that of",
        f"is {prices[0] / times[0]:.0%}".replace("%", " % of the sending with 8 devices"),
        f"{prices[1] / times[1]:.0%}".replace("%", " % with 256"),
    ):
        assert text in one
    assert half["messages"] * 10e-6 / half["sending"] == pytest.approx(0.5, abs=0.01)
    (hidden,) = costs((8, *resnet, 1, 1, False))
    assert f"<p>{1e3 * hidden['exposed']:.2f} ms, and not 0" in two
    found = []
    for _, us, gb in LINKS[:2]:
        steps = costs(*((n, us, gb, 8.404992, 90, 0, 1, True) for n in range(1, 99)))
        steps = dict(enumerate([1e3 * step["step"] for step in steps], start=1))
        found.append(best := min(steps, key=steps.get))
        assert f"{best} devices, with a step of {steps[best]:.3f} ms" in three
        if len(found) == 1:
            near = f"{best - 1} need {steps[best - 1]:.3f} ms, and {best + 1} need "
            assert f"{near}{steps[best + 1]:.3f} ms" in three
    assert f"{found[0]} devices need {steps[found[0]]:.1f} ms" in three


@needs_node
def test_the_answers_on_memory():
    one, two, three, four, _ = re.findall(r"<details>.*?</details>", MEMORY)
    ways = [("zero2", 10**9), ("zero3", 16), ("gpipe", 8), ("gpipe", 16), ("1f1b", 8), ("1f1b", 16)]
    zero2, zero3, *stages = memories(*((way, ranks, {}) for way, ranks in ways))
    kept = [f"{row['activations'] / 1e9:.1f} GB" for row in stages]
    assert f"whole, {zero2['parameters'] / 1e9:.1f} GB, and with {kept[-1]}" in one
    assert f"that is {zero2['total'] / 1e9:.1f} GB" in one
    assert f"with 16 ranks it needs {zero3['total'] / 1e9:.1f} GB" in one
    assert f"from {kept[0]} to {kept[1]}" in three
    assert kept[2] == kept[3] and f"stay at {kept[2]}" in three
    both = memories(*(("data", 8, {"precision": name}) for name in ("float32", "mixed")))
    wide, narrow = (f"{row['activations'] / 1e9:.1f}" for row in both)
    assert f"from {wide} GB to {narrow} GB" in two
    for again, digits in (("nothing", 3), ("attention", 3), ("all", 3)):
        rows = memories(*(("data", 8, {"again": again, "tokens": n}) for n in (2048, 8192)))
        short, long = (row["activations"] / 1e9 for row in rows)
        assert f"from {short:.{digits}g} GB to {long:.{digits}g} GB" in four
        if again == "nothing":
            assert f"{long / short:.1f} times" in four


@needs_node
def test_the_plan_of_lesson_18():
    """6.74 billion parameters on 4 copies of 32 shards of 8 parts, in float32."""
    outputs = printed_by("lesson_18_sharding")
    megabytes = re.findall(r"(?m)^(?:parameters|gradients|optimizer) +([\d.]+) MB$", outputs)
    planned = sum(map(float, megabytes))
    found = re.search(r"cut by 256: ([\d,]+); by 32 only: ([\d,]+)", outputs)
    cut, uncut = (int(number.replace(",", "")) for number in found.groups())
    alike = {"precision": "float32"}
    jobs = [((32, 8, 1, 3), cut + uncut), ((32, 8, 1, 3), cut), ((32, 1, 1, 3), uncut)]
    held = memories(*((way, 0, alike | {"parameters": count}) for way, count in jobs))
    all_cut, inside, outside = (state(row) / 1e6 for row in held)
    assert planned == pytest.approx(inside + outside, abs=0.2)  # three numbers, rounded to 0.1
    for text in (
        f"{all_cut:.0f} MB of parameters, gradients and optimizer",
        f"The plan says {planned:.0f} MB, 1/{16 * (cut + uncut) / planned / 1e6:.0f} of everything",
        f"{cut / 1e6:,.0f} million parameters on 256 ranks keep {inside:.0f} MB",
        f"{uncut / 1e6:.0f} million with 1 part on 32 ranks {outside:.0f} MB",
    ):
        assert text in re.findall(r"<details>.*?</details>", MEMORY)[4], text


# --- The player: its stories are what the notebooks store, and what they say ---


@pytest.fixture(scope="module")
def stories():
    return {name: events.find_story(ROOT, name) for name in events.STORIES}


def steps_of(*stories):
    """Return the steps that player.js makes of each story."""
    return node("player", [("stepsOf", story) for story in stories])


def total(story):
    return sum(event.get("nbytes", 0) for event in story.get("events") or story["spans"])


def test_a_picture_carries_its_events():
    send = pictures.Span("rank 0", "send", "sum", 5.0, 5.0021234, 8)
    work = pictures.Span("rank 1", "compute", "step", 5.001, 5.002)
    lanes = pictures.lanes([send, work], "Größe")
    message = pictures.Message("out", "x", "y", 96)
    strip = pictures.strip([message], "Größe", ["x", "y"], ["-", "out"], {(1, "y"): "new"})
    texts = [Image.open(BytesIO(print_figure(figure))).text for figure in (lanes, strip)]
    one, two = (json.loads(text["Description"]) for text in texts)
    assert one["title"] == two["title"] == "Größe"
    assert [(s["begin"], s["end"]) for s in one["spans"]] == [(0, 2.123), (1, 2)]
    assert one["spans"][0]["nbytes"] == 8
    assert (two["events"], two["steps"]) == ([message._asdict()], ["-", "out"])
    assert two["holds"] == [["x", "y"], ["x", "new"], ["x", "y"]]


def test_the_stories_say_what_the_lessons_say(stories):
    ring, tree, doubling, parallel, buckets, pipeline = stories.values()
    for story, ranks, rounds, messages in ((tree, 6, 6, 10), (doubling, 4, 2, 8)):
        assert (len(story["steps"]), len(story["events"])) == (rounds, messages)
        assert {text.partition("\n")[2] for text in story["holds"][-1]} == {"1" * ranks}
    for rank in ring["places"]:  # three ranks: 2(n-1) steps, 2(n-1)/n of 24 float64
        sent = [event["nbytes"] for event in ring["events"] if event["source"] == rank]
        assert sent == [24 * 8 // 3] * len(ring["steps"]) == [64] * 4
    assert {text.partition("\n")[2] for text in ring["holds"][-1]} == {"111 | 111 | 111"}
    assert sorted({step[0] for step in parallel["steps"]}) == ["1", "2", "3", "4", "5"]
    assert all("device 0" in (e["source"], e["target"]) for e in parallel["events"])
    sends = sorted(s["lane"] for s in buckets["spans"] if s["kind"] == "send")
    assert sends == ["rank 0, gloo"] * 6 + ["rank 1, gloo"] * 6
    for rank, lane in enumerate(pipeline["order"]):
        own = [s["name"] for s in pipeline["spans"] if s["lane"] == lane and s["kind"] != "wait"]
        kept = [sum(1 if name[0] == "F" else -1 for name in own[:n]) for n in range(17)]
        assert (len(own), kept[-1], max(kept)) == (16, 0, 4 - rank)


def test_the_page_names_the_lesson_and_the_bytes_of_each_story(stories):
    parts = PLAYER.split("\n## ")[1:]
    for part, story in zip(parts, stories.values(), strict=True):
        (link,) = re.findall(rf"\[lesson {story['lesson']}\]\((.*)\)", part)
        assert (DOCS / link).is_file()
        assert f"{total(story) or 6 * 8192:,} B" in part  # lesson 12: 8,192 B per link and way


@needs_node
def test_the_player_tells_the_same(stories):
    ring, tree, _, _, buckets, pipeline = told = steps_of(*stories.values())
    assert [steps[-1].get("sent", 0) for steps in told] == [*map(total, stories.values())]
    sends = "rank 0 sends 64 B to rank 1; rank 1 sends 64 B to rank 2; rank 2 sends 64 B to rank 0."
    assert ring[3]["caption"] == f"Step 4 of 4 (4 store): {sends} Sent so far: 768 B."
    assert "rank 4 sends 4 B to rank 0. Sent so far: 20 B." in tree[2]["caption"]
    assert "Handed in by all ranks so far: 12.6 MB." in buckets[-1]["caption"]
    assert len(re.findall("gloo begins all_reduce", str(buckets))) == 12
    ended = re.findall(r"ends (\w\d)", " ".join(step["caption"] for step in pipeline))
    assert sorted(ended) == sorted(f"{kind}{n}" for kind in "FB" for n in range(8) for _ in "0123")
    assert pipeline[-1]["kept"] == [0, 0, 0, 0]
    assert [max(kept) for kept in zip(*(s["kept"] for s in pipeline), strict=True)] == [4, 3, 2, 1]


@needs_node
def test_the_player_says_who_still_computes_and_who_waits(stories):
    for story in (stories["buckets"], stories["one_f_one_b"]):
        spans = story["spans"]
        grain = max(span["end"] for span in spans) / 100
        for step in steps_of(story)[0]:
            now = [s for s in spans if s["begin"] <= step["until"] < s["end"] - grain]
            for kind, words in (("compute", "Still computing"), ("wait", "Waiting")):
                names = ", ".join(sorted({s["lane"] for s in now if s["kind"] == kind}))
                told = re.findall(rf"{words}: (.*?)\.", step["caption"])
                assert told == ([names] if names else [])


@needs_node
def test_the_player_says_that_a_rank_pauses_where_it_goes_on_with_the_same():
    spans = [("forward", 0, 4), ("backward", 5, 6), ("backward", 8, 9), ("step", 9.5, 10)]
    names = ("name", "begin", "end")
    spans = [dict(zip(names, s, strict=True), lane="rank 0", kind="compute") for s in spans]
    (told,) = steps_of({"kind": "lanes", "order": ["rank 0"], "spans": spans})
    said = re.findall(r"rank 0 (.*?)\.", " ".join(step["caption"] for step in told))
    assert said == ["ends forward", "pauses in backward", "ends backward", "ends step"]


def test_a_missing_story_is_named(monkeypatch):
    monkeypatch.setitem(events.STORIES, "ring", ("11", "strip", "X"))
    with pytest.raises(LookupError, match=r"lesson_11.*'X'"):
        events.find_story(ROOT, "ring")
