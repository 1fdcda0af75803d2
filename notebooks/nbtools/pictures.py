"""One picture language for all lessons, drawn from what was recorded in a real run.

lanes     time to the right, one lane for each rank, thread or device: compute, send, wait
strip     one column of boxes for each moment, one panel of arrows for each step, with bytes
rounds    what ranks send in a function, for such a strip: threads play them
bars      heights by name, in charts side by side
matrices  a product of matrices, and which rank holds which part of each
verdicts  a table of words, one colour and hatch for each word
shares    which part of something each rank holds
readers   which rows each rank and worker reads, and how often each is read
curves    numbers over numbers, in black
stair     bars, each of which begins where the one above ends

Colours are those of Okabe and Ito, which colour-blind readers can tell apart; each also has a
hatch, so that a print in grey says the same.

A picture carries what it shows: its events are JSON in the text of its PNG. So the site can play
them step by step, and what it plays is what the notebook shows.
"""

import functools
import json

import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch

from nbtools.record import Collective, Message, Recorder, Span, record, waits

__all__ = [
    "LINES",
    "Collective",
    "Message",
    "Recorder",
    "Span",
    "bars",
    "curves",
    "hatch",
    "lanes",
    "matrices",
    "readers",
    "record",
    "rounds",
    "shares",
    "stair",
    "strip",
    "verdicts",
    "waits",
]

LOOK = {  # kind: (face colour, hatch, legend)
    "compute": ("#56B4E9", "", "computes"),
    "send": ("#E69F00", "////", "sends and receives"),
    "wait": ("#FFFFFF", "....", "waits"),
    "average": ("#009E73", "\\\\\\\\", "averages gradients"),
}
LINES = [  # looks of five curves, with marks
    {"linestyle": ":", "marker": "o", "color": "#D55E00"},
    {"linestyle": "-.", "marker": "^", "color": "#E69F00"},
    {"linestyle": "-", "marker": "s", "color": "#0072B2"},
    {"linestyle": "--", "marker": "D", "color": "#009E73"},
    {"linestyle": (0, (7, 2, 1, 2, 1, 2)), "marker": "x", "color": "black"},
]
ARROW = "#D55E00"
WIDTH = 9.5  # inches; JupyterLab shows the figure at its full size
STYLE = {"font.size": 10, "hatch.linewidth": 0.6, "figure.dpi": 100, "savefig.dpi": 100}


def readable_bytes(nbytes):
    """Return a number of bytes as a short text: 96 B, 1.05 MB."""
    if nbytes < 10_000:
        return f"{nbytes:,} B"
    for limit, unit in ((1e6, "kB"), (1e9, "MB"), (1e12, "GB")):
        if nbytes < limit:
            return f"{nbytes / limit * 1000:.3g} {unit}"
    return f"{nbytes / 1e12:.3g} TB"


def hatch(kind):
    """Return keywords for a bar or patch of this kind, so that other figures look alike."""
    colour, pattern, _ = LOOK[kind]
    return {"facecolor": colour, "hatch": pattern, "edgecolor": "black", "linewidth": 0.6}


def lanes(spans, title, order=None, legend=None):
    """Draw `spans` (a list of Span) as lanes over time; return the figure.

    `order` names the lanes from top to bottom (default: by name). `legend`, {kind: text}, says what
    kinds of spans are here, in place of the usual words. Spans of one lane that overlap
    share its height; those that follow each other closely and have the same name, up to a colon,
    become one bar. Time starts at the first span, in milliseconds.
    """
    start = min(span.begin for span in spans)
    order = order or sorted({span.lane for span in spans})
    bars = [bar for lane in order for bar in _bars(spans, lane, order.index(lane))]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(WIDTH, 1.35 + 0.36 * len(order)))
        for span, middle, height in bars:
            left, width = (span.begin - start) * 1e3, (span.end - span.begin) * 1e3
            axes.barh(middle, width, height, left, **hatch(span.kind))
        _label(axes, bars, start)
        axes.set_yticks(range(len(order)), order)
        axes.set_ylim(len(order) - 0.4, -0.6)
        axes.set_xlim(left=0)
        axes.set_xlabel("milliseconds")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.set_title(title, loc="left", fontweight="bold", pad=26)
        _legend(axes, [span.kind for span in spans], legend or {})
        figure.tight_layout()
    _carry(figure, _told_lanes(title, order, bars, start))
    return figure


def _bars(spans, lane, row, gap=3e-4):
    """Return [(span, middle, height)] of one lane; neighbours that touch are one span."""
    merged = []
    for span in sorted((s for s in spans if s.lane == lane), key=lambda span: span.begin):
        span = span._replace(name=span.name.partition(":")[0])
        last = merged[-1] if merged else None
        if last and span.nbytes is None and span[:3] == last[:3] and span.begin - last.end < gap:
            merged[-1] = last._replace(end=max(last.end, span.end))
        else:
            merged.append(span)
    levels = _levels(merged)
    count = max(levels, default=0) + 1
    height = 0.8 / count
    tops = [row - 0.4 + level * height for level in levels]
    return [(span, top + height / 2, height) for span, top in zip(merged, tops, strict=True)]


def _levels(spans):
    """Return a level for each span, so that spans of the same level do not overlap."""
    ends, levels = [], []  # ends: of the last span in each level
    for span in spans:
        free = [level for level, end in enumerate(ends) if end <= span.begin + 1e-9]
        level = free[0] if free else len(ends)
        ends[level : level + 1] = [span.end]
        levels.append(level)
    return levels


def _label(axes, bars, start):
    """Write a span's bytes, its name, or the number at the end of its name, where there is room."""
    total = max(span.end for span, _, _ in bars) - start
    for span, middle, height in bars:
        text = span.name if span.nbytes is None else readable_bytes(span.nbytes)
        room = (span.end - span.begin) / total * 105  # letters that fit into the bar
        hidden = span.kind == "wait" and span.nbytes is not None  # it does not send them yet
        number = span.name.rpartition(" ")[2]
        if number.isdecimal() and span.kind != "compute":
            text = number if span.nbytes is None else f"{number}: {text}"
            text = text if len(text) <= room and height >= 0.5 else number
        least = 0.3 if text == number else 0.5  # high enough for its letters
        if hidden or len(text) > room or height < least:
            continue
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
        style = {"ha": "center", "va": "center", "fontsize": 8, "bbox": box, "clip_on": True}
        axes.text(((span.begin + span.end) / 2 - start) * 1e3, middle, text, **style)


def _legend(axes, kinds, told):
    texts = {kind: told.get(kind, LOOK[kind][2]) for kind in LOOK if kind in kinds}
    handles = [Patch(**hatch(kind), label=text) for kind, text in texts.items()]
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1.0), "ncols": 4, "frameon": False}
    axes.legend(handles=handles, **place, borderpad=0, fontsize=9)


def _draw_arrow(axes, tail, head):
    style = {"arrowstyle": "-|>", "mutation_scale": 11, "color": ARROW}
    axes.add_patch(FancyArrowPatch(tail, head, **style, transform=axes.transData))


def strip(events, title, places, steps=None, holds=None):
    """Draw who sends what to whom, step by step; return the figure.

    events   a list of Message and Collective; the steps are the panels, from left to right
    places   the names of the ranks or devices, from top to bottom
    steps    the steps to draw, also those in which nothing is sent (default: those of `events`)
    holds    {(moment, place): text}: what a box holds before step 0, 1, ... and after the last
    """
    steps = steps or list(dict.fromkeys(event.step for event in events))
    holds = holds or {}
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(WIDTH, 1.3 + 0.62 * len(places)))
        for moment in range(len(steps) + 1):
            for row, place in enumerate(places):
                _box(axes, moment, row, holds.get((moment, place), place))
        for moment, step in enumerate(steps):
            axes.text(moment + 0.5, -0.62, step, ha="center", va="bottom", fontsize=9)
            here = [event for event in events if event.step == step]
            if not here:
                axes.text(moment + 0.5, (len(places) - 1) / 2, "nothing\nis sent", **SMALL)
            for event in here:
                draw = _draw_collective if isinstance(event, Collective) else _draw_message
                draw(axes, moment, event, places)
        axes.set_xlim(-0.24, len(steps) + 0.24)
        axes.set_ylim(len(places) - 0.5, -1.0)
        axes.axis("off")
        axes.set_title(title, loc="left", fontweight="bold")
        figure.tight_layout()
    _carry(figure, _told_strip(events, title, places, steps, holds))
    return figure


def rounds(world_size, act, holds):
    """Let threads play ranks (watch/played_messages.py); return what they send, for a strip.

    Each calls act(rank, world_size). Returns (events, with a step for each round; places; boxes):
    a box has the numbers of the list holds(rank), in lines of two.
    """
    from lockstep.watch import played_messages  # needs wrapt, which not every page has

    ranks = played_messages.play(world_size, act, holds)
    messages = played_messages.on_a_clock([rank.rounds for rank in ranks])
    boxes, places = {}, [f"rank {rank.number}" for rank in ranks]
    for rank, place in zip(ranks, places, strict=True):
        ends = sorted({end for end, *both, _ in messages if rank.number in both})
        for moment in range(messages[-1][0] + 1):
            words = [str(number) for number in rank.held[sum(end <= moment for end in ends)]]
            lines = [" ".join(words[first : first + 2]) for first in range(0, len(words), 2)]
            boxes[moment, place] = "\n".join([place, *lines])
    events = [Message(f"round {end}", places[a], places[b], size) for end, a, b, size in messages]
    return events, places, boxes


SMALL = {"ha": "center", "va": "center", "fontsize": 8, "color": "0.25", "zorder": 5}
HALF = 0.23  # half the width of a box


def _box(axes, moment, row, text):
    box = FancyBboxPatch((moment - HALF, row - 0.3), 2 * HALF, 0.6)
    box.set_boxstyle("round", pad=0, rounding_size=0.06)
    box.set(facecolor="#DCEBF5", edgecolor="black", linewidth=0.8, zorder=3)
    axes.add_patch(box)
    axes.text(moment, row, text, ha="center", va="center", fontsize=7.5, zorder=4)


def _draw_message(axes, moment, event, places):
    source, target = places.index(event.source), places.index(event.target)
    tail, head = (moment + HALF, source), (moment + 1 - HALF, target)
    _draw_arrow(axes, tail, head)
    middle = ((tail[0] + head[0]) / 2, (source + target) / 2)
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
    axes.text(*middle, readable_bytes(event.nbytes), **SMALL, bbox=box)


def _draw_collective(axes, moment, event, places):
    rows = [places.index(rank) for rank in event.ranks]
    middle, half = moment + 0.5, 0.1
    for row in rows:
        if event.source in (None, places[row]):
            _draw_arrow(axes, (moment + HALF, row), (middle - half, row))
        if event.source != places[row]:
            _draw_arrow(axes, (middle + half, row), (moment + 1 - HALF, row))
    low, high = min(rows) - 0.35, max(rows) + 0.35
    bar = FancyBboxPatch((middle - half, low), 2 * half, high - low, boxstyle="round,pad=0")
    bar.set(**hatch("send"), zorder=3)
    axes.add_patch(bar)
    text = f"{event.name}\n{readable_bytes(event.nbytes)}"
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
    axes.text(middle, (low + high) / 2, text, **SMALL | {"rotation": 90}, bbox=box)


PARTS = [("#F0E442", ""), ("#CC79A7", "xx")]  # of rank 0, of rank 1


def matrices(factors, title):
    """Draw matrices in a row, what rank 0 and rank 1 have in colours; return the figure.

    factors   [(sign in front, name, columns, rows, how it is cut)]: "columns", "rows", 0 or 1 for
              what only that rank has, None for what is whole on both ranks
    """
    looks = [*PARTS, ("#EEEEEE", "")]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(WIDTH, 2.7))
        left = 0.0
        for sign, name, columns, rows, cut in factors:
            axes.text(left + 0.45, 0, sign, ha="center", va="center", fontsize=13)
            left += 0.9
            whole = {0: looks[:1], 1: looks[1:2], None: looks[2:]}
            for part, (colour, pattern) in enumerate(whole.get(cut, PARTS)):
                width, height = columns / (1 + (cut == "columns")), rows / (1 + (cut == "rows"))
                x, y = left + part * width, rows / 2 - height
                x, y = (left, y - part * height) if cut == "rows" else (x, y)
                style = {"facecolor": colour, "hatch": pattern, "edgecolor": "black"}
                axes.add_patch(plt.Rectangle((x, y), width, height, **style))
            axes.text(left + columns / 2, -rows / 2 - 0.12, name, ha="center", va="top", fontsize=9)
            left += columns
        axes.set(xlim=(0, left + 0.3), ylim=(-2.2, 1.7), aspect="equal")
        names = ["rank 0", "rank 1", "whole on both ranks"]
        patches = [Patch(facecolor=c, hatch=h, edgecolor="black") for c, h in looks]
        place = {"loc": "lower left", "bbox_to_anchor": (0, 1.0), "ncols": 3, "frameon": False}
        axes.legend(patches, names, **place, borderpad=0, fontsize=9)
        axes.set_title(title, loc="left", fontweight="bold", pad=26)
        axes.axis("off")
        figure.tight_layout()
    return figure


def bars(charts, ylabel, label, **settings):
    """Draw bar charts side by side, on one scale; return the figure.

    charts    [(title, kind, {name: height})], a kind as in LOOK
    label     a function: what is written above a bar of this height
    settings  of all axes, such as xlabel
    """
    figure, row = plt.subplots(1, len(charts), figsize=(WIDTH, 3.1), sharey=True, squeeze=False)
    for axes, (title, kind, heights) in zip(row[0], charts, strict=True):
        drawn = axes.bar(list(heights), list(heights.values()), **hatch(kind))
        axes.bar_label(drawn, list(map(label, heights.values())))
        axes.set(**settings)
        axes.set_title(title, loc="left", fontweight="bold")
        axes.spines[["top", "right"]].set_visible(False)
    row[0][0].set_ylabel(ylabel)
    figure.tight_layout()
    return figure


VERDICTS = {  # word: (face colour, hatch)
    "guilty": ("#009E73", ""),
    "victim": ("#E69F00", "////"),
    "nothing": ("#FFFFFF", ""),
    "crash": ("#999999", "xxxx"),
    "tells": ("#56B4E9", ""),
    "": ("#FFFFFF", ""),
}


def verdicts(table, columns, title):
    """Draw {row: [a word of VERDICTS for each column]} as a table; return the figure."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(WIDTH, 1.0 + 0.33 * len(table)))
        for row, words in enumerate(table.values()):
            for column, word in enumerate(words):
                colour, pattern = VERDICTS[word]
                style = {"facecolor": colour, "hatch": pattern, "edgecolor": "black"}
                axes.add_patch(plt.Rectangle((column, row), 1, 1, linewidth=0.6, **style))
                box = {"facecolor": "white", "edgecolor": "none", "pad": 1.2, "alpha": 0.85}
                place = {"ha": "center", "va": "center", "fontsize": 8}
                axes.text(column + 0.5, row + 0.5, word, **place, bbox=box)
        axes.set_xlim(0, len(columns))
        axes.set_ylim(len(table), 0)
        axes.set_xticks([column + 0.5 for column in range(len(columns))], columns)
        axes.set_yticks([row + 0.5 for row in range(len(table))], table)
        axes.xaxis.tick_top()
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_title(title, loc="left", fontweight="bold", pad=8)
        figure.tight_layout()
    return figure


def _carry(figure, told):
    """Let the figure's PNG carry `told` as JSON, whoever writes it: savefig or a notebook."""
    text = {"Title": told["title"], "Description": json.dumps(told, separators=(",", ":"))}
    canvas = figure.canvas
    if hasattr(canvas, "print_png"):  # not with a backend that writes PDF only, for example
        canvas.print_png = functools.partial(canvas.print_png, metadata=text)


def _told_strip(events, title, places, steps, holds):
    """Return what a strip shows; `holds` has a list for each moment, with a text for each place."""
    moments = range(len(steps) + 1)
    return {
        "kind": "strip",
        "title": title,
        "places": list(places),
        "steps": list(steps),
        "holds": [[holds.get((moment, place), place) for place in places] for moment in moments],
        "events": [_without_none(event) for event in events],
    }


def _told_lanes(title, order, bars, start):
    """Return what lanes show, with times in milliseconds from the first one."""
    told = []
    for span, middle, height in bars:
        begin, end = (round((moment - start) * 1e3, 3) for moment in (span.begin, span.end))
        one = _without_none(span) | {"begin": begin, "end": end}
        told.append(one | {"middle": round(middle, 3), "height": round(height, 3)})
    return {"kind": "lanes", "title": title, "order": list(order), "spans": told}


def _without_none(event):
    """Return a Span, Message or Collective as a dict, without the fields that are not set."""
    return {name: value for name, value in event._asdict().items() if value is not None}


def shares(axes, held, looks):
    """Draw which part of something each rank holds: a lane for each, and in it bars by kind.

    held: for each rank [(kind, its first number, how many)]; looks: {kind: (look, height)}, from
    top to bottom, a look as in hatch(). A legend, if wanted, is the caller's.
    """
    step, tops, top = 0.8 / sum(height for _, height in looks.values()), {}, 0.05
    for kind, (_, height) in looks.items():
        tops[kind], top = top, top + step * height
    told = set()
    for rank, found in enumerate(held):
        for kind, first, numbers in found:
            look, height = looks[kind]
            label = None if kind in told else kind
            place = (rank + tops[kind], step * height)
            axes.broken_barh([(first, numbers)], place, **hatch(look), label=label)
            told.add(kind)
    ranks = range(len(held))
    axes.set(ylim=(len(held), 0), yticks=[rank + 0.45 for rank in ranks])
    axes.set(yticklabels=[f"rank {rank}" for rank in ranks])


def readers(read, count, title, names=None):
    """Draw which rows each lane reads, and below how often each row is read; return the figure.

    read    {lane: [(step, rows)]}, lanes from top to bottom, the rank's number first in a lane's
            name: "rank 1, worker 0"; a step is one of the rank, a row is a whole number
    count   how many rows there are
    names   what stands below the rows, in place of their numbers
    """
    squares = [(at, *one) for at, lane in enumerate(read.values()) for one in lane]
    times = [sum(rows.count(row) for _, _, rows in squares) for row in range(count)]
    colours = [PARTS[int(name.split()[1].strip(",")) % len(PARTS)][0] for name in read]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(WIDTH, 1.35 + 0.3 * len(read)))
        for lane, step, row in ((lane, step, row) for lane, step, rows in squares for row in rows):
            style = {"facecolor": colours[lane], "edgecolor": "black", "linewidth": 0.6}
            axes.add_patch(plt.Rectangle((row, lane + 0.06), 1, 0.88, **style))
            axes.text(row + 0.5, lane + 0.5, step, **SMALL | {"color": "black"})
        for row, often in enumerate(times):
            weight = "normal" if often == 1 else "bold"
            axes.text(row + 0.5, len(read) + 0.5, often, **SMALL, fontweight=weight)
        axes.set(xlim=(-0.02, count + 0.02), ylim=(len(read) + 1, 0))
        axes.set_xticks([row + 0.5 for row in range(count)], names or range(count), fontsize=8)
        axes.set_yticks([lane + 0.5 for lane in range(len(read) + 1)], [*read, "times read"])
        axes.set_xlabel("row; in a square stands the step in which its rank trains it")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_title(title, loc="left", fontweight="bold")
        figure.tight_layout()
    return figure


def curves(lines, title, height=3.4, **settings):
    """Draw curves in black, with a legend if there are several; return their axes.

    lines     {label: (x, y, look)}, a look as matplotlib has it, "--s" for dashes and squares
    settings  what axes.set takes: xlabel, ylabel, xlim, ...
    """
    _, axes = plt.subplots(figsize=(WIDTH, height))
    for label, (x, y, look) in lines.items():
        axes.plot(x, y, f"k{look}", label=label)
    axes.set(title=title, **settings)
    if len(lines) > 1:
        axes.legend()
    return axes


def stair(parts, kinds, others, title, xlabel):
    """Draw parts of a whole, {name: width}, as a stair of bars, a kind for each; return the axes.

    Below, others have bars that begin at zero, of the first kind.
    """
    _, axes = plt.subplots(figsize=(WIDTH, 3.4))
    left = 0.0
    for (name, width), kind in zip(parts.items(), kinds, strict=True):
        axes.barh(f"+ {name}" if left else name, width, 0.7, left, **hatch(kind))
        left += width
    for name, width in others.items():
        axes.barh(name, width, 0.7, **hatch(kinds[0]))
    axes.set(xlabel=xlabel, title=title, ylim=(len(parts) + len(others) - 0.5, -0.5))
    return axes
