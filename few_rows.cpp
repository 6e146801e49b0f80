// y = x W^T for few rows x, in bfloat16 on a CPU: each weight is read once, at the speed of memory.
//
// cpu.py compiles and loads this. Shape letters: M rows of x, N rows of W, K columns of both.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

using BF16 = at::BFloat16;
using Pairs = uint32_t __attribute__((vector_size(64)));  // 32 bfloat16 numbers, two in each of 16 lanes
using Sums = float __attribute__((vector_size(64)));
constexpr int64_t kVector = 32;

inline Pairs load(const BF16* from, int64_t count = kVector) {
  Pairs pairs = {};
  std::memcpy(&pairs, from, count * sizeof(BF16));
  return pairs;
}

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
    for (int m = 0; m < M; m++) xs[m] = load(x + m * K + k, n);
    for (int r = 0; r < R; r++) {
      Pairs ws = load(w + r * apart * K + k, n);
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
      for (int i = 0; i < 16; i++) sums[r * apart * M + m] += all[i];
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

}  // namespace

TORCH_LIBRARY_FRAGMENT(ladder, library) {
  library.def("few_rows(Tensor x, Tensor weight) -> Tensor");
}

TORCH_LIBRARY_IMPL(ladder, CPU, library) {
  library.impl("few_rows", few_rows);
}
