// One step of a decoder: packed tokens in, logits out, keys and values in the paged cache.
//
// The threads of the pool go through the same stages, which share out rows, panels or heads, and
// wait behind each until it is done. Called from Python through ctypes, which lets the GIL go for
// the whole step.

#include "attention.h"
#include "pool.h"

namespace aneuron {

enum CacheKind : int32_t { kCacheFloat32 = 0, kCacheBFloat16 = 1, kCacheInt8 = 2 };

struct Layer {
  Matrix qkv, out, gate_up, down;  // gate_up: each panel has 16 columns of either
  const float* input_norm;
  const float* post_norm;
  const float* qk_norm;  // [(H + Hkv) * D], or null
  void* k_cache;
  void* v_cache;
  int32_t window;  // 0: the whole context
  int32_t use_rope;
};

struct Decoder {
  int32_t num_layers, hidden_size, intermediate_size, vocab_size;
  Heads heads;
  int32_t is_bf16;  // of the embedding
  int32_t cache;    // one of CacheKind
  float eps, rope_factor;
  const Layer* layers;
  const float* inv_freq;  // [D / 2]
  const float* final_norm;
  const void* embedding;  // [vocab_size][hidden_size]
  Matrix head;
};

struct Step {
  int32_t num_tokens, num_rows, num_samples, table_width;
  const int32_t* input_ids;
  const int32_t* positions;
  const int32_t* slot_mapping;
  const int32_t* query_start;  // [rows + 1]
  const int32_t* block_table;  // [rows][table_width]
  const int32_t* logits_indices;
  float* hidden;  // [tokens][hidden_size]: what the last layer gives
  float* logits;  // [samples][vocab_size]
  uint8_t* scratch;
};

struct Tile {  // of attention: some tokens of a row, one key head
  int32_t row, head, first_query, token, count;
};

class Arena {
 public:
  explicit Arena(uint8_t* memory) : at_(memory) {}
  template <typename T>
  T* take(int64_t count) {
    T* result = reinterpret_cast<T*>(at_);
    at_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return result;
  }
  int64_t used(const uint8_t* from) const { return at_ - from; }

 private:
  uint8_t* at_;
};

inline int padded(int n) { return (n + kPanel - 1) / kPanel * kPanel; }

// Buffers of one step; asked for their size with null memory.
struct Buffers {
  Rows x;
  float *qkv, *mixed, *act, *angles;
  void* queries;
  Tile* tiles;
  Share* shares;
  int64_t size;

  Buffers(const Decoder& m, int tokens, int rows, uint8_t* memory) {
    Arena arena(memory);
    const Heads& h = m.heads;
    int widest = h.queries * h.size > m.hidden_size ? h.queries * h.size : m.hidden_size;
    widest = padded(m.intermediate_size > widest ? m.intermediate_size : widest) + 64;
    x = Rows{};
    x.data = arena.take<float>(static_cast<int64_t>(tokens) * widest);
    x.scales = arena.take<float>(static_cast<int64_t>(tokens) * (widest / 8));
    x.sums = arena.take<float>(static_cast<int64_t>(tokens) * (widest / 8));
    qkv = arena.take<float>(static_cast<int64_t>(tokens) * padded((h.queries + 2 * h.keys) * h.size));
    mixed = arena.take<float>(static_cast<int64_t>(tokens) * h.queries * h.size);
    act = arena.take<float>(static_cast<int64_t>(tokens) * padded(m.intermediate_size));
    angles = arena.take<float>(static_cast<int64_t>(tokens) * h.size);
    queries = arena.take<float>(static_cast<int64_t>(tokens) * h.queries * h.size);
    tiles = arena.take<Tile>((static_cast<int64_t>(tokens) + rows) * h.queries);
    shares = arena.take<Share>(static_cast<int64_t>(m.num_layers) * 10 + 8);
    size = arena.used(memory);
  }
};

inline int run_length(int total, int threads) {  // a few runs for each thread
  int run = total / (threads * 8);
  return run < 1 ? 1 : run;
}

class Work {
 public:
  static int most_rows(const Step& s) { return s.num_tokens > s.num_samples ? s.num_tokens : s.num_samples; }

  Work(const Decoder& model, const Step& step, Pool& pool)
      : m_(model), s_(step), pool_(pool), b_(model, most_rows(step), step.num_rows, step.scratch) {
    for (int i = 0; i < m_.num_layers * 10 + 8; ++i) b_.shares[i].reset();
    const Heads& h = m_.heads;
    int group = h.queries / h.keys;
    int tokens_a_tile = kMostQueries / group > 0 ? kMostQueries / group : 1;
    for (int row = 0; row < s_.num_rows; ++row)
      for (int t = s_.query_start[row]; t < s_.query_start[row + 1]; t += tokens_a_tile) {
        int left = s_.query_start[row + 1] - t;
        int count = left < tokens_a_tile ? left : tokens_a_tile;
        for (int head = 0; head < h.keys; ++head)
          for (int first = 0; first < group; first += kMostQueries)
            b_.tiles[num_tiles_++] = {row, head, first, t, count};
      }
  }

  void operator()(int) {
    int stage = 0;
    share(stage, s_.num_tokens, [&](int t) { begin_token(t); });
    for (int i = 0; i < m_.num_layers; ++i) layer(m_.layers[i], stage);
    logits(stage);
  }

 private:
  template <typename Do>
  void share(int& stage, int total, Do&& one) {
    Share& share = b_.shares[stage++];
    int begin, end, mine = 0, run = run_length(total, pool_.num_threads());
    for (; share.take(total, run, begin, end); mine += end - begin)
      for (int i = begin; i < end; ++i) one(i);
    pool_.meet(share, mine, total);
  }

  template <typename Give>
  void multiply(int& stage, const Matrix& w, int rows, Give&& give) {
    Rows x = rows_for(w, rows);
    share(stage, padded(w.columns) / kPanel, [&](int panel) { multiply_panel(w, panel, x, give); });
  }

  Rows rows_for(const Matrix& w, int rows) const {
    Rows x = b_.x;
    x.count = rows, x.depth = w.depth, x.group = w.group;
    return x;
  }

  void begin_token(int t) {
    int64_t id = s_.input_ids[t];
    float* to = s_.hidden + static_cast<int64_t>(t) * m_.hidden_size;
    if (m_.is_bf16) {
      const bf16* from = static_cast<const bf16*>(m_.embedding) + id * m_.hidden_size;
      for (int i = 0; i < m_.hidden_size; ++i) to[i] = to_float(from[i]);
    } else {
      const float* from = static_cast<const float*>(m_.embedding) + id * m_.hidden_size;
      std::memcpy(to, from, sizeof(float) * m_.hidden_size);
    }
    int half = m_.heads.size / 2;
    float* angles = b_.angles + static_cast<int64_t>(t) * m_.heads.size;
    for (int d = 0; d < half; ++d) {
      float angle = m_.inv_freq[d] * static_cast<float>(s_.positions[t]);
      angles[d] = std::cos(angle) * m_.rope_factor;
      angles[half + d] = std::sin(angle) * m_.rope_factor;
    }
  }

  void normalise(const float* from, const float* weight, int size, float* to) const {
    float squares = 0.0f;
    int i = 0;
    F16 total = zero();
    for (; i + kLanes <= size; i += kLanes) total = fma(load(from + i), load(from + i), total);
    squares = sum(total);
    for (; i < size; ++i) squares += from[i] * from[i];
    float factor = 1.0f / std::sqrt(squares / static_cast<float>(size) + m_.eps);
    for (i = 0; i + kLanes <= size; i += kLanes)
      store(to + i, mul(mul(load(from + i), fill(factor)), load(weight + i)));
    for (; i < size; ++i) to[i] = from[i] * factor * weight[i];
  }

  void norm_row(const Matrix& next, const float* weight, const float* from, int row) {
    thread_local std::vector<float> normed;
    normed.resize(m_.hidden_size + kLanes);
    normalise(from, weight, m_.hidden_size, normed.data());
    convert_row(static_cast<Kind>(next.kind), normed.data(), m_.hidden_size, rows_for(next, 0), row);
  }

  void layer(const Layer& l, int& stage) {
    const Heads& h = m_.heads;
    int tokens = s_.num_tokens, hidden = m_.hidden_size, width = padded((h.queries + 2 * h.keys) * h.size);
    auto hidden_of = [&](int t) { return s_.hidden + static_cast<int64_t>(t) * hidden; };
    auto add_to_hidden = [&](int row, int panel, F16 left, F16 right) {
      add_panel(hidden_of(row), panel, hidden, left, right);
    };
    share(stage, tokens, [&](int t) { norm_row(l.qkv, l.input_norm, hidden_of(t), t); });
    multiply(stage, l.qkv, tokens, [&](int row, int panel, F16 left, F16 right) {
      float* to = b_.qkv + static_cast<int64_t>(row) * width + panel * kPanel;
      store(to, left), store(to + kLanes, right);
    });
    switch (m_.cache) {
      case kCacheInt8: attention<uint8_t>(l, stage, width); break;
      case kCacheBFloat16: attention<bf16>(l, stage, width); break;
      default: attention<float>(l, stage, width);
    }
    share(stage, tokens, [&](int t) {
      int length = h.queries * h.size;
      convert_row(static_cast<Kind>(l.out.kind), b_.mixed + static_cast<int64_t>(t) * length, length, rows_for(l.out, 0), t);
    });
    multiply(stage, l.out, tokens, add_to_hidden);
    share(stage, tokens, [&](int t) { norm_row(l.gate_up, l.post_norm, hidden_of(t), t); });
    int inner = m_.intermediate_size, act_width = padded(inner);
    multiply(stage, l.gate_up, tokens, [&](int row, int panel, F16 gate, F16 up) {
      // x * sigmoid(x) * up, with e^-x as a power of two.
      F16 power = exp2(mul(magnitude(gate), fill(-1.4426950408889634f)));  // of -|x|
      F16 positive = div(fill(1.0f), add(fill(1.0f), power));
      F16 sigmoid = where_negative(gate, mul(positive, power), positive);
      float* to = b_.act + static_cast<int64_t>(row) * act_width + panel * kLanes;
      store(to, mul(mul(gate, sigmoid), up));
    });
    share(stage, tokens, [&](int t) {
      convert_row(static_cast<Kind>(l.down.kind), b_.act + static_cast<int64_t>(t) * act_width, inner, rows_for(l.down, 0), t);
    });
    multiply(stage, l.down, tokens, add_to_hidden);
  }

  static void add_panel(float* row, int panel, int size, F16 left, F16 right) {
    int at = panel * kPanel;
    if (at + kPanel <= size) {
      store(row + at, add(load(row + at), left));
      store(row + at + kLanes, add(load(row + at + kLanes), right));
      return;
    }
    float both[kPanel];
    store(both, left), store(both + kLanes, right);
    for (int i = 0; at + i < size; ++i) row[at + i] += both[i];
  }

  template <typename Cell>
  void attention(const Layer& l, int& stage, int width) {
    share(stage, s_.num_tokens, [&](int t) { keep<Cell>(l, t, width); });
    share(stage, num_tiles_, [&](int i) { tile<Cell>(l, b_.tiles[i]); });
  }

  // Normalises and rotates a token's queries and keys, and writes keys and values to the cache.
  template <typename Cell>
  void keep(const Layer& l, int t, int width) {
    const Heads& h = m_.heads;
    float* heads = b_.qkv + static_cast<int64_t>(t) * width;
    int rotated = h.queries + h.keys, half = h.size / 2;
    const float* angles = b_.angles + static_cast<int64_t>(t) * h.size;
    for (int i = 0; i < rotated; ++i) {
      float* one = heads + i * h.size;
      if (l.qk_norm != nullptr) normalise(one, l.qk_norm + i * h.size, h.size, one);
      if (!l.use_rope) continue;
      for (int d = 0; d < half; ++d) {
        float a = one[d], b = one[half + d];
        one[d] = a * angles[d] - b * angles[half + d];
        one[half + d] = b * angles[d] + a * angles[half + d];
      }
    }
    uint8_t* queries = query(t, Cache<Cell>::query_bytes(h));
    for (int i = 0; i < h.queries; ++i)
      Cache<Cell>::put_query(h, heads + i * h.size, queries + i * Cache<Cell>::query_bytes(h));
    int slot = s_.slot_mapping[t];
    if (slot < 0) return;
    int32_t block = slot / h.block_size;
    for (int head = 0; head < h.keys; ++head) {
      Paged keys = paged<Cell>(l.k_cache, &block, head), values = paged<Cell>(l.v_cache, &block, head);
      Cache<Cell>::put_key(h, heads + (h.queries + head) * h.size, keys.block(0), slot % h.block_size);
      Cache<Cell>::put_value(h, heads + (rotated + head) * h.size, values.block(0), slot % h.block_size);
    }
  }

  uint8_t* query(int t, int64_t bytes) const { return static_cast<uint8_t*>(b_.queries) + bytes * t * m_.heads.queries; }

  template <typename Cell>
  Paged paged(void* cache, const int32_t* table, int head) const {
    const Heads& h = m_.heads;
    return {static_cast<uint8_t*>(cache), table, Cache<Cell>::block_bytes(h), h.keys, head, h.block_size};
  }

  template <typename Cell>
  void tile(const Layer& l, const Tile& tile) {
    const Heads& h = m_.heads;
    int group = h.queries / h.keys, end = tile.first_query + kMostQueries;
    int64_t bytes = Cache<Cell>::query_bytes(h);
    Queries q;
    q.count = 0;
    for (int t = tile.token; t < tile.token + tile.count; ++t)
      for (int i = tile.first_query; i < group && i < end; ++i) {
        int head = tile.head * group + i;
        q.vectors[q.count] = query(t, bytes) + head * bytes;
        q.results[q.count] = b_.mixed + (static_cast<int64_t>(t) * h.queries + head) * h.size;
        q.positions[q.count++] = s_.positions[t];
      }
    const int32_t* table = s_.block_table + static_cast<int64_t>(tile.row) * s_.table_width;
    attend_any<Cell>(h, paged<Cell>(l.k_cache, table, tile.head), paged<Cell>(l.v_cache, table, tile.head), l.window, q);
  }

  void logits(int& stage) {
    share(stage, s_.num_samples, [&](int i) {
      int64_t t = s_.logits_indices[i];
      norm_row(m_.head, m_.final_norm, s_.hidden + t * m_.hidden_size, i);
    });
    multiply(stage, m_.head, s_.num_samples, [&](int row, int panel, F16 left, F16 right) {
      float* to = s_.logits + static_cast<int64_t>(row) * m_.vocab_size + panel * kPanel;
      if ((panel + 1) * kPanel <= m_.vocab_size) {
        store(to, left), store(to + kLanes, right);
        return;
      }
      float both[kPanel];
      store(both, left), store(both + kLanes, right);
      std::memcpy(to, both, sizeof(float) * (m_.vocab_size - panel * kPanel));
    });
  }

  const Decoder& m_;
  const Step& s_;
  Pool& pool_;
  Buffers b_;
  int num_tiles_ = 0;
};

}  // namespace aneuron

extern "C" {

// Null where the system gives no more threads.
void* aneuron_pool(int num_threads) {
  try {
    return new aneuron::Pool(num_threads);
  } catch (...) {
    return nullptr;
  }
}

void aneuron_end_pool(void* pool) { delete static_cast<aneuron::Pool*>(pool); }

// Bytes of scratch that a step of this size needs.
int64_t aneuron_scratch(const aneuron::Decoder* model, int tokens, int rows) {
  return aneuron::Buffers(*model, tokens, rows, nullptr).size;
}

void aneuron_step(const aneuron::Decoder* model, const aneuron::Step* step, void* pool) {
  auto& threads = *static_cast<aneuron::Pool*>(pool);
  aneuron::Work work(*model, *step, threads);
  threads.run(work);
}

// 1 if this was compiled for vectors of 512 bits, else 0: plain loops.
int aneuron_has_avx512() { return ANEURON_AVX512; }

}
