// Depth convolution of every channel on its own (groups = channels in = channels out).
//
// There is no sum over channels to hide the assignment behind, so the kernels are mixed first, tap by tap:
// y(i) += (sum_k assign_k(i, p) w_k(p)) x(i + p), in registers for a few vectors of pixels times a few channels.

#include "planes.h"

namespace {

constexpr int kChannels = 4;   // of a register tile
constexpr int kSlice = 16;     // channels that are kept in cache together
constexpr int kTogether = 3;   // kernels that are mixed in one go

// Weights of a sweep as [chunk of channels][slot][channel], channels padded with zeros.
template <typename T>
void pack(const Problem& p, const Sweep& s, const T* weight, float* out) {
  const int taps = p.kh * p.kw, some = int(s.taps.size());
  const int64_t chunk = int64_t(some) * p.kernels * kChannels;
  for (int c = 0; c < round_up(p.channels, kChannels); ++c)
    for (int k = 0; k < p.kernels; ++k) {
      const T* from = weight + (int64_t(k) * p.channels + c) * taps;
      float* to = out + c / kChannels * chunk + slot(k, 0, some, p.kernels, kTogether) * kChannels + c % kChannels;
      const int64_t step = (slot(k, 1, some, p.kernels, kTogether) - slot(k, 0, some, p.kernels, kTogether)) * kChannels;
      for (int t = 0; t < some; ++t) to[t * step] = c < p.channels ? float(from[s.taps[t].index]) : 0.0f;
    }
}

// out = or += the sum over taps for R vectors of cells of kChannels channels.
template <int R, int K>
void mix(const Sweep& s, const float* const* planes, const int64_t* places, const float* a, const float* w, bool add,
         float* const* out) {
  Vec y[kChannels][R];
  MALLEABLE_UNROLL
  for (int c = 0; c < kChannels; ++c)
    MALLEABLE_UNROLL
    for (int r = 0; r < R; ++r) y[c][r] = add ? load(out[c] + r * kLanes) : Vec{};
  const float* plane[kChannels];
  for (int c = 0; c < kChannels; ++c) plane[c] = planes[c];
  for (const Tap& tap : s.taps) {
    Vec share[K][R];
    MALLEABLE_UNROLL
    for (int k = 0; k < K; ++k)
      MALLEABLE_UNROLL
      for (int r = 0; r < R; ++r) share[k][r] = held(load(a + (k * R + r) * kLanes));
    MALLEABLE_UNROLL
    for (int c = 0; c < kChannels; ++c) {
      Vec mixed[R];
      MALLEABLE_UNROLL
      for (int k = 0; k < K; ++k) {
        const Vec weight = broadcast(w[k * kChannels + c]);
        MALLEABLE_UNROLL
        for (int r = 0; r < R; ++r) mixed[r] = k == 0 ? weight * share[k][r] : mixed[r] + weight * share[k][r];
      }
      MALLEABLE_UNROLL
      for (int r = 0; r < R; ++r) y[c][r] += mixed[r] * load(plane[c] + places[r] + tap.offset);
    }
    a += K * R * kLanes;
    w += K * kChannels;
  }
  for (int c = 0; c < kChannels; ++c)
    for (int r = 0; r < R; ++r) store(out[c] + r * kLanes, y[c][r]);
}

using Mix = void (*)(const Sweep&, const float* const*, const int64_t*, const float*, const float*, bool, float* const*);
constexpr Mix kMix[kPair][kTogether] = {{mix<1, 1>, mix<1, 2>, mix<1, 3>}, {mix<2, 1>, mix<2, 2>, mix<2, 3>}};
static_assert(kPair == 2 && kTogether == 3, "as kMix is written");

// packed: the weights of this job's sweep.
void mix_all(const Problem& p, const Work& work, const float* packed) {
  const Job& job = work.job;
  const int taps = int(job.sweep->taps.size()), vectors = job.vectors();
  const int64_t plane = job.sweep->plane(job.rows), chunk = int64_t(taps) * p.kernels * kChannels;
  float spare[kPair * kLanes];  // for channels that only fill a chunk up
  for (int i = 0; i < vectors; i += kPair) {
    const int tall = std::min(kPair, vectors - i);
    const int64_t places[kPair] = {job.place(i), job.place(i + tall - 1)};
    for (int first = 0; first < work.count; first += kChannels) {
      const float* planes[kChannels];
      float* out[kChannels];
      for (int c = 0; c < kChannels; ++c) {
        const bool real = first + c < work.count;
        planes[c] = work.in + (real ? first + c : first) * plane;
        out[c] = real ? work.out + (int64_t(first + c) * vectors + i) * kLanes : spare;
      }
      const float* a = work.assign + int64_t(i) * taps * p.kernels * kLanes;
      const float* w = packed + (work.first + first) / kChannels * chunk;
      for (int k = 0; k < p.kernels; k += kTogether) {
        const int kernels = std::min(kTogether, p.kernels - k);
        kMix[tall - 1][kernels - 1](*job.sweep, planes, places, a + int64_t(k) * taps * tall * kLanes,
                                    w + int64_t(k) * taps * kChannels, k > 0, out);
      }
    }
  }
}

// What forward and the gradient of x have in common.
template <typename T>
void convolve(const Problem& p, const std::vector<Sweep>& sweeps, const T* weight, const T* assign,
              const Side<const T>& source, const Side<T>& target) {
  if (sweeps.empty()) return;
  const int64_t size = int64_t(round_up(p.channels, kChannels)) * p.kernels;  // of a tap
  const Buffers packs(1, size * p.kh * p.kw);
  for (const Sweep& s : sweeps) pack(p, s, weight, packs.first() + s.before * size);
  const auto jobs = make_jobs(p, sweeps, kSlice, (p.channels + kSlice - 1) / kSlice);
  run(p, jobs, kTogether, assign, p.channels, kSlice, source, target, source, nullptr, [&](const Work& work) {
    mix_all(p, work, packs.first() + work.job.sweep->before * size);
  });
}

template <typename T>
void forward(const Problem& p, const T* x, const T* weight, const T* assign, T* y) {
  convolve<T>(p, forward_sweeps(p), weight, assign, {x, p.x_stride, p.height, p.width, 1},
              {y, p.y_stride, p.out_height, p.out_width, 1});
}

template <typename T>
void backward_input(const Problem& p, const T* grad, const T* weight, const T* assign, T* grad_x) {
  convolve<T>(p, backward_sweeps(p), weight, assign, {grad, p.y_stride, p.out_height, p.out_width, 1},
              {grad_x, p.grad_x_stride, p.height, p.width, 1});
}

// One tap of K kernels and C channels over all cells of a job: sums[c][k] = a_k x g, dots[k] += w_k . (x g).
// a and dots: a plane per kernel, `apart` from one to the next; w: [kernel][kChannels].
template <int K, int C>
void correlate(const Job& job, int64_t offset, const float* in, const float* grad, const float* a, const float* w,
               float* dots, int64_t apart, float (*sums)[kTogether]) {
  const Sweep& s = *job.sweep;
  const int across = s.across();
  const int64_t plane = s.plane(job.rows), cells = int64_t(job.vectors()) * kLanes;
  Vec total[C][K], weight[C][K];
  for (int c = 0; c < C; ++c)
    for (int k = 0; k < K; ++k) total[c][k] = Vec{}, weight[c][k] = broadcast(w[k * kChannels + c]);
  for (int row = 0; row < job.rows; ++row) {
    const float* x = in + int64_t(row) * s.row_step * s.phases * s.pitch + offset;
    for (int v = 0; v < across; ++v, x += kLanes, grad += kLanes, a += kLanes, dots += kLanes) {
      Vec product[C];
      MALLEABLE_UNROLL
      for (int c = 0; c < C; ++c) product[c] = load(x + c * plane) * load(grad + c * cells);
      MALLEABLE_UNROLL
      for (int k = 0; k < K; ++k) {
        const Vec share = load(a + k * apart);
        Vec dot = load(dots + k * apart);
        MALLEABLE_UNROLL
        for (int c = 0; c < C; ++c) {
          total[c][k] += share * product[c];
          dot += weight[c][k] * product[c];
        }
        store(dots + k * apart, dot);
      }
    }
  }
  for (int c = 0; c < C; ++c)
    for (int k = 0; k < K; ++k) sums[c][k] = sum(total[c][k]);
}

using Correlate = void (*)(const Job&, int64_t, const float*, const float*, const float*, const float*, float*, int64_t,
                           float (*)[kTogether]);
constexpr Correlate kCorrelate[kTogether][2] = {{correlate<1, 1>, correlate<1, 2>},
                                                {correlate<2, 1>, correlate<2, 2>},
                                                {correlate<3, 1>, correlate<3, 2>}};

// Gradients of the weights and of the assignment, either of which may be null.
template <typename T>
void backward_rest(const Problem& p, const T* grad, const T* x, const T* weight, const T* assign, T* grad_weight,
                   float* grad_assign) {
  const auto sweeps = forward_sweeps(p);
  const Sweep& s = sweeps[0];
  const auto jobs = make_jobs(p, sweeps, kSlice, 1);
  const int taps = p.kh * p.kw;
  const int64_t planes = int64_t(taps) * p.kernels, size = round_up(p.channels, kChannels) * planes;
  const Buffers packs(1, size), parts(p.threads, size);
  pack(p, s, weight, packs.first());
  for (int thread = 0; thread < p.threads; ++thread) std::memset(parts.of(thread), 0, sizeof(float) * size);
  const int64_t most = largest(jobs, [](const Job& j) { return int64_t(j.vectors()) * kLanes; });
  const Buffers ins(p.threads, s.plane(jobs[0].rows) * kSlice), grads(p.threads, most * kSlice);
  const Buffers assigns(p.threads, most * planes), products(p.threads, most * planes);
#pragma omp parallel num_threads(p.threads) if (p.is_large())
  {
    float *in = ins.mine(), *g = grads.mine(), *a = assigns.mine(), *dots = products.mine(), *sums = parts.mine();
#pragma omp for schedule(static)
    for (int i = 0; i < int(jobs.size()); ++i) {
      const Job& job = jobs[i];
      const int64_t cells = int64_t(job.vectors()) * kLanes, plane = s.plane(job.rows);
      const int width = s.across() * kLanes;
      // [kernel][tap] planes: the assignment is a map of so many channels.
      const int64_t stride[4] = {0, int64_t(p.out_height) * p.out_width, p.out_width, 1};
      job.read_targets(Map<const T>{assign + job.sample * planes * stride[1], stride, p.out_height, p.out_width},
                       int(planes), a);
      std::memset(dots, 0, sizeof(float) * planes * cells);
      for (int first = 0; first < p.channels; first += kSlice) {
        const int count = std::min(kSlice, p.channels - first);
        job.read_source(Side<const T>{x, p.x_stride, p.height, p.width, 1}.at(job.sample, first), count, in);
        job.read_targets(Side<const T>{grad, p.y_stride, p.out_height, p.out_width, 1}.at(job.sample, first), count, g);
        for (int t = 0; t < taps; ++t)
          for (int k = 0; k < p.kernels; k += kTogether) {
            const int kernels = std::min(kTogether, p.kernels - k);
            const int64_t at = int64_t(k) * taps + t;
            for (int c = 0; c < count; c += 2) {
              const int channels = std::min(2, count - c);
              const int64_t place = (first + c) / kChannels * planes * kChannels +
                                    slot(k, t, taps, p.kernels, kTogether) * kChannels + (first + c) % kChannels;
              float found[2][kTogether];
              kCorrelate[kernels - 1][channels - 1](job, s.taps[t].offset, in + c * plane, g + c * cells,
                                                    a + at * cells, packs.first() + place, dots + at * cells,
                                                    taps * cells, found);
              for (int u = 0; u < channels; ++u)
                for (int j = 0; j < kernels; ++j) sums[place + j * kChannels + u] += found[u][j];
            }
          }
      }
      if (grad_assign)
        write_lines(dots, width, cells,
                    Map<float>{grad_assign + job.sample * planes * stride[1], stride, p.out_height, p.out_width},
                    int(planes), job.targets());
    }
  }
  if (!grad_weight) return;
  for (int k = 0; k < p.kernels; ++k)
    for (int c = 0; c < p.channels; ++c)
      for (int t = 0; t < taps; ++t) {
        float total = 0;
        for (int thread = 0; thread < p.threads; ++thread)
          total += parts.of(thread)[c / kChannels * planes * kChannels +
                                    slot(k, t, taps, p.kernels, kTogether) * kChannels + c % kChannels];
        grad_weight[(int64_t(k) * p.channels + c) * taps + t] = total;
      }
}

template <typename T>
void backward(const Problem& p, const T* grad, const T* x, const T* weight, const T* assign, T* grad_x, T* grad_weight,
              float* grad_assign) {
  if (grad_x) backward_input(p, grad, weight, assign, grad_x);
  if (grad_weight || grad_assign) backward_rest(p, grad, x, weight, assign, grad_weight, grad_assign);
}

}  // namespace

MALLEABLE_EXPORT_PATH(depthwise)
