"""Execute notebook 11 on an idle machine, and write what it measured to where it is said.

    python tests/idle_runs.py [RUNS]      3 to 20, 5 by default; a run takes some minutes

A measurement beside other work is made again, twice at most; then the run is thrown away, ten times
as many as asked for at most. The notebook of the last run is kept, the numbers of all are in
tests/idle_runs.json, and those in CLAIMS.md and the page on cost come from there: a test compares.
What fails or is interrupted leaves all files as they were.
"""

import json
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "scripts"), str(ROOT / "lessons")]
NOTEBOOK, RUNS = ROOT / "notebooks/lesson_11_how_fast.ipynb", ROOT / "tests/idle_runs.json"
COST, SLIDERS = "docs/cost_model.md", "docs/_static/cost_model.js"
NUMBER = r"([\d.,]+(?:e[-+]\d+)?)"
CONCLUSIONS = 11  # lines of the page that say what follows from times

PRINTED = {  # what the page prints
    "DDP": rf"DDP: ≈{NUMBER} ms, ≈{NUMBER} times as fast",
    "limit": rf"the limit: ≈{NUMBER} times",
    "two threads": rf"one process, two threads: ≈{NUMBER} times",
    "DataParallel": rf"DataParallel: ≈{NUMBER} times",
    "small layers": rf"many small.*: two threads ≈{NUMBER} times as fast, two.* ≈{NUMBER} times",
    "disturbed": r"conclusion: (\d+) measurements of this page were disturbed",
    **{
        f"job of {n}": rf"{n} ranks, all-reduce: {NUMBER} us per message, {NUMBER} s per GB; wrong "
        rf".*, {NUMBER} \(worst\) where fitted; .*, {NUMBER} elsewhere\n.*slow times: {NUMBER} us"
        for n in (2, 4)
    },
}

SENTENCES = [  # (file, sentence): what is in braces is measured
    (
        "CLAIMS.md",
        "In {runs} runs on two idle cores over gloo, with 2 workers and 256 rows for each, it was "
        "not: speed-up over one thread with few large layers {DataParallel} for our DataParallel "
        "by threads, {two_threads} for one process with two threads, {DDP} for DDP, whose limit "
        "was {limit}",
    ),
    (
        "CLAIMS.md",
        "was measured in {runs} runs on two idle cores, and no test asserts it: with many small "
        "layers, two halves of the work are done {small_threads} times as fast by two threads as "
        "by one, {small_processes} times by two processes",
    ),
    *(
        (SLIDERS, f'"gloo, measured in a job of {n} processes", {{{{ latency: {{us_{n}}}, '
         f"bandwidth: {{gb_{n}}} }}}}")
        for n in (2, 4)
    ),
    *(
        (COST, f"| gloo, measured in a job of {n} processes | {{us_{n}}} µs | {{gb_{n}}} GB/s |")
        for n in (2, 4)
    ),
    (COST, "wrong by a factor of {fitted_2} at most where it was fitted, {elsewhere_2} elsewhere; "
     "by the slow times a message takes {slow_2} µs"),
    (COST, "wrong by a factor of {fitted_4} at most where it was fitted, {elsewhere_4} elsewhere, "
     "which includes all-reduces of four on two cores; by the slow times a message takes {slow_4} "
     "µs"),
    (COST, "comes out as {us_2} µs once and as {us_4} µs then"),
    (COST, "gloo, in a job of 2 processes, {us_2} µs for each message"),
    (COST, "latency={us_2}&amp;bandwidth={gb_2}&amp;gradient=8.404992"),
    (COST, "{best_2} devices, with a step of {step_2} ms; {fewer} need {step_fewer} ms, and {more} "
     "need {step_more} ms."),
    (COST, "On a machine with two cores, {best_2} processes do not."),
    (COST, "in a job of 4 processes, {us_4} µs and {gb_4} GB/s: it is {best_4} devices, with a "
     "step of {step_4} ms. There {best_2} devices need {step_crossed} ms."),
]  # fmt: skip


def printed_by(notebook):
    """Return what a notebook has stored that it prints."""
    stored = json.loads(notebook.read_text("utf-8"))
    outputs = [out for cell in stored["cells"] for out in cell.get("outputs", [])]
    return "".join("".join(out.get("text", "")) for out in outputs)


def why_disturbed(printed):
    """Return the conclusions that were not drawn; a page without conclusions is none either."""
    drawn = re.findall(r"(?m)^conclusion: (.*)$", printed)
    assert len(drawn) == CONCLUSIONS, f"{len(drawn)} conclusions"
    return [text for text in drawn if text.startswith("none")]


def figures_of(printed):
    """Return what the page has measured: {name: numbers}."""
    found = {name: re.findall(words, printed) for name, words in PRINTED.items()}
    assert all(len(hits) == 1 for hits in found.values()), found
    hits = {name: hit if isinstance(hit, tuple) else (hit,) for name, (hit,) in found.items()}
    return {name: [float(text.replace(",", "")) for text in hit] for name, hit in hits.items()}


def spread(values):
    """Return from where to where the runs lie, as text."""
    low, high = (f"{value:.2f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def facts_of(runs):
    """Return what the sentences say: claims of all runs, the cost page of the last."""
    last, facts = runs[-1], {"runs": len(runs)}
    for name in ("DDP", "limit", "two threads", "DataParallel"):
        facts[name.replace(" ", "_")] = spread([run[name][-1] for run in runs])
    for place, name in enumerate(("small_threads", "small_processes")):
        facts[name] = spread([run["small layers"][place] for run in runs])
    steps = {}
    for n in (2, 4):
        us, per_gb, fitted, elsewhere, slow = last[f"job of {n}"]
        facts |= {
            f"us_{n}": f"{us:.0f}",
            f"gb_{n}": f"{1 / per_gb:.1f}",
            f"slow_{n}": f"{slow:.0f}",
        }
        facts |= {f"fitted_{n}": f"{fitted:.2g}", f"elsewhere_{n}": f"{elsewhere:.2g}"}
        steps[n] = steps_by(us, round(1 / per_gb, 1))
        facts[f"best_{n}"] = best = min(steps[n], key=steps[n].get)
        facts[f"step_{n}"] = f"{steps[n][best]:.3f}"
    best = facts["best_2"]
    for name, n in (("fewer", best - 1), ("more", best + 1)):
        facts |= {name: n, f"step_{name}": f"{steps[2][n]:.3f}"}
    return facts | {"step_crossed": f"{steps[4][best]:.1f}"}


def steps_by(us, gb):
    """Return {devices: milliseconds} of the third task of the page on cost."""
    from lesson_11_how_fast import predict_all_reduce

    link = us / 1e6, 1e-9 / gb
    return {n: 90 / n + 1e3 * predict_all_reduce(link, n, 8_404_992) for n in range(1, 257)}


def rewrite(text, sentence, facts):
    """Return the text in which a sentence that is there, once, has the numbers of `facts`."""
    number = r"\d[\d.,]*(?<![.,])(?: to [\d.]+(?<![.,]))?"
    parts = re.split(r"\{\w+\}", sentence.replace("{{", "\0").replace("}}", "\1"))
    parts = [re.escape(part.replace("\0", "{").replace("\1", "}")) for part in parts]
    new, count = re.subn(number.join(parts), lambda _: sentence.format(**facts), text)
    assert count == 1, f"{count} times in the text: {sentence}"
    return new


def measure(wanted, execute):
    """Execute the notebook until `wanted` runs were quiet; return what they have found."""
    runs, thrown_away = [], 0
    while len(runs) < wanted and thrown_away < 10 * wanted:
        try:
            execute(NOTEBOOK)
            printed = printed_by(NOTEBOOK)
            signs = why_disturbed(printed)
        except TimeoutError:  # a cell took five minutes, on a machine that is far from idle
            signs = ["a cell took too long"]
        if signs:
            thrown_away += 1
            print(f"disturbed, again: {signs[0]}", flush=True)
        else:
            runs.append(figures_of(printed))
            print(f"run {len(runs)} of {wanted}: {json.dumps(runs[-1])}", flush=True)
    alone = sum(int(run["disturbed"][0]) for run in runs)
    print(f"{len(runs)} quiet runs, with {alone} measurements made again; {thrown_away} not quiet")
    if len(runs) < wanted:
        raise RuntimeError("this machine is not idle")
    return {"runs": runs, "thrown away": thrown_away}


def pages_with(facts):
    """Return {file: its text with these numbers}; print the sentences."""
    pages = {name: (ROOT / name).read_text("utf-8") for name, _ in SENTENCES}
    for name, sentence in SENTENCES:
        pages[name] = rewrite(pages[name], sentence, facts)
        print(f"{name}: {sentence.format(**facts)}")
    return pages


def main():
    from lockstep.execute import execute

    text = sys.argv[1] if sys.argv[1:] else "5"
    if len(sys.argv) > 2 or not text.isdecimal() or not 3 <= int(text) <= 20:
        print(f"idle_runs.py: error: runs must be from 3 to 20, not {text!r}", file=sys.stderr)
        return 2
    os.environ["LOCKSTEP_TRIES"] = "3"
    before = NOTEBOOK.read_text("utf-8")
    try:
        found = measure(int(text), execute)
        pages = pages_with(facts_of(found["runs"]))
    except BaseException as error:
        NOTEBOOK.write_text(before, "utf-8")
        why = [type(error).__name__, *str(error).strip().splitlines()][-1]
        sys.exit(f"idle_runs.py: all is as it was: {why}")
    for name, page in pages.items():
        (ROOT / name).write_text(page, "utf-8")
    RUNS.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
