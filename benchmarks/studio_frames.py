"""How quickly the studio's page reacts: first interaction, script per frame, frames a second. Needs chromium and Playwright.

    python benchmarks/studio_frames.py [--keys 64] [--seconds 5]

Everything is painted by the processor here (SwiftShader), four panes of 256 x 256 pixels; a graphics card is much faster.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import subprocess
import sys
import time
from typing import Any

from playwright.sync_api import Page, sync_playwright

SOFTWARE = ["--no-sandbox", "--use-gl=angle", "--use-angle=swiftshader", "--enable-unsafe-swiftshader"]
READY = """async () => {
  while (!window.studio) await new Promise((done) => setTimeout(done, 5));
  await studio.ready;
  return performance.now();
}"""
ALONE = """async ([count, R, frames]) => {
  const { GlPainter } = await import("./painter_gl.js"), { headOf } = await import("./head.js");
  const { LIGHT } = await import("./colours.js"), canvas = document.createElement("canvas");
  canvas.width = canvas.height = 256;
  const painter = GlPainter.create(canvas), { gl } = painter, box = { lo: [-1, -1], hi: [1, 1] };
  const at = (k) => [((0.7548776662 * k) % 1) * 2 - 1, ((0.569840291 * k) % 1) * 2 - 1];
  const centers = Array.from({ length: count }, (_, k) => at(k)), values = centers.map(([x, y]) => Math.sin(3 * x) + x * y);
  const paint = (k) => {
    centers[0] = [0.5 * Math.sin(k), 0.5 * Math.cos(k)];
    painter.setHead(headOf({ rates: [R, R], centers, biases: null, values, slopes: null }, { hard: false }), null);
    painter.paint({ panes: [{ kind: "head", x: 0, y: 0, size: 256 }], ratio: 1, box, valueRange: [-2, 2], errorRange: 1,
                    tint: "value", selected: 0, theme: LIGHT });
    gl.readPixels(0, 0, 1, 1, gl.RGBA, gl.UNSIGNED_BYTE, new Uint8Array(4)); // waits until it is painted
  };
  paint(0);
  const start = performance.now();
  for (let k = 1; k <= frames; k += 1) paint(k);
  return (performance.now() - start) / frames;
}"""
DRAG = """async ([seconds, sharp]) => {
  const { state } = studio.parts, script = [], waits = [];
  if (sharp) Object.defineProperty(studio.picture, "quality", { get: () => 1, set() {} });
  const start = performance.now(), first = studio.frame.count;
  let k = 0;
  while (performance.now() - start < 1000 * seconds) {
    const count = studio.frame.count;
    const x = [0.5 * Math.sin(0.1 * k), 0.5 * Math.cos(0.1 * k)];
    const keys = state.get().keys.map((key, j) => (j === 7 ? { ...key, x } : key));
    state.update({ keys }, { live: true });
    while (studio.frame.count === count) await new Promise(requestAnimationFrame);
    script.push(studio.frame.scriptMs);
    k += 1;
  }
  const gl = studio.picture.painter.gl;
  if (gl) gl.readPixels(0, 0, 1, 1, gl.RGBA, gl.UNSIGNED_BYTE, new Uint8Array(4));  // waits for what is still painted
  return { script, frames: studio.frame.count - first, seconds: (performance.now() - start) / 1000,
           draws: studio.frame.draws,
           pixels: [studio.picture.canvas.width, studio.picture.canvas.height], panes: studio.picture.panes.map((p) => p.size) };
}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    server = subprocess.Popen(
        [sys.executable, "-m", "partita", "studio", "--no-browser"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        measure(server.stdout.readline().strip(), options.keys, options.seconds)
    finally:
        server.terminate()
        server.wait()


def measure(address: str, keys: int, seconds: float) -> None:
    rng = random.Random(5)
    places = ";".join(f"{rng.uniform(-1, 1):.3f},{rng.uniform(-1, 1):.3f}" for _ in range(keys))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=SOFTWARE)
        time.sleep(15)  # until the server's workers have imported torch
        for attempt in ("first", "second"):
            page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
            page.goto(address, wait_until="commit")
            ready = page.evaluate(READY)
            print(
                f"{attempt} visit: the first picture is painted and can be dragged {ready / 1000:.2f} s after the request"
            )
            page.close()
        page = browser.new_page()
        page.goto(f"{address}&painter=canvas")
        page.evaluate("studio.ready")
        for R in (20, 60, 400):
            spent = page.evaluate(ALONE, [keys, R, 20])
            print(f"{keys} keys, R = {R}, one picture of 256 x 256: {spent:.0f} ms, {1000 / spent:.1f} frames a second")
        page.close()
        for R in (20, 400):
            for sharp in (False, True):
                page = browser.new_context(viewport={"width": 1150, "height": 900}).new_page()
                page.goto(f"{address}#R={R}&keys={places}")
                page.evaluate("studio.ready")
                page.wait_for_timeout(1500)
                report(page, keys, R, seconds, sharp=sharp)
                page.close()
        browser.close()


def report(page: Page, keys: int, rate: int, seconds: float, *, sharp: bool) -> None:
    found: dict[str, Any] = page.evaluate(DRAG, [seconds, sharp])
    script = statistics.median(found["script"])
    width, height = found["pixels"]
    print(
        f"{keys} keys, R = {rate}, {'full' if sharp else 'adaptive'} resolution: "
        f"{found['frames'] / found['seconds']:.1f} frames a second, "
        f"{script:.1f} ms of script a frame (median; largest {max(found['script']):.1f}), "
        f"{found['draws']} draw call, canvas {width} x {height}, "
        f"panes of {found['panes'][0]:.0f} CSS pixels"
    )


if __name__ == "__main__":
    main()
