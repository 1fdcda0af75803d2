"""The message player of the site: its stories are what the notebooks store, and what they say."""

import json
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT
from IPython.core.pylabtools import print_figure
from nbtools import pictures

sys.path.append(str(ROOT / "scripts"))
import site_events

STEPS = """
const { stepsOf } = require(process.argv[1]);
const stories = JSON.parse(require("fs").readFileSync(0));
for (const name of Object.keys(stories)) stories[name] = stepsOf(stories[name]);
console.log(JSON.stringify(stories));
"""


@pytest.fixture
def stories(tmp_path):
    site_events.write_player_data(ROOT, tmp_path / "data.js")
    return json.loads((tmp_path / "data.js").read_text("utf-8")[len("const RECORDED = ") : -2])


def total(story):
    return sum(event.get("nbytes", 0) for event in story.get("events") or story["spans"])


def test_a_picture_carries_its_events():
    send = pictures.Span("rank 0", "send", "sum", 5.0, 5.0021234, 8)
    work = pictures.Span("rank 1", "compute", "step", 5.001, 5.002)
    lanes = pictures.lanes([send, work], "Größe", arrows=[(send, work)])
    message = pictures.Message("out", "x", "y", 96)
    strip = pictures.strip([message], "Größe", ["x", "y"], ["-", "out"], {(1, "y"): "new"})
    texts = [site_events.png_text(print_figure(figure)) for figure in (lanes, strip)]
    one, two = (json.loads(text["Description"]) for text in texts)
    assert one["title"] == two["title"] == "Größe"
    assert [(s["begin"], s["end"]) for s in one["spans"]] == [(0, 2.123), (1, 2)]
    assert one["spans"][0]["nbytes"] == 8 and one["arrows"] == [[0, 1]]
    assert (two["events"], two["steps"]) == ([message._asdict()], ["-", "out"])
    assert two["holds"] == [["x", "y"], ["x", "new"], ["x", "y"]]


def test_the_stories_say_what_the_lessons_say(stories):
    ring, parallel, buckets, pipeline = stories.values()
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
    parts = (ROOT / "docs" / "player.md").read_text(encoding="utf-8").split("\n## ")[1:]
    for part, story in zip(parts, stories.values(), strict=True):
        (link,) = re.findall(rf"\[lesson {story['lesson']}\]\((.*)\)", part)
        assert (ROOT / "docs" / link).is_file()
        assert f"{total(story) or 6 * 8192:,} B" in part  # lesson 12: 8,192 B per link and way


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_player_js_tells_the_same(stories):
    command = ["node", "-e", STEPS, ROOT / "docs" / "_static" / "player.js"]
    told = json.loads(subprocess.check_output(command, input=json.dumps(stories), text=True))
    assert "Handed in by all ranks so far: 12.6 MB." in told["buckets"][-1]["caption"]
    assert [told[name][-1].get("sent", 0) for name in stories] == [*map(total, stories.values())]
    last = "rank 0 sends 64 B to rank 1; rank 1 sends 64 B to rank 2; rank 2 sends 64 B to rank 0."
    assert told["ring"][3]["caption"] == f"Step 4 of 4 (4 store): {last} Sent so far: 768 B."
    ended = re.findall(r"ends (\w\d)", " ".join(step["caption"] for step in told["one_f_one_b"]))
    assert sorted(ended) == sorted(f"{kind}{n}" for kind in "FB" for n in range(8) for _ in "0123")
    assert told["one_f_one_b"][-1]["kept"] == [0, 0, 0, 0]


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_player_js_says_that_a_rank_pauses_where_it_goes_on_with_the_same():
    spans = [("forward", 0, 4), ("backward", 5, 6), ("backward", 8, 9), ("step", 9.5, 10)]
    names = ("name", "begin", "end")
    spans = [dict(zip(names, s, strict=True), lane="rank 0", kind="compute") for s in spans]
    story = {"kind": "lanes", "order": ["rank 0"], "spans": spans}
    command = ["node", "-e", STEPS, ROOT / "docs" / "_static" / "player.js"]
    told = json.loads(subprocess.check_output(command, input=json.dumps({"x": story}), text=True))
    said = re.findall(r"rank 0 (.*?)\.", " ".join(step["caption"] for step in told["x"]))
    assert said == ["ends forward", "pauses in backward", "ends backward", "ends step"]


def test_a_missing_story_is_named(monkeypatch):
    monkeypatch.setitem(site_events.STORIES, "ring", ("11", "strip", "X"))
    with pytest.raises(LookupError, match=r"lesson_11.*'X'.*it has: strip 'A ring"):
        site_events.find_story(ROOT, "ring")
