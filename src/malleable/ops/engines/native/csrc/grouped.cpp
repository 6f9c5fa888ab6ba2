// Depth convolution in narrow groups, computed as groups: pixels fill the vectors, whatever the number of channels.
//
// For every tap and kernel a register tile takes a few vectors of pixels times a few output channels of a group through
// the group's input channels, and is then scaled by the assignment. The gradient of x is the same sweep with gy for x;
// the gradient of the assignment falls off the same tiles. Where outputs outnumber inputs, as behind an image, the inputs are
// scaled first, once for all outputs, and a register tile goes through all taps and kernels.

#include "planes.h"

namespace {

constexpr int kOutputs = kLanes == 16 ? 8 : 6;  // most output channels of a register tile
constexpr int kSlice = 16;     // channels that are kept in cache together, if groups are that narrow
constexpr int kScaled = 4096;  // floats of scaled inputs that are kept in cache together
constexpr int kColumns = kLanes == 16 ? 4 : 3;  // input channels of a register tile of the weights' gradient
constexpr int kLines = 4;      // output channels of the same

struct Widths {  // how many output channels each of the tiles of a group takes: as even as can be
  int outputs, tiles;
  explicit Widths(int outputs) : outputs(outputs), tiles((outputs + kOutputs - 1) / kOutputs) {}
  int first(int tile) const { return int(int64_t(outputs) * tile / tiles); }
  int width(int tile) const { return first(tile + 1) - first(tile); }
};

// Weights of a sweep as [group][tile][tap][kernel][input][output of the tile]; `transposed` for the gradient of x.
template <typename T>
void pack(const Problem& p, const Sweep& s, const T* weight, bool transposed, float* out) {
  const int c = p.channels / p.groups, o = p.out_channels / p.groups, taps = p.kh * p.kw;
  const int inputs = transposed ? o : c, outputs = transposed ? c : o;
  const int64_t per_output = transposed ? taps : int64_t(c) * taps, per_input = transposed ? int64_t(c) * taps : taps;
  const Widths widths(outputs);
#pragma omp parallel for num_threads(p.threads) schedule(static) if (p.is_large())
  for (int g = 0; g < p.groups; ++g) {
    float* to = out + int64_t(g) * s.taps.size() * p.kernels * inputs * outputs;
    for (int tile = 0; tile < widths.tiles; ++tile)
      for (const Tap& tap : s.taps)
        for (int k = 0; k < p.kernels; ++k) {
          const int width = widths.width(tile);
          const T* from = weight + (int64_t(k) * p.out_channels + g * o) * c * taps + widths.first(tile) * per_output + tap.index;
          for (int i = 0; i < inputs; ++i, from += per_input, to += width)
            for (int j = 0; j < width; ++j) to[j] = from[j * per_output];
        }
  }
}

// One register tile: R vectors of cells times O output channels.
template <int R, int O>
struct Tile {
  Vec acc[O][R];

  // acc += w[input][output] . source(input, vector)
  template <typename Source>
  inline __attribute__((always_inline)) void multiply(int64_t inputs, const float* w, const Source& source) {
    for (int64_t i = 0; i < inputs; ++i, w += O) {
      Vec from[R];
      MALLEABLE_UNROLL
      for (int r = 0; r < R; ++r) from[r] = held(source(i, r));
      MALLEABLE_UNROLL
      for (int o = 0; o < O; ++o) {
        const Vec weight = broadcast(w[o]);
        MALLEABLE_UNROLL
        for (int r = 0; r < R; ++r) acc[o][r] += weight * from[r];
      }
    }
  }
};

// All taps and kernels of one tile. out: [output][cells]; with Dots also dots[tap][kernel][R] +=
// features[output][cells] . (w x).
template <int R, int O, bool Dots>
void multiply(const Problem& p, const Work& work, const float* in, int inputs, const int64_t* places, const float* a,
              const float* w, float* out, const float* features, float* dots) {
  const int64_t plane = work.job.sweep->plane(work.job.rows), cells = int64_t(work.job.vectors()) * kLanes;
  MALLEABLE_UNROLL
  for (int o = 0; o < O; ++o)
    MALLEABLE_UNROLL
    for (int r = 0; r < R; ++r) store(out + o * cells + r * kLanes, Vec{});
  for (const Tap& tap : work.job.sweep->taps)
    for (int k = 0; k < p.kernels; ++k, a += R * kLanes, dots += Dots ? R * kLanes : 0) {
      Tile<R, O> tile{};
      tile.multiply(inputs, w, [&, x = in + tap.offset](int64_t i, int r) { return load(x + i * plane + places[r]); });
      w += int64_t(inputs) * O;
      MALLEABLE_UNROLL
      for (int r = 0; r < R; ++r) {
        const Vec share = held(load(a + r * kLanes));
        Vec dot = Dots ? load(dots + r * kLanes) : Vec{};
        MALLEABLE_UNROLL
        for (int o = 0; o < O; ++o) {
          float* to = out + o * cells + r * kLanes;
          store(to, load(to) + share * tile.acc[o][r]);
          if (Dots) dot += load(features + o * cells + r * kLanes) * tile.acc[o][r];
        }
        if (Dots) store(dots + r * kLanes, dot);
      }
    }
}

using Multiply = void (*)(const Problem&, const Work&, const float*, int, const int64_t*, const float*, const float*,
                          float*, const float*, float*);
// Inputs of one group at R vectors of cells, scaled by the assignment of taps `first` ... `last`: [tap][kernel][input][R].
template <int R>
void scale(const Problem& p, const Work& work, const float* in, int inputs, const int64_t* places, const float* a,
           int first, int last, float* out) {
  const int64_t plane = work.job.sweep->plane(work.job.rows);
  a += int64_t(first) * p.kernels * R * kLanes;
  for (int t = first; t < last; ++t)
    for (int k = 0; k < p.kernels; ++k, a += R * kLanes) {
      const float* x = in + work.job.sweep->taps[t].offset;
      for (int i = 0; i < inputs; ++i, x += plane)
        MALLEABLE_UNROLL
        for (int r = 0; r < R; ++r, out += kLanes) store(out, load(a + r * kLanes) * load(x + places[r]));
    }
}

// out[output][cells] = or += w[input][output] . scaled[input][R].
template <int R, int O>
void multiply_scaled(const float* scaled, int64_t inputs, const float* w, int64_t cells, bool add, float* out) {
  Tile<R, O> tile;
  MALLEABLE_UNROLL
  for (int o = 0; o < O; ++o)
    MALLEABLE_UNROLL
    for (int r = 0; r < R; ++r) tile.acc[o][r] = add ? load(out + o * cells + r * kLanes) : Vec{};
  tile.multiply(inputs, w, [=](int64_t i, int r) { return load(scaled + (i * R + r) * kLanes); });
  MALLEABLE_UNROLL
  for (int o = 0; o < O; ++o)
    MALLEABLE_UNROLL
    for (int r = 0; r < R; ++r) store(out + o * cells + r * kLanes, tile.acc[o][r]);
}

struct Multiplies {
  Multiply of[kPair + 1][kOutputs + 1] = {}, and_dot[kPair + 1][kOutputs + 1] = {};
  decltype(&multiply_scaled<1, 1>) scaled[kPair + 1][kOutputs + 1] = {};
  template <int R, int O>
  constexpr void fill() {
    of[R][O] = multiply<R, O, false>;
    and_dot[R][O] = multiply<R, O, true>;
    scaled[R][O] = multiply_scaled<R, O>;
    if constexpr (O > 1) fill<R, O - 1>();
    else if constexpr (R > 1) fill<R - 1, kOutputs>();
  }
  constexpr Multiplies() { fill<kPair, kOutputs>(); }
};
constexpr Multiplies kMultiply;

// packed: the weights of this job's sweep; scaled: room for the inputs of `at_once` taps, which are scaled first if not 0.
void multiply_all(const Problem& p, const Work& work, int inputs, int outputs, const float* packed, int at_once,
                  float* scaled) {
  const Job& job = work.job;
  const Widths widths(outputs);
  const int vectors = job.vectors(), taps = int(job.sweep->taps.size()), depth = p.kernels * inputs;
  const int64_t plane = job.sweep->plane(job.rows), slots = int64_t(taps) * p.kernels;
  for (int i = 0; i < vectors; i += kPair) {
    const int tall = std::min(kPair, vectors - i);
    const int64_t places[kPair] = {job.place(i), job.place(i + tall - 1)}, at = i * slots * kLanes;
    for (int g = 0; g < work.count; ++g) {
      const float* in = work.in + g * inputs * plane;
      const float* weights = packed + slots * inputs * int64_t(work.first + g) * outputs;
      const auto to = [&](int tile) { return (int64_t(g * outputs + widths.first(tile)) * vectors + i) * kLanes; };
      for (int tile = 0; tile < widths.tiles && !at_once; ++tile)
        (work.dots ? kMultiply.and_dot : kMultiply.of)[tall][widths.width(tile)](
            p, work, in, inputs, places, work.assign + at, weights + slots * inputs * widths.first(tile),
            work.out + to(tile), work.dots ? work.features + to(tile) : nullptr, work.dots ? work.dots + at : nullptr);
      for (int first = 0; first < taps && at_once; first += at_once) {
        const int last = std::min(taps, first + at_once);
        (tall == 1 ? scale<1> : scale<kPair>)(p, work, in, inputs, places, work.assign + at, first, last, scaled);
        for (int tile = 0; tile < widths.tiles; ++tile)
          kMultiply.scaled[tall][widths.width(tile)](
              scaled, int64_t(last - first) * depth,
              weights + slots * inputs * widths.first(tile) + int64_t(first) * depth * widths.width(tile),
              int64_t(vectors) * kLanes, first > 0, work.out + to(tile));
      }
    }
  }
}

// What forward and the gradients of x and assignment have in common.
template <typename T>
void convolve(const Problem& p, const std::vector<Sweep>& sweeps, const T* weight, bool transposed, const T* assign,
              const Side<const T>& source, const Side<T>& target, const Side<const T>& features, float* grad_assign) {
  if (sweeps.empty()) return;
  const int64_t size = int64_t(p.out_channels) * (p.channels / p.groups) * p.kernels;  // of a tap
  const Buffers packs(1, size * p.kh * p.kw);
  for (const Sweep& s : sweeps) pack(p, s, weight, transposed, packs.first() + s.before * size);
  const int at_once = std::max(1, kSlice / source.unit), slices = (p.groups + at_once - 1) / at_once;
  const auto jobs = make_jobs(p, sweeps, at_once * source.unit, grad_assign ? 1 : slices);
  const int64_t of_a_tap = int64_t(p.kernels) * source.unit * kPair * kLanes;
  const bool scales = !grad_assign && target.unit >= 2 * source.unit;
  const int scaled_at_once = scales ? int(std::max<int64_t>(1, kScaled / of_a_tap)) : 0;
  const Buffers scaled(p.threads, scaled_at_once * of_a_tap);
  run(p, jobs, p.kernels, assign, p.groups, at_once, source, target, features, grad_assign, [&](const Work& work) {
    multiply_all(p, work, source.unit, target.unit, packs.first() + work.job.sweep->before * size,
                 scaled_at_once, scaled.mine());
  });
}

template <typename T>
void forward(const Problem& p, const T* x, const T* weight, const T* assign, T* y) {
  const Side<const T> source{x, p.x_stride, p.height, p.width, p.channels / p.groups};
  convolve<T>(p, forward_sweeps(p), weight, false, assign, source,
              {y, p.y_stride, p.out_height, p.out_width, p.out_channels / p.groups}, source, nullptr);
}

// Gradients of x and of the assignment, either of which may be null; both must come in as zeros.
template <typename T>
void backward_data(const Problem& p, const T* grad, const T* x, const T* weight, const T* assign, T* grad_x,
                   float* grad_assign) {
  const int c = p.channels / p.groups;
  convolve<T>(p, backward_sweeps(p), weight, true, assign,
              {grad, p.y_stride, p.out_height, p.out_width, p.out_channels / p.groups},
              {grad_x, p.grad_x_stride, p.height, p.width, c}, {x, p.x_stride, p.height, p.width, c}, grad_assign);
}

// sums[line][column] += grad[line] . scaled[column] over so many vectors.
template <int L, int C>
void correlate(const float* grad, const float* scaled, int64_t cells, float* sums, int64_t pitch) {
  Vec acc[L][C];
  MALLEABLE_UNROLL
  for (int l = 0; l < L; ++l)
    MALLEABLE_UNROLL
    for (int c = 0; c < C; ++c) acc[l][c] = Vec{};
  for (int64_t i = 0; i < cells; i += kLanes) {
    Vec column[C];
    MALLEABLE_UNROLL
    for (int c = 0; c < C; ++c) column[c] = held(load(scaled + c * cells + i));
    MALLEABLE_UNROLL
    for (int l = 0; l < L; ++l) {
      const Vec line = held(load(grad + l * cells + i));
      MALLEABLE_UNROLL
      for (int c = 0; c < C; ++c) acc[l][c] += line * column[c];
    }
  }
  float totals[L * C];
  sum_each<L * C>(&acc[0][0], totals);
  for (int l = 0; l < L; ++l)
    for (int c = 0; c < C; ++c) sums[l * pitch + c] += totals[l * C + c];
}

using Correlate = void (*)(const float*, const float*, int64_t, float*, int64_t);
struct Correlates {
  Correlate of[kLines + 1][kColumns + 1] = {};
  template <int L, int C>
  constexpr void fill() {
    of[L][C] = correlate<L, C>;
    if constexpr (C > 1) fill<L, C - 1>();
    else if constexpr (L > 1) fill<L - 1, kColumns>();
  }
  constexpr Correlates() { fill<kLines, kColumns>(); }
};
constexpr Correlates kCorrelate;

// A job's pixels of a plane, scaled by the assignment of its cells.
inline void scale_plane(const Job& job, const float* x, const float* a, float* out) {
  const int across = job.sweep->across();
  const int64_t next = job.place(across);
  for (int row = 0; row < job.rows; ++row, x += next)
    for (int v = 0; v < across; ++v, a += kLanes, out += kLanes) store(out, load(a) * load(x + v * kLanes));
}

// Threads share out the groups and, where there are few, the jobs too, each share with sums of its own.
template <typename T>
void backward_weight(const Problem& p, const T* grad, const T* x, const T* assign, T* grad_weight) {
  const int c = p.channels / p.groups, o = p.out_channels / p.groups, taps = p.kh * p.kw, columns = p.kernels * c;
  const auto sweeps = forward_sweeps(p);
  const Sweep& s = sweeps[0];
  const auto jobs = make_jobs(p, sweeps, c + o + columns, 1);
  const int64_t part = int64_t(p.groups) * o * columns * taps, most_shares = std::max<int64_t>(1, kMostSums * p.threads / part);
  const int shares = int(std::min<int64_t>({int64_t(jobs.size()), (4 * p.threads + p.groups - 1) / p.groups, most_shares}));
  const int teams = std::min(p.groups, (4 * p.threads + shares - 1) / shares);
  const int64_t pixels = int64_t(p.out_height) * p.out_width;
  const int64_t most = largest(jobs, [](const Job& j) { return int64_t(j.vectors()) * kLanes; });
  const Buffers parts(shares, part), ins(p.threads, s.plane(jobs[0].rows) * c), grads(p.threads, most * o);
  const Buffers products(p.threads, most * columns), assigns(p.threads, most * p.kernels * taps);
  const Side<const T> source{x, p.x_stride, p.height, p.width, c};
  const Side<const T> target{grad, p.y_stride, p.out_height, p.out_width, o};
  const int64_t stride[4] = {p.kernels * taps * pixels, pixels, p.out_width, 1};  // kernels and taps as channels
  const Side<const T> shared{assign, stride, p.out_height, p.out_width, 1};
#pragma omp parallel num_threads(p.threads) if (p.is_large())
  {
    float *in = ins.mine(), *g = grads.mine(), *scaled = products.mine(), *a = assigns.mine();
#pragma omp for collapse(2) schedule(dynamic)
    for (int share = 0; share < shares; ++share)
      for (int team = 0; team < teams; ++team) {
        const int first = int(int64_t(p.groups) * team / teams), last = int(int64_t(p.groups) * (team + 1) / teams);
        float* all_sums = parts.of(share);  // [group][tap][output][kernel and input]
        std::memset(all_sums + first * (part / p.groups), 0, sizeof(float) * (last - first) * (part / p.groups));
        for (size_t i = jobs.size() * share / shares; i < jobs.size() * (share + 1) / shares; ++i) {
          const Job& job = jobs[i];
          const int64_t cells = int64_t(job.vectors()) * kLanes;
          job.read_targets(shared.at(job.sample, 0), p.kernels * taps, a);
          for (int group = first; group < last; ++group) {
            job.read_source(source.at(job.sample, group), c, in);
            job.read_targets(target.at(job.sample, group), o, g);
            for (int t = 0; t < taps; ++t) {
              float* sums = all_sums + (int64_t(group) * taps + t) * o * columns;
              for (int j = 0; j < columns; ++j)
                scale_plane(job, in + j % c * s.plane(job.rows) + s.taps[t].offset,
                            a + (int64_t(j / c) * taps + t) * cells, scaled + j * cells);
              for (int j = 0; j < columns; j += kColumns)
                for (int l = 0; l < o; l += kLines)
                  kCorrelate.of[std::min(kLines, o - l)][std::min(kColumns, columns - j)](
                      g + l * cells, scaled + j * cells, cells, sums + int64_t(l) * columns + j, columns);
            }
          }
        }
      }
#pragma omp for schedule(static)
    for (int group = 0; group < p.groups; ++group)
      for (int k = 0; k < p.kernels; ++k)
        for (int l = 0; l < o; ++l)
          for (int i = 0; i < c; ++i)
            for (int t = 0; t < taps; ++t) {
              float total = 0;
              for (int share = 0; share < shares; ++share)
                total += parts.of(share)[((int64_t(group) * taps + t) * o + l) * columns + k * c + i];
              grad_weight[((int64_t(k) * p.out_channels + group * o + l) * c + i) * taps + t] = total;
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

MALLEABLE_EXPORT_PATH(grouped)
