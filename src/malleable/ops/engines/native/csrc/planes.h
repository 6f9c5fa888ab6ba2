// Maps as planes, pixels along the vectors: for depthwise convolution and groups too narrow to fill vectors with channels.
//
// A sweep visits a grid of cells. For every tap a cell reads one pixel of the source map and one value per kernel of the
// assignment, and its sum goes to one pixel of the target map. Forward, the cells are the output's pixels. Backward they
// are the input's, and with a stride those of one phase, to which only some of the taps lead: no tap meets a zero.
#pragma once

#include "common.h"

namespace {

constexpr int kPair = 2;  // vectors of cells in a register tile

struct Tap {
  int index;                       // in the kernel
  int row, column;                 // of the source that the cell (0, 0) reads, possibly beyond the border
  int assign_row, assign_column;   // of the assignment, likewise
  int64_t offset = 0;              // from a cell's place in a plane
};

struct Sweep {
  int rows, columns;            // cells
  int row_step, column_step;    // source pixels from one cell to the next
  int to_row, to_column;        // target of the cell (0, 0)
  int to_row_step, to_column_step;
  std::vector<Tap> taps;
  int before = 0;  // taps of the sweeps before this one
  // Planes are [row][phase][pitch]: columns that are column_step apart lie side by side.
  int first_row = 0, first_column = 0, reach = 0, phases = 0;
  int64_t pitch = 0;

  void lay_out() {
    int last_column = taps[0].column, last_row = taps[0].row;
    first_row = last_row, first_column = last_column;
    for (const Tap& t : taps) {
      first_row = std::min(first_row, t.row), last_row = std::max(last_row, t.row);
      first_column = std::min(first_column, t.column), last_column = std::max(last_column, t.column);
    }
    reach = last_row - first_row;
    phases = std::min(column_step, last_column - first_column + 1);
    pitch = round_up(columns, kLanes) + (last_column - first_column) / column_step;
    for (Tap& t : taps) {
      const int across = t.column - first_column;
      t.offset = (int64_t(t.row - first_row) * phases + across % column_step) * pitch + across / column_step;
    }
  }
  int across() const { return (columns + kLanes - 1) / kLanes; }  // vectors of a row
  int64_t plane(int some) const { return (int64_t(some - 1) * row_step + reach + 1) * phases * pitch; }
};

inline std::vector<Sweep> forward_sweeps(const Problem& p) {
  Sweep s{p.out_height, p.out_width, p.sh, p.sw, 0, 0, 1, 1, {}};
  for (int t = 0; t < p.kh * p.kw; ++t)
    s.taps.push_back({t, t / p.kw * p.dh - p.top, t % p.kw * p.dw - p.left, 0, 0});
  s.lay_out();
  return {s};
}

inline std::vector<Sweep> backward_sweeps(const Problem& p) {
  std::vector<Sweep> sweeps;
  for (int i = 0; i < std::min(p.sh, p.height); ++i)
    for (int j = 0; j < std::min(p.sw, p.width); ++j) {
      Sweep s{(p.height - i - 1) / p.sh + 1, (p.width - j - 1) / p.sw + 1, 1, 1, i, j, p.sh, p.sw, {}};
      for (int t = 0; t < p.kh * p.kw; ++t) {
        const int row = i + p.top - t / p.kw * p.dh, column = j + p.left - t % p.kw * p.dw;
        if (row % p.sh == 0 && column % p.sw == 0)
          s.taps.push_back({t, row / p.sh, column / p.sw, row / p.sh, column / p.sw});
      }
      if (s.taps.empty()) continue;
      if (!sweeps.empty()) s.before = sweeps.back().before + int(sweeps.back().taps.size());
      s.lay_out();
      sweeps.push_back(s);
    }
  return sweeps;
}

struct Lines {  // pixels of a map, evenly spaced, possibly beyond its borders
  int row, row_step, rows, column, column_step, columns;
};

template <typename T>
struct Map {
  T* data;  // of one sample
  const int64_t* stride;
  int height, width;
};

// Visits vectors of a line, of which the last two may overlap; calls of the C library cost more than short lines do.
template <typename Visit>
inline void for_each_vector(int count, const Visit& visit) {
  for (int j = 0; j < count; j += kLanes) visit(std::min(j, count - kLanes));
}

template <typename From, typename To>
inline void copy_line(const From* from, int64_t from_step, To* to, int64_t to_step, int count) {
  if constexpr (std::is_same_v<From, To>)
    if (from_step == 1 && to_step == 1 && count >= kLanes) {
      for_each_vector(count, [=](int j) { store(to + j, load(from + j)); });
      return;
    }
  if (from_step == 1 && to_step == 1)
    for (int j = 0; j < count; ++j) to[j] = float(from[j]);
  else if (from_step == 2 && to_step == 1)
    for (int j = 0; j < count; ++j) to[j] = float(from[2 * j]);
  else
    for (int j = 0; j < count; ++j) to[j * to_step] = float(from[j * from_step]);
}

// Copies lines of some channels to float planes [channel][row][...], zeros outside of the map.
template <typename T>
void read_lines(const Map<const T>& map, int channels, Lines l, float* out, int64_t pitch, int64_t plane, int width) {
  const int64_t step = l.column_step * map.stride[3];
  const int first = std::min(first_inside(l.column, l.column_step), width);
  const int last = std::max(first, first_beyond(l.column, l.column_step, map.width, l.columns));
  const bool channels_last = map.stride[1] == 1 && map.stride[3] != 1;
  for (int i = 0; i < l.rows; ++i) {
    const int64_t row = l.row + int64_t(i) * l.row_step;
    const bool outside = row < 0 || row >= map.height || first >= last;
    const T* from = outside ? map.data : map.data + row * map.stride[2] + (l.column + int64_t(first) * l.column_step) * map.stride[3];
    float* to = out + i * pitch;
    for (int c = 0; c < channels; ++c) {
      float* line = to + c * plane;
      if (outside || first > 0 || last < width) for_each_vector(width, [=](int j) { store(line + j, Vec{}); });
      if (!channels_last && !outside) copy_line(from + c * map.stride[1], step, line + first, 1, last - first);
    }
    if (channels_last && !outside) transpose(from, step, last - first, channels, to + first, plane);
  }
}

// The way back, for lines within the map.
template <typename T>
void write_lines(const float* in, int64_t pitch, int64_t plane, const Map<T>& map, int channels, Lines l) {
  const int64_t step = l.column_step * map.stride[3];
  for (int i = 0; i < l.rows; ++i) {
    T* to = map.data + (l.row + int64_t(i) * l.row_step) * map.stride[2] + l.column * map.stride[3];
    const float* from = in + i * pitch;
    if (map.stride[1] == 1 && map.stride[3] != 1) transpose(from, plane, channels, l.columns, to, step);
    else
      for (int c = 0; c < channels; ++c) copy_line(from + c * plane, 1, to + c * map.stride[1], step, l.columns);
  }
}

// Rows of a sweep's cells in one sample, and some of the channels: what one thread does at a time.
struct Job {
  const Sweep* sweep;
  int sample, row, rows, part, parts;

  int vectors() const { return rows * sweep->across(); }
  Lines targets() const {
    return {sweep->to_row + row * sweep->to_row_step, sweep->to_row_step, rows, sweep->to_column,
            sweep->to_column_step, sweep->columns};
  }
  int64_t place(int vector) const {  // of a vector of cells in a plane
    const int across = sweep->across();
    return int64_t(vector / across) * sweep->row_step * sweep->phases * sweep->pitch + vector % across * kLanes;
  }
  // Planes of what the cells' taps read.
  template <typename T>
  void read_source(const Map<const T>& map, int channels, float* out) const {
    const Sweep& s = *sweep;
    const int64_t plane = s.plane(rows), pitch = s.phases * s.pitch;
    for (int f = 0; f < s.phases; ++f)
      read_lines(map, channels,
                 {row * s.row_step + s.first_row, 1, int(plane / pitch), s.first_column + f, s.column_step,
                  int(s.columns + (s.pitch - s.across() * kLanes))},
                 out + f * s.pitch, pitch, plane, int(s.pitch));
  }
  // Planes of as many vectors as there are: what lies at the targets.
  template <typename T>
  void read_targets(const Map<const T>& map, int channels, float* out) const {
    const int width = sweep->across() * kLanes;
    read_lines(map, channels, targets(), out, width, int64_t(rows) * width, width);
  }
  template <typename T>
  void write_targets(const float* in, const Map<T>& map, int channels) const {
    const int width = sweep->across() * kLanes;
    write_lines(in, width, int64_t(rows) * width, map, channels, targets());
  }
};

// Where kernel k of a tap is found among `kernels`, of which `together` lie side by side.
inline int64_t slot(int k, int tap, int taps, int kernels, int together) {
  const int first = k / together * together;
  return int64_t(first) * taps + int64_t(tap) * std::min(together, kernels - first) + (k - first);
}

// Visits the assignment of a job row by row: visit(offset of the row in the map, column of its first cell, place), where
// place(v) tells the place of its vth vector in [tile][slot][vector of the tile]. Rows beyond the map have offset -1.
template <typename Visit>
void for_each_row(const Problem& p, const Job& job, int together, const Visit& visit) {
  const Sweep& s = *job.sweep;
  const int taps = int(s.taps.size()), vectors = job.vectors();
  const int64_t tile = int64_t(kPair) * taps * p.kernels * kLanes, pixels = int64_t(p.out_height) * p.out_width;
  for (int k = 0; k < p.kernels; ++k)
    for (int t = 0; t < taps; ++t) {
      const int64_t at = slot(k, t, taps, p.kernels, together) * kLanes;
      const int64_t plane = ((int64_t(job.sample) * p.kernels + k) * p.kh * p.kw + s.taps[t].index) * pixels;
      for (int r = 0; r < job.rows; ++r) {
        const int row = job.row + r + s.taps[t].assign_row, first = r * s.across();
        visit(row >= 0 && row < p.out_height ? plane + int64_t(row) * p.out_width : -1, s.taps[t].assign_column,
              [=](int v) {
                const int vector = first + v, tall = vector + 1 == vectors && vectors % kPair ? 1 : kPair;
                return vector / kPair * tile + at * tall + vector % kPair * kLanes;
              });
      }
    }
  static_assert(kPair == 2, "as the last tile is found");
}

// The assignment of a job's cells, zeros where there is none, and anything in lanes that are no cells.
template <typename T>
void pack_assign(const Problem& p, const T* assign, const Job& job, int together, float* out) {
  const int across = job.sweep->across(), columns = job.sweep->columns;
  const int64_t size = int64_t(p.batch) * p.kernels * p.kh * p.kw * p.out_height * p.out_width;
  for_each_row(p, job, together, [&](int64_t row, int first, const auto& place) {
    for (int v = 0; v < across; ++v) {
      float* to = out + place(v);
      const int column = first + v * kLanes, lanes = std::min(kLanes, columns - v * kLanes);
      const T* from = assign + row + column;
      __builtin_prefetch(from + int64_t(p.out_height) * p.out_width);  // of the next tap
      if (row >= 0 && column >= 0 && column + lanes <= p.out_width && row + column + kLanes <= size)
        store(to, load_lanes(from));
      else
        for (int l = 0; l < kLanes; ++l)
          to[l] = row >= 0 && l < lanes && column + l >= 0 && column + l < p.out_width ? float(from[l]) : 0.0f;
    }
  });
}

// The way back for the gradient of the assignment.
inline void unpack_assign(const Problem& p, const float* packed, const Job& job, int together, float* grad_assign) {
  const int across = job.sweep->across(), columns = job.sweep->columns;
  for_each_row(p, job, together, [&](int64_t row, int first, const auto& place) {
    for (int v = 0; row >= 0 && v < across; ++v) {
      const float* from = packed + place(v);
      const int column = first + v * kLanes, lanes = std::min(kLanes, columns - v * kLanes);
      float* to = grad_assign + row + column;
      if (lanes == kLanes && column >= 0 && column + kLanes <= p.out_width) store(to, load(from));
      else
        for (int l = 0; l < lanes; ++l)
          if (column + l >= 0 && column + l < p.out_width) to[l] = from[l];
    }
  });
}

// Jobs for all samples: rows of which `channels` planes and the assignment stay in cache, and enough jobs for the
// threads, for which the channels may be shared out into up to `most_parts`.
inline std::vector<Job> make_jobs(const Problem& p, const std::vector<Sweep>& sweeps, int channels, int most_parts) {
  constexpr int64_t kCache = 48 * 1024, kAssignCache = 128 * 1024;  // floats
  std::vector<Job> jobs;
  for (const Sweep& s : sweeps) {
    const int64_t assign = int64_t(s.across()) * kLanes * s.taps.size() * p.kernels;
    int rows = 1;
    while (rows < s.rows && s.plane(rows + 1) * channels <= kCache && (rows + 1) * assign <= kAssignCache) ++rows;
    const int wanted = (2 * p.threads + p.batch * int(sweeps.size()) - 1) / (p.batch * int(sweeps.size()));
    int blocks = (s.rows + rows - 1) / rows;
    const int parts = std::max(1, std::min(most_parts, (wanted + blocks - 1) / blocks));
    blocks = std::min(s.rows, round_up(blocks, (wanted + 2 * parts - 1) / (2 * parts)));
    rows = (s.rows + blocks - 1) / blocks;
    for (int n = 0; n < p.batch; ++n)
      for (int row = 0; row < s.rows; row += rows)
        for (int part = 0; part < parts; ++part)
          jobs.push_back({&s, n, row, std::min(rows, s.rows - row), part, parts});
  }
  return jobs;
}

template <typename F>
int64_t largest(const std::vector<Job>& jobs, const F& size) {
  int64_t most = 0;
  for (const Job& job : jobs) most = std::max<int64_t>(most, size(job));
  return most;
}

template <typename T>
struct Side {  // a whole map of which `unit` channels belong together
  T* data;
  const int64_t* stride;
  int height, width, unit;
  Map<T> at(int sample, int first) const {
    return {data + sample * stride[0] + int64_t(first) * unit * stride[1], stride, height, width};
  }
};

struct Work {  // planes of some units of a job: those of the source, and vector by vector those of the cells
  const Job& job;
  int first, count;
  const float *in, *assign;
  float* out;
  const float* features;  // what lies at the targets, and room for the gradient of the assignment, or null
  float* dots;
};

// Does all jobs, `at_once` of `units` at a time: compute(work) fills in what then goes to the target. With `features`,
// which lie as the target does, compute also adds up the gradient of the assignment.
template <typename T, typename Compute>
void run(const Problem& p, const std::vector<Job>& jobs, int together, const T* assign, int units, int at_once,
         const Side<const T>& source, const Side<T>& target, const Side<const T>& features, float* grad_assign,
         const Compute& compute) {
  const auto cells = [](const Job& j) { return int64_t(j.vectors()) * kLanes; };
  const auto weights = [&](const Job& j) { return cells(j) * int64_t(j.sweep->taps.size()) * p.kernels; };
  const int64_t most = largest(jobs, cells) * at_once * target.unit, most_weights = largest(jobs, weights);
  const Buffers ins(p.threads, largest(jobs, [&](const Job& j) { return j.sweep->plane(j.rows); }) * at_once * source.unit);
  const Buffers outs(p.threads, most), assigns(p.threads, most_weights);
  const Buffers others(p.threads, grad_assign ? most : 0), sums(p.threads, grad_assign ? most_weights : 0);
  const int slices = (units + at_once - 1) / at_once;
#pragma omp parallel num_threads(p.threads) if (p.is_large())
  {
    float *in = ins.mine(), *out = outs.mine(), *a = assigns.mine(), *other = others.mine(), *dots = sums.mine();
    const Job* last = nullptr;
#pragma omp for schedule(dynamic)
    for (int i = 0; i < int(jobs.size()); ++i) {
      const Job& job = jobs[i];
      if (!last || last->sweep != job.sweep || last->sample != job.sample || last->row != job.row)
        pack_assign(p, assign, job, together, a);
      last = &job;
      if (grad_assign) std::memset(dots, 0, sizeof(float) * weights(job));
      for (int s = slices * job.part / job.parts; s < slices * (job.part + 1) / job.parts; ++s) {
        const int first = s * at_once, count = std::min(at_once, units - first);
        job.read_source(source.at(job.sample, first), count * source.unit, in);
        if (grad_assign) job.read_targets(features.at(job.sample, first), count * features.unit, other);
        compute(Work{job, first, count, in, a, out, other, grad_assign ? dots : nullptr});
        if (target.data) job.write_targets(out, target.at(job.sample, first), count * target.unit);
      }
      if (grad_assign) unpack_assign(p, dots, job, together, grad_assign);
    }
  }
}

}  // namespace
