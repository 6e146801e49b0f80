// The loops of skinny_gemm.cpp, over vectors as long as the processor's: what differs between instruction sets stands first.
// Nothing here knows of PyTorch, so that a small program can run it on an emulated processor.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#ifdef __AVX2__
#include <immintrin.h>
#else
#include <arm_neon.h>
#endif

// ---------------------------------------------------------------------------------------------------------------------
// What differs between instruction sets

// kLanes: numbers of 32 bits in a vector. kMost, kMostInt: rows of x whose sums fit the registers, with W in bfloat16 and
// in integers.
#if defined(__AVX512BW__)
constexpr int kLanes = 16, kMost = 8, kMostInt = 8;
#elif defined(__AVX2__)
constexpr int kLanes = 8, kMost = 5, kMostInt = 6;
#else  // NEON with dot products
constexpr int kLanes = 4, kMost = 8, kMostInt = 2;
#endif

using Pairs = uint32_t __attribute__((vector_size(4 * kLanes)));  // of bfloat16 numbers, two in each lane
using Sums = float __attribute__((vector_size(4 * kLanes)));
using Ints = int32_t __attribute__((vector_size(4 * kLanes)));
using Shorts = uint16_t __attribute__((vector_size(4 * kLanes)));
using Bytes = uint8_t __attribute__((vector_size(4 * kLanes)));
using Halves = uint16_t __attribute__((vector_size(2 * kLanes)));

// half(pairs, 0..kHalves - 1): what multiply_add(), which adds the products of both numbers of a lane, takes in turn.
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr int kHalves = 1;
using Half = Pairs;
inline Half half(Pairs pairs, int) { return pairs; }
#else  // a bfloat16 is the upper half of a float
constexpr int kHalves = 2;
using Half = Sums;
inline Half half(Pairs pairs, int which) { return (Half)(which ? pairs & 0xffff0000u : pairs << 16); }
#endif

// By name, also where it is sums + w * x: GCC would add two products first, and keep the sums in memory.
inline Sums multiply_add(Sums sums, Half w, Half x) {
#if defined(__AVX512BF16__)
  return (Sums)_mm512_dpbf16_ps((__m512)sums, (__m512bh)w, (__m512bh)x);
#elif defined(__AVX512BW__)
  return (Sums)_mm512_fmadd_ps((__m512)w, (__m512)x, (__m512)sums);
#elif defined(__AVX2__)
  return (Sums)_mm256_fmadd_ps((__m256)w, (__m256)x, (__m256)sums);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return (Sums)vbfdotq_f32((float32x4_t)sums, (bfloat16x8_t)w, (bfloat16x8_t)x);
#else
  return (Sums)vfmaq_f32((float32x4_t)sums, (float32x4_t)w, (float32x4_t)x);
#endif
}

// To each lane's sum, dot() adds products of a lane of W, four columns, with one of two numbers for x. kBytes: all four
// meet the high bytes of x and then the low ones. Else the two even columns, as 16 bits, meet x, and then the odd ones.
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
constexpr bool kBytes = false, kSigned = false;
#elif defined(__AVX2__) || defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool kBytes = true, kSigned = false;
#else
constexpr bool kBytes = true, kSigned = true;  // bytes of W
#endif
inline Ints dot(Ints sums, Bytes w, int32_t x) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)w, _mm512_set1_epi32(x));
#elif defined(__AVX512BW__)
  return sums + (Ints)_mm512_madd_epi16((__m512i)w, _mm512_set1_epi32(x));
#elif defined(__AVXVNNI__)
  return (Ints)_mm256_dpwssd_avx_epi32((__m256i)sums, (__m256i)w, _mm256_set1_epi32(x));
#elif defined(__AVX2__)
  sums += (Ints)_mm256_madd_epi16((__m256i)w, _mm256_set1_epi32(x));
  asm("" : "+x"(sums));  // else GCC computes many products first and adds them later, with too few registers for both
  return sums;
#elif defined(__ARM_FEATURE_MATMUL_INT8)
  return (Ints)vusdotq_s32((int32x4_t)sums, (uint8x16_t)w, vreinterpretq_s8_s32(vdupq_n_s32(x)));
#else
  return (Ints)vdotq_s32((int32x4_t)sums, (int8x16_t)w, vreinterpretq_s8_s32(vdupq_n_s32(x)));
#endif
}

// The first `count` numbers of a vector from memory, zeros behind them.
template <typename Vector, typename Number>
inline Vector load(const Number* from, int64_t count = sizeof(Vector) / sizeof(Number)) {
  Vector vector = {};
  std::memcpy(&vector, from, count * sizeof(Number));
  return vector;
}

// `count` bfloat16 numbers, at most kLanes, as floats.
inline Sums load_floats(const void* from, int64_t count = kLanes) {
  const uint16_t* numbers = static_cast<const uint16_t*>(from);
  const Halves halves = count >= kLanes ? load<Halves>(numbers) : load<Halves>(numbers, std::max<int64_t>(count, 0));
  return (Sums)(__builtin_convertvector(halves, Pairs) << 16);
}

// The kLanes scales or zeros of a group as floats: float16 numbers if `half`, else bfloat16.
inline Sums load_scales(const void* from, bool half) {
  if (!half) return load_floats(from);
#if defined(__AVX512BW__)
  return (Sums)_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(from)));
#elif defined(__AVX2__)
  return (Sums)_mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(from)));
#else
  return (Sums)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(static_cast<const uint16_t*>(from))));
#endif
}

// The first `count` floats of a vector as bfloat16 numbers, rounded to the nearest, ties to even.
inline void store(Sums numbers, uint16_t* to, int64_t count = kLanes) {
  const Pairs bits = (Pairs)numbers;
  const Halves halves = __builtin_convertvector((bits + 0x7fff + (bits >> 16 & 1)) >> 16, Halves);
  std::memcpy(to, &halves, std::clamp<int64_t>(count, 0, kLanes) * sizeof(uint16_t));
}

inline float total(Sums lanes) {
  float sum = 0;
  for (int i = 0; i < kLanes; i++) sum += lanes[i];
  return sum;
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

// ---------------------------------------------------------------------------------------------------------------------
// W in bfloat16

constexpr int64_t kVector = 2 * kLanes;

// To sums (R, M), add M rows of x times R rows of W, over `count` columns. The rows of W and of the sums lie `apart` rows
// from one another. U partial sums of each hide the latency of an addition. With more than one row of x, the processor
// needs help to fetch the next rows of W in time.
template <int M, int R, int U>
void tile(const uint16_t* w, const uint16_t* x, float* sums, int64_t K, int64_t count, int64_t apart) {
  Sums lanes[R][M][U] = {};
  auto add = [&](int64_t k, int u, int64_t n) {
    Pairs xs[M], ws[R];
    for (int m = 0; m < M; m++) xs[m] = load<Pairs>(x + m * K + k, n);
    for (int r = 0; r < R; r++) {
      ws[r] = load<Pairs>(w + r * apart * K + k, n);
      if (M > 1) __builtin_prefetch(w + (r * apart + 1) * K + k);
    }
#pragma GCC unroll 2
    for (int h = 0; h < kHalves; h++) {
      for (int m = 0; m < M; m++) {
        for (int r = 0; r < R; r++) lanes[r][m][u] = multiply_add(lanes[r][m][u], half(ws[r], h), half(xs[m], h));
      }
    }
  };
  int64_t k = 0;
  for (; k + U * kVector <= count; k += U * kVector) {
#pragma GCC unroll 8
    for (int u = 0; u < U; u++) add(k + u * kVector, u, kVector);
  }
  for (; k + kVector <= count; k += kVector) add(k, 0, kVector);
  if (k < count) add(k, 0, count - k);
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
template <int M, typename Number>
void block(const uint16_t* w, const uint16_t* x, Number* y, int64_t rows, int64_t N, int64_t K) {
  // 6 to 16 sums in flight; two rows of W even for one row of x, because some processors fetch two streams that are far
  // apart faster than one
  constexpr int R = 2, U = M > 4 || (M > 2 && kLanes == 8) ? 1 : M > 1 ? 2 : 4;
  const int64_t columns = M == 1 ? K : 2048;
  float sums[M == 1 ? kLongBlock : kBlock * M] = {};
  for (int64_t k = 0; k < K; k += columns) {
    const int64_t count = std::min(columns, K - k), apart = rows / R;
    for (int64_t r = 0; r < apart; r++) tile<M, R, U>(w + r * K + k, x + k, sums + r * M, K, count, apart);
    for (int64_t r = R * apart; r < rows; r++) tile<M, 1, U>(w + r * K + k, x + k, sums + r * M, K, count, 0);
  }
  for (int64_t r = 0; r < rows; r++) {
    for (int m = 0; m < M; m++) y[m * N + r] = sums[r * M + m];
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// W in integers: 8 bits and a scale per row, or 8 or 4 bits with a scale and a zero per group of columns (quant_linear.py)
//
// W comes in panels of 16 rows, as skinny_gemm.py packs them: 64 bytes have 4 for each row, with four columns of it; in 4
// bits eight, the later four in the upper halves. A group begins with 64 bytes of the rows' 16 scales and 16 zeros, in
// bfloat16, or in float16. So no sum goes across lanes, and W is read from its begin to its end.
//
// 8 bits in groups are stored in as few bits as the numbers need, 4, 5, 6 or 8: see "8 bits in groups" below.
//
// Processors multiply bytes four times as fast as they turn them into floats. So x becomes fixed-point numbers of 16 bits,
// 256 high + low, with a scale for each block of columns. That changes a number by some 2^-16 of the largest in its
// block at most: less than bfloat16 itself had rounded that one. (A block of nothing above 1e-30 counts as zeros.)

constexpr int64_t kColumns = 128;  // of a block
constexpr int64_t kGroupColumns = 32;  // of a block of 8 bits in groups
constexpr int64_t kRows = 16;  // of a panel
constexpr int64_t kRowsInCache = 96;  // of x: their blocks stay in the second-level cache for all panels
constexpr int kParts = kRows / kLanes;  // vectors that have a lane for each row
constexpr int64_t kPrefetch = 1024;  // bytes to be fetched in advance; and four times as many, from farther away

// One block of a row of x: for four columns each the two numbers that dot() takes, one of either kind.
struct Block {
  int32_t parts[2][kColumns / 4];
  float scale;
  int32_t offset;  // what w + 128 instead of w adds to the sum
};

inline Block fixed_point(const uint16_t* x, int64_t count) {
  constexpr int64_t kVectors = kColumns / kLanes;
  Sums values[kVectors];
  Ints largest = {};  // as bits: positive floats are in the order of their bits, and NaN comes last
  for (int64_t i = 0; i < kVectors; i++) {
    values[i] = load_floats(x + kLanes * i, count - kLanes * i);
    const Ints bits = (Ints)values[i] & INT32_MAX;
    largest = bits > largest ? bits : largest;
  }
  int32_t bits = 0;
  for (int i = 0; i < kLanes; i++) bits = std::max(bits, largest[i]);
  float top;
  std::memcpy(&top, &bits, sizeof(top));
  if (top < 1e-30f) top = 0;  // and not a number stays that
  const float inverse = top > 0 ? 32639 / top : 0;  // 32639 = 127 * 256 + 127
  Block block;
  block.scale = top / 32639;
  int16_t fixed[kColumns];
  Ints sum = {};
  for (int64_t i = 0; i < kVectors; i++) {
    const Sums half = (Sums)(((Ints)values[i] & INT32_MIN) | 0x3f000000);  // 0.5 with the sign of x
    const Ints number = __builtin_convertvector(values[i] * inverse + half, Ints);
    const Halves halves = __builtin_convertvector(number, Halves);
    std::memcpy(fixed + kLanes * i, &halves, sizeof(halves));
    sum += number;
  }
  for (int64_t i = 0; i < kColumns; i++) {
    if (kBytes) {
      const int high = (fixed[i] + 128) >> 8;
      reinterpret_cast<int8_t*>(block.parts[0])[i] = high;
      reinterpret_cast<int8_t*>(block.parts[1])[i] = fixed[i] - (high << 8);
    } else {
      reinterpret_cast<int16_t*>(block.parts[i % 2])[i / 2] = fixed[i];
    }
  }
  uint32_t offset = 0;
  for (int i = 0; i < kLanes; i++) offset += 128 * uint32_t(sum[i]);
  block.offset = offset;
  return block;
}

// The operand of dot() for part `s` of x: of bytes of W, or of the lower (i = 0) or upper halves of those in 4 bits.
template <bool kFourBits>
inline Bytes operand(Bytes w, int i, int s) {
  if (kBytes) return !kFourBits ? (kSigned ? w ^ 128 : w) : i ? w >> 4 : w & 15;
  const Shorts shifted = (Shorts)w >> (8 * s + (kFourBits ? 4 * i : 0));
  return (Bytes)(s && (i || !kFourBits) ? shifted : shifted & (kFourBits ? uint16_t{15} : uint16_t{255}));
}

struct Integers {
  const uint8_t* w;  // (P, G, 1 + V, 64); 8 bits in groups: (P, G, V, 32), where G counts blocks of 32 columns
  int64_t P, N, K, G;
  int64_t vectors, size;  // of a group: 64 (or 32) bytes each, those of its scales too, and columns
  bool four_bits, half;  // half: scales and zeros are float16
  // 8 bits in groups:
  int stored_bits, groups;  // of a number in memory; of a block of 32 columns (0: other integers)
  bool has_zeros, is_signed;  // is_signed: what is stored is 2^(stored_bits - 1) more than the number

  // columns of x whose sum an int_panel wants to know; 0: it wants none
  int64_t summed() const { return groups ? kGroupColumns / groups : four_bits ? size : 0; }
};

// y (M): M rows of x, `blocks` blocks each, times panel p of W. sums (M, G): of the numbers of x in each group.
template <bool kFourBits, int M>
void int_panel(const Integers& W, const Block* x, int64_t blocks, const float* sums, Sums (*y)[kParts], int64_t p) {
  constexpr int U = M > 2 ? 1 : 2;  // partial sums, which hide the latency of an addition
  constexpr int64_t kStep = kFourBits ? 64 : 128;  // bytes of 8 columns
  const uint8_t* w = W.w + p * W.G * W.vectors * 64;
  const int64_t size = kFourBits ? W.size : kColumns;
  Sums lanes[M][kParts] = {}, scale[kParts], zero[kParts];
  for (int64_t k = 0; k < W.K; k += size) {
    if (kFourBits || k == 0) {
      for (int part = 0; part < kParts; part++) scale[part] = load_scales(w + 2 * kLanes * part, W.half);
      for (int part = 0; part < kParts; part++) zero[part] = load_scales(w + 32 + 2 * kLanes * part, W.half);
      w += 64;
    }
    Ints all[2][M][kParts][U] = {};
    const Block* here = x + k / kColumns;
    const int64_t first = k % kColumns, stop = first + std::min(size, W.K - k);
    for (int64_t j = first; j < stop; j += 8, w += kStep) {
      for (int i = 0; i < kStep; i += 64) {
        __builtin_prefetch(w + 4 * kPrefetch + i, 0, 2);  // into the second-level cache
        __builtin_prefetch(w + kPrefetch + i);
      }
#pragma GCC unroll 2
      for (int i = 0; i < 2; i++) {
#pragma GCC unroll 2
        for (int s = 0; s < 2; s++) {
          Bytes ws[kParts];
#pragma GCC unroll 4
          for (int part = 0; part < kParts; part++) {
            ws[part] = operand<kFourBits>(load<Bytes>(w + (kFourBits ? 0 : 64 * i) + 4 * kLanes * part), i, s);
          }
#pragma GCC unroll 8
          for (int m = 0; m < M; m++) {
            const int32_t xs = here[m * blocks].parts[s][j / 4 + i];
#pragma GCC unroll 4
            for (int part = 0; part < kParts; part++) {
              Ints& sum = all[kBytes ? s : 0][m][part][i % U];
              sum = dot(sum, ws[part], xs);
            }
          }
        }
      }
    }
    for (int m = 0; m < M; m++) {
      const Block& xs = here[m * blocks];
      for (int part = 0; part < kParts; part++) {
        for (int u = 1; u < U; u++) all[0][m][part][0] += all[0][m][part][u], all[1][m][part][0] += all[1][m][part][u];
        const Ints high = all[0][m][part][0] << (kBytes ? 8 : 0);
        const Ints sum = high + all[1][m][part][0] - (kFourBits || kSigned ? 0 : xs.offset);
        lanes[m][part] +=
            __builtin_convertvector(sum, Sums) * (kFourBits ? scale[part] * xs.scale : Sums{} + xs.scale);
        if (kFourBits) lanes[m][part] += zero[part] * sums[m * W.G + k / size];
      }
    }
  }
  for (int m = 0; m < M; m++) {
    for (int part = 0; part < kParts; part++) y[m][part] = kFourBits ? lanes[m][part] : lanes[m][part] * scale[part];
  }
}

// Panels from..to of W as floats, (K, n) with all of their rows.
template <bool kFourBits>
void dequantize(const Integers& W, uint16_t* y, int64_t from, int64_t to) {
  const int64_t n = (to - from) * kRows;
  constexpr int kTimes = kFourBits ? 2 : 1, kBits = kFourBits ? 4 : 8;
  for (int64_t p = from; p < to; p++) {
    for (int part = 0; part < kParts; part++) {
      const uint8_t* w = W.w + p * W.G * W.vectors * 64 + 4 * kLanes * part;
      Sums scale, zero;
      for (int64_t v = 0, k = 0; k < W.K; v++, w += 64) {
        if (v % W.vectors == 0) {
          scale = load_scales(w - 2 * kLanes * part, W.half);
          zero = kFourBits ? load_scales(w - 2 * kLanes * part + 32, W.half) : scale * -128;
          continue;
        }
        const Ints four = load<Ints>(w);
        for (int time = 0; time < kTimes; time++) {
          for (int c = 0; c < 4 && k < W.K; c++, k++) {
            const Ints q = four >> (8 * c + 4 * time) & ((1 << kBits) - 1);
            store(__builtin_convertvector(q, Sums) * scale + zero, y + k * n + (p - from) * kRows + kLanes * part);
          }
        }
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// 8 bits in groups
//
// A panel is a row of blocks of 32 columns. A block begins with the 16 rows' scales of each of its 1, 2 or 4 groups (32
// bytes each), and then has their zeros, unless all of W's are 0. The numbers follow in vectors of 64 bytes, 4 for each
// row. With 8 bits a vector has four columns, eight of them a block. With 4, 5 and 6 bits the lower 4 of each number are
// stored as those of int4 are, in four vectors; bit 4 of all 32 columns is one more vector, whose bit i belongs to columns
// 4 i to 4 i + 3, and bits 4 and 5 are two more, of 16 columns each, in the same way.

constexpr int64_t data_bytes(int bits) { return kGroupColumns * kRows * bits / 8; }  // of a block

// Columns 4 v to 4 v + 3 of the rows of a part, a byte each. numbers: those of a block.
template <int kBits>
inline Bytes four_columns(const uint8_t* numbers, int v, int part) {
  numbers += 4 * kLanes * part;
  if constexpr (kBits == 8) return load<Bytes>(numbers + 64 * v);
  const Bytes both = load<Bytes>(numbers + 64 * (v / 2));
  const Bytes low = v % 2 ? both >> 4 : both & 15;
  if constexpr (kBits == 4) {
    return low;
  } else {
    constexpr int kHigh = kBits == 5 ? 1 : 2, kPerVector = 8 / kHigh;  // bits; quadruples of columns
    const Pairs high = load<Pairs>(numbers + data_bytes(4) + 64 * (v / kPerVector));
    const int at = v % kPerVector * kHigh;  // of these bits in a byte; they are to come to bit 4
    const Bytes moved = (Bytes)(at < 4 ? high << (4 - at) : high >> (at - 4));
    return low | (moved & uint8_t(16 * ((1 << kHigh) - 1)));
  }
}

// As int_panel. sums (M, columns / W.summed()): of the numbers of x in each group, in fixed point, times their scale.
template <int kBits, int kGroups, int M>
void group_panel(const Integers& W, const Block* x, int64_t blocks, const float* sums, Sums (*y)[kParts], int64_t p) {
  constexpr bool kFlipped = kSigned && kBits == 8;  // dot() takes signed bytes, so what it gets is 128 less
  const int64_t header = 32 * kGroups * (1 + W.has_zeros), size = header + data_bytes(kBits), n_sums = W.G * kGroups;
  const float excess = (W.is_signed ? 1 << (kBits - 1) : 0) - (kFlipped ? 128 : 0);  // of what dot() gets
  const uint8_t* w = W.w + p * W.G * size;
  Sums lanes[M][kParts] = {};
  for (int64_t b = 0; b < W.G; b++, w += size) {
    for (int64_t i = 0; i < size; i += 64) {
      __builtin_prefetch(w + 4 * kPrefetch + i, 0, 2);  // into the second-level cache
      __builtin_prefetch(w + kPrefetch + i);
    }
    const Block* here = x + b / (kColumns / kGroupColumns);
    const int64_t first = b % (kColumns / kGroupColumns) * (kGroupColumns / 4);
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; g++) {
      Ints all[2][M][kParts] = {};
#pragma GCC unroll 8
      for (int v = g * 8 / kGroups; v < (g + 1) * 8 / kGroups; v++) {
        Bytes four[kParts];
#pragma GCC unroll 4
        for (int part = 0; part < kParts; part++) four[part] = four_columns<kBits>(w + header, v, part);
#pragma GCC unroll 2
        for (int s = 0; s < 2; s++) {
          Bytes ws[kParts];
#pragma GCC unroll 4
          for (int part = 0; part < kParts; part++) {
            const Shorts shifted = (Shorts)four[part] >> (8 * s);
            ws[part] = !kBytes ? (Bytes)(s ? shifted : shifted & uint16_t{255}) : kFlipped ? four[part] ^ 128 : four[part];
          }
#pragma GCC unroll 8
          for (int m = 0; m < M; m++) {
            const int32_t xs = here[m * blocks].parts[s][first + v];
#pragma GCC unroll 4
            for (int part = 0; part < kParts; part++) {
              Ints& sum = all[kBytes ? s : 0][m][part];
              sum = dot(sum, ws[part], xs);
            }
          }
        }
      }
#pragma GCC unroll 4
      for (int part = 0; part < kParts; part++) {
        const uint8_t* numbers = w + 32 * g + 2 * kLanes * part;
        const Sums scale = load_scales(numbers, W.half);
        const Sums zero = (W.has_zeros ? load_scales(numbers + 32 * kGroups, W.half) : Sums{}) - scale * excess;
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
          const Ints sum = (all[0][m][part] << (kBytes ? 8 : 0)) + all[1][m][part];
          lanes[m][part] += __builtin_convertvector(sum, Sums) * (scale * here[m * blocks].scale);
          lanes[m][part] += zero * sums[m * n_sums + b * kGroups + g];
        }
      }
    }
  }
  for (int m = 0; m < M; m++) std::copy_n(lanes[m], kParts, y[m]);
}

// Of columns of a block, from an even one on, in fixed point, times their scale.
inline float fixed_sum(const Block& block, int64_t first, int64_t count) {
  int32_t sum = 0;
  for (int64_t i = first; i < first + count; i++) {
    if (kBytes) {
      sum += 256 * reinterpret_cast<const int8_t*>(block.parts[0])[i] + reinterpret_cast<const int8_t*>(block.parts[1])[i];
    } else {
      sum += reinterpret_cast<const int16_t*>(block.parts[i % 2])[i / 2];
    }
  }
  return sum * block.scale;
}

// As dequantize.
template <int kBits>
void dequantize_groups(const Integers& W, uint16_t* y, int64_t from, int64_t to) {
  const int64_t n = (to - from) * kRows, header = 32 * W.groups * (1 + W.has_zeros), size = header + data_bytes(kBits);
  const int32_t excess = W.is_signed ? 1 << (kBits - 1) : 0;
  for (int64_t p = from; p < to; p++) {
    for (int64_t b = 0; b < W.G; b++) {
      const uint8_t* w = W.w + (p * W.G + b) * size;
      for (int part = 0; part < kParts; part++) {
        for (int v = 0; v < 8; v++) {
          const uint8_t* numbers = w + 32 * (v * W.groups / 8) + 2 * kLanes * part;
          const Sums scale = load_scales(numbers, W.half);
          const Sums zero = W.has_zeros ? load_scales(numbers + 32 * W.groups, W.half) : Sums{};
          const Ints four = (Ints)four_columns<kBits>(w + header, v, part);
          for (int64_t c = 0, k = kGroupColumns * b + 4 * v; c < 4 && k < W.K; c++, k++) {
            const Ints q = (four >> (8 * c) & 255) - excess;
            store(__builtin_convertvector(q, Sums) * scale + zero, y + k * n + (p - from) * kRows + kLanes * part);
          }
        }
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// What is small beside the products, and many operators in PyTorch

// y = weight x / sqrt(mean(x^2) + eps), of D numbers.
inline void norm(const uint16_t* x, const uint16_t* weight, uint16_t* y, int64_t D, float eps) {
  Sums squares = {};
  for (int64_t i = 0; i < D; i += kLanes) {
    const Sums here = load_floats(x + i, D - i);
    squares += here * here;
  }
  const float scale = 1 / std::sqrt(total(squares) / D + eps);
  for (int64_t i = 0; i < D; i += kLanes) {
    store(load_floats(x + i, D - i) * scale * load_floats(weight + i, D - i), y + i, D - i);
  }
}

// y = x with each pair (i, i + R) of its first 2 R numbers turned by its angle; H numbers in all.
inline void turn(const uint16_t* x, const float* cos, const float* sin, uint16_t* y, int64_t R, int64_t H) {
  for (int64_t i = 0; i < R; i += kLanes) {
    const int64_t n = std::min<int64_t>(R - i, kLanes);
    const Sums a = load_floats(x + i, n), b = load_floats(x + R + i, n), c = load<Sums>(cos + i, n), s = load<Sums>(sin + i, n);
    store(a * c - b * s, y + i, n);
    store(b * c + a * s, y + R + i, n);
  }
  std::memcpy(y + 2 * R, x + 2 * R, (H - 2 * R) * sizeof(uint16_t));
}

// ---------------------------------------------------------------------------------------------------------------------
// Attention of a few new positions in each row of a batch

constexpr int64_t kAhead = 32;  // keys or values that the processor is told to fetch in advance

// a and b each hold s results, each spread over kLanes / s lanes. Returns all 2 s, each over half as many lanes.
template <int s, int... i>
inline Sums halve(Sums a, Sums b, std::integer_sequence<int, i...>) {
#ifdef __clang__
  return __builtin_shufflevector(a, b, (i & s ? kLanes + i : i)...) +
         __builtin_shufflevector(a, b, (i & s ? kLanes + (i ^ s) : i ^ s)...);
#else  // GCC has the other one from version 12 on
  return __builtin_shuffle(a, b, Ints{(i & s ? kLanes + i : i)...}) +
         __builtin_shuffle(a, b, Ints{(i & s ? kLanes + (i ^ s) : i ^ s)...});
#endif
}

// The total of each of kLanes / s vectors, which hold s results each.
template <int s = 1>
inline __attribute__((always_inline)) Sums totals(Sums* lanes) {
  if constexpr (s == kLanes) {
    return lanes[0];
  } else {
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / s / 2; i++) {
      lanes[i] = halve<s>(lanes[2 * i], lanes[2 * i + 1], std::make_integer_sequence<int, kLanes>());
    }
    return totals<2 * s>(lanes);
  }
}

// M queries q (M, H) of one head over `length` keys (length, H) and values (length, V), whose rows lie `stride` numbers
// apart; M divides kLanes, 32 divides H, and 64 V. weights: room for M length numbers and kLanes more. sinks: none, or
// each query's score of one more key, whose value is 0. visible: none, or which of the keys the queries attend to.
template <int M, typename Number>
void attend(
    const uint16_t* q, const uint16_t* keys, const uint16_t* values, Number* y, float* weights, int64_t length,
    int64_t H, int64_t V, int64_t stride, float scale, const float* sinks = nullptr, const bool* visible = nullptr) {
  constexpr int64_t kKeys = kLanes / M;  // whose scores are one vector, the M of a key side by side
  Sums largest = Sums{} - INFINITY, sum = {};
  for (int m = 0; sinks && m < M; m++) largest[m] = sinks[m];
  for (int64_t t = 0; t < length; t += kKeys) {
    const int64_t count = std::min(kKeys, length - t);
    const uint16_t* from[kKeys];
    for (int64_t j = 0; j < kKeys; j++) from[j] = keys + (t + std::min(j, count - 1)) * H;
    Sums dots[kLanes] = {};
    for (int64_t h = 0; h < H; h += kVector) {
#pragma GCC unroll 16
      for (int64_t j = 0; j < kKeys; j++) {
        const Pairs key = load<Pairs>(from[j] + h);
        __builtin_prefetch(from[j] + kAhead * H + h);
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) {
          const Pairs query = load<Pairs>(q + m * H + h);
          Sums& to = dots[j * M + m];
          for (int s = 0; s < kHalves; s++) to = multiply_add(to, half(key, s), half(query, s));
        }
      }
    }
    Sums scores = totals(dots) * scale;
    for (int64_t i = count * M; i < kLanes; i++) scores[i] = -INFINITY;  // beyond the last key
    for (int64_t i = 0; visible && i < count * M; i++) scores[i] = visible[t + i / M] ? scores[i] : -INFINITY;
    largest = scores > largest ? scores : largest;
    std::memcpy(weights + t * M, &scores, sizeof(scores));
  }
  for (int i = M; i < kLanes; i++) largest[i % M] = std::max(largest[i % M], largest[i]);
  for (int i = M; i < kLanes; i++) largest[i] = largest[i % M];
  for (int64_t i = 0; i < M * length; i += kLanes) {
    const Sums here = exponential(load<Sums>(weights + i) - largest);
    std::memcpy(weights + i, &here, sizeof(here));
    sum += here;
  }
  for (int i = M; i < kLanes; i++) sum[i % M] += sum[i];
  for (int m = 0; sinks && m < M; m++) sum[m] += std::exp(sinks[m] - largest[m]);
  constexpr int kVectors = kLanes == 8 ? 2 : 4;  // of a value, whose sums are in registers
  for (int64_t h = 0; h < V; h += kVectors * kLanes) {
    Sums weighted[M][kVectors] = {};
    for (int64_t t = 0; t < length; t++) {
      for (int c = 0; c < kVectors * kLanes; c += 32) __builtin_prefetch(values + (t + kAhead) * stride + h + c);
#pragma GCC unroll 4
      for (int c = 0; c < kVectors; c++) {
        const Sums value = load_floats(values + t * stride + h + kLanes * c);
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) weighted[m][c] += weights[t * M + m] * value;
      }
    }
    for (int m = 0; m < M; m++) {
      for (int i = 0; i < kVectors * kLanes; i++) y[m * V + h + i] = weighted[m][i / kLanes][i % kLanes] / sum[m];
    }
  }
}
