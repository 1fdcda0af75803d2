// The cost model of lesson 11, without a page around it.
// docs/formulas.py has the same formulas in Python, with their units and sources;
// tests/test_site_formulas.py compares the two.
// Units: bytes, seconds, bytes per second. A share is from 0 to 1.

"use strict";

function allReduceCost(devices, size) {
  return { messages: 2 * (devices - 1), sent: (2 * (devices - 1)) / devices * size };
}

function dataParallelStep(input) {
  const { messages, sent } = allReduceCost(input.devices, input.size);
  const sending = input.latency * messages + sent / input.bandwidth;
  const share = input.divided ? input.compute / input.devices : input.compute;
  const late = share * (input.slowest - 1);
  const hidden = Math.min(input.overlap * sending, share + late);
  const exposed = sending - hidden;
  const step = share + late + exposed;
  const work = input.divided ? input.compute : input.devices * input.compute;
  const speedup = work / step;
  const efficiency = speedup / input.devices;
  return { messages, sent, sending, share, late, hidden, exposed, step, speedup, efficiency };
}

if (typeof module !== "undefined") module.exports = { data_parallel_step: dataParallelStep };
