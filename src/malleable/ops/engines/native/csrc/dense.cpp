// Depth convolution on the CPU without patches in memory.
//
// Pixels of a block are kept channels-last in cache. For every tap and kernel a register tile takes R pixels times V
// vectors of output channels through all input channels, and only then is scaled by the assignment, once per tile:
// y(i) += assign_k(i, p) * (w_k(p) x(i + p)). The assignment thus costs one multiply-add per C of the convolution's own,
// and pixels that a kernel does not take (assignment 0) are left out of its list.
//
// The gradient of x is the same walk with gy for x, seen from the input pixels, so that every thread writes only its own
// pixels; the gradient of the assignment falls off the same tiles. The gradient of the weights sums over pixels instead.

#include "dense_weight.h"

namespace {

// kLanes rows of weights, (channel, tap) along each, to [tap][channel][kPanel]: whole cache lines both ways.
template <typename T>
void pack_rows(const T* from, int64_t pitch, int columns, int taps, int64_t slab, float* to) {
  int tap = 0;
  for (int m = 0; m < columns; m += kLanes) {
    const int count = std::min(kLanes, columns - m);
    Vec tile[kLanes];
    if (count == kLanes) {
      MALLEABLE_UNROLL
      for (int l = 0; l < kLanes; ++l) tile[l] = load_lanes(from + l * pitch + m);
      transpose_step<kLanes / 2>(tile);
    } else {
      for (int l = 0; l < count; ++l)
        for (int r = 0; r < kLanes; ++r) tile[l][r] = from[r * pitch + m + l];
    }
    for (int l = 0; l < count; ++l) {
      store(to + tap * slab, tile[l]);
      if (++tap == taps) tap = 0, to += kPanel;
    }
  }
}

// Weights as panels, [kernel][tap][panel][input][kPanel], inputs being x's channels, or y's for the gradient of x.
// With `center` the first kernel's center tap holds the sum over kernels, weighted by it.
template <typename T>
void pack(const Problem& p, const T* weight, int group, bool transposed, const std::vector<float>* center, float* out) {
  const int c = p.channels / p.groups, o = p.out_channels / p.groups, taps = p.kh * p.kw;
  const int inputs = transposed ? o : c, outputs = transposed ? c : o;
  const int panels = (outputs + kPanel - 1) / kPanel;
  const int64_t slab = int64_t(panels) * inputs * kPanel;
  const int64_t per_output = transposed ? taps : int64_t(c) * taps, per_input = transposed ? int64_t(c) * taps : taps;
#pragma omp parallel for collapse(2) num_threads(p.threads) schedule(static) if (p.is_large())
  for (int k = 0; k < p.kernels; ++k)
    for (int panel = 0; panel < panels; ++panel) {
      const T* from = weight + (int64_t(k) * p.out_channels + group * o) * c * taps + panel * kPanel * per_output;
      float* to = out + int64_t(k) * taps * slab + int64_t(panel) * inputs * kPanel;
      const int wide = std::min(kPanel, outputs - panel * kPanel);
      int j = 0;
      if (!transposed)
        for (; j + kLanes <= wide; j += kLanes)
          pack_rows(from + j * per_output, per_output, inputs * taps, taps, slab, to + j);
      for (int i = 0; i < inputs; ++i)
        for (int t = 0; t < taps; ++t) {
          const T* w = from + i * per_input + t;
          float* row = to + t * slab + int64_t(i) * kPanel;
          for (int l = j; l < wide; ++l) row[l] = w[l * per_output];
          for (int l = wide; l < kPanel; ++l) row[l] = 0;
        }
    }
  if (!center) return;
  const int t = center_of(p);
#pragma omp parallel for num_threads(p.threads) schedule(static) if (p.is_large())
  for (int64_t i = 0; i < slab; ++i) {
    float s = 0;
    for (int k = 0; k < p.kernels; ++k) s += (*center)[k] * out[(int64_t(k) * taps + t) * slab + i];
    out[t * slab + i] = s;
  }
}

template <typename T>
void forward(const Problem& p, const T* x, const T* weight, const T* assign, T* y) {
  const int c = p.channels / p.groups, o = p.out_channels / p.groups, taps = p.kh * p.kw, center = center_of(p);
  const int pitch = round_up(o, kLanes);
  const int64_t slab = int64_t((o + kPanel - 1) / kPanel) * c * kPanel, pixels = int64_t(p.out_height) * p.out_width;
  const Blocks blocks(p.out_height, p.out_width, kBlock);
  const Region largest{0, 0, blocks.rows, blocks.columns}, reach = input_of(p, largest);
  const int64_t most = int64_t(std::min(reach.rows, p.height)) * std::min(reach.columns, p.width);
  const int chunk = channels_at_once(c, most);
  const Buffers ins(p.threads, most * chunk), outs(p.threads, int64_t(largest.pixels()) * pitch);
  const Buffers packs(1, int64_t(p.kernels) * taps * slab);
  float* packed = packs.first();
  std::vector<float> middle;
  const bool collapse = constant_center(p, assign, middle);
  for (int group = 0; group < p.groups; ++group) {
    pack(p, weight, group, false, collapse ? &middle : nullptr, packed);
#pragma omp parallel num_threads(p.threads) if (p.is_large())
    {
      float *in = ins.mine(), *out = outs.mine();
      Joined joined(largest.pixels());
#pragma omp for collapse(2) schedule(dynamic)
      for (int n = 0; n < p.batch; ++n)
        for (int b = 0; b < blocks.count(); ++b) {
          const Region r = blocks[b], source = input_of(p, r).clipped(p.height, p.width);
          std::memset(out, 0, sizeof(float) * r.pixels() * pitch);
          for (int first = 0; first < c; first += chunk) {
            const int depth = std::min(chunk, c - first);
            gather(x + n * p.x_stride[0] + (group * c + first) * p.x_stride[1], p.x_stride, p.height, p.width, depth,
                   source, in, depth);
            for (int t = 0; t < taps; ++t) {
              joined.clear();
              for_each_line(p, r, t, [&](const Line& l) { joined.add(l, source); });
              const bool one = collapse && t == center;
              for (int k = 0; k < (one ? 1 : p.kernels); ++k) {
                const T* a = one ? nullptr : assign + ((int64_t(n) * p.kernels + k) * taps + t) * pixels;
                walk(joined.taken(a), {in, depth}, out, pitch, packed + (int64_t(k) * taps + t) * slab, c, first, o,
                     nullptr, nullptr);
              }
            }
          }
          scatter(out, pitch, y + n * p.y_stride[0] + group * o * p.y_stride[1], p.y_stride, o, r);
        }
    }
  }
}

// Gradients of x and of the assignment, either of which may be null; that of the assignment must come in as zeros.
template <typename T>
void backward_data(const Problem& p, const T* grad, const T* x, const T* weight, const T* assign, T* grad_x,
                   float* grad_assign) {
  const int c = p.channels / p.groups, o = p.out_channels / p.groups, taps = p.kh * p.kw, center = center_of(p);
  const int pitch = round_up(c, kLanes);
  const int64_t slab = int64_t((c + kPanel - 1) / kPanel) * o * kPanel, pixels = int64_t(p.out_height) * p.out_width;
  const Blocks blocks(p.height, p.width, kBlock);
  const Region largest{0, 0, blocks.rows, blocks.columns};
  const int64_t most = int64_t(std::min((blocks.rows + (p.kh - 1) * p.dh) / p.sh + 2, p.out_height)) *
                       std::min((blocks.columns + (p.kw - 1) * p.dw) / p.sw + 2, p.out_width);
  const int chunk = channels_at_once(o, most);
  const Buffers ins(p.threads, most * chunk), outs(p.threads, int64_t(largest.pixels()) * pitch);
  const Buffers others(p.threads, grad_assign ? int64_t(largest.pixels()) * pitch : 0);
  const Buffers packs(1, int64_t(p.kernels) * taps * slab);
  float* packed = packs.first();
  std::vector<float> middle;
  const bool collapse = !grad_assign && constant_center(p, assign, middle);
  for (int group = 0; group < p.groups; ++group) {
    pack(p, weight, group, true, collapse ? &middle : nullptr, packed);
#pragma omp parallel num_threads(p.threads) if (p.is_large())
    {
      float *in = ins.mine(), *out = outs.mine(), *features = others.mine();
      Joined joined(largest.pixels());
      std::vector<float> dots(largest.pixels());
#pragma omp for collapse(2) schedule(dynamic)
      for (int n = 0; n < p.batch; ++n)
        for (int b = 0; b < blocks.count(); ++b) {
          const Region r = blocks[b], source = output_of(p, r).clipped(p.out_height, p.out_width);
          if (grad_assign)
            gather(x + n * p.x_stride[0] + group * c * p.x_stride[1], p.x_stride, p.height, p.width, c, r, features,
                   pitch);
          std::memset(out, 0, sizeof(float) * r.pixels() * pitch);
          for (int first = 0; first < o; first += chunk) {
            const int depth = std::min(chunk, o - first);
            gather(grad + n * p.y_stride[0] + (group * o + first) * p.y_stride[1], p.y_stride, p.out_height,
                   p.out_width, depth, source, in, depth);
            for (int t = 0; t < taps; ++t) {
              joined.clear();
              for_each_line_back(p, r, t, [&](const Line& l) { joined.add(l, source); });
              const bool one = collapse && t == center;
              for (int k = 0; k < (one ? 1 : p.kernels); ++k) {
                const int64_t plane = ((int64_t(n) * p.kernels + k) * taps + t) * pixels;
                const T* a = one ? nullptr : assign + plane;
                const float* w = packed + (int64_t(k) * taps + t) * slab;
                if (!grad_assign) {
                  walk(joined.taken(a), {in, depth}, out, pitch, w, o, first, c, nullptr, nullptr);
                  continue;
                }
                std::fill(dots.begin(), dots.end(), 0.0f);
                walk(joined.everyone(a), {in, depth}, out, pitch, w, o, first, c, features, dots.data());
                joined.put(dots.data(), grad_assign + plane);
              }
            }
          }
          if (grad_x)
            scatter(out, pitch, grad_x + n * p.grad_x_stride[0] + group * c * p.grad_x_stride[1], p.grad_x_stride, c,
                    r);
        }
    }
  }
}

template <typename T>
void backward(const Problem& p, const T* grad, const T* x, const T* weight, const T* assign, T* grad_x, T* grad_weight,
              float* grad_assign) {
  if (grad_x || grad_assign) backward_data(p, grad, x, weight, assign, grad_x, grad_assign);
  if (grad_weight) backward_weight(p, grad, x, assign, grad_weight);
}

}  // namespace

MALLEABLE_EXPORT_PATH(dense)
