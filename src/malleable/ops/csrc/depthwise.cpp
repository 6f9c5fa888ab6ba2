// Depth convolution of every channel on its own (groups = channels in = channels out).
//
// There is no sum over channels to hide the assignment behind, so the kernels are mixed first, tap by tap:
// y(i) += (sum_k assign_k(i, p) w_k(p)) x(i + p), for a few pixels times a few vectors of channels at once.

#include "common.h"

namespace {

constexpr int kWide = 2;                  // vectors of a tile
constexpr int kTall = 3;                  // pixels of a tile
constexpr int kSlice = 4 * kLanes;        // channels of a block that are kept in cache together

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

// to += (sum_k a_k w_k) * from for R pixels and V vectors.
template <int R, int V>
inline __attribute__((always_inline)) void mix(const float* const* from, float* const* to, const float* const* a,
                                               const float* weights, int pitch, int kernels, int offset) {
  Vec mixed[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) mixed[r][v] = Vec{};
  for (int k = 0; k < kernels; ++k) {
    Vec w[V];
    for (int v = 0; v < V; ++v) w[v] = load(weights + int64_t(k) * pitch + offset + v * kLanes);
    for (int r = 0; r < R; ++r) {
      const Vec s = broadcast(a[r][k]);
      for (int v = 0; v < V; ++v) mixed[r][v] += s * w[v];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) {
      float* y = to[r] + offset + v * kLanes;
      store(y, load(y) + mixed[r][v] * load(from[r] + offset + v * kLanes));
    }
}

template <int V>
void mix_rows(int rows, const float* const* from, float* const* to, const float* const* a, const float* weights,
              int pitch, int kernels, int offset) {
  static_assert(kTall == 3, "one case per number of rows");
  if (rows == 3) mix<3, V>(from, to, a, weights, pitch, kernels, offset);
  else if (rows == 2) mix<2, V>(from, to, a, weights, pitch, kernels, offset);
  else mix<1, V>(from, to, a, weights, pitch, kernels, offset);
}

struct Pixels {  // the list of one tap: what each pixel reads, where it adds, and its assignments, kernels together
  std::vector<const float*> from;
  std::vector<float*> to;
  std::vector<const float*> a;
  std::vector<float> values;
  explicit Pixels(int count, int kernels) : values(size_t(count) * kernels) {
    from.reserve(count);
    to.reserve(count);
    a.reserve(count);
  }
  void clear() {
    from.clear();
    to.clear();
    a.clear();
  }
  template <typename T>
  void add(const float* source, float* target, const T* assign, int64_t kernel_stride, int kernels) {
    float* v = values.data() + a.size() * kernels;
    for (int k = 0; k < kernels; ++k) v[k] = assign[k * kernel_stride];
    from.push_back(source);
    to.push_back(target);
    a.push_back(v);
  }
  void walk(const float* weights, int pitch, int kernels, int width) const {
    const int count = int(from.size());
    for (int i = 0; i < count; i += kTall) {
      const int rows = std::min(kTall, count - i);
      int c = 0;
      for (; c + kWide * kLanes <= width; c += kWide * kLanes)
        mix_rows<kWide>(rows, &from[i], &to[i], &a[i], weights, pitch, kernels, c);
      for (; c < width; c += kLanes) mix_rows<1>(rows, &from[i], &to[i], &a[i], weights, pitch, kernels, c);
    }
  }
};

template <typename T>
void forward(const Problem& p, const T* x, const T* weight, const T* assign, T* y, float* packed) {
  const int taps = p.kh * p.kw, pitch = round_up(p.channels, kLanes);
  const int64_t pixels = int64_t(p.out_height) * p.out_width;
  const Blocks blocks(p.out_height, p.out_width);
  const Region largest{0, 0, blocks.rows, blocks.columns};
  pack(p, weight, pitch, packed);
#pragma omp parallel num_threads(p.threads)
  {
    Buffer in(int64_t(input_of(p, largest).pixels()) * kSlice), out(int64_t(largest.pixels()) * kSlice);
    Pixels list(largest.pixels(), p.kernels);
#pragma omp for collapse(2) schedule(dynamic)
    for (int n = 0; n < p.batch; ++n)
      for (int b = 0; b < blocks.count(); ++b)
        for (int c = 0; c < p.channels; c += kSlice) {
          const int channels = std::min(kSlice, p.channels - c), width = round_up(channels, kLanes);
          const Region r = blocks[b], source = input_of(p, r);
          gather(x + n * p.x_stride[0] + c * p.x_stride[1], p.x_stride, p.height, p.width, channels, source, in.get(),
                 width);
          std::memset(out.get(), 0, sizeof(float) * r.pixels() * width);
          for (int t = 0; t < taps; ++t) {
            list.clear();
            for (int i = 0; i < r.rows; ++i)
              for (int j = 0; j < r.columns; ++j) {
                const int64_t from =
                    int64_t(i * p.sh + t / p.kw * p.dh) * source.columns + j * p.sw + t % p.kw * p.dw;
                const int64_t at = int64_t(n) * p.kernels * taps * pixels + t * pixels +
                                   int64_t(r.row + i) * p.out_width + r.column + j;
                list.add(in.get() + from * width, out.get() + int64_t(i * r.columns + j) * width, assign + at,
                         taps * pixels, p.kernels);
              }
            list.walk(packed + int64_t(t) * p.kernels * pitch + c, pitch, p.kernels, width);
          }
          scatter(out.get(), width, y + n * p.y_stride[0] + c * p.y_stride[1], p.y_stride, channels, r);
        }
  }
}

template <typename T>
void backward_input(const Problem& p, const T* grad, const T* weight, const T* assign, T* grad_x, float* packed) {
  const int taps = p.kh * p.kw, pitch = round_up(p.channels, kLanes);
  const int64_t pixels = int64_t(p.out_height) * p.out_width;
  const Blocks blocks(p.height, p.width);
  const Region largest{0, 0, blocks.rows, blocks.columns};
  const int reach = ((blocks.rows + (p.kh - 1) * p.dh) / p.sh + 2) * ((blocks.columns + (p.kw - 1) * p.dw) / p.sw + 2);
  pack(p, weight, pitch, packed);
#pragma omp parallel num_threads(p.threads)
  {
    Buffer in(int64_t(reach) * kSlice), out(int64_t(largest.pixels()) * kSlice);
    Pixels list(largest.pixels(), p.kernels);
#pragma omp for collapse(2) schedule(dynamic)
    for (int n = 0; n < p.batch; ++n)
      for (int b = 0; b < blocks.count(); ++b)
        for (int c = 0; c < p.channels; c += kSlice) {
          const int channels = std::min(kSlice, p.channels - c), width = round_up(channels, kLanes);
          const Region r = blocks[b], source = output_of(p, r);
          gather(grad + n * p.y_stride[0] + c * p.y_stride[1], p.y_stride, p.out_height, p.out_width, channels, source,
                 in.get(), width);
          std::memset(out.get(), 0, sizeof(float) * r.pixels() * width);
          for (int t = 0; t < taps; ++t) {
            list.clear();
            for (int i = 0; i < r.rows; ++i) {
              const int row = r.row + i + p.top - t / p.kw * p.dh;
              if (row < 0 || row % p.sh || row / p.sh >= p.out_height) continue;
              for (int j = 0; j < r.columns; ++j) {
                const int column = r.column + j + p.left - t % p.kw * p.dw;
                if (column < 0 || column % p.sw || column / p.sw >= p.out_width) continue;
                const int64_t from = int64_t(row / p.sh - source.row) * source.columns + column / p.sw - source.column;
                const int64_t at = int64_t(n) * p.kernels * taps * pixels + t * pixels +
                                   int64_t(row / p.sh) * p.out_width + column / p.sw;
                list.add(in.get() + from * width, out.get() + int64_t(i * r.columns + j) * width, assign + at,
                         taps * pixels, p.kernels);
              }
            }
            list.walk(packed + int64_t(t) * p.kernels * pitch + c, pitch, p.kernels, width);
          }
          scatter(out.get(), width, grad_x + n * p.grad_x_stride[0] + c * p.grad_x_stride[1], p.grad_x_stride, channels,
                  r);
        }
  }
}

// Gradients of the weights and of the assignment, either of which may be null. `parts`: [thread][tap][kernel][channel].
template <typename T>
void backward_rest(const Problem& p, const T* grad, const T* x, const T* weight, const T* assign, T* grad_weight,
                   T* grad_assign, float* packed, float* parts) {
  const int taps = p.kh * p.kw, pitch = round_up(p.channels, kLanes);
  const int64_t pixels = int64_t(p.out_height) * p.out_width, part = int64_t(taps) * p.kernels * pitch;
  const Blocks blocks(p.out_height, p.out_width);
  const Region largest{0, 0, blocks.rows, blocks.columns};
  pack(p, weight, pitch, packed);
  std::memset(parts, 0, sizeof(float) * part * p.threads);
#pragma omp parallel num_threads(p.threads)
  {
    Buffer in(int64_t(input_of(p, largest).pixels()) * kSlice), out(int64_t(largest.pixels()) * kSlice);
    Buffer dots(int64_t(largest.pixels()) * p.kernels * taps);
    float* sums = parts + part * omp_get_thread_num();
#pragma omp for collapse(2) schedule(static)
    for (int n = 0; n < p.batch; ++n)
      for (int b = 0; b < blocks.count(); ++b) {
        const Region r = blocks[b], source = input_of(p, r);
        std::memset(dots.get(), 0, sizeof(float) * r.pixels() * p.kernels * taps);
        for (int c = 0; c < p.channels; c += kSlice) {
          const int channels = std::min(kSlice, p.channels - c), width = round_up(channels, kLanes);
          gather(x + n * p.x_stride[0] + c * p.x_stride[1], p.x_stride, p.height, p.width, channels, source, in.get(),
                 width);
          gather(grad + n * p.y_stride[0] + c * p.y_stride[1], p.y_stride, p.out_height, p.out_width, channels, r,
                 out.get(), width);
          for (int t = 0; t < taps; ++t)
            for (int k = 0; k < p.kernels; ++k) {
              const int64_t plane = ((int64_t(n) * p.kernels + k) * taps + t) * pixels;
              const float* w = packed + (int64_t(t) * p.kernels + k) * pitch + c;
              float* dot = dots.get() + int64_t(k * taps + t) * r.pixels();
              for (int v = 0; v < width; v += kLanes) {
                Vec total{};
                const Vec wv = load(w + v);
                for (int i = 0; i < r.rows; ++i) {
                  const T* a = assign + plane + int64_t(r.row + i) * p.out_width + r.column;
                  const float* from =
                      in.get() + (int64_t(i * p.sh + t / p.kw * p.dh) * source.columns + t % p.kw * p.dw) * width + v;
                  const float* g = out.get() + int64_t(i) * r.columns * width + v;
                  for (int j = 0; j < r.columns; ++j, from += p.sw * width, g += width) {
                    const Vec product = load(from) * load(g);
                    total += broadcast(a[j]) * product;
                    if (grad_assign) dot[i * r.columns + j] += sum(wv * product);
                  }
                }
                float* to = sums + (int64_t(t) * p.kernels + k) * pitch + c + v;
                store(to, load(to) + total);
              }
            }
        }
        if (!grad_assign) continue;
        for (int kt = 0; kt < p.kernels * taps; ++kt)
          for (int i = 0; i < r.rows; ++i)
            for (int j = 0; j < r.columns; ++j)
              grad_assign[(int64_t(n) * p.kernels * taps + kt) * pixels + int64_t(r.row + i) * p.out_width + r.column +
                          j] = dots.get()[int64_t(kt) * r.pixels() + i * r.columns + j];
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
  extern "C" void depthwise_forward_##suffix(const Problem* p, const void* x, const void* w, const void* a, void* y,   \
                                             float* packed) {                                                          \
    forward(*p, (const T*)x, (const T*)w, (const T*)a, (T*)y, packed);                                                 \
  }                                                                                                                    \
  extern "C" void depthwise_backward_input_##suffix(const Problem* p, const void* g, const void* w, const void* a,     \
                                                    void* gx, float* packed) {                                         \
    backward_input(*p, (const T*)g, (const T*)w, (const T*)a, (T*)gx, packed);                                         \
  }                                                                                                                    \
  extern "C" void depthwise_backward_rest_##suffix(const Problem* p, const void* g, const void* x, const void* w,      \
                                                   const void* a, void* gw, void* ga, float* packed, float* parts) {   \
    backward_rest(*p, (const T*)g, (const T*)x, (const T*)w, (const T*)a, (T*)gw, (T*)ga, packed, parts);              \
  }
MALLEABLE_FOR_EVERY_TYPE(MALLEABLE_EXPORT)
