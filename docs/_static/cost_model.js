// The page cost_model.md: sliders, who waits for whom, and the speed-up over the devices.
// The formulas are in cost_model_formulas.js.

"use strict";

(() => {
  const { add, figure, label, page, pattern, stops, tick } = interactive;
  const { bytes, count, few, time, whole } = interactive;
  const FEW = Array.from({ length: 16 }, (_, index) => index + 1);
  const DEVICES = [...FEW, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 640, 768, 1024];
  const PERCENT = Array.from({ length: 21 }, (_, index) => 5 * index);
  const TIMES = Array.from({ length: 41 }, (_, index) => (100 + 5 * index) / 100);
  const LINKS = [
    ["gloo, measured in a job of 2 processes", { latency: 161, bandwidth: 1.2 }],
    ["gloo, measured in a job of 4 processes", { latency: 235, bandwidth: 1.1 }],
    ["network of 1 Gbit/s", { latency: 50, bandwidth: 0.125 }],
    ["network of 100 Gbit/s", { latency: 20, bandwidth: 12.5 }],
    ["PCIe 3.0, 16 lanes", { latency: 10, bandwidth: 16 }],
    ["NVLink of a V100", { latency: 10, bandwidth: 150 }],
    ["NVLink of an H100", { latency: 10, bandwidth: 450 }],
  ];
  const GRADIENTS = [
    ["lesson 11, many small layers, float64", { gradient: 0.2176 }],
    ["lesson 11, few large layers, float64", { gradient: 8.404992 }],
    ["ResNet-50, 25.6 million × 4 bytes", { gradient: 102.228128 }],
    ["BERT-large, 340 million × 4 bytes", { gradient: 1360 }],
    ["GPT-2, 1.5 billion × 4 bytes", { gradient: 6000 }],
    ["lesson 13, 8.05 billion × 2 bytes", { gradient: 16106.12736 }],
  ];
  const SCALING = [
    ["own", "a batch for each device"],
    ["divided", "one batch, divided"],
  ];
  const CONTROLS = [
    {
      name: "devices", label: "Devices",
      unit: "", values: DEVICES, min: 1, max: 1024, value: 8, whole: true,
    },
    { name: "scaling", label: "The work", options: SCALING, value: "own" },
    { name: "links", label: "Link", presets: LINKS },
    {
      name: "latency", label: "Price of a message (latency)",
      unit: "µs", values: stops(0.5, 2000), min: 0, max: 1e6, value: 10,
    },
    {
      name: "bandwidth", label: "Bandwidth, one direction",
      unit: "GB/s", values: stops(0.1, 1000), min: 0.001, max: 1e5, value: 16,
    },
    { name: "gradients", label: "Model", presets: GRADIENTS },
    {
      name: "gradient", label: "Gradient",
      unit: "MB", values: stops(0.1, 1e6), min: 0, max: 1e7, value: 102.228128,
    },
    {
      name: "compute", label: "Computing a batch on one device",
      unit: "ms", values: stops(0.1, 1e5), min: 0.001, max: 1e7, value: 10,
    },
    {
      name: "overlap", label: "Share of the sending that overlaps",
      unit: "%", values: PERCENT, min: 0, max: 100, value: 0,
    },
    {
      name: "slowest", label: "The slowest device takes",
      unit: "times as long", values: TIMES, min: 1, max: 100, value: 1,
    },
  ];

  function cost(state, changes = {}) {
    const { devices, overlap } = { ...state, ...changes };
    return dataParallelStep({
      devices,
      size: state.gradient * 1e6,
      compute: state.compute / 1e3,
      latency: state.latency / 1e6,
      bandwidth: state.bandwidth * 1e9,
      overlap: overlap / 100,
      slowest: devices > 1 ? state.slowest : 1,
      divided: state.scaling === "divided",
    });
  }

  // --- In words ---

  function whoWaits(state, step) {
    const { devices } = state;
    const most = time(step.share);
    const all = `an all-reduce of ${time(step.sending)}`;
    const sending = step.hidden > 0 ? `the rest of ${all}` : "the all-reduce";
    if (devices === 1) return `One device computes for ${most}, and waits for nobody.`;
    if (step.late > 0) {
      const last = `Device ${devices - 1} computes for ${time(step.share + step.late)}`;
      const others = devices === 2 ? "device 0 waits" : "the others wait";
      const first = `${last}, and ${others} ${time(step.late)} for it.`;
      if (step.exposed === 0) return `${first} The all-reduce is over by then.`;
      return `${first} Then all wait ${time(step.exposed)} for ${sending}.`;
    }
    const start = `Each of the ${whole(devices)} devices computes for ${most}`;
    if (step.exposed > 0) return `${start}, and then waits ${time(step.exposed)} for ${sending}.`;
    return `${start}. The all-reduce of ${time(step.sending)} is over by then, so nobody waits.`;
  }

  function inWords(state, step) {
    const waits = whoWaits(state, step);
    const total = `A step takes ${time(step.step)}.`;
    if (state.devices === 1) return `${waits} ${total}`;
    const sends = `Each sends ${bytes(step.sent)} in ${whole(step.messages)} messages`;
    const prices = Math.round((state.latency * step.messages) / (1e4 * step.sending));  // percent
    const why = `${prices} % of the sending is the price of messages, the rest that of bytes`;
    const both = step.sending > 0 ? `${sends}; ${why}.` : `${sends}.`;
    const linear = `${few(100 * step.efficiency)} % of linear`;
    return `${waits} ${both} ${total} The speed-up is ${few(step.speedup)}, which is ${linear}.`;
  }

  // --- Who waits: one lane for each device ---

  const LEFT = 88;
  const RIGHT = 712;
  const WAIT = "url(#interactive-fill-wait)";
  const SEND = "url(#interactive-fill-send)";
  const LEGEND = [["computes", "#56B4E9"], ["sends and receives", SEND], ["waits", WAIT]];

  function bar(svg, scale, begin, end, top, height, fill, text) {
    const [left, width] = [LEFT + begin * scale, (end - begin) * scale];
    if (width < 0.5) return;
    add(svg, "rect", { x: left, y: top, width, height, fill, class: "interactive-bar" });
    const style = fill === WAIT ? "interactive-on-page" : "interactive-on-bar";
    label(svg, left, top, width, height, text, style);
  }

  function lane(svg, scale, step, devices, device, top) {
    const slow = device === devices - 1;
    const ready = step.share + (slow ? step.late : 0);
    const begin = step.share + step.late - step.hidden;
    add(svg, "text", { x: LEFT - 8, y: top + 25, "text-anchor": "end" }, `device ${device}`);
    bar(svg, scale, 0, ready, top, 22, "#56B4E9", time(ready));
    bar(svg, scale, ready, step.step, top, 22, WAIT, `waits ${time(step.step - ready)}`);
    bar(svg, scale, begin, begin + step.sending, top + 22, 18, SEND, bytes(step.sent));
  }

  function legend(svg) {
    let left = LEFT;
    for (const [text, fill] of LEGEND) {
      add(svg, "rect", { x: left, y: 4, width: 26, height: 14, fill, class: "interactive-bar" });
      add(svg, "text", { x: left + 32, y: 16 }, text);
      left += 60 + 7.5 * text.length;
    }
  }

  function timeAxis(svg, scale, total, top) {
    const between = tick(total, 6);
    add(svg, "path", { d: `M ${LEFT} ${top} H ${RIGHT}`, class: "interactive-axis" });
    for (let number = 0; number * between <= total * 1.0001; number += 1) {
      const x = LEFT + number * between * scale;
      add(svg, "path", { d: `M ${x} ${top} v 5`, class: "interactive-axis" });
      add(svg, "text", { x, y: top + 20, "text-anchor": "middle" }, time(number * between));
    }
  }

  function drawLanes(svg, state, step, sentence) {
    const { devices } = state;
    const lines = "M -2 10 L 10 -2 M -2 2 L 2 -2 M 6 10 L 10 6";
    pattern(svg, "interactive-fill-send", "#E69F00", lines);
    pattern(svg, "interactive-fill-wait", "var(--interactive-page)", "M 3 4 h 1.6");
    legend(svg);
    const scale = (RIGHT - LEFT) / step.step;
    const first = Math.min(devices, devices > 8 ? 7 : 8);
    for (let device = 0; device < first; device += 1) {
      lane(svg, scale, step, devices, device, 30 + 48 * device);
    }
    let bottom = 30 + 48 * first;
    if (devices > 8) {
      const more = devices > 9 ? `devices 7 to ${devices - 2} do` : "device 7 does";
      add(svg, "text", { x: LEFT, y: bottom + 10 }, `${more} what those above do`);
      lane(svg, scale, step, devices, devices - 1, bottom + 20);
      bottom += 68;
    }
    timeAxis(svg, scale, step.step, bottom);
    const waits = step.step - step.share;
    const whom = devices > 1 && step.late > 0 ? "most devices wait" : "every device waits";
    const found = `In a step of ${time(step.step)} ${whom} ${time(waits)}`;
    const caption = waits > 0 ? found : "Nobody waits";
    return { width: 740, height: bottom + 28, label: sentence, caption };
  }

  // --- The speed-up over the number of devices, both axes logarithmic ---

  const TOP = 16;
  const BOTTOM = 276;

  function scales(lowest) {
    const share = (value, low) => Math.log(Math.max(value, low) / low) / Math.log(1024 / low);
    return {
      x: (devices) => LEFT + share(devices, 1) * (RIGHT - LEFT),
      y: (speedup) => BOTTOM - share(speedup, lowest) * (BOTTOM - TOP),
    };
  }

  function drawAxes(svg, { x, y }, lowest) {
    for (let number = lowest; number <= 1024; number *= 4) {
      const text = number < 1 ? few(number) : whole(number);
      add(svg, "path", { d: `M ${LEFT} ${y(number)} H ${RIGHT}`, class: "interactive-grid" });
      add(svg, "text", { x: LEFT - 8, y: y(number) + 4, "text-anchor": "end" }, text);
    }
    for (let number = 1; number <= 1024; number *= 4) {
      add(svg, "path", { d: `M ${x(number)} ${TOP} V ${BOTTOM}`, class: "interactive-grid" });
      add(svg, "text", { x: x(number), y: BOTTOM + 19, "text-anchor": "middle" }, whole(number));
    }
    add(svg, "text", { x: (LEFT + RIGHT) / 2, y: BOTTOM + 40, "text-anchor": "middle" }, "devices");
    const middle = { x: -(TOP + BOTTOM) / 2, y: 24, "text-anchor": "middle" };
    add(svg, "text", { ...middle, transform: "rotate(-90)" }, "speed-up");
  }

  function points(state, { x, y }, overlap) {
    const numbers = [...new Set([...DEVICES, state.devices])].sort((one, other) => one - other);
    const speedup = (devices) => cost(state, { devices, overlap }).speedup;
    return numbers.map((devices) => `${x(devices)},${y(speedup(devices))}`);
  }

  // The vertical axis begins at a power of 4 below all speed-ups, but not below 1/1024.
  function lowestTick(state) {
    const speedups = DEVICES.map((devices) => cost(state, { devices, overlap: 0 }).speedup);
    const power = Math.floor(Math.log(Math.min(...speedups)) / Math.log(4) + 1e-9);
    return 4 ** Math.max(power, -5);
  }

  function drawCurve(svg, state, step) {
    const lowest = lowestTick(state);
    const to = scales(lowest);
    drawAxes(svg, to, lowest);
    const band = [...points(state, to, 0), ...points(state, to, 100).reverse()];
    add(svg, "polygon", { points: band.join(" "), class: "interactive-band" });
    const linear = `M ${to.x(1)} ${to.y(1)} L ${to.x(1024)} ${to.y(1024)}`;
    add(svg, "path", { d: linear, class: "interactive-dashed" });
    const line = points(state, to, state.overlap).join(" ");
    add(svg, "polyline", { points: line, class: "interactive-line" });
    const [x, y] = [to.x(state.devices), to.y(step.speedup)];
    add(svg, "circle", { cx: x, cy: y, r: 6, class: "interactive-point" });
    const found = `${count(state.devices, "device")}: ${few(step.speedup)}`;
    const side = x > 500 ? { x: x - 12, "text-anchor": "end" } : { x: x + 12 };
    const place = { ...side, y: Math.min(y + 20, BOTTOM - 6), class: "interactive-strong" };
    add(svg, "text", place, found);
    const does = count(state.devices, "device does", "devices do");
    const caption = `${does} the work of ${few(step.speedup)}`;
    const what = `Speed-up over the number of devices, both logarithmic. ${caption}.`;
    return { width: 740, height: BOTTOM + 50, label: what, caption };
  }

  // --- The page ---

  function build(root) {
    const sentence = add(root, "p", { class: "interactive-sentence", "aria-live": "polite" });
    // "simple" keeps the theme from indenting what stands under a name.
    const results = add(root, "dl", { class: "interactive-results simple" });
    const lanes = figure(root, "Who waits", drawLanes);
    const curve = figure(root, "Speed-up", drawCurve);
    const line = "Line: the speed-up with the overlap that you set.";
    const key = `${line} Band: from no overlap to all of it. Dashed: linear.`;
    add(root, "p", { class: "interactive-key" }, key);
    return (state) => {
      const step = cost(state);
      sentence.textContent = inWords(state, step);
      results.replaceChildren();
      const shown = [
        ["a step", time(step.step)],
        ["speed-up", few(step.speedup)],
        ["efficiency", `${few(100 * step.efficiency)} %`],
        ["each device sends", bytes(step.sent)],
        ["in messages", whole(step.messages)],
      ];
      for (const [name, value] of shown) {
        const one = add(results, "div");
        add(one, "dt", {}, name);
        add(one, "dd", {}, value);
      }
      lanes(state, step, sentence.textContent);
      curve(state, step);
    };
  }

  page("cost-model", CONTROLS, build);
})();
