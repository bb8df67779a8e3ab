// Vectors of 16 floats: what all kernels are written in. AVX-512 with its bfloat16 and 8-bit dot
// products where the compiler's target has them; elsewhere the same in plain loops, which give the
// same kind of result and which the compiler may vectorise.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && \
    defined(__AVX512DQ__) && defined(__AVX512VNNI__) && defined(__AVX512BF16__)
#define ANEURON_AVX512 1
#include <immintrin.h>
#else
#define ANEURON_AVX512 0
#endif

namespace aneuron {

constexpr int kLanes = 16;
constexpr int kLine = 64;  // bytes of a cache line

// Asks for memory that will be read soon, into the second cache: more of it can be on its way there.
// In assembler: gcc drops calls of a function that does nothing but ask.
inline void prefetch(const uint8_t* from, int64_t bytes) {
#if ANEURON_AVX512
  for (int64_t i = 0; i < bytes; i += kLine) __asm__ volatile("prefetcht1 %0" : : "m"(from[i]));
#else
  (void)from, (void)bytes;
#endif
}

// A bfloat16 is the upper half of a float.
using bf16 = uint16_t;

inline float to_float(bf16 value) {
  uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

inline bf16 to_bf16(float value) {  // round to nearest even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<bf16>((bits >> 16) | 0x40);
  return static_cast<bf16>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

#if ANEURON_AVX512

using F16 = __m512;   // 16 floats
using I16 = __m512i;  // 16 int32, or 64 bytes

inline F16 zero() { return _mm512_setzero_ps(); }
inline F16 fill(float x) { return _mm512_set1_ps(x); }
inline F16 load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, F16 a) { _mm512_storeu_ps(p, a); }
inline F16 add(F16 a, F16 b) { return _mm512_add_ps(a, b); }
inline F16 sub(F16 a, F16 b) { return _mm512_sub_ps(a, b); }
inline F16 mul(F16 a, F16 b) { return _mm512_mul_ps(a, b); }
inline F16 div(F16 a, F16 b) { return _mm512_div_ps(a, b); }
inline F16 fma(F16 a, F16 b, F16 c) { return _mm512_fmadd_ps(a, b, c); }
inline F16 max(F16 a, F16 b) { return _mm512_max_ps(a, b); }
inline float sum(F16 a) { return _mm512_reduce_add_ps(a); }
inline float top(F16 a) { return _mm512_reduce_max_ps(a); }
inline F16 magnitude(F16 a) { return _mm512_abs_ps(a); }
// Lanes from first on get `other`.
inline F16 keep_first(F16 a, int first, F16 other) {
  __mmask16 keep = first >= kLanes ? 0xffff : static_cast<__mmask16>((1u << first) - 1);
  return _mm512_mask_blend_ps(keep, other, a);
}
// Lanes before first get `other`.
inline F16 keep_from(F16 a, int first, F16 other) {
  __mmask16 drop = first >= kLanes ? 0xffff : static_cast<__mmask16>((1u << first) - 1);
  return _mm512_mask_blend_ps(drop, a, other);
}
// Lanes where a < 0 get `below`, the others, NaN among them, `other`.
inline F16 where_negative(F16 a, F16 below, F16 other) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, zero(), _CMP_LT_OQ), other, below);
}
// 2^x for x <= 0 and near it, to 2 units in the last place; 2^-127 below that; NaN stays NaN.
inline F16 exp2(F16 x) {
  __m512 clamped = _mm512_max_ps(_mm512_set1_ps(-127.0f), x);
  __m512 whole = _mm512_roundscale_ps(clamped, 0);
  __m512 part = _mm512_sub_ps(clamped, whole);
  __m512 y = _mm512_set1_ps(1.535336188e-4f);
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(1.339887440e-3f));
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(9.618437357e-3f));
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(5.550332548e-2f));
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(2.402264791e-1f));
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(6.931472028e-1f));
  y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(y, whole);
}
inline F16 load_bf16(const bf16* p) {
  __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
inline void store_bf16(bf16* p, F16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(a));
}
// c + a.even * b.even + a.odd * b.odd over 16 pairs of bfloat16 in memory; b is one pair. In
// assembler, because the compiler keeps copies of accumulators and spills them (2 times as slow).
inline F16 dot_bf16(F16 c, const bf16* a, const bf16* b) {
  uint32_t pair;
  std::memcpy(&pair, b, 4);
  __m512i left = _mm512_loadu_si512(a), right = _mm512_set1_epi32(pair);
  __asm__("vdpbf16ps %2, %1, %0" : "+v"(c) : "v"(left), "v"(right));
  return c;
}
inline I16 zero_int() { return _mm512_setzero_si512(); }
// c + sum of four products, over 16 groups of four: unsigned a, one group of signed b in memory.
inline I16 dot_u8(I16 c, I16 a, const int8_t* b) {
  uint32_t group;
  std::memcpy(&group, b, 4);
  I16 right = _mm512_set1_epi32(group);
  __asm__("vpdpbusd %2, %1, %0" : "+v"(c) : "v"(a), "v"(right));
  return c;
}
// The same with one group of unsigned a, over 16 groups of signed b, both in memory.
inline I16 dot_s8(I16 c, const uint8_t* a, const uint8_t* b) {
  uint32_t group;
  std::memcpy(&group, a, 4);
  I16 left = _mm512_set1_epi32(group), right = _mm512_loadu_si512(b);
  __asm__("vpdpbusd %2, %1, %0" : "+v"(c) : "v"(left), "v"(right));
  return c;
}
inline I16 load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline I16 low_nibbles(I16 a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
inline I16 high_nibbles(I16 a) {
  return _mm512_and_si512(_mm512_srli_epi16(a, 4), _mm512_set1_epi8(15));
}
inline F16 to_floats(I16 a) { return _mm512_cvtepi32_ps(a); }
inline void store_rounded(int8_t* p, F16 a) {  // within -127..127
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a)));
}
inline void store_rounded(uint8_t* p, F16 a) {  // within 0..255
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtusepi32_epi8(_mm512_cvtps_epi32(a)));
}
inline void pause() { _mm_pause(); }

#else

struct F16 {
  float v[kLanes];
};
struct I16 {
  int32_t v[kLanes];
};

#define ANEURON_EACH(expression)                  \
  F16 r;                                          \
  for (int i = 0; i < kLanes; ++i) r.v[i] = (expression); \
  return r

inline F16 zero() { ANEURON_EACH(0.0f); }
inline F16 fill(float x) { ANEURON_EACH(x); }
inline F16 load(const float* p) { ANEURON_EACH(p[i]); }
inline void store(float* p, F16 a) { std::memcpy(p, a.v, sizeof a.v); }
inline F16 add(F16 a, F16 b) { ANEURON_EACH(a.v[i] + b.v[i]); }
inline F16 sub(F16 a, F16 b) { ANEURON_EACH(a.v[i] - b.v[i]); }
inline F16 mul(F16 a, F16 b) { ANEURON_EACH(a.v[i] * b.v[i]); }
inline F16 div(F16 a, F16 b) { ANEURON_EACH(a.v[i] / b.v[i]); }
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
inline F16 fma(F16 a, F16 b, F16 c) { ANEURON_EACH(__builtin_fmaf(a.v[i], b.v[i], c.v[i])); }
#else
inline F16 fma(F16 a, F16 b, F16 c) { ANEURON_EACH(a.v[i] * b.v[i] + c.v[i]); }
#endif
inline F16 max(F16 a, F16 b) { ANEURON_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline F16 magnitude(F16 a) { ANEURON_EACH(std::fabs(a.v[i])); }
inline F16 keep_first(F16 a, int first, F16 other) { ANEURON_EACH(i < first ? a.v[i] : other.v[i]); }
inline F16 keep_from(F16 a, int first, F16 other) { ANEURON_EACH(i < first ? other.v[i] : a.v[i]); }
inline F16 where_negative(F16 a, F16 below, F16 other) { ANEURON_EACH(a.v[i] < 0.0f ? below.v[i] : other.v[i]); }
inline F16 exp2(F16 x) { ANEURON_EACH(x.v[i] < -126.0f ? 0.0f : std::exp2(x.v[i])); }
inline F16 load_bf16(const bf16* p) { ANEURON_EACH(to_float(p[i])); }
inline F16 dot_bf16(F16 c, const bf16* a, const bf16* b) {
  float even = to_float(b[0]), odd = to_float(b[1]);
  ANEURON_EACH(c.v[i] + to_float(a[2 * i]) * even + to_float(a[2 * i + 1]) * odd);
}
inline float sum(F16 a) {
  float total = 0.0f;
  for (float x : a.v) total += x;
  return total;
}
inline float top(F16 a) {
  float most = a.v[0];
  for (float x : a.v) most = x > most ? x : most;
  return most;
}
inline void store_bf16(bf16* p, F16 a) {
  for (int i = 0; i < kLanes; ++i) p[i] = to_bf16(a.v[i]);
}
inline I16 zero_int() { return I16{}; }
struct Bytes {
  uint8_t v[4 * kLanes];
};
inline I16 dot_u8(I16 c, const Bytes& a, const int8_t* b) {
  for (int i = 0; i < kLanes; ++i)
    for (int j = 0; j < 4; ++j) c.v[i] += static_cast<int32_t>(a.v[4 * i + j]) * b[j];
  return c;
}
inline I16 dot_s8(I16 c, const uint8_t* a, const uint8_t* b) {
  for (int i = 0; i < kLanes; ++i)
    for (int j = 0; j < 4; ++j) c.v[i] += static_cast<int32_t>(a[j]) * static_cast<int8_t>(b[4 * i + j]);
  return c;
}
inline Bytes load_bytes(const uint8_t* p) {
  Bytes r;
  std::memcpy(r.v, p, sizeof r.v);
  return r;
}
inline Bytes low_nibbles(Bytes a) {
  for (uint8_t& x : a.v) x &= 15;
  return a;
}
inline Bytes high_nibbles(Bytes a) {
  for (uint8_t& x : a.v) x >>= 4;
  return a;
}
inline F16 to_floats(I16 a) { ANEURON_EACH(static_cast<float>(a.v[i])); }
inline void store_rounded(int8_t* p, F16 a) {
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int8_t>(std::nearbyint(a.v[i]));
}
inline void store_rounded(uint8_t* p, F16 a) {
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<uint8_t>(std::nearbyint(a.v[i]));
}
inline void pause() {}
#undef ANEURON_EACH

#endif

}  // namespace aneuron
