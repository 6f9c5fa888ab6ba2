// Depth differences of all taps in one pass over the depth map; the equations are in malleable/geometry.py.

#include "common.h"

namespace {

// A row of depth at a feature map, from `left` columns before it on, 0 where there is none.
void sample(const float* depth, const int64_t* stride, int row, int height, int columns, int left, int width, int rate,
            bool known, float nearest, float farthest, float* out) {
  for (int j = 0; j < width; ++j) {
    const int column = j - left;
    float z = 0;
    if (known && row >= 0 && row < height && column >= 0 && column < columns)
      z = depth[int64_t(row) * rate * stride[2] + int64_t(column) * rate * stride[3]];
    out[j] = z > nearest && z < farthest ? z : 0.0f;
  }
}

}  // namespace

// value, valid: [batch][tap][out_height][out_width]. `unit` is rate times dilation, or 0 for differences in metres. Of the
// problem only the sizes of the map, the window and x_stride, which is the depth's, count.
extern "C" int depth_difference(const Problem* problem, const float* depth, const float* focal, int32_t rate, float unit,
                                float nearest, float farthest, float* value, uint8_t* valid) {
  const Problem& p = *problem;
  return guarded([&] {
    const int reach = (p.kh - 1) * p.dh + 1, width = (p.out_width - 1) * p.sw + (p.kw - 1) * p.dw + 1;
    const int taps = p.kh * p.kw;
    const int64_t pixels = int64_t(p.out_height) * p.out_width;
    const Buffers lines(p.threads, int64_t(reach) * width + 3 * int64_t(p.out_width));
#pragma omp parallel for collapse(2) num_threads(p.threads) schedule(static) if (p.batch * pixels * taps > 8192)
    for (int n = 0; n < p.batch; ++n)
      for (int i = 0; i < p.out_height; ++i) {
        float *rows = lines.mine(), *center = rows + int64_t(reach) * width, *units = center + p.out_width;
        float* spaced = units + p.out_width;
        const float f = focal[n];
        const bool known = f > 0 && f < __builtin_inff();
        for (int r = 0; r < reach; r += p.dh)
          sample(depth + n * p.x_stride[0], p.x_stride, i * p.sh - p.top + r, p.height, p.width, p.left, width, rate,
                 known, nearest, farthest, rows + int64_t(r) * width);
        const float* middle = rows + int64_t(p.kh / 2 * p.dh) * width + p.kw / 2 * p.dw;
        for (int j = 0; j < p.out_width; ++j) {
          center[j] = middle[j * p.sw];
          units[j] = unit > 0 ? unit * (center[j] > 0 ? center[j] : 1.0f) / (known ? f : 1.0f) : 1.0f;
        }
        for (int t = 0; t < taps; ++t) {
          const float* z = rows + int64_t(t / p.kw * p.dh) * width + t % p.kw * p.dw;
          if (p.sw > 1) {
            for (int j = 0; j < p.out_width; ++j) spaced[j] = z[j * p.sw];
            z = spaced;
          }
          const int64_t at = (int64_t(n) * taps + t) * pixels + int64_t(i) * p.out_width;
          float* to = value + at;
          uint8_t* both = valid + at;
          for (int j = 0; j < p.out_width; j += kLanes) {  // buffers end with room for a vector
            const Vec here = load(center + j), there = load(z + j);
            const Vec difference = (here > 0) & (there > 0) ? here - there : Vec{};
            store_some(to + j, difference / load(units + j), p.out_width - j);
          }
          for (int j = 0; j < p.out_width; ++j) both[j] = (z[j] > 0) & (center[j] > 0);
        }
      }
  });
}
