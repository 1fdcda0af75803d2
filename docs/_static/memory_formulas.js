// What one rank must keep in memory, without a page around it. tests/test_site_scripts.py compares
// it with lessons 12, 13 and 18, and with what the papers on ZeRO and on activations have published.
// Units: bytes.

"use strict";

// Bytes for one parameter: itself, its gradient, its copy in float32. Mixed precision is that of
// ZeRO, section 3.1 (Rajbhandari et al. 2020, arXiv:1910.02054).
const PRECISIONS = { float32: [4, 4, 0], mixed: [2, 2, 4] };
const OPTIMIZERS = { SGD: 0, momentum: 4, Adam: 8 };  // bytes of state, in float32

// Bytes that a block keeps for backward (Korthikanti et al. 2022, arXiv:2205.05198, section 4), of
// numbers with 2 bytes and masks with 1. For each token and unit of width: between the cuts of
// tensor parallelism, inside them, and the block's input. For each head and pair of tokens: the
// matrices of attention. In float32 the numbers have 4 bytes, and the masks still 1.
const BLOCK = {
  mixed: { between: 10, inside: 24, input: 2, pair: 5 },
  float32: { between: 18, inside: 48, input: 4, pair: 9 },
};

// Bytes for one parameter: itself, its gradient, what the optimizer keeps.
function bytesPerParameter(precision, optimizer) {
  const [parameter, gradient, copy] = PRECISIONS[precision];
  return [parameter, gradient, copy + OPTIMIZERS[optimizer]];
}

// How many micro-batches the first stage keeps at most: it keeps the most. Lesson 12 counts them.
function aliveMicroBatches(schedule, stages, microBatches) {
  return schedule === "gpipe" ? microBatches : Math.min(stages, microBatches);
}

// How `ranks` are used, if all of them are used in one way.
function layout(strategy, ranks) {
  const alone = { data: 1, tensor: 1, stages: 1, zero: 0, schedule: "1f1b" };
  if (strategy === "tensor") return { ...alone, tensor: ranks };
  if (strategy === "gpipe" || strategy === "1f1b") {
    return { ...alone, stages: ranks, schedule: strategy };
  }
  const zero = { data: 0, zero1: 1, zero2: 2, zero3: 3 }[strategy];
  return { ...alone, data: ranks, zero };
}

// The activations of one row in one block, on one of `tensor` parts.
//   again    what is computed a second time: "nothing", "attention" or "all" but the block's input
//   between  what lies between the cuts is "whole" on every part, or cut by "tokens"
function blockActivations({ precision, tokens, width, heads, again, between }, tensor) {
  const kinds = BLOCK[precision];
  const outside = between === "tokens" ? tensor : 1;
  if (again === "all") return tokens * width * kinds.input / outside;
  const matrices = again === "nothing" ? kinds.pair * heads * tokens ** 2 : 0;
  const inside = (tokens * width * kinds.inside + matrices) / tensor;
  return inside + tokens * width * kinds.between / outside;
}

// The activations of one micro-batch in all blocks, on one of `tensor` parts. A size that is `given`
// is that of the whole model; tensor divides it as it divides a block's.
function modelActivations(input, tensor) {
  const share = blockActivations(input, tensor);
  return (input.given ? input.given / blockActivations(input, 1) : input.layers) * share;
}

// The bytes of the rank that holds the most.
//   parameters     how many numbers the model has
//   data, tensor, stages  the ranks: as many as their product
//   zero           the stage of ZeRO among the `data` ranks: 1, 2, 3, or 0 for none (its section 5)
//   schedule       of the pipeline: "gpipe" or "1f1b"
//   micro_batches  in a step of a pipeline
//   and those of `modelActivations`
function rankMemory(input) {
  const [weight, gradient, state] = bytesPerParameter(input.precision, input.optimizer);
  const part = input.parameters / (input.tensor * input.stages);
  const dealt = (stage) => (input.zero >= stage ? part / input.data : part);
  const parameters = weight * dealt(3);
  const gradients = gradient * dealt(2);
  const optimizer = state * dealt(1);
  const alive = aliveMicroBatches(input.schedule, input.stages, input.micro_batches);
  const activations = modelActivations(input, input.tensor) / input.stages * alive;
  const total = parameters + gradients + optimizer + activations;
  return { parameters, gradients, optimizer, activations, total };
}

if (typeof module !== "undefined") {
  module.exports = {
    aliveMicroBatches, blockActivations, bytesPerParameter, layout, modelActivations, rankMemory,
  };
}
