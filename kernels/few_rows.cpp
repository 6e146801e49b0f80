// y = x W^T for few rows x in bfloat16 on a CPU, W in bfloat16, 8 or 4 bits: each weight is read once, at the speed of
// memory. With them the feed-forward of a layer as one call, because memory rests between calls. And the attention of a few
// new positions, which reads its keys and values once for four queries of a head.
//
// few_rows.py compiles and loads this. Shape letters: M rows of x, N rows of W, K columns of both, G groups of columns;
// for attention and experts those of model.py.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/silu.h>
#include <c10/core/InferenceMode.h>
#include <omp.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

using BF16 = at::BFloat16;
using Pairs = uint32_t __attribute__((vector_size(64)));  // 32 bfloat16 numbers, two in each of 16 lanes
using Sums = float __attribute__((vector_size(64)));
using Halves = uint16_t __attribute__((vector_size(32)));
constexpr int64_t kVector = 32;

// The first `count` numbers of a vector from memory, zeros behind them.
template <typename Vector, typename Number>
inline Vector load(const Number* from, int64_t count = sizeof(Vector) / sizeof(Number)) {
  Vector vector = {};
  std::memcpy(&vector, from, count * sizeof(Number));
  return vector;
}

// `count` bfloat16 numbers, at most 16, as floats.
inline Sums load_floats(const void* from, int64_t count = 16) {
  const uint16_t* numbers = static_cast<const uint16_t*>(from);
  const Halves halves = count >= 16 ? load<Halves>(numbers) : load<Halves>(numbers, count);
  return (Sums)(__builtin_convertvector(halves, Pairs) << 16);
}

// The first `count` of 16 floats as bfloat16 numbers, rounded to the nearest, ties to even.
inline void store(Sums numbers, uint16_t* to, int64_t count = 16) {
  const Pairs bits = (Pairs)numbers;
  const Halves halves = __builtin_convertvector((bits + 0x7fff + (bits >> 16 & 1)) >> 16, Halves);
  std::memcpy(to, &halves, std::min<int64_t>(count, 16) * sizeof(uint16_t));
}

inline float total(Sums lanes) {
  float sum = 0;
  for (int i = 0; i < 16; i++) sum += lanes[i];
  return sum;
}

// Room for the product (..., N) of x (..., K).
at::Tensor empty_product(const at::Tensor& x, int64_t N) {
  auto shape = x.sizes().vec();
  shape.back() = N;
  return at::empty(shape, x.options());
}

// Rows begin..end of x, which are multiplied with one of several matrices.
struct Group {
  int64_t matrix, begin, end;
};

std::vector<Group> all_rows(const at::Tensor& x) {
  return {{0, 0, x.numel() / std::max<int64_t>(1, x.size(-1))}};
}

// Share out the pieces of all groups' matrices: work(group, begin, end) on pieces begin..end of one.
template <typename Work>
void in_parallel(const std::vector<Group>& groups, int64_t pieces, int64_t grain, Work work) {
  at::parallel_for(0, groups.size() * pieces, grain, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t first = begin % pieces, last = std::min(pieces, first + end - begin);
      work(groups[begin / pieces], first, last);
      begin += last - first;
    }
  });
}

// ---------------------------------------------------------------------------------------------------------------------
// W in bfloat16

// To each lane's sum, add the products of its two pairs.
inline Sums add_products(Sums sums, Pairs w, Pairs x) {
#ifdef __AVX512BF16__
  return (Sums)_mm512_dpbf16_ps((__m512)sums, (__m512bh)w, (__m512bh)x);
#else  // a bfloat16 is the upper half of a float
  sums += (Sums)(w << 16) * (Sums)(x << 16);
  return sums + (Sums)(w & 0xffff0000u) * (Sums)(x & 0xffff0000u);
#endif
}

// To sums (R, M), add M rows of x times R rows of W, over `count` columns. The rows of W and of the sums lie `apart` rows
// from one another. U partial sums of each hide the latency of an addition. With more than one row of x, the processor
// needs help to fetch the next rows of W in time.
template <int M, int R, int U>
void tile(const BF16* w, const BF16* x, float* sums, int64_t K, int64_t count, int64_t apart) {
  Sums lanes[R][M][U] = {};
  auto add = [&](int64_t k, int u, int64_t n) {
    Pairs xs[M];
    for (int m = 0; m < M; m++) xs[m] = load<Pairs>(x + m * K + k, n);
    for (int r = 0; r < R; r++) {
      Pairs ws = load<Pairs>(w + r * apart * K + k, n);
      if (M > 1) __builtin_prefetch(w + (r * apart + 1) * K + k);
      for (int m = 0; m < M; m++) lanes[r][m][u] = add_products(lanes[r][m][u], ws, xs[m]);
    }
  };
  int64_t k = 0;
  for (; k + U * kVector <= count; k += U * kVector) {
#pragma GCC unroll 8
    for (int u = 0; u < U; u++) add(k + u * kVector, u, kVector);
  }
  for (; k < count; k += kVector) add(k, 0, std::min(kVector, count - k));
  for (int r = 0; r < R; r++) {
    for (int m = 0; m < M; m++) {
      Sums all = lanes[r][m][0];
      for (int u = 1; u < U; u++) all += lanes[r][m][u];
      sums[r * apart * M + m] += total(all);
    }
  }
}

// Rows of W that are computed together, so that a block of x is loaded once for all of them. One row of x stays in the
// cache anyway: then many rows of W, because the processor's prefetcher restarts at each block.
constexpr int kBlock = 64, kLongBlock = 2048;

// M rows of x times some rows of W, at most a block. x goes in blocks of columns that fit the first-level cache.
template <int M>
void block(const BF16* w, const BF16* x, BF16* y, int64_t rows, int64_t N, int64_t K) {
  // 6 to 16 sums in flight; two rows of W even for one row of x, because some processors fetch two streams that are far
  // apart faster than one
  constexpr int R = 2, U = M > 4 ? 1 : M > 1 ? 2 : 4;
  const int64_t columns = M == 1 ? K : 2048;
  float sums[M == 1 ? kLongBlock : kBlock * M] = {};
  for (int64_t k = 0; k < K; k += columns) {
    const int64_t count = std::min(columns, K - k);
    const int64_t apart = rows / R;
    for (int64_t r = 0; r < apart; r++) tile<M, R, U>(w + r * K + k, x + k, sums + r * M, K, count, apart);
    for (int64_t r = R * apart; r < rows; r++) tile<M, 1, U>(w + r * K + k, x + k, sums + r * M, K, count, 0);
  }
  for (int64_t r = 0; r < rows; r++) {
    for (int m = 0; m < M; m++) y[m * N + r] = sums[r * M + m];
  }
}

// x (M, K) times the matrices of its groups, of one W (N, K) or several (E, N, K).
at::Tensor multiply(const at::Tensor& x, const at::Tensor& weight, const std::vector<Group>& groups) {
  const int64_t N = weight.size(-2), K = weight.size(-1);
  TORCH_CHECK(K > 0 && x.size(-1) == K && weight.is_contiguous(), "few_rows takes x (..., K), a contiguous W (N, K)");
  at::Tensor result = empty_product(x, N);
  const BF16 *w = weight.const_data_ptr<BF16>(), *from = x.const_data_ptr<BF16>();
  BF16* y = result.data_ptr<BF16>();
  constexpr decltype(&block<1>) blocks[] = {block<1>, block<2>, block<3>, block<4>,
                                            block<5>, block<6>, block<7>, block<8>};
  in_parallel(groups, N, std::max<int64_t>(1, 32768 / K), [&](const Group& group, int64_t begin, int64_t end) {
    const int64_t rows = group.end - group.begin == 1 ? kLongBlock : kBlock;
    for (int64_t n = begin; n < end; n += rows) {
      for (int64_t m = group.begin; m < group.end; m += 8) {
        blocks[std::min<int64_t>(group.end - m, 8) - 1](
            w + (group.matrix * N + n) * K, from + m * K, y + m * N + n, std::min(rows, end - n), N, K);
      }
    }
  });
  return result;
}

at::Tensor few_rows(const at::Tensor& input, const at::Tensor& weight) {
  return multiply(input.contiguous(), weight, all_rows(input));
}

// ---------------------------------------------------------------------------------------------------------------------
// W in integers: 8 bits and a scale per row, or 4 bits with a scale and a zero per group of columns (int_linear.py)
//
// W comes in panels of 16 rows, as few_rows.py packs them: a vector has one lane for each row, with four columns of it; in 4
// bits eight, the later four in the upper halves. A group begins with a vector of the rows' 16 scales and 16 zeros. So no
// sum goes across lanes, and W is read from its begin to its end.
//
// Processors multiply bytes four times as fast as they turn them into floats. So x becomes fixed-point numbers of 16 bits,
// 256 high + low, with a scale for each block of columns. That changes a number by some 2^-16 of the largest in its
// block at most: less than bfloat16 itself had rounded that one. (A block of nothing above 1e-30 counts as zeros.)

using Bytes = uint8_t __attribute__((vector_size(64)));
using Ints = int32_t __attribute__((vector_size(64)));
constexpr int64_t kColumns = 128;  // of a block
constexpr int64_t kRows = 16;  // of a panel
constexpr int64_t kPrefetch = 1024;  // bytes to be fetched in advance; and four times as many, from farther away

// To each lane's sum, add the products of its four bytes with those of x, which are signed.
inline Ints add_products(Ints sums, Bytes w, int32_t x) {
#ifdef __AVX512VNNI__
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)w, _mm512_set1_epi32(x));
#else
  for (int i = 0; i < 4; i++) sums += (((Ints)w >> 8 * i) & 255) * int8_t(x >> 8 * i);
  return sums;
#endif
}

// One block of a row of x: four columns in each number.
struct Block {
  int32_t high[kColumns / 4], low[kColumns / 4];
  float scale;
  int32_t offset;  // what w + 128 instead of w adds to the sum
};

Block fixed_point(const BF16* x, int64_t count) {
  Sums values[8];
  Ints largest = {};  // as bits: positive floats are in the order of their bits, and NaN comes last
  for (int i = 0; i < 8; i++) {
    values[i] = load_floats(x + 16 * i, std::clamp<int64_t>(count - 16 * i, 0, 16));
    const Ints bits = (Ints)values[i] & INT32_MAX;
    largest = bits > largest ? bits : largest;
  }
  int32_t bits = 0;
  for (int i = 0; i < 16; i++) bits = std::max(bits, largest[i]);
  float top;
  std::memcpy(&top, &bits, sizeof(top));
  if (top < 1e-30f) top = 0;  // and not a number stays that
  const float inverse = top > 0 ? 32639 / top : 0;  // 32639 = 127 * 256 + 127
  Block block;
  block.scale = top / 32639;
  Ints sum = {};
  for (int i = 0; i < 8; i++) {
    const Sums half = (Sums)(((Ints)values[i] & INT32_MIN) | 0x3f000000);  // 0.5 with the sign of x
    const Ints fixed = __builtin_convertvector(values[i] * inverse + half, Ints), high = (fixed + 128) >> 8;
    using Sixteen = int8_t __attribute__((vector_size(16)));
    const Sixteen parts[2] = {
        __builtin_convertvector(high, Sixteen), __builtin_convertvector(fixed - (high << 8), Sixteen)};
    std::memcpy(block.high + 4 * i, &parts[0], 16);
    std::memcpy(block.low + 4 * i, &parts[1], 16);
    sum += fixed;
  }
  uint32_t offset = 0;
  for (int i = 0; i < 16; i++) offset += 128 * uint32_t(sum[i]);
  block.offset = offset;
  return block;
}

struct Integers {
  const uint8_t* w;  // (P, G, 1 + V, 64)
  int64_t P, N, K, G;
  int64_t vectors, size;  // of a group: vectors, that of its scales too, and columns
  bool four_bits;
};

// y (M): M rows of x, `blocks` blocks each, times panel p of W. sums (M, G): of the numbers of x in each group.
template <bool kFourBits, int M>
void int_panel(const Integers& W, const Block* x, int64_t blocks, const float* sums, Sums* y, int64_t p) {
  constexpr int U = M > 2 ? 1 : 2;  // partial sums, which hide the latency of an addition
  constexpr int64_t kStep = kFourBits ? 64 : 128;  // bytes of 8 columns
  const uint8_t* w = W.w + p * W.G * W.vectors * 64;
  const int64_t size = kFourBits ? W.size : kColumns;
  Sums lanes[M] = {}, scale, zero;
  for (int64_t k = 0; k < W.K; k += size) {
    if (kFourBits || k == 0) {
      scale = load_floats(w);
      zero = load_floats(w + 32);
      w += 64;
    }
    Ints high[M][U] = {}, low[M][U] = {};
    const Block* here = x + k / kColumns;
    const int64_t first = k % kColumns, stop = first + std::min(size, W.K - k);
    for (int64_t j = first; j < stop; j += 8, w += kStep) {
      Bytes parts[2] = {load<Bytes>(w)};
      if (kFourBits) {
        parts[1] = parts[0] >> 4, parts[0] &= 15;
      } else {
        parts[1] = load<Bytes>(w + 64);
      }
      for (int i = 0; i < kStep; i += 64) {
        __builtin_prefetch(w + 4 * kPrefetch + i, 0, 2);  // into the second-level cache
        __builtin_prefetch(w + kPrefetch + i);
      }
#pragma GCC unroll 2
      for (int i = 0; i < 2; i++) {
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
          const Block& xs = here[m * blocks];
          high[m][i % U] = add_products(high[m][i % U], parts[i], xs.high[j / 4 + i]);
          low[m][i % U] = add_products(low[m][i % U], parts[i], xs.low[j / 4 + i]);
        }
      }
    }
    for (int m = 0; m < M; m++) {
      for (int u = 1; u < U; u++) high[m][0] += high[m][u], low[m][0] += low[m][u];
      const Block& xs = here[m * blocks];
      const Ints all = (high[m][0] << 8) + low[m][0] - (kFourBits ? 0 : xs.offset);
      lanes[m] += __builtin_convertvector(all, Sums) * (kFourBits ? scale * xs.scale : Sums{} + xs.scale);
      if (kFourBits) lanes[m] += zero * sums[m * W.G + k / size];
    }
  }
  for (int m = 0; m < M; m++) y[m] = kFourBits ? lanes[m] : lanes[m] * scale;
}

// Of 1 to 8 rows of x.
template <bool kFourBits>
constexpr decltype(&int_panel<kFourBits, 1>) kPanels[] = {
    int_panel<kFourBits, 1>, int_panel<kFourBits, 2>, int_panel<kFourBits, 3>, int_panel<kFourBits, 4>,
    int_panel<kFourBits, 5>, int_panel<kFourBits, 6>, int_panel<kFourBits, 7>, int_panel<kFourBits, 8>};

Integers integers(const at::Tensor& input, const at::Tensor& weight, int64_t N, int64_t K, int64_t bits) {
  const int64_t P = weight.size(-4), G = weight.size(-3), vectors = weight.size(-2);
  const int64_t size = bits == 8 ? K : (vectors - 1) * 8;
  TORCH_CHECK(
      input.scalar_type() == at::kBFloat16 && input.size(-1) == K && K > 0 && weight.is_contiguous() && weight.size(-1) == 64 && size * G == K &&
          P == (N + kRows - 1) / kRows &&
          (bits == 8 ? vectors == 1 + (K + 7) / 8 * 2 : bits == 4 && size >= 8 && kColumns % size == 0),
      "x (..., K) must be in bfloat16, and of a W (N, K) what few_rows.pack returns, in groups of 8 to 128 columns");
  return {weight.const_data_ptr<uint8_t>(), P, N, K, G, vectors, size, bits == 4};
}

// e^x for x <= 0, to some 2e-7 of it near 0 and 4e-6 far off; below -87 about 1e-38
inline Sums exponential(Sums x) {
  x = x < -87.0f ? Sums{} - 87.0f : x;  // not a number stays that
  const Ints n = __builtin_convertvector(x * 1.44269504f - 0.5f, Ints);
  const Sums r = x - __builtin_convertvector(n, Sums) * 0.693147181f;  // |r| <= ln(2) / 2
  const Sums p = 1 + r * (1 + r * (1 / 2.0f + r * (1 / 6.0f + r * (1 / 24.0f + r * (1 / 120.0f + r * (1 / 720.0f))))));
  return (Sums)((Ints)p + (n << 23));
}

inline Sums silu(Sums x) {
  const Sums e = exponential(x < 0 ? x : -x);
  return x * (x < 0 ? e : Sums{} + 1) / (1 + e);
}

// x times the matrices W of its groups; or gated, silu(x times W) times (x times up).
at::Tensor multiply(
    const at::Tensor& input, const Integers& W, const std::vector<Group>& groups, const Integers* up = nullptr) {
  const int64_t N = W.N, K = W.K, G = W.G;
  TORCH_CHECK(!up || up->G == G, "w1 and w3 have groups of other sizes");
  const at::Tensor rows = input.contiguous();
  const int64_t M = rows.numel() / K, blocks = (K + kColumns - 1) / kColumns;
  at::Tensor result = empty_product(rows, N);
  const BF16* x = rows.const_data_ptr<BF16>();
  uint16_t* y = static_cast<uint16_t*>(result.data_ptr());
  std::vector<Block> fixed(M * blocks);
  std::vector<float> sums(M * G);
  at::parallel_for(0, M, std::max<int64_t>(1, 32768 / K), [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; m++) {
      for (int64_t k = 0; k < K; k += kColumns) fixed[m * blocks + k / kColumns] = fixed_point(x + m * K + k, K - k);
      for (int64_t g = 0; W.four_bits && g < G; g++) {
        float sum = 0;
        for (int64_t k = g * W.size; k < (g + 1) * W.size; k++) sum += float(x[m * K + k]);
        sums[m * G + g] = sum;
      }
    }
  });
  // y = x times panels begin..end of a group's matrix, or y times that
  auto panels = [&](const Integers& of, const Group& group, int64_t begin, int64_t end, bool times) {
    for (int64_t p = begin; p < end; p++) {
      const int64_t n = p * kRows, count = std::min(kRows, N - n);
      for (int64_t m = group.begin; m < group.end; m += 8) {
        const int64_t here = std::min<int64_t>(group.end - m, 8);
        Sums lanes[8];
        const auto* kernels = of.four_bits ? kPanels<true> : kPanels<false>;
        const int64_t panel = group.matrix * of.P + p;
        kernels[here - 1](of, fixed.data() + m * blocks, blocks, sums.data() + m * G, lanes, panel);
        for (int64_t i = 0; i < here; i++) {
          uint16_t* out = y + (m + i) * N + n;
          store(times ? lanes[i] * load_floats(out, count) : lanes[i], out, count);
        }
      }
    }
  };
  const int64_t grain = std::max<int64_t>(1, 65536 / (kRows * K));
  in_parallel(groups, W.P, grain, [&](const Group& group, int64_t begin, int64_t end) {
    panels(W, group, begin, end, false);
    if (!up) return;
    for (int64_t m = group.begin; m < group.end; m++) {
      for (int64_t n = begin * kRows, to = std::min(end * kRows, N); n < to; n += 16) {
        store(silu(load_floats(y + m * N + n, to - n)), y + m * N + n, to - n);
      }
    }
    panels(*up, group, begin, end, true);
  });
  return result;
}

at::Tensor few_rows_int(const at::Tensor& input, const at::Tensor& weight, int64_t N, int64_t K, int64_t bits) {
  return multiply(input, integers(input, weight, N, K, bits), all_rows(input));
}

// w2 (silu(w1 x) * w3 x), with w1 and w3 (N, K), w2 (K, N)
at::Tensor feed_forward_int(
    const at::Tensor& input, const at::Tensor& w1, const at::Tensor& w3, const at::Tensor& w2, int64_t N, int64_t K,
    int64_t bits) {
  const Integers gate = integers(input, w1, N, K, bits), up = integers(input, w3, N, K, bits);
  const at::Tensor hidden = multiply(input, gate, all_rows(input), &up);
  return multiply(hidden, integers(hidden, w2, K, N, bits), all_rows(hidden));
}

// The same for tokens x (T, D) and each of the k experts that a token chose, (T, k): the result is (T, k, D). There are
// E experts of I neurons: w1 and w3 (E, I, D), w2 (E, D, I). The tokens of an expert become neighbours, so that its
// weights are read once for all of them. bits: of each of the three, 16 for bfloat16.
at::Tensor few_rows_experts(
    const at::Tensor& x, const at::Tensor& chosen, const at::Tensor& w1, const at::Tensor& w3, const at::Tensor& w2,
    int64_t I, int64_t D, at::IntArrayRef bits) {
  const auto [experts, order] = chosen.flatten().sort(/*stable=*/true, 0, false);
  const int64_t* expert = experts.const_data_ptr<int64_t>();
  std::vector<Group> groups;
  for (int64_t i = 0; i < experts.numel(); i++) {
    if (i == 0 || expert[i] != expert[i - 1]) groups.push_back({expert[i], i, i});
    groups.back().end++;
  }
  const at::Tensor weights[] = {w1, w3, w2};
  for (int i = 0; i < 3; i++) {
    TORCH_CHECK(
        weights[i].dim() == (bits.at(i) == 16 ? 3 : 5) &&
            (groups.empty() || (groups[0].matrix >= 0 && groups.back().matrix < weights[i].size(0))),
        "few_rows_experts takes w1, w3, w2 (E, ...) of these bits, and chosen experts from 0 to E - 1");
  }
  auto product = [&](const at::Tensor& rows, const at::Tensor& w, int64_t N, int64_t K, int64_t bits) {
    return bits == 16 ? multiply(rows, w, groups) : multiply(rows, integers(rows, w, N, K, bits), groups);
  };
  const at::Tensor rows = x.index_select(0, order.floor_divide(chosen.size(1)));
  at::Tensor hidden;
  if (bits[0] == bits[1] && bits[0] < 16) {
    const Integers gate = integers(rows, w1, I, D, bits[0]), up = integers(rows, w3, I, D, bits[1]);
    hidden = multiply(rows, gate, groups, &up);
  } else {
    hidden = at::silu(product(rows, w1, I, D, bits[0])).mul_(product(rows, w3, I, D, bits[1]));
  }
  const at::Tensor y = product(hidden, w2, D, I, bits[2]);
  return at::empty_like(y).index_copy_(0, order, y).view({chosen.size(0), chosen.size(1), D});
}

// Panels from..to of W as floats, (K, n) with all of their rows.
template <bool kFourBits>
void dequantize(const Integers& W, uint16_t* y, int64_t from, int64_t to) {
  const int64_t n = (to - from) * kRows;
  constexpr int kParts = kFourBits ? 2 : 1, kBits = kFourBits ? 4 : 8;
  for (int64_t p = from; p < to; p++) {
    const uint8_t* w = W.w + p * W.G * W.vectors * 64;
    Sums scale, zero;
    for (int64_t v = 0, k = 0; k < W.K; v++, w += 64) {
      if (v % W.vectors == 0) {
        scale = load_floats(w);
        zero = kFourBits ? load_floats(w + 32) : scale * -128;
        continue;
      }
      const Ints four = load<Ints>(w);
      for (int part = 0; part < kParts; part++) {
        for (int c = 0; c < 4 && k < W.K; c++, k++) {
          const Ints q = four >> (8 * c + 4 * part) & ((1 << kBits) - 1);
          store(__builtin_convertvector(q, Sums) * scale + zero, y + k * n + (p - from) * kRows);
        }
      }
    }
  }
}

// x (..., K) of many rows: W becomes floats, by pieces that are still in the cache when they are multiplied. Each thread
// has pieces of its own: with a piece shared, all threads would wait for one another several times for each.
at::Tensor many_rows_int(const at::Tensor& input, const at::Tensor& weight, int64_t N, int64_t K, int64_t bits) {
  const Integers W = integers(input, weight, N, K, bits);
  const at::Tensor rows = input.reshape({-1, W.K});
  const int64_t threads = at::get_num_threads(), most = std::max<int64_t>(1, (1 << 19) / (kRows * W.K)) * threads;
  const int64_t pieces = (W.P + most - 1) / most * threads, step = (W.P + pieces - 1) / std::max<int64_t>(1, pieces);
  at::Tensor result = empty_product(input, N), flat = result.view({rows.size(0), N});
  const bool inference = c10::InferenceMode::is_enabled();  // which other threads do not inherit
  at::parallel_for(0, pieces, 1, [&](int64_t begin, int64_t end) {
    const c10::InferenceMode guard(inference);
    if (omp_in_parallel()) omp_set_num_threads(1);  // of this thread, until the region ends: oneDNN plans for so many
    for (int64_t p = begin * step; p < std::min(end * step, W.P); p += step) {
      const int64_t to = std::min(p + step, W.P), n = p * kRows, count = std::min(to * kRows, N) - n;
      at::Tensor piece = at::empty({W.K, (to - p) * kRows}, input.options());
      (W.four_bits ? dequantize<true> : dequantize<false>)(W, static_cast<uint16_t*>(piece.data_ptr()), p, to);
      flat.narrow(1, n, count).copy_(at::mm(rows, piece).narrow(1, 0, count));
    }
  });
  return result;
}

// ---------------------------------------------------------------------------------------------------------------------
// Attention of a few new positions in each row of a batch

constexpr int64_t kAhead = 32;  // keys or values that the processor is told to fetch in advance

// a and b each hold s results, each spread over 16 / s lanes. Returns all 2 s, each over half as many lanes.
template <int s, int... i>
inline Sums halve(Sums a, Sums b, std::integer_sequence<int, i...>) {
#ifdef __clang__
  return __builtin_shufflevector(a, b, (i & s ? 16 + i : i)...) +
         __builtin_shufflevector(a, b, (i & s ? 16 + (i ^ s) : i ^ s)...);
#else  // GCC has the other one from version 12 on
  return __builtin_shuffle(a, b, Ints{(i & s ? 16 + i : i)...}) +
         __builtin_shuffle(a, b, Ints{(i & s ? 16 + (i ^ s) : i ^ s)...});
#endif
}

// The total of each of 16 vectors.
inline __attribute__((always_inline)) Sums totals(Sums* lanes) {
  const auto all = std::make_integer_sequence<int, 16>();
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) lanes[i] = halve<1>(lanes[2 * i], lanes[2 * i + 1], all);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) lanes[i] = halve<2>(lanes[2 * i], lanes[2 * i + 1], all);
  lanes[0] = halve<4>(lanes[0], lanes[1], all);
  lanes[1] = halve<4>(lanes[2], lanes[3], all);
  return halve<8>(lanes[0], lanes[1], all);
}

// M queries q (M, H) of one head over `length` keys and values (length, H); M divides 16, and 64 divides H. weights: room
// for M length numbers and 16 more.
template <int M>
void attend(const BF16* q, const BF16* keys, const BF16* values, BF16* y, float* weights, int64_t length, int64_t H) {
  constexpr int64_t kKeys = 16 / M;  // whose scores are one vector, the M of a key side by side
  const float scale = 1 / std::sqrt(float(H));
  Sums largest = Sums{} - INFINITY, sum = {};
  for (int64_t t = 0; t < length; t += kKeys) {
    const int64_t count = std::min(kKeys, length - t);
    const BF16* from[kKeys];
    for (int64_t j = 0; j < kKeys; j++) from[j] = keys + (t + std::min(j, count - 1)) * H;
    Sums dots[16] = {};
    for (int64_t h = 0; h < H; h += kVector) {
#pragma GCC unroll 16
      for (int64_t j = 0; j < kKeys; j++) {
        const Pairs key = load<Pairs>(from[j] + h);
        __builtin_prefetch(from[j] + kAhead * H + h);
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) dots[j * M + m] = add_products(dots[j * M + m], key, load<Pairs>(q + m * H + h));
      }
    }
    Sums scores = totals(dots) * scale;
    if (count < kKeys) {
      for (int64_t i = count * M; i < 16; i++) scores[i] = -INFINITY;  // beyond the last key
    }
    largest = scores > largest ? scores : largest;
    std::memcpy(weights + t * M, &scores, sizeof(scores));
  }
  for (int i = M; i < 16; i++) largest[i % M] = std::max(largest[i % M], largest[i]);
  for (int i = M; i < 16; i++) largest[i] = largest[i % M];
  for (int64_t i = 0; i < M * length; i += 16) {
    const Sums here = exponential(load<Sums>(weights + i) - largest);
    std::memcpy(weights + i, &here, sizeof(here));
    sum += here;
  }
  for (int i = M; i < 16; i++) sum[i % M] += sum[i];
  for (int64_t h = 0; h < H; h += 64) {
    Sums weighted[M][4] = {};
    for (int64_t t = 0; t < length; t++) {
      for (int c = 0; c < 64; c += kVector) __builtin_prefetch(values + (t + kAhead) * H + h + c);
#pragma GCC unroll 4
      for (int c = 0; c < 4; c++) {
        const Sums value = load_floats(values + t * H + h + 16 * c);
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) weighted[m][c] += weights[t * M + m] * value;
      }
    }
    for (int m = 0; m < M; m++) {
      for (int i = 0; i < 64; i++) y[m * H + h + i] = weighted[m][i / 16][i % 16] / sum[m];
    }
  }
}

// q (B, K, S, G, H) at positions (B, S) over the cached keys and values (B, K, T, H): each over the last `window` of them
// up to its own position.
at::Tensor decode_attention(
    const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values, const at::Tensor& positions, int64_t window) {
  const int64_t B = q.size(0), K = q.size(1), S = q.size(2), G = q.size(3), H = q.size(4), T = keys.size(2);
  TORCH_CHECK(
      H % 64 == 0 && T > 0 && keys.is_contiguous() && values.is_contiguous() && values.sizes() == keys.sizes() &&
          keys.sizes() == at::IntArrayRef({B, K, T, H}) && positions.sizes() == at::IntArrayRef({B, S}),
      "decode_attention takes q (B, K, S, G, H), 64 divides H, a contiguous cache (B, K, T, H), and positions (B, S)");
  const at::Tensor queries = q.contiguous(), last = positions.contiguous();
  at::Tensor result = at::empty(queries.sizes(), queries.options());
  const BF16 *q_data = queries.const_data_ptr<BF16>(), *k_data = keys.const_data_ptr<BF16>();
  const BF16* v_data = values.const_data_ptr<BF16>();
  const int64_t* p_data = last.const_data_ptr<int64_t>();
  BF16* y_data = result.data_ptr<BF16>();
  constexpr decltype(&attend<1>) kernels[] = {attend<1>, attend<2>, attend<4>};
  at::parallel_for(0, B * K, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> scores(4 * T + 16);
    for (int64_t i = begin; i < end; i++) {
      const BF16 *k = k_data + i * T * H, *v = v_data + i * T * H;
      for (int64_t s = 0; s < S; s++) {  // from the second one on, the keys and values are in the caches
        const int64_t position = p_data[i / K * S + s];
        const int64_t stop = std::clamp<int64_t>(position + 1, 1, T);  // so that no memory but the cache is read
        const int64_t start = std::max<int64_t>(stop - window, 0), length = stop - start;
        for (int64_t g = 0; g < G;) {
          const int which = G - g >= 4 ? 2 : G - g >= 2 ? 1 : 0;
          const int64_t first = ((i * S + s) * G + g) * H;
          kernels[which](q_data + first, k + start * H, v + start * H, y_data + first, scores.data(), length, H);
          g += 1 << which;
        }
      }
    }
  });
  return result;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ladder, library) {
  auto define = [&](const std::string& schema, auto function) {
    library.def((schema + " -> Tensor").c_str(), torch::dispatch(c10::DispatchKey::CPU, function));
  };
  define("decode_attention(Tensor q, Tensor keys, Tensor values, Tensor positions, int window)", decode_attention);
  define("feed_forward_int(Tensor x, Tensor w1, Tensor w3, Tensor w2, int N, int K, int bits)", feed_forward_int);
  define("few_rows(Tensor x, Tensor weight)", few_rows);
  define(
      "few_rows_experts(Tensor x, Tensor chosen, Tensor w1, Tensor w3, Tensor w2, int I, int D, int[] bits)",
      few_rows_experts);
  define("many_rows_int(Tensor x, Tensor weight, int N, int K, int bits)", many_rows_int);
  define("few_rows_int(Tensor x, Tensor weight, int N, int K, int bits)", few_rows_int);
}
