// A malleable layer in one call: its assignment from its parameters, the convolution by one of the paths, the bias.

#include "common.h"

extern "C" {
void malleable_assign_of(int64_t batch, int64_t size, int32_t kernels, const float* d, const float* centers,
                         const float* raw_temperature, float bend, float coldest, const float* rebalance,
                         const float* gain, float* out, int32_t threads);
int dense_forward_float32(const Problem*, const void* x, const void* weight, const void* assign, void* y);
int depthwise_forward_float32(const Problem*, const void* x, const void* weight, const void* assign, void* y);
int grouped_forward_float32(const Problem*, const void* x, const void* weight, const void* assign, void* y);
}

namespace {

// y is dense, channels-last if its channels lie side by side.
void add(const Problem& p, const float* bias, float* y) {
  const bool side_by_side = p.y_stride[1] == 1;
  const int64_t pixels = int64_t(p.out_height) * p.out_width, lines = p.batch * (side_by_side ? pixels : p.out_channels);
  const int64_t length = side_by_side ? p.out_channels : pixels;
#pragma omp parallel for num_threads(p.threads) schedule(static) if (p.is_large())
  for (int64_t i = 0; i < lines; ++i) {
    float* line = y + i * length;
    if (side_by_side) {
      for (int64_t j = 0; j < length; ++j) line[j] += bias[j];
    } else {
      const float same = bias[i % p.out_channels];
      for (int64_t j = 0; j < length; ++j) line[j] += same;
    }
  }
}

}  // namespace

// path: 0 dense, 1 depthwise, 2 grouped. bias may be null, and so may assign if nobody wants it.
extern "C" int malleable_conv2d(const Problem* problem, int32_t path, const float* x, const float* weight,
                                const float* bias, const float* d, const float* centers, const float* raw_temperature,
                                const float* rebalance, const float* gain, float bend, float coldest, float* assign,
                                float* y) {
  const Problem& p = *problem;
  return guarded([&] {
    const int64_t size = int64_t(p.kh) * p.kw * p.out_height * p.out_width;
    const Buffers own(1, assign ? 0 : p.batch * p.kernels * size);
    float* shares = assign ? assign : own.first();
    malleable_assign_of(p.batch, size, p.kernels, d, centers, raw_temperature, bend, coldest, rebalance, gain, shares,
                        p.threads);
    const auto run = path == 0   ? dense_forward_float32
                     : path == 1 ? depthwise_forward_float32
                                 : grouped_forward_float32;
    if (run(problem, x, weight, shares, y)) throw std::bad_alloc();
    if (bias) add(p, bias, y);
  });
}
