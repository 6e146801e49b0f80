// y = x W^T for few rows x in bfloat16 on a CPU, W in bfloat16, 8 or 4 bits: each weight is read once, at the speed of
// memory. With them the feed-forward of a layer as one call, because memory rests between calls. And the attention of a few
// new positions, which reads its keys and values once for four queries of a head.
//
// skinny_gemm.h has the loops, skinny_gemm.py compiles and loads this. Shape letters: M rows of x, N rows of W, K columns of
// both, G groups of columns; for attention and experts those of model.py.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/silu.h>
#include <c10/core/InferenceMode.h>
#include <omp.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <numeric>
#include <optional>
#include <vector>

#include "skinny_gemm.h"

namespace {

using BF16 = at::BFloat16;
const uint16_t* data(const at::Tensor& t) { return reinterpret_cast<const uint16_t*>(t.const_data_ptr<BF16>()); }

// Room for the product (..., N) of x (..., K).
at::Tensor empty_product(const at::Tensor& x, int64_t N) {
  auto shape = x.sizes().vec();
  shape.back() = N;
  return at::empty(shape, x.options());
}

constexpr int64_t kSharesOfThread = 8;  // more even out better, fewer are longer reads

// Rows begin..end of x, which are multiplied with one of several matrices.
struct Group {
  int64_t matrix, begin, end;
};

std::vector<Group> all_rows(const at::Tensor& x) {
  return {{0, 0, x.numel() / std::max<int64_t>(1, x.size(-1))}};
}

// Share out the pieces of all groups' matrices: work(group, begin, end) on pieces begin..end of one. A thread that has done
// its share takes the next one, so that no thread waits for one whose core is busy with something else.
template <typename Work>
void in_parallel(const std::vector<Group>& groups, int64_t pieces, int64_t grain, Work work) {
  const int64_t total = groups.size() * pieces, threads = at::get_num_threads();
  const int64_t share = grain * std::max<int64_t>(1, total / (grain * threads * kSharesOfThread));
  std::atomic<int64_t> next = 0;
  at::parallel_for(0, std::min(threads, (total + grain - 1) / grain), 1, [&](int64_t, int64_t) {
    for (int64_t begin; (begin = next.fetch_add(share)) < total;) {
      const int64_t end = std::min(begin + share, total);
      while (begin < end) {
        const int64_t first = begin % pieces, last = std::min(pieces, first + end - begin);
        work(groups[begin / pieces], first, last);
        begin += last - first;
      }
    }
  });
}

// ---------------------------------------------------------------------------------------------------------------------
// W in bfloat16

// Of 1 to kMost rows of x.
constexpr auto kBlocks = []<int... M>(std::integer_sequence<int, M...>) {
  return std::array{&block<M + 1, BF16>...};
}(std::make_integer_sequence<int, kMost>());

// x (M, K) times the matrices of its groups, of one W (N, K) or several (E, N, K).
at::Tensor multiply(const at::Tensor& x, const at::Tensor& matrix, const std::vector<Group>& groups) {
  const at::Tensor weight = matrix.contiguous();  // usually it is
  const int64_t N = weight.size(-2), K = weight.size(-1);
  TORCH_CHECK(K > 0 && x.size(-1) == K, "skinny_gemm takes x (..., K) and W (N, K), not W ", weight.sizes());
  at::Tensor result = empty_product(x, N);
  const uint16_t *w = data(weight), *from = data(x);
  BF16* y = result.data_ptr<BF16>();
  in_parallel(groups, N, std::max<int64_t>(1, 32768 / K), [&](const Group& group, int64_t begin, int64_t end) {
    const int64_t rows = group.end - group.begin == 1 ? kLongBlock : kBlock;
    for (int64_t n = begin; n < end; n += rows) {
      for (int64_t m = group.begin; m < group.end; m += kMost) {
        kBlocks[std::min<int64_t>(group.end - m, kMost) - 1](
            w + (group.matrix * N + n) * K, from + m * K, y + m * N + n, std::min(rows, end - n), N, K);
      }
    }
  });
  return result;
}

at::Tensor skinny_gemm(const at::Tensor& input, const at::Tensor& weight) {
  return multiply(input.contiguous(), weight, all_rows(input));
}

// x (N, M, K) times W (N, L, K), each of N heads its own.
at::Tensor skinny_gemm_heads(const at::Tensor& input, const at::Tensor& weight) {
  TORCH_CHECK(
      input.dim() == 3 && weight.dim() == 3 && input.size(0) == weight.size(0),
      "skinny_gemm_heads takes x (N, M, K) and W (N, L, K)");
  const at::Tensor x = input.contiguous();
  std::vector<Group> groups;
  for (int64_t n = 0; n < x.size(0); n++) groups.push_back({n, n * x.size(1), (n + 1) * x.size(1)});
  return multiply(x, weight, groups);
}

// x (N, M, X) times W (N, X, L), each of N heads its own: here the rows of W are added up, and it is read as it lies.
at::Tensor skinny_gemm_heads_mT(const at::Tensor& input, const at::Tensor& matrices) {
  TORCH_CHECK(
      input.dim() == 3 && matrices.dim() == 3 && input.size(0) == matrices.size(0) && input.size(2) == matrices.size(1),
      "skinny_gemm_heads_mT takes x (N, M, X) and W (N, X, L)");
  const at::Tensor x = input.contiguous(), weight = matrices.contiguous();
  const int64_t N = x.size(0), M = x.size(1), X = x.size(2), L = weight.size(2);
  constexpr int64_t kVectors = kLanes == 8 ? 4 : 8, kWide = kVectors * kLanes;
  const int64_t pieces = (L + kWide - 1) / kWide;
  at::Tensor result = empty_product(x, L);
  uint16_t* y = static_cast<uint16_t*>(result.data_ptr());
  const BF16* from = x.const_data_ptr<BF16>();
  const uint16_t* w = data(weight);
  at::parallel_for(0, N * pieces, std::max<int64_t>(1, 32768 / (X * kWide)), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t n = i / pieces, first = i % pieces * kWide, count = std::min(kWide, L - first);
      for (int64_t m = 0; m < M; m++) {
        Sums sums[kVectors] = {};
        for (int64_t k = 0; k < X; k++) {
          const float factor = from[(n * M + m) * X + k];
          const uint16_t* row = w + (n * X + k) * L + first;
#pragma GCC unroll 8
          for (int64_t c = 0; c < kVectors; c++) {
            const int64_t left = std::clamp<int64_t>(count - c * kLanes, 0, kLanes);
            if (left) sums[c] += factor * load_floats(row + c * kLanes, left);
          }
        }
        for (int64_t c = 0; c < kVectors; c++) {
          const int64_t left = std::clamp<int64_t>(count - c * kLanes, 0, kLanes);
          if (left) store(sums[c], y + (n * M + m) * L + first + c * kLanes, left);
        }
      }
    }
  });
  return result;
}

// ---------------------------------------------------------------------------------------------------------------------
// W in integers

template <bool kFourBits>
constexpr auto kPanels = []<int... M>(std::integer_sequence<int, M...>) {
  return std::array{&int_panel<kFourBits, M + 1>...};
}(std::make_integer_sequence<int, kMostInt>());

template <int kBits, int kGroups>
constexpr auto kGroupPanels = []<int... M>(std::integer_sequence<int, M...>) {
  return std::array{&group_panel<kBits, kGroups, M + 1>...};
}(std::make_integer_sequence<int, kMostInt>());

using Panel = decltype(&int_panel<true, 1>);

// The int_panels of 1 to kMostInt rows of x.
template <int kBits>
const std::array<Panel, kMostInt>& group_panels(int groups) {
  return groups == 1 ? kGroupPanels<kBits, 1> : groups == 2 ? kGroupPanels<kBits, 2> : kGroupPanels<kBits, 4>;
}

const std::array<Panel, kMostInt>& panels_of(const Integers& W) {
  if (!W.groups) return W.four_bits ? kPanels<true> : kPanels<false>;
  const int bits = W.stored_bits, groups = W.groups;
  return bits == 4 ? group_panels<4>(groups) : bits == 5 ? group_panels<5>(groups) : bits == 6 ? group_panels<6>(groups)
                                                                                  : group_panels<8>(groups);
}

// 8 bits in groups; form: skinny_gemm.Form.code
Integers in_groups(const at::Tensor& input, const at::Tensor& weight, int64_t N, int64_t K, int64_t form) {
  const int bits = form & 15, groups = form >> 8;
  const bool half = weight.scalar_type() == at::kChar, has_zeros = form >> 4 & 1, is_signed = form >> 5 & 1;
  const int64_t P = weight.size(-4), G = weight.size(-3), vectors = weight.size(-2);
  TORCH_CHECK(
      input.scalar_type() == at::kBFloat16 && input.size(-1) == K && K > 0 && weight.is_contiguous() &&
          (half || weight.scalar_type() == at::kByte) && weight.size(-1) == 32 && P == (N + kRows - 1) / kRows &&
          G == (K + kGroupColumns - 1) / kGroupColumns && (bits == 4 || bits == 5 || bits == 6 || bits == 8) &&
          (groups == 1 || groups == 2 || groups == 4) && 32 * vectors == 32 * groups * (1 + has_zeros) + data_bytes(bits),
      "x (..., K) must be in bfloat16, and of a W (N, K) what skinny_gemm.pack returns for 8 bits in groups");
  return {static_cast<const uint8_t*>(weight.const_data_ptr()), P, N, K, G, vectors, kGroupColumns, false, half, bits,
          groups, has_zeros, is_signed};
}

// bits: 4, or 8 with a scale for each row, or of 8 bits in groups their form
Integers integers(const at::Tensor& input, const at::Tensor& weight, int64_t N, int64_t K, int64_t bits) {
  if (bits >= 256) return in_groups(input, weight, N, K, bits);
  const int64_t P = weight.size(-4), G = weight.size(-3), vectors = weight.size(-2);
  const int64_t size = bits == 8 ? K : (vectors - 1) * 8;
  const bool half = weight.scalar_type() == at::kChar;  // as skinny_gemm.pack says that scales are float16
  TORCH_CHECK(
      input.scalar_type() == at::kBFloat16 && input.size(-1) == K && K > 0 && weight.is_contiguous() &&
          (half || weight.scalar_type() == at::kByte) && weight.size(-1) == 64 && size * G == K &&
          P == (N + kRows - 1) / kRows &&
          (bits == 8 ? vectors == 1 + (K + 7) / 8 * 2 : bits == 4 && size >= 8 && kColumns % size == 0),
      "x (..., K) must be in bfloat16, and of a W (N, K) what skinny_gemm.pack returns, in groups of 8 to 128 columns");
  return {static_cast<const uint8_t*>(weight.const_data_ptr()), P, N, K, G, vectors, size, bits == 4, half, 0, 0, false, false};
}

// Whether two matrices can be multiplied with what multiply() makes of x.
bool alike(const Integers& a, const Integers& b) { return a.summed() == b.summed() && !a.groups == !b.groups; }

// x times the matrices W of its groups; or gated, silu(x times W) times (x times up).
at::Tensor multiply(
    const at::Tensor& input, const Integers& W, const std::vector<Group>& groups, const Integers* up = nullptr) {
  const int64_t N = W.N, K = W.K, summed = W.summed(), n_sums = summed ? (W.groups ? W.G * W.groups : W.G) : 0;
  TORCH_CHECK(!up || alike(W, *up), "w1 and w3 have groups of other sizes");
  const at::Tensor rows = input.contiguous();
  const int64_t M = rows.numel() / K, blocks = (K + kColumns - 1) / kColumns;
  at::Tensor result = empty_product(rows, N);
  const uint16_t* x = data(rows);
  uint16_t* y = static_cast<uint16_t*>(result.data_ptr());
  std::vector<Block> fixed(M * blocks);
  std::vector<float> sums(M * n_sums);
  at::parallel_for(0, M, std::max<int64_t>(1, 32768 / K), [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; m++) {
      for (int64_t k = 0; k < K; k += kColumns) fixed[m * blocks + k / kColumns] = fixed_point(x + m * K + k, K - k);
      for (int64_t g = 0; g < n_sums; g++) {
        const BF16* from = rows.const_data_ptr<BF16>() + m * K;
        sums[m * n_sums + g] = W.groups
            ? fixed_sum(fixed[m * blocks + g * summed / kColumns], g * summed % kColumns, summed)
            : std::accumulate(from + g * summed, from + (g + 1) * summed, 0.0f);
      }
    }
  });
  // y = x times panels begin..end of a group's matrix, or y times that
  auto panels = [&](const Integers& of, const Group& group, int64_t begin, int64_t end, bool times) {
    const auto& kernels = panels_of(of);
    for (int64_t from = group.begin; from < group.end; from += kRowsInCache) {
      const int64_t to = std::min(from + kRowsInCache, group.end);
      for (int64_t p = begin; p < end; p++) {
        for (int64_t m = from; m < to; m += kMostInt) {
          const int64_t here = std::min<int64_t>(to - m, kMostInt), panel = group.matrix * of.P + p;
          Sums lanes[kMostInt][kParts];
          kernels[here - 1](of, fixed.data() + m * blocks, blocks, sums.data() + m * n_sums, lanes, panel);
          for (int64_t i = 0; i < here * kParts; i++) {
            const int64_t n = p * kRows + i % kParts * kLanes;
            uint16_t* out = y + (m + i / kParts) * N + n;
            const Sums product = lanes[i / kParts][i % kParts];
            store(times ? product * load_floats(out, N - n) : product, out, N - n);
          }
        }
      }
    }
  };
  const int64_t grain = std::max<int64_t>(1, 65536 / (kRows * K));
  in_parallel(groups, W.P, grain, [&](const Group& group, int64_t begin, int64_t end) {
    panels(W, group, begin, end, false);
    if (!up) return;
    for (int64_t m = group.begin; m < group.end; m++) {
      for (int64_t n = begin * kRows, to = std::min(end * kRows, N); n < to; n += kLanes) {
        store(silu(load_floats(y + m * N + n, to - n)), y + m * N + n, to - n);
      }
    }
    panels(*up, group, begin, end, true);
  });
  return result;
}

at::Tensor skinny_gemm_int(const at::Tensor& input, const at::Tensor& weight, int64_t N, int64_t K, int64_t bits) {
  return multiply(input, integers(input, weight, N, K, bits), all_rows(input));
}

// x times the matrices (N, K) of its groups, of these bits, where 16 are bfloat16
at::Tensor product(
    const at::Tensor& x, const at::Tensor& weight, int64_t N, int64_t K, int64_t bits, const std::vector<Group>& groups) {
  return bits == 16 ? multiply(x, weight, groups) : multiply(x, integers(x, weight, N, K, bits), groups);
}

// x (..., K) times W (N, K)
at::Tensor product(const at::Tensor& x, const at::Tensor& weight, int64_t N, int64_t K, int64_t bits) {
  return product(x.contiguous(), weight, N, K, bits, all_rows(x));
}

// silu(w1 x) * w3 x, with w1 and w3 (N, K) of these bits, where 16 are bfloat16. groups: of rows of x
at::Tensor gated(
    const at::Tensor& x, const at::Tensor& w1, const at::Tensor& w3, int64_t N, int64_t K, at::IntArrayRef bits,
    const std::vector<Group>& groups) {
  if (bits[0] != 16 && bits[1] != 16) {
    const Integers gate = integers(x, w1, N, K, bits[0]), up = integers(x, w3, N, K, bits[1]);
    if (alike(gate, up)) return multiply(x, gate, groups, &up);
  }
  return at::silu(product(x, w1, N, K, bits[0], groups)).mul_(product(x, w3, N, K, bits[1], groups));
}

// w2 (silu(w1 x) * w3 x), with w1 and w3 (N, K), w2 (K, N); bits: of each of the three, where 16 are bfloat16
at::Tensor feed_forward(
    const at::Tensor& input, const at::Tensor& w1, const at::Tensor& w3, const at::Tensor& w2, int64_t N, int64_t K,
    at::IntArrayRef bits) {
  TORCH_CHECK(bits.size() == 3, "feed_forward takes the bits of w1, w3 and w2");
  const std::vector<Group> all = all_rows(input);
  return product(gated(input.contiguous(), w1, w3, N, K, bits, all), w2, K, N, bits[2], all);
}

// The same for tokens x (T, D) and each of the k experts that a token chose, (T, k): the result is (T, k, D). There are
// E experts of I neurons: w1 and w3 (E, I, D), w2 (E, D, I). The tokens of an expert become neighbours, so that its
// weights are read once for all of them. bits: of each of the three, 16 for bfloat16. biases: none, or those of the three
// (E, I), (E, I) and (E, D); then the gate is gpt-oss's, as in architectures/experts.py.
at::Tensor skinny_gemm_experts(
    const at::Tensor& x, const at::Tensor& chosen, const at::Tensor& w1, const at::Tensor& w3, const at::Tensor& w2,
    int64_t I, int64_t D, at::IntArrayRef bits, at::TensorList biases) {
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
        "skinny_gemm_experts takes w1, w3, w2 (E, ...) of these bits, and chosen experts from 0 to E - 1");
    TORCH_CHECK(
        biases.empty() ||
            (biases.size() == 3 && biases[i].sizes() == at::IntArrayRef({weights[i].size(0), i < 2 ? I : D})),
        "skinny_gemm_experts takes no biases, or those of w1, w3 and w2: (E, I), (E, I) and (E, D)");
  }
  const at::Tensor rows = x.index_select(0, order.floor_divide(chosen.size(1)));
  auto biased = [&, &experts = experts](const at::Tensor& y, int i) { return y.add(biases[i].index_select(0, experts)); };
  at::Tensor hidden;
  if (!biases.empty()) {
    const at::Tensor gate = biased(product(rows, w1, I, D, bits[0], groups), 0).clamp_max(7);
    const at::Tensor up = biased(product(rows, w3, I, D, bits[1], groups), 1).clamp(-7, 7);
    hidden = gate.mul(gate.mul(1.702).sigmoid_()).mul_(up.add(1));
  } else {
    hidden = gated(rows, w1, w3, I, D, bits, groups);
  }
  at::Tensor y = product(hidden, w2, D, I, bits[2], groups);
  if (!biases.empty()) y = biased(y, 2);
  return at::empty_like(y).index_copy_(0, order, y).view({chosen.size(0), chosen.size(1), D});
}

decltype(&dequantize<true>) dequantizer(const Integers& W) {
  if (!W.groups) return W.four_bits ? dequantize<true> : dequantize<false>;
  return W.stored_bits == 4 ? dequantize_groups<4> : W.stored_bits == 5 ? dequantize_groups<5>
      : W.stored_bits == 6 ? dequantize_groups<6> : dequantize_groups<8>;
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
      dequantizer(W)(W, static_cast<uint16_t*>(piece.data_ptr()), p, to);
      flat.narrow(1, n, count).copy_(at::mm(rows, piece).narrow(1, 0, count));
    }
  });
  return result;
}

// ---------------------------------------------------------------------------------------------------------------------
// Attention of a few new positions in each row of a batch

// Turn queries q (B, K, G, S, H) and keys k (B, K, S, H) at positions (B, S) by cos, sin (B, 1, 1, S, R / 2), as
// attention_inputs.rotate does, and write keys and values v (B, K, S, V) to the rows (B, 1) of the caches (B, K, T, H) and
// (B, K, T, V). Returns the queries.
at::Tensor rotate_into_cache(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& cosines, const at::Tensor& sines,
    const at::Tensor& rows, const at::Tensor& positions, const at::Tensor& keys, const at::Tensor& values) {
  const int64_t B = q.size(0), K = q.size(1), G = q.size(2), S = q.size(3), H = q.size(4), T = keys.size(2);
  const int64_t R = cosines.size(-1), V = v.size(-1);
  const int64_t cached = keys.size(0);  // rows of the cache
  auto fits = [](const at::Tensor& t, at::IntArrayRef shape) { return t.sizes() == shape && t.stride(-1) == 1; };
  TORCH_CHECK(
      q.stride(-1) == 1 && fits(k, {B, K, S, H}) && fits(v, {B, K, S, V}) && fits(keys, {cached, K, T, H}) &&
          fits(values, {cached, K, T, V}) && 2 * R <= H && rows.numel() == B &&
          fits(cosines, {B, 1, 1, S, R}) && fits(sines, {B, 1, 1, S, R}) && positions.sizes() == at::IntArrayRef({B, S}),
      "rotate_into_cache takes q (B, K, G, S, H), k (B, K, S, H), v (B, K, S, V), cos, sin (B, 1, 1, S, R / 2), a cache");
  const at::Tensor at = positions.contiguous(), cos = cosines.contiguous(), sin = sines.contiguous();
  const at::Tensor to_rows = rows.contiguous();
  at::Tensor result = at::empty(q.sizes(), q.options());
  uint16_t* y = static_cast<uint16_t*>(result.data_ptr());
  auto cache = [](const at::Tensor& t) { return reinterpret_cast<uint16_t*>(t.data_ptr<BF16>()); };
  uint16_t *k_to = cache(keys), *v_to = cache(values);
  auto turn_one = [&](int64_t i) {
    const int64_t s = i % S, h = i / S % K, b = i / S / K, position = at.const_data_ptr<int64_t>()[b * S + s];
    const int64_t to = to_rows.const_data_ptr<int64_t>()[b];
    TORCH_CHECK_INDEX(0 <= position && position < T, "position ", position, " is not in a cache of ", T, " slots");
    TORCH_CHECK_INDEX(0 <= to && to < cached, "row ", to, " is not in a cache of ", cached, " rows");
    const float *c = cos.const_data_ptr<float>() + (b * S + s) * R, *d = sin.const_data_ptr<float>() + (b * S + s) * R;
    auto row = [&](const at::Tensor& t, int64_t b, int64_t i) {
      return b * t.stride(0) + h * t.stride(1) + i * t.stride(2);
    };
    turn(data(k) + row(k, b, s), c, d, k_to + row(keys, to, position), R, H);
    std::memcpy(v_to + row(values, to, position), data(v) + row(v, b, s), V * sizeof(uint16_t));
    const uint16_t* from = data(q) + b * q.stride(0) + h * q.stride(1) + s * q.stride(3);
    for (int64_t g = 0; g < G; g++) turn(from + g * q.stride(2), c, d, y + (((b * K + h) * G + g) * S + s) * H, R, H);
  };
  at::parallel_for(0, B * K * S, std::max<int64_t>(1, 32768 / ((G + 2) * H)), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) turn_one(i);
  });
  return result;
}

// The RMSNorm of the last dimension of x.
at::Tensor rms_norm(const at::Tensor& input, const at::Tensor& factors, double eps) {
  const at::Tensor weight = factors.contiguous();  // usually it is
  const int64_t D = weight.numel();
  TORCH_CHECK(D > 0 && input.size(-1) == D && weight.dim() == 1, "rms_norm takes x (..., D) and weight (D)");
  const at::Tensor rows = input.contiguous();
  at::Tensor result = at::empty(rows.sizes(), rows.options());
  const uint16_t *x = data(rows), *w = data(weight);
  uint16_t* y = static_cast<uint16_t*>(result.data_ptr());
  at::parallel_for(0, rows.numel() / D, std::max<int64_t>(1, 32768 / D), [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; m++) norm(x + m * D, w, y + m * D, D, eps);
  });
  return result;
}

// The keys that a token attends to: start..stop, or some of these.
struct Visible {
  int64_t start, stop;
  const bool* some;  // none: all of them
};

// Of each token, by a mask (B, S, T'); without one it attends to all tokens up to itself, of which there are S.
std::vector<Visible> visible_keys(const bool* mask, int64_t tokens, int64_t S, int64_t T) {
  std::vector<Visible> visible(tokens);
  for (int64_t i = 0; i < tokens; i++) {
    visible[i] = {0, i % S + 1, nullptr};
    if (!mask) continue;
    const bool *row = mask + i * T, *end = row + T, *start = std::find(row, end, true);
    while (end > start && !end[-1]) end--;
    const bool has_gaps = std::find(start, end, false) != end;
    visible[i] = {start - row, end - row, has_gaps ? start : nullptr};
  }
  return visible;
}

// q (B, K, S, G, H) over keys (B, K, T, H) and values (B, K, T, V), which may be a part of the cached ones: each over the
// keys that mask (B, S, T' up to T) lets it see or, without one, over those up to itself. sinks (K * G): see skinny_gemm.h.
// Returns (B, K, S, G, V).
at::Tensor decode_attention(
    const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values, const std::optional<at::Tensor>& mask,
    double scale, const std::optional<at::Tensor>& sinks) {
  const int64_t B = q.size(0), K = q.size(1), S = q.size(2), G = q.size(3), H = q.size(4), T = keys.size(2);
  const int64_t V = values.size(-1), pieces = (G + 3) / 4;  // of the queries of a head, shared out among the threads
  TORCH_CHECK(
      H % 32 == 0 && V % 64 == 0 && T > 0 && keys.stride(2) == H && keys.stride(3) == 1 && values.stride(-1) == 1 &&
          values.sizes() == at::IntArrayRef({B, K, T, V}) && keys.sizes() == at::IntArrayRef({B, K, T, H}) &&
          (mask ? mask->dim() == 3 && mask->size(0) == B && mask->size(1) == S && mask->size(2) <= T : S <= T),
      "decode_attention takes q (B, K, S, G, H), keys (B, K, T, H) whose rows are neighbours, values (B, K, T, V), and "
      "mask (B, S, T' up to T), where 32 divides H and 64 V");
  const at::Tensor queries = q.contiguous(), seen = mask ? mask->contiguous() : at::Tensor();
  const auto visible = visible_keys(mask ? seen.const_data_ptr<bool>() : nullptr, B * S, S, mask ? mask->size(2) : T);
  const at::Tensor sink = sinks ? sinks->to(at::kFloat).expand({K * G}).contiguous() : at::Tensor();
  const float* s_data = sinks ? sink.const_data_ptr<float>() : nullptr;
  at::Tensor result = empty_product(queries, V);
  const uint16_t *q_data = data(queries), *k_data = data(keys), *v_data = data(values);
  BF16* y_data = result.data_ptr<BF16>();
  constexpr std::array kernels = {&attend<1, BF16>, &attend<2, BF16>, &attend<4, BF16>};
  at::parallel_for(0, B * K * pieces, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> scores(4 * T + 16);
    for (int64_t piece = begin; piece < end; piece++) {
      const int64_t i = piece / pieces, b = i / K, first = piece % pieces * 4, to = std::min(first + 4, G);
      auto head = [&](const at::Tensor& t) { return b * t.stride(0) + i % K * t.stride(1); };
      const uint16_t *k = k_data + head(keys), *v = v_data + head(values);
      const int64_t stride = values.stride(2);
      for (int64_t s = 0; s < S; s++) {  // from the second one on, the keys and values are in the caches
        const auto [start, stop, some] = visible[b * S + s];
        const int64_t length = stop - start;
        if (length == 0) {
          std::fill_n(y_data + ((i * S + s) * G + first) * V, (to - first) * V, BF16(0));
          continue;
        }
        for (int64_t g = first; g < to;) {
          const int which = to - g >= 4 ? 2 : to - g >= 2 ? 1 : 0;
          const int64_t row = (i * S + s) * G + g;
          kernels[which](
              q_data + row * H, k + start * H, v + start * stride, y_data + row * V, scores.data(), length, H, V, stride,
              scale, s_data ? s_data + i % K * G + g : nullptr, some);
          g += 1 << which;
        }
      }
    }
  });
  return result;
}

// A layer's attention of a few new positions, from the normed x (B, S, D) to its partial (B, S, D), in one call. Of wqkv,
// wo (bits as in product) and `bias` the shard has N heads. norms: none, or the weights of q_norm and k_norm with this eps.
// The other arguments are those of rotate_into_cache and decode_attention.
at::Tensor attention_step(
    const at::Tensor& x, const at::Tensor& wqkv, const at::Tensor& wo, at::IntArrayRef bits, int64_t N,
    const std::optional<at::Tensor>& bias, at::TensorList norms, double eps, const at::Tensor& cosines,
    const at::Tensor& sines, const at::Tensor& rows, const at::Tensor& positions, const at::Tensor& keys,
    const at::Tensor& values, const std::optional<at::Tensor>& mask) {
  TORCH_CHECK(
      x.dim() == 3 && keys.dim() == 4 && bits.size() == 2 && norms.size() % 2 == 0 && keys.size(1) > 0 &&
          N % keys.size(1) == 0,
      "attention_step takes x (B, S, D), a cache (B, K, T, H), the bits of wqkv and wo, a multiple of K heads, two norms");
  const int64_t B = x.size(0), S = x.size(1), D = x.size(2), K = keys.size(1), H = keys.size(3), G = N / K;
  at::Tensor qkv = product(x, wqkv, (N + 2 * K) * H, D, bits[0]);
  if (bias) qkv = qkv.add_(*bias);
  qkv = qkv.view({B, S, K, G + 2, H}).permute({0, 2, 3, 1, 4});  // (B, K, G + 2, S, H)
  at::Tensor q = qkv.narrow(2, 0, G), k = qkv.select(2, G), v = qkv.select(2, G + 1);
  if (!norms.empty()) q = rms_norm(q, norms[0], eps), k = rms_norm(k, norms[1], eps);
  q = rotate_into_cache(q, k, v, cosines, sines, rows, positions, keys, values);
  const double scale = 1 / std::sqrt(double(H));
  const at::Tensor y = decode_attention(q.transpose(2, 3), keys, values, mask, scale, std::nullopt);
  return product(y.transpose(1, 2).reshape({B, S, N * H}), wo, D, N * H, bits[1]);
}

// What LatentAttention.attend does, "absorbed", in one call: from q (B, S, N (X + R)) and wkv_a's output kv (B, S, L + R),
// whose latents get an RMSNorm, to the heads' outputs (B, S, N Y). wkv_b: (N (X + Y), L). cache: (B, 1, T, L + R). The other
// arguments are those of rotate_into_cache and decode_attention.
at::Tensor latent_attention(
    const at::Tensor& q, const at::Tensor& kv, const at::Tensor& norm, double eps, const at::Tensor& wkv_b, int64_t X,
    int64_t Y, const at::Tensor& cosines, const at::Tensor& sines, const at::Tensor& rows, const at::Tensor& positions,
    const at::Tensor& cache, const std::optional<at::Tensor>& mask, double scale) {
  TORCH_CHECK(
      wkv_b.dim() == 2 && kv.dim() == 3 && cache.dim() == 4 && 2 * cosines.size(-1) == kv.size(2) - wkv_b.size(1) &&
          wkv_b.size(0) % (X + Y) == 0,
      "latent_attention takes kv (B, S, L + R), wkv_b (N (X + Y), L), cos, sin (..., R / 2), cache (B, 1, T, L + R)");
  const int64_t B = kv.size(0), S = kv.size(1), N = wkv_b.size(0) / (X + Y), L = wkv_b.size(1), R = kv.size(2) - L;
  const at::Tensor heads = q.view({B, S, N, X + R}), latents = cache.narrow(3, 0, L);
  const at::Tensor keys = wkv_b.narrow(0, 0, N * X).view({N, X, L}), values = wkv_b.narrow(0, N * X, N * Y).view({N, Y, L});
  at::Tensor turned = rotate_into_cache(
      heads.narrow(3, X, R).transpose(1, 2).unsqueeze(1), kv.narrow(2, L, R).unsqueeze(1),
      rms_norm(kv.narrow(2, 0, L), norm, eps).unsqueeze(1), cosines, sines, rows, positions, cache.narrow(3, L, R), latents);
  const at::Tensor absorbed = skinny_gemm_heads_mT(heads.narrow(3, 0, X).permute({2, 0, 1, 3}).flatten(1, 2), keys);
  const at::Tensor queries = at::cat(
      {absorbed.view({N, B, S, L}).permute({1, 2, 0, 3}), turned.squeeze(1).transpose(1, 2)}, -1).unsqueeze(1);
  const at::Tensor y = decode_attention(queries, cache, latents, mask, scale, std::nullopt);  // (B, 1, S, N, L)
  return skinny_gemm_heads(y.view({B * S, N, L}).transpose(0, 1), values).transpose(0, 1).reshape({B, S, -1});
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ladder, library) {
  auto define = [&](const std::string& schema, auto function) {
    library.def((schema + " -> Tensor").c_str(), torch::dispatch(c10::DispatchKey::CPU, function));
  };
  define(
      "attention_step(Tensor x, Tensor wqkv, Tensor wo, int[] bits, int N, Tensor? bias, Tensor[] norms, float eps, "
      "Tensor cos, Tensor sin, Tensor rows, Tensor positions, Tensor(a!) keys, Tensor(b!) values, Tensor? mask)",
      attention_step);
  define(
      "decode_attention(Tensor q, Tensor keys, Tensor values, Tensor? mask, float scale, Tensor? sinks=None)",
      decode_attention);
  define("feed_forward(Tensor x, Tensor w1, Tensor w3, Tensor w2, int N, int K, int[] bits)", feed_forward);
  define(
      "latent_attention(Tensor q, Tensor kv, Tensor norm, float eps, Tensor wkv_b, int X, int Y, Tensor cos, Tensor sin, "
      "Tensor rows, Tensor positions, Tensor(a!) cache, Tensor? mask, float scale)",
      latent_attention);
  define("rms_norm(Tensor x, Tensor weight, float eps)", rms_norm);
  define(
      "rotate_into_cache(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor rows, Tensor positions, "
      "Tensor(a!) keys, Tensor(b!) values)",
      rotate_into_cache);
  define("skinny_gemm(Tensor x, Tensor weight)", skinny_gemm);
  define("skinny_gemm_heads(Tensor x, Tensor weight)", skinny_gemm_heads);
  define("skinny_gemm_heads_mT(Tensor x, Tensor weight)", skinny_gemm_heads_mT);
  define(
      "skinny_gemm_experts(Tensor x, Tensor chosen, Tensor w1, Tensor w3, Tensor w2, int I, int D, int[] bits, "
      "Tensor[] biases)",
      skinny_gemm_experts);
  define("many_rows_int(Tensor x, Tensor weight, int N, int K, int bits)", many_rows_int);
  define("skinny_gemm_int(Tensor x, Tensor weight, int N, int K, int bits)", skinny_gemm_int);
}
