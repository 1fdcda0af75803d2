// The page memory.md: what one rank must keep, by each way of splitting a training.
// The formulas are in memory_formulas.js.

"use strict";

(() => {
  const { add, bytes, few, figure, label, page, pattern, stops, tick, whole } = interactive;
  const RANKS = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024];
  const PERCENT = Array.from({ length: 21 }, (_, index) => 5 * index);
  const SIZES = [8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 141, 192, 288];
  const MODELS = [
    ["ResNet-50, 25.6 million", { parameters: 25.557032, activations: 0 }],
    ["BERT-large, 340 million", { parameters: 340, activations: 0.428 }],
    ["GPT-2, 1.5 billion", { parameters: 1500, activations: 2.67 }],
    ["figure 1 of ZeRO, 7.5 billion", { parameters: 7500, activations: 0 }],
    ["lesson 13, 8.05 billion", { parameters: 8053.06368, activations: 11.4 }],
    ["GPT-3, 175 billion", { parameters: 175000, activations: 82.1 }],
  ];  // activations of one row; 0 where we have no number with a source
  const LAYERS = 40;  // of lesson 13's model
  const NUMBERS = [
    ["mixed", "mixed precision"],
    ["float32", "float32"],
  ];
  const OPTIMIZER = [
    ["Adam", "Adam"],
    ["momentum", "SGD with momentum"],
    ["SGD", "SGD"],
  ];
  const CONTROLS = [
    { name: "models", label: "Model", presets: MODELS },
    {
      name: "parameters", label: "Parameters",
      unit: "million", values: stops(1, 1e6), min: 0.001, max: 1e8, value: 8053.06368,
    },
    { name: "precision", label: "Numbers", options: NUMBERS, value: "mixed" },
    { name: "optimizer", label: "Optimizer", options: OPTIMIZER, value: "Adam" },
    {
      name: "ranks", label: "Ranks",
      unit: "", values: RANKS, min: 1, max: 1e5, value: 8, whole: true,
    },
    {
      name: "device", label: "Memory of a device",
      unit: "GB", values: SIZES, min: 0.1, max: 1e5, value: 40,
    },
    {
      name: "activations", label: "Activations of one micro-batch",
      unit: "GB", values: [0, ...stops(0.01, 1000)], min: 0, max: 1e6, value: 11.4,
    },
    {
      name: "micro", label: "Micro-batches in a step of a pipeline",
      unit: "", values: stops(1, 1000).filter(Number.isInteger),
      min: 1, max: 1e6, value: 32, whole: true,
    },
    {
      name: "cut", label: "Share of the activations that tensor cuts",
      unit: "%", values: PERCENT, min: 0, max: 100, value: 70,
    },
  ];
  const WAYS = [
    ["data", "data parallel"],
    ["zero1", "ZeRO 1"],
    ["zero2", "ZeRO 2"],
    ["zero3", "ZeRO 3 (fully sharded)"],
    ["tensor", "tensor"],
    ["gpipe", "GPipe pipeline"],
    ["1f1b", "1F1B pipeline"],
  ];
  const PARTS = [
    ["parameters", "#56B4E9"],
    ["gradients", "url(#interactive-fill-gradients)"],
    ["optimizer", "url(#interactive-fill-optimizer)"],
    ["activations", "url(#interactive-fill-activations)"],
  ];

  function memory(state) {
    return WAYS.map(([strategy, name]) => {
      const held = rankMemory({
        strategy,
        parameters: state.parameters * 1e6,
        precision: state.precision,
        optimizer: state.optimizer,
        ranks: state.ranks,
        activations: state.activations * 1e9,
        micro_batches: state.micro,
        cut: state.cut / 100,
      });
      return { name, ...held, fits: held.total <= state.device * 1e9 };
    });
  }

  // --- In words ---

  function inWords(state, rows) {
    const [weight, gradient, kept] = bytesPerParameter(state.precision, state.optimizer);
    const sum = weight + gradient + kept;
    const all = bytes(state.parameters * 1e6 * sum);
    const numbers = `${weight} + ${gradient} + ${kept} = ${sum} bytes`;
    const without = state.activations === 0 ? " All this is without activations." : "";
    const take = `A parameter, its gradient and the optimizer take ${numbers}, ${all} in all.`;
    const each = `${take}${without}`;
    const size = (row) => bytes(row.total) + (row.fits ? onlyIf(state, row) : "");
    const list = (some) => some.map((row) => `${row.name} (${size(row)})`).join(", ");
    const fit = rows.filter((row) => row.fits);
    const others = rows.filter((row) => !row.fits);
    const many = state.ranks === 1 ? "1 rank" : `${whole(state.ranks)} ranks`;
    const place = `${many} with ${few(state.device)} GB each`;
    const least = Math.min(...rows.map((row) => row.total));
    if (fit.length === 0) return `${each} On ${place} nothing fits; the least is ${bytes(least)}.`;
    const rest = others.length ? `Too big: ${list(others)}.` : "Nothing is too big.";
    return `${each} What fits on ${place}: ${list(fit)}. ${rest}`;
  }

  // Without gradients that are added up over several rounds.
  function stepsInWords({ ranks, micro }) {
    const each = ranks === 1 ? "1" : `${whole(ranks)} (one on each rank)`;
    const together = ranks === 1 ? "1" : "1 (on all ranks together)";
    const ways = `data parallel and ZeRO ${each}, tensor ${together}, the pipelines ${whole(micro)}`;
    const unequal = ranks === 1 && micro === 1 ? "" : " So the steps are not equally large.";
    return `Micro-batches in a step: ${ways}.${unequal}`;
  }

  // How many layers the reader's model has, the page does not know.
  function onlyIf({ ranks }, { name }) {
    const cannotTell = ranks > LAYERS && name.includes("pipeline");
    return cannotTell ? `, if there are ${whole(ranks)} layers` : "";
  }

  function layersInWords({ ranks }) {
    if (ranks <= LAYERS) return "";
    const stages = `With ${whole(ranks)} ranks a pipeline has ${whole(ranks)} stages`;
    const has = `the model of lesson 13 has ${LAYERS} layers, too few for that`;
    const parts = `tensor needs layers that can be cut into ${whole(ranks)} equal parts`;
    return ` ${stages}, and each needs a layer at least: ${has}. And ${parts}.`;
  }

  // --- The picture: a bar for each way ---

  const LEFT = 172;
  const RIGHT = 600;

  function drawLegend(svg) {
    let left = 8;
    for (const [name, fill] of PARTS) {
      add(svg, "rect", { x: left, y: 4, width: 26, height: 14, fill, class: "interactive-bar" });
      add(svg, "text", { x: left + 32, y: 16 }, name);
      left += 56 + 7.5 * name.length;
    }
  }

  function drawBar(svg, scale, row, top) {
    let left = LEFT;
    for (const [part, fill] of PARTS) {
      const width = row[part] * scale;
      if (width >= 0.5) {
        add(svg, "rect", { x: left, y: top, width, height: 28, fill, class: "interactive-bar" });
      }
      left += width;
    }
  }

  function drawTexts(svg, scale, row, top) {
    add(svg, "text", { x: LEFT - 8, y: top + 18, "text-anchor": "end" }, row.name);
    let left = LEFT;
    for (const [part] of PARTS) {
      const width = row[part] * scale;
      label(svg, left, top, width, 28, bytes(row[part]));
      left += width;
    }
    const verdict = `${bytes(row.total)}, ${row.fits ? "fits" : "too big"}`;
    add(svg, "text", { x: left + 8, y: top + 18, class: "interactive-strong" }, verdict);
  }

  function drawAxis(svg, scale, longest, top) {
    const between = tick(longest, 5);
    add(svg, "path", { d: `M ${LEFT} ${top} H ${RIGHT}`, class: "interactive-axis" });
    for (let number = 0; number * between <= longest * 1.0001; number += 1) {
      const x = LEFT + number * between * scale;
      add(svg, "path", { d: `M ${x} ${top} v 5`, class: "interactive-axis" });
      add(svg, "text", { x, y: top + 20, "text-anchor": "middle" }, bytes(number * between));
    }
  }

  function drawBars(svg, state, rows, sentence) {
    const lines = "M -2 10 L 10 -2 M -2 2 L 2 -2 M 6 10 L 10 6";
    pattern(svg, "interactive-fill-gradients", "#E69F00", lines);
    pattern(svg, "interactive-fill-optimizer", "#009E73", "M 0 4 h 8");
    pattern(svg, "interactive-fill-activations", "#F0E442", "M 3 4 h 1.6");
    drawLegend(svg);
    const limit = state.device * 1e9;
    const longest = Math.max(limit, ...rows.map((row) => row.total));
    const scale = (RIGHT - LEFT) / longest;
    const bottom = 52 + 38 * rows.length;
    const x = LEFT + limit * scale;
    rows.forEach((row, index) => drawBar(svg, scale, row, 52 + 38 * index));
    add(svg, "path", { d: `M ${x} 44 V ${bottom}`, class: "interactive-limit" });
    rows.forEach((row, index) => drawTexts(svg, scale, row, 52 + 38 * index));
    const above = { x, y: 38, "text-anchor": "middle", class: "interactive-strong" };
    add(svg, "text", above, `device: ${few(state.device)} GB`);
    drawAxis(svg, scale, longest, bottom);
    const fit = rows.filter((row) => row.fits).length;
    const fits = fit === 1 ? "fits" : "fit";
    const caption = `${fit} of ${rows.length} ways ${fits} into ${few(state.device)} GB`;
    return { width: 740, height: bottom + 28, label: sentence, caption };
  }

  // --- The page ---

  function drawTable(table, rows) {
    table.replaceChildren();
    const head = add(add(table, "thead"), "tr");
    add(head, "th", { scope: "col" }, "a rank keeps");
    for (const [name] of [...PARTS, ["total"]]) add(head, "th", { scope: "col" }, name);
    const body = add(table, "tbody");
    for (const row of rows) {
      const line = add(body, "tr");
      add(line, "th", { scope: "row" }, row.name);
      for (const [name] of [...PARTS, ["total"]]) add(line, "td", {}, bytes(row[name]));
    }
  }

  function build(root) {
    const sentence = add(root, "p", { class: "interactive-sentence", "aria-live": "polite" });
    const bars = figure(root, "What fits", drawBars);
    const steps = add(root, "p", { class: "interactive-key" });
    const details = add(root, "details");
    add(details, "summary", {}, "The same in numbers");
    const scrolls = { tabindex: 0, role: "group", "aria-label": "The numbers" };
    const table = add(add(details, "div", { class: "interactive-scroll", ...scrolls }), "table");
    return (state) => {
      const rows = memory(state);
      sentence.textContent = inWords(state, rows);
      bars(state, rows, sentence.textContent);
      steps.textContent = stepsInWords(state) + layersInWords(state);
      drawTable(table, rows);
    };
  }

  page("memory", CONTROLS, build);
})();
