// Depth convolution on the CPU without patches in memory.
//
// Pixels of a block are kept channels-last in cache. For every tap and kernel a register tile takes R pixels times V
// vectors of output channels through all input channels, and only then is scaled by the assignment, once per tile:
// y(i) += assign_k(i, p) * (w_k(p) x(i + p)). The assignment thus costs one multiply-add per C of the convolution's own,
// and pixels that a kernel does not take (assignment 0) are left out of its list.
//
// The gradient of x is the same walk with gy for x, seen from the input pixels, so that every thread writes only its own
// pixels; the gradient of the assignment falls off the same tiles. The gradient of the weights sums over pixels instead.

#include "common.h"

namespace {

constexpr int kDepth = 256;  // channels summed before a tile is scaled and put away
constexpr int kBlock = 384;  // pixels of one block, about

// One register tile: R pixels times V vectors, summed over `depth` channels.
template <int R, int V>
struct Tile {
  Vec acc[R][V];

  inline __attribute__((always_inline)) void multiply(const float* const* rows, const float* weights, int depth) {
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) acc[r][v] = Vec{};
    const float* row[R];
    for (int r = 0; r < R; ++r) row[r] = rows[r];
    for (int c = 0; c < depth; ++c, weights += kPanel) {
      Vec b[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) b[v] = load(weights + v * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Vec a = broadcast(row[r][c]);
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) acc[r][v] += a * b[v];
      }
    }
  }
};

struct Entry {  // a pixel of a list: where it is read, where its result goes, what it is worth
  const float* from;
  float* to;
  float scale;
  int32_t index;
};

// to[o...] += scale * (from[c...] . weights) for R pixels.
template <int R, int V>
void accumulate(const Entry* list, int c, int o, const float* weights, int depth) {
  const float* rows[R];
  for (int r = 0; r < R; ++r) rows[r] = list[r].from + c;
  Tile<R, V> tile;
  tile.multiply(rows, weights, depth);
  for (int r = 0; r < R; ++r) {
    const Vec s = broadcast(list[r].scale);
    for (int v = 0; v < V; ++v) {
      float* to = list[r].to + o + v * kLanes;
      store(to, load(to) + s * tile.acc[r][v]);
    }
  }
}

// The same, and the inner product of (from . weights) with `other` (a row per index, pitch apart) added to `dots`.
template <int R, int V>
void accumulate_and_dot(const Entry* list, int c, int o, const float* weights, int depth, const float* other, int pitch,
                        float* dots) {
  const float* rows[R];
  for (int r = 0; r < R; ++r) rows[r] = list[r].from + c;
  Tile<R, V> tile;
  tile.multiply(rows, weights, depth);
  for (int r = 0; r < R; ++r) {
    const Vec s = broadcast(list[r].scale);
    const float* x = other + int64_t(list[r].index) * pitch + o;
    Vec dot{};
    for (int v = 0; v < V; ++v) {
      float* to = list[r].to + o + v * kLanes;
      store(to, load(to) + s * tile.acc[r][v]);
      dot += load(x + v * kLanes) * tile.acc[r][v];
    }
    dots[r] += sum(dot);
  }
}

using Accumulate = void (*)(const Entry*, int, int, const float*, int);
using AccumulateAndDot = void (*)(const Entry*, int, int, const float*, int, const float*, int, float*);

template <template <int, int> class F, typename Fn, int R, int V>
constexpr void fill(Fn (&table)[kRows + 1][kVectors + 1]) {
  table[R][V] = F<R, V>::run;
  if constexpr (V > 1) fill<F, Fn, R, V - 1>(table);
  else if constexpr (R > 1) fill<F, Fn, R - 1, kVectors>(table);
}
template <int R, int V> struct AccumulateOf { static constexpr Accumulate run = accumulate<R, V>; };
template <int R, int V> struct AccumulateAndDotOf { static constexpr AccumulateAndDot run = accumulate_and_dot<R, V>; };

template <template <int, int> class F, typename Fn>
struct Table {
  Fn of[kRows + 1][kVectors + 1] = {};
  constexpr Table() { fill<F, Fn, kRows, kVectors>(of); }
};
constexpr Table<AccumulateOf, Accumulate> kAccumulate;
constexpr Table<AccumulateAndDotOf, AccumulateAndDot> kAccumulateAndDot;

// Walks a list of pixels through one tap of one kernel. weights: panels of (depth of `inputs`) x kPanel.
void walk(const std::vector<Entry>& list, const float* weights, int inputs, int outputs, const float* other, int pitch,
          float* dots) {
  const int count = int(list.size());
  for (int o = 0; o < outputs; o += kPanel) {
    const int vectors = (std::min(kPanel, outputs - o) + kLanes - 1) / kLanes;
    for (int c = 0; c < inputs; c += kDepth) {
      const int depth = std::min(kDepth, inputs - c);
      const float* slice = weights + int64_t(o) * inputs + int64_t(c) * kPanel;
      for (int i = 0; i < count; i += kRows) {
        const int rows = std::min(kRows, count - i);
        if (dots) kAccumulateAndDot.of[rows][vectors](&list[i], c, o, slice, depth, other, pitch, dots + i);
        else kAccumulate.of[rows][vectors](&list[i], c, o, slice, depth);
      }
    }
  }
}

// The assignment of the centre tap, if it is the same everywhere: its kernels then act as one.
template <typename T>
bool constant_centre(const Problem& p, const T* assign, std::vector<float>& value) {
  const int64_t pixels = int64_t(p.out_height) * p.out_width, taps = p.kh * p.kw, centre = p.kh / 2 * p.kw + p.kw / 2;
  value.assign(p.kernels, 0.0f);
  for (int n = 0; n < p.batch; ++n)
    for (int k = 0; k < p.kernels; ++k) {
      const T* a = assign + ((int64_t(n) * p.kernels + k) * taps + centre) * pixels;
      if (n == 0) value[k] = a[0];
      bool same = true;
      for (int64_t i = 0; i < pixels; ++i) same &= float(a[i]) == value[k];
      if (!same) return false;
    }
  return true;
}

// kLanes rows of weights, (channel, tap) along each, to [tap][channel][kPanel]: whole cache lines both ways.
template <typename T>
void pack_rows(const T* from, int64_t pitch, int columns, int taps, int64_t slab, float* to) {
  for (int m = 0; m < columns; m += kLanes) {
    const int count = std::min(kLanes, columns - m);
    Vec tile[kLanes];
    if (count == kLanes) {
#pragma GCC unroll 16
      for (int l = 0; l < kLanes; ++l) tile[l] = load_lanes(from + l * pitch + m);
      transpose_step<kLanes / 2>(tile);
    } else {
      for (int l = 0; l < count; ++l)
        for (int r = 0; r < kLanes; ++r) tile[l][r] = from[r * pitch + m + l];
    }
    for (int l = 0; l < count; ++l) store(to + (m + l) % taps * slab + int64_t((m + l) / taps) * kPanel, tile[l]);
  }
}

// The way back for the gradient of the weights: the sum of `shares` of [tap][channel][pitch] to kLanes rows.
template <typename T>
void unpack_rows(const float* from, int64_t share, int shares, int64_t slab, int pitch, int columns, int taps, T* to,
                 int64_t to_pitch) {
  for (int m = 0; m < columns; m += kLanes) {
    const int count = std::min(kLanes, columns - m);
    Vec tile[kLanes];
    for (int l = 0; l < count; ++l) {
      const float* row = from + (m + l) % taps * slab + int64_t((m + l) / taps) * pitch;
      tile[l] = load(row);
      for (int s = 1; s < shares; ++s) tile[l] += load(row + s * share);
    }
    if (count == kLanes) {
      transpose_step<kLanes / 2>(tile);
#pragma GCC unroll 16
      for (int l = 0; l < kLanes; ++l) store_lanes(to + l * to_pitch + m, tile[l]);
    } else {
      for (int l = 0; l < count; ++l)
        for (int r = 0; r < kLanes; ++r) to[r * to_pitch + m + l] = float(tile[l][r]);
    }
  }
}

// Weights as panels, [kernel][tap][panel][input][kPanel], inputs being x's channels, or y's for the gradient of x.
// With `centre` the first kernel's centre tap holds the sum over kernels, weighted by it.
template <typename T>
void pack(const Problem& p, const T* weight, int group, bool transposed, const std::vector<float>* centre, float* out) {
  const int c = p.channels / p.groups, o = p.out_channels / p.groups, taps = p.kh * p.kw;
  const int inputs = transposed ? o : c, outputs = transposed ? c : o;
  const int panels = (outputs + kPanel - 1) / kPanel;
  const int64_t slab = int64_t(panels) * inputs * kPanel;
  const int64_t per_output = transposed ? taps : int64_t(c) * taps, per_input = transposed ? int64_t(c) * taps : taps;
#pragma omp parallel for collapse(2) num_threads(p.threads) schedule(static)
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
  if (!centre) return;
  const int t = p.kh / 2 * p.kw + p.kw / 2;
#pragma omp parallel for num_threads(p.threads) schedule(static)
  for (int64_t i = 0; i < slab; ++i) {
    float s = 0;
    for (int k = 0; k < p.kernels; ++k) s += (*centre)[k] * out[(int64_t(k) * taps + t) * slab + i];
    out[t * slab + i] = s;
  }
}

template <typename T>
void forward(const Problem& p, const T* x, const T* weight, const T* assign, T* y, float* packed) {
  const int c = p.channels / p.groups, o = p.out_channels / p.groups, taps = p.kh * p.kw;
  const int centre = p.kh / 2 * p.kw + p.kw / 2;
  const int y_pitch = round_up(o, kLanes);
  const int64_t slab = int64_t((o + kPanel - 1) / kPanel) * c * kPanel, pixels = int64_t(p.out_height) * p.out_width;
  const Blocks blocks(p.out_height, p.out_width, kBlock);
  const Region largest{0, 0, blocks.rows, blocks.columns};
  std::vector<float> middle;
  const bool collapse = constant_centre(p, assign, middle);
  for (int group = 0; group < p.groups; ++group) {
    pack(p, weight, group, false, collapse ? &middle : nullptr, packed);
#pragma omp parallel num_threads(p.threads)
    {
      Buffer in(int64_t(input_of(p, largest).pixels()) * c), out(int64_t(largest.pixels()) * y_pitch);
      std::vector<Entry> list;
      list.reserve(largest.pixels());
#pragma omp for collapse(2) schedule(dynamic)
      for (int n = 0; n < p.batch; ++n)
        for (int b = 0; b < blocks.count(); ++b) {
          const Region r = blocks[b], source = input_of(p, r);
          gather(x + n * p.x_stride[0] + group * c * p.x_stride[1], p.x_stride, p.height, p.width, c, source, in.get(), c);
          std::memset(out.get(), 0, sizeof(float) * r.pixels() * y_pitch);
          for (int t = 0; t < taps; ++t)
            for (int k = 0; k < p.kernels; ++k) {
              const bool one = collapse && t == centre;
              if (one && k > 0) continue;
              const T* a = assign + ((int64_t(n) * p.kernels + k) * taps + t) * pixels;
              list.clear();
              for (int i = 0; i < r.rows; ++i) {
                const T* line = a + int64_t(r.row + i) * p.out_width + r.column;
                const float* from =
                    in.get() + (int64_t(i * p.sh + t / p.kw * p.dh) * source.columns + t % p.kw * p.dw) * c;
                for (int j = 0; j < r.columns; ++j) {
                  const float scale = one ? 1.0f : float(line[j]);
                  if (scale != 0)
                    list.push_back({from + int64_t(j) * p.sw * c, out.get() + int64_t(i * r.columns + j) * y_pitch, scale, 0});
                }
              }
              walk(list, packed + (int64_t(k) * taps + t) * slab, c, o, nullptr, 0, nullptr);
            }
          scatter(out.get(), y_pitch, y + n * p.y_stride[0] + group * o * p.y_stride[1], p.y_stride, o, r);
        }
    }
  }
}

// Gradients of x and, if wanted, of the assignment (which must come in as zeros).
template <typename T>
void backward_data(const Problem& p, const T* grad, const T* x, const T* weight, const T* assign, T* grad_x,
                   T* grad_assign, float* packed) {
  const int c = p.channels / p.groups, o = p.out_channels / p.groups, taps = p.kh * p.kw;
  const int centre = p.kh / 2 * p.kw + p.kw / 2, pitch = round_up(c, kLanes);
  const int64_t slab = int64_t((c + kPanel - 1) / kPanel) * o * kPanel, pixels = int64_t(p.out_height) * p.out_width;
  const Blocks blocks(p.height, p.width, kBlock);
  const Region largest{0, 0, blocks.rows, blocks.columns};
  const int reach = ((blocks.rows + (p.kh - 1) * p.dh) / p.sh + 2) * ((blocks.columns + (p.kw - 1) * p.dw) / p.sw + 2);
  std::vector<float> middle;
  const bool collapse = !grad_assign && constant_centre(p, assign, middle);
  for (int group = 0; group < p.groups; ++group) {
    pack(p, weight, group, true, collapse ? &middle : nullptr, packed);
#pragma omp parallel num_threads(p.threads)
    {
      Buffer in(int64_t(reach) * o), out(int64_t(largest.pixels()) * pitch);
      Buffer features(grad_assign ? int64_t(largest.pixels()) * pitch : 1);
      std::vector<Entry> list;
      list.reserve(largest.pixels());
      std::vector<int64_t> where(largest.pixels());
      std::vector<float> dots(largest.pixels() + kRows);
#pragma omp for collapse(2) schedule(dynamic)
      for (int n = 0; n < p.batch; ++n)
        for (int b = 0; b < blocks.count(); ++b) {
          const Region r = blocks[b], source = output_of(p, r);
          gather(grad + n * p.y_stride[0] + group * o * p.y_stride[1], p.y_stride, p.out_height, p.out_width, o, source,
                 in.get(), o);
          if (grad_assign)
            gather(x + n * p.x_stride[0] + group * c * p.x_stride[1], p.x_stride, p.height, p.width, c, r,
                   features.get(), pitch);
          std::memset(out.get(), 0, sizeof(float) * r.pixels() * pitch);
          for (int t = 0; t < taps; ++t)
            for (int k = 0; k < p.kernels; ++k) {
              const bool one = collapse && t == centre;
              if (one && k > 0) continue;
              const int64_t plane = ((int64_t(n) * p.kernels + k) * taps + t) * pixels;
              list.clear();
              for (int i = 0; i < r.rows; ++i) {
                const int row = r.row + i + p.top - t / p.kw * p.dh;
                if (row < 0 || row % p.sh || row / p.sh >= p.out_height) continue;
                for (int j = 0; j < r.columns; ++j) {
                  const int column = r.column + j + p.left - t % p.kw * p.dw;
                  if (column < 0 || column % p.sw || column / p.sw >= p.out_width) continue;
                  const int64_t at = plane + int64_t(row / p.sh) * p.out_width + column / p.sw;
                  const float scale = one ? 1.0f : float(assign[at]);
                  if (scale == 0 && !grad_assign) continue;
                  const int64_t from =
                      int64_t(row / p.sh - source.row) * source.columns + (column / p.sw - source.column);
                  where[list.size()] = at;
                  list.push_back({in.get() + from * o, out.get() + int64_t(i * r.columns + j) * pitch, scale,
                                  i * r.columns + j});
                }
              }
              if (grad_assign) std::fill(dots.begin(), dots.begin() + list.size(), 0.0f);
              walk(list, packed + (int64_t(k) * taps + t) * slab, o, c, features.get(), pitch,
                   grad_assign ? dots.data() : nullptr);
              if (grad_assign)
                for (size_t i = 0; i < list.size(); ++i) {
                  T& to = grad_assign[where[i]];
                  to = group == 0 ? dots[i] : float(to) + dots[i];
                }
            }
          if (grad_x)
            scatter(out.get(), pitch, grad_x + n * p.grad_x_stride[0] + group * c * p.grad_x_stride[1], p.grad_x_stride,
                    c, r);
        }
    }
  }
}

// sums[row][vector] += sum over pixels of scaled[pixel][row] * grad[pixel][vector].
template <int R, int V>
void outer(const float* scaled, int pitch, const float* const* grad, int offset, int count, float* sums, int sums_pitch) {
  Vec acc[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) acc[r][v] = load(sums + int64_t(r) * sums_pitch + v * kLanes);
  for (int i = 0; i < count; ++i, scaled += pitch) {
    const float* g = grad[i] + offset;
    Vec b[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) b[v] = load(g + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec a = broadcast(scaled[r]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) acc[r][v] += a * b[v];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(sums + int64_t(r) * sums_pitch + v * kLanes, acc[r][v]);
}
using Outer = void (*)(const float*, int, const float* const*, int, int, float*, int);
template <int R, int V> struct OuterOf { static constexpr Outer run = outer<R, V>; };
constexpr Table<OuterOf, Outer> kOuter;

// Gradient of the weights. Threads share out the input channels and, when there are few, the pixels too, each share of
// which sums into its own `parts` [share][kernel][tap][c][pitch].
template <typename T>
void backward_weight(const Problem& p, const T* grad, const T* x, const T* assign, T* grad_weight, float* parts,
                     int shares) {
  const int c = p.channels / p.groups, o = p.out_channels / p.groups, taps = p.kh * p.kw;
  const int centre = p.kh / 2 * p.kw + p.kw / 2, pitch = round_up(o, kLanes);
  const int64_t pixels = int64_t(p.out_height) * p.out_width, part = int64_t(p.kernels) * taps * c * pitch;
  const Blocks blocks(p.out_height, p.out_width, kBlock);
  const Region largest{0, 0, blocks.rows, blocks.columns};
  std::vector<float> middle;
  const bool collapse = constant_centre(p, assign, middle);
  const int slices = std::max(1, p.threads / shares), per_slice = (c + slices - 1) / slices;
  for (int group = 0; group < p.groups; ++group) {
#pragma omp parallel for num_threads(p.threads) schedule(static)
    for (int64_t i = 0; i < part * shares; ++i) parts[i] = 0;
#pragma omp parallel num_threads(p.threads)
    {
      Buffer in(int64_t(input_of(p, largest).pixels()) * per_slice), out(int64_t(largest.pixels()) * pitch);
      Buffer scaled(int64_t(largest.pixels()) * per_slice);
      std::vector<const float*> rows(largest.pixels());
#pragma omp for collapse(2) schedule(static)
      for (int share = 0; share < shares; ++share)
        for (int slice = 0; slice < slices; ++slice) {
          const int first = slice * per_slice, depth = std::min(per_slice, c - first);
          if (depth <= 0) continue;
          const int64_t total = int64_t(p.batch) * blocks.count();
          for (int64_t b = total * share / shares; b < total * (share + 1) / shares; ++b) {
            const int n = int(b / blocks.count());
            const Region r = blocks[int(b % blocks.count())], source = input_of(p, r);
            gather(x + n * p.x_stride[0] + (group * c + first) * p.x_stride[1], p.x_stride, p.height, p.width, depth,
                   source, in.get(), depth);
            gather(grad + n * p.y_stride[0] + group * o * p.y_stride[1], p.y_stride, p.out_height, p.out_width, o, r,
                   out.get(), pitch);
            for (int t = 0; t < taps; ++t)
              for (int k = 0; k < p.kernels; ++k) {
                const bool one = collapse && t == centre;
                if (one && k > 0) continue;
                const T* a = assign + ((int64_t(n) * p.kernels + k) * taps + t) * pixels;
                int count = 0;
                for (int i = 0; i < r.rows; ++i) {
                  const T* line = a + int64_t(r.row + i) * p.out_width + r.column;
                  const float* from =
                      in.get() + (int64_t(i * p.sh + t / p.kw * p.dh) * source.columns + t % p.kw * p.dw) * depth;
                  for (int j = 0; j < r.columns; ++j) {
                    const float scale = one ? 1.0f : float(line[j]);
                    if (scale == 0) continue;
                    float* to = scaled.get() + int64_t(count) * depth;
                    const float* pixel = from + int64_t(j) * p.sw * depth;
                    for (int d = 0; d < depth; ++d) to[d] = scale * pixel[d];
                    rows[count++] = out.get() + int64_t(i * r.columns + j) * pitch;
                  }
                }
                float* sums = parts + share * part + ((int64_t(k) * taps + t) * c + first) * pitch;
                for (int v = 0; v < o; v += kPanel) {
                  const int vectors = (std::min(kPanel, o - v) + kLanes - 1) / kLanes;
                  for (int d = 0; d < depth; d += kRows)
                    kOuter.of[std::min(kRows, depth - d)][vectors](scaled.get() + d, depth, rows.data(), v, count,
                                                                   sums + int64_t(d) * pitch + v, pitch);
                }
              }
          }
        }
    }
    if (collapse)  // each kernel's share of the one sum
      for (int share = 0; share < shares; ++share)
        for (int k = p.kernels - 1; k >= 0; --k) {
          const float* one = parts + share * part + int64_t(centre) * c * pitch;
          float* to = parts + share * part + (int64_t(k) * taps + centre) * c * pitch;
          for (int64_t i = 0; i < int64_t(c) * pitch; ++i) to[i] = one[i] * middle[k];
        }
#pragma omp parallel for collapse(2) num_threads(p.threads) schedule(static)
    for (int k = 0; k < p.kernels; ++k)
      for (int i = 0; i < o; i += kLanes) {
        const float* from = parts + int64_t(k) * taps * c * pitch + i;
        T* to = grad_weight + (int64_t(k) * p.out_channels + group * o + i) * c * taps;
        if (i + kLanes <= o) {
          unpack_rows(from, part, shares, int64_t(c) * pitch, pitch, c * taps, taps, to, int64_t(c) * taps);
          continue;
        }
        for (int l = 0; l < o - i; ++l)
          for (int m = 0; m < c * taps; ++m) {
            float s = 0;
            for (int share = 0; share < shares; ++share)
              s += from[share * part + (int64_t(m % taps) * c + m / taps) * pitch + l];
            to[int64_t(l) * c * taps + m] = s;
          }
      }
  }
}

}  // namespace

#define MALLEABLE_EXPORT(suffix, T)                                                                                    \
  extern "C" void dense_forward_##suffix(const Problem* p, const void* x, const void* w, const void* a, void* y,       \
                                         float* packed) {                                                              \
    forward(*p, (const T*)x, (const T*)w, (const T*)a, (T*)y, packed);                                                 \
  }                                                                                                                    \
  extern "C" void dense_backward_data_##suffix(const Problem* p, const void* g, const void* x, const void* w,          \
                                               const void* a, void* gx, void* ga, float* packed) {                     \
    backward_data(*p, (const T*)g, (const T*)x, (const T*)w, (const T*)a, (T*)gx, (T*)ga, packed);                     \
  }                                                                                                                    \
  extern "C" void dense_backward_weight_##suffix(const Problem* p, const void* g, const void* x, const void* a,        \
                                                 void* gw, float* parts, int32_t shares) {                             \
    backward_weight(*p, (const T*)g, (const T*)x, (const T*)a, (T*)gw, parts, shares);                                 \
  }
MALLEABLE_FOR_EVERY_TYPE(MALLEABLE_EXPORT)
