// What the decode kernels share: fresh loads, the rounding of a norm, tensor-core products of 8 rows, attention of one query, launches in a chain.
#pragma once
#include "common.cuh"
#include <algorithm>
#include <cmath>
#include <mutex>

constexpr int THREADS = 256, WARPS = THREADS / 32, CUT = 64; // CUT: keys of a block of the attention
enum { STORE, ADD, SWIGLU, LOGITS };                         // what becomes of a product

// Shared memory of a block, in bytes, beside what a kernel itself declares (a step in one kernel less than OWN_MOST; see `OWN` and `why_not` for the chain's); no launch asks for more than a card gives a block: 99 KiB, on sm_80 163, on Hopper 227.
constexpr int OWN_MOST = 2048;
constexpr int heads_at_once(int group) { return group <= 1 ? 1 : group == 2 ? 2 : 4; }          // query heads of a group that a block of the attention takes
constexpr int lanes_of(int D, int itemsize) { return D * itemsize <= 256 ? 16 : 32; }           // 16 bytes each
HD constexpr size_t query_bytes(int G, int D, size_t itemsize) { return (size_t)(G + 2) * D * itemsize + (size_t)WARPS * G * D * 4; }  // queries, new key and value; answers of the warps

#ifdef __CUDACC__
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// 16 bytes, or zeros
__device__ __forceinline__ void copy_or_zero(void* smem, const void* global, bool in) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((unsigned)__cvta_generic_to_shared(smem)), "l"(global), "r"(in ? 16 : 0) : "memory");
}
__device__ __forceinline__ uint4 load_fresh(const void* p) { return __ldcg(static_cast<const uint4*>(p)); } // past the L1 cache: written while this block was there already
__device__ __forceinline__ float one_fresh(const float* p) { return __ldcg(p); }
__device__ __forceinline__ float one_fresh(const bf16* p) { return __bfloat162float(__ushort_as_bfloat16(__ldcg(reinterpret_cast<const unsigned short*>(p)))); }
__device__ __forceinline__ void mma(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <class T> __device__ __forceinline__ Vec<T, 16 / sizeof(T)> as_vec(const uint4& x) { return *reinterpret_cast<const Vec<T, 16 / sizeof(T)>*>(&x); }
template <class T> __device__ __forceinline__ uint4 normed(const uint4& x, float r, const uint4& w) { // as rms_norm rounds
    const auto y = normed(as_vec<T>(x), r, as_vec<T>(w));
    return *reinterpret_cast<const uint4*>(&y);
}
template <class T> __device__ __forceinline__ float squares(const uint4& x) {
    const auto v = as_vec<T>(x);
    float s = 0;
#pragma unroll
    for (int i = 0; i < (int)(16 / sizeof(T)); i++) s += v[i] * v[i];
    return s;
}

// --- attention of one query on the cache -------------------------------------------------------------------------------------------------
struct Attend {
    const void *qkv, *q_gain, *k_gain, *cos, *sin; // [B, (H + 2 Hkv) D] as projected; [D] or nothing; [S, D]
    void *k, *v, *y;                               // cache [B, Hkv, S, D]; [B, H D]
    const int *at, *pad;                           // where each row's new token stands, and its left padding, [B]
    float* part;                                   // [B, H, cuts, D] answers, then [B, H, cuts] log2 of their weights
    int* arrived;                                  // [B, Hkv, parts of a group], zero before and after
    int B, H, Hkv, S, D, cuts;
    float eps, scale_log2;
};
// Answers of several spans in one, in the order of the keys
struct Joined {
    float m = -INFINITY, l = 0, x = 0;
    __device__ __forceinline__ void take(const float (&w)[8], const float (&y)[8]) { // log2 of their weights, values
        float top = m;
#pragma unroll
        for (int i = 0; i < 8; i++) top = fmaxf(top, w[i]);
        if (top == -INFINITY) return;
        const float by = exp2f(m - top);
        l *= by, x *= by, m = top;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float by = exp2f(w[i] - top);
            l += by, x = fmaf(by, y[i], x);
        }
    }
};
// A block's 256 threads take 64 keys (a cut) of one KV head at a time, for up to G of its query heads. D channels are spread over L lanes, 16 bytes each;
// the keys over the groups of L lanes. Each SPAN cuts in a row leave one answer, and the last block of a KV head to be done joins the answers in the order
// of the keys: the bits do not depend on how many rows there are.
template <class T, int G, int L, int SPAN> struct Attention {
    static constexpr int E = 16 / sizeof(T), KEYS = CUT * L / THREADS, SUBS = THREADS / L;
    static_assert(KEYS >= 1);
    using V = Vec<T, E>;
    struct Shared { float ms[WARPS][G], ls[WARPS][G]; bool last; };
    static HD size_t bytes(int D) { return query_bytes(G, D, sizeof(T)); }

    Attend p;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = lane % L, sub = threadIdx.x / L, chunks = p.D / E, group = p.H / p.Hkv, slices = (group + G - 1) / G;
    int b, hk, slice, span, cut, at, pad, used, h0, heads;
    float top[G], sum[G], o[G][E];                                                               // a warp's running maximum; a group's sum and weighted values
    int64_t base;
    V cs, sn;
    uint4 q_gain, k_gain;
    __device__ __forceinline__ Attention(const Attend& p) : p(p) {}
    __device__ __forceinline__ int slices_of_all() const { return p.Hkv * slices; }
    // Which KV head (a slice of its queries) of which row, and which span; false if it has no keys
    __device__ __forceinline__ bool begin(int b_, int head_slice, int span_) {
        b = b_, hk = head_slice / slices, slice = head_slice % slices, span = span_, cut = span * SPAN, at = p.at[b], pad = p.pad[b], used = at / (CUT * SPAN) + 1;
        h0 = hk * group + slice * G, heads = min(G, group - slice * G), base = ((int64_t)b * p.Hkv + hk) * p.S * p.D;
#pragma unroll
        for (int h = 0; h < G; h++) {
            top[h] = -INFINITY, sum[h] = 0;
#pragma unroll
            for (int e = 0; e < E; e++) o[h][e] = 0;
        }
        return span < used;
    }
    __device__ __forceinline__ int key(int n) const { return cut * CUT + n * SUBS + sub; }
    __device__ __forceinline__ void tables() {
        if (lane >= chunks) return;
        const int64_t o = (int64_t)max(at - pad, 0) * p.D + lane * E;
        cs = V::load(static_cast<const T*>(p.cos) + o);
        sn = V::load(static_cast<const T*>(p.sin) + o);
#pragma unroll
        for (int i = 0; i < E / 2; i++) if (lane < chunks / 2) sn.pair(i) = negative(sn.pair(i));
        if (p.q_gain) q_gain = __ldg(reinterpret_cast<const uint4*>(static_cast<const T*>(p.q_gain) + lane * E)), k_gain = __ldg(reinterpret_cast<const uint4*>(static_cast<const T*>(p.k_gain) + lane * E));
    }
    // Normed and turned queries into shared memory; the new key and value too, and into the cache, if `owner` has their cut
    // `load` reads 16 bytes of the projections
    template <class Sync, class Load> __device__ __forceinline__ void prepare(unsigned char* smem, bool owner, Sync sync, Load load) {
        const int D = p.D;
        const bool on = lane < chunks, low = lane < chunks / 2;
        T* vecs = reinterpret_cast<T*>(smem);                                                    // [G + 2][D]: turned queries, new key, new value
        for (int i = warp; i < heads + (owner ? 2 : 0); i += WARPS) {                            // a warp for each vector
            const bool is_q = i < heads, is_v = i == heads + 1;
            const int64_t o = ((int64_t)b * (p.H + 2 * p.Hkv) + (is_q ? h0 + i : p.H + hk + (is_v ? p.Hkv : 0))) * D + lane * E;
            uint4 x{};
            if (on) x = load(static_cast<const T*>(p.qkv) + o);
            if (!is_v) {
                if (p.q_gain) {
                    const uint4 gain{is_q ? q_gain.x : k_gain.x, is_q ? q_gain.y : k_gain.y, is_q ? q_gain.z : k_gain.z, is_q ? q_gain.w : k_gain.w};
                    x = normed<T>(x, __frsqrt_rn(lane_sum(squares<T>(x), 32) / D + p.eps), gain);
                }
                const int src = low ? lane + chunks / 2 : on ? lane - chunks / 2 : lane;
                const uint4 u{__shfl_sync(~0u, x.x, src), __shfl_sync(~0u, x.y, src), __shfl_sync(~0u, x.z, src), __shfl_sync(~0u, x.w, src)};
                const V xv = as_vec<T>(x), uv = as_vec<T>(u);
                V y;
#pragma unroll
                for (int e = 0; e < E / 2; e++) y.pair(e) = add_rn(mul_rn(xv.pair(e), cs.pair(e)), mul_rn(uv.pair(e), sn.pair(e)));
                x = *reinterpret_cast<const uint4*>(&y);
            }
            if (on) {
                *reinterpret_cast<uint4*>(vecs + (is_q ? i : is_v ? G + 1 : G) * D + lane * E) = x;
                if (!is_q && slice == 0) *reinterpret_cast<uint4*>(static_cast<T*>(is_v ? p.v : p.k) + base + (int64_t)at * D + lane * E) = x;
            }
        }
        sync();
    }
    // Take in the keys of `cut`. `old(n, kv)` is this lane's part of the n-th key (0) or value (1) of its group, as earlier steps wrote it; `arrive(kv)` waits for them
    template <class Arrive, class Piece> __device__ __forceinline__ void add(const unsigned char* smem, Arrive arrive, Piece old) {
        const int D = p.D;
        const T* vecs = reinterpret_cast<const T*>(smem);
        const auto mine = [&](int row) { return as_vec<T>(c < chunks ? *reinterpret_cast<const uint4*>(vecs + row * D + c * E) : uint4{}); };
        const auto piece = [&](int n, int kv) {
            const int j = key(n);
            return j == at ? mine(G + kv) : as_vec<T>(j < at && j >= pad && c < chunks ? old(n, kv) : uint4{});
        };
        arrive(0);
        float s[KEYS][G], new_top[G];
        {
            V q[G];
#pragma unroll
            for (int h = 0; h < G; h++) q[h] = mine(h < heads ? h : 0);
#pragma unroll
            for (int n = 0; n < KEYS; n++) {
                const V k = piece(n, 0);
#pragma unroll
                for (int h = 0; h < G; h++) {
                    float a = 0;
#pragma unroll
                    for (int e = 0; e < E; e++) a = fmaf(q[h][e], k[e], a);
                    s[n][h] = a;
                }
            }
        }
#pragma unroll
        for (int w = L / 2; w; w /= 2)
#pragma unroll
            for (int n = 0; n < KEYS; n++)
#pragma unroll
                for (int h = 0; h < G; h++) s[n][h] += __shfl_xor_sync(~0u, s[n][h], w);
#pragma unroll
        for (int h = 0; h < G; h++) {
            new_top[h] = -INFINITY;
#pragma unroll
            for (int n = 0; n < KEYS; n++) {
                s[n][h] = key(n) <= at && key(n) >= pad ? s[n][h] * p.scale_log2 : -INFINITY;
                new_top[h] = fmaxf(new_top[h], s[n][h]);
            }
        }
#pragma unroll
        for (int w = L; w < 32; w *= 2)
#pragma unroll
            for (int h = 0; h < G; h++) new_top[h] = fmaxf(new_top[h], __shfl_xor_sync(~0u, new_top[h], w));
#pragma unroll
        for (int h = 0; h < G; h++) {
            new_top[h] = fmaxf(new_top[h], top[h]);
            const float from = new_top[h] == -INFINITY ? 0.f : new_top[h], by = exp2f(top[h] - from);
            top[h] = new_top[h], sum[h] *= by;
#pragma unroll
            for (int e = 0; e < E; e++) o[h][e] *= by;
#pragma unroll
            for (int n = 0; n < KEYS; n++) sum[h] += s[n][h] = exp2f(s[n][h] - from);
        }
        arrive(1);
#pragma unroll
        for (int n = 0; n < KEYS; n++) {
            const V v = piece(n, 1);
#pragma unroll
            for (int h = 0; h < G; h++)
#pragma unroll
                for (int e = 0; e < E; e++) o[h][e] = fmaf(s[n][h], v[e], o[h][e]);
        }
    }
    // The span's answer: `to(in, row of [B, H], channel, value, log2 of its weight)` by all lanes of a warp, `in` where there is something
    template <class Sync, class To> __device__ __forceinline__ void leave(unsigned char* smem, Shared& sh, Sync sync, To to) {
        const int D = p.D;
        const bool on = lane < chunks;
        float* os = reinterpret_cast<float*>(smem + (size_t)(G + 2) * D * sizeof(T));            // [WARPS][G][D]
#pragma unroll
        for (int w = L; w < 32; w *= 2)
#pragma unroll
            for (int h = 0; h < G; h++) {
                sum[h] += __shfl_xor_sync(~0u, sum[h], w);
#pragma unroll
                for (int e = 0; e < E; e++) o[h][e] += __shfl_xor_sync(~0u, o[h][e], w);
            }
#pragma unroll
        for (int h = 0; h < G; h++) {
            if (on && lane < L) {
#pragma unroll
                for (int e = 0; e < E; e += 4) *reinterpret_cast<float4*>(os + (warp * G + h) * D + lane * E + e) = {o[h][e], o[h][e + 1], o[h][e + 2], o[h][e + 3]};
            }
            if (lane == 0) sh.ms[warp][h] = top[h], sh.ls[warp][h] = sum[h];
        }
        join(smem, sh, sync, to);
    }
    // Of what the warps have in shared memory
    template <class Sync, class To> __device__ __forceinline__ void join(unsigned char* smem, Shared& sh, Sync sync, To to) {
        const int D = p.D;
        const float* os = reinterpret_cast<const float*>(smem + (size_t)(G + 2) * D * sizeof(T));
        sync();
        for (int e0 = 0; e0 < heads * D; e0 += THREADS) {
            const bool in = e0 + (int)threadIdx.x < heads * D;
            const int e = in ? e0 + threadIdx.x : 0, h = e / D, d = e % D;
            float m = -INFINITY, l = 0, x = 0;
#pragma unroll
            for (int w = 0; w < WARPS; w++) m = fmaxf(m, sh.ms[w][h]);
            const float base2 = m == -INFINITY ? 0.f : m;
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                const float by = exp2f(sh.ms[w][h] - base2);
                l += by * sh.ls[w][h], x += by * os[(w * G + h) * D + d];
            }
            to(in, (int64_t)b * p.H + h0 + h, d, l > 0 ? x / l : 0.f, l > 0 ? m + log2f(l) : -INFINITY);
        }
    }
    __device__ __forceinline__ auto answer() {
        return [this](bool in, int64_t row, int d, float x, float weight) {
            float *part = p.part, *lse = p.part + (int64_t)p.B * p.H * p.cuts * p.D;
            if (!in) return;
            if (used == 1) static_cast<T*>(p.y)[row * p.D + d] = from_float<T>(x);
            else {
                part[(row * p.cuts + span) * p.D + d] = x;
                if (d == 0) lse[row * p.cuts + span] = weight;
            }
        };
    }
    template <class Sync> __device__ __forceinline__ void leave(unsigned char* smem, Shared& sh, Sync sync) { leave(smem, sh, sync, answer()); }
    // Say that it is there; the last joins them all
    template <class Sync> __device__ __forceinline__ void finish(Shared& sh, Sync sync) {
        const int D = p.D;
        const float *part = p.part, *lse = p.part + (int64_t)p.B * p.H * p.cuts * D;
        if (used == 1) return;
        __threadfence();
        sync();
        if (threadIdx.x == 0) {
            int* n = p.arrived + b * slices_of_all() + hk * slices + slice;
            sh.last = atomicAdd(n, 1) == used - 1;
            if (sh.last) *n = 0;
        }
        sync();
        if (!sh.last) return;
        __threadfence();
        for (int e = threadIdx.x; e < heads * D; e += THREADS) {
            const int h = e / D, d = e % D;
            const int64_t row = ((int64_t)b * p.H + h0 + h) * p.cuts;
            Joined all;
            for (int i0 = 0; i0 < used; i0 += 8) {                                               // eight at a time, all loads at once
                float w[8], y[8];
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const bool in = i0 + i < used;
                    w[i] = in ? __ldcg(lse + row + i0 + i) : -INFINITY;
                    y[i] = in ? __ldcg(part + (row + i0 + i) * D + d) : 0.f;
                }
                all.take(w, y);
            }
            static_cast<T*>(p.y)[(row / p.cuts) * D + d] = from_float<T>(all.x / all.l);
        }
    }
};

inline void allow_smem(const void* kernel, int64_t bytes) { // never less than before: the limit belongs to the kernel, and another thread may be about to launch it for a model that needs more
    static std::mutex one_at_a_time;
    const std::lock_guard<std::mutex> lock(one_at_a_time);
    cudaFuncAttributes now{};
    if (cudaFuncGetAttributes(&now, kernel) != cudaSuccess) cudaGetLastError();  // what is wrong with it shows next
    allow_smem("decode", kernel, std::max(bytes, (int64_t)now.maxDynamicSharedSizeBytes));
}
// `cluster`: blocks next to each other that see each other's shared memory
template <class... P, class... A> void launch_chained(int cluster, void (*kernel)(P...), dim3 blocks, size_t smem, cudaStream_t s, A... args) {
    allow_smem((const void*)kernel, smem);
    cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared); // or the next kernel's blocks find no room beside this one's
    cudaLaunchAttribute how[2] = {};
    how[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    how[0].val.programmaticStreamSerializationAllowed = 1;
    how[1].id = cudaLaunchAttributeClusterDimension;
    how[1].val.clusterDim.x = cluster, how[1].val.clusterDim.y = how[1].val.clusterDim.z = 1;
    cudaLaunchConfig_t c{};
    c.gridDim = blocks; c.blockDim = dim3(THREADS); c.dynamicSmemBytes = smem; c.stream = s; c.attrs = how; c.numAttrs = !hopper_code((const void*)kernel) ? 0 : cluster > 1 ? 2 : 1;
    cudaLaunchKernelEx(&c, kernel, static_cast<P>(args)...);
}
inline int smem_limit() { return of_device(cudaDevAttrMaxSharedMemoryPerBlockOptin); }
inline const void* data(const Tensor& x) { return x.numel() ? x.const_data_ptr() : nullptr; }

// What `attend` is told, as a kernel takes it
inline Attend attend_of(const Tensor& qkv, const Tensor& q_gain, const Tensor& k_gain, const Tensor& cos, const Tensor& sin, const Tensor& k, const Tensor& v, const Tensor& at, const Tensor& pad, const Tensor& part, const Tensor& arrived, const Tensor& y, double eps) {
    Attend p{};
    p.qkv = qkv.const_data_ptr(); p.q_gain = data(q_gain); p.k_gain = data(k_gain); p.cos = cos.const_data_ptr(); p.sin = sin.const_data_ptr();
    p.k = k.mutable_data_ptr(); p.v = v.mutable_data_ptr(); p.y = y.mutable_data_ptr();
    p.at = (const int*)at.const_data_ptr(); p.pad = (const int*)pad.const_data_ptr(); p.part = (float*)part.mutable_data_ptr(); p.arrived = (int*)arrived.mutable_data_ptr();
    p.B = (int)k.size(0); p.Hkv = (int)k.size(1); p.S = (int)k.size(2); p.D = (int)k.size(3); p.H = (int)(y.size(1) / p.D);
    p.cuts = (int)ceil_div(p.S, CUT); p.eps = (float)eps; p.scale_log2 = (float)(1.4426950408889634 / std::sqrt((double)p.D));
    return p;
}
#endif
