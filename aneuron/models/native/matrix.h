// Products of packed weights with rows of activations: float32, bfloat16, 8 and 4 bits.
//
// A matrix [N, K] is packed in panels of 32 columns of its transpose, so that one pass over a panel
// serves up to kMostRows rows. Every row has accumulators of its own, which run over K in order
// whatever the other rows are: its result does not depend on them.
#pragma once

#include "simd.h"

namespace aneuron {

constexpr int kPanel = 2 * kLanes;
constexpr int kMostRows = 12;

#define ANEURON_UNROLL _Pragma("GCC unroll 16")

enum class Kind : int32_t { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2, kInt4 = 3 };

// One matrix as Python hands it over; the layout of `data` depends on the kind:
//   float32   [panels][K][32]
//   bfloat16  [panels][K / 2][32][2]
//   int8      [panels][K / 4][32][4], unsigned: value + 128
//   int4      [panels][K / 8][32][4] bytes: low nibbles are four values, high ones the next four
// Quantised: value = scale * (stored - zero), of each column and `group` values of K.
struct Matrix {
  int32_t kind;
  int32_t columns;  // N as it is; padded to whole panels in memory
  int32_t depth;    // K, padded to a multiple of 8 (of `group` where quantised)
  int32_t group;    // of K, with a scale of its own
  const void* data;
  const void* scales;  // bfloat16 [panels][K / group][32] of int4; float of int8
  const void* zeros;   // bfloat16, likewise: scale * zero; int4 alone
  const float* bias;   // [panels * 32], or null
};

// Rows of activations in the form that a kind of matrix multiplies; one buffer for all kinds.
struct Rows {
  int32_t count;
  int32_t depth;        // of each row in memory
  int32_t group;        // values with a scale of their own
  void* data;           // float, bfloat16 or int8 [count][depth]
  float* scales;        // [count][depth / group]
  float* sums;          // [count][depth / group], of the quantised values
};

// Returns the size of one of 127 steps for these floats; NaN if one is NaN or infinite.
inline float scale_of(const float* from, int length) {
  F16 most = zero(), bad = zero();  // NaN and infinity times 0 are NaN, which a maximum drops
  int k = 0;
  for (; k + kLanes <= length; k += kLanes) {
    most = max(most, magnitude(load(from + k)));
    bad = fma(load(from + k), zero(), bad);
  }
  float peak = top(most), spoilt = sum(bad);
  for (; k < length; ++k) {
    peak = std::fabs(from[k]) > peak ? std::fabs(from[k]) : peak;
    spoilt += from[k] * 0.0f;
  }
  return spoilt == 0.0f ? peak / 127.0f : NAN;
}

inline float inverse_of(float scale) { return scale > 1e-32f ? 1.0f / scale : 0.0f; }

inline void quantise_lanes(const float* from, float scale, int8_t* out) {
  store_rounded(out, mul(load(from), fill(inverse_of(scale))));
}

// Quantises floats to -127..127, zeros behind them; returns their scale, NaN if one is spoilt.
inline float quantise(const float* from, int length, int padded, int8_t* out) {
  float scale = scale_of(from, length), inverse = inverse_of(scale);
  int k = 0;
  for (; k + kLanes <= length; k += kLanes) quantise_lanes(from + k, scale, out + k);
  for (; k < length; ++k)
    out[k] = scale == scale ? static_cast<int8_t>(std::nearbyint(from[k] * inverse)) : 0;
  for (; k < padded; ++k) out[k] = 0;
  return scale;
}

// Converts one row of floats into the form for a kind.
inline void convert_row(Kind kind, const float* from, int length, const Rows& to, int row) {
  int depth = to.depth;
  if (kind == Kind::kFloat32) {
    float* out = static_cast<float*>(to.data) + static_cast<int64_t>(row) * depth;
    std::memcpy(out, from, sizeof(float) * length);
    std::memset(out + length, 0, sizeof(float) * (depth - length));
    return;
  }
  if (kind == Kind::kBFloat16) {
    bf16* out = static_cast<bf16*>(to.data) + static_cast<int64_t>(row) * depth;
    int k = 0;
    for (; k + kLanes <= length; k += kLanes) store_bf16(out + k, load(from + k));
    for (; k < length; ++k) out[k] = to_bf16(from[k]);
    for (; k < depth; ++k) out[k] = 0;
    return;
  }
  int8_t* out = static_cast<int8_t*>(to.data) + static_cast<int64_t>(row) * depth;
  int groups = depth / to.group;
  for (int g = 0; g < groups; ++g) {
    int begin = g * to.group, left = length - begin < to.group ? length - begin : to.group;
    int64_t at = static_cast<int64_t>(row) * groups + g;
    to.scales[at] = quantise(from + begin, left < 0 ? 0 : left, to.group, out + begin);
    int32_t total = 0;
    for (int k = begin; k < begin + to.group; ++k) total += out[k];
    to.sums[at] = static_cast<float>(total);
  }
}

// ── one panel, R rows ──────────────────────────────────────────────────────────────────────

template <int R>
inline void panel_float32(const Matrix& w, int panel, const Rows& x, int row, F16 (&out)[R][2]) {
  const float* columns = static_cast<const float*>(w.data) + static_cast<int64_t>(panel) * w.depth * kPanel;
  const float* rows = static_cast<const float*>(x.data) + static_cast<int64_t>(row) * x.depth;
  F16 sums[R][2];
  ANEURON_UNROLL for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = zero();
  for (int k = 0; k < w.depth; ++k) {
    F16 left = load(columns + k * kPanel), right = load(columns + k * kPanel + kLanes);
    ANEURON_UNROLL for (int r = 0; r < R; ++r) {
      F16 value = fill(rows[static_cast<int64_t>(r) * x.depth + k]);
      sums[r][0] = fma(left, value, sums[r][0]);
      sums[r][1] = fma(right, value, sums[r][1]);
    }
  }
  ANEURON_UNROLL for (int r = 0; r < R; ++r) out[r][0] = sums[r][0], out[r][1] = sums[r][1];
}

template <int R>
inline void panel_bfloat16(const Matrix& w, int panel, const Rows& x, int row, F16 (&out)[R][2]) {
  const bf16* columns = static_cast<const bf16*>(w.data) + static_cast<int64_t>(panel) * w.depth * kPanel;
  const bf16* rows = static_cast<const bf16*>(x.data) + static_cast<int64_t>(row) * x.depth;
  F16 sums[R][2];
  ANEURON_UNROLL for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = zero();
  for (int k = 0; k < w.depth; k += 2) {
    const bf16* left = columns + k * kPanel;
    const bf16* right = left + 2 * kLanes;
    ANEURON_UNROLL for (int r = 0; r < R; ++r) {
      const bf16* pair = rows + static_cast<int64_t>(r) * x.depth + k;
      sums[r][0] = dot_bf16(sums[r][0], left, pair);
      sums[r][1] = dot_bf16(sums[r][1], right, pair);
    }
  }
  ANEURON_UNROLL for (int r = 0; r < R; ++r) out[r][0] = sums[r][0], out[r][1] = sums[r][1];
}

// 8 bits: integer sums over a group, then scaled. A sum is exact, so only groups have an order.
template <int R>
inline void panel_int8(const Matrix& w, int panel, const Rows& x, int row, F16 (&out)[R][2]) {
  int groups = w.depth / w.group;
  const uint8_t* bytes = static_cast<const uint8_t*>(w.data) + static_cast<int64_t>(panel) * w.depth * kPanel;
  const float* scales = static_cast<const float*>(w.scales) + static_cast<int64_t>(panel) * groups * kPanel;
  const int8_t* rows = static_cast<const int8_t*>(x.data) + static_cast<int64_t>(row) * x.depth;
  alignas(64) float held[R][kPanel] = {};  // in memory: registers are for the sums of a group
  for (int g = 0; g < groups; ++g) {
    I16 sums[R][2];
    ANEURON_UNROLL for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = zero_int();
    for (int k = g * w.group; k < (g + 1) * w.group; k += 4) {
      auto left = load_bytes(bytes + k * kPanel), right = load_bytes(bytes + k * kPanel + 4 * kLanes);
      ANEURON_UNROLL for (int r = 0; r < R; ++r) {
        const int8_t* four = rows + static_cast<int64_t>(r) * x.depth + k;
        sums[r][0] = dot_u8(sums[r][0], left, four);
        sums[r][1] = dot_u8(sums[r][1], right, four);
      }
    }
    F16 left = load(scales + g * kPanel), right = load(scales + g * kPanel + kLanes);
    ANEURON_UNROLL for (int r = 0; r < R; ++r) {
      int64_t at = static_cast<int64_t>(row + r) * groups + g;
      F16 offset = fill(128.0f * x.sums[at]), factor = fill(x.scales[at]);
      F16 first = mul(sub(to_floats(sums[r][0]), offset), left);
      F16 second = mul(sub(to_floats(sums[r][1]), offset), right);
      store(held[r], fma(first, factor, load(held[r])));
      store(held[r] + kLanes, fma(second, factor, load(held[r] + kLanes)));
    }
  }
  for (int r = 0; r < R; ++r) out[r][0] = load(held[r]), out[r][1] = load(held[r] + kLanes);
}

template <int R>
inline void panel_int4(const Matrix& w, int panel, const Rows& x, int row, F16 (&out)[R][2]) {
  int groups = w.depth / w.group;
  int64_t first = static_cast<int64_t>(panel) * groups * kPanel;
  const uint8_t* bytes = static_cast<const uint8_t*>(w.data) + static_cast<int64_t>(panel) * w.depth * kPanel / 2;
  const bf16* scales = static_cast<const bf16*>(w.scales) + first;
  const bf16* zeros = static_cast<const bf16*>(w.zeros) + first;
  const int8_t* rows = static_cast<const int8_t*>(x.data) + static_cast<int64_t>(row) * x.depth;
  alignas(64) float held[R][kPanel] = {};  // in memory: registers are for the sums of a group
  for (int g = 0; g < groups; ++g) {
    I16 sums[R][2];
    ANEURON_UNROLL for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = zero_int();
    for (int k = g * w.group; k < (g + 1) * w.group; k += 8) {
      auto left = load_bytes(bytes + k * kLanes), right = load_bytes(bytes + k * kLanes + 4 * kLanes);
      auto left_low = low_nibbles(left), right_low = low_nibbles(right);
      auto left_high = high_nibbles(left), right_high = high_nibbles(right);
      ANEURON_UNROLL for (int r = 0; r < R; ++r) {
        const int8_t* eight = rows + static_cast<int64_t>(r) * x.depth + k;
        sums[r][0] = dot_u8(dot_u8(sums[r][0], left_low, eight), left_high, eight + 4);
        sums[r][1] = dot_u8(dot_u8(sums[r][1], right_low, eight), right_high, eight + 4);
      }
    }
    for (int half = 0; half < 2; ++half) {
      F16 scale = load_bf16(scales + g * kPanel + half * kLanes);
      F16 zero_point = load_bf16(zeros + g * kPanel + half * kLanes);
      ANEURON_UNROLL for (int r = 0; r < R; ++r) {
        int64_t at = static_cast<int64_t>(row + r) * groups + g;
        F16 exact = sub(mul(to_floats(sums[r][half]), scale), mul(zero_point, fill(x.sums[at])));
        float* place = held[r] + half * kLanes;
        store(place, fma(exact, fill(x.scales[at]), load(place)));
      }
    }
  }
  for (int r = 0; r < R; ++r) out[r][0] = load(held[r]), out[r][1] = load(held[r] + kLanes);
}

template <int R, typename Give>
inline void panel_rows(const Matrix& w, int panel, const Rows& x, int row, Give& give) {
  F16 out[R][2];
  switch (static_cast<Kind>(w.kind)) {
    case Kind::kFloat32: panel_float32<R>(w, panel, x, row, out); break;
    case Kind::kBFloat16: panel_bfloat16<R>(w, panel, x, row, out); break;
    case Kind::kInt8: panel_int8<R>(w, panel, x, row, out); break;
    case Kind::kInt4: panel_int4<R>(w, panel, x, row, out); break;
  }
  ANEURON_UNROLL for (int r = 0; r < R; ++r) {
    if (w.bias != nullptr) {
      out[r][0] = add(out[r][0], load(w.bias + panel * kPanel));
      out[r][1] = add(out[r][1], load(w.bias + panel * kPanel + kLanes));
    }
    give(row + r, panel, out[r][0], out[r][1]);
  }
}

// Multiplies all rows with one panel; `give(row, panel, left, right)` takes the 32 results of each.
template <typename Give>
inline void multiply_panel(const Matrix& w, int panel, const Rows& x, Give& give) {
  int row = 0;
  for (; row + kMostRows <= x.count; row += kMostRows) panel_rows<kMostRows>(w, panel, x, row, give);
  switch (x.count - row) {
    case 1: panel_rows<1>(w, panel, x, row, give); break;
    case 2: panel_rows<2>(w, panel, x, row, give); break;
    case 3: panel_rows<3>(w, panel, x, row, give); break;
    case 4: panel_rows<4>(w, panel, x, row, give); break;
    case 5: panel_rows<5>(w, panel, x, row, give); break;
    case 6: panel_rows<6>(w, panel, x, row, give); break;
    case 7: panel_rows<7>(w, panel, x, row, give); break;
    case 8: panel_rows<8>(w, panel, x, row, give); break;
    case 9: panel_rows<9>(w, panel, x, row, give); break;
    case 10: panel_rows<10>(w, panel, x, row, give); break;
    case 11: panel_rows<11>(w, panel, x, row, give); break;
    default: break;
  }
}

}  // namespace aneuron
