// Flash attention on Hopper (sm_90a): one warp copies tiles by TMA, two or three warpgroups of four warps multiply with wgmma straight from shared memory.
// The blocks stay on the chip and draw tile after tile from a counter; queries have two places in shared memory, so the next ones are there when these are done.
// Each warpgroup asks for the next scores before it adds the last weights times values, also from one tile of queries to the next; and the warpgroups take turns at issuing,
// so that one's softmax falls into another's products.
#pragma once
#include "flash.cuh"

template <int D> constexpr int PLACES = D == 64 ? 4 : 2; // places for tiles of keys and of values, as many as fit
template <int D> constexpr int forward_sm90_bytes(int warpgroups) { return (2 * 64 * warpgroups + 2 * PLACES<D> * 128) * D * 2 + 1024; } // of shared memory, 1024 of them to begin at a multiple
// Sizes of the backward, see there. D: columns in shared memory, 64 or 128; W: columns that are multiplied
template <int D, int W> struct One {
    static constexpr int BM = 128, BN = 8192 / D, OWN = BM * D * 2, TILE = BN * D * 2, DS = BM * BN * 2, DQ = W < 64 ? W : 64, PART = 128 * DQ * 4, STAGES = 2; // DQ: columns of dq that a warpgroup makes, for 64 queries
    static constexpr int TILES = 2 * OWN + 2 * STAGES * TILE + 2 * DS + 2 * PART, BYTES = TILES + STAGES * BN * 8 + 3 * 8 + (8 + 3 * STAGES) * 8;
};

#ifdef __CUDACC__
#include <cuda.h>
#include <cudaTypedefs.h>

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
__device__ __forceinline__ void mbar_init(uint32_t bar, int count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory"); }
__device__ __forceinline__ void mbar_expect(uint32_t bar, int bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory"); }
__device__ __forceinline__ void mbar_arrive(uint32_t bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
__device__ __forceinline__ void mbar_wait(uint32_t bar, int parity) {
    asm volatile("{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\nbra again;\ndone:\n}" ::"r"(bar), "r"(parity) : "memory");
}
// A box of 64 columns and the map's rows, from row `n` of head `h` of batch row `b`; what lies outside of the tensor arrives as zeros
__device__ __forceinline__ void tma_load(uint32_t to, const CUtensorMap* map, uint32_t bar, int col, int n, int h, int b) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
                 ::"r"(to), "l"(map), "r"(bar), "r"(col), "r"(n), "r"(h), "r"(b) : "memory");
}
__device__ __forceinline__ void bulk_load(uint32_t to, const void* from, uint32_t bar, int bytes) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(bar) : "memory");
}
__device__ __forceinline__ float4 shared4(uint32_t at) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at) : "memory");
    return v;
}
// A matrix in shared memory, rows of 128 bytes under the 128-byte swizzle; `lbo` is the step from 64 columns to the next 64, used where they run along the product's N
__device__ __forceinline__ uint64_t matrix(uint32_t at, uint32_t lbo) {
    return (uint64_t)((at & 0x3FFFF) >> 4) | (uint64_t)(lbo >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}
// The same, `step` bytes behind `at`, for the forward: with one `at` for all parts of a product and a constant `step` it is one addition in uniform registers. (The backward waits for shared
// memory and gains nothing from it.)
__device__ __forceinline__ uint64_t matrix(uint32_t at, int step, uint32_t lbo) {
    uint64_t d;
    asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"((at >> 4) + (lbo >> 4 << 16) + (step >> 4)), "n"(1024 >> 4 | 1 << 30));
    return d;
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
template <int N> __device__ __forceinline__ void pin(float (&x)[N][4]) { // nothing that reads or writes x moves over this line
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) asm volatile("" : "+f"(x[n][i])::"memory");
}
template <int N> __device__ __forceinline__ void pin(uint32_t (&x)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) asm volatile("" : "+r"(x[n][i])::"memory");
}
#define ACC4(d, n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define ACC16(d, n) ACC4(d, n), ACC4(d, n + 1), ACC4(d, n + 2), ACC4(d, n + 3)
#define R16 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}"
#define R48 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47}"
#define R32 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}"
#define R64 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}"
// d (64 rows by 8 N columns) = or += a b, 16 deep. nt: a in shared memory, b's rows along N; tt: both in shared memory, rows along the depth; nn: a in registers, b's rows along the depth
template <class T> struct Wgmma;
#define WGMMA(T, NAME)                                                                                                                                         \
    template <> struct Wgmma<T> {                                                                                                                              \
        static __device__ __forceinline__ void nt(float (&d)[16][4], uint64_t a, uint64_t b, int add) {                                                        \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32." NAME "." NAME " " R64 ", %64, %65, p, 1, 1, 0, 0;\n}" \
                         : ACC16(d, 0), ACC16(d, 4), ACC16(d, 8), ACC16(d, 12) : "l"(a), "l"(b), "r"(add));                                                    \
        }                                                                                                                                                      \
        static __device__ __forceinline__ void nt(float (&d)[8][4], uint64_t a, uint64_t b, int add) {                                                         \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32." NAME "." NAME " " R32 ", %32, %33, p, 1, 1, 0, 0;\n}" \
                         : ACC16(d, 0), ACC16(d, 4) : "l"(a), "l"(b), "r"(add));                                                                               \
        }                                                                                                                                                      \
        static __device__ __forceinline__ void tt(float (&d)[8][4], uint64_t a, uint64_t b, int add) {                                                         \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32." NAME "." NAME " " R32 ", %32, %33, p, 1, 1, 1, 1;\n}" \
                         : ACC16(d, 0), ACC16(d, 4) : "l"(a), "l"(b), "r"(add));                                                                               \
        }                                                                                                                                                      \
        static __device__ __forceinline__ void tt(float (&d)[4][4], uint64_t a, uint64_t b, int add) {                                                         \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\nwgmma.mma_async.sync.aligned.m64n32k16.f32." NAME "." NAME " " R16 ", %16, %17, p, 1, 1, 1, 1;\n}" \
                         : ACC16(d, 0) : "l"(a), "l"(b), "r"(add));                                                                                            \
        }                                                                                                                                                      \
        static __device__ __forceinline__ void nn(float (&d)[12][4], const uint32_t (&a)[4], uint64_t b) {                                                     \
            asm volatile("wgmma.mma_async.sync.aligned.m64n96k16.f32." NAME "." NAME " " R48 ", {%48,%49,%50,%51}, %52, 1, 1, 1, 1;"                           \
                         : ACC16(d, 0), ACC16(d, 4), ACC16(d, 8) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                        \
        }                                                                                                                                                      \
        static __device__ __forceinline__ void nn(float (&d)[4][4], const uint32_t (&a)[4], uint64_t b) {                                                      \
            asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32." NAME "." NAME " " R16 ", {%16,%17,%18,%19}, %20, 1, 1, 1, 1;"                           \
                         : ACC16(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                                  \
        }                                                                                                                                                      \
        static __device__ __forceinline__ void nn(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b) {                                                     \
            asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." NAME "." NAME " " R64 ", {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"                          \
                         : ACC16(d, 0), ACC16(d, 4), ACC16(d, 8), ACC16(d, 12) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                           \
        }                                                                                                                                                      \
        static __device__ __forceinline__ void nn(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b) {                                                      \
            asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." NAME "." NAME " " R32 ", {%32,%33,%34,%35}, %36, 1, 1, 1, 1;"                           \
                         : ACC16(d, 0), ACC16(d, 4) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                      \
        }                                                                                                                                                      \
    }
WGMMA(bf16, "bf16");
WGMMA(half_t, "f16");
__device__ __forceinline__ void turn_wait(int id) { asm volatile("bar.sync %0, 256;" ::"r"(id) : "memory"); }
__device__ __forceinline__ void turn_give(int id) { asm volatile("bar.arrive %0, 256;" ::"r"(id) : "memory"); }
#endif

// Which tile a block takes: sections of heads whose memory fits into the L2 cache together; within each the last tiles first, or the first
struct Work { int i0, b, h; };
template <bool LAST_FIRST> __device__ __forceinline__ Work work_of(int n, int B, int H, int section, int tiles, int rows) {
    const int per = section * tiles, s = n / per, r = n % per, heads = min(section, B * H - s * section), bh = s * section + r % heads, tile = r / heads;
    return {(LAST_FIRST ? tiles - 1 - tile : tile) * rows, bh / H, bh % H};
}

// D: columns in shared memory, 64 or 128; W: columns that are multiplied, the head's size rounded up to 32, 64, 96 or 128
// A block's first tile is the one with its number; from there on `next` counts the tiles taken: a block that is done sooner takes more. Who takes which is of no account to the result.
template <class T, int D, int W, int BN, int WGS> __global__ void __launch_bounds__((WGS + 1) * 128, 1)
    forward_sm90(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k, const __grid_constant__ CUtensorMap map_v, const Flash f, int section, int* next) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    constexpr int BM = 64 * WGS, NT = BN / 8, SLABS = D / 64, STAGES = PLACES<D>, TILE = BN * D * 2, OWN = BM * D * 2;
    extern __shared__ char raw[];
    __shared__ uint64_t bars[4 + 4 * STAGES];
    __shared__ int4 item[2]; // whose queries lie in either place for Q: first query, row of the batch, head; last 0: there are no more
    const uint32_t q = (__cvta_generic_to_shared(raw) + 1023) & ~1023, k = q + 2 * OWN, v = k + STAGES * TILE;
    const uint32_t bar = __cvta_generic_to_shared(bars), q_full = bar, q_free = bar + 16, k_full = bar + 32, k_free = k_full + 8 * STAGES, v_full = k_free + 8 * STAGES, v_free = v_full + 8 * STAGES;
    const int wg = __shfl_sync(~0u, threadIdx.x / 128, 0), lane = threadIdx.x % 32, tiles = tiles_of(f.T, BM), all = tiles * f.B * f.H; // wg: known to be one for a warp
    if (threadIdx.x == 0) {
        for (int s = 0; s < 2; s++) mbar_init(q_full + 8 * s, 1), mbar_init(q_free + 8 * s, WGS * 128); // every thread that reads `item` arrives
        for (int s = 0; s < STAGES; s++) mbar_init(k_full + 8 * s, 1), mbar_init(k_free + 8 * s, WGS * 4), mbar_init(v_full + 8 * s, 1), mbar_init(v_free + 8 * s, WGS * 4);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async;" ::: "memory");
    }
    __syncthreads();
    if (wg == WGS) { // the copier
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(WGS == 2 ? 40 : 32)); // in all what the block was given: 384 times 168, 512 times 128
        if (threadIdx.x == WGS * 128) {
            int step = 0;
            for (int own = 0;; own++) {
                if (own == 1) asm volatile("griddepcontrol.wait;" ::: "memory"); // for `next`
                const int n = own ? atomicAdd(next, 1) : (int)blockIdx.x, at = own & 1;
                const uint32_t full = q_full + 8 * at;
                mbar_wait(q_free + 8 * at, (own >> 1 & 1) ^ 1);
                if (n >= all) {
                    item[at].w = 0;
                    mbar_arrive(full);
                    break;
                }
                const Work w = work_of<true>(n, f.B, f.H, section, tiles, BM);
                item[at] = {w.i0, w.b, w.h, 1};
                const Span t = span_of([&](int i) { return keys_of(f, w.b, i); }, w.i0, BM, f.T, BN);
                if (t.begin >= t.end) {
                    mbar_arrive(full);
                    continue;
                }
                const int hk = w.h / f.group;
                mbar_expect(full, OWN);
                for (int s = 0; s < SLABS; s++) tma_load(q + at * OWN + s * BM * 128, &map_q, full, s * 64, w.i0, w.h, w.b);
                for (int jt = t.begin; jt < t.end; jt++, step++) {
                    const int at = step % STAGES, parity = (step / STAGES & 1) ^ 1;
                    mbar_wait(k_free + 8 * at, parity);
                    mbar_expect(k_full + 8 * at, TILE);
                    for (int s = 0; s < SLABS; s++) tma_load(k + at * TILE + s * BN * 128, &map_k, k_full + 8 * at, s * 64, jt * BN, hk, w.b);
                    mbar_wait(v_free + 8 * at, parity);
                    mbar_expect(v_full + 8 * at, TILE);
                    for (int s = 0; s < SLABS; s++) tma_load(v + at * TILE + s * BN * 128, &map_v, v_full + 8 * at, s * 64, jt * BN, hk, w.b);
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(WGS == 2 ? 232 : 160));
        const int row0 = wg * 64 + threadIdx.x % 128 / 32 * 16;
        const int my_turn = 1 + wg, next_turn = 1 + (wg + 1) % WGS;
        float o[1][W / 8][4] = {}, m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0}, shrink[2];
        uint32_t p[NT / 2][4];
        Work w;
        Span t;
        int own = -1, step = 0; // which tile of queries, how many K and V tiles used up
        int last = 0; // one past the last key that any query of this warpgroup sees
        auto lse_at = [&](const Work& w, int y) { return f.lse + ((int64_t)w.b * f.H + w.h) * f.T + w.i0 + row0 + 8 * y + lane / 4; };
        auto next_tile = [&] { // in which anything is seen; of the others the output is zero
            for (;;) {
                own++;
                mbar_wait(q_full + 8 * (own & 1), own >> 1 & 1);
                const int4 x = item[own & 1];
                if (!x.w) return false;
                w = {x.x, x.y, x.z};
                t = span_of([&](int i) { return keys_of(f, w.b, i); }, w.i0, BM, f.T, BN);
                last = keys_of(f, w.b, min(w.i0 + wg * 64 + 63, f.T - 1)).hi;
                if (t.begin < t.end) return true;
                mbar_arrive(q_free + 8 * (own & 1));
                const float none[1][W / 8][4] = {}, by[1][2] = {};
                store<T, W, 1>(f.o.at<T>(w.b, w.h), f.o.n, w.i0 + row0, f.T, f.D, none, by, lane);
                for (int y = 0; y < 2; y++)
                    if (lane % 4 == 0 && w.i0 + row0 + 8 * y + lane / 4 < f.T) *lse_at(w, y) = -INFINITY;
            }
        };
        auto scores = [&](auto& s, int at) { // with as many of a tile's keys, 64 or 128, as s has room for
            const uint32_t my_q = q + (own & 1) * OWN + wg * 64 * 128;
            pin(s);
            wgmma_fence();
#pragma unroll
            for (int d = 0; d < W / 16; d++)
                Wgmma<T>::nt(s, matrix(my_q, d / 4 * BM * 128 + d % 4 * 32, 16), matrix(k + at * TILE, d / 4 * BN * 128 + d % 4 * 32, 16), d != 0);
            wgmma_commit();
        };
        auto add_values = [&](int at) {
            pin(o[0]);
            wgmma_fence();
#pragma unroll
            for (int d = 0; d < BN / 16; d++) Wgmma<T>::nn(o[0], p[d], matrix(v + at * TILE, d * 16 * 128, BN * 128));
            wgmma_commit();
        };
        auto softmax = [&](auto& s, int j0) {
            constexpr int N = sizeof(s) / 16;
            const bool mask = t.all_lo > j0 || t.all_hi < j0 + BN;
            auto mask_row = [&](int y) {
                const int i = w.i0 + row0 + 8 * y + lane / 4, j = j0 + lane % 4 * 2;
                const Run seen = i < f.T ? keys_of(f, w.b, i) : Run{0, 0};
#pragma unroll
                for (int x = 0; x < N; x++)
#pragma unroll
                    for (int e = 0; e < 2; e++)
                        if (x * 8 + e < seen.lo - j || x * 8 + e >= seen.hi - j) s[x][2 * y + e] = -INFINITY;
            };
            // The wait for o that follows is moved up by ptxas, to the last branch it finds here. At 128 half of the exponentials before it are faster, at 64 none.
            constexpr bool by_row = D == 128;
            if (!by_row && mask) mask_row(0), mask_row(1);
#pragma unroll
            for (int y = 0; y < 2; y++) {
                if (by_row && mask) mask_row(y);
                float top = m[y];
#pragma unroll
                for (int x = 0; x < N; x++) top = fmaxf(top, fmaxf(s[x][2 * y], s[x][2 * y + 1]));
                top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
                top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
                const float base = top == -INFINITY ? 0.f : top * f.scale_log2;
                shrink[y] = exp2_fast(m[y] * f.scale_log2 - base);
                float sum = 0;
#pragma unroll
                for (int x = 0; x < N; x++)
#pragma unroll
                    for (int e = 0; e < 2; e++) sum += s[x][2 * y + e] = exp2_fast(fmaf(s[x][2 * y + e], f.scale_log2, -base));
                m[y] = top, l[y] = l[y] * shrink[y] + sum;
            }
        };
        auto round = [&](const auto& s) { // what is not in s has no weight
            constexpr int N = sizeof(s) / 16;
#pragma unroll
            for (int d = 0; d < NT / 2; d++)
#pragma unroll
                for (int i = 0; i < 4; i++) p[d][i] = d < N / 2 ? pack<T>(s[2 * d % N + i / 2][i % 2 * 2], s[2 * d % N + i / 2][i % 2 * 2 + 1]) : 0;
        };
        auto end_rows = [&](float (&by)[1][2], const Work& w) { // lse, and what the rows of o are divided by
#pragma unroll
            for (int y = 0; y < 2; y++) {
                const float sum = lane_sum(l[y], 4);
                by[0][y] = sum > 0 ? 1 / sum : 0;
                if (lane % 4 == 0 && w.i0 + row0 + 8 * y + lane / 4 < f.T) *lse_at(w, y) = sum > 0 ? m[y] * f.scale + __logf(sum) : -INFINITY;
                m[y] = -INFINITY, l[y] = 0;
            }
        };
        auto go_on = [&](auto& s, int j0, auto settle) { // asks for the scores of the next K, adds this V
            const int at = step % STAGES, next = (step + 1) % STAGES;
            mbar_wait(k_full + 8 * next, (step + 1) / STAGES & 1);
            turn_wait(my_turn);
            scores(s, next);
            mbar_wait(v_full + 8 * at, step / STAGES & 1);
            add_values(at);
            turn_give(next_turn);
            wgmma_wait<1>();
            pin(s);
            if (lane == 0) mbar_arrive(k_free + 8 * next);
            softmax(s, j0);
            wgmma_wait<0>();
            pin(o[0]), pin(p);
            if (lane == 0) mbar_arrive(v_free + 8 * at);
            settle();
            round(s);
            step++;
        };
        auto write = [&](const Work& w, const float (&by)[1][2]) { store<T, W, 1>(f.o.at<T>(w.b, w.h), f.o.n, w.i0 + row0, f.T, f.D, o, by, lane); };
        if (wg == WGS - 1) turn_give(1);
        if (next_tile()) {
            float s[NT][4];
            mbar_wait(k_full, 0);
            scores(s, 0);
            wgmma_wait<0>();
            pin(s);
            if (lane == 0) mbar_arrive(k_free);
            softmax(s, t.begin * BN);
            round(s);
            float by[1][2];
            for (;;) {
                auto rescale = [&] {
#pragma unroll
                    for (int x = 0; x < W / 8; x++)
#pragma unroll
                        for (int e = 0; e < 4; e++) o[0][x][e] *= shrink[e / 2];
                };
                const int half = last <= t.end * BN - 64 && t.end - t.begin > 1; // of the last tile's keys this warpgroup sees none behind the first 64
                for (int jt = t.begin + 1; jt < t.end - half; jt++) {
                    float s[NT][4];
                    go_on(s, jt * BN, rescale);
                }
                if (half) {
                    float s[NT / 2][4];
                    go_on(s, (t.end - 1) * BN, rescale);
                }
                mbar_arrive(q_free + 8 * (own & 1));
                end_rows(by, w);
                const Work was = w;
                if (!next_tile()) {
                    w = was;
                    break;
                }
                float s[NT][4];
                go_on(s, t.begin * BN, [&] { // the first scores of these queries under the last values of those
                    write(was, by);
#pragma unroll
                    for (int x = 0; x < W / 8; x++)
#pragma unroll
                        for (int e = 0; e < 4; e++) o[0][x][e] = 0;
                });
            }
            mbar_wait(v_full + 8 * (step % STAGES), step / STAGES & 1);
            add_values(step % STAGES);
            wgmma_wait<0>();
            pin(o[0]), pin(p);
            write(w, by);
        }
    }
#else
    __trap(); // not code for this card: better to stop than to leave memory as it was
#endif
}
// Sets the forward's counter, which comes in beside it
static __global__ void start_kernel(int* next, int n) { done(), *next = n; }

// The backward in one pass: five products. A block owns 128 keys and walks over tiles of BN queries, for all heads of the group, for dk and dv. dq needs ds of both warpgroups: ds goes
// through shared memory, the product for dq comes a step late, when the other's ds has long been written, and two more warps beside the copier add its parts to memory.
//   s = k q^T   p = exp(s - lse)   dv += p g   dp = v g^T   ds = p (dp - delta)   dk += ds q   dq += ds^T k
// Every tile of dq is added up in one order, keys ascending; `turn` says whose turn it is. Blocks take the owners of keys in that order, too, the first keys (with a causal mask the heaviest)
// of a section of heads first, and walk from the last queries up. So nobody waits for a block that has not begun, and seldom for one that has; and dq comes back to the L2 cache seldom.
constexpr int FIRST = 1 << 30, NOBODY = (int)0x80000000; // in `turn`: nothing has been added yet; nobody sees this tile
template <class T, int D, int W> __global__ void __launch_bounds__(384, 1)
    backward_one_sm90(const __grid_constant__ CUtensorMap map_k, const __grid_constant__ CUtensorMap map_v, const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_g,
                      const Flash f, const float2* stats, int padded, float* acc, int* turn, int* next, int section) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    using C = One<D, W>;
    constexpr int BM = C::BM, BN = C::BN, NT = BN / 8, SLABS = D / 64, STAGES = C::STAGES, OWN = C::OWN, TILE = C::TILE, DS = C::DS, PART = C::PART, DQ = C::DQ;
    extern __shared__ __align__(1024) char whole[];
    int2* part = (int2*)(whole + C::TILES + STAGES * BN * 8); // of a part of dq, which tile of queries and which of keys; last, what the block works at
    int* item = (int*)(part + 2);
    const uint32_t k = __cvta_generic_to_shared(whole), columns = k + C::TILES, v = k + OWN, q = v + OWN, g = q + STAGES * TILE, dss = g + STAGES * TILE, dqs = dss + 2 * DS;
    const uint32_t bar = columns + STAGES * BN * 8 + 24, own_full = bar, own_free = bar + 8, q_full = bar + 16, g_full = q_full + 8 * STAGES, x_free = g_full + 8 * STAGES, ds_full = x_free + 8 * STAGES,
                   dq_full = ds_full + 16, dq_free = dq_full + 16;
    const int wg = threadIdx.x / 128, lane = threadIdx.x % 32, tiles = tiles_of(f.S, BM), all = tiles * f.B * f.Hkv, q_tiles = padded / BN;
    if (threadIdx.x == 0) {
        mbar_init(own_full, 1), mbar_init(own_free, 256); // every thread that reads arrives: racecheck follows threads, not warps
        for (int s = 0; s < STAGES; s++) mbar_init(q_full + 8 * s, 1), mbar_init(g_full + 8 * s, 1), mbar_init(x_free + 8 * s, 256);
        for (int s = 0; s < 2; s++) mbar_init(ds_full + 8 * s, 8), mbar_init(dq_full + 8 * s, 8), mbar_init(dq_free + 8 * s, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async;" ::: "memory");
    }
    __syncthreads();
    if (wg == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(D == 64 ? 24 : 40)); // in all what the block was given: 384 times 168
        const int me = threadIdx.x / 32 - 9;
        if (threadIdx.x == 256) { // copies in
            int step = 0;
            for (int pick = 0;; pick++) {
                const int n = atomicAdd(next, 1);
                mbar_wait(own_free, (pick & 1) ^ 1);
                *item = n;
                if (n >= all) break;
                const Work w = work_of<false>(n, f.B, f.Hkv, section, tiles, BM);
                const Span t = span_of([&](int r) { return queries_of(f, w.b, r); }, w.i0, BM, f.S, BN);
                mbar_expect(own_full, 2 * OWN);
                for (int s = 0; s < SLABS; s++) tma_load(k + s * BM * 128, &map_k, own_full, s * 64, w.i0, w.h, w.b), tma_load(v + s * BM * 128, &map_v, own_full, s * 64, w.i0, w.h, w.b);
#pragma unroll 1
                for (int jt = t.end - 1; jt >= t.begin; jt--)
#pragma unroll 1
                    for (int h = w.h * f.group; h < (w.h + 1) * f.group; h++, step++) {
                        const int at = step % STAGES;
                        mbar_wait(x_free + 8 * at, (step / STAGES & 1) ^ 1);
                        mbar_expect(q_full + 8 * at, TILE + BN * 8);
                        for (int s = 0; s < SLABS; s++) tma_load(q + at * TILE + s * BN * 128, &map_q, q_full + 8 * at, s * 64, jt * BN, h, w.b);
                        bulk_load(columns + at * BN * 8, stats + ((int64_t)w.b * f.H + h) * padded + jt * BN, q_full + 8 * at, BN * 8);
                        mbar_expect(g_full + 8 * at, TILE);
                        for (int s = 0; s < SLABS; s++) tma_load(g + at * TILE + s * BN * 128, &map_g, g_full + 8 * at, s * 64, jt * BN, h, w.b);
                    }
            }
            mbar_arrive(own_full);
        } else if (lane == 0 && me >= 0 && me < 2) { // adds the even, or the odd parts of dq
            for (int n = 0;; n ^= 1) {
                mbar_wait(dq_full + 8 * me, n);
                const int tile = part[me].x, mine = part[me].y;
                if (tile < 0) break;
                int now;
                do {
                    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(now) : "l"(turn + tile) : "memory");
                } while ((now & ~FIRST) != mine);
                asm volatile("fence.proxy.async;" ::: "memory");
                float* to = acc + (int64_t)tile * (PART / 4);
                if (now & FIRST) asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(dqs + me * PART), "n"(PART) : "memory");
                else asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(dqs + me * PART), "n"(PART) : "memory");
                asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
                mbar_arrive(dq_free + 8 * me);
                asm volatile("cp.async.bulk.wait_group 0;\nfence.proxy.async;" ::: "memory");
                asm volatile("fence.acq_rel.gpu;\nst.release.gpu.global.b32 [%0], %1;" ::"l"(turn + tile), "r"(mine + 1) : "memory");
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(D == 64 ? 240 : 232));
        const int row0 = wg * 64 + threadIdx.x % 128 / 32 * 16;
        // this warpgroup's part of a tile of dq: 64 queries by 64 columns
        const uint32_t dq_a = dss + (D == 64 ? wg * BM * 128 : 0), dq_b = k + (D == 64 ? 0 : wg * BM * 128);
        int step = 0;
        for (int pick = 0;; pick++) {
            mbar_wait(own_full, pick & 1);
            const int n = *item;
            if (n >= all) break;
            const Work w = work_of<false>(n, f.B, f.Hkv, section, tiles, BM);
            const Span t = span_of([&](int r) { return queries_of(f, w.b, r); }, w.i0, BM, f.S, BN);
            float dk[1][W / 8][4] = {}, dv[1][W / 8][4] = {};
            uint32_t p[NT / 2][4], ds[NT / 2][4];
            auto product = [&](auto& to, uint32_t own, uint32_t x) {
                pin(to);
                asm volatile("" : "+r"(own)); // or else all its addresses wait in registers
                wgmma_fence();
#pragma unroll
                for (int d = 0; d < W / 16; d++) Wgmma<T>::nt(to, matrix(own + wg * 64 * 128 + d / 4 * BM * 128 + d % 4 * 32, 16), matrix(x + d / 4 * BN * 128 + d % 4 * 32, 16), d != 0);
                wgmma_commit();
            };
            auto add = [&](float (&to)[W / 8][4], const auto& a, uint32_t x) {
                pin(to);
                wgmma_fence();
#pragma unroll
                for (int d = 0; d < (int)(sizeof(a) / 16); d++) Wgmma<T>::nn(to, a[d], matrix(x + d * 16 * 128, BN * 128));
                wgmma_commit();
            };
            auto round = [&](auto& to, const auto& s) {
#pragma unroll
                for (int d = 0; d < (int)(sizeof(to) / 16); d++)
#pragma unroll
                    for (int i = 0; i < 4; i++) to[d][i] = pack<T>(s[2 * d + i / 2][i % 2 * 2], s[2 * d + i / 2][i % 2 * 2 + 1]);
            };
            auto dq_product = [&](float (&dq)[DQ / 8][4], int step) { // of the tile of step `step`
                mbar_wait(ds_full + 8 * (step & 1), step >> 1 & 1);
                pin(dq);
                uint32_t b = dq_b;
                asm volatile("" : "+r"(b));
                wgmma_fence();
#pragma unroll
                for (int d = 0; d < BM / 16; d++) Wgmma<T>::tt(dq, matrix(dq_a + (step & 1) * DS + d * 16 * 128, 16), matrix(b + d * 16 * 128, 16), d != 0);
                wgmma_commit();
            };
            auto hand_over_dq = [&](const float (&dq)[DQ / 8][4], int step, int head, int jt) { // to the warp that adds it
                mbar_wait(dq_free + 8 * (step & 1), (step >> 1 & 1) ^ 1);
                const uint32_t to = dqs + (step & 1) * PART + (wg * (DQ / 8) * 128 + threadIdx.x % 128) * 16;
#pragma unroll
                for (int x = 0; x < DQ / 8; x++) asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to + x * 2048), "f"(dq[x][0]), "f"(dq[x][1]), "f"(dq[x][2]), "f"(dq[x][3]) : "memory");
                asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                __syncwarp();
                if (threadIdx.x == 0) part[step & 1] = {(w.b * f.H + w.h * f.group + head) * q_tiles + jt, w.i0 / BM};
                if (lane == 0) mbar_arrive(dq_full + 8 * (step & 1));
            };
            const int total = max(t.end - t.begin, 0) * f.group;
            int jt = t.end - 1, head = 0;
            // One step. `first` of this block of keys: no step before it has left a dq to be made. `late`: the first 64 queries of the tile see none of this warpgroup's keys, so it works at the others
            // only; where a tile is of 64, it rests. At 128 half of a tile gains nothing, so there no step is late.
            auto walk = [&](auto first_, auto late_, auto& p, auto& ds) {
                constexpr bool first = decltype(first_)::value;
                constexpr int SKIP = decltype(late_)::value ? 64 : 0, N = (BN - SKIP) / 8;
                const int at = step % STAGES, parity = step / STAGES & 1, c0 = jt * BN + SKIP;
                const uint32_t column = columns + (at * BN + SKIP) * 8 + lane % 4 * 16; // lse in units of log 2, and delta, of each query
                const uint32_t my_q = q + at * TILE + SKIP * 128, my_g = g + at * TILE + SKIP * 128, to = dss + (step & 1) * DS;
                float s[N ? N : 1][4], dp[N ? N : 1][4], dq[DQ / 8][4];
                mbar_wait(q_full + 8 * at, parity);
                if constexpr (N > 0) product(s, k, my_q);
                if constexpr (!first) {
                    // what the last step added to dk is in; its tiles and the registers of its p and ds are free
                    dq_product(dq, step - 1);
                }
                bool mask = false;
                if constexpr (N > 0) {
                    wgmma_wait<first ? 0 : 1>();
                    pin(s);
                    mask = SKIP || t.all_lo > c0 || t.all_hi < c0 + BN;
#pragma unroll
                    for (int x = 0; x < N; x++) {
                        const float4 c = shared4(column + x * 64);
#pragma unroll
                        for (int e = 0; e < 4; e++) s[x][e] = exp2_fast(fmaf(s[x][e], f.scale_log2, -(e % 2 ? c.z : c.x)));
                    }
                }
                if constexpr (!first) {
                    wgmma_wait<0>();
                    pin(dq);
                    hand_over_dq(dq, step - 1, head ? head - 1 : f.group - 1, head ? jt : jt + 1);
                }
                if constexpr (N > 0) {
                    if (mask)
#pragma unroll
                        for (int y = 0; y < 2; y++) {
                            const int r = w.i0 + row0 + 8 * y + lane / 4, c = c0 + lane % 4 * 2;
                            const Run seen = r < f.S ? queries_of(f, w.b, r) : Run{0, 0};
#pragma unroll
                            for (int x = 0; x < N; x++)
#pragma unroll
                                for (int e = 0; e < 2; e++)
                                    if (x * 8 + e < seen.lo - c || x * 8 + e >= seen.hi - c) s[x][2 * y + e] = 0;
                        }
                }
                mbar_wait(g_full + 8 * at, parity);
                if constexpr (N > 0) {
                    product(dp, v, my_g);
                    round(p, s);
                    add(dv[0], p, my_g);
                    wgmma_wait<1>();
                    pin(dp);
#pragma unroll
                    for (int x = 0; x < N; x++) {
                        const float4 c = shared4(column + x * 64);
#pragma unroll
                        for (int e = 0; e < 4; e++) s[x][e] *= dp[x][e] - (e % 2 ? c.w : c.y);
                    }
                    round(ds, s);
                }
#pragma unroll
                for (int y = 0; y < 2; y++)
#pragma unroll
                    for (int x = 0; x < NT; x++) { // rows of keys, 64 queries wide, under the swizzle
                        const int r = row0 + 8 * y + lane / 4, own = x - SKIP / 8;
                        asm volatile("st.shared.b32 [%0], %1;" ::"r"(((to + r * 128 + ((r & 7) << 4) + lane % 4 * 4) ^ (x % 8 << 4)) + x / 8 * BM * 128), "r"(own < 0 ? 0 : ds[own / 2][own % 2 * 2 + y]) : "memory");
                    }
                asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                __syncwarp();
                if (lane == 0) mbar_arrive(ds_full + 8 * (step & 1));
                if constexpr (N > 0) {
                    add(dk[0], ds, my_q);
                    wgmma_wait<0>();
                    pin(dk[0]), pin(dv[0]), pin(p), pin(ds);
                }
                mbar_arrive(x_free + 8 * at);
                step++;
                if (++head == f.group) head = 0, jt--;
            };
            if (total) {
                const std::true_type yes{};
                const std::false_type no{};
                if constexpr (BN > 64) {
                    walk(yes, no, p, ds);
                    for (int left = total - 1; left; left--) walk(no, no, p, ds);
                } else {
                    const int key = w.i0 + wg * 64, late = key < f.S ? tiles_of(queries_of(f, w.b, key).lo / 64, BN / 64) : t.end; // tiles before this one are late
                    walk(yes, no, p, ds);
                    for (int left = min(total, (t.end - late) * f.group) - 1; left > 0; left--) walk(no, no, p, ds);
                    uint32_t p2[1][4], ds2[1][4]; // a step that rests has no use for them, but to give it p and ds would cost registers
                    int i0 = w.i0;
                    asm volatile("" : "+r"(i0)); // or else the end of the loop would wait in a register
                    for (const int begin = queries_of(f, w.b, i0).lo / BN; jt >= begin;) walk(no, yes, p2, ds2);
                }
                float dq[DQ / 8][4];
                dq_product(dq, step - 1);
                wgmma_wait<0>();
                pin(dk[0]), pin(dv[0]), pin(p), pin(ds), pin(dq);
                mbar_arrive(own_free);
                hand_over_dq(dq, step - 1, head ? head - 1 : f.group - 1, head ? jt : jt + 1);
            } else mbar_arrive(own_free);
            const float by[1][2] = {{f.scale, f.scale}}, one[1][2] = {{1, 1}};
            store<T, W, 1>(f.dk.at<T>(w.b, w.h), f.dk.n, w.i0 + row0, f.S, f.D, dk, by, lane);
            store<T, W, 1>(f.dv.at<T>(w.b, w.h), f.dv.n, w.i0 + row0, f.S, f.D, dv, one, lane);
        }
        for (int n = 0; n < 2; n++, step++) { // no more dq
            mbar_wait(dq_free + 8 * (step & 1), (step >> 1 & 1) ^ 1);
            if (threadIdx.x == 0) part[step & 1] = {-1, 0};
            if (lane == 0) mbar_arrive(dq_full + 8 * (step & 1));
        }
    }
#else
    __trap();
#endif
}
// dq from `acc`: one block for each tile, threads as above
template <class T, int D, int W> __global__ void __launch_bounds__(256) round_dq(const Flash f, const float* acc, const int* turn, int q_tiles) {
    constexpr int DQ = One<D, W>::DQ;
    const int jt = blockIdx.x % q_tiles, bh = blockIdx.x / q_tiles, b = bh / f.H, wg = threadIdx.x / 128, lane = threadIdx.x % 32;
    const bool any = turn[blockIdx.x] != NOBODY;
    const float4* x = (const float4*)(acc + (int64_t)blockIdx.x * (128 * DQ)) + wg * (DQ / 8) * 128 + threadIdx.x % 128;
    float dq[1][DQ / 8][4];
#pragma unroll
    for (int n = 0; n < DQ / 8; n++) {
        const float4 y = any ? x[n * 128] : float4{};
        dq[0][n][0] = y.x, dq[0][n][1] = y.y, dq[0][n][2] = y.z, dq[0][n][3] = y.w;
    }
    const float by[1][2] = {{f.scale, f.scale}};
    const int col = D == 64 ? 0 : wg * 64;
    store<T, DQ, 1>(f.dq.at<T>(b, bh % f.H) + col, f.dq.n, jt * One<D, W>::BN + (D == 64 ? wg * 64 : 0) + threadIdx.x % 128 / 32 * 16, f.T, f.D - col, dq, by, lane);
}
// For each query lse in units of log 2, and delta = sum over d of g * o, less g_lse; rows of `padded` queries, zeros at the end. 16 bytes a thread, `lanes` threads a query.
// For each tile of BN queries, whose turn it is to add to dq: the first tile of BM keys that walks over it.
// A block keeps to one head, so that no thread divides; `blocks` to a head.
template <class T, int BM, int BN> __global__ void __launch_bounds__(256) stats_kernel(const Flash f, float2* stats, int* turn, int* next, int padded, int lanes, int blocks) {
    const int lane = threadIdx.x % lanes, bh = blockIdx.x / blocks, b = bh / f.H, h = bh % f.H, t = blockIdx.x % blocks * (256 / lanes) + threadIdx.x / lanes;
    if (blockIdx.x == 0 && threadIdx.x == 0) *next = 0;
    float s = 0;
    if (t < f.T && lane * 8 < f.D) {
        const auto g = Vec<T, 8>::load(f.g.at<const T>(b, h) + t * f.g.n + lane * 8), o = Vec<T, 8>::load(f.o.at<const T>(b, h) + t * f.o.n + lane * 8);
#pragma unroll
        for (int i = 0; i < 8; i++) s = fmaf(g[i], o[i], s);
    }
    s = lane_sum(s, lanes);
    if (lane || t >= padded) return;
    const int64_t row = (int64_t)bh * f.T + t;
    stats[(int64_t)bh * padded + t] = t < f.T ? float2{f.lse[row] * LOG2E, s - (f.g_lse ? f.g_lse[row] : 0.f)} : float2{};
    if (t % BN) return;
    const int jt = t / BN;
    int first = -1, end = tiles_of(f.S, BM); // last queries ascend with the keys
    while (end - first > 1) {
        const int mid = (first + end) / 2;
        if (tiles_of(queries_of(f, b, min(mid * BM + BM, f.S) - 1).hi, BN) <= jt) first = mid; else end = mid;
    }
    turn[(int64_t)bh * (padded / BN) + jt] = end < tiles_of(f.S, BM) && queries_of(f, b, end * BM).lo / BN <= jt ? end | FIRST : NOBODY;
}

// --- host: tensor maps, and what takes this path
inline PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
    static const auto encode = [] {
        void* f = nullptr;
        cudaDriverEntryPointQueryResult found;
        if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found) != cudaSuccess || found != cudaDriverEntryPointSuccess) f = nullptr;
        return (PFN_cuTensorMapEncodeTiled_v12000)f;
    }();
    return encode;
}
// [B, H, N, D] as boxes of 64 columns by `rows` rows; false if TMA cannot read it
template <class T> bool tensor_map(CUtensorMap& map, const Rows& x, int B, int H, int N, int D, int rows) {
    const cuuint64_t dims[4] = {(cuuint64_t)D, (cuuint64_t)N, (cuuint64_t)H, (cuuint64_t)B};
    const int64_t strides[3] = {x.n, x.h, x.b};
    cuuint64_t bytes[3];
    for (int i = 0; i < 3; i++) {
        const int64_t s = dims[i + 1] == 1 ? ceil_div(D, 8) * 8 : strides[i];
        if (s <= 0) return false;
        bytes[i] = s * 2;
    }
    const cuuint32_t box[4] = {64, (cuuint32_t)rows, 1, 1}, one[4] = {1, 1, 1, 1};
    const CUtensorMapDataType type = std::is_same_v<T, bf16> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    return tensor_map_encoder()(&map, type, 4, x.p, dims, bytes, box, one, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}
static inline bool is_sm90() { return is_hopper((const void*)forward_sm90<bf16, HOPPER, HEAD_DIM, 128, 2>); }
// Can this thread make tensor maps for a Hopper card? The encoder is of the driver's API and answers CUDA_ERROR_INVALID_CONTEXT on a thread that no runtime call has given a context yet,
// as autograd's is at its first backward when the allocator has memory left; cudaSetDevice gives it the device's own.
inline bool on_hopper() {
    int dev;
    return is_sm90() && cudaGetDevice(&dev) == cudaSuccess && cudaSetDevice(dev) == cudaSuccess && tensor_map_encoder();
}
// False: not here, take the other kernel
template <class T, int D, int W, int BN, int WGS> bool forward_sm90_run(const Flash& f, int* next, cudaStream_t s) {
    if (!f.S || !on_hopper()) return false;
    CUtensorMap q, k, v;
    if (!tensor_map<T>(q, f.q, f.B, f.H, f.T, f.D, 64 * WGS) || !tensor_map<T>(k, f.k, f.B, f.Hkv, f.S, f.D, BN) || !tensor_map<T>(v, f.v, f.B, f.Hkv, f.S, f.D, BN)) return false;
    auto* kernel = forward_sm90<T, D, W, BN, WGS>;
    constexpr int bytes = forward_sm90_bytes<D>(WGS);
    static_assert(BN == 128);
    allow_smem((const void*)kernel, bytes);
    const int heads = f.B * f.H, fit = (int)std::min<int64_t>(heads, std::max<int64_t>(1, (32 << 20) / ((int64_t)f.S * D * 4)) * f.group); // 32 MiB of keys and values at a time
    const int blocks = std::min(sm_count(), heads * tiles_of(f.T, 64 * WGS));
    start_kernel<<<1, 1, 0, s>>>(next, blocks);
    launch_after(kernel, blocks, (WGS + 1) * 128, bytes, s, q, k, v, f, fit, next);
    return true;
}
inline int padded_queries(int T, int D) { return tiles_of(T, 8192 / D) * (8192 / D); }
template <int D, int W> int64_t backward_sm90_scratch(const Flash& f) { // in floats: two numbers and dq for each query; turns; one more counter
    const int64_t rows = (int64_t)f.B * f.H * padded_queries(f.T, D), tiles = rows * D / 8192;
    return rows * 2 + tiles * (One<D, W>::PART / 4 + 1) + 1;
}
template <class T, int D, int W> bool backward_sm90_run(const Flash& f, float* scratch, cudaStream_t s) {
    if (!f.S || !f.T || !on_hopper()) return false;
    using C = One<D, W>;
    CUtensorMap q, g, k, v;
    if (!tensor_map<T>(q, f.q, f.B, f.H, f.T, f.D, C::BN) || !tensor_map<T>(g, f.g, f.B, f.H, f.T, f.D, C::BN) || !tensor_map<T>(k, f.k, f.B, f.Hkv, f.S, f.D, C::BM) ||
        !tensor_map<T>(v, f.v, f.B, f.Hkv, f.S, f.D, C::BM)) return false;
    const int padded = padded_queries(f.T, D), lanes = pow2_at_least(ceil_div(f.D, 8));
    const int64_t rows = (int64_t)f.B * f.H * padded, tiles = rows * D / 8192;
    float2* stats = (float2*)scratch;
    float* acc = scratch + 2 * rows;
    int *turn = (int*)(acc + tiles * (C::PART / 4)), *next = turn + tiles;
    const int blocks = (int)ceil_div((int64_t)padded * lanes, 256);
    stats_kernel<T, C::BM, C::BN><<<grid_of((int64_t)f.B * f.H * blocks, "flash backward"), 256, 0, s>>>(f, stats, turn, next, padded, lanes, blocks);
    const int heads = f.B * f.Hkv, section = f.S > 4096 ? heads : std::clamp(256 / D * sm_count() / tiles_of(f.S, C::BM), 1, heads); // where rows are short, two owners of keys (four of 64 columns) for each multiprocessor: their queries, g and dq stay in the L2 cache
    auto* one = backward_one_sm90<T, D, W>;
    allow_smem((const void*)one, C::BYTES);
    one<<<std::min(sm_count(), heads * tiles_of(f.S, C::BM)), 384, C::BYTES, s>>>(k, v, q, g, f, stats, padded, acc, turn, next, section);
    round_dq<T, D, W><<<(unsigned)tiles, 256, 0, s>>>(f, acc, turn, padded / C::BN);
    return true;
}
#endif
