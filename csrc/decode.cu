// One new token for every row of a batch: the ops of a step, made for a chain of kernels that a CUDA graph replays.
// A step reads every weight once, so it is as fast as memory if memory never pauses. Two things keep it busy. A thread block asks for its
// whole share of the weights before it waits for the activations (they come from the kernel before it in the stream, the weights from
// nobody), and it lets the next kernel start at once to do the same (programmatic dependent launch; older cards than Hopper wait).
// Rows of the batch share the weights: bfloat16 multiplies by mma.sync, rows of the batch against 8 rows of the weights, so one row costs
// as much as eight; float32 multiplies in float32. Sums have a fixed order that does not depend on the batch: a row has the same bits in any.
#include "decode.cuh"

// --- shared memory, as the launches below ask for it -----------------------------------------------------------------------------------
// A launch decides by the card: how many bytes a block can have (`limit`), and whether blocks can form clusters.
constexpr int OWN = 4096, ROOMY = 224 << 10;                                                    // what a product declares itself, at most; Hopper's blocks have more than ROOMY
struct Shape { int tiles, eights; };                                                            // of 8 rows of weights in a unit; of rows of the batch at a time
constexpr int sums_bytes(int NB, int NT) { return 4 * WARPS * 8 * NB * (NT * 8 + 8); }          // what the warps have, to be added up: 8 NB rows
constexpr int unit_bytes(int NT) { return NT * THREADS * 16; }
HD constexpr int split_of(int NT, int mode) { return mode == ADD ? NT : 1; }
HD constexpr bool staged(int NB, int NT, int mode) { return NB > 1 && (mode == STORE && NT == 4 || mode == SWIGLU && NT == 6); } // x waits in shared memory
constexpr int stage_bytes(int NB, int NT, int mode) { return staged(NB, NT, mode) ? 4 * NB * THREADS * 16 : 0; }
constexpr int least_bytes(int NB, int NT, int mode) { return OWN + sums_bytes(NB, NT) + 4 * unit_bytes(NT) + stage_bytes(NB, NT, mode); }
// A sum has the same order whatever the number of tiles, so that may follow the batch; but for ADD, where they are the blocks of a cluster: there the columns decide
inline Shape shape_of(int mode, int64_t B, int64_t K, int itemsize, int limit, bool clusters) {
    const bool half = itemsize == 2, many = half && B > 8, roomy = limit > ROOMY;
    int NT = many && !roomy ? 2 : 4;
    if (mode == LOGITS) NT = 4;
    if (mode == SWIGLU) NT = half && (many ? roomy : limit > 160 << 10) ? 6 : 2;
    if (mode == ADD) NT = half && clusters ? (int)std::min(std::max(ceil_div(ceil_div(K, 256), 4), (int64_t)1), (int64_t)3) : 1; // about four steps for a block of a cluster
    return {NT, many && least_bytes(4, NT, mode) <= limit ? 4 : 1};
}
struct Room { int blocks, quarter, ring, gains, x, bytes; };                                    // units in a quarter of the ring; where it, a norm's gain (-1: there is no room) and staged x are
inline Room room_of(int mode, int64_t K, int64_t N, int itemsize, int NB, int NT, int64_t blocks, int limit) {
    const int SPLIT = split_of(NT, mode), unit = unit_bytes(NT), sums = sums_bytes(NB, NT), stage = stage_bytes(NB, NT, mode);
    const int64_t steps = ceil_div(K, 32 * (16 / itemsize)), groups = ceil_div(N, 8 * (mode == SWIGLU ? NT / 2 : NT)), clusters = std::min(std::max(blocks / SPLIT, (int64_t)1), groups);
    const int64_t rounds = ceil_div(groups, clusters), units = rounds * ceil_div(steps, SPLIT), gain = mode == ADD ? 0 : steps * WARPS * 64;
    const bool fits = gain + least_bytes(NB, NT, mode) <= limit;
    const int most = limit - OWN - sums - stage - (fits ? (int)gain : 0), some = mode == LOGITS ? 64 << 10 : 104 << 10; // not all there is: the next kernel's blocks need some, too
    Room r{};
    r.blocks = (int)clusters * SPLIT;
    r.quarter = (int)std::min(ceil_div(units, 4), std::max((int64_t)std::min(most, some) / (4 * unit), (int64_t)1)); // a block's share if there is room
    r.ring = rounds == 1 ? 0 : sums;                                                            // what the warps leave takes the ring's place if no more comes into it
    const int end = std::max(r.ring + 4 * r.quarter * unit, sums);
    r.gains = fits ? end : -1;
    r.x = end + (fits ? (int)gain : 0);
    r.bytes = r.x + stage;
    return r;
}
constexpr int64_t attend_bytes(int G, int D, int itemsize) { return query_bytes(G, D, itemsize) + 2 * CUT * (lanes_of(D, itemsize) * 2 + 1) * 16; } // and two cuts of keys and values
// What a product [B, K] x [K, N] (mode 0 to 3: project, project_add, feed, logits) by `blocks` asks for on a card that gives a block `limit`
int64_t product_shared(int64_t mode, int64_t B, int64_t K, int64_t N, int64_t itemsize, int64_t blocks, int64_t limit, bool clusters) {
    const Shape s = shape_of((int)mode, B, K, (int)itemsize, (int)limit, clusters);
    return room_of((int)mode, K, N, (int)itemsize, s.eights, s.tiles, blocks, (int)limit).bytes;
}
// Is attention tensor cores' work? They take values 32 channels at a time, and more than 128 have too many sums for the registers
bool attend_by_mma(int64_t D, int64_t itemsize) { return itemsize == 2 && D <= 128 && D % 32 == 0; }
// What attention asks for: `group` query heads to a KV head
int64_t attend_shared(int64_t group, int64_t D, int64_t itemsize) { return attend_bytes(heads_at_once(group), D, itemsize); }

#ifdef __CUDACC__
// --- y = norm(x) @ w -------------------------------------------------------------------------------------------------------------------

struct Product {
    const void *x, *gain;             // [B, K]; [K] of the norm before it
    const void *w[3];                 // matrices [rows, K], one below the other (for SWIGLU the gate's and the other)
    const void *bias[3];
    int end[3];                       // where each one's rows end
    void* y;                          // [B, N]
    float2* best;                     // LOGITS: largest logit of each block and its id, [B, blocks]
    int* bad;                         // LOGITS: set where a logit is not finite
    int B, K, N, quarter;             // units in a quarter of the ring
    int ring, gains, x_at;            // where they are in shared memory; no gains there: -1
    float eps;
    bool late;                        // let the next kernel start only when the one before is over
};

// The eight warps share the columns of x and w: warp i has blocks i, i+8, ... of 64 bytes. A `unit` is one such block of NT tiles of 8 rows, 16
// bytes a tile and thread; units stream through a ring in shared memory in which every thread reads just what it asked for itself.
// A norm's gain is taken into x; its 1/rms, a factor of a whole row, into the sums at the end: x is read once, and no product waits for a sum of squares.
// Where a block has 227 KiB, more than 8 rows of a norm's x (but for the head's) stream through shared memory as the weights do (`STAGE`), so that registers
// and shared memory of a multiprocessor suffice for blocks of two kernels; else the next one's are not there early. Other x is in registers, KS units of it.
__device__ __forceinline__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#endif
}
// What a block of the cluster has where this one has `p`
__device__ __forceinline__ float of_peer(const float* p, int rank) {
    float v = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n.reg .u32 a;\nmapa.shared::cluster.u32 a, %1, %2;\nld.shared::cluster.f32 %0, [a];\n}" : "=f"(v) : "r"((unsigned)__cvta_generic_to_shared(p)), "r"(rank) : "memory");
#endif
    return v;
}
template <class T> __device__ __forceinline__ uint4 times(const uint4& x, const uint4& w) {
    const auto a = as_vec<T>(x), b = as_vec<T>(w);
    Vec<T, 16 / sizeof(T)> y;
#pragma unroll
    for (int e = 0; e < (int)(8 / sizeof(T)); e++) y.pair(e) = mul_rn(a.pair(e), b.pair(e));
    return *reinterpret_cast<const uint4*>(&y);
}
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
constexpr bool TWO = true;                                                     // blocks of two kernels find shared memory beside each other
#else
constexpr bool TWO = false;
#endif
template <class T, int NB, int NT, int MODE> __global__ void __launch_bounds__(THREADS, NB == 1 || (TWO && (staged(NB, NT, MODE) || MODE == ADD)) ? 2 : 1) product_kernel(const __grid_constant__ Product p) {
    constexpr int E = 16 / sizeof(T), MT = (NB + 1) / 2, OUT = MODE == SWIGLU ? NT / 2 : NT, ROWS = 8 * NB;
    constexpr bool NORM = MODE != ADD, HALF = sizeof(T) == 2, STAGE = staged(NB, NT, MODE);
    constexpr int XS = HALF ? NB : 8;                                          // 16-byte pieces of x for a unit
    constexpr int KS = !HALF || STAGE ? 1 : MODE == ADD && NB == 1 && NT == 1 ? 12 : 4;
    constexpr int CHAINS = NT == 1 ? 2 : 1, LINE = NT * 8 + 8;                 // floats between two rows of `red`, so that neither side meets a bank twice
    constexpr int SPLIT = split_of(NT, MODE);                                  // blocks of a cluster that divide the columns between them, as many as there are tiles
#if __CUDA_ARCH__ < 900
    if constexpr (SPLIT > 1) __trap();                                         // no clusters, so never launched
#endif
    extern __shared__ __align__(16) unsigned char smem[];
    float* red = reinterpret_cast<float*>(smem);                               // [WARPS][ROWS][LINE], in the ring's place if a block has one group of rows
    __shared__ float squared[WARPS][ROWS], scale[ROWS];
    uint4* ring = reinterpret_cast<uint4*>(smem + p.ring) + threadIdx.x;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int K = p.K, N = p.N, groups = (N + 8 * OUT - 1) / (8 * OUT), b0 = blockIdx.y * ROWS;
    const int slice = blockIdx.x % SPLIT, first = blockIdx.x / SPLIT, stride = gridDim.x / SPLIT;
    const int all = (K + 32 * E - 1) / (32 * E), share = (all + SPLIT - 1) / SPLIT, begin = slice * share, steps = SPLIT == 1 ? all : min(share, all - begin);
    const int units = (groups - first + stride - 1) / stride * steps;
    if (!p.late) done();

    int loaded = 0, load_step = 0, load_group = first, load_slot = 0;
    const auto load_unit = [&] {
        if (loaded++ >= units) return;
        const int k = ((begin + load_step) * WARPS + warp) * 4 * E + t * E;
#pragma unroll
        for (int i = 0; i < NT; i++) {
            int r = (load_group * OUT + i % OUT) * 8 + g, m = MODE == SWIGLU ? i / OUT : 0;
            const bool in = r < N && k < K;
            if (MODE == STORE && r >= p.end[0]) m = r >= p.end[1] ? 2 : 1, r -= p.end[m - 1];
            copy_or_zero(ring + (load_slot * NT + i) * THREADS, in ? static_cast<const T*>(p.w[m]) + (int64_t)r * K + k : p.w[0], in);
        }
        if (++load_step == steps) load_step = 0, load_group += stride;
        if (++load_slot == 4 * p.quarter) load_slot = 0;
    };
    for (int q = 0; q < 4; q++) {
        for (int u = 0; u < p.quarter; u++) load_unit();
        copy_commit();
    }
    uint4* const gains = reinterpret_cast<uint4*>(smem + p.gains) + warp * 4;  // for each step the four pieces that the warp needs
    const auto gain_of = [&](int k) { return k < K ? __ldg(reinterpret_cast<const uint4*>(static_cast<const T*>(p.gain) + k)) : uint4{}; };
    if (NORM && p.gains >= 0) {
        for (int i = lane; i < 4 * steps; i += 32) gains[i / 4 * WARPS * 4 + i % 4] = gain_of((i / 4 * WARPS + warp) * 4 * E + i % 4 * E);
        __syncwarp();
    }
    wait_for_previous();
    if (p.late) done();

    uint4* const staged = reinterpret_cast<uint4*>(smem + p.x_at) + threadIdx.x; // four steps of x
    uint4 xs[KS][XS];
    const auto load_x = [&](uint4 (&to)[XS], int step) {
        const int k = ((begin + step) * WARPS + warp) * 4 * E + t * E;
#pragma unroll
        for (int i = 0; i < XS; i++) {
            const int b = b0 + (HALF ? 8 * i + g : i);
            to[i] = b < p.B && step < steps && k < K ? load_fresh(static_cast<const T*>(p.x) + (int64_t)b * K + k) : uint4{};
        }
    };
    const auto load_xs = [&](int s0) {
#pragma unroll
        for (int s = 0; s < KS; s++) load_x(xs[s], s0 + s);
    };
    int x_units = 0, x_step = 0, x_slot = 0, x_read = 0;
    const auto stage_x = [&] {
        if (x_units++ < units) {
            const int k = (x_step * WARPS + warp) * 4 * E + t * E;
#pragma unroll
            for (int i = 0; i < XS; i++) {
                const int b = b0 + 8 * i + g;
                const bool in = b < p.B && k < K;
                copy_or_zero(staged + (x_slot * XS + i) * THREADS, in ? static_cast<const T*>(p.x) + (int64_t)b * K + k : p.x, in);
            }
            if (++x_step == steps) x_step = 0;
            x_slot = (x_slot + 1) % 4;
        }
        copy_commit();
    };
    float ss[XS] = {};
    const auto take_gain = [&](uint4 (&x)[XS], int step, bool count) {
        const uint4 gain = p.gains >= 0 ? gains[step * WARPS * 4 + t] : gain_of((step * WARPS + warp) * 4 * E + t * E);
#pragma unroll
        for (int i = 0; i < XS; i++) {
            if (count) ss[i] += squares<T>(x[i]);
            x[i] = times<T>(x[i], gain);
        }
    };
    const auto load_gained = [&](int s0, bool count) {
        load_xs(s0);
        if (NORM)
#pragma unroll
            for (int s = 0; s < KS; s++)
                if (s0 + s < steps) take_gain(xs[s], s0 + s, count);
    };
    if constexpr (STAGE) {
        for (int s = 0; s < 4; s++) stage_x();
    } else load_gained(0, true);

    float best[NB];
    int best_id[NB];
#pragma unroll
    for (int i = 0; i < NB; i++) best[i] = -INFINITY, best_id[i] = 0x7fffffff;
    bool finite = true;
    int in_quarter = 0, slot = 0;
    for (int group = first; group < groups; group += stride) {
        float acc[NT][HALF ? MT * CHAINS : 2][4] = {};
        const auto one_output = [&]() -> T* {                                  // ADD: of this thread, if it has one
            const int e = slice * 8 * ROWS + threadIdx.x, b = b0 + e / (8 * OUT), n = group * 8 * OUT + e % (8 * OUT);
            return threadIdx.x < 8 * ROWS && b < p.B && n < N ? static_cast<T*>(p.y) + (int64_t)b * N + n : nullptr;
        };
        float old = 0;
        if (MODE == ADD)
            if (const T* at = one_output()) old = one_fresh(at);
        for (int s0 = 0; s0 < steps; s0 += KS) {
            if (!STAGE && steps > KS && (s0 || group != first)) load_gained(s0, group == first);
#pragma unroll
            for (int s = 0; s < KS; s++) {
                if (s0 + s >= steps) break;
                if (STAGE || in_quarter == 0) copy_wait<3>();
                uint4 now[XS];                                                 // this step's x
#pragma unroll
                for (int i = 0; i < XS; i++) now[i] = STAGE ? staged[(x_read * XS + i) * THREADS] : xs[s][i];
                if constexpr (STAGE) take_gain(now, s0 + s, group == first);
#pragma unroll
                for (int i = 0; i < NT; i++) {
                    const uint4 w = ring[(slot * NT + i) * THREADS];
                    if constexpr (HALF) {
#pragma unroll
                        for (int m = 0; m < MT; m++) {
                            const uint4 a = now[2 * m], b = 2 * m + 1 < NB ? now[2 * m + 1 < NB ? 2 * m + 1 : 0] : uint4{};
                            mma(acc[i][m * CHAINS], a.x, b.x, a.y, b.y, w.x, w.y);
                            mma(acc[i][m * CHAINS + CHAINS - 1], a.z, b.z, a.w, b.w, w.z, w.w);
                        }
                    } else {
                        const auto wv = as_vec<T>(w);
#pragma unroll
                        for (int b = 0; b < 8; b++) {
                            const auto xv = as_vec<T>(now[b]);
#pragma unroll
                            for (int e = 0; e < E; e++) acc[i][b / 4][b % 4] = fmaf(xv[e], wv[e], acc[i][b / 4][b % 4]);
                        }
                    }
                }
                if (++slot == 4 * p.quarter) slot = 0;
                if (++in_quarter == p.quarter) {
                    in_quarter = 0;
                    if (loaded < units)
                        for (int u = 0; u < p.quarter; u++) load_unit();
                    if (!STAGE) copy_commit();
                }
                if constexpr (STAGE) x_read = (x_read + 1) % 4, stage_x();
            }
        }
        if (NORM && group == first) {
#pragma unroll
            for (int i = 0; i < XS; i++) {
                ss[i] = lane_sum(ss[i], 4);
                if (HALF ? t == 0 : lane == 0) squared[warp][HALF ? 8 * i + g : i] = ss[i];
            }
        }
        if (p.ring == 0) __syncthreads();                                      // the ring has been read
        // The warps' shares, one after the other
        float* to = red + warp * ROWS * LINE;
#pragma unroll
        for (int i = 0; i < NT; i++) {
            if constexpr (HALF) {
#pragma unroll
                for (int m = 0; m < NB; m++) {
                    const float *c = acc[i][m / 2 * CHAINS] + m % 2 * 2, *d = acc[i][m / 2 * CHAINS + CHAINS - 1] + m % 2 * 2;
                    if (b0 + 8 * m + g < p.B) *reinterpret_cast<float2*>(to + (8 * m + g) * LINE + i * 8 + 2 * t) = CHAINS == 2 ? float2{c[0] + d[0], c[1] + d[1]} : float2{c[0], c[1]};
                }
            } else {
#pragma unroll
                for (int b = 0; b < 8; b++) {
                    const float v = lane_sum(acc[i][b / 4][b % 4], 4);
                    if (t == 0) to[b * LINE + i * 8 + g] = v;
                }
            }
        }
        __syncthreads();
        if (NORM && group == first) {
            if (threadIdx.x < ROWS) {
                float s = 0;
#pragma unroll
                for (int w = 0; w < WARPS; w++) s += squared[w][threadIdx.x];
                scale[threadIdx.x] = __frsqrt_rn(s / K + p.eps);
            }
            __syncthreads();
        }
        const auto total = [&](int tile, int n, int b) {
            float s = 0;
#pragma unroll
            for (int w = 0; w < WARPS; w++) s += red[(w * ROWS + b) * LINE + tile * 8 + n];
            return NORM ? __fmul_rn(s, scale[b]) : s;                            // on its own: not one fma with a bias
        };
        if constexpr (MODE == ADD) {
            __shared__ float sums[SPLIT > 1 ? OUT * 8 * ROWS : 1];             // this block's share of all outputs
            if constexpr (SPLIT > 1) {
#pragma unroll
                for (int it = 0; it < (OUT * 8 * ROWS + THREADS - 1) / THREADS; it++) {
                    const int e = threadIdx.x + it * THREADS, b = e / (8 * OUT), c = e % (8 * OUT);
                    if (b < ROWS && b0 + b < p.B) sums[e] = total(c / 8, c % 8, b);
                }
                cluster_sync();
            }
            if (T* at = one_output()) {
                const int e = slice * 8 * ROWS + threadIdx.x;
                float v = 0;
                if constexpr (SPLIT == 1) v = total(0, e % 8, e / 8);
                else
#pragma unroll
                    for (int i = 0; i < SPLIT; i++) v += of_peer(sums + e, i);
                *at = from_float<T>(old + round_to<T>(v));
            }
        } else
#pragma unroll
        for (int it = 0; it < (OUT * 8 * ROWS + THREADS - 1) / THREADS; it++) {
            const int e = threadIdx.x + it * THREADS, b = e / (8 * OUT), tile = e % (8 * OUT) / 8, n = group * 8 * OUT + e % (8 * OUT);
            if (b >= ROWS || b0 + b >= p.B || n >= N) continue;
            float v = total(tile, e % 8, b);
            if (MODE == STORE) {
                const int m = n < p.end[0] ? 0 : n < p.end[1] ? 1 : 2;
                if (p.bias[m]) v += to_float(static_cast<const T*>(p.bias[m])[m ? n - p.end[m - 1] : n]);
            }
            v = round_to<T>(v);
            const int64_t o = (int64_t)(b0 + b) * N + n;
            T* y = static_cast<T*>(p.y);
            if (MODE == STORE) y[o] = from_float<T>(v);
            if (MODE == SWIGLU) {
                const float u = round_to<T>(total(tile + OUT, e % 8, b));
                y[o] = from_float<T>(v / (1.f + expf(-v)) * u);
            }
            if (MODE == LOGITS) {
                y[o] = from_float<T>(v);
                finite = finite && fabsf(v) < INFINITY;
                if (v > best[it]) best[it] = v, best_id[it] = n;               // ids grow: the first of equals stays
            }
        }
        if constexpr (SPLIT > 1) cluster_sync();                               // nobody goes on while another reads
        else __syncthreads();
    }
    if constexpr (MODE == LOGITS) {
        static_assert(OUT == 4);                                               // a warp has one row of the batch at a time
        if (!finite) *p.bad = 1;
#pragma unroll
        for (int it = 0; it < NB; it++) {
#pragma unroll
            for (int o = 16; o; o >>= 1) {
                const float v = __shfl_xor_sync(~0u, best[it], o);
                const int id = __shfl_xor_sync(~0u, best_id[it], o);
                if (v > best[it] || (v == best[it] && id < best_id[it])) best[it] = v, best_id[it] = id;
            }
            const int b = b0 + warp + it * WARPS;
            if (lane == 0 && b < p.B) p.best[(int64_t)b * gridDim.x + blockIdx.x] = {best[it], __int_as_float(best_id[it])};
        }
    }
}

// --- attention ---------------------------------------------------------------------------------------------------------------------------
// A block takes a span, 8 cuts of 64 keys, one after the other. Keys and values that earlier steps wrote are asked for before the projections are there,
// and the next cut's while this one is computed; each thread reads back just what it asked for.
constexpr int SPAN = 8;
template <class T, int G, int L> __global__ void __launch_bounds__(THREADS, 1) attend_kernel(const __grid_constant__ Attend p) {
    using A = Attention<T, G, L, SPAN>;
    extern __shared__ __align__(16) unsigned char smem[];
    __shared__ typename A::Shared shared;
    done();
    A a(p);
    if (!a.begin(blockIdx.z, blockIdx.y, blockIdx.x)) return;
    const int first = a.cut, end = min(first + SPAN, a.at / CUT + 1);
    uint4* ring = reinterpret_cast<uint4*>(smem + (size_t)(G + 2) * p.D * sizeof(T) + (size_t)WARPS * G * p.D * 4) + threadIdx.x; // [2][keys][K, V][THREADS]
    const auto tile = [&](int cut) { return ring + (cut - first) % 2 * (2 * A::KEYS * THREADS); };
    const auto load = [&](int cut) {
#pragma unroll
        for (int kv = 0; kv < 2; kv++) {
            const T* from = static_cast<const T*>(kv ? p.v : p.k) + a.base;
            if (cut < end) {
#pragma unroll
                for (int n = 0; n < A::KEYS; n++) {
                    const int j = cut * CUT + n * A::SUBS + a.sub;
                    const bool in = j < a.at && j >= a.pad && a.c < a.chunks;
                    copy_or_zero(tile(cut) + (2 * n + kv) * THREADS, in ? from + (int64_t)j * p.D + a.c * A::E : from, in);
                }
            }
            copy_commit();
        }
    };
    const auto sync = [] { __syncthreads(); };
    load(first);
    a.tables();
    wait_for_previous();
    a.prepare(smem, a.span == a.used - 1, sync, [](const T* from) { return load_fresh(from); });
    for (; a.cut < end; a.cut++) {
        load(a.cut + 1);
        a.add(smem, [](int kv) { if (kv) copy_wait<2>(); else copy_wait<3>(); }, [&](int n, int kv) { return tile(a.cut)[(2 * n + kv) * THREADS]; });
    }
    a.leave(smem, shared, sync);
    a.finish(shared, sync);
}

// In bfloat16 scores and values are tensor cores' work. A warp has 8 keys of a cut. Scores: queries (rows 0 to 7 of 16) times keys, a thread's 16 bytes of both at the
// same columns. Values: weights times values, weights in two bfloat16 that add up to them to 2^-17 (the answer is rounded to 2^-9), the upper in rows 0 to 7, the lower in 8 to 15.
// (Where `attend_by_mma` says so. In a head of 48 channels the second 32 would reach into keys of the next warp, which may be on their way.)
__device__ __forceinline__ void mma8(float (&c)[4], unsigned a0, unsigned a1, unsigned b) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(b));
}
__device__ __forceinline__ void turned(unsigned (&r)[4], const void* p) {          // four 8 x 8, a lane has two keys of a channel
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"((unsigned)__cvta_generic_to_shared(p)) : "memory");
}
template <int G, int L> __global__ void __launch_bounds__(THREADS, TWO && G > 1 ? 2 : 1) attend_mma_kernel(const __grid_constant__ Attend p) {
    using A = Attention<bf16, G, L, SPAN>;
    constexpr int Q = L / 4;                                                   // 16 bytes of a key that a thread has
    extern __shared__ __align__(16) unsigned char smem[];
    __shared__ typename A::Shared shared;
    done();
    A a(p);
    if (!a.begin(blockIdx.z, blockIdx.y, blockIdx.x)) return;
    const int first = a.cut, end = min(first + SPAN, a.at / CUT + 1), D = p.D, line = D + 8, g = a.lane / 4, t = a.lane % 4;
    unsigned char* const ring = smem + query_bytes(G, D, 2);                   // [2] keys [Q][THREADS], values [CUT][line]
    const int one = Q * THREADS * 16 + CUT * line * 2;
    const auto keys = [&](int cut) { return reinterpret_cast<uint4*>(ring + (cut - first) % 2 * one) + threadIdx.x; };
    const auto values = [&](int cut) { return reinterpret_cast<bf16*>(ring + (cut - first) % 2 * one + Q * THREADS * 16) + a.warp * 8 * line; };
    const auto load = [&](int cut) {
        const int j0 = cut * CUT + a.warp * 8;
        if (cut < end) {
            const bf16* from = static_cast<const bf16*>(p.k) + a.base;
#pragma unroll
            for (int i = 0; i < Q; i++) {
                const int j = j0 + g, c = i * 4 + t;
                const bool in = j < a.at && j >= a.pad && c < a.chunks;
                copy_or_zero(keys(cut) + i * THREADS, in ? from + (int64_t)j * D + c * 8 : from, in);
            }
        }
        copy_commit();
        if (cut < end) {
            const bf16* from = static_cast<const bf16*>(p.v) + a.base;
#pragma unroll
            for (int i = 0; i < Q; i++) {
                const int n = (i * 32 + a.lane) / L, j = j0 + n, c = a.lane % L;
                const bool in = j < a.at && j >= a.pad;
                if (c < a.chunks) copy_or_zero(values(cut) + n * line + c * 8, in ? from + (int64_t)j * D + c * 8 : from, in);
            }
        }
        copy_commit();
    };
    const auto sync = [] { __syncthreads(); };
    load(first);
    a.tables();
    wait_for_previous();
    a.prepare(smem, a.span == a.used - 1, sync, [](const bf16* from) { return load_fresh(from); });
    const bf16* const vecs = reinterpret_cast<const bf16*>(smem);
    const auto piece = [&](int row, int i) { return i * 4 + t < a.chunks ? *reinterpret_cast<const uint4*>(vecs + row * D + (i * 4 + t) * 8) : uint4{}; };
    uint4 q[Q];
#pragma unroll
    for (int i = 0; i < Q; i++) q[i] = g < a.heads ? piece(g, i) : uint4{};
    float o[L][4] = {}, top = -INFINITY, sum = 0;                              // of head g
    for (int cut = first; cut < end; cut++) {
        load(cut + 1);
        copy_wait<3>();
        const int j0 = cut * CUT + a.warp * 8, j = j0 + 2 * t;
        float s[2][4] = {};
#pragma unroll
        for (int i = 0; i < Q; i++) {
            const uint4 k = j0 + g == a.at ? piece(G, i) : keys(cut)[i * THREADS];
            mma(s[0], q[i].x, 0, q[i].y, 0, k.x, k.y);
            mma(s[1], q[i].z, 0, q[i].w, 0, k.z, k.w);
        }
        float w[2];
#pragma unroll
        for (int i = 0; i < 2; i++) w[i] = j + i <= a.at && j + i >= a.pad ? (s[0][i] + s[1][i]) * p.scale_log2 : -INFINITY;
        float now = fmaxf(w[0], w[1]);
        now = fmaxf(now, __shfl_xor_sync(~0u, now, 1));
        now = fmaxf(fmaxf(now, __shfl_xor_sync(~0u, now, 2)), top);
        const float from = now == -INFINITY ? 0.f : now, by = exp2f(top - from);
        top = now;
#pragma unroll
        for (int i = 0; i < 2; i++) w[i] = exp2f(w[i] - from);
        sum = sum * by + (w[0] + w[1]);
        const __nv_bfloat162 high = __floats2bfloat162_rn(w[0], w[1]), low = __floats2bfloat162_rn(w[0] - __low2float(high), w[1] - __high2float(high));
        const unsigned hi = *reinterpret_cast<const unsigned*>(&high), lo = *reinterpret_cast<const unsigned*>(&low);
#pragma unroll
        for (int i = 0; i < L; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) o[i][e] *= by;
        copy_wait<2>();
        __syncwarp();
        bf16* const v = values(cut);
        if (a.at >= j0 && a.at < j0 + 8) {                                      // the new one
            if (a.lane < a.chunks) *reinterpret_cast<uint4*>(v + (a.at - j0) * line + a.lane * 8) = *reinterpret_cast<const uint4*>(vecs + (G + 1) * D + a.lane * 8);
            __syncwarp();
        }
#pragma unroll
        for (int i = 0; i < Q; i++) {
            if (i * 32 >= D) break;                                            // D is a multiple of 32
            unsigned r[4];
            turned(r, v + a.lane % 8 * line + (i * 4 + a.lane / 8) * 8);
#pragma unroll
            for (int n = 0; n < 4; n++) mma8(o[i * 4 + n], hi, lo, r[n]);
        }
        __syncwarp();                                                          // all have read what is overwritten next
    }
    float* const os = reinterpret_cast<float*>(smem + (size_t)(G + 2) * D * 2);
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (g < G) {
#pragma unroll
        for (int i = 0; i < L; i++)
            if (i * 8 < D) *reinterpret_cast<float2*>(os + (a.warp * G + g) * D + i * 8 + 2 * t) = {o[i][0] + o[i][2], o[i][1] + o[i][3]};
        if (t == 0) shared.ms[a.warp][g] = top, shared.ls[a.warp][g] = sum;
    }
    a.join(smem, shared, sync, a.answer());
    a.finish(shared, sync);
}

// --- the next token ----------------------------------------------------------------------------------------------------------------------
// One block for each row: which id, a note of it at its place in the log, one position further, and its row of the embedding.
template <class T> __global__ void __launch_bounds__(THREADS) advance_kernel(const float2* best, int parts, int64_t* ids, const T* embed, int64_t* log, int* at, T* x, int S, int K, int V) {
    __shared__ float tops[WARPS];
    __shared__ int which[WARPS];
    const int b = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int id = 0x7fffffff;
    if (best) {
        float top = -INFINITY;
        for (int i = threadIdx.x; i < parts; i += THREADS) {
            const float2 f = __ldcg(best + (int64_t)b * parts + i);
            const int n = __float_as_int(f.y);
            if (f.x > top || (f.x == top && n < id)) top = f.x, id = n;
        }
#pragma unroll
        for (int o = 16; o; o >>= 1) {
            const float v = __shfl_xor_sync(~0u, top, o);
            const int n = __shfl_xor_sync(~0u, id, o);
            if (v > top || (v == top && n < id)) top = v, id = n;
        }
        if (lane == 0) tops[warp] = top, which[warp] = id;
        __syncthreads();
        top = tops[0], id = which[0];
        for (int w = 1; w < WARPS; w++)
            if (tops[w] > top || (tops[w] == top && which[w] < id)) top = tops[w], id = which[w];
    } else id = (int)ids[b];
    id = min(max(id, 0), V - 1);                                               // logits that are not finite: said elsewhere
    const int next = min(at[b] + 1, S - 1);
    __syncthreads();
    if (threadIdx.x == 0) ids[b] = id, log[(int64_t)b * S + next] = id, at[b] = next;
    constexpr int E = 16 / sizeof(T);
    for (int k = threadIdx.x; k < K / E; k += THREADS)
        reinterpret_cast<uint4*>(x)[(int64_t)b * (K / E) + k] = __ldg(reinterpret_cast<const uint4*>(embed) + (int64_t)id * (K / E) + k);
}

template <class T, int NB, int NT, int MODE> void launch_product(Product& p, int blocks, cudaStream_t s) {
    static_assert(least_bytes(NB, NT, MODE) <= (staged(NB, NT, MODE) ? ROOMY : NT == 6 || NB == 4 && MODE == LOGITS ? 160 << 10 : 99 << 10)); // what `shape_of` looks at
    const int64_t above = ceil_div(p.B, 8 * NB);
    STD_TORCH_CHECK(above <= 65535, "decode: at most ", 65535 * 8 * NB, " rows at a time, got ", p.B);
    const Room r = room_of(MODE, p.K, p.N, sizeof(T), NB, NT, blocks, smem_limit());
    p.quarter = r.quarter, p.ring = r.ring, p.gains = r.gains, p.x_at = r.x;
    launch_chained(split_of(NT, MODE), product_kernel<T, NB, NT, MODE>, dim3((unsigned)r.blocks, (unsigned)above), r.bytes, s, p);
}
template <int MODE> void run_product(const Tensor& x, Product& p, int blocks) {
    torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
    const cudaStream_t s = stream_of(x);
    const bool half = x.scalar_type() == ScalarType::BFloat16;
    STD_TORCH_CHECK(half || x.scalar_type() == ScalarType::Float, "decode: dtype must be float32 or bfloat16");
    const Shape shape = shape_of(MODE, p.B, p.K, half ? 2 : 4, smem_limit(), hopper_code((const void*)product_kernel<bf16, 1, 2, ADD>));
    constexpr int FLOATS = MODE == ADD ? 1 : MODE == SWIGLU ? 2 : 4;           // tiles of float32
    const auto go = [&](auto tiles) {                                          // the shapes that `shape_of` gives, and no others
        constexpr int NT = decltype(tiles)::value;
        if (shape.eights == 1) launch_product<bf16, 1, NT, MODE>(p, blocks, s);
        else launch_product<bf16, 4, NT, MODE>(p, blocks, s);
    };
    if (!half) launch_product<float, 1, FLOATS, MODE>(p, blocks, s);
    else if constexpr (MODE == ADD) {
        if (shape.tiles == 1) go(std::integral_constant<int, 1>{});
        else if (shape.tiles == 2) go(std::integral_constant<int, 2>{});
        else go(std::integral_constant<int, 3>{});
    } else if constexpr (MODE == SWIGLU) {
        if (shape.tiles == 2) go(std::integral_constant<int, 2>{});
        else go(std::integral_constant<int, 6>{});
    } else if constexpr (MODE == STORE) {
        if (shape.tiles == 2) launch_product<bf16, 4, 2, STORE>(p, blocks, s);
        else go(std::integral_constant<int, 4>{});
    } else go(std::integral_constant<int, 4>{});
    check_launch("decode");
}
inline Product product_of(const Tensor& x, const Tensor& y, double eps) {
    Product p{};
    p.x = x.const_data_ptr(); p.y = y.mutable_data_ptr(); p.B = (int)x.size(0); p.K = (int)x.size(1); p.N = (int)y.size(1); p.eps = (float)eps;
    return p;
}

// y = norm(x) @ [wq, wk, wv] (+ biases); matrices are [out, in]; an empty tensor is none
void project(const Tensor& x, const Tensor& gain, const Tensor& wq, const Tensor& wk, const Tensor& wv, const Tensor& bq, const Tensor& bk, const Tensor& bv, Tensor& y, double eps, bool late) {
    Product p = product_of(x, y, eps);
    p.gain = gain.const_data_ptr(); p.late = late;
    p.w[0] = wq.const_data_ptr(); p.w[1] = wk.const_data_ptr(); p.w[2] = wv.const_data_ptr();
    p.bias[0] = data(bq); p.bias[1] = data(bk); p.bias[2] = data(bv);
    p.end[0] = (int)wq.size(0); p.end[1] = p.end[0] + (int)wk.size(0); p.end[2] = p.N;
    run_product<STORE>(x, p, sm_count());
}
// h += x @ w
void project_add(const Tensor& x, const Tensor& w, Tensor& h) {
    Product p = product_of(x, h, 0);
    p.w[0] = w.const_data_ptr();
    run_product<ADD>(x, p, sm_count());
}
// y = silu(norm(x) @ gate) * (norm(x) @ up)
void feed(const Tensor& x, const Tensor& gain, const Tensor& gate, const Tensor& up, Tensor& y, double eps) {
    Product p = product_of(x, y, eps);
    p.gain = gain.const_data_ptr(); p.w[0] = gate.const_data_ptr(); p.w[1] = up.const_data_ptr();
    run_product<SWIGLU>(x, p, sm_count());
}
// y = norm(x) @ w, the best of each block in `best` [B, blocks, 2]; `bad` becomes 1 if one is not finite
void logits(const Tensor& x, const Tensor& gain, const Tensor& w, Tensor& y, Tensor& best, Tensor& bad, double eps) {
    Product p = product_of(x, y, eps);
    p.gain = gain.const_data_ptr(); p.w[0] = w.const_data_ptr();
    p.best = (float2*)best.mutable_data_ptr(); p.bad = (int*)bad.mutable_data_ptr();
    const int groups = (int)ceil_div(p.N, 32);
    STD_TORCH_CHECK(best.size(1) <= groups, "decode: more parts of `best` than groups of rows");
    run_product<LOGITS>(x, p, (int)best.size(1));
}
void attend(const Tensor& qkv, const Tensor& q_gain, const Tensor& k_gain, const Tensor& cos, const Tensor& sin, Tensor& k, Tensor& v, const Tensor& at, const Tensor& pad, Tensor& part, Tensor& arrived, Tensor& y, double eps) {
    torch::stable::accelerator::DeviceGuard guard(qkv.get_device_index());
    const Attend p = attend_of(qkv, q_gain, k_gain, cos, sin, k, v, at, pad, part, arrived, y, eps);
    const cudaStream_t s = stream_of(qkv);
    const int group = p.H / p.Hkv, heads = heads_at_once(group), lanes = lanes_of(p.D, qkv.scalar_type() == ScalarType::Float ? 4 : 2);
    const int64_t slices = p.Hkv * ceil_div(group, heads);
    STD_TORCH_CHECK(p.B <= 65535 && slices <= 65535, "decode: at most 65535 rows at a time, and KV heads, got ", p.B, " and ", slices);
    const auto go = [&](auto t, auto g, auto l) {
        using T = decltype(t);
        constexpr int G = decltype(g)::value, L = decltype(l)::value;
        const auto launch = [&](auto kernel) { launch_chained(1, kernel, dim3((unsigned)ceil_div(p.cuts, SPAN), (unsigned)slices, p.B), attend_bytes(G, p.D, sizeof(T)), s, p); };
        if constexpr (sizeof(T) == 2 && L == 16)
            if (attend_by_mma(p.D, 2)) return launch(attend_mma_kernel<G, L>);
        launch(attend_kernel<T, G, L>);
    };
    const auto pick = [&](auto t, auto l) {
        if (heads == 1) go(t, std::integral_constant<int, 1>{}, l);
        else if (heads == 2) go(t, std::integral_constant<int, 2>{}, l);
        else go(t, std::integral_constant<int, 4>{}, l);
    };
    const auto with = [&](auto t) {
        if (lanes == 16) pick(t, std::integral_constant<int, 16>{});
        else pick(t, std::integral_constant<int, 32>{});
    };
    if (qkv.scalar_type() == ScalarType::Float) with(float{});
    else with(bf16{});
    check_launch("decode attention");
}
// The next token of each row: from `best`, or, where that is empty, what `ids` holds
void advance(const Tensor& best, Tensor& ids, const Tensor& embed, Tensor& log, Tensor& at, Tensor& x) {
    torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
    const int parts = best.numel() ? (int)best.size(1) : 0, S = (int)log.size(1), K = (int)x.size(1), V = (int)embed.size(0);
    const auto go = [&](auto t) {
        using T = decltype(t);
        advance_kernel<T><<<(unsigned)x.size(0), THREADS, 0, stream_of(x)>>>((const float2*)data(best), parts, (int64_t*)ids.mutable_data_ptr(), (const T*)embed.const_data_ptr(),
                                                                             (int64_t*)log.mutable_data_ptr(), (int*)at.mutable_data_ptr(), (T*)x.mutable_data_ptr(), S, K, V);
    };
    if (x.scalar_type() == ScalarType::Float) go(float{});
    else go(bf16{});
    check_launch("decode advance");
}
STABLE_TORCH_LIBRARY_IMPL(XTRAIN_NS, CUDA, m) {
    m.impl("project", TORCH_BOX(&project));
    m.impl("project_add", TORCH_BOX(&project_add));
    m.impl("feed", TORCH_BOX(&feed));
    m.impl("logits", TORCH_BOX(&logits));
    m.impl("attend", TORCH_BOX(&attend));
    m.impl("advance", TORCH_BOX(&advance));
}
#endif

STABLE_TORCH_LIBRARY_FRAGMENT(XTRAIN_NS, m) {
    m.def("product_shared(int mode, int rows, int K, int N, int itemsize, int blocks, int limit, bool clusters) -> int");
    m.def("attend_shared(int group, int head_dim, int itemsize) -> int");
    m.def("attend_by_mma(int head_dim, int itemsize) -> bool");
    m.def("project(Tensor x, Tensor gain, Tensor wq, Tensor wk, Tensor wv, Tensor bq, Tensor bk, Tensor bv, Tensor(a!) y, float eps, bool late) -> ()");
    m.def("project_add(Tensor x, Tensor w, Tensor(a!) h) -> ()");
    m.def("feed(Tensor x, Tensor gain, Tensor gate, Tensor up, Tensor(a!) y, float eps) -> ()");
    m.def("logits(Tensor x, Tensor gain, Tensor w, Tensor(a!) y, Tensor(b!) best, Tensor(c!) bad, float eps) -> ()");
    m.def("attend(Tensor qkv, Tensor q_gain, Tensor k_gain, Tensor cos, Tensor sin, Tensor(a!) k, Tensor(b!) v, Tensor at, Tensor pad, Tensor(c!) part, Tensor(d!) arrived, Tensor(e!) y, float eps) -> ()");
    m.def("advance(Tensor best, Tensor(a!) ids, Tensor embed, Tensor(b!) log, Tensor(c!) at, Tensor(d!) x) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(XTRAIN_NS, CompositeExplicitAutograd, m) { // no tensor: a machine without a GPU can ask
    m.impl("product_shared", TORCH_BOX(&product_shared));
    m.impl("attend_shared", TORCH_BOX(&attend_shared));
    m.impl("attend_by_mma", TORCH_BOX(&attend_by_mma));
}
