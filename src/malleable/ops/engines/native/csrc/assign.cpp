// The malleable assignment and its gradient in one pass each (paper, Eqs. 5 to 9), keeping nothing but d.

#include <cmath>

#include "common.h"

namespace {

typedef int32_t IntVec __attribute__((vector_size(kLanes * sizeof(int32_t)), aligned(4), may_alias));

constexpr int kMostKernels = 30;
constexpr float kFarthest = 1e6f;  // as in malleable/assign.py

inline Vec abs(Vec v) { return v < 0 ? -v : v; }
inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

// e to the x for x <= 0, to about one unit in the last place; 0 below the range of float.
inline Vec exponential(Vec x) {
  const Vec bounded = larger(x, broadcast(-87.0f));
  const Vec turns = bounded * 1.44269504f - 0.5f;
  const IntVec n = __builtin_convertvector(turns, IntVec);  // truncates towards zero: rounds, as turns < 0
  const Vec whole = __builtin_convertvector(n, Vec);
  const Vec r = (bounded - whole * 0.693359375f) + whole * 2.12194440e-4f;
  Vec e = r * 1.9875691500e-4f + 1.3981999507e-3f;
  e = e * r + 8.3334519073e-3f;
  e = e * r + 4.1665795894e-2f;
  e = e * r + 1.6666665459e-1f;
  e = e * r + 5.0000001201e-1f;
  e = e * r * r + r + 1.0f;
  const IntVec bits = (n + 127) << 23;
  e *= reinterpret_cast<const Vec&>(bits);
  return x < -87.0f ? Vec{} : e;
}

// h_j for j = 0 ... K + 1 and its slope in d (Eqs. 6 and 7), then the softmax over j. K = 0 stands for a number that is
// known only when it runs.
template <int K>
struct Classes {
  static constexpr int kMost = K ? K : kMostKernels;
  Vec h[kMost + 2], slope[kMost + 2], share[kMost + 2];
  inline __attribute__((always_inline)) void compute(Vec d, const float* centers, int kernels, float inverse_temperature) {
    Vec highest{};
    MALLEABLE_UNROLL
    for (int j = 0; j < kernels + 2; ++j) {
      const Vec offset = d - centers[j];
      if (j == 0) {
        slope[j] = abs(offset) * (-2 * inverse_temperature);
      } else if (j == kernels + 1) {
        slope[j] = abs(offset) * (2 * inverse_temperature);
      } else {
        slope[j] = offset * (-2 * inverse_temperature);
      }
      h[j] = offset * slope[j] * 0.5f;
      highest = j == 0 ? h[j] : larger(highest, h[j]);
    }
    Vec total{};
    MALLEABLE_UNROLL
    for (int j = 0; j < kernels + 2; ++j) total += share[j] = exponential(h[j] - highest);
    const Vec inverse = 1.0f / total;
    MALLEABLE_UNROLL
    for (int j = 0; j < kernels + 2; ++j) share[j] *= inverse;
  }
};

inline Vec bounded(Vec d) { return larger(-larger(-d, broadcast(-kFarthest)), broadcast(-kFarthest)); }

constexpr int64_t kChunk = 4096;

template <int K>
void assign(int64_t batch, int64_t size, int some, const float* d, const float* centers, float temperature,
            const float* scale, float* out, int threads) {
  const int kernels = K ? K : some;
  const int64_t chunks = (size + kChunk - 1) / kChunk;
#pragma omp parallel for collapse(2) num_threads(threads) schedule(static) if (batch * size > kChunk)
  for (int64_t n = 0; n < batch; ++n)
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      Classes<K> classes;
      const int64_t last = std::min(size, (chunk + 1) * kChunk);
      for (int64_t i = chunk * kChunk; i < last; i += kLanes) {
        classes.compute(bounded(load_some(d + n * size + i, last - i)), centers, kernels, 1 / temperature);
        MALLEABLE_UNROLL
        for (int k = 0; k < kernels; ++k)
          store_some(out + (n * kernels + k) * size + i, classes.share[k + 1] * scale[k], last - i);
      }
    }
}

template <int K>
void assign_backward(int64_t batch, int64_t size, int some, const float* grad, const float* d, const float* centers,
                     float temperature, const float* scale, float* grad_d, double* sums, int threads) {
  const int kernels = K ? K : some;
  const int64_t chunks = (size + kChunk - 1) / kChunk;
  const int numbers = 2 * kernels + 3;
  // One row per chunk, added up in order: the result does not depend on the number of threads.
  std::vector<double> rows(size_t(batch * chunks) * numbers, 0.0);
#pragma omp parallel for collapse(2) num_threads(threads) schedule(static) if (batch * size > kChunk)
  for (int64_t n = 0; n < batch; ++n)
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      Classes<K> classes;
      Vec total[2 * Classes<K>::kMost + 3] = {};
      const int64_t last = std::min(size, (chunk + 1) * kChunk);
      for (int64_t i = chunk * kChunk; i < last; i += kLanes) {
        const Vec at = load_some(d + n * size + i, last - i);
        classes.compute(bounded(at), centers, kernels, 1 / temperature);
        Vec g[Classes<K>::kMost], mean{};
        MALLEABLE_UNROLL
        for (int k = 0; k < kernels; ++k) {
          const Vec incoming = load_some(grad + (n * kernels + k) * size + i, last - i);
          total[kernels + 3 + k] += incoming * classes.share[k + 1];
          g[k] = incoming * scale[k];
          mean += g[k] * classes.share[k + 1];
        }
        Vec slope{};
        MALLEABLE_UNROLL
        for (int j = 0; j < kernels + 2; ++j) {
          const Vec to_h = classes.share[j] * ((j > 0 && j <= kernels ? g[j - 1] : Vec{}) - mean);
          const Vec to_offset = to_h * classes.slope[j];
          slope += to_offset;
          total[j] -= to_offset;
          total[kernels + 2] -= to_h * classes.h[j];
        }
        if (grad_d) store_some(grad_d + n * size + i, abs(at) <= kFarthest ? slope : Vec{}, last - i);
      }
      double* row = rows.data() + (n * chunks + chunk) * numbers;
      for (int j = 0; j < numbers; ++j) row[j] = sum(total[j]);
      row[kernels + 2] /= temperature;
    }
  for (int j = 0; j < numbers; ++j) sums[j] = 0;
  for (int64_t r = 0; r < batch * chunks; ++r)
    for (int j = 0; j < numbers; ++j) sums[j] += rows[r * numbers + j];
}

}  // namespace

// d: [batch][size]; out: [batch][kernels][size] = scale_k g_k(d).
extern "C" void malleable_assign(int64_t batch, int64_t size, int32_t kernels, const float* d, const float* centers,
                                 float temperature, const float* scale, float* out, int32_t threads) {
  const auto run = kernels == 3 ? assign<3> : kernels == 1 ? assign<1> : assign<0>;
  run(batch, size, kernels, d, centers, temperature, scale, out, threads);
}

// The same from a layer's own parameters: the temperature is bent (see malleable/layers.py), scale = gain softmax(b).
extern "C" void malleable_assign_of(int64_t batch, int64_t size, int32_t kernels, const float* d, const float* centers,
                                    const float* raw_temperature, float bend, float coldest, const float* rebalance,
                                    const float* gain, float* out, int32_t threads) {
  const float raw = *raw_temperature, highest = *std::max_element(rebalance, rebalance + kernels);
  float scale[kMostKernels], total = 0;
  for (int k = 0; k < kernels; ++k) total += scale[k] = std::exp(rebalance[k] - highest);
  for (int k = 0; k < kernels; ++k) scale[k] *= *gain / total;
  const float temperature = raw < bend ? bend * bend / (2 * bend - raw) : raw;
  malleable_assign(batch, size, kernels, d, centers, temperature < coldest ? coldest : temperature, scale, out, threads);
}

// sums: [K + 2 centers, temperature, K scales] in double; grad_d may be null.
extern "C" void malleable_assign_backward(int64_t batch, int64_t size, int32_t kernels, const float* grad,
                                          const float* d, const float* centers, float temperature, const float* scale,
                                          float* grad_d, double* sums, int32_t threads) {
  const auto run = kernels == 3 ? assign_backward<3> : kernels == 1 ? assign_backward<1> : assign_backward<0>;
  run(batch, size, kernels, grad, d, centers, temperature, scale, grad_d, sums, threads);
}
