// Depth differences of all taps in one pass over the depth map; the equations are in malleable/geometry.py.

#include "common.h"

namespace {

typedef uint8_t Bytes __attribute__((vector_size(kLanes)));

// A row of depth at a feature map, from `left` columns before it on, 0 where there is none.
void sample(const float* depth, int64_t step, int columns, int left, int width, float nearest, float farthest,
            float* out) {
  const int last = std::min(width, left + columns);
  std::fill(out, out + width, 0.0f);
  for (int j = left; j < last; ++j) {
    const float z = depth[(j - left) * step];
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
    const int taps = p.kh * p.kw, height = (p.out_height - 1) * p.sh + reach;
    const int64_t pixels = int64_t(p.out_height) * p.out_width, map = int64_t(height) * width;
    const int line = round_up(p.out_width, kLanes);
    const Buffers maps(1, p.batch * map), lines(p.threads, 3 * int64_t(line));
    const auto known = [&](int n) { return focal[n] > 0 && focal[n] < __builtin_inff(); };
    for (int n = 0; n < p.batch; ++n)
      for (int i = 0; i < height; ++i) {
        const int64_t row = i - p.top;
        const bool inside = known(n) && row >= 0 && row < p.height;
        sample(depth + n * p.x_stride[0] + (inside ? row * rate * p.x_stride[2] : 0), rate * p.x_stride[3],
               inside ? p.width : 0, p.left, width, nearest, farthest, maps.first() + n * map + int64_t(i) * width);
      }
#pragma omp parallel for collapse(2) num_threads(p.threads) schedule(static) if (p.batch * pixels * taps > 8192)
    for (int n = 0; n < p.batch; ++n)
      for (int i = 0; i < p.out_height; ++i) {
        float *center = lines.mine(), *units = center + line, *spaced = units + line;
        std::fill(units, spaced, 1.0f);
        const float* rows = maps.first() + n * map + int64_t(i) * p.sh * width;
        const float* middle = rows + int64_t(p.kh / 2 * p.dh) * width + p.kw / 2 * p.dw;
        for (int j = 0; j < p.out_width; ++j) {
          center[j] = middle[j * p.sw];
          units[j] = unit > 0 ? unit * (center[j] > 0 ? center[j] : 1.0f) / (known(n) ? focal[n] : 1.0f) : 1.0f;
        }
        for (int t = 0; t < taps; ++t) {
          const float* z = rows + int64_t(t / p.kw * p.dh) * width + t % p.kw * p.dw;
          if (p.sw > 1) {
            for (int j = 0; j < p.out_width; ++j) spaced[j] = z[j * p.sw];
            z = spaced;
          }
          const int64_t at = (int64_t(n) * taps + t) * pixels + int64_t(i) * p.out_width;
          for (int j = 0; j < p.out_width; j += kLanes) {  // all lines have room for whole vectors
            const Vec here = load(center + j), there = load(z + j);
            const Mask both = (here > 0) & (there > 0);
            const Bytes bytes = __builtin_convertvector(both & 1, Bytes);
            store_some(value + at + j, (both ? here - there : Vec{}) / load(units + j), p.out_width - j);
            std::memcpy(valid + at + j, &bytes, std::min(kLanes, p.out_width - j));
          }
        }
      }
  });
}
