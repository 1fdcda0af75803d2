// What one rank must keep in memory, without a page around it. tests/test_site_scripts.py compares
// it with lesson 12, and with what the paper on ZeRO has published.
// Units: bytes. A share is from 0 to 1.

"use strict";

// Bytes for one parameter: itself, its gradient, its copy in float32. Mixed precision is that of
// ZeRO, section 3.1 (Rajbhandari et al. 2020, arXiv:1910.02054).
const PRECISIONS = { float32: [4, 4, 0], mixed: [2, 2, 4] };
const OPTIMIZERS = { SGD: 0, momentum: 4, Adam: 8 };  // bytes of state, in float32

// Bytes for one parameter: itself, its gradient, what the optimizer keeps.
function bytesPerParameter(precision, optimizer) {
  const [parameter, gradient, copy] = PRECISIONS[precision];
  return [parameter, gradient, copy + OPTIMIZERS[optimizer]];
}

// How many micro-batches the first stage keeps at most: it keeps the most. Lesson 12 counts them.
function aliveMicroBatches(schedule, stages, microBatches) {
  return schedule === "gpipe" ? microBatches : Math.min(stages, microBatches);
}

// What a rank holds, of the whole: parameters, gradients, optimizer, activations. The stages of ZeRO
// are those of section 5. The activations are counted in those of one micro-batch of the whole model:
// tensor parallelism cuts a share `cut` of them, a stage keeps its part of several.
function shares(strategy, ranks, microBatches, cut) {
  const part = 1 / ranks;
  if (strategy === "tensor") return [part, part, part, 1 - cut + cut * part];
  if (strategy === "gpipe" || strategy === "1f1b") {
    return [part, part, part, aliveMicroBatches(strategy, ranks, microBatches) * part];
  }
  const cuts = { data: 0, zero1: 1, zero2: 2, zero3: 3 }[strategy];
  return [cuts >= 3 ? part : 1, cuts >= 2 ? part : 1, cuts >= 1 ? part : 1, 1];
}

// The bytes of the rank that holds the most.
//   parameters     how many numbers the model has
//   activations    bytes that one micro-batch leaves in the whole model, until its backward
//   micro_batches  in a step of a pipeline
//   cut            the share of the activations that tensor parallelism divides
function rankMemory(input) {
  const [weight, gradient, state] = bytesPerParameter(input.precision, input.optimizer);
  const held = shares(input.strategy, input.ranks, input.micro_batches, input.cut);
  const parameters = input.parameters * weight * held[0];
  const gradients = input.parameters * gradient * held[1];
  const optimizer = input.parameters * state * held[2];
  const activations = input.activations * held[3];
  const total = parameters + gradients + optimizer + activations;
  return { parameters, gradients, optimizer, activations, total };
}

if (typeof module !== "undefined") {
  module.exports = { aliveMicroBatches, bytesPerParameter, rankMemory };
}
