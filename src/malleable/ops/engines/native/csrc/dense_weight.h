// Gradient of the dense convolution's weights: a sum over pixels, so here the assignment scales the features first.
#pragma once

#include "tiles.h"

namespace {

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
      MALLEABLE_UNROLL
      for (int l = 0; l < kLanes; ++l) store_lanes(to + l * to_pitch + m, tile[l]);
    } else {
      for (int l = 0; l < count; ++l)
        for (int r = 0; r < kLanes; ++r) to[r * to_pitch + m + l] = float(tile[l][r]);
    }
  }
}

constexpr int kChannelsPerThread = 12;  // fewer are not worth a thread of their own

// Threads share out the input channels and, when there are few, the pixels too, each share of which sums into its own
// part [kernel][tap][c][pitch].
template <typename T>
void backward_weight(const Problem& p, const T* grad, const T* x, const T* assign, T* grad_weight) {
  const int c = p.channels / p.groups, o = p.out_channels / p.groups, taps = p.kh * p.kw, center = center_of(p);
  const int pitch = round_up(o, kLanes);
  const int64_t pixels = int64_t(p.out_height) * p.out_width, part = int64_t(p.kernels) * taps * c * pitch;
  const Blocks blocks(p.out_height, p.out_width, kBlock);
  const Region largest{0, 0, blocks.rows, blocks.columns}, reach = input_of(p, largest);
  const int64_t most = int64_t(std::min(reach.rows, p.height)) * std::min(reach.columns, p.width);
  std::vector<float> middle;
  const bool collapse = constant_center(p, assign, middle);
  const int wide = std::max(1, std::min(p.threads, c / kChannelsPerThread));
  const int shares = int(std::max<int64_t>(1, std::min<int64_t>(p.threads / wide, kMostSums * p.threads / part)));
  const Buffers partial(1, part * shares);
  float* parts = partial.first();
  const int columns = std::max(1, p.threads / shares), per_column = (c + columns - 1) / columns;
  const int chunk = channels_at_once(per_column, most);
  const Buffers ins(p.threads, most * chunk), outs(p.threads, int64_t(largest.pixels()) * pitch);
  const int apart = chunk + kLanes;  // of scaled pixels: a power of two would put them all into the same few lines of cache
  const Buffers products(p.threads, int64_t(largest.pixels()) * apart);
  for (int group = 0; group < p.groups; ++group) {
#pragma omp parallel for num_threads(p.threads) schedule(static) if (p.is_large())
    for (int64_t i = 0; i < part * shares; ++i) parts[i] = 0;
#pragma omp parallel num_threads(p.threads) if (p.is_large())
    {
      float *in = ins.mine(), *out = outs.mine(), *scaled = products.mine();
      Joined joined(largest.pixels());
#pragma omp for collapse(2) schedule(static)
      for (int share = 0; share < shares; ++share)
        for (int slice = 0; slice < columns; ++slice) {
          const int64_t total = int64_t(p.batch) * blocks.count();
          for (int64_t b = total * share / shares; b < total * (share + 1) / shares; ++b) {
            const int n = int(b / blocks.count());
            const Region r = blocks[int(b % blocks.count())], source = input_of(p, r).clipped(p.height, p.width);
            for (int v = 0; v < o; v += kPanel)  // panel after panel, each of which is read from end to end many times
              gather(grad + n * p.y_stride[0] + (group * o + v) * p.y_stride[1], p.y_stride, p.out_height, p.out_width,
                     std::min(kPanel, o - v), r, out + int64_t(v) * r.pixels(), std::min(kPanel, pitch - v));
            for (int first = slice * per_column; first < std::min(c, (slice + 1) * per_column); first += chunk) {
              const int depth = std::min(chunk, std::min(c, (slice + 1) * per_column) - first);
              gather(x + n * p.x_stride[0] + (group * c + first) * p.x_stride[1], p.x_stride, p.height, p.width, depth,
                     source, in, depth);
              for (int t = 0; t < taps; ++t) {
                joined.clear();
                for_each_line(p, r, t, [&](const Line& l) { joined.add(l, source); });
                const bool one = collapse && t == center;
                for (int k = 0; k < (one ? 1 : p.kernels); ++k) {
                  const T* a = one ? nullptr : assign + ((int64_t(n) * p.kernels + k) * taps + t) * pixels;
                  const List& list = joined.taken(a);
                  for (int i = 0; i < list.count; ++i) {
                    const float scale = list.scale[i], *pixel = in + int64_t(list.from[i]) * depth;
                    float* to = scaled + int64_t(i) * apart;
                    for (int d = 0; d < depth; ++d) to[d] = scale * pixel[d];
                  }
                  float* sums = parts + share * part + ((int64_t(k) * taps + t) * c + first) * pitch;
                  for (int v = 0; v < o; v += kPanel) {
                    const Rows panel{out + int64_t(v) * r.pixels(), std::min(kPanel, pitch - v)};
                    for (int d = 0; d < depth; d += kRows)
                      kOuter.of[std::min(kRows, depth - d)][panel.pitch / kLanes](
                          list, scaled + d, apart, panel, sums + int64_t(d) * pitch + v, pitch);
                  }
                }
              }
            }
          }
        }
    }
    if (collapse)  // each kernel's share of the one sum
      for (int share = 0; share < shares; ++share)
        for (int k = p.kernels - 1; k >= 0; --k) {
          const float* one = parts + share * part + int64_t(center) * c * pitch;
          float* to = parts + share * part + (int64_t(k) * taps + center) * c * pitch;
          for (int64_t i = 0; i < int64_t(c) * pitch; ++i) to[i] = one[i] * middle[k];
        }
#pragma omp parallel for collapse(2) num_threads(p.threads) schedule(static) if (p.is_large())
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
