// The loops of skinny_gemm.h against float64, without PyTorch: for emulated processors. Exit code 1 and a line if one is off.

#include "skinny_gemm.h"

#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

std::mt19937 generator(0);
std::normal_distribution<float> normal;

std::vector<uint16_t> numbers(int64_t count) {
  std::vector<uint16_t> result(count);
  for (uint16_t& to : result) store(Sums{} + normal(generator), &to, 1);
  return result;
}

double value(uint16_t number) { return load_floats(&number, 1)[0]; }

void check(const char* what, int64_t M, int64_t K, double got, double exact, double bound) {
  if (std::abs(got - exact) <= bound) return;
  std::printf("%s, %ld rows, %ld columns: %g, not %g\n", what, long(M), long(K), got, exact);
  std::exit(1);
}

template <int M>
void check_block(int64_t N, int64_t K) {
  const auto w = numbers(N * K), x = numbers(M * K);
  std::vector<float> y(M * N);
  block<M>(w.data(), x.data(), y.data(), N, N, K);
  for (int64_t m = 0; m < M; m++) {
    for (int64_t n = 0; n < N; n++) {
      double exact = 0, size = 0;
      for (int64_t k = 0; k < K; k++) exact += value(w[n * K + k]) * value(x[m * K + k]);
      for (int64_t k = 0; k < K; k++) size += std::abs(value(w[n * K + k]) * value(x[m * K + k]));
      check("bfloat16", M, K, y[m * N + n], exact, 1e-6 * size);
    }
  }
}

// A float16 number from 1 to 2.
uint16_t float16(int mantissa) { return 0x3c00 | mantissa % 1024; }

template <bool kFourBits, int M>
void check_integers(int64_t K, int64_t size, bool half = false) {
  auto number = [&](uint16_t bits) { return half ? 1 + bits % 1024 / 1024.0 : value(bits); };
  const int64_t P = 2, G = K / size, vectors = 1 + (kFourBits ? size / 8 : (K + 7) / 8 * 2), N = P * kRows;
  std::vector<uint8_t> w(P * G * vectors * 64);
  std::vector<double> q(N * K), exact(N * K);
  for (int64_t n = 0; n < N; n++) {
    for (int64_t k = 0; k < K; k++) {
      uint8_t* group = w.data() + (n / 16 * G + k / size) * vectors * 64;
      uint16_t *scale = reinterpret_cast<uint16_t*>(group) + n % 16, *zero = scale + 16;
      if (k % size == 0) store(Sums{} + 1 + std::abs(normal(generator)), scale, 1);
      if (k % size == 0 && kFourBits) store(Sums{} + normal(generator), zero, 1);
      if (k % size == 0 && half) *scale = float16(generator() % 1024), *zero = float16(generator() % 1024);
      const int64_t v = 1 + k % size / (kFourBits ? 8 : 4);
      const int byte = n == 0 ? 255 : generator() % 255 + 1, part = kFourBits ? byte % 16 : byte;
      group[v * 64 + n % 16 * 4 + k % 4] |= kFourBits && k % 8 >= 4 ? part << 4 : part;
      q[n * K + k] = number(*scale) * (kFourBits ? part : part - 128);
      exact[n * K + k] = q[n * K + k] + (kFourBits ? number(*zero) : 0);
    }
  }
  const Integers W = {w.data(), P, N, K, G, vectors, size, kFourBits, half};
  std::vector<uint16_t> floats(K * N), x = numbers(M * K);
  dequantize<kFourBits>(W, floats.data(), 0, P);
  for (int64_t i = 0; i < N * K; i++) {
    check("dequantized", 0, K, value(floats[i % K * N + i / K]), exact[i], 0.004 * std::abs(exact[i]) + 1e-6);
  }
  for (int64_t k = 0; k < K; k++) store(Sums{} + 100, &x[k], 1);  // the largest fixed-point numbers
  const int64_t blocks = (K + kColumns - 1) / kColumns;
  std::vector<Block> fixed(M * blocks);
  std::vector<float> sums(M * G);
  for (int64_t i = 0; i < M * K; i++) {
    const int64_t m = i / K, k = i % K;
    if (k % kColumns == 0) fixed[m * blocks + k / kColumns] = fixed_point(&x[i], K - k);
    sums[m * G + k / size] += value(x[i]);
  }
  for (int64_t n = 0; n < N; n++) {
    Sums y[M][kParts];
    int_panel<kFourBits, M>(W, fixed.data(), blocks, sums.data(), y, n / 16);
    for (int64_t m = 0; m < M; m++) {
      double sum = 0, bound = 0;
      for (int64_t k = 0; k < K; k++) {
        const double from = value(x[m * K + k]), size = std::abs(q[n * K + k]);
        sum += from * exact[n * K + k];  // each x was rounded to half a unit
        bound += size * fixed[m * blocks + k / kColumns].scale / 1.9 + 1e-6 * std::abs(from) * (size + std::abs(exact[n * K + k]));
      }
      check(kFourBits ? "4 bits" : "8 bits", M, K, y[m][n % 16 / kLanes][n % kLanes], sum, bound);
    }
  }
}

// The values are the first V numbers of rows of H. sink: the score of one more key, if not 0.
template <int M>
void check_attention(int64_t length, int64_t H, int64_t V, float sink = 0) {
  const auto q = numbers(M * H), keys = numbers(length * H), values = numbers(length * H);
  std::vector<float> y(M * V), weights(M * length + kLanes), sinks(M, sink);
  const float* given = sink ? sinks.data() : nullptr;
  attend<M>(q.data(), keys.data(), values.data(), y.data(), weights.data(), length, H, V, H, 1 / std::sqrt(float(H)), given);
  for (int64_t i = 0; i < M * V; i++) {
    double sum = sink ? std::exp(sink) : 0, weighted = 0;
    for (int64_t t = 0; t < length; t++) {
      double score = 0;
      for (int64_t h = 0; h < H; h++) score += value(q[i / V * H + h]) * value(keys[t * H + h]);
      sum += std::exp(score / std::sqrt(H));
      weighted += std::exp(score / std::sqrt(H)) * value(values[t * H + i % V]);
    }
    check("attention", M, length, y[i], weighted / sum, 1e-5);
  }
}

template <int... M>
void check_rows(std::integer_sequence<int, M...>) {
  for (int64_t K : {1, 40, 1031, 2100}) (check_block<M + 1>(7, K), ...);
  (check_block<M + 1>(64, 64), ...);
}

template <int... M>
void check_rows_int(std::integer_sequence<int, M...>) {
  for (int64_t K : {1, 5, 128, 1031}) (check_integers<false, M + 1>(K, K), ...);
  for (int64_t size : {8, 32, 64, 128}) (check_integers<true, M + 1>(size * 5, size), ...);
  (check_integers<true, M + 1>(160, 32, true), ...);
}

int main() {
  check_rows(std::make_integer_sequence<int, kMost>());
  check_rows_int(std::make_integer_sequence<int, kMostInt>());
  for (int64_t length : {1, 7, 70}) {
    check_attention<1>(length, 64, 64), check_attention<2>(length, 192, 192), check_attention<4>(length, 64, 64, 2);
    check_attention<1>(length, 160, 128), check_attention<2>(length, 96, 64, -1), check_attention<4>(length, 544, 512);
  }
}
