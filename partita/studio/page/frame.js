/**
 * Frames: work is done at most once per animation frame, and only when something asked for it.
 *
 *     request(work)    runs work() in the next frame; asking again before that changes nothing
 *     frame            figures of the last frame: {scriptMs, draws, count, waitMs}; count grows by one per frame,
 *                      waitMs is how long the frame was waited for, which is long while the last one is still painted
 *     slices(step)     runs step() again and again, about 6 ms at a time between frames, until it returns true or the
 *                      returned function is called
 */

export const frame = { scriptMs: 0, draws: 0, count: 0, waitMs: 0 };

const waiting = new Set();
let asked = false;
let askedAt = 0;

export function request(work) {
  waiting.add(work);
  if (asked) return;
  asked = true;
  askedAt = performance.now();
  requestAnimationFrame(run);
}

function run() {
  asked = false;
  const todo = [...waiting];
  waiting.clear();
  const start = performance.now();
  frame.waitMs = start - askedAt;
  frame.draws = 0;
  for (const work of todo) work();
  frame.scriptMs = performance.now() - start;
  frame.count += 1;
}

export function slices(step, ms = 6) {
  let ended = false;
  const channel = new MessageChannel();
  const turn = () => {
    const until = performance.now() + ms;
    while (!ended && performance.now() < until) if (step()) ended = true;
    if (ended) channel.port1.close();
    else setTimeout(() => channel.port2.postMessage(0), 0);
  };
  channel.port1.onmessage = turn;
  channel.port2.postMessage(0);
  return () => { ended = true; };
}
