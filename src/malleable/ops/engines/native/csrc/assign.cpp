// The malleable assignment and its gradient in one pass each (paper, Eqs. 5 to 9), keeping nothing but d.

#include <cmath>

#include "common.h"

namespace {

typedef int32_t IntVec __attribute__((vector_size(kLanes * sizeof(int32_t)), aligned(4), may_alias));

constexpr int kMostKernels = 30;
constexpr float kFarthest = 1e6f;  // as in malleable/assign.py

inline IntVec bits_of(Vec v) { return reinterpret_cast<const IntVec&>(v); }
inline Vec abs(Vec v) {
  const IntVec bits = bits_of(v) & 0x7fffffff;
  return reinterpret_cast<const Vec&>(bits);
}
inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

// e to the x for x <= 0, to about one unit in the last place; 0 below the range of float.
inline Vec exponential(Vec x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: a number added to it is rounded, and ends up in its last bits
  const auto tiny = x < -87.0f;
  const Vec bounded = tiny ? broadcast(-87.0f) : x;
  const Vec turns = bounded * 1.44269504f + kRound;
  const Vec r = bounded * 1.44269504f - (turns - kRound);
  Vec e = r * 1.535336188e-4f + 1.339887440e-3f;  // 2 to the r
  e = e * r + 9.618437357e-3f;
  e = e * r + 5.550332471e-2f;
  e = e * r + 2.402264791e-1f;
  e = e * r + 6.931472028e-1f;
  e = e * r + 1.0f;
  const IntVec bits = bits_of(e) + (bits_of(turns) << 23);
  return tiny ? Vec{} : reinterpret_cast<const Vec&>(bits);
}

// h_j for j = 0 ... K + 1 and half its slope in d (Eqs. 6 and 7), then the softmax over j. K = 0 stands for a number that is
// known only when it runs.
template <int K>
struct Classes {
  static constexpr int kMost = K ? K : kMostKernels;
  Vec h[kMost + 2], half_slope[kMost + 2], share[kMost + 2];
  inline __attribute__((always_inline)) void compute(Vec d, const float* centers, int kernels, float inverse_temperature) {
    Vec highest{};
    MALLEABLE_UNROLL
    for (int j = 0; j < kernels + 2; ++j) {
      const Vec offset = d - centers[j];
      if (j == 0) {
        half_slope[j] = abs(offset) * -inverse_temperature;
      } else if (j == kernels + 1) {
        half_slope[j] = abs(offset) * inverse_temperature;
      } else {
        half_slope[j] = offset * -inverse_temperature;
      }
      h[j] = offset * half_slope[j];
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

inline bool is_zero(Vec v) {
  constexpr Vec kZero{};
  return std::memcmp(&v, &kZero, sizeof(Vec)) == 0;
}

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
      Classes<K> classes, flat;
      flat.compute(Vec{}, centers, kernels, 1 / temperature);
      const int64_t last = std::min(size, (chunk + 1) * kChunk);
      for (int64_t i = chunk * kChunk; i < last; i += kLanes) {
        const Vec at = load_some(d + n * size + i, last - i);
        const bool same = is_zero(at);  // as all of a center tap, and where depth is missing
        if (!same) classes.compute(bounded(at), centers, kernels, 1 / temperature);
        MALLEABLE_UNROLL
        for (int k = 0; k < kernels; ++k)
          store_some(out + (n * kernels + k) * size + i, (same ? flat : classes).share[k + 1] * scale[k], last - i);
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
          const Vec to_offset = to_h * classes.half_slope[j] * 2.0f;
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
