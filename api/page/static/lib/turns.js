// Spreads work over animation frames, so that many charts that change at once don't make a long frame.

// The time of a frame that is used before the rest of the work waits for the next frame.
const BUDGET_MS = 8;

const waiting = new Map();
let isWorking = false;

const frame = () => new Promise((resolve) => requestAnimationFrame(resolve));
// Resolves after the updates that have been requested were made, which microtasks do.
const channel = new MessageChannel();
const after = [];
channel.port1.onmessage = () => after.shift()();
const task = () => new Promise((resolve) => {
  after.push(resolve);
  channel.port2.postMessage(null);
});

async function work() {
  isWorking = true;
  while (waiting.size) {
    await frame();
    const began = performance.now();
    // While the frame was awaited, the work can have been withdrawn.
    while (waiting.size && performance.now() - began < BUDGET_MS) {
      const [key, run] = waiting.entries().next().value;
      waiting.delete(key);
      try {
        run();
      } catch (error) {
        console.error(error);
      }
      await task();
    }
  }
  isWorking = false;
}

// Call `run` in one of the next frames. A later call with the same key replaces it.
export function inTurn(key, run) {
  waiting.set(key, run);
  if (!isWorking) work();
}

export const outOfTurn = (key) => waiting.delete(key);
