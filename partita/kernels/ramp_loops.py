"""The loops behind ramps and their gradients: compiled by numba when first used."""

from __future__ import annotations

import numpy as np

from partita.kernels.native_code import exp_native, loop

__all__ = ["fill_ramp"]


@loop
def fill_ramp(u, grad, numbers, lines, scores, out):
    """Fill `out` with the ramp at u; or, where `grad` is not empty, with its derivative times that.

    numbers: a, Δ, κ, how far s may lie beyond the anchors, p − 1, p − 2, p − width, width/2 − 1, 1/2. Scratch: lines `(5, block)`,
    scores `(width, block)`.
    """
    low, spacing, sharpness, beyond, last, cells, latest, before, half = numbers
    block = lines.shape[1]
    for begin in range(0, len(u), block):
        end = min(begin + block, len(u))
        n, some, answers = end - begin, u[begin:end], out[begin:end]
        s, cell, first = lines[0, :n], lines[1, :n], lines[2, :n]
        largest, total = lines[3, :n], lines[4, :n]
        for j in range(n):
            place = (some[j] - low) / spacing
            place = -beyond if place < -beyond else place  # NaN stays NaN
            place = last + beyond if place > last + beyond else place
            k = np.floor(place)
            k = cells if k > cells else k
            k = k * 0 if k < 0 else k
            start = k - before
            start = latest if start > latest else start
            start = start * 0 if start < 0 else start
            s[j] = place - k
            cell[j] = k
            first[j] = start - k
            largest[j] = -np.inf
            total[j] = 0
        for row in range(len(scores)):
            score = scores[row]
            for j in range(n):
                i, most = first[j] + row, largest[j]
                found = sharpness * i * (s[j] - i * half)
                score[j] = found
                largest[j] = found if found > most else most
        mean = answers
        for j in range(n):
            mean[j] = 0
        for row in range(len(scores)):
            score = scores[row]
            for j in range(n):
                score[j] = exp_native(score[j] - largest[j])
        for row in range(len(scores)):
            score = scores[row]
            for j in range(n):
                total[j] += score[j]
                mean[j] += score[j] * (first[j] + row)
        for j in range(n):
            mean[j] /= total[j]
        if len(grad) == 0:
            for j in range(n):
                answers[j] = low + spacing * (cell[j] + mean[j])
            continue
        for j in range(n):
            largest[j] = 0  # from here on the variance of i
        for row in range(len(scores)):
            score = scores[row]
            for j in range(n):
                away = first[j] + row - mean[j]
                largest[j] += score[j] * away * away
        for j in range(n):
            place = s[j] + cell[j]
            outside = place <= -beyond or place >= last + beyond
            answers[j] = grad[begin + j] * (largest[j] * 0 if outside else sharpness * largest[j] / total[j])
