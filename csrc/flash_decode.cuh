// Few queries on a long cache (decoding): a block takes a cut of the keys of one KV head, 128 (64) at a time, for all its query heads at once, and leaves an answer and its log-sum-exp;
// a second kernel joins the answers in the order of the keys. Where there are rows enough, a block takes all cuts and joins them itself. The cuts, and what is added in which order, do not
// depend on how much else there is to do, so neither do the bits of a row.
#pragma once
#include "flash.cuh"

template <int D> struct Cut { static constexpr int WARP = D <= 128 ? 32 : 16, KEYS = 4 * WARP; }; // keys at a time: a warp, a block
template <int D> constexpr int few_bytes = 16 * D * 2 + 4 * 2 * Cut<D>::WARP * D * 2;             // of shared memory: queries, each warp's keys and values
// How many cuts a block takes: all, so that nothing is left to be joined, where a block for each KV head fills the card at once, or nearly, and one for each cut would come in rounds; else one.
// `room`: bytes of shared memory of a multiprocessor, of which the system and the kernel take less than 2 KiB a block
template <int D> constexpr int few_all_bytes(int64_t rows) { return few_bytes<D> + (int)(4 * rows * D * 4); }
template <int D> int64_t few_run(int64_t heads, int64_t cuts, int64_t rows, int64_t room, int64_t sms) {
    const int64_t bytes = few_all_bytes<D>(rows), fit = room / (bytes + 2048) * sms;
    return bytes + OWN_MOST <= SMALL && heads <= fit && 2 * heads > fit && heads * cuts > fit ? cuts : 1;
}

#ifdef __CUDACC__
constexpr int MAX_ROWS = 16; // queries of a group
constexpr int MAX_CUTS = 32; // of a cache; a lane of a warp for each when they are joined

// One query's answer, by a warp, four columns a lane, added up as join_many does: in one, two or four shares of the cuts, and then those in their order
template <class T, int D> __device__ __forceinline__ void join(const Flash& f, const float* part, const float* part_lse, int cuts, int64_t row) {
    constexpr int M = (D + 127) / 128;
    const int lane = threadIdx.x % 32, each = tiles_of(cuts, cuts > 16 ? 4 : cuts > 8 ? 2 : 1);
    const float mine = lane < cuts ? part_lse[row * cuts + lane] : -INFINITY;
    float top = mine, all[M][4] = {};
    for (int w = 16; w; w >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, w));
    const float by = top > -INFINITY ? __expf(mine - top) : 0.f, sum = lane_sum(by, 32);
#pragma unroll 1
    for (int c0 = 0; c0 < cuts; c0 += each) {
        float some[M][4] = {};
#pragma unroll 4
        for (int c = c0; c < min(cuts, c0 + each); c++) {
            const float b = __shfl_sync(~0u, by, c);
            if (b > 0) // what has no weight was not written
#pragma unroll
                for (int m = 0; m < M; m++)
                    if (const int d = m * 128 + lane * 4; d < D) {
                        const auto x = Vec<float, 4>::load(part + (row * cuts + c) * D + d);
#pragma unroll
                        for (int i = 0; i < 4; i++) some[m][i] = fmaf(b, x[i], some[m][i]);
                    }
        }
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) all[m][i] += some[m][i];
    }
    const int64_t bh = row / f.T;
    T* o = f.o.at<T>(bh / f.H, bh % f.H) + row % f.T * f.o.n;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (const int d = m * 128 + lane * 4 + i; d < f.D) o[d] = from_float<T>(sum > 0 ? all[m][i] / sum : 0.f);
    if (lane == 0) f.lse[row] = sum > 0 ? top + __logf(sum) : -INFINITY;
}
// Few cuts: a warp for a query, four to a block
template <class T, int D> __global__ void __launch_bounds__(128) join_few(const Flash f, const float* part, const float* part_lse, int cuts) {
    const int64_t row = blockIdx.x * 4ll + threadIdx.x / 32;
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory"); // for the answers of all cuts
#endif
    if (row < (int64_t)f.B * f.H * f.T) join<T, D>(f, part, part_lse, cuts, row);
}
// Many: 32 columns of one query a block; each warp adds up its share of the cuts, and the warps' sums are added in their order
template <class T, int D> __global__ void __launch_bounds__(1024) join_many(const Flash f, const float* part, const float* part_lse, int cuts) {
    __shared__ float sums[32][32];
    const int64_t row = blockIdx.x / (D / 32), bh = row / f.T;
    const int warp = threadIdx.x / 32, warps = blockDim.x / 32, lane = threadIdx.x % 32, d = blockIdx.x % (D / 32) * 32 + lane, each = tiles_of(cuts, warps);
    const float *lse = part_lse + row * cuts, *x = part + row * cuts * D + d;
    float top = -INFINITY, sum = 0, acc = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory"); // for the answers of all cuts
#endif
    for (int c = lane; c < cuts; c += 32) top = fmaxf(top, lse[c]);
    for (int w = 16; w; w >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, w));
    if (top > -INFINITY) {
        for (int c = lane; c < cuts; c += 32) sum += __expf(lse[c] - top);
        sum = lane_sum(sum, 32);
#pragma unroll 8
        for (int c = warp * each; c < min(cuts, (warp + 1) * each); c++) {
            const float by = __expf(lse[c] - top);
            if (by > 0) acc = fmaf(by, x[(int64_t)c * D], acc); // what has no weight was not written
        }
    }
    sums[warp][lane] = acc;
    __syncthreads();
    if (warp) return;
    for (int w = 1; w < warps; w++) acc += sums[w][lane];
    if (d < f.D) f.o.at<T>(bh / f.H, bh % f.H)[row % f.T * f.o.n + d] = from_float<T>(sum > 0 ? acc / sum : 0.f);
    if (d == 0) f.lse[row] = sum > 0 ? top + __logf(sum) : -INFINITY;
}
// A block takes `run` cuts of `each` tiles, one tile after the other. The next keys come while these values are worked at, the next values under the next keys.
// ONE: each cut is one tile, and has its answer at once. Else a block has one cut. Who has all the cuts of its queries joins them.
template <class T, int D, bool ONE> __global__ void __launch_bounds__(128) decode_kernel(const Flash f, float* part, float* part_lse, int cuts, int each, int run) {
    constexpr int KW = Cut<D>::WARP, NT = KW / 8, TILE = KW * D * 2, KEYS = Cut<D>::KEYS;
    done(); // for the join, which may come in beside the last blocks; it waits for all of them by itself
    extern __shared__ __align__(128) char smem[];
    __shared__ float ms[4][MAX_ROWS], ls[4][MAX_ROWS];
    const int per = tiles_of(cuts, run), warp = threadIdx.x / 32, lane = threadIdx.x % 32, bh = blockIdx.x / per, b = bh / f.Hkv, hk = bh % f.Hkv, rows = f.group * f.T;
    const int cut0 = blockIdx.x % per * run, cut1 = min(cuts, cut0 + run);
    const auto row_of = [&](int r) { return ((int64_t)b * f.H + hk * f.group + r / f.T) * f.T + r % f.T; }; // among [B, H, T]
    const int begin = max(keys_of(f, b, 0).lo / KEYS, cut0 * each), end = min(tiles_of(keys_of(f, b, f.T - 1).hi, KEYS), cut1 * each);
    if (cuts > 1)
        for (int e = threadIdx.x; e < rows * (cut1 - cut0); e += 128)
            if (const int cut = cut0 + e / rows; (cut + 1) * each <= begin || cut * each >= end) part_lse[row_of(e % rows) * cuts + cut] = -INFINITY;
    const uint32_t q = __cvta_generic_to_shared(smem), k = q + 16 * D * 2 + warp * 2 * TILE, v = k + TILE;
    const bool apart = ONE && run > 1; // or else the answers of the warps lie where the keys were
    float* os = (float*)(apart ? smem + 16 * D * 2 + 8 * TILE : smem); // [4][rows][D]
    if (begin < end || cuts == 1) {
        for (int e = threadIdx.x; e < 16 * D / 8; e += 128) {
            const int r = e / (D / 8), c = e % (D / 8);
            const bool in = r < rows && c * 8 < f.D;
            copy16(chunk_at<D>(q, r, c), in ? f.q.at<const T>(b, hk * f.group + r / f.T) + r % f.T * f.q.n + c * 8 : (const T*)f.q.p, in);
        }
        const auto load_keys = [&](uint32_t to, const Rows& x, int tile) { // a warp's own, of its own copies: nobody else need be waited for
            const T* from = x.at<const T>(b, hk);
            const int j0 = tile * KEYS + warp * KW;
            if (tile < end)
#pragma unroll 8
                for (int e = lane; e < KW * D / 8; e += 32) {
                    const int r = e / (D / 8), c = e % (D / 8);
                    const bool in = j0 + r < f.S && c * 8 < f.D;
                    copy16(chunk_at<D>(to, r, c), from + (in ? (j0 + r) * x.n + c * 8 : 0), in);
                }
            copy_commit();
        };
        load_keys(k, f.k, begin);
        load_keys(v, f.v, begin);
        copy_wait<1>();
        __syncthreads();
        float s[1][NT][4], o[1][D / 8][4] = {}, top[2] = {-INFINITY, -INFINITY}, base[2] = {}, sum[2] = {};
        const auto finish = [&](int y) {
            sum[y] = lane_sum(sum[y], 4);
            if (lane % 4 == 0) ms[warp][8 * y + lane / 4] = top[y] == -INFINITY ? top[y] : base[y], ls[warp][8 * y + lane / 4] = sum[y];
        };
        const auto answer = [&](int cut) { // of the four warps, in their order
            if (!apart) __syncthreads();
#pragma unroll
            for (int y = 0; y < 2; y++)
                if (8 * y + lane / 4 < rows)
#pragma unroll
                    for (int n = 0; n < D / 8; n++) *(float2*)(os + (warp * rows + 8 * y + lane / 4) * D + n * 8 + lane % 4 * 2) = {o[0][n][2 * y], o[0][n][2 * y + 1]};
            __syncthreads();
            for (int e = threadIdx.x; e < rows * D; e += 128) {
                const int r = e / D, d = e % D;
                float top = -INFINITY, sum = 0, x = 0;
                for (int w = 0; w < 4; w++) top = fmaxf(top, ms[w][r]);
                for (int w = 0; w < 4; w++) {
                    const float by = ms[w][r] == -INFINITY ? 0.f : exp2_fast(ms[w][r] - top);
                    sum += by * ls[w][r], x += by * os[(w * rows + r) * D + d];
                }
                x = sum > 0 ? x / sum : 0;
                const float lse = sum > 0 ? top * LN2 + __logf(sum) : -INFINITY;
                const int64_t row = row_of(r);
                if (cuts > 1) {
                    part[(row * cuts + cut) * D + d] = x;
                    if (d == 0) part_lse[row * cuts + cut] = lse;
                } else {
                    if (d < f.D) f.o.at<T>(b, hk * f.group + r / f.T)[r % f.T * f.o.n + d] = from_float<T>(x);
                    if (d == 0) f.lse[row] = lse;
                }
            }
        };
#pragma unroll 1
        for (int tile = begin; tile < end; tile++) {
            copy_wait<1>(), __syncwarp();
            product_nt<T, D, NT, 1>(s, q, 0, k, lane);
            __syncwarp(), load_keys(k, f.k, tile + 1);
            if (ONE && tile > begin) __syncthreads(); // the last tile's answer has been read
#pragma unroll
            for (int y = 0; y < 2; y++) {
                const int r = 8 * y + lane / 4, j = tile * KEYS + warp * KW + lane % 4 * 2;
                const Run seen = r < rows ? keys_of(f, b, r % f.T) : Run{0, 0};
                float now = ONE ? -INFINITY : top[y];
#pragma unroll
                for (int n = 0; n < NT; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        if (n * 8 + e < seen.lo - j || n * 8 + e >= seen.hi - j) s[0][n][2 * y + e] = -INFINITY;
                        now = fmaxf(now, s[0][n][2 * y + e]);
                    }
                now = fmaxf(now, __shfl_xor_sync(~0u, now, 1));
                now = fmaxf(now, __shfl_xor_sync(~0u, now, 2));
                const float next = now == -INFINITY ? 0.f : __fmul_rn(now, f.scale_log2), shrink = ONE || top[y] == -INFINITY ? 0.f : exp2_fast(base[y] - next); // no fma: 1 where the maximum stays
                top[y] = now, base[y] = next, sum[y] = ONE ? 0 : sum[y] * shrink;
#pragma unroll
                for (int n = 0; n < D / 8; n++) o[0][n][2 * y] = ONE ? 0 : o[0][n][2 * y] * shrink, o[0][n][2 * y + 1] = ONE ? 0 : o[0][n][2 * y + 1] * shrink;
#pragma unroll
                for (int n = 0; n < NT; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++) sum[y] += s[0][n][2 * y + e] = exp2_fast(fmaf(s[0][n][2 * y + e], f.scale_log2, -next));
                if (ONE) finish(y);
            }
            copy_wait<1>();
            __syncwarp();
            product_nn<T, D, NT, 1>(o, s, v, lane);
            __syncwarp();
            load_keys(v, f.v, tile + 1);
            if (ONE) answer(tile);
        }
        if (!ONE) {
            finish(0), finish(1);
            answer(cut0);
        }
    }
    if (!ONE || per > 1) return;
    __syncthreads();
    for (int r = warp; r < rows; r += 4) join<T, D>(f, part, part_lse, cuts, row_of(r));
}
inline int tiles_in_cut(const Flash& f, int keys) { // of `keys` keys each; 256 (128) keys are not worth a cut
    const int all = std::max(1, tiles_of(f.S, keys));
    return all <= 2 ? all : tiles_of(all, MAX_CUTS);
}
inline int cuts_of(const Flash& f, int keys, int each) { return std::max(1, tiles_of(f.S, keys * each)); }
template <int D> int run_of(const Flash& f, int cuts) {
    return (int)few_run<D>((int64_t)f.B * f.Hkv, cuts, f.group * f.T, of_device(cudaDevAttrMaxSharedMemoryPerMultiprocessor), sm_count());
}
template <class T, int D, bool ONE> void decode_cuts(const Flash& f, int each, int cuts, cudaStream_t s) {
    constexpr int shared = few_bytes<D>;
    static_assert(shared >= 4 * 16 * D * 4);
    float* lse = f.delta + (int64_t)f.B * f.H * f.T * cuts * D;
    const int run = ONE ? run_of<D>(f, cuts) : 1, bytes = run > 1 ? few_all_bytes<D>(f.group * f.T) : shared, per = tiles_of(cuts, run);
    constexpr int most = ONE ? std::min(few_all_bytes<D>(MAX_ROWS), SMALL - OWN_MOST) : shared; // not `bytes`: the limit belongs to the kernel, and another thread may be about to launch it with more
    allow_smem((const void*)decode_kernel<T, D, ONE>, most);
    decode_kernel<T, D, ONE><<<f.B * f.Hkv * per, 128, bytes, s>>>(f, f.delta, lse, cuts, each, run);
    if (per == 1) return;
    if (cuts <= 4) launch_after(join_few<T, D>, (int)ceil_div((int64_t)f.B * f.H * f.T, 4), 128, s, f, f.delta, lse, cuts);
    else launch_after(join_many<T, D>, grid_of((int64_t)f.B * f.H * f.T * (D / 32), "flash"), 32 * std::min(32, pow2_at_least(ceil_div(cuts, 8))), s, f, f.delta, lse, cuts);
}
template <class T, int D> void decode(const Flash& f, cudaStream_t s) {
    const int each = tiles_in_cut(f, Cut<D>::KEYS), cuts = cuts_of(f, Cut<D>::KEYS, each);
    if (each == 1 && cuts > 1) decode_cuts<T, D, true>(f, each, cuts, s);
    else decode_cuts<T, D, false>(f, each, cuts, s);
}
#endif
