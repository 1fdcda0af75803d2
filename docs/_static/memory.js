// The page memory.md: what one rank must keep, by each way of splitting a training.
// The formulas are in memory_formulas.js.

"use strict";

(() => {
  const { add, bytes, count, few, figure, label, page, pattern, stops, tick, whole } = interactive;
  const RANKS = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024];
  const PARTS_OF_A_MODEL = RANKS.filter((ranks) => ranks <= 64);
  const SIZES = [8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 141, 192, 288];
  const TOKENS = Array.from({ length: 14 }, (_, index) => 2 ** (index + 7));
  const LAYERS = [0, 1, 2, 4, 6, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 128];
  const WIDTHS = [128, 256, 512, 768, 1024, 1280, 1600, 2048, 3072, 4096, 5120, 6144, 8192, 12288];
  const HEADS = [1, 2, 4, 6, 8, 12, 16, 20, 25, 32, 40, 48, 64, 96, 128];
  const MODELS = [
    ["ResNet-50, 25.6 million", model(25.557032, 0)],
    ["BERT-large, 340 million", model(340, 24, 1024, 16, 512)],
    ["GPT-2, 1.5 billion", model(1500, 48, 1600, 25, 1024)],
    ["lesson 18, 6.74 billion", model(6738.41152, 32, 4096, 32, 2048)],
    ["figure 1 of ZeRO, 7.5 billion", model(7500, 0)],
    ["lesson 13, 8.05 billion", model(8053.06368, 40, 4096, 32, 2048)],
    ["GPT-3, 175 billion", model(175000, 96, 12288, 96, 2048)],
  ];
  const NUMBERS = [
    ["mixed", "mixed precision"],
    ["float32", "float32"],
  ];
  const OPTIMIZER = [
    ["Adam", "Adam"],
    ["momentum", "SGD with momentum"],
    ["SGD", "SGD"],
  ];
  const AGAIN = [
    ["nothing", "nothing"],
    ["attention", "the matrices of attention"],
    ["all", "all but each block's input"],
  ];
  const BETWEEN = [
    ["whole", "whole on every rank"],
    ["tokens", "cut by tokens"],
  ];
  const ZERO = [
    ["0", "nothing"],
    ["1", "the optimizer (ZeRO 1)"],
    ["2", "also the gradients (ZeRO 2)"],
    ["3", "also the parameters (ZeRO 3)"],
  ];
  const SHAPE = "The shape of the model";
  const MIXTURE = "Tensor and the mixture";
  const CONTROLS = [
    { name: "models", label: "Model", presets: MODELS },
    {
      name: "parameters", label: "Parameters",
      unit: "million", values: stops(1, 1e6), min: 0.001, max: 1e8, value: 8053.06368,
    },
    {
      name: "tokens", label: "Tokens of a row",
      unit: "", values: TOKENS, min: 1, max: 1e8, value: 2048, whole: true,
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
    { name: "again", label: "Computed again in backward", options: AGAIN, value: "attention" },
    {
      name: "micro", label: "Micro-batches in a step of a pipeline",
      unit: "", values: stops(1, 1000).filter(Number.isInteger),
      min: 1, max: 1e6, value: 32, whole: true,
    },
    {
      name: "layers", label: "Blocks (0: not a transformer)", fold: SHAPE,
      unit: "", values: LAYERS, min: 0, max: 1e5, value: 40, whole: true,
    },
    {
      name: "width", label: "Width", fold: SHAPE,
      unit: "", values: WIDTHS, min: 1, max: 1e6, value: 4096, whole: true,
    },
    {
      name: "heads", label: "Heads", fold: SHAPE,
      unit: "", values: HEADS, min: 1, max: 1e5, value: 32, whole: true,
    },
    {
      name: "activations", label: "Or: activations of a micro-batch", fold: SHAPE,
      unit: "GB", values: [0, ...stops(0.01, 1000)], min: 0, max: 1e6, value: 0,
    },
    {
      name: "tensor", label: "Mixture: tensor parts", fold: MIXTURE,
      unit: "", values: PARTS_OF_A_MODEL, min: 1, max: 1e5, value: 2, whole: true,
    },
    {
      name: "stages", label: "Mixture: stages of a 1F1B pipeline", fold: MIXTURE,
      unit: "", values: PARTS_OF_A_MODEL, min: 1, max: 1e5, value: 1, whole: true,
    },
    {
      name: "zero", label: "Mixture: the data ranks deal out", fold: MIXTURE,
      options: ZERO, value: "3",
    },
    {
      name: "between", label: "Tensor and mixture: between the cuts", fold: MIXTURE,
      options: BETWEEN, value: "whole",
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

  // Without layers there is no number for the activations: the rest of the shape stays.
  function model(parameters, layers, width, heads, tokens) {
    const all = { parameters, layers, activations: 0 };
    return layers ? { ...all, width, heads, tokens } : all;
  }

  function inBytes(state) {
    const given = state.activations * 1e9;
    return { ...state, parameters: state.parameters * 1e6, given, micro_batches: state.micro };
  }

  // What the ranks are used as: each way alone, and the mixture.
  function layouts({ ranks, tensor, stages, zero }) {
    const data = Math.max(1, Math.floor(ranks / (tensor * stages)));
    const mixture = { data, tensor, stages, zero: Number(zero), schedule: "1f1b" };
    const name = `mixture ${data} × ${tensor} × ${stages}`;
    return [...WAYS.map(([way, text]) => [text, layout(way, ranks)]), [name, mixture]];
  }

  // What the model, or the number of ranks, is too small for; "" if nothing.
  function lacks({ ranks, layers, heads }, { tensor, stages }) {
    if (tensor * stages > ranks) return "ranks";
    if (layers > 0 && stages > layers) return "blocks";
    return layers > 0 && tensor > heads ? "heads" : "";
  }

  function memory(state) {
    return layouts(state).map(([name, used]) => {
      const held = rankMemory({ ...inBytes(state), ...used });
      const missing = lacks(state, used);
      return { name, ...held, used, missing, fits: !missing && held.total <= state.device * 1e9 };
    });
  }

  // --- In words ---

  function activationsInWords(state) {
    const size = modelActivations(inBytes(state), 1);
    if (size === 0) return "All this is without activations.";
    if (state.activations) return `A micro-batch leaves ${bytes(size)} of activations.`;
    const blocks = `${count(state.layers, "block")} of width ${whole(state.width)}`;
    return `A row of ${count(state.tokens, "token")} leaves ${bytes(size)} of activations in ${blocks}.`;
  }

  function inWords(state, rows) {
    const [weight, gradient, kept] = bytesPerParameter(state.precision, state.optimizer);
    const sum = weight + gradient + kept;
    const all = bytes(state.parameters * 1e6 * sum);
    const numbers = `${weight} + ${gradient} + ${kept} = ${sum} bytes`;
    const take = `A parameter, its gradient and the optimizer take ${numbers}, ${all} in all.`;
    const each = `${take} ${activationsInWords(state)}`;
    const list = (some) => some.map((row) => `${row.name} (${bytes(row.total)})`).join(", ");
    const possible = rows.filter((row) => !row.missing);
    const fit = possible.filter((row) => row.fits);
    const others = possible.filter((row) => !row.fits);
    const place = `${count(state.ranks, "rank")} with ${few(state.device)} GB each`;
    const least = Math.min(...possible.map((row) => row.total));
    const not = missingInWords(state, rows.filter((row) => row.missing));
    if (fit.length === 0) {
      return `${each} On ${place} nothing fits; the least is ${bytes(least)}.${not}`;
    }
    const rest = others.length ? `Too big: ${list(others)}.` : "Nothing is too big.";
    return `${each} What fits on ${place}: ${list(fit)}. ${rest}${not}`;
  }

  function missingInWords(state, rows) {
    if (rows.length === 0) return "";
    const needs = ({ used: { tensor, stages }, missing }) => ({
      ranks: () => `needs ${whole(tensor * stages)} ranks`,
      blocks: () => `${count(state.layers, "block")} for ${whole(stages)} stages`,
      heads: () => `${count(state.heads, "head")} for ${whole(tensor)} parts`,
    }[missing]());
    return ` Not possible: ${rows.map((row) => `${row.name} (${needs(row)})`).join(", ")}.`;
  }

  // Without gradients that are added up over several rounds.
  function stepsInWords({ ranks, micro, tensor, stages }, { data, zero }) {
    const each = ranks === 1 ? "1" : `${whole(ranks)} (one on each rank)`;
    const together = ranks === 1 ? "1" : "1 (on all ranks together)";
    const mixed = whole(data * (stages > 1 ? micro : 1));
    const ways = `data parallel and ZeRO ${each}, tensor ${together}, the pipelines ${whole(micro)}`;
    const unequal = ranks === 1 && micro === 1 ? "" : " So the steps are not equally large.";
    const left = ranks - data * tensor * stages;
    const idle = left > 0 ? `, and leaves ${count(left, "rank")} idle` : "";
    const among = zero ? ` with ZeRO ${zero}` : "";
    const uses = ` The mixture has ${data} data${among} × ${tensor} tensor × ${stages} pipeline ranks`;
    return `Micro-batches in a step: ${ways}, the mixture ${mixed}.${unequal}${uses}${idle}.`;
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
    const short = row.missing ? `too few ${row.missing}` : "too big";
    const verdict = `${bytes(row.total)}, ${row.fits ? "fits" : short}`;
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
      steps.textContent = stepsInWords(state, rows.at(-1).used);
      drawTable(table, rows);
    };
  }

  page("memory", CONTROLS, build);
})();
