// The message player: what the pictures of the notebooks show, step by step.
//
// RECORDED comes from player_data.js: the events that the stored pictures carry, as
// docs/build/events.py has found them. The first part has no page in it, so that a test can run
// it in node. Colours and hatches are those of notebooks/nbtools/pictures.py.
"use strict";

const NAMES = {
  ring: "Ring all-reduce",
  tree: "Tree",
  doubling: "Doubling",
  data_parallel: "DataParallel",
  buckets: "DDP's buckets",
  one_f_one_b: "1F1B",
};

// --- Steps: what is told, in words and numbers ---

/** Return a number of bytes as pictures.py writes it: 96 B, 1.05 MB. */
function readableBytes(nbytes) {
  if (nbytes < 10_000) return `${nbytes.toLocaleString("en-US")} B`;
  for (const [limit, unit] of [[1e6, "kB"], [1e9, "MB"], [1e12, "GB"]]) {
    if (nbytes < limit) return `${Number(((nbytes / limit) * 1000).toPrecision(3))} ${unit}`;
  }
  return `${Number((nbytes / 1e12).toPrecision(3))} TB`;
}

/** Return the steps of a story; each has a caption, and what the figure needs. */
function stepsOf(story) {
  return story.kind === "strip" ? stripSteps(story) : lanesSteps(story);
}

/** A strip has a step for each of its panels. */
function stripSteps(story) {
  let sent = 0;
  return story.steps.map((name, moment) => {
    const events = story.events.filter((event) => event.step === name);
    sent += sum(events.map((event) => event.nbytes));
    const told = events.map(
      (event) => `${event.source} sends ${readableBytes(event.nbytes)} to ${event.target}`,
    );
    const what = told.join("; ") || "nothing is sent";
    const place = `Step ${moment + 1} of ${story.steps.length}`;
    const caption = `${place} (${oneLine(name)}): ${what}. Sent so far: ${readableBytes(sent)}.`;
    return { name: oneLine(name), moment, events, sent, caption };
  });
}

/** Lanes have a step for each moment at which computing ends, or sending begins or ends. */
function lanesSteps(story) {
  const last = Math.max(...story.spans.map((span) => span.end));
  const grain = last / 100; // what happens within 1 % of the time is told together
  const groups = changes(story, grain);
  return groups.map((group, index) => {
    const until = group[group.length - 1].time;
    const step = { changed: group.map(({ span }) => span), until, ...stateAt(story, until, grain) };
    const place = `Step ${index + 1} of ${groups.length}, at ${until.toFixed(1)} ms`;
    const what = group.map(({ span, verb }) => `${span.lane} ${verb} ${nameOf(span)}`).join("; ");
    return { ...step, caption: [`${place}: ${what}.`, ...lanesState(story, step)].join(" ") };
  });
}

/** Return what begins and ends, in order, in groups that are told together. */
function changes(story, grain) {
  const found = [];
  for (const span of story.spans) {
    if (span.kind === "send") found.push({ time: span.begin, verb: "begins", span });
    if (span.kind !== "wait") found.push({ time: span.end, verb: endOf(story, span), span });
  }
  const groups = [];
  for (const change of found.sort((one, other) => one.time - other.time)) {
    const group = groups[groups.length - 1];
    if (group && change.time - group[0].time <= grain) group.push(change);
    else groups.push([change]);
  }
  return groups;
}

/** Return "pauses in" if the next thing that a lane computes goes by the same name, else "ends". */
function endOf(story, span) {
  const own = story.spans.filter((one) => one.lane === span.lane && one.kind === "compute");
  const later = own.filter((one) => one.begin >= span.end).sort((one, two) => one.begin - two.begin);
  return span.kind === "compute" && later[0]?.name === span.name ? "pauses in" : "ends";
}

/** Return what is true of lanes at a time: bytes handed in, who works or waits, what is kept. */
function stateAt(story, time, grain) {
  const begun = story.spans.filter((span) => span.begin <= time);
  const goesOn = begun.filter((span) => span.end - time > grain);
  const lanesOf = (kind) => unique(goesOn.filter((s) => s.kind === kind).map((s) => s.lane));
  const kept = story.order.map((lane) => keptBy(story, lane, time));
  return {
    sent: sum(begun.filter((s) => s.kind === "send").map((s) => s.nbytes || 0)),
    computing: lanesOf("compute"),
    waiting: lanesOf("wait"),
    kept: kept.includes(null) ? null : kept,
  };
}

/** Return for how many micro-batches a rank has done F and not B; null if it has others too. */
function keptBy(story, lane, time) {
  const own = story.spans.filter((span) => span.lane === lane && span.kind === "compute");
  if (!own.length || !own.every((span) => /^[FB]\d+$/.test(span.name))) return null;
  const done = own.filter((span) => span.end <= time);
  return sum(done.map((span) => (span.name[0] === "F" ? 1 : -1)));
}

/** Return the sentences about who goes on, who waits, what is sent and what is kept. */
function lanesState(story, step) {
  const told = [];
  if (step.computing.length) told.push(`Still computing: ${step.computing.join(", ")}.`);
  if (step.waiting.length) told.push(`Waiting: ${step.waiting.join(", ")}.`);
  if (story.spans.some((span) => span.kind === "send")) {
    told.push(`Handed in by all ranks so far: ${readableBytes(step.sent)}.`);
  }
  if (step.kept) told.push(`Micro-batches kept, rank by rank: ${step.kept.join(", ")}.`);
  return told;
}

function nameOf(span) {
  return span.nbytes ? `${span.name} of ${readableBytes(span.nbytes)}` : span.name;
}

function oneLine(text) {
  return text.replace(/\n/g, " ");
}

function unique(names) {
  return [...new Set(names)].sort();
}

function sum(numbers) {
  return numbers.reduce((total, number) => total + number, 0);
}

// --- Figures ---

const ARROW = "#D55E00";
const FILLS = { compute: "#56B4E9", send: "url(#player-hatch)", wait: "url(#player-dots)", average: "#009E73" };
const LEGEND = { compute: "computes", send: "sends and receives", wait: "waits", average: "averages gradients" };
const LETTER = 7.2; // pixels, about: how wide a letter of 12 px is

/** Return a new SVG element. */
function make(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Return an SVG with the patterns that the figures fill with. */
function canvas(width, height, label) {
  const size = { width, height, role: "img", "aria-label": label };
  const tile = { width: 6, height: 6, patternUnits: "userSpaceOnUse" };
  const hatch = make("pattern", { ...tile, id: "player-hatch" });
  hatch.append(make("rect", { width: 6, height: 6, fill: "#E69F00" }));
  hatch.append(make("path", { d: "M-1 1L1 -1M0 6L6 0M5 7L7 5", stroke: "#000", opacity: 0.55 }));
  const dots = make("pattern", { ...tile, id: "player-dots" });
  dots.append(make("circle", { cx: 3, cy: 3, r: 0.9, class: "player-dot" }));
  const head = { id: "player-head", viewBox: "0 0 10 10", refX: 9, refY: 5, orient: "auto" };
  const tip = make("path", { d: "M0 0L10 5L0 10z", fill: ARROW });
  const marker = make("marker", { ...head, markerWidth: 7, markerHeight: 7 }, tip);
  return make("svg", size, make("defs", {}, hatch, dots, marker));
}

function text(x, y, words, extra = {}) {
  return make("text", { x, y, "text-anchor": "middle", ...extra }, words);
}

/** Draw a step of a strip: the boxes before it, its arrows, the boxes after it. */
function drawStrip(story, step, room) {
  const width = Math.min(Math.max(room, 310), 620);
  const box = { width: 116, height: 52 };
  const row = (place) => 52 + 74 * story.places.indexOf(place);
  const svg = canvas(width, 60 + 74 * story.places.length, step.caption);
  const right = width - box.width - 1;
  svg.append(text(width / 2, 16, step.name, { class: "player-title" }));
  svg.append(text(box.width / 2, 38, "before"), text(right + box.width / 2, 38, "after"));
  const after = make("g", {});
  for (const [index, place] of story.places.entries()) {
    svg.append(...boxWith(1, row(place), box, story.holds[step.moment][index]));
    after.append(...boxWith(right, row(place), box, story.holds[step.moment + 1][index]));
  }
  const middle = { x: width / 2, y: row(story.places[0]) + 37 * story.places.length - 8 };
  if (!step.events.length) svg.append(text(middle.x, middle.y, "nothing is sent"));
  const arrows = step.events.map((event) => {
    const [from, to] = [row(event.source), row(event.target)].map((y) => y + box.height / 2);
    return arrow(box.width + 3, from, right - 2, to, readableBytes(event.nbytes));
  });
  svg.append(after, ...arrows.map((one) => one.line), ...arrows.map((one) => one.label));
  svg.append(...arrows.map((one) => one.packet));
  const paint = (share) => {
    after.setAttribute("opacity", share < 1 ? 0.3 : 1);
    arrows.forEach((one) => one.move(share));
  };
  return { svg, paint };
}

/** Return a box of the strip, and its lines of text. */
function boxWith(x, y, { width, height }, words) {
  const lines = words.split("\n");
  const first = y + height / 2 + 4 - 8 * (lines.length - 1);
  const told = lines.map((line, index) =>
    text(x + width / 2, first + 16 * index, line, { class: "player-in-box" }),
  );
  return [make("rect", { x, y, width, height, rx: 6, class: "player-box" }), ...told];
}

/** Return an arrow with its label, and a packet that moves along it. */
function arrow(x1, y1, x2, y2, words) {
  const ends = { x1, y1, x2, y2, stroke: ARROW, "stroke-width": 2 };
  const line = make("line", { ...ends, "marker-end": "url(#player-head)" });
  const label = text((x1 + x2) / 2, (y1 + y2) / 2 + 4, words, { class: "player-label" });
  const look = { width: 14, height: 14, fill: FILLS.send, stroke: "#000" };
  const packet = make("rect", look);
  const move = (share) => {
    packet.setAttribute("x", x1 + (x2 - x1) * share - 7);
    packet.setAttribute("y", y1 + (y2 - y1) * share - 7);
    packet.setAttribute("visibility", share < 1 ? "visible" : "hidden");
  };
  return { line, label, packet, move };
}

const NAMES_WIDTH = 96; // of the column with the names of the lanes

/** Draw lanes up to the time of a step; `before` is the time of the step before it. */
function drawLanes(story, step, room, before) {
  const width = Math.max(room, 700);
  const [high, top] = [46, 34];
  const bottom = top + high * story.order.length;
  const last = Math.max(...story.spans.map((span) => span.end));
  const x = (time) => NAMES_WIDTH + 8 + (time / last) * (width - NAMES_WIDTH - 28);
  const svg = canvas(width, bottom + 24, step.caption);
  const grown = make("rect", { x: 0, y: 0, height: bottom });
  const bars = make("g", { "clip-path": "url(#player-grown)" });
  for (const span of story.spans.filter((one) => one.begin < step.until)) {
    bars.append(...barOf(span, x, top + high * (span.middle + 0.5), high * span.height, step));
  }
  const cursor = make("line", { y1: top, y2: bottom, class: "player-cursor" });
  const names = laneNames(story, top, high);
  svg.append(make("clipPath", { id: "player-grown" }, grown), bars, cursor);
  svg.append(...axis(x, last, bottom), names);
  const paint = (share) => {
    const now = x(before + (step.until - before) * share);
    grown.setAttribute("width", now);
    cursor.setAttribute("x1", now);
    cursor.setAttribute("x2", now);
  };
  return { svg, paint, names, focus: x(step.until) };
}

/** Return the bar of a span, and its text if there is room. */
function barOf(span, x, middle, height, step) {
  const [left, right] = [x(span.begin), x(span.end)];
  const place = { x: left, y: middle - height / 2, width: right - left, height };
  const now = step.changed.includes(span) ? "player-bar player-now" : "player-bar";
  const bar = make("rect", { ...place, fill: FILLS[span.kind], class: now });
  const words = span.nbytes ? readableBytes(span.nbytes) : span.name;
  const fits = words.length * LETTER <= right - left && height >= 16;
  if (!fits || span.kind === "wait") return [bar];
  return [bar, text((left + right) / 2, middle + 4, words, { class: `player-${span.kind}` })];
}

/** Return what stays in sight when the figure is scrolled: names, legend, unit of time. */
function laneNames(story, top, high) {
  const bottom = top + high * story.order.length;
  const ground = { x: 0, y: 0, width: NAMES_WIDTH, height: bottom + 24, class: "player-back" };
  const names = make("g", {}, make("rect", ground), legend(story));
  const right = { "text-anchor": "end" };
  for (const [index, lane] of story.order.entries()) {
    names.append(text(NAMES_WIDTH - 8, top + high * (index + 0.5) + 4, lane, right));
  }
  names.append(text(NAMES_WIDTH - 8, bottom + 16, "milliseconds", right));
  return names;
}

/** Return the time axis: a line, and a number of milliseconds at each tick. */
function axis(x, last, y) {
  const unit = 10 ** Math.floor(Math.log10(last / 4));
  const tick = unit * [1, 2, 5, 10].find((factor) => last / (factor * unit) <= 8);
  const parts = [make("line", { x1: x(0), x2: x(last), y1: y, y2: y, class: "player-line" })];
  for (let time = 0; time <= last; time += tick) parts.push(text(x(time), y + 16, String(time)));
  return parts;
}

/** Return a sample of each kind of bar that occurs. */
function legend(story) {
  const kinds = Object.keys(FILLS).filter((kind) => story.spans.some((s) => s.kind === kind));
  const parts = make("g", {});
  let x = 2;
  for (const kind of kinds) {
    const sample = { x, y: 6, width: 24, height: 14, fill: FILLS[kind], class: "player-bar" };
    parts.append(make("rect", sample));
    parts.append(text(x + 30, 18, LEGEND[kind], { "text-anchor": "start" }));
    x += 42 + LEGEND[kind].length * 6.2;
  }
  return parts;
}

// --- The page ---

const MOTION = 700; // milliseconds that a packet or a bar moves
const PAUSE = 1500; // and how long the figure then rests, while the player plays

/** The player in the element `root`; `stories` are those of player_data.js. */
class Player {
  constructor(root, stories) {
    this.stories = stories;
    this.parts = buildPage(root, Object.keys(stories));
    this.still = window.matchMedia("(prefers-reduced-motion: reduce)");
    this.listen(root);
    this.choose(Object.keys(stories)[0]);
  }

  listen(root) {
    const { parts } = this;
    root.setAttribute("tabindex", -1); // a click on a text in it gives it the focus, and the keys
    root.addEventListener("keydown", (event) => this.key(event));
    window.addEventListener("resize", () => this.show());
    parts.figure.addEventListener("scroll", () => this.keepNames());
    parts.previous.addEventListener("click", () => this.stopAt(this.at - 1));
    parts.next.addEventListener("click", () => this.stopAt(this.at + 1, true));
    parts.play.addEventListener("click", () => this.playOrPause());
    for (const [name, button] of Object.entries(parts.stories)) {
      button.addEventListener("click", () => {
        this.choose(name);
        parts.figure.focus({ preventScroll: true }); // else the space bar chooses the story again
      });
    }
  }

  key(event) {
    const actions = {
      ArrowLeft: () => this.stopAt(this.at - 1),
      ArrowRight: () => this.stopAt(this.at + 1, true),
      Home: () => this.stopAt(0),
      End: () => this.stopAt(this.steps.length - 1),
      " ": () => this.playOrPause(),
    };
    const click = event.key === " " && event.target.tagName === "BUTTON"; // the button hears it
    const other = event.ctrlKey || event.metaKey || event.altKey;
    if (click || other || this.scrolls(event) || !actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  }

  /** Return whether the key scrolls the figure, because it is wider than its place. */
  scrolls({ key, target }) {
    const { figure } = this.parts;
    const sideways = key === "ArrowLeft" || key === "ArrowRight";
    return sideways && target === figure && figure.scrollWidth > figure.clientWidth;
  }

  choose(name) {
    this.name = name;
    this.story = this.stories[name];
    this.steps = stepsOf(this.story);
    this.stopAt(0);
  }

  stopAt(at, moves = false) {
    this.playing = false;
    this.goTo(at, moves);
  }

  playOrPause() {
    this.playing = !this.playing;
    if (this.playing) this.goTo(this.at === this.steps.length - 1 ? 0 : this.at + 1, true);
    else this.show();
  }

  goTo(at, moves) {
    const last = this.steps.length - 1;
    const target = Math.min(Math.max(at, 0), last);
    const moved = target !== this.at;
    this.at = target;
    if (target === last) this.playing = false;
    this.show(moves && moved);
  }

  /** Draw the step; `moves`: let its packets and bars move, if the reader's system allows it. */
  show(moves = false) {
    const { parts, story, steps, at } = this;
    const room = parts.figure.clientWidth;
    const before = at > 0 ? steps[at - 1].until : 0;
    const draw = story.kind === "strip" ? drawStrip : drawLanes;
    this.drawn = draw(story, steps[at], room, before);
    parts.figure.replaceChildren(this.drawn.svg);
    parts.title.textContent = story.title;
    parts.caption.textContent = steps[at].caption;
    parts.position.textContent = `step ${at + 1} of ${steps.length}`;
    this.tellButtons();
    if (this.drawn.focus) parts.figure.scrollLeft = this.drawn.focus - room * 0.7;
    this.keepNames();
    this.animate(moves && !this.still.matches);
  }

  tellButtons() {
    const { parts, at, steps, name } = this;
    parts.previous.setAttribute("aria-disabled", at === 0);
    parts.next.setAttribute("aria-disabled", at === steps.length - 1);
    parts.play.textContent = this.playing ? "Pause" : "Play";
    for (const [other, button] of Object.entries(parts.stories)) {
      button.setAttribute("aria-pressed", other === name);
    }
  }

  /** The names of the lanes stay in sight when the figure is scrolled. */
  keepNames() {
    const move = `translate(${this.parts.figure.scrollLeft} 0)`;
    if (this.drawn.names) this.drawn.names.setAttribute("transform", move);
  }

  /** Move what moves; then, while the player plays, go on after a rest. */
  animate(moves) {
    cancelAnimationFrame(this.frame);
    clearTimeout(this.timer);
    const { paint } = this.drawn;
    const begun = performance.now();
    const frame = (now) => {
      const share = moves ? Math.min(Math.max((now - begun) / MOTION, 0), 1) : 1;
      paint(share);
      if (share < 1) this.frame = requestAnimationFrame(frame);
      else if (this.playing) this.timer = setTimeout(() => this.goTo(this.at + 1, true), PAUSE);
    };
    frame(begun);
  }
}

/** Make the player's elements; return those that change. */
function buildPage(root, names) {
  const element = (tag, attributes, ...children) => {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  };
  const button = (words) => element("button", { type: "button" }, words);
  const stories = Object.fromEntries(names.map((name) => [name, button(NAMES[name])]));
  const [previous, play, next] = ["Previous", "Play", "Next"].map(button);
  const position = element("span", { class: "player-position" });
  const title = element("p", { class: "player-story" });
  const about = { class: "player-figure", tabindex: 0, role: "group", "aria-label": "figure" };
  const figure = element("div", about);
  const caption = element("p", { class: "player-caption", "aria-live": "polite" });
  const choice = { class: "player-row", role: "group", "aria-label": "story" };
  root.append(element("div", choice, ...Object.values(stories)), title, figure);
  root.append(element("div", { class: "player-row" }, previous, play, next, position), caption);
  return { stories, previous, play, next, position, title, figure, caption };
}

if (typeof module !== "undefined") {
  module.exports = { stepsOf };
} else {
  new Player(document.getElementById("player"), RECORDED);
}
