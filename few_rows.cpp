// y = x W^T for few rows x in bfloat16 on a CPU, W in bfloat16, 8 or 4 bits: each weight is read once, at the speed of
// memory. And the attention of one new position, likewise.
//
// cpu.py compiles and loads this. Shape letters: M rows of x, N rows of W, K columns of both, G groups of columns; for
// attention those of model.py.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
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
constexpr int64_t kVector = 32;

// The first `count` numbers of a vector from memory, zeros behind them.
template <typename Vector, typename Number>
inline Vector load(const Number* from, int64_t count = sizeof(Vector) / sizeof(Number)) {
  Vector vector = {};
  std::memcpy(&vector, from, count * sizeof(Number));
  return vector;
}

// `count` bfloat16 numbers, at most 16, as floats.
inline Sums load_floats(const uint16_t* from, int64_t count) {
  using Halves = uint16_t __attribute__((vector_size(32)));
  const Halves halves = count >= 16 ? load<Halves>(from) : load<Halves>(from, count);
  return (Sums)(__builtin_convertvector(halves, Pairs) << 16);
}

inline float total(Sums lanes) {
  float sum = 0;
  for (int i = 0; i < 16; i++) sum += lanes[i];
  return sum;
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

constexpr int kBlock = 64;  // rows of W that are computed together, so that a block of x is loaded once for all of them

// M rows of x times some rows of W, at most kBlock. x goes in blocks of columns that fit the first-level cache.
template <int M>
void block(const BF16* w, const BF16* x, BF16* y, int64_t rows, int64_t N, int64_t K) {
  // 6 to 16 sums in flight; two rows of W even for one row of x, because some processors fetch two streams that are far
  // apart faster than one
  constexpr int R = 2, U = M > 4 ? 1 : M > 1 ? 2 : 4;
  const int64_t columns = M == 1 ? K : 2048;
  float sums[kBlock * M] = {};
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

at::Tensor few_rows(const at::Tensor& input, const at::Tensor& weight) {
  TORCH_CHECK(
      input.scalar_type() == at::kBFloat16 && weight.scalar_type() == at::kBFloat16 && weight.is_contiguous() &&
          weight.dim() == 2 && weight.size(1) > 0 && input.size(-1) == weight.size(1),
      "few_rows takes x (..., K) and a contiguous W (N, K) in bfloat16");
  at::Tensor rows = input.contiguous();
  const int64_t N = weight.size(0), K = weight.size(1), M = rows.numel() / K;
  auto shape = input.sizes().vec();
  shape.back() = N;
  at::Tensor result = at::empty(shape, input.options());
  const BF16 *w = weight.const_data_ptr<BF16>(), *x = rows.const_data_ptr<BF16>();
  BF16* y = result.data_ptr<BF16>();
  constexpr decltype(&block<1>) blocks[] = {block<1>, block<2>, block<3>, block<4>,
                                            block<5>, block<6>, block<7>, block<8>};
  at::parallel_for(0, N, std::max<int64_t>(1, 32768 / K), [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; n += kBlock) {
      for (int64_t m = 0; m < M; m += 8) {
        blocks[std::min<int64_t>(M - m, 8) - 1](
            w + n * K, x + m * K, y + m * N + n, std::min<int64_t>(kBlock, end - n), N, K);
      }
    }
  });
  return result;
}

// ---------------------------------------------------------------------------------------------------------------------
// W in integers: 8 bits and a scale per row, or 4 bits with a scale and a zero per group of columns (int_linear.py)
//
// Processors multiply bytes four times as fast as they turn them into floats. So x becomes fixed-point numbers of 16 bits,
// 256 high + low, with a scale for each block of columns. That changes a number by some 2^-16 of the largest in its
// block at most: less than bfloat16 itself had rounded that one. (A block of nothing above 1e-30 counts as zeros.)

using Bytes = uint8_t __attribute__((vector_size(64)));
using SignedBytes = int8_t __attribute__((vector_size(64)));
using Ints = int32_t __attribute__((vector_size(64)));
constexpr int64_t kColumns = 128;  // of a block

// To each lane's sum, add the products of its four pairs.
inline Ints add_products(Ints sums, Bytes w, SignedBytes x) {
#ifdef __AVX512VNNI__
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)w, (__m512i)x);
#else
  for (int i = 0; i < 4; i++) sums += (((Ints)w >> 8 * i) & 255) * ((Ints)x << (24 - 8 * i) >> 24);
  return sums;
#endif
}

// One block of a row of x. In 4 bits its even columns come first, then the odd ones, as they are unpacked from W.
struct Block {
  SignedBytes high[2], low[2];
  Ints offset;  // what w + 128 instead of w adds to the sums
  float scale;
};

template <bool kFourBits>
Block fixed_point(const BF16* x, int64_t count) {
  Sums values[8];
  Ints largest = {};  // as bits: positive floats are in the order of their bits, and NaN comes last
  for (int i = 0; i < 4; i++) {
    const int64_t here = std::clamp<int64_t>(count - i * kVector, 0, kVector);
    const Pairs pairs = load<Pairs>(x + i * kVector, here);
    if (kFourBits) {
      values[i] = (Sums)(pairs << 16), values[4 + i] = (Sums)(pairs & 0xffff0000u);
    } else {
      const uint16_t* halves = reinterpret_cast<const uint16_t*>(&pairs);
      values[2 * i] = load_floats(halves, 16), values[2 * i + 1] = load_floats(halves + 16, 16);
    }
    const Ints even = (Ints)(pairs << 16 & 0x7fffffffu), odd = (Ints)(pairs & 0x7fff0000u);
    largest = even > largest ? even : largest;
    largest = odd > largest ? odd : largest;
  }
  int32_t bits = 0;
  for (int i = 0; i < 16; i++) bits = std::max(bits, largest[i]);
  float top;
  std::memcpy(&top, &bits, sizeof(top));
  if (top < 1e-30f) top = 0;  // and not a number stays that
  const float inverse = top > 0 ? 32639 / top : 0;  // 32639 = 127 * 256 + 127
  Block block = {.scale = top / 32639};
  for (int i = 0; i < 8; i++) {
    const Sums half = (Sums)(((Ints)values[i] & INT32_MIN) | 0x3f000000);  // 0.5 with the sign of x
    const Ints fixed = __builtin_convertvector(values[i] * inverse + half, Ints), high = (fixed + 128) >> 8;
    using Sixteen = int8_t __attribute__((vector_size(16)));
    const Sixteen parts[2] = {
        __builtin_convertvector(high, Sixteen), __builtin_convertvector(fixed - (high << 8), Sixteen)};
    std::memcpy(reinterpret_cast<char*>(block.high) + 16 * i, &parts[0], 16);
    std::memcpy(reinterpret_cast<char*>(block.low) + 16 * i, &parts[1], 16);
  }
  const Bytes middle = Bytes{} + uint8_t(128);
  for (int i = 0; i < 2; i++) {
    block.offset += (add_products(Ints{}, middle, block.high[i]) << 8) + add_products(Ints{}, middle, block.low[i]);
  }
  return block;
}

inline Sums pick(Sums from, Pairs lanes) {
#ifdef __AVX512F__
  return (Sums)_mm512_permutexvar_ps((__m512i)lanes, (__m512)from);
#else
  Sums picked;
  for (int i = 0; i < 16; i++) picked[i] = from[lanes[i]];
  return picked;
#endif
}

struct Integers {
  const uint8_t* w;  // (N, bytes)
  const uint16_t *scales, *zeros;  // (N, G) bfloat16; zeros only in 4 bits
  int64_t N, K, G, bytes, shift;  // a row has so many bytes, a group 2^shift columns
  int64_t repeat;  // blocks that 16 groups reach for
  Pairs group[16];  // in each of those blocks, the group of each lane
};

// M rows of x, `blocks` blocks each, times row n of W and R - 1 others, `apart` rows from one another. sums (M, G padded
// to 16): of the numbers of x in each group.
template <bool kFourBits, int M, int R>
void int_tile(const Integers& W, const Block* x, const float* sums, BF16* y, int64_t n, int64_t apart) {
  const int64_t blocks = (W.K + kColumns - 1) / kColumns, block_bytes = kFourBits ? 64 : 128;
  const int64_t padded = (W.G + 15) / 16 * 16;
  Sums lanes[R][M] = {}, scales[R];
  for (int64_t b = 0; b < blocks; b++) {
    const int64_t left = W.bytes - b * block_bytes;
    Bytes w[R][2];
    Sums scale[R];
    for (int r = 0; r < R; r++) {
      const uint8_t* from = W.w + (n + r * apart) * W.bytes + b * block_bytes;
      if (kFourBits) {
        const Bytes both = left >= 64 ? load<Bytes>(from) : load<Bytes>(from, left);
        w[r][0] = both & 15, w[r][1] = both >> 4;
        const int64_t first = b * kColumns >> W.shift;
        if ((b & (W.repeat - 1)) == 0) scales[r] = load_floats(W.scales + (n + r * apart) * W.G + first, W.G - first);
        scale[r] = pick(scales[r], W.group[b & (W.repeat - 1)]);
      } else if (left >= 128) {
        w[r][0] = load<Bytes>(from) ^ 128, w[r][1] = load<Bytes>(from + 64) ^ 128;
      } else {  // x is zero behind its end, whatever w is there
        w[r][0] = load<Bytes>(from, std::min<int64_t>(left, 64)) ^ 128;
        w[r][1] = load<Bytes>(from + 64, std::max<int64_t>(left - 64, 0)) ^ 128;
      }
      __builtin_prefetch(from + W.bytes);
      if (!kFourBits) __builtin_prefetch(from + W.bytes + 64);
    }
    for (int m = 0; m < M; m++) {
      const Block& xs = x[m * blocks + b];
      for (int r = 0; r < R; r++) {
        const Ints high = add_products(add_products(Ints{}, w[r][0], xs.high[0]), w[r][1], xs.high[1]);
        const Ints low = add_products(add_products(Ints{}, w[r][0], xs.low[0]), w[r][1], xs.low[1]);
        const Sums all = __builtin_convertvector((high << 8) + low - (kFourBits ? Ints{} : xs.offset), Sums);
        lanes[r][m] += all * (kFourBits ? scale[r] * xs.scale : Sums{} + xs.scale);
      }
    }
  }
  for (int r = 0; r < R; r++) {
    const int64_t row = n + r * apart;
    for (int m = 0; m < M; m++) {
      if (kFourBits) {
        for (int64_t g = 0; g < W.G; g += 16) {
          lanes[r][m] += load_floats(W.zeros + row * W.G + g, W.G - g) * load<Sums>(sums + m * padded + g);
        }
        y[m * W.N + row] = total(lanes[r][m]);
      } else {
        y[m * W.N + row] = total(lanes[r][m]) * load_floats(W.scales + row, 1)[0];
      }
    }
  }
}

template <bool kFourBits, int M>
void int_block(const Integers& W, const Block* x, const float* sums, BF16* y, int64_t begin, int64_t end) {
  const int64_t apart = (end - begin) / 2;
  for (int64_t n = begin; n < begin + apart; n++) int_tile<kFourBits, M, 2>(W, x, sums, y, n, apart);
  if ((end - begin) % 2) int_tile<kFourBits, M, 1>(W, x, sums, y, end - 1, 0);
}

Integers integers(const at::Tensor& weight, const at::Tensor& scales, const std::optional<at::Tensor>& zeros) {
  const bool four_bits = zeros.has_value();
  auto fits = [&](const at::Tensor& t) {
    return t.scalar_type() == at::kBFloat16 && t.is_contiguous() && t.dim() == 2 && t.size(0) == weight.size(0);
  };
  TORCH_CHECK(
      weight.is_contiguous() && weight.dim() == 2 && weight.size(1) > 0 && fits(scales) &&
          weight.scalar_type() == (four_bits ? at::kByte : at::kChar) && scales.size(1) > 0 &&
          (four_bits ? fits(*zeros) : scales.size(1) == 1),
      "integers are W (N, K) in int8 with scales (N, 1), or (N, K / 2) in uint8 with scales and zeros (N, G)");
  const int64_t N = weight.size(0), bytes = weight.size(1), K = bytes * (four_bits ? 2 : 1), G = scales.size(1);
  const uint64_t size = K / G;
  TORCH_CHECK(
      !four_bits || (zeros->sizes() == scales.sizes() && K % G == 0 && size >= 8 && std::has_single_bit(size)),
      "a group is a power of two of columns, at least 8");
  Integers W = {
      static_cast<const uint8_t*>(weight.const_data_ptr()), static_cast<const uint16_t*>(scales.const_data_ptr()),
      four_bits ? static_cast<const uint16_t*>(zeros->const_data_ptr()) : nullptr, N, K, G, bytes};
  W.shift = std::countr_zero(size);
  W.repeat = std::clamp<int64_t>(16 * size / kColumns, 1, 16);
  for (int64_t b = 0; b < W.repeat; b++) {
    for (int64_t i = 0; i < 16; i++) W.group[b][i] = (b * kColumns + 8 * i) >> W.shift;
  }
  return W;
}

at::Tensor few_rows_int(
    const at::Tensor& input, const at::Tensor& weight, const at::Tensor& scales, const std::optional<at::Tensor>& zeros) {
  const Integers W = integers(weight, scales, zeros);
  const int64_t N = W.N, K = W.K, G = W.G;
  const bool four_bits = W.zeros;
  TORCH_CHECK(input.scalar_type() == at::kBFloat16 && input.size(-1) == K, "few_rows_int takes x (..., K) in bfloat16");
  at::Tensor rows = input.contiguous();
  const int64_t M = rows.numel() / K, blocks = (K + kColumns - 1) / kColumns, padded = (G + 15) / 16 * 16;
  auto shape = input.sizes().vec();
  shape.back() = N;
  at::Tensor result = at::empty(shape, input.options());
  const BF16* x = rows.const_data_ptr<BF16>();
  BF16* y = result.data_ptr<BF16>();
  std::vector<Block> fixed(M * blocks);
  std::vector<float> sums(four_bits ? M * padded : 0);
  for (int64_t m = 0; m < M; m++) {
    for (int64_t b = 0; b < blocks; b++) {
      const int64_t k = b * kColumns;
      fixed[m * blocks + b] = (four_bits ? fixed_point<true> : fixed_point<false>)(x + m * K + k, std::min(kColumns, K - k));
    }
    for (int64_t g = 0; four_bits && g < G; g++) {
      for (int64_t k = g * (K / G); k < (g + 1) * (K / G); k++) sums[m * padded + g] += float(x[m * K + k]);
    }
  }
  constexpr decltype(&int_block<true, 1>) kernels[2][4] = {
      {int_block<false, 1>, int_block<false, 2>, int_block<false, 3>, int_block<false, 4>},
      {int_block<true, 1>, int_block<true, 2>, int_block<true, 3>, int_block<true, 4>}};
  at::parallel_for(0, N, std::max<int64_t>(1, 65536 / K), [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; n += kBlock) {
      for (int64_t m = 0; m < M; m += 4) {
        kernels[four_bits][std::min<int64_t>(M - m, 4) - 1](
            W, fixed.data() + m * blocks, sums.data() + m * padded, y + m * N, n, std::min(n + kBlock, end));
      }
    }
  });
  return result;
}

// The two numbers, rounded to bfloat16, as a pair.
inline uint32_t pair(float first, float second) {
  auto rounded = [](float number) {
    uint32_t bits;
    std::memcpy(&bits, &number, sizeof(bits));
    return bits + 0x7fff + (bits >> 16 & 1);
  };
  return rounded(first) >> 16 | (rounded(second) & 0xffff0000u);
}

at::Tensor dequantize(const at::Tensor& weight, const at::Tensor& scales, const std::optional<at::Tensor>& zeros) {
  const Integers W = integers(weight, scales, zeros);
  at::Tensor result = at::empty({W.N, W.K}, scales.options());
  uint16_t* y = static_cast<uint16_t*>(result.data_ptr());
  at::parallel_for(0, W.N, std::max<int64_t>(1, 32768 / W.K), [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; n++) {
      const uint8_t* from = W.w + n * W.bytes;
      uint16_t* to = y + n * W.K;
      const int64_t count = W.bytes / W.G;  // of a group
      for (int64_t g = 0; g < W.G; g++, from += count) {
        const float scale = load_floats(W.scales + n * W.G + g, 1)[0];
        if (W.zeros) {
          const float zero = load_floats(W.zeros + n * W.G + g, 1)[0];
          for (int64_t i = 0; i < count; i++, to += 2) {
            const uint32_t both = pair((from[i] & 15) * scale + zero, (from[i] >> 4) * scale + zero);
            std::memcpy(to, &both, sizeof(both));
          }
        } else {
          for (int64_t i = 0; i < count; i++) to[i] = pair(int8_t(from[i]) * scale, 0);
        }
      }
    }
  });
  return result;
}

// x (..., K) of many rows: W becomes floats, by pieces that are still in the cache when they are multiplied.
at::Tensor many_rows_int(
    const at::Tensor& input, const at::Tensor& weight, const at::Tensor& scales, const std::optional<at::Tensor>& zeros) {
  const at::Tensor rows = input.reshape({-1, input.size(-1)});
  const int64_t N = weight.size(0), step = std::max<int64_t>(1, (1 << 19) / input.size(-1));
  at::Tensor result = at::empty({rows.size(0), N}, input.options());
  for (int64_t n = 0; n < N; n += step) {
    auto piece = [&](const at::Tensor& t) { return t.narrow(0, n, std::min(step, N - n)); };
    const at::Tensor floats = dequantize(piece(weight), piece(scales), zeros ? std::optional(piece(*zeros)) : zeros);
    result.narrow(1, n, floats.size(0)).copy_(at::linear(rows, floats));
  }
  auto shape = input.sizes().vec();
  shape.back() = N;
  return result.view(shape);
}

// ---------------------------------------------------------------------------------------------------------------------
// Attention of one new position in each row of a batch

// e^x for x <= 0, to 2e-7 of it; below -87 about 1e-38
inline Sums exponential(Sums x) {
  x = x > -87.0f ? x : Sums{} - 87.0f;
  const Ints n = __builtin_convertvector(x * 1.44269504f - 0.5f, Ints);
  const Sums r = x - __builtin_convertvector(n, Sums) * 0.693147181f;  // |r| <= ln(2) / 2
  const Sums p = 1 + r * (1 + r * (1 / 2.0f + r * (1 / 6.0f + r * (1 / 24.0f + r * (1 / 120.0f + r * (1 / 720.0f))))));
  return (Sums)((Ints)p + (n << 23));
}

constexpr int64_t kAhead = 32;  // keys or values that the processor is told to fetch in advance

// From two vectors with n = 16 / s numbers to be summed for each result, s of them, one with n / 2 for each of 2 s.
template <int s, int... i>
inline Sums halve(Sums a, Sums b, std::integer_sequence<int, i...>) {
  return __builtin_shufflevector(a, b, (i & s ? 16 + i : i)...) +
         __builtin_shufflevector(a, b, (i & s ? 16 + (i ^ s) : i ^ s)...);
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
        const Sums value = load_floats(reinterpret_cast<const uint16_t*>(values + t * H + h + 16 * c), 16);
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) weighted[m][c] += weights[t * M + m] * value;
      }
    }
    for (int m = 0; m < M; m++) {
      for (int i = 0; i < 64; i++) y[m * H + h + i] = weighted[m][i / 16][i % 16] / sum[m];
    }
  }
}

// q (B, K, G, H) at positions (B, 1) over the cached keys and values (B, K, T, H) up to there.
at::Tensor decode_attention(
    const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values, const at::Tensor& positions) {
  auto is_cache = [&](const at::Tensor& t) {
    return t.scalar_type() == at::kBFloat16 && t.is_contiguous() && t.sizes() == keys.sizes();
  };
  TORCH_CHECK(
      q.dim() == 4 && q.scalar_type() == at::kBFloat16 && keys.dim() == 4 && is_cache(keys) && is_cache(values) &&
          q.size(0) == keys.size(0) && q.size(1) == keys.size(1) && q.size(3) == keys.size(3) &&
          q.size(3) % 64 == 0 && positions.scalar_type() == at::kLong && positions.numel() == q.size(0),
      "decode_attention takes q (B, K, G, H) and a contiguous cache (B, K, T, H) in bfloat16, H a multiple of 64, and "
      "positions (B, 1)");
  const int64_t K = q.size(1), G = q.size(2), H = q.size(3), T = keys.size(2);
  const at::Tensor queries = q.contiguous(), last = positions.contiguous();
  at::Tensor result = at::empty(queries.sizes(), queries.options());
  const BF16 *q_data = queries.const_data_ptr<BF16>(), *k_data = keys.const_data_ptr<BF16>();
  const BF16* v_data = values.const_data_ptr<BF16>();
  const int64_t* p_data = last.const_data_ptr<int64_t>();
  BF16* y_data = result.data_ptr<BF16>();
  constexpr decltype(&attend<1>) kernels[] = {attend<1>, attend<2>, attend<4>};
  at::parallel_for(0, q.size(0) * K, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> scores(4 * T + 16);
    for (int64_t i = begin; i < end; i++) {
      const int64_t length = std::clamp<int64_t>(p_data[i / K] + 1, 1, T);
      const BF16 *k = k_data + i * T * H, *v = v_data + i * T * H;
      for (int64_t g = 0; g < G;) {
        const int which = G - g >= 4 ? 2 : G - g >= 2 ? 1 : 0;
        const int64_t first = (i * G + g) * H;
        kernels[which](q_data + first, k, v, y_data + first, scores.data(), length, H);
        g += 1 << which;
      }
    }
  });
  return result;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ladder, library) {
  library.def("decode_attention(Tensor q, Tensor keys, Tensor values, Tensor positions) -> Tensor");
  library.def("few_rows(Tensor x, Tensor weight) -> Tensor");
  library.def("many_rows_int(Tensor x, Tensor weight, Tensor scales, Tensor? zeros) -> Tensor");
  library.def("few_rows_int(Tensor x, Tensor weight, Tensor scales, Tensor? zeros) -> Tensor");
}

TORCH_LIBRARY_IMPL(ladder, CPU, library) {
  library.impl("decode_attention", decode_attention);
  library.impl("few_rows", few_rows);
  library.impl("many_rows_int", many_rows_int);
  library.impl("few_rows_int", few_rows_int);
}
