// The paged cache: how the keys and values of a block lie, for float32, bfloat16 and 8 bits.
//
// A block of one head's keys is [D / 2][block_size][2] (float32: [D][block_size]; 8 bits:
// [D / 4][block_size][4]): 16 keys at a time are one vector, and a score needs no sum across lanes.
// Its values are [block_size / 2][D][2] (float32: [block_size][D]; 8 bits: [block_size / 4][D][4]).
// With 8 bits a float32 scale for each key, or value, follows: [block_size].
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
  const uint8_t* vectors[kMostQueries];  // as the cache's type has them
  int32_t positions[kMostQueries];       // ascending is not needed
  float* results[kMostQueries];          // [D] each
};

// The blocks of one row's context and one key head.
struct Paged {
  uint8_t* cache;
  const int32_t* table;
  int64_t block_bytes;  // of one head
  int32_t heads, head, block_size;
  uint8_t* block(int position) const {
    return cache + (static_cast<int64_t>(table[position / block_size]) * heads + head) * block_bytes;
  }
};

// Calls one(k, count, block, offset) for the runs of a chunk's keys that lie in one block; a chunk
// may begin inside of one.
template <typename One>
inline void each_run(const Paged& blocks, int chunk, int count, One&& one) {
  for (int k = 0, here; k < count; k += here) {
    int offset = (chunk + k) % blocks.block_size;
    here = count - k < blocks.block_size - offset ? count - k : blocks.block_size - offset;
    one(k, here, blocks.block(chunk + k), offset);
  }
}

template <typename Cell>
struct Cache;

// What a chunk's keys weigh, for up to kMostQueries queries; `sizes` of one unit, with 8 bits.
template <typename Cell>
struct Weights {
  alignas(64) Cell of[kMostQueries][kChunk];
  float sizes[kMostQueries];
};

// Adds a chunk's values, weighed, block by block: for cells whose sums are floats.
template <typename Cell, int Q, int W>
inline void mix_wide(const Heads& h, const Paged& values, int chunk, int count, int d,
                     const Weights<Cell>& weights, const Queries& q) {
  F16 sums[Q][W];
  ANEURON_UNROLL for (int i = 0; i < Q; ++i)
    for (int w = 0; w < W; ++w) sums[i][w] = load(q.results[i] + d + w * kLanes);
  each_run(values, chunk, count, [&](int k, int here, const uint8_t* block, int offset) {
    Cache<Cell>::template mix<Q, W>(h, block, offset, here, d, weights, k, sums);
  });
  ANEURON_UNROLL for (int i = 0; i < Q; ++i)
    for (int w = 0; w < W; ++w) store(q.results[i] + d + w * kLanes, sums[i][w]);
}

template <>
struct Cache<bf16> {
  static int64_t block_bytes(const Heads& h) { return int64_t{2} * h.block_size * h.size; }
  static int64_t query_bytes(const Heads& h) { return 2 * h.size; }
  static void expect_keys(const Heads& h, const uint8_t* block, int offset) {
    for (int d = 0; d < h.size; d += 2) prefetch(block + 2 * d * h.block_size + 4 * offset, 4 * kLanes);
  }
  static void expect_values(const Heads& h, const uint8_t* block, int offset) {
    prefetch(block + 2 * offset * h.size, 2 * kLanes * h.size);
  }
  static void put_query(const Heads& h, const float* from, uint8_t* to) {
    for (int d = 0; d < h.size; d += kLanes) store_bf16(reinterpret_cast<bf16*>(to) + d, load(from + d));
  }
  static void put_key(const Heads& h, const float* from, uint8_t* block, int offset) {
    bf16* to = reinterpret_cast<bf16*>(block) + 2 * offset;
    for (int d = 0; d < h.size; ++d) to[d / 2 * h.block_size * 2 + d % 2] = to_bf16(from[d]);
  }
  static void put_value(const Heads& h, const float* from, uint8_t* block, int offset) {
    bf16* to = reinterpret_cast<bf16*>(block) + offset / 2 * h.size * 2 + offset % 2;
    for (int d = 0; d < h.size; ++d) to[2 * d] = to_bf16(from[d]);
  }
  // Scores of Q queries with the 16 keys from `offset` on.
  template <int Q>
  static void score(const Heads& h, const uint8_t* block, int offset, const Queries& q, F16 (&sums)[Q]) {
    const bf16* keys = reinterpret_cast<const bf16*>(block) + 2 * offset;
    ANEURON_UNROLL for (int i = 0; i < Q; ++i) sums[i] = zero();
    for (int d = 0; d < h.size; d += 2)
      ANEURON_UNROLL for (int i = 0; i < Q; ++i)
        sums[i] = dot_bf16(sums[i], keys + d * h.block_size, reinterpret_cast<const bf16*>(q.vectors[i]) + d);
  }
  static void weigh(const Heads&, const Paged&, int, int padded, int, int, const float* p,
                    Weights<bf16>& weights, int i) {
    for (int k = 0; k < padded; k += kLanes) store_bf16(weights.of[i] + k, load(p + k));
  }
  // Adds the values of `count` keys from `offset` on, weighed; 16 * W numbers of each from d on.
  template <int Q, int W>
  static void mix(const Heads& h, const uint8_t* block, int offset, int count, int d,
                  const Weights<bf16>& weights, int first, F16 (&sums)[Q][W]) {
    const bf16* values = reinterpret_cast<const bf16*>(block);
    for (int k = 0; k < count; k += 2) {
      const bf16* pairs = values + ((offset + k) / 2 * h.size + d) * 2;
      bf16 last[2 * W * kLanes];
      if (k + 1 == count) {  // its neighbour was never written, and may hold anything
        for (int i = 0; i < W * kLanes; ++i) last[2 * i] = pairs[2 * i], last[2 * i + 1] = 0;
        pairs = last;
      }
      ANEURON_UNROLL for (int i = 0; i < Q; ++i)
        for (int w = 0; w < W; ++w)
          sums[i][w] = dot_bf16(sums[i][w], pairs + 2 * w * kLanes, weights.of[i] + first + k);
    }
  }
  template <int Q, int W>
  static void mix_chunk(const Heads& h, const Paged& values, int chunk, int count, int d,
                        const Weights<bf16>& weights, const Queries& q) {
    mix_wide<bf16, Q, W>(h, values, chunk, count, d, weights, q);
  }
};

template <>
struct Cache<float> {
  static int64_t block_bytes(const Heads& h) { return int64_t{4} * h.block_size * h.size; }
  static int64_t query_bytes(const Heads& h) { return 4 * h.size; }
  static void expect_keys(const Heads& h, const uint8_t* block, int offset) {
    for (int d = 0; d < h.size; ++d) prefetch(block + 4 * (d * h.block_size + offset), 4 * kLanes);
  }
  static void expect_values(const Heads& h, const uint8_t* block, int offset) {
    prefetch(block + 4 * offset * h.size, 4 * kLanes * h.size);
  }
  static void put_query(const Heads& h, const float* from, uint8_t* to) {
    std::memcpy(to, from, sizeof(float) * h.size);
  }
  static void put_key(const Heads& h, const float* from, uint8_t* block, int offset) {
    float* to = reinterpret_cast<float*>(block) + offset;
    for (int d = 0; d < h.size; ++d) to[d * h.block_size] = from[d];
  }
  static void put_value(const Heads& h, const float* from, uint8_t* block, int offset) {
    std::memcpy(reinterpret_cast<float*>(block) + offset * h.size, from, sizeof(float) * h.size);
  }
  template <int Q>
  static void score(const Heads& h, const uint8_t* block, int offset, const Queries& q, F16 (&sums)[Q]) {
    const float* keys = reinterpret_cast<const float*>(block) + offset;
    ANEURON_UNROLL for (int i = 0; i < Q; ++i) sums[i] = zero();
    for (int d = 0; d < h.size; ++d) {
      F16 column = load(keys + d * h.block_size);
      ANEURON_UNROLL for (int i = 0; i < Q; ++i)
        sums[i] = fma(column, fill(reinterpret_cast<const float*>(q.vectors[i])[d]), sums[i]);
    }
  }
  static void weigh(const Heads&, const Paged&, int, int padded, int, int, const float* p,
                    Weights<float>& weights, int i) {
    for (int k = 0; k < padded; k += kLanes) store(weights.of[i] + k, load(p + k));
  }
  template <int Q, int W>
  static void mix(const Heads& h, const uint8_t* block, int offset, int count, int d,
                  const Weights<float>& weights, int first, F16 (&sums)[Q][W]) {
    const float* values = reinterpret_cast<const float*>(block) + offset * h.size + d;
    for (int k = 0; k < count; ++k)
      ANEURON_UNROLL for (int i = 0; i < Q; ++i)
        for (int w = 0; w < W; ++w)
          sums[i][w] = fma(load(values + k * h.size + w * kLanes), fill(weights.of[i][first + k]), sums[i][w]);
  }
  template <int Q, int W>
  static void mix_chunk(const Heads& h, const Paged& values, int chunk, int count, int d,
                        const Weights<float>& weights, const Queries& q) {
    mix_wide<float, Q, W>(h, values, chunk, count, d, weights, q);
  }
};

// 8 bits. Keys are unsigned (value + 128), values signed; queries are quantised as keys are, and
// what a chunk's keys weigh, value scales included, in 255 steps of the most that one of them does.
template <>
struct Cache<uint8_t> {
  static int64_t block_bytes(const Heads& h) { return int64_t{h.block_size} * (h.size + 4); }
  static int64_t query_bytes(const Heads& h) { return h.size + 8; }
  static void expect_keys(const Heads& h, const uint8_t* block, int offset) {
    for (int d = 0; d < h.size; d += 4) prefetch(block + d * h.block_size + 4 * offset, 4 * kLanes);
    expect_scales(h, block, offset);
  }
  static void expect_values(const Heads& h, const uint8_t* block, int offset) {
    prefetch(block + offset * h.size, kLanes * h.size);
    expect_scales(h, block, offset);
  }
  static void expect_scales(const Heads& h, const uint8_t* block, int offset) {
    prefetch(block + h.block_size * h.size + 4 * offset, 4 * kLanes);
  }
  static float* scales(const Heads& h, uint8_t* block) {
    return reinterpret_cast<float*>(block + h.block_size * h.size);
  }
  static void put_query(const Heads& h, const float* from, uint8_t* to) {
    int8_t* bytes = reinterpret_cast<int8_t*>(to);
    float about[2] = {quantise(from, h.size, h.size, bytes), 0.0f};
    int32_t total = 0;
    for (int d = 0; d < h.size; ++d) total += bytes[d];
    about[1] = 128.0f * static_cast<float>(total);
    std::memcpy(to + h.size, about, sizeof about);
  }
  static void put_key(const Heads& h, const float* from, uint8_t* block, int offset) {
    int8_t bytes[kLanes];
    float scale = scale_of(from, h.size);
    for (int d = 0; d < h.size; d += kLanes) {
      quantise_lanes(from + d, scale, bytes);
      for (int i = 0; i < kLanes; ++i)
        block[((d + i) / 4 * h.block_size + offset) * 4 + i % 4] = static_cast<uint8_t>(bytes[i] + 128);
    }
    scales(h, block)[offset] = scale;
  }
  static void put_value(const Heads& h, const float* from, uint8_t* block, int offset) {
    int8_t bytes[kLanes];
    float scale = scale_of(from, h.size);
    for (int d = 0; d < h.size; d += kLanes) {
      quantise_lanes(from + d, scale, bytes);
      for (int i = 0; i < kLanes; ++i)
        block[(offset / 4 * h.size + d + i) * 4 + offset % 4] = static_cast<uint8_t>(bytes[i]);
    }
    scales(h, block)[offset] = scale;
  }
  template <int Q>
  static void score(const Heads& h, uint8_t* block, int offset, const Queries& q, F16 (&sums)[Q]) {
    I16 totals[Q];
    ANEURON_UNROLL for (int i = 0; i < Q; ++i) totals[i] = zero_int();
    for (int d = 0; d < h.size; d += 4) {
      auto keys = load_bytes(block + d * h.block_size + 4 * offset);
      ANEURON_UNROLL for (int i = 0; i < Q; ++i)
        totals[i] = dot_u8(totals[i], keys, reinterpret_cast<const int8_t*>(q.vectors[i]) + d);
    }
    F16 units = load(scales(h, block) + offset);
    ANEURON_UNROLL for (int i = 0; i < Q; ++i) {
      float about[2];
      std::memcpy(about, q.vectors[i] + h.size, sizeof about);
      sums[i] = mul(mul(sub(to_floats(totals[i]), fill(about[1])), fill(about[0])), units);
    }
  }
  // Keys from..to-1 are the query's: the scales of others may be anything.
  static void weigh(const Heads& h, const Paged& values, int chunk, int padded, int from, int to,
                    float* p, Weights<uint8_t>& weights, int i) {
    F16 most = zero(), bad = zero();
    for (int k = 0; k < padded; k += kLanes) {
      int at = chunk + k;
      F16 scaled = mul(load(p + k), load(scales(h, values.block(at)) + at % h.block_size));
      scaled = keep_first(scaled, to - k < 0 ? 0 : to - k, zero());
      if (from > k) scaled = keep_from(scaled, from - k, zero());
      store(p + k, scaled);
      most = max(most, scaled);
      bad = fma(scaled, zero(), bad);
    }
    float peak = top(most);
    bool is_sound = sum(bad) == 0.0f;
    F16 factor = fill(is_sound && peak > 1e-30f ? 255.0f / peak : 0.0f);
    for (int k = 0; k < padded; k += kLanes) store_rounded(weights.of[i] + k, mul(load(p + k), factor));
    weights.sizes[i] = is_sound ? peak / 255.0f : NAN;
  }
  template <int Q, int W>
  static void mix_chunk(const Heads& h, const Paged& values, int chunk, int count, int d,
                        const Weights<uint8_t>& weights, const Queries& q) {
    I16 sums[Q][W];
    ANEURON_UNROLL for (int i = 0; i < Q; ++i)
      for (int w = 0; w < W; ++w) sums[i][w] = zero_int();
    each_run(values, chunk, count, [&](int k, int here, const uint8_t* block, int offset) {
      for (int j = 0; j < here; j += 4) {  // keys behind the last weigh 0
        const uint8_t* groups = block + ((offset + j) / 4 * h.size + d) * 4;
        ANEURON_UNROLL for (int i = 0; i < Q; ++i)
          for (int w = 0; w < W; ++w)
            sums[i][w] = dot_s8(sums[i][w], weights.of[i] + k + j, groups + 4 * w * kLanes);
      }
    });
    ANEURON_UNROLL for (int i = 0; i < Q; ++i)
      for (int w = 0; w < W; ++w) {
        float* to = q.results[i] + d + w * kLanes;
        store(to, fma(to_floats(sums[i][w]), fill(weights.sizes[i]), load(to)));
      }
  }
};

}  // namespace aneuron
