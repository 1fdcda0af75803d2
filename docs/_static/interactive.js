// What both interactive pages need: controls, their values in the page's address, numbers with
// units, and SVG. No library, no request; it also works from a file.

"use strict";

const interactive = (() => {
  // --- Numbers ---

  const SPACE = "\u00a0";  // no line ends between a number and its unit

  const whole = (number) => number.toLocaleString("en-US");

  // Three digits, and all digits of a whole number: 0.00123, 12.3, 1,024.
  function few(number) {
    const small = Math.abs(number) < 1000;
    const digits = small ? { maximumSignificantDigits: 3 } : { maximumFractionDigits: 0 };
    return number.toLocaleString("en-US", digits);
  }

  const count = (number, one, many = `${one}s`) => `${whole(number)} ${number === 1 ? one : many}`;

  function time(seconds) {
    if (seconds > 0 && seconds < 1e-3) return `${few(seconds * 1e6)}${SPACE}µs`;
    if (seconds < 1) return `${few(seconds * 1e3)}${SPACE}ms`;
    return `${few(seconds)}${SPACE}s`;
  }

  function bytes(number) {
    const units = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]];
    const [size, unit] = units.find(([limit]) => number >= limit) || [1, "B"];
    return `${few(number / size)}${SPACE}${unit}`;
  }

  // The round numbers of a logarithmic slider: 1, 1.5, 2, 3, 4, 5, 6, 8, 10, ...
  function stops(low, high) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power += 1) {
      for (const digit of [1, 1.5, 2, 3, 4, 5, 6, 8]) {
        found.push(Number(`${digit}e${power}`));
      }
    }
    return found.filter((value) => value >= low && value <= high);
  }

  function nearest(values, wanted) {
    const distance = (value) => Math.abs(value - wanted) / (value + wanted || 1);
    const closest = Math.min(...values.map(distance));
    return values.findIndex((value) => distance(value) === closest);
  }

  // --- HTML and SVG ---

  function add(parent, tag, attributes = {}, text = "") {
    const space = parent.namespaceURI.endsWith("svg") || tag === "svg"
      ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml";
    const element = document.createElementNS(space, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.textContent = text;
    parent.append(element);
    return element;
  }

  // A figure that scrolls in its own box, so that its text stays readable on a phone.
  function figure(parent, title, draw) {
    const box = add(parent, "figure", { class: "interactive-figure" });
    const heading = add(box, "figcaption", {}, title);
    const scrolls = { tabindex: 0, role: "group", "aria-label": title };
    const inner = add(box, "div", { class: "interactive-scroll", ...scrolls });
    const svg = add(inner, "svg", { role: "img", class: "interactive-svg" });
    return (...what) => {
      svg.replaceChildren();
      const { width, height, label, caption } = draw(svg, ...what);
      svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      svg.setAttribute("aria-label", label);
      heading.textContent = caption;
    };
  }

  // A pattern on a colour, so that a print in grey says the same.
  function pattern(svg, id, colour, path) {
    const place = { id, width: 8, height: 8, patternUnits: "userSpaceOnUse" };
    const tile = add(add(svg, "defs"), "pattern", place);
    add(tile, "rect", { width: 8, height: 8, style: `fill: ${colour}` });
    add(tile, "path", { d: path, class: "interactive-hatch" });
  }

  // Writes a text in the middle of a bar, if there is room for it.
  function label(svg, left, top, width, height, text, style = "interactive-on-bar") {
    if (text.length * 7.5 > width) return;
    const place = { x: left + width / 2, y: top + height / 2 + 4.5, "text-anchor": "middle" };
    add(svg, "text", { ...place, class: style }, text);
  }

  // The first round step that cuts `length` into at most `most` parts.
  function tick(length, most) {
    const power = 10 ** Math.floor(Math.log10(length / most));
    return [1, 2, 5, 10].map((digit) => digit * power).find((step) => length / step <= most);
  }

  // --- Controls ---

  const clamp = (control, value) => Math.min(control.max, Math.max(control.min, value));

  function addSlider(form, control, state, changed) {
    const box = add(form, "div", { class: "interactive-control" });
    const id = `interactive-${control.name}`;
    add(box, "label", { for: id }, control.label);
    const row = add(box, "div", { class: "interactive-row" });
    const last = control.values.length - 1;
    const slider = add(row, "input", { type: "range", id, min: 0, max: last, step: 1 });
    const said = control.unit ? `${control.label}, in ${control.unit}` : control.label;
    const number = add(row, "input", { type: "number", step: "any", "aria-label": said });
    add(row, "span", { class: "interactive-unit" }, control.unit);
    slider.addEventListener("input", () => {
      changed({ [control.name]: control.values[slider.value] });
    });
    number.addEventListener("change", () => {
      const value = number.value === "" ? state[control.name] : Number(number.value);
      changed({ [control.name]: read(control, value) });
    });
    return () => {
      slider.value = nearest(control.values, state[control.name]);
      slider.setAttribute("aria-valuetext", `${state[control.name]} ${control.unit}`);
      number.value = state[control.name];
    };
  }

  function addSelect(form, control, state, changed) {
    const wide = control.presets ? " interactive-wide" : "";
    const box = add(form, "div", { class: `interactive-control${wide}` });
    const id = `interactive-${control.name}`;
    add(box, "label", { for: id }, control.label);
    const select = add(box, "select", { id });
    for (const [value, text] of control.options) add(select, "option", { value }, text);
    select.addEventListener("change", () => changed({ [control.name]: select.value }));
    return () => {
      select.value = state[control.name];
    };
  }

  // Sets several values at once; shows "own values" when no line of it has the present ones.
  function addPresets(form, control, state, changed) {
    const options = control.presets.map(([text], index) => [String(index), text]);
    const all = { ...control, options: [["own", "own values"], ...options] };
    const shown = {};
    const show = addSelect(form, all, shown, (picked) => {
      const preset = control.presets[picked[control.name]];
      changed(preset ? preset[1] : {});
    });
    return () => {
      const isSet = ([name, value]) => state[name] === value;
      const found = control.presets.findIndex(([, values]) => Object.entries(values).every(isSet));
      shown[control.name] = found < 0 ? "own" : String(found);
      show();
    };
  }

  // --- The address: #devices=8&latency=10 ---

  function read(control, value) {
    if (control.options) {
      return control.options.some(([option]) => option === value) ? value : control.value;
    }
    const number = value === "" || Number.isNaN(Number(value)) ? control.value : Number(value);
    return clamp(control, control.whole ? Math.round(number) : number);
  }

  // What an address does not name has the value with which the page begins.
  function readAddress(controls, state, hash) {
    const given = new URLSearchParams(hash.slice(1));
    state.task = given.get("task") || "";
    for (const { name, ...control } of controls) {
      state[name] = given.has(name) ? read(control, given.get(name)) : control.value;
    }
  }

  // Puts the settings into the address. Where all are those of the beginning, the address stays.
  function writeAddress(controls, { task, ...settings }) {
    const begins = !task && controls.every(({ name, value }) => settings[name] === value);
    const all = new URLSearchParams(task ? { task, ...settings } : settings);
    const keeps = begins && !namesSettings(controls, window.location.hash);
    try {
      window.history.replaceState("settings", "", keeps ? window.location.href : `#${all}`);
    } catch {
      // Some browsers refuse this for a file, or many times in a row: the page works without.
    }
  }

  function namesSettings(controls, hash) {
    const given = new URLSearchParams(hash.slice(1));
    return given.has("task") || controls.some(({ name }) => given.has(name));
  }

  // A link into the page, as in its contents, has no settings: those of before stay, and come
  // back into the address. `history.state` tells it from an address that was here before.
  function listenToAddress(controls, state, start) {
    window.addEventListener("hashchange", () => {
      const { hash } = window.location;
      if (namesSettings(controls, hash) || window.history.state === "settings") start(hash);
      else writeAddress(controls, state);
    });
  }

  // The same page in the other language begins with the same settings.
  function takeAlong() {
    for (const link of document.querySelectorAll(".languages a")) {
      link.addEventListener("click", () => { link.hash = window.location.hash; });
    }
  }

  // --- Tasks: a link such as #task=1&devices=8 sets the controls, and leads to them ---

  function goTo(element, block) {
    const still = window.matchMedia("(prefers-reduced-motion: reduce)").matches;
    element.focus({ preventScroll: true });
    element.scrollIntoView({ block, behavior: still ? "instant" : "smooth" });
  }

  // The paragraph `task-1` has the link to the controls; the one before it asks the question.
  function startOf(task) {
    return /^\d+$/.test(task) ? document.querySelector(`#task-${task} a`) : null;
  }

  // Says which task the settings came from, and leads back to it.
  function addTask(root) {
    const line = add(root, "p", { class: "interactive-task" });
    return ({ task }) => {
      const link = startOf(task);
      line.hidden = !link;
      if (!link) return;
      const asked = link.parentNode.previousElementSibling;
      line.textContent = `Task ${asked ? asked.textContent : `${task}.`} `;
      const back = add(line, "a", { href: `#task-${task}` }, "Back to the task");
      back.addEventListener("click", (event) => {
        event.preventDefault();  // the settings stay in the address
        goTo(link, "center");
      });
    };
  }

  // The tasks come after the script's place in the page: it has to be loaded with `defer`.
  function listenToTasks(form, start) {
    for (const link of document.querySelectorAll("[id^=task-] > a")) {
      link.addEventListener("click", (event) => {
        if (event.ctrlKey || event.metaKey || event.shiftKey) return;  // it opens elsewhere
        start(link.hash);
        goTo(form, "start");
      });
    }
  }

  // --- Folds: controls with the same `fold`, its title, lie in a box that opens ---

  // Where a control belongs: into the form, or into its fold, which its first control makes.
  function placeOf({ fold }, form, folds) {
    if (!fold) return form;
    if (!folds.has(fold)) {
      const box = add(form, "details", { class: "interactive-fold" });
      add(box, "summary", {}, fold);
      folds.set(fold, add(box, "div", { class: "interactive-folded" }));
    }
    return folds.get(fold);
  }

  // An address that sets something in a fold opens it.
  function openFolds(folds, controls, state) {
    for (const { fold, name, value } of controls) {
      if (fold && state[name] !== value) folds.get(fold).parentNode.open = true;
    }
  }

  // --- A page: controls, then what `build` adds; `update(state)` is called after each change ---

  function page(id, controls, build) {
    const root = document.getElementById(id);
    const settings = { role: "group", tabindex: -1, "aria-label": "Settings" };
    const form = add(root, "div", { class: "interactive-controls", ...settings });
    const showTask = addTask(root);
    const update = build(root);
    const state = { task: "" };
    const kept = controls.filter((control) => !control.presets);
    const folds = new Map();
    readAddress(kept, state, window.location.hash);
    const shows = controls.map((control) => {
      const adds = control.presets ? addPresets : control.options ? addSelect : addSlider;
      return adds(placeOf(control, form, folds), control, state, changed);
    });
    openFolds(folds, kept, state);
    function render() {
      for (const show of [...shows, showTask, update]) show(state);
    }
    function changed(values) {
      Object.assign(state, values);
      render();
    }
    form.addEventListener("change", () => writeAddress(kept, state));
    function start(hash) {
      readAddress(kept, state, hash);
      openFolds(folds, kept, state);
      render();
    }
    listenToAddress(kept, state, start);
    listenToTasks(form, start);
    takeAlong();
    render();
    if (!namesSettings(kept, window.location.hash)) writeAddress(kept, state);
  }

  return { add, bytes, count, few, figure, label, page, pattern, stops, tick, time, whole };
})();
