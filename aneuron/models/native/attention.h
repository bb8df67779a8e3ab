// Attention over the paged cache: every key and value is read once, where it lies.
//
// A query meets keys in chunks of kChunk from the context's first one on, whatever else the step
// computes, so its result depends on its own context alone.
#pragma once

#include "cache.h"

namespace aneuron {

constexpr int kAhead = 96;  // keys that are asked for before they are read: blocks lie anywhere

// Asks for 16 keys, from `at` on, and their values.
template <typename Cell>
void expect(const Heads& h, const Paged& keys, const Paged& values, int at) {
  Cache<Cell>::expect_keys(h, keys.block(at), at % h.block_size);
  Cache<Cell>::expect_values(h, values.block(at), at % h.block_size);
}

// Attends Q queries of one key head over their context.
template <typename Cell, int Q>
void attend(const Heads& h, const Paged& keys, const Paged& values, int window, const Queries& q) {
  using Cells = Cache<Cell>;
  const float scale = 1.4426950408889634f / std::sqrt(static_cast<float>(h.size));  // to base 2
  alignas(64) float scores[Q][kChunk];
  Weights<Cell> weights;
  float best[Q], mass[Q];
  int last = 0, first = q.positions[0];
  for (int i = 0; i < Q; ++i) {
    best[i] = -INFINITY, mass[i] = 0.0f;
    last = q.positions[i] > last ? q.positions[i] : last;
    first = q.positions[i] < first ? q.positions[i] : first;
    for (int d = 0; d < h.size; d += kLanes) store(q.results[i] + d, zero());
  }
  int begin = window && first - window + 1 > 0 ? (first - window + 1) / kChunk * kChunk : 0;
  for (int k = begin; k <= last && k < begin + kAhead; k += kLanes) expect<Cell>(h, keys, values, k);
  for (int chunk = begin; chunk <= last; chunk += kChunk) {
    int count = last + 1 - chunk < kChunk ? last + 1 - chunk : kChunk;
    for (int k = 0; k < count; k += kLanes) {
      if (chunk + k + kAhead <= last) expect<Cell>(h, keys, values, chunk + k + kAhead);
      F16 sums[Q];
      Cells::template score<Q>(h, keys.block(chunk + k), (chunk + k) % h.block_size, q, sums);
      for (int i = 0; i < Q; ++i) store(scores[i] + k, mul(sums[i], fill(scale)));
    }
    int padded = (count + kLanes - 1) / kLanes * kLanes;
    for (int i = 0; i < Q; ++i) {
      // Keys from..to-1 of this chunk are the query's.
      int to = q.positions[i] + 1 - chunk, from = window ? to - window : 0;
      F16 none = fill(-INFINITY), most = none;
      for (int k = 0; k < padded; k += kLanes) {
        F16 s = keep_first(load(scores[i] + k), to - k < 0 ? 0 : to - k, none);
        if (from > k) s = keep_from(s, from - k, none);
        store(scores[i] + k, s);
        most = max(most, s);
      }
      if (to <= 0 || from >= padded) {  // nothing of this chunk is the query's
        for (int k = 0; k < padded; ++k) weights.of[i][k] = 0;
        weights.sizes[i] = 0.0f;
        continue;
      }
      float peak = top(most) > best[i] ? top(most) : best[i];
      float shrink = best[i] == -INFINITY ? 0.0f : std::exp2(best[i] - peak);
      if (shrink != 1.0f)
        for (int d = 0; d < h.size; d += kLanes)
          store(q.results[i] + d, mul(load(q.results[i] + d), fill(shrink)));
      F16 total = zero();
      for (int k = 0; k < padded; k += kLanes) {
        F16 p = keep_first(exp2(sub(load(scores[i] + k), fill(peak))), to - k < 0 ? 0 : to - k, zero());
        if (from > k) p = keep_from(p, from - k, zero());
        total = add(total, p);
        store(scores[i] + k, p);
      }
      mass[i] = mass[i] * shrink + sum(total);
      best[i] = peak;
      Cells::weigh(h, values, chunk, padded, from, to, scores[i], weights, i);
    }
    int d = 0;
    for (; d + 2 * kLanes <= h.size; d += 2 * kLanes)
      Cells::template mix_chunk<Q, 2>(h, values, chunk, count, d, weights, q);
    for (; d < h.size; d += kLanes)
      Cells::template mix_chunk<Q, 1>(h, values, chunk, count, d, weights, q);
  }
  for (int i = 0; i < Q; ++i)
    for (int d = 0; d < h.size; d += kLanes)
      store(q.results[i] + d, div(load(q.results[i] + d), fill(mass[i])));
}

template <typename Cell, int Q = kMostQueries>
void attend_any(const Heads& h, const Paged& keys, const Paged& values, int window, const Queries& q) {
  if (q.count == Q) return attend<Cell, Q>(h, keys, values, window, q);
  if constexpr (Q > 1) attend_any<Cell, Q - 1>(h, keys, values, window, q);
}

}  // namespace aneuron
