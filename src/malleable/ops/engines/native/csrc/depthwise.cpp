// Depth convolution of every channel on its own (groups = channels in = channels out).
//
// There is no sum over channels to hide the assignment behind, so the kernels are mixed first, tap by tap:
// y(i) += (sum_k assign_k(i, p) w_k(p)) x(i + p), in registers for a few pixels times a few vectors of channels.

#include "common.h"

namespace {

constexpr int kWide = 2;            // vectors of a tile
constexpr int kTall = 4;            // pixels of a tile
constexpr int kSlice = 4 * kLanes;  // channels of a block that are kept in cache together
constexpr int kBlock = 1024;        // pixels of one block, about
constexpr int kTogether = 3;        // kernels whose sums over pixels share the registers

// Weights as [tap][kernel][channel], channels padded with zeros.
template <typename T>
void pack(const Problem& p, const T* weight, int pitch, float* out) {
  const int taps = p.kh * p.kw;
  for (int k = 0; k < p.kernels; ++k)
    for (int c = 0; c < pitch; ++c)
      for (int t = 0; t < taps; ++t)
        out[(int64_t(t) * p.kernels + k) * pitch + c] =
            c < p.channels ? float(weight[(int64_t(k) * p.channels + c) * taps + t]) : 0.0f;
}

// The assignment of a region of one sample as [kernel][tap][pixel].
template <typename T>
void copy_assign(const Problem& p, const T* assign, int n, Region r, float* out) {
  const int64_t planes = int64_t(p.kernels) * p.kh * p.kw, pixels = int64_t(p.out_height) * p.out_width;
  for (int64_t plane = 0; plane < planes; ++plane)
    for (int i = 0; i < r.rows; ++i, out += r.columns) {
      const T* from = assign + (n * planes + plane) * pixels + int64_t(r.row + i) * p.out_width + r.column;
      for (int j = 0; j < r.columns; ++j) out[j] = from[j];
    }
}

// A block of pixels, where each tap lies from a pixel, and the assignment as [kernel][tap][pixel].
struct Block {
  std::vector<const float*> pixel;
  std::vector<int64_t> tap;
  std::vector<float> assign;
  int64_t plane = 0;  // pixels in use
  Block(int pixels, int taps, int kernels) : pixel(pixels), tap(taps), assign(size_t(pixels) * taps * kernels) {}
};

template <int R, int V>
void mix(const Block& block, int first, int taps, int kernels, const float* weights, int pitch, int offset, float* out,
         int width) {
  Vec y[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) y[r][v] = Vec{};
  const int64_t plane = block.plane;
  const float* const* pixel = block.pixel.data() + first;
  for (int t = 0; t < taps; ++t) {
    Vec mixed[R][V];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) mixed[r][v] = Vec{};
    const float* a = block.assign.data() + t * plane + first;
    for (int k = 0; k < kernels; ++k, weights += pitch, a += taps * plane) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Vec s = broadcast(a[r]);
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) mixed[r][v] += s * load(weights + offset + v * kLanes);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) y[r][v] += mixed[r][v] * load(pixel[r] + block.tap[t] + offset + v * kLanes);
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(out + int64_t(first + r) * width + offset + v * kLanes, y[r][v]);
}

void mix_all(const Block& block, int pixels, int taps, int kernels, const float* weights, int pitch, float* out,
             int width) {
  for (int i = 0; i < pixels;) {
    const bool tall = i + kTall <= pixels;
    int c = 0;
    for (; c + kWide * kLanes <= width; c += kWide * kLanes)
      (tall ? mix<kTall, kWide> : mix<1, kWide>)(block, i, taps, kernels, weights, pitch, c, out, width);
    for (; c < width; c += kLanes)
      (tall ? mix<kTall, 1> : mix<1, 1>)(block, i, taps, kernels, weights, pitch, c, out, width);
    i += tall ? kTall : 1;
  }
}

template <typename T>
void forward(const Problem& p, const T* x, const T* weight, const T* assign, T* y, float* packed) {
  const int taps = p.kh * p.kw, pitch = round_up(p.channels, kLanes);
  const Blocks blocks(p.out_height, p.out_width, kBlock);
  const Region largest{0, 0, blocks.rows, blocks.columns};
  pack(p, weight, pitch, packed);
  const Buffers ins(p.threads, int64_t(input_of(p, largest).pixels()) * kSlice);
  const Buffers outs(p.threads, int64_t(largest.pixels()) * kSlice);
#pragma omp parallel num_threads(p.threads)
  {
    float *in = ins.mine(), *out = outs.mine();
    Block block(largest.pixels(), taps, p.kernels);
#pragma omp for collapse(2) schedule(dynamic)
    for (int n = 0; n < p.batch; ++n)
      for (int b = 0; b < blocks.count(); ++b) {
        const Region r = blocks[b], source = input_of(p, r);
        block.plane = r.pixels();
        copy_assign(p, assign, n, r, block.assign.data());
        for (int c = 0; c < p.channels; c += kSlice) {
          const int channels = std::min(kSlice, p.channels - c), width = round_up(channels, kLanes);
          gather(x + n * p.x_stride[0] + c * p.x_stride[1], p.x_stride, p.height, p.width, channels, source, in,
                 width);
          for (int i = 0; i < r.pixels(); ++i)
            block.pixel[i] =
                in + (int64_t(i / r.columns) * p.sh * source.columns + i % r.columns * p.sw) * width;
          for (int t = 0; t < taps; ++t)
            block.tap[t] = (int64_t(t / p.kw) * p.dh * source.columns + t % p.kw * p.dw) * width;
          mix_all(block, r.pixels(), taps, p.kernels, packed + c, pitch, out, width);
          scatter(out, width, y + n * p.y_stride[0] + c * p.y_stride[1], p.y_stride, channels, r);
        }
      }
  }
}

// Seen from the input pixels. With a stride the gradient is spread out, zeros between, so that taps lie evenly.
template <typename T>
void backward_input(const Problem& p, const T* grad, const T* weight, const T* assign, T* grad_x, float* packed) {
  const int taps = p.kh * p.kw, pitch = round_up(p.channels, kLanes);
  const int64_t pixels = int64_t(p.out_height) * p.out_width;
  const int reach_h = (p.kh - 1) * p.dh, reach_w = (p.kw - 1) * p.dw;
  const Blocks blocks(p.height, p.width, kBlock);
  const Region largest{0, 0, blocks.rows, blocks.columns};
  pack(p, weight, pitch, packed);
  const Buffers ins(p.threads, int64_t(largest.rows + reach_h) * (largest.columns + reach_w) * kSlice);
  const Buffers outs(p.threads, int64_t(largest.pixels()) * kSlice);
#pragma omp parallel num_threads(p.threads)
  {
    float *in = ins.mine(), *out = outs.mine();
    Block block(largest.pixels(), taps, p.kernels);
#pragma omp for collapse(2) schedule(dynamic)
    for (int n = 0; n < p.batch; ++n)
      for (int b = 0; b < blocks.count(); ++b) {
        const Region r = blocks[b];
        // The spread-out gradient from (row, column) on; input pixel (0, 0) of the block and the last tap meet there.
        const int row = r.row + p.top - reach_h, column = r.column + p.left - reach_w;
        const int rows = r.rows + reach_h, columns = r.columns + reach_w;
        block.plane = r.pixels();
        std::fill(block.assign.begin(), block.assign.begin() + block.plane * taps * p.kernels, 0.0f);
        for (int t = 0; t < taps; ++t)
          for (int i = 0; i < r.rows; ++i) {
            const int y = r.row + i + p.top - t / p.kw * p.dh;
            if (y < 0 || y % p.sh || y / p.sh >= p.out_height) continue;
            for (int j = 0; j < r.columns; ++j) {
              const int x = r.column + j + p.left - t % p.kw * p.dw;
              if (x < 0 || x % p.sw || x / p.sw >= p.out_width) continue;
              float* to = block.assign.data() + t * block.plane + i * r.columns + j;
              const T* a = assign + (int64_t(n) * p.kernels * taps + t) * pixels + int64_t(y / p.sh) * p.out_width + x / p.sw;
              for (int k = 0; k < p.kernels; ++k) to[k * taps * block.plane] = a[k * taps * pixels];
            }
          }
        for (int c = 0; c < p.channels; c += kSlice) {
          const int channels = std::min(kSlice, p.channels - c), width = round_up(channels, kLanes);
          const T* source = grad + n * p.y_stride[0] + c * p.y_stride[1];
          if (p.sh == 1 && p.sw == 1) {
            gather(source, p.y_stride, p.out_height, p.out_width, channels, {row, column, rows, columns}, in, width);
          } else {
            std::memset(in, 0, sizeof(float) * rows * columns * width);
            for (int i = 0; i < rows; ++i)
              for (int j = 0; j < columns; ++j) {
                const int y = row + i, x = column + j;
                if (y < 0 || y % p.sh || y / p.sh >= p.out_height) continue;
                if (x < 0 || x % p.sw || x / p.sw >= p.out_width) continue;
                gather(source, p.y_stride, p.out_height, p.out_width, channels, {y / p.sh, x / p.sw, 1, 1},
                       in + int64_t(i * columns + j) * width, width);
              }
          }
          for (int i = 0; i < r.pixels(); ++i)
            block.pixel[i] = in + (int64_t(i / r.columns + reach_h) * columns + i % r.columns + reach_w) * width;
          for (int t = 0; t < taps; ++t)
            block.tap[t] = -(int64_t(t / p.kw) * p.dh * columns + t % p.kw * p.dw) * width;
          mix_all(block, r.pixels(), taps, p.kernels, packed + c, pitch, out, width);
          scatter(out, width, grad_x + n * p.grad_x_stride[0] + c * p.grad_x_stride[1], p.grad_x_stride, channels,
                  r);
        }
      }
  }
}

// One tap of up to kTogether kernels over all pixels of a block: sums[k] += a_k x g, dots[k][pixel] += w_k . (x g).
template <int K>
void correlate(const Problem& p, Region r, const float* in, int columns, const float* out, int width, const float* a,
               int64_t plane, const float* weights, int pitch, float* sums, float* dots, int64_t dots_plane) {
  for (int v = 0; v < width; v += kWide * kLanes) {
    const int vectors = std::min(kWide, (width - v) / kLanes);
    Vec total[K][kWide], w[K][kWide];
    for (int k = 0; k < K; ++k)
      for (int u = 0; u < kWide; ++u) {
        total[k][u] = Vec{};
        w[k][u] = u < vectors ? load(weights + int64_t(k) * pitch + v + u * kLanes) : Vec{};
      }
    for (int i = 0; i < r.rows; ++i) {
      const float* from = in + int64_t(i) * p.sh * columns * width + v;
      const float* g = out + int64_t(i) * r.columns * width + v;
      for (int j = 0; j < r.columns; ++j, from += p.sw * width, g += width) {
        const Vec one = load(from) * load(g), two = vectors == 2 ? load(from + kLanes) * load(g + kLanes) : Vec{};
        const int64_t at = i * r.columns + j;
        for (int k = 0; k < K; ++k) {
          const Vec s = broadcast(a[k * plane + at]);
          total[k][0] += s * one;
          total[k][1] += s * two;
          if (dots) dots[k * dots_plane + at] += sum(w[k][0] * one + w[k][1] * two);
        }
      }
    }
    for (int k = 0; k < K; ++k)
      for (int u = 0; u < vectors; ++u) {
        float* to = sums + int64_t(k) * pitch + v + u * kLanes;
        store(to, load(to) + total[k][u]);
      }
  }
}

// Gradients of the weights and of the assignment, either of which may be null. `parts`: [thread][tap][kernel][channel].
template <typename T>
void backward_rest(const Problem& p, const T* grad, const T* x, const T* weight, const T* assign, T* grad_weight,
                   float* grad_assign, float* packed, float* parts) {
  const int taps = p.kh * p.kw, pitch = round_up(p.channels, kLanes);
  const int64_t pixels = int64_t(p.out_height) * p.out_width, part = int64_t(taps) * p.kernels * pitch;
  const Blocks blocks(p.out_height, p.out_width, kBlock);
  const Region largest{0, 0, blocks.rows, blocks.columns};
  static_assert(kTogether == 3 && kWide == 2, "as correlate is written");
  pack(p, weight, pitch, packed);
  std::memset(parts, 0, sizeof(float) * part * p.threads);
  const int64_t planes = int64_t(p.kernels) * taps;
  const Buffers ins(p.threads, int64_t(input_of(p, largest).pixels()) * kSlice);
  const Buffers outs(p.threads, int64_t(largest.pixels()) * kSlice);
  const Buffers assigns(p.threads, planes * largest.pixels());
  const Buffers products(p.threads, grad_assign ? planes * largest.pixels() : 0);
#pragma omp parallel num_threads(p.threads)
  {
    float *in = ins.mine(), *out = outs.mine(), *a = assigns.mine(), *dots = products.mine();
    float* sums = parts + part * omp_get_thread_num();
#pragma omp for collapse(2) schedule(static)
    for (int n = 0; n < p.batch; ++n)
      for (int b = 0; b < blocks.count(); ++b) {
        const Region r = blocks[b], source = input_of(p, r);
        const int64_t plane = r.pixels();
        copy_assign(p, assign, n, r, a);
        if (grad_assign) std::memset(dots, 0, sizeof(float) * planes * plane);
        for (int c = 0; c < p.channels; c += kSlice) {
          const int channels = std::min(kSlice, p.channels - c), width = round_up(channels, kLanes);
          gather(x + n * p.x_stride[0] + c * p.x_stride[1], p.x_stride, p.height, p.width, channels, source, in,
                 width);
          gather(grad + n * p.y_stride[0] + c * p.y_stride[1], p.y_stride, p.out_height, p.out_width, channels, r,
                 out, width);
          for (int t = 0; t < taps; ++t)
            for (int k = 0; k < p.kernels; k += kTogether) {
              const int count = std::min(kTogether, p.kernels - k);
              const auto run = count == 3 ? correlate<3> : count == 2 ? correlate<2> : correlate<1>;
              const int64_t from = (int64_t(t / p.kw) * p.dh * source.columns + t % p.kw * p.dw) * width;
              const int64_t at = (int64_t(t) * p.kernels + k) * pitch + c;
              run(p, r, in + from, source.columns, out, width, a + (int64_t(k) * taps + t) * plane,
                  taps * plane, packed + at, pitch, sums + at,
                  grad_assign ? dots + (int64_t(k) * taps + t) * plane : nullptr, taps * plane);
            }
        }
        if (!grad_assign) continue;
        for (int64_t kt = 0; kt < planes; ++kt)
          for (int i = 0; i < r.rows; ++i)
            for (int j = 0; j < r.columns; ++j)
              grad_assign[(n * planes + kt) * pixels + int64_t(r.row + i) * p.out_width + r.column + j] =
                  dots[kt * plane + i * r.columns + j];
      }
  }
  if (!grad_weight) return;
  for (int k = 0; k < p.kernels; ++k)
    for (int c = 0; c < p.channels; ++c)
      for (int t = 0; t < taps; ++t) {
        float s = 0;
        for (int thread = 0; thread < p.threads; ++thread)
          s += parts[part * thread + (int64_t(t) * p.kernels + k) * pitch + c];
        grad_weight[(int64_t(k) * p.channels + c) * taps + t] = s;
      }
}

}  // namespace

#define MALLEABLE_EXPORT(suffix, T)                                                                                    \
  extern "C" int depthwise_forward_##suffix(const Problem* p, const void* x, const void* w, const void* a, void* y,    \
                                            float* packed) {                                                           \
    return guarded([&] { forward(*p, (const T*)x, (const T*)w, (const T*)a, (T*)y, packed); });                        \
  }                                                                                                                    \
  extern "C" int depthwise_backward_input_##suffix(const Problem* p, const void* g, const void* w, const void* a,      \
                                                   void* gx, float* packed) {                                          \
    return guarded([&] { backward_input(*p, (const T*)g, (const T*)w, (const T*)a, (T*)gx, packed); });                \
  }                                                                                                                    \
  extern "C" int depthwise_backward_rest_##suffix(const Problem* p, const void* g, const void* x, const void* w,       \
                                                  const void* a, void* gw, float* ga, float* packed, float* parts) {   \
    return guarded([&] {                                                                                               \
      backward_rest(*p, (const T*)g, (const T*)x, (const T*)w, (const T*)a, (T*)gw, ga, packed, parts);                \
    });                                                                                                                \
  }
MALLEABLE_FOR_EVERY_TYPE(MALLEABLE_EXPORT)
