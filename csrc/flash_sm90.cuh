// Flash attention on Hopper (sm_90a): one warp copies tiles by TMA, two or three warpgroups of four warps multiply with wgmma straight from shared memory.
// The blocks stay on the chip and take tile after tile, so the copies of the next one run under the last products of this one.
// Each warpgroup asks for the next scores before it adds the last weights times values, and does its softmax while the tensor cores are at that;
// and the warpgroups take turns at issuing, so that one's softmax falls into another's products.
#pragma once
#include "flash.cuh"

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
#define R32 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}"
#define R64 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}"
// d (64 rows by 8 N columns) = or += a b, 16 deep: a in shared memory and b's rows along N; or a in registers and b's rows along the depth
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

// Which tile a block takes: sections of heads whose memory fits into the L2 cache together, heavy tiles first within each
struct Work { int i0, b, h; };
__device__ __forceinline__ Work work_of(int n, int B, int H, int section, int tiles, int rows, bool keys) {
    const int per = section * tiles, s = n / per, r = n % per, heads = min(section, B * H - s * section), bh = s * section + r % heads;
    return {(keys ? r / heads : tiles - 1 - r / heads) * rows, bh / H, bh % H};
}

// What a block takes each time: to and fro over the blocks, so that who got a heavy one before gets a light one now
__device__ __forceinline__ int nth(int pick) { return pick * gridDim.x + (pick & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x); }

template <class T, int D, int BN, int WGS> __global__ void __launch_bounds__((WGS + 1) * 128, 1)
    forward_sm90(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k, const __grid_constant__ CUtensorMap map_v, const Flash f, int section) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    constexpr int BM = 64 * WGS, NT = BN / 8, SLABS = D / 64, STAGES = 2, TILE = BN * D * 2;
    extern __shared__ char raw[];
    __shared__ uint64_t bars[2 + 4 * STAGES];
    const uint32_t q = (__cvta_generic_to_shared(raw) + 1023) & ~1023, k = q + BM * D * 2, v = k + STAGES * TILE;
    const uint32_t bar = __cvta_generic_to_shared(bars), q_full = bar, q_free = bar + 8, k_full = bar + 16, k_free = k_full + 8 * STAGES, v_full = k_free + 8 * STAGES, v_free = v_full + 8 * STAGES;
    const int wg = threadIdx.x / 128, lane = threadIdx.x % 32, tiles = tiles_of(f.T, BM), all = tiles * f.B * f.H;
    if (threadIdx.x == 0) {
        mbar_init(q_full, 1), mbar_init(q_free, WGS * 4);
        for (int s = 0; s < STAGES; s++) mbar_init(k_full + 8 * s, 1), mbar_init(k_free + 8 * s, WGS * 4), mbar_init(v_full + 8 * s, 1), mbar_init(v_free + 8 * s, WGS * 4);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async;" ::: "memory");
    }
    __syncthreads();
    if (wg == WGS) { // the copier
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == WGS * 128) {
            int step = 0;
            for (int pick = 0, n; (n = nth(pick)) < all; pick++) {
                const Work w = work_of(n, f.B, f.H, section, tiles, BM, false);
                const Span t = span_of([&](int i) { return keys_of(f, w.b, i); }, w.i0, BM, f.T, BN);
                const int hk = w.h / f.group;
                mbar_wait(q_free, (pick & 1) ^ 1);
                mbar_expect(q_full, BM * D * 2);
                for (int s = 0; s < SLABS; s++) tma_load(q + s * BM * 128, &map_q, q_full, s * 64, w.i0, w.h, w.b);
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
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(WGS == 2 ? 240 : 160));
        const int row0 = wg * 64 + threadIdx.x % 128 / 32 * 16;
        const uint32_t my_q = q + wg * 64 * 128;
        const int my_turn = 1 + wg, next_turn = 1 + (wg + 1) % WGS;
        int step = 0; // K and V tiles used up
        if (wg == WGS - 1) turn_give(1);
        for (int pick = 0, n; (n = nth(pick)) < all; pick++) {
            const Work w = work_of(n, f.B, f.H, section, tiles, BM, false);
            const Span t = span_of([&](int i) { return keys_of(f, w.b, i); }, w.i0, BM, f.T, BN);
            float o[1][D / 8][4] = {}, s[NT][4], m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0}, shrink[2];
            uint32_t p[NT / 2][4];
            auto scores = [&](int at) {
                pin(s);
                wgmma_fence();
#pragma unroll
                for (int d = 0; d < D / 16; d++)
                    Wgmma<T>::nt(s, matrix(my_q + d / 4 * BM * 128 + d % 4 * 32, 16), matrix(k + at * TILE + d / 4 * BN * 128 + d % 4 * 32, 16), d != 0);
                wgmma_commit();
            };
            auto add_values = [&](int at) {
                pin(o[0]);
                wgmma_fence();
#pragma unroll
                for (int d = 0; d < BN / 16; d++) Wgmma<T>::nn(o[0], p[d], matrix(v + at * TILE + d * 16 * 128, BN * 128));
                wgmma_commit();
            };
            auto softmax = [&](int j0) {
                const bool mask = t.all_lo > j0 || t.all_hi < j0 + BN;
#pragma unroll
                for (int y = 0; y < 2; y++) {
                    if (mask) {
                        const int i = w.i0 + row0 + 8 * y + lane / 4, j = j0 + lane % 4 * 2;
                        const Run seen = i < f.T ? keys_of(f, w.b, i) : Run{0, 0};
#pragma unroll
                        for (int x = 0; x < NT; x++)
#pragma unroll
                            for (int e = 0; e < 2; e++)
                                if (x * 8 + e < seen.lo - j || x * 8 + e >= seen.hi - j) s[x][2 * y + e] = -INFINITY;
                    }
                    float top = m[y];
#pragma unroll
                    for (int x = 0; x < NT; x++) top = fmaxf(top, fmaxf(s[x][2 * y], s[x][2 * y + 1]));
                    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
                    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
                    const float base = top == -INFINITY ? 0.f : top * f.scale_log2;
                    shrink[y] = exp2_fast(m[y] * f.scale_log2 - base);
                    float sum = 0;
#pragma unroll
                    for (int x = 0; x < NT; x++)
#pragma unroll
                        for (int e = 0; e < 2; e++) sum += s[x][2 * y + e] = exp2_fast(fmaf(s[x][2 * y + e], f.scale_log2, -base));
                    m[y] = top, l[y] = l[y] * shrink[y] + sum;
                }
            };
            auto round = [&] {
#pragma unroll
                for (int d = 0; d < NT / 2; d++)
#pragma unroll
                    for (int i = 0; i < 4; i++) p[d][i] = pack<T>(s[2 * d + i / 2][i % 2 * 2], s[2 * d + i / 2][i % 2 * 2 + 1]);
            };
            mbar_wait(q_full, pick & 1);
            if (t.begin < t.end) {
                mbar_wait(k_full + 8 * (step % STAGES), step / STAGES & 1);
                scores(step % STAGES);
                wgmma_wait<0>();
                pin(s);
                if (lane == 0) mbar_arrive(k_free + 8 * (step % STAGES));
                softmax(t.begin * BN);
                round();
                for (int jt = t.begin + 1; jt < t.end; jt++, step++) {
                    const int at = step % STAGES, next = (step + 1) % STAGES;
                    mbar_wait(k_full + 8 * next, (step + 1) / STAGES & 1);
                    turn_wait(my_turn);
                    scores(next);
                    mbar_wait(v_full + 8 * at, step / STAGES & 1);
                    add_values(at);
                    turn_give(next_turn);
                    wgmma_wait<1>();
                    pin(s);
                    if (lane == 0) mbar_arrive(k_free + 8 * next);
                    softmax(jt * BN);
                    wgmma_wait<0>();
                    pin(o[0]), pin(p);
                    if (lane == 0) mbar_arrive(v_free + 8 * at);
#pragma unroll
                    for (int x = 0; x < D / 8; x++)
#pragma unroll
                        for (int e = 0; e < 4; e++) o[0][x][e] *= shrink[e / 2];
                    round();
                }
                if (lane == 0) mbar_arrive(q_free);
                mbar_wait(v_full + 8 * (step % STAGES), step / STAGES & 1);
                add_values(step % STAGES);
                wgmma_wait<0>();
                pin(o[0]), pin(p);
                if (lane == 0) mbar_arrive(v_free + 8 * (step % STAGES));
                step++;
            } else if (lane == 0) mbar_arrive(q_free);
            float by[1][2];
#pragma unroll
            for (int y = 0; y < 2; y++) {
                const float sum = lane_sum(l[y], 4);
                const int i = w.i0 + row0 + 8 * y + lane / 4;
                by[0][y] = sum > 0 ? 1 / sum : 0;
                if (lane % 4 == 0 && i < f.T) f.lse[((int64_t)w.b * f.H + w.h) * f.T + i] = sum > 0 ? m[y] * f.scale + __logf(sum) : -INFINITY;
            }
            store<T, D, 1>(f.o.at<T>(w.b, w.h), f.o.n, w.i0 + row0, f.T, f.D, o, by, lane);
        }
    }
#endif
}

// The backward, twice: the block owns 128 keys and walks over tiles of 64 queries of all heads in the group, for dk and dv; or it owns 128 queries and walks over keys, for dq.
//   s = own1 x1^T   p = exp(s - lse)   d2 += p x2   dp = own2 x2^T   ds = p (dp - delta)   d1 += ds x1          (own1, own2, x1, x2): k, v, q, g or q, g, k, v
// A tile in shared memory is a right factor both ways: its rows along the product's N for s and dp, along its depth for d1 and d2.
template <class T, int D, int BN, bool KEYS> __global__ void __launch_bounds__(384, 1)
    backward_sm90(const __grid_constant__ CUtensorMap map_own1, const __grid_constant__ CUtensorMap map_own2, const __grid_constant__ CUtensorMap map_x1, const __grid_constant__ CUtensorMap map_x2,
                  const Flash f, const float2* stats, int padded, int section) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    constexpr int BM = 128, NT = BN / 8, SLABS = D / 64, STAGES = 2, OWN = BM * D * 2, TILE = BN * D * 2, STATS = KEYS ? BN * 8 : 0;
    extern __shared__ char raw[];
    __shared__ uint64_t bars[2 + 4 * STAGES];
    __shared__ __align__(16) float2 columns[STAGES][KEYS ? BN : 2]; // lse in units of log 2, and delta, of each query of a stage
    const uint32_t own1 = (__cvta_generic_to_shared(raw) + 1023) & ~1023, own2 = own1 + OWN, x1 = own2 + OWN, x2 = x1 + STAGES * TILE;
    const uint32_t bar = __cvta_generic_to_shared(bars), own_full = bar, own_free = bar + 8, x1_full = bar + 16, x2_full = x1_full + 8 * STAGES, x_free = x2_full + 8 * STAGES;
    const int wg = threadIdx.x / 128, lane = threadIdx.x % 32, n_own = KEYS ? f.S : f.T, heads = KEYS ? f.Hkv : f.H, tiles = tiles_of(n_own, BM), all = tiles * f.B * heads;
    if (threadIdx.x == 0) {
        mbar_init(own_full, 1), mbar_init(own_free, 8);
        for (int s = 0; s < STAGES; s++) mbar_init(x1_full + 8 * s, 1), mbar_init(x2_full + 8 * s, 1), mbar_init(x_free + 8 * s, 8);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async;" ::: "memory");
    }
    __syncthreads();
    if (wg == 2) { // the copier
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 256) {
            int step = 0;
            for (int pick = 0, n; (n = nth(pick)) < all; pick++) {
                const Work w = work_of(n, f.B, heads, section, tiles, BM, KEYS);
                const Span t = span_of([&](int r) { return KEYS ? queries_of(f, w.b, r) : keys_of(f, w.b, r); }, w.i0, BM, n_own, BN);
                mbar_wait(own_free, (pick & 1) ^ 1);
                mbar_expect(own_full, 2 * OWN);
                for (int s = 0; s < SLABS; s++) tma_load(own1 + s * BM * 128, &map_own1, own_full, s * 64, w.i0, w.h, w.b), tma_load(own2 + s * BM * 128, &map_own2, own_full, s * 64, w.i0, w.h, w.b);
                for (int g = 0; g < (KEYS ? f.group : 1); g++) {
                    const int hx = KEYS ? w.h * f.group + g : w.h / f.group;
                    for (int jt = t.begin; jt < t.end; jt++, step++) {
                        const int at = step % STAGES;
                        mbar_wait(x_free + 8 * at, (step / STAGES & 1) ^ 1);
                        mbar_expect(x1_full + 8 * at, TILE + STATS);
                        for (int s = 0; s < SLABS; s++) tma_load(x1 + at * TILE + s * BN * 128, &map_x1, x1_full + 8 * at, s * 64, jt * BN, hx, w.b);
                        if (KEYS) bulk_load(__cvta_generic_to_shared(columns[at]), stats + ((int64_t)w.b * f.H + hx) * padded + jt * BN, x1_full + 8 * at, STATS);
                        mbar_expect(x2_full + 8 * at, TILE);
                        for (int s = 0; s < SLABS; s++) tma_load(x2 + at * TILE + s * BN * 128, &map_x2, x2_full + 8 * at, s * 64, jt * BN, hx, w.b);
                    }
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        const int row0 = wg * 64 + threadIdx.x % 128 / 32 * 16;
        int step = 0;
        for (int pick = 0, n; (n = nth(pick)) < all; pick++) {
            const Work w = work_of(n, f.B, heads, section, tiles, BM, KEYS);
            auto run = [&](int r) { return KEYS ? queries_of(f, w.b, r) : keys_of(f, w.b, r); };
            const Span t = span_of(run, w.i0, BM, n_own, BN);
            float d1[1][D / 8][4] = {}, d2[1][KEYS ? D / 8 : 1][4] = {}, s[NT][4], dp[NT][4], lse[2], delta[2];
            uint32_t p[NT / 2][4], ds[NT / 2][4];
            if (!KEYS)
#pragma unroll
                for (int y = 0; y < 2; y++) {
                    const int r = w.i0 + row0 + 8 * y + lane / 4;
                    const float2 a = r < n_own ? stats[((int64_t)w.b * f.H + w.h) * padded + r] : float2{};
                    lse[y] = a.x, delta[y] = a.y;
                }
            auto product = [&](float (&to)[NT][4], uint32_t own, uint32_t x) {
                pin(to);
                wgmma_fence();
#pragma unroll
                for (int d = 0; d < D / 16; d++) Wgmma<T>::nt(to, matrix(own + wg * 64 * 128 + d / 4 * BM * 128 + d % 4 * 32, 16), matrix(x + d / 4 * BN * 128 + d % 4 * 32, 16), d != 0);
                wgmma_commit();
            };
            auto add = [&](float (&to)[D / 8][4], const uint32_t (&a)[NT / 2][4], uint32_t x) {
                pin(to);
                wgmma_fence();
#pragma unroll
                for (int d = 0; d < BN / 16; d++) Wgmma<T>::nn(to, a[d], matrix(x + d * 16 * 128, BN * 128));
                wgmma_commit();
            };
            auto round = [&](uint32_t (&to)[NT / 2][4]) {
#pragma unroll
                for (int d = 0; d < NT / 2; d++)
#pragma unroll
                    for (int i = 0; i < 4; i++) to[d][i] = pack<T>(s[2 * d + i / 2][i % 2 * 2], s[2 * d + i / 2][i % 2 * 2 + 1]);
            };
            mbar_wait(own_full, pick & 1);
            const int total = max(t.end - t.begin, 0) * (KEYS ? f.group : 1);
            int jt = t.begin;
            for (int left = total; left; left--, step++, jt = jt + 1 == t.end ? t.begin : jt + 1) {
                const int at = step % STAGES, parity = step / STAGES & 1, c0 = jt * BN;
                const uint32_t column = __cvta_generic_to_shared(columns[at]) + lane % 4 * 16;
                mbar_wait(x1_full + 8 * at, parity);
                product(s, own1, x1 + at * TILE);
                wgmma_wait<1>(); // what the last tile added is in, and that tile's memory and the registers of its p and ds are free
                pin(d1[0]), pin(d2[0]), pin(p), pin(ds);
                if (left < total && lane == 0) mbar_arrive(x_free + 8 * ((step + 1) % STAGES));
                mbar_wait(x2_full + 8 * at, parity);
                product(dp, own2, x2 + at * TILE);
                wgmma_wait<1>();
                pin(s);
                const bool mask = t.all_lo > c0 || t.all_hi < c0 + BN;
#pragma unroll
                for (int x = 0; x < NT; x++) {
                    const float4 c = KEYS ? shared4(column + x * 64) : float4{};
#pragma unroll
                    for (int e = 0; e < 4; e++) s[x][e] = exp2_fast(fmaf(s[x][e], f.scale_log2, -(KEYS ? e % 2 ? c.z : c.x : lse[e / 2])));
                }
                if (mask)
#pragma unroll
                    for (int y = 0; y < 2; y++) {
                        const int r = w.i0 + row0 + 8 * y + lane / 4, c = c0 + lane % 4 * 2;
                        const Run seen = r < n_own ? run(r) : Run{0, 0};
#pragma unroll
                        for (int x = 0; x < NT; x++)
#pragma unroll
                            for (int e = 0; e < 2; e++)
                                if (x * 8 + e < seen.lo - c || x * 8 + e >= seen.hi - c) s[x][2 * y + e] = 0;
                    }
                if constexpr (KEYS) round(p), add(d2[0], p, x2 + at * TILE);
                wgmma_wait<KEYS ? 1 : 0>();
                pin(dp);
#pragma unroll
                for (int x = 0; x < NT; x++) {
                    const float4 c = KEYS ? shared4(column + x * 64) : float4{};
#pragma unroll
                    for (int e = 0; e < 4; e++) s[x][e] *= dp[x][e] - (KEYS ? e % 2 ? c.w : c.y : delta[e / 2]);
                }
                round(ds);
                add(d1[0], ds, x1 + at * TILE);
            }
            wgmma_wait<0>();
            pin(d1[0]), pin(d2[0]), pin(p), pin(ds);
            if (lane == 0) {
                if (total) mbar_arrive(x_free + 8 * ((step + 1) % STAGES));
                mbar_arrive(own_free);
            }
            const float by[1][2] = {{f.scale, f.scale}}, one[1][2] = {{1, 1}};
            const Rows& to = KEYS ? f.dk : f.dq;
            store<T, D, 1>(to.at<T>(w.b, w.h), to.n, w.i0 + row0, n_own, f.D, d1, by, lane);
            if constexpr (KEYS) store<T, D, 1>(f.dv.at<T>(w.b, w.h), f.dv.n, w.i0 + row0, n_own, f.D, d2, one, lane);
        }
    }
#endif
}
// For each query lse in units of log 2, and delta = sum over d of g * o, less g_lse; rows of `padded` queries, zeros at the end. 16 bytes a thread, `lanes` threads a query.
template <class T> __global__ void stats_kernel(const Flash f, float2* stats, int padded, int lanes) {
    const int64_t row = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / lanes, bh = row / padded;
    const int lane = threadIdx.x % lanes, t = row % padded;
    const bool in = bh < (int64_t)f.B * f.H && t < f.T;
    float s = 0;
    if (in && lane * 8 < f.D) {
        const auto a = Vec<T, 8>::load(f.g.at<const T>(bh / f.H, bh % f.H) + t * f.g.n + lane * 8), b = Vec<T, 8>::load(f.o.at<const T>(bh / f.H, bh % f.H) + t * f.o.n + lane * 8);
#pragma unroll
        for (int i = 0; i < 8; i++) s = fmaf(a[i], b[i], s);
    }
    s = lane_sum(s, lanes);
    if (lane == 0 && bh < (int64_t)f.B * f.H) stats[row] = in ? float2{f.lse[bh * f.T + t] * LOG2E, s - (f.g_lse ? f.g_lse[bh * f.T + t] : 0.f)} : float2{};
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
inline bool is_sm90() {
    int dev, major;
    cudaGetDevice(&dev);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, dev);
    return major == 9;
}
// False: not here, take the other kernel
template <class T, int D, int BN, int WGS> bool forward_sm90_run(const Flash& f, cudaStream_t s) {
    if (!is_sm90() || !tensor_map_encoder() || !f.S) return false;
    CUtensorMap q, k, v;
    if (!tensor_map<T>(q, f.q, f.B, f.H, f.T, f.D, 64 * WGS) || !tensor_map<T>(k, f.k, f.B, f.Hkv, f.S, f.D, BN) || !tensor_map<T>(v, f.v, f.B, f.Hkv, f.S, f.D, BN)) return false;
    auto* kernel = forward_sm90<T, D, BN, WGS>;
    constexpr int bytes = (64 * WGS + 4 * BN) * D * 2 + 1024;
    allow_smem((const void*)kernel, bytes);
    const int heads = f.B * f.H, fit = (int)std::min<int64_t>(heads, std::max<int64_t>(1, (32 << 20) / ((int64_t)f.S * D * 4)) * f.group); // 32 MiB of keys and values at a time
    const int blocks = std::min(sm_count(), heads * tiles_of(f.T, 64 * WGS));
    kernel<<<blocks, (WGS + 1) * 128, bytes, s>>>(q, k, v, f, fit);
    return true;
}
inline int padded_queries(int T) { return tiles_of(T, 64) * 64; }
// `stats` has B * H * padded_queries(T) float2
template <class T, int D> bool backward_sm90_run(const Flash& f, float2* stats, cudaStream_t s) {
    if (!is_sm90() || !tensor_map_encoder() || !f.S || !f.T) return false;
    CUtensorMap q[2], g[2], k[2], v[2]; // boxes of 64 rows, of 128
    for (int i = 0; i < 2; i++)
        if (!tensor_map<T>(q[i], f.q, f.B, f.H, f.T, f.D, 64 << i) || !tensor_map<T>(g[i], f.g, f.B, f.H, f.T, f.D, 64 << i) || !tensor_map<T>(k[i], f.k, f.B, f.Hkv, f.S, f.D, 64 << i) ||
            !tensor_map<T>(v[i], f.v, f.B, f.Hkv, f.S, f.D, 64 << i)) return false;
    const int padded = padded_queries(f.T), lanes = pow2_at_least(ceil_div(f.D, 8));
    stats_kernel<T><<<ceil_div((int64_t)f.B * f.H * padded * lanes, 256), 256, 0, s>>>(f, stats, padded, lanes);
    constexpr int keys_bytes = (2 * 128 + 4 * 64) * D * 2 + 1024, queries_bytes = (2 * 128 + 4 * 128) * D * 2 + 1024;
    const int fit = (int)std::min<int64_t>(f.B * f.H, std::max<int64_t>(1, (32 << 20) / ((int64_t)f.S * D * 4)) * f.group);
    auto* keys = backward_sm90<T, D, 64, true>;
    auto* queries = backward_sm90<T, D, 128, false>;
    allow_smem((const void*)keys, keys_bytes), allow_smem((const void*)queries, queries_bytes);
    const int sms = sm_count();
    keys<<<std::min(sms, f.B * f.Hkv * tiles_of(f.S, 128)), 384, keys_bytes, s>>>(k[1], v[1], q[0], g[0], f, stats, padded, f.B * f.Hkv); // all heads at once: a head has too few tiles to share out
    queries<<<std::min(sms, f.B * f.H * tiles_of(f.T, 128)), 384, queries_bytes, s>>>(q[1], g[1], k[1], v[1], f, stats, padded, fit);
    return true;
}
#endif
