// Depth convolution in narrow groups, computed as groups: pixels fill the vectors, whatever the number of channels.
//
// For every tap and kernel a register tile takes a few vectors of pixels times a few output channels of a group through
// the group's input channels, and is then scaled by the assignment. The gradient of x is the same sweep with gy for x;
// the gradient of the assignment falls off the same tiles.

#include "planes.h"

namespace {

constexpr int kOutputs = kLanes == 16 ? 8 : 6;  // most output channels of a register tile
constexpr int kSlice = 16;     // channels that are kept in cache together, if groups are that narrow
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
  const int inputs = transposed ? o : c;
  const Widths widths(transposed ? c : o);
  for (int g = 0; g < p.groups; ++g)
    for (int tile = 0; tile < widths.tiles; ++tile)
      for (const Tap& tap : s.taps)
        for (int k = 0; k < p.kernels; ++k)
          for (int i = 0; i < inputs; ++i)
            for (int j = widths.first(tile); j < widths.first(tile + 1); ++j)
              *out++ = weight[((int64_t(k) * p.out_channels + g * o + (transposed ? i : j)) * c + (transposed ? j : i)) * taps +
                              tap.index];
}

// R vectors of cells times O output channels of one group. out: [output][cells]; with Dots also dots[tap][kernel][R] +=
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
      Vec acc[O][R];
      MALLEABLE_UNROLL
      for (int o = 0; o < O; ++o)
        MALLEABLE_UNROLL
        for (int r = 0; r < R; ++r) acc[o][r] = Vec{};
      const float* x = in + tap.offset;
      for (int i = 0; i < inputs; ++i, x += plane, w += O) {
        Vec source[R];
        MALLEABLE_UNROLL
        for (int r = 0; r < R; ++r) source[r] = held(load(x + places[r]));
        MALLEABLE_UNROLL
        for (int o = 0; o < O; ++o) {
          const Vec weight = broadcast(w[o]);
          MALLEABLE_UNROLL
          for (int r = 0; r < R; ++r) acc[o][r] += weight * source[r];
        }
      }
      MALLEABLE_UNROLL
      for (int r = 0; r < R; ++r) {
        const Vec share = held(load(a + r * kLanes));
        Vec dot = Dots ? load(dots + r * kLanes) : Vec{};
        MALLEABLE_UNROLL
        for (int o = 0; o < O; ++o) {
          float* to = out + o * cells + r * kLanes;
          store(to, load(to) + share * acc[o][r]);
          if (Dots) dot += load(features + o * cells + r * kLanes) * acc[o][r];
        }
        if (Dots) store(dots + r * kLanes, dot);
      }
    }
}

using Multiply = void (*)(const Problem&, const Work&, const float*, int, const int64_t*, const float*, const float*,
                          float*, const float*, float*);
template <bool Dots>
struct Multiplies {
  Multiply of[kPair + 1][kOutputs + 1] = {};
  template <int R, int O>
  constexpr void fill() {
    of[R][O] = multiply<R, O, Dots>;
    if constexpr (O > 1) fill<R, O - 1>();
    else if constexpr (R > 1) fill<R - 1, kOutputs>();
  }
  constexpr Multiplies() { fill<kPair, kOutputs>(); }
};
constexpr Multiplies<false> kMultiply;
constexpr Multiplies<true> kMultiplyAndDot;

// packed: the weights of this job's sweep.
void multiply_all(const Problem& p, const Work& work, int inputs, int outputs, const float* packed) {
  const Job& job = work.job;
  const Widths widths(outputs);
  const int vectors = job.vectors();
  const int64_t plane = job.sweep->plane(job.rows), slots = int64_t(job.sweep->taps.size()) * p.kernels;
  for (int i = 0; i < vectors; i += kPair) {
    const int tall = std::min(kPair, vectors - i);
    const int64_t places[kPair] = {job.place(i), job.place(i + tall - 1)}, at = i * slots * kLanes;
    for (int g = 0; g < work.count; ++g)
      for (int tile = 0; tile < widths.tiles; ++tile) {
        const int first = widths.first(tile), width = widths.width(tile);
        const float* w = packed + slots * inputs * (int64_t(work.first + g) * outputs + first);
        const int64_t to = (int64_t(g * outputs + first) * vectors + i) * kLanes;
        (work.dots ? kMultiplyAndDot.of : kMultiply.of)[tall][width](
            p, work, work.in + g * inputs * plane, inputs, places, work.assign + at, w, work.out + to,
            work.dots ? work.features + to : nullptr, work.dots ? work.dots + at : nullptr);
      }
  }
}

// What forward and the gradients of x and assignment have in common.
template <typename T>
void convolve(const Problem& p, const std::vector<Sweep>& sweeps, const T* weight, bool transposed, const T* assign,
              const Side<const T>& source, const Side<T>& target, const Side<const T>& features, float* grad_assign) {
  if (sweeps.empty()) return;
  const int64_t size = int64_t(p.out_channels) * (p.channels / p.groups) * p.kh * p.kw * p.kernels;
  const Buffers packs(1, size * int64_t(sweeps.size()));
  for (const Sweep& s : sweeps) pack(p, s, weight, transposed, packs.first() + (&s - sweeps.data()) * size);
  const int at_once = std::max(1, kSlice / source.unit), slices = (p.groups + at_once - 1) / at_once;
  const auto jobs = make_jobs(p, sweeps, at_once * source.unit, grad_assign ? 1 : slices);
  run(p, jobs, p.kernels, assign, p.groups, at_once, source, target, features, grad_assign, [&](const Work& work) {
    multiply_all(p, work, source.unit, target.unit, packs.first() + (work.job.sweep - sweeps.data()) * size);
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

// Groups are independent; where there are few, the jobs are shared out too, each share with sums of its own.
template <typename T>
void backward_weight(const Problem& p, const T* grad, const T* x, const T* assign, T* grad_weight) {
  const int c = p.channels / p.groups, o = p.out_channels / p.groups, taps = p.kh * p.kw, columns = p.kernels * c;
  const auto sweeps = forward_sweeps(p);
  const Sweep& s = sweeps[0];
  const auto jobs = make_jobs(p, sweeps, c + o + columns, 1);
  const int shares = std::min(int(jobs.size()), (4 * p.threads + p.groups - 1) / p.groups);
  const int64_t pixels = int64_t(p.out_height) * p.out_width, part = int64_t(p.groups) * o * columns * taps;
  const int64_t most = largest(jobs, [](const Job& j) { return int64_t(j.vectors()) * kLanes; });
  const Buffers parts(shares, part), ins(p.threads, s.plane(jobs[0].rows) * c), grads(p.threads, most * o);
  const Buffers products(p.threads, most * columns), assigns(p.threads, most * p.kernels);
  const Side<const T> source{x, p.x_stride, p.height, p.width, c};
  const Side<const T> target{grad, p.y_stride, p.out_height, p.out_width, o};
#pragma omp parallel num_threads(p.threads) if (p.is_large())
  {
    float *in = ins.mine(), *g = grads.mine(), *scaled = products.mine(), *a = assigns.mine();
#pragma omp for collapse(2) schedule(dynamic)
    for (int group = 0; group < p.groups; ++group)
      for (int share = 0; share < shares; ++share) {
        float* sums = parts.of(share) + group * (part / p.groups);  // [tap][output][kernel and input]
        std::memset(sums, 0, sizeof(float) * (part / p.groups));
        for (size_t i = jobs.size() * share / shares; i < jobs.size() * (share + 1) / shares; ++i) {
          const Job& job = jobs[i];
          const int64_t cells = int64_t(job.vectors()) * kLanes, plane = s.plane(job.rows);
          job.read_source(source.at(job.sample, group), c, in);
          job.read_targets(target.at(job.sample, group), o, g);
          for (int t = 0; t < taps; ++t) {
            const int64_t stride[4] = {0, taps * pixels, p.out_width, 1};  // kernels as channels
            job.read_targets(Map<const T>{assign + (int64_t(job.sample) * p.kernels * taps + t) * pixels, stride,
                                          p.out_height, p.out_width}, p.kernels, a);
            for (int j = 0; j < columns; ++j) {
              const float *share_of = a + j / c * cells, *from = in + j % c * plane + s.taps[t].offset;
              float* to = scaled + j * cells;
              for (int row = 0; row < job.rows; ++row, from += s.row_step * s.phases * s.pitch)
                for (int v = 0; v < s.across(); ++v, share_of += kLanes, to += kLanes)
                  store(to, load(share_of) * load(from + v * kLanes));
            }
            for (int j = 0; j < columns; j += kColumns)
              for (int l = 0; l < o; l += kLines)
                kCorrelate.of[std::min(kLines, o - l)][std::min(kColumns, columns - j)](
                    g + l * cells, scaled + j * cells, cells, sums + (int64_t(t) * o + l) * columns + j, columns);
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
