// The cost model of lesson 11, without a page around it. tests/test_site_scripts.py compares it with
// the functions of the lesson, and with the formula of the page cost_model.md.
// Units: bytes, seconds, bytes per second. A share is from 0 to 1.

"use strict";

// The messages and the bytes that each device sends when a ring all-reduces `size` bytes.
function allReduceCost(devices, size) {
  return { messages: 2 * (devices - 1), sent: (2 * (devices - 1)) / devices * size };
}

// What a step of data parallel training costs.
//   devices    how many; with 1, `slowest` must be 1: one device has nobody to wait for it
//   size       bytes of gradient
//   compute    seconds in which one device computes one batch
//   latency    seconds for each message
//   bandwidth  bytes per second, in one direction
//   overlap    share of the sending that may run beside the computing. With 0 and with 1, and no
//              slow device, the speed-up is lesson 11's predict_speedup.
//   slowest    how many times as long the slowest device computes, 1 or more
//   divided    true: one batch is divided among the devices; false: each has a batch of its own
// `late` is what the others wait for the slowest device, `exposed` what all wait for the sending; a
// device that is not the slowest waits for both.
function dataParallelStep(input) {
  const { messages, sent } = allReduceCost(input.devices, input.size);
  const sending = input.latency * messages + sent / input.bandwidth;
  const share = input.divided ? input.compute / input.devices : input.compute;
  const late = share * (input.slowest - 1);
  const hidden = Math.min(input.overlap * sending, share + late);
  const exposed = sending - hidden;
  const step = share + late + exposed;
  // The seconds that one device would need for the same work.
  const work = input.divided ? input.compute : input.devices * input.compute;
  const speedup = work / step;
  const efficiency = speedup / input.devices;
  return { messages, sent, sending, share, late, hidden, exposed, step, speedup, efficiency };
}

if (typeof module !== "undefined") module.exports = { dataParallelStep };
