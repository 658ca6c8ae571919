"""The cost of reading heads on long inputs: time and memory of all figures of a layer, against the attention itself.

    python benchmarks/reading_at_length.py                # 32,768 tokens, 4 heads of 64, on the CPU: minutes on two cores
    python benchmarks/reading_at_length.py --gpu          # 131,072 tokens, 32 heads of 128, bfloat16, causal: seconds on a GPU
    python benchmarks/reading_at_length.py --tokens 8192  # other lengths

One call of `F.scaled_dot_product_attention` is timed by itself (on a GPU with the flash kernel; cuDNN's beside it), then inside
`capture(stream=True)` without and with the random heads, and the attention's own time is subtracted. Repeats are interleaved. The
fastest is used on a CPU, the median on a GPU. The figures are compared with the dense float64 reading of the first 512 tokens.
"""

import argparse
import math
import statistics
import sys
import threading
import time
from dataclasses import fields

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import partita as pa


def seconds(run, device):
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def streamed(q, k, v, causal, null):
    with pa.inspect.capture(stream=True, null=null) as heads:
        scaled_dot_product_attention(q, k, v, is_causal=causal)
    return pa.inspect.read(heads)


class Memory:
    """Peak memory inside the `with`, beyond what was in use before: of the device, or of the process."""

    def __init__(self, device):
        self.device, self.bytes = device, 0

    def __enter__(self):
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            self.before, self.done = resident(), threading.Event()
            self.watch = threading.Thread(target=self._look)
            self.watch.start()
        return self

    def _look(self):
        while not self.done.wait(0.005):
            self.bytes = max(self.bytes, resident() - self.before)

    def __exit__(self, *_):
        if self.device == "cuda":
            torch.cuda.synchronize()
            self.bytes = torch.cuda.max_memory_allocated() - self.before
        else:
            self.done.set()
            self.watch.join()


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def errors(q, k, v, causal):
    """The largest difference from the dense float64 reading of the first tokens, and the bound on the error of a score."""
    q, k, v = (t[:, :4, :512].contiguous() for t in (q, k, v))
    with pa.inspect.capture() as dense:
        scaled_dot_product_attention(q, k, v, is_causal=causal)
    exact, found = pa.inspect.read(dense, budget=0), streamed(q, k, v, causal, False)
    worst = {}
    for a, b in zip(exact.heads, found.heads):
        for part in ("figures", "roles"):
            for field in fields(getattr(a, part)):
                x, y = (getattr(getattr(h, part), field.name) for h in (a, b))
                if not math.isnan(x) and not math.isnan(y) and x != y:
                    worst[field.name] = max(worst.get(field.name, 0.0), abs(x - y) / max(abs(x), 1e-9))
    return worst, max(h.score_error for h in found.heads)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--heads", type=int)
    parser.add_argument("--dim", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--full", action="store_true", help="no causal mask")
    given = parser.parse_args()
    device = "cuda" if given.gpu else "cpu"
    if given.gpu and not torch.cuda.is_available():
        sys.exit("no CUDA device was found; leave --gpu out.")
    tokens, heads, dim = (
        given.tokens or (131_072 if given.gpu else 32_768),
        given.heads or (32 if given.gpu else 4),
        given.dim or (128 if given.gpu else 64),
    )
    dtype, causal = torch.bfloat16 if given.gpu else torch.float32, not given.full
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, tokens, dim, device=device, dtype=dtype) for _ in range(3))
    words = "causal" if causal else "not causal"
    print(f"{tokens:,} tokens, {heads} heads of width {dim}, {str(dtype)[6:]}, {words}, {device}", end=", ")
    print(f"{torch.get_num_threads()} threads of torch")
    streamed(*(t[:, :, :64] for t in (q, k, v)), causal, True)  # the first capture imports more of torch
    with torch.no_grad(), sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        runs = {
            "attention": lambda: scaled_dot_product_attention(q, k, v, is_causal=causal),
            "figures": lambda: streamed(q, k, v, causal, False),
            "figures and null": lambda: streamed(q, k, v, causal, True),
        }
        times = {name: [] for name in runs}
        for repeat in range(given.repeats + given.gpu):
            for name, run in runs.items():
                taken = seconds(run, device)
                if repeat or not given.gpu:  # the first run compiles
                    times[name].append(taken)
        with Memory(device) as memory:
            streamed(q, k, v, causal, True)
        with Memory(device) as alone:
            runs["attention"]()
    pick = statistics.median if given.gpu else min
    taken = {name: pick(found) for name, found in times.items()}
    base = taken["attention"]
    for name in runs:
        own = taken[name] - (0 if name == "attention" else base)
        print(f"{name:<18}{own:>9.3f} s   {own / base:.2f} × the attention")
    if given.gpu:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            runs["attention"]()
            print(f"{'cuDNN attention':<18}{seconds(runs['attention'], device):>9.3f} s")
    print(f"memory beyond q, k, v: {memory.bytes / 1e9:.2f} GB (the attention alone: {alone.bytes / 1e9:.2f} GB)")
    worst, error = errors(q, k, v, causal)
    largest = max(worst, key=worst.get) if worst else "none"
    print(
        f"first 512 tokens against float64: largest relative difference {worst.get(largest, 0.0):.1e} ({largest})",
        end="; ",
    )
    print(f"scores within {error:.1e}")


if __name__ == "__main__":
    main()
