// Attention over the paged cache: every key and value is read once, where it lies.
//
// A block of a head's keys is [D / 2][block_size][2] (float32: [D][block_size]): 16 keys at a time
// are one vector, and a score needs no sum across lanes. Its values are [block_size / 2][D][2]
// (float32: [block_size][D]). A query meets keys in chunks of kChunk from the context's first one on,
// whatever else the step computes, so its result depends on its own context alone.
#pragma once

#include "matrix.h"

namespace aneuron {

constexpr int kChunk = 128;  // keys between two rescalings
constexpr int kMostQueries = 12;

struct Heads {
  int32_t queries;     // H
  int32_t keys;        // Hkv
  int32_t size;        // D, a multiple of 16
  int32_t block_size;  // a multiple of 16
};

// Queries of one key head: `count` of them, neighbours of one row of the batch.
struct Queries {
  int32_t count;
  const void* vectors[kMostQueries];   // [D] each, of the cache's type
  int32_t positions[kMostQueries];     // ascending is not needed
  float* results[kMostQueries];        // [D] each
};

template <typename Cell>
struct Cache;

template <>
struct Cache<bf16> {
  static int64_t key_cell(const Heads& h, int64_t block, int head, int offset, int d) {
    return (((block * h.keys + head) * (h.size / 2) + d / 2) * h.block_size + offset) * 2 + d % 2;
  }
  static int64_t value_cell(const Heads& h, int64_t block, int head, int offset, int d) {
    return (((block * h.keys + head) * (h.block_size / 2) + offset / 2) * h.size + d) * 2 + offset % 2;
  }
  static bf16 cell(float x) { return to_bf16(x); }
  // Scores of Q queries with the 16 keys from `offset` on.
  template <int Q>
  static void score(const Heads& h, const bf16* keys, int offset, const Queries& q, F16 (&sums)[Q]) {
    ANEURON_UNROLL for (int i = 0; i < Q; ++i) sums[i] = zero();
    for (int d = 0; d < h.size; d += 2) {
      const bf16* pairs = keys + (d * h.block_size) + 2 * offset;
      ANEURON_UNROLL for (int i = 0; i < Q; ++i)
        sums[i] = dot_bf16(sums[i], pairs, static_cast<const bf16*>(q.vectors[i]) + d);
    }
  }
  // Adds the values of `count` keys from `offset` on, weighed; 16 * W numbers of each from d on.
  template <int Q, int W>
  static void mix(const Heads& h, const bf16* values, int offset, int count, int d,
                  const bf16* const (&weights)[Q], F16 (&sums)[Q][W]) {
    for (int k = 0; k < count; k += 2) {
      const bf16* pairs = values + ((offset + k) / 2 * h.size + d) * 2;
      bf16 last[2 * W * kLanes];
      if (k + 1 == count) {  // its neighbour was never written, and may hold anything
        for (int i = 0; i < W * kLanes; ++i) last[2 * i] = pairs[2 * i], last[2 * i + 1] = 0;
        pairs = last;
      }
      ANEURON_UNROLL for (int i = 0; i < Q; ++i)
        for (int w = 0; w < W; ++w)
          sums[i][w] = dot_bf16(sums[i][w], pairs + 2 * w * kLanes, weights[i] + k);
    }
  }
};

template <>
struct Cache<float> {
  static int64_t key_cell(const Heads& h, int64_t block, int head, int offset, int d) {
    return ((block * h.keys + head) * h.size + d) * h.block_size + offset;
  }
  static int64_t value_cell(const Heads& h, int64_t block, int head, int offset, int d) {
    return ((block * h.keys + head) * h.block_size + offset) * h.size + d;
  }
  static float cell(float x) { return x; }
  template <int Q>
  static void score(const Heads& h, const float* keys, int offset, const Queries& q, F16 (&sums)[Q]) {
    ANEURON_UNROLL for (int i = 0; i < Q; ++i) sums[i] = zero();
    for (int d = 0; d < h.size; ++d) {
      F16 column = load(keys + d * h.block_size + offset);
      ANEURON_UNROLL for (int i = 0; i < Q; ++i)
        sums[i] = fma(column, fill(static_cast<const float*>(q.vectors[i])[d]), sums[i]);
    }
  }
  template <int Q, int W>
  static void mix(const Heads& h, const float* values, int offset, int count, int d,
                  const float* const (&weights)[Q], F16 (&sums)[Q][W]) {
    for (int k = 0; k < count; ++k) {
      const float* row = values + (offset + k) * h.size + d;
      ANEURON_UNROLL for (int i = 0; i < Q; ++i)
        for (int w = 0; w < W; ++w)
          sums[i][w] = fma(load(row + w * kLanes), fill(weights[i][k]), sums[i][w]);
    }
  }
};

// Attends Q queries of one key head over their context.
template <typename Cell, int Q>
void attend(const Heads& h, const Cell* k_cache, const Cell* v_cache, int head,
            const int32_t* block_table, int window, const Queries& q) {
  const float scale = 1.4426950408889634f / std::sqrt(static_cast<float>(h.size));  // to base 2
  const int64_t block_cells = static_cast<int64_t>(h.block_size) * h.size;
  alignas(64) float scores[Q][kChunk];
  alignas(64) Cell weights[Q][kChunk];
  float best[Q], mass[Q];
  int last = 0, first = q.positions[0];
  for (int i = 0; i < Q; ++i) {
    best[i] = -INFINITY, mass[i] = 0.0f;
    last = q.positions[i] > last ? q.positions[i] : last;
    first = q.positions[i] < first ? q.positions[i] : first;
    for (int d = 0; d < h.size; d += kLanes) store(q.results[i] + d, zero());
  }
  int begin = window && first - window + 1 > 0 ? (first - window + 1) / kChunk * kChunk : 0;
  for (int chunk = begin; chunk <= last; chunk += kChunk) {
    int count = last + 1 - chunk < kChunk ? last + 1 - chunk : kChunk;
    for (int k = 0; k < count; k += kLanes) {
      int64_t block = block_table[(chunk + k) / h.block_size];
      F16 sums[Q];
      Cache<Cell>::template score<Q>(h, k_cache + (block * h.keys + head) * block_cells,
                                     (chunk + k) % h.block_size, q, sums);
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
        for (int k = 0; k < padded; ++k) weights[i][k] = 0;
        continue;
      }
      float peak = top(most) > best[i] ? top(most) : best[i];
      float shrink = best[i] == -INFINITY ? 0.0f : std::exp2(best[i] - peak);
      if (shrink != 1.0f)
        for (int d = 0; d < h.size; d += kLanes)
          store(q.results[i] + d, mul(load(q.results[i] + d), fill(shrink)));
      F16 total = zero();
      for (int k = 0; k < padded; k += kLanes) {
        F16 s = load(scores[i] + k);
        F16 p = keep_first(exp2(sub(s, fill(peak))), to - k < 0 ? 0 : to - k, zero());
        if (from > k) p = keep_from(p, from - k, zero());
        total = add(total, p);
        if constexpr (sizeof(Cell) == 2) store_bf16(weights[i] + k, p); else store(weights[i] + k, p);
      }
      mass[i] = mass[i] * shrink + sum(total);
      best[i] = peak;
    }
    const Cell* rows[Q];
    // A chunk may begin inside a block.
    for (int k = 0, here; k < count; k += here) {
      int64_t block = block_table[(chunk + k) / h.block_size];
      int offset = (chunk + k) % h.block_size;
      here = count - k < h.block_size - offset ? count - k : h.block_size - offset;
      const Cell* values = v_cache + (block * h.keys + head) * block_cells;
      for (int i = 0; i < Q; ++i) rows[i] = weights[i] + k;
      int d = 0;
      for (; d + 2 * kLanes <= h.size; d += 2 * kLanes) {
        F16 sums[Q][2];
        for (int i = 0; i < Q; ++i)
          sums[i][0] = load(q.results[i] + d), sums[i][1] = load(q.results[i] + d + kLanes);
        Cache<Cell>::template mix<Q, 2>(h, values, offset, here, d, rows, sums);
        for (int i = 0; i < Q; ++i)
          store(q.results[i] + d, sums[i][0]), store(q.results[i] + d + kLanes, sums[i][1]);
      }
      for (; d < h.size; d += kLanes) {
        F16 sums[Q][1];
        for (int i = 0; i < Q; ++i) sums[i][0] = load(q.results[i] + d);
        Cache<Cell>::template mix<Q, 1>(h, values, offset, here, d, rows, sums);
        for (int i = 0; i < Q; ++i) store(q.results[i] + d, sums[i][0]);
      }
    }
  }
  for (int i = 0; i < Q; ++i)
    for (int d = 0; d < h.size; d += kLanes)
      store(q.results[i] + d, div(load(q.results[i] + d), fill(mass[i])));
}

template <typename Cell, int Q = kMostQueries>
void attend_any(const Heads& h, const Cell* k_cache, const Cell* v_cache, int head,
                const int32_t* block_table, int window, const Queries& q) {
  if (q.count == Q) return attend<Cell, Q>(h, k_cache, v_cache, head, block_table, window, q);
  if constexpr (Q > 1) attend_any<Cell, Q - 1>(h, k_cache, v_cache, head, block_table, window, q);
}

}  // namespace aneuron
