// RMSNorm y = w * x / sqrt(mean(x^2) + eps) and its gradient, with an optional residual add in the same pass.
// Forward reads x and writes y, 4 bytes an element in a half precision; backward reads dy and x and writes dx, 6 bytes; with the
// addition 8 and 8 (x, residual, y, sum; dy, dsum, sum, dx). The gain is read from the cache, one row of dw is written.
// A row lives in the registers of `tpr` threads, so x is read once; the backward recomputes 1/rms from x instead of
// keeping it. x * r is rounded to T before the gain, as in the definition (and in transformers), gains in float32 too.
// Each block of the backward owns a fixed set of rows and sums its share of dw in registers; a second kernel adds the
// shares in block order, so two runs give the same bits.
#include "common.cuh"
#include <type_traits>

#ifdef __CUDACC__
constexpr int FWD_THREADS = 128, BWD_THREADS = 128, BWD_AT_ONCE = 256;      // threads of a block of short rows; of the backward on a multiprocessor

// N gains, rounded to T
template <class T, int N> __device__ __forceinline__ Vec<T, N> load_gain(const void* w, bool w_f32, int i) {
    if (!w_f32) return Vec<T, N>::load(static_cast<const T*>(w) + i);
    Vec<T, N> o;
#pragma unroll
    for (int k = 0; k < N; k += 4) {
        const float4 f = *reinterpret_cast<const float4*>(static_cast<const float*>(w) + i + k);
        o.set(k, f.x); o.set(k + 1, f.y); o.set(k + 2, f.z); o.set(k + 3, f.w);
    }
    return o;
}

// R rows a thread at once, NV vectors of each. WIDE: a block is one row; else a row is 1 << shift lanes of a warp. FULL:
// no vector and no row is missing at an end. All loads come before the first use.
template <class T, int NV, int R, bool WIDE, bool FULL, bool ADD>
__global__ void __launch_bounds__(WIDE ? 512 : FWD_THREADS) fwd_kernel(const T* __restrict__ x, const T* __restrict__ res, const void* __restrict__ w, bool w_f32,
                                                                     T* __restrict__ y, T* __restrict__ sum, int64_t rows, int D, int shift, float2 one_over_D, float eps) {
    constexpr int VEC = 16 / sizeof(T);
    using V = Vec<T, VEC>;
    __shared__ float partial[16];
    const int tpr = WIDE ? blockDim.x : 1 << shift, groups = WIDE ? 1 : blockDim.x >> shift;
    const int lane = WIDE ? threadIdx.x : threadIdx.x & (tpr - 1), c = lane * VEC;
    const int64_t first = WIDE ? blockIdx.x : blockIdx.x * (int64_t)(groups * R) + (threadIdx.x >> shift), o = first * D + c;
    const auto live = [&](int k, int j) { return FULL || ((WIDE || first + k * groups < rows) && c + j * tpr * VEC < D); };
    const auto at = [&](int k, int j) { return k * groups * D + j * tpr * VEC; };
    const auto write = [](const V& v, T* p) { if (NV * R <= 2) v.store(p); else v.store_once(p); }; // see fwd_row
    V v[R][NV], a[R][NV];
    float ss[R] = {};
#pragma unroll
    for (int k = 0; k < R; k++)
#pragma unroll
        for (int j = 0; j < NV; j++) if (live(k, j)) {
            v[k][j] = V::load(x + o + at(k, j));
            if (ADD) a[k][j] = V::load(res + o + at(k, j));
        }
#pragma unroll
    for (int k = 0; k < R; k++)
#pragma unroll
        for (int j = 0; j < NV; j++) if (live(k, j)) {
            if (ADD) {
#pragma unroll
                for (int i = 0; i < VEC / 2; i++) v[k][j].pair(i) = add_rn(v[k][j].pair(i), a[k][j].pair(i));
                write(v[k][j], sum + o + at(k, j));
            }
#pragma unroll
            for (int i = 0; i < VEC; i++) ss[k] += v[k][j][i] * v[k][j][i];
        }
    lane_sums(ss, WIDE ? 32 : tpr);
    if (WIDE) {
        if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = ss[0];
        __syncthreads();
        ss[0] = lane_sum((threadIdx.x & 15) < blockDim.x / 32 ? partial[threadIdx.x & 15] : 0.f, 16);
    }
    int late = c;
#pragma unroll
    for (int k = 0; k < R; k++) ss[k] = inverse_root<T>(mean_plus(ss[k], one_over_D, eps));
    asm volatile("" : "+r"(late) : "f"(ss[0]));                     // the gains wait for the sum: loaded before it they cost registers, and those cost warps
#pragma unroll
    for (int j = 0; j < NV; j++) {
        V wv;
        asm volatile("" : "+r"(late));
        if (FULL || late + j * tpr * VEC < D) wv = load_gain<T, VEC>(w, w_f32, late + j * tpr * VEC);
#pragma unroll
        for (int k = 0; k < R; k++) if (live(k, j)) {
            v[k][j].repack();
            write(normed(v[k][j], ss[k], wv), y + o + at(k, j));
        }
    }
}

// Of N numbers, a power of two, in pairs: added one after the other, 16 of them err by as much as all the rest of a row
template <int N> __device__ __forceinline__ float tree_sum(const float* x) { return tree_sum<N / 2>(x) + tree_sum<N / 2>(x + N / 2); }
template <> __device__ __forceinline__ float tree_sum<1>(const float* x) { return *x; }

// A block is one row of 2 * TPR vectors: every address is known at compile time, and with 32 registers a multiprocessor is full.
// With so little under way in each thread plain stores are the faster ones.
template <class T, class W, int TPR, bool ADD>
__global__ void __launch_bounds__(TPR) fwd_row(const T* __restrict__ x, const T* __restrict__ res, const W* __restrict__ w, T* __restrict__ y, T* __restrict__ sum, float eps) {
    constexpr int VEC = 16 / sizeof(T), D = 2 * TPR * VEC;
    using V = Vec<T, VEC>;
    __shared__ __align__(16) float partial[TPR / 32];
    const int c = threadIdx.x * VEC;
    const int64_t o = blockIdx.x * (int64_t)D + c;
    V v[2], a[2], g[2];
    float ss[1] = {};
#pragma unroll
    for (int j = 0; j < 2; j++) { v[j] = V::load(x + o + j * TPR * VEC); if (ADD) a[j] = V::load(res + o + j * TPR * VEC); }
    constexpr bool MASTER = sizeof(W) != sizeof(T);                 // a float32 gain of half-precision rows waits, it would take too many registers
    if (!MASTER) {                                                  // not `if constexpr` before a loop with a pragma: nvcc 13.0 left out the loop behind it
#pragma unroll
        for (int j = 0; j < 2; j++) g[j] = V::load((const T*)w + c + j * TPR * VEC);
    }
#pragma unroll
    for (int j = 0; j < 2; j++) {
        if (ADD) {
#pragma unroll
            for (int i = 0; i < VEC / 2; i++) v[j].pair(i) = add_rn(v[j].pair(i), a[j].pair(i));
            v[j].store(sum + o + j * TPR * VEC);
        }
#pragma unroll
        for (int i = 0; i < VEC; i++) ss[0] += v[j][i] * v[j][i];
    }
    lane_sums(ss, 32);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = ss[0];
    __syncthreads();
    const float r = inverse_root<T>(tree_sum<TPR / 32>(partial) / D + eps);
    int late = c;                                                   // one vector of a float32 gain after the other
#pragma unroll
    for (int j = 0; j < 2; j++) {
        v[j].repack();
        if (MASTER) { asm volatile("" : "+r"(late)); g[j] = load_gain<T, VEC>(w, true, late + j * TPR * VEC); }
        normed(v[j], r, g[j]).store(y + o + j * TPR * VEC);
    }
}

// dx = r*(g*w) - x * r^3 * mean(g*w*x) [+ dsum];  dw = sum over rows of g * x * r
// Each thread copies its own vectors of the next rows to shared memory while it works on these, so the loads in flight do not
// depend on registers or occupancy, and only the sums over a row need a barrier.
template <class T, int NV, int R, int STAGES, bool WIDE, bool FULL, bool ADD>
__global__ void __launch_bounds__(WIDE ? 512 : BWD_THREADS, 1) bwd_kernel(const T* __restrict__ g, const T* __restrict__ x, const T* __restrict__ dsum, const void* __restrict__ w, bool w_f32,
                                                                        T* __restrict__ dx, float* __restrict__ dw_part, int64_t rows, int D, int shift, float2 one_over_D, float eps) {
    constexpr int VEC = 16 / sizeof(T), IN = ADD ? 3 : 2;
    using V = Vec<T, VEC>;
    __shared__ float2 partial[2][16];
    extern __shared__ __align__(16) unsigned char dynamic[];
    V* ring = reinterpret_cast<V*>(dynamic);                      // [STAGES][R][NV][IN][blockDim.x]
    const int tpr = WIDE ? blockDim.x : 1 << shift, groups = WIDE ? 1 : blockDim.x >> shift, lane = WIDE ? threadIdx.x : threadIdx.x & (tpr - 1), group = WIDE ? 0 : threadIdx.x >> shift;
    const int64_t stride = gridDim.x * (int64_t)(groups * R);
    Sums<T, NV * VEC, R> dw;
    V wv[NV];
#pragma unroll
    for (int j = 0; j < NV; j++) if (FULL || (lane + j * tpr) * VEC < D) wv[j] = load_gain<T, VEC>(w, w_f32, (lane + j * tpr) * VEC);
    auto slot = [&](int stage, int k, int j, int which) { return ring + (((stage * R + k) * NV + j) * IN + which) * blockDim.x + threadIdx.x; };
    auto fetch = [&](int64_t first, int stage) {
#pragma unroll
        for (int k = 0; k < R; k++)
#pragma unroll
            for (int j = 0; j < NV; j++) {
                const int c = (lane + j * tpr) * VEC;
                const int64_t row = first + k * groups;
                if (row < rows && (FULL || c < D)) {
                    copy_async(slot(stage, k, j, 0), x + row * D + c);
                    copy_async(slot(stage, k, j, 1), g + row * D + c);
                    if (ADD) copy_async(slot(stage, k, j, 2), dsum + row * D + c);
                }
            }
        copy_commit();
    };
    int64_t first = blockIdx.x * (int64_t)(groups * R) + group;
#pragma unroll
    for (int k = 0; k < STAGES - 1; k++) fetch(first + k * stride, k);
    int stage = 0, turn = 0;
    for (int64_t base = blockIdx.x * (int64_t)(groups * R); base < rows; base += stride, first += stride, turn ^= 1) {
        fetch(first + (STAGES - 1) * stride, stage == 0 ? STAGES - 1 : stage - 1);
        copy_wait<STAGES - 1>();
        V xc[R][NV], gc[R][NV];
        float sums[2 * R] = {};                                   // x^2 and g*w*x of each row
#pragma unroll
        for (int k = 0; k < R; k++)
#pragma unroll
            for (int j = 0; j < NV; j++)
                if (first + k * groups < rows && (FULL || (lane + j * tpr) * VEC < D)) {
                    xc[k][j] = *slot(stage, k, j, 0); gc[k][j] = *slot(stage, k, j, 1);
#pragma unroll
                    for (int i = 0; i < VEC; i++) sums[2 * k] += xc[k][j][i] * xc[k][j][i], sums[2 * k + 1] += gc[k][j][i] * wv[j][i] * xc[k][j][i];
                }
        lane_sums(sums, WIDE ? 32 : tpr);
        if (WIDE) {
            if (threadIdx.x % 32 == 0) partial[turn][threadIdx.x / 32] = {sums[0], sums[1]};
            __syncthreads();
            const float2 t = (threadIdx.x & 15) < blockDim.x / 32 ? partial[turn][threadIdx.x & 15] : float2{0.f, 0.f};
            sums[0] = t.x; sums[1] = t.y;
            lane_sums(sums, 16);
        }
#pragma unroll
        for (int k = 0; k < R; k++) {
            const float r = inverse_root<T>(mean_plus(sums[2 * k], one_over_D, eps)), m = sums[2 * k + 1] * one_over_D.x * r * r;
#pragma unroll
            for (int j = 0; j < NV; j++) {
                const int c = (lane + j * tpr) * VEC;
                if (first + k * groups < rows && (FULL || c < D)) {
                    V d;
                    if (ADD) d = *slot(stage, k, j, 2);
                    xc[k][j].repack(); gc[k][j].repack();
#pragma unroll
                    for (int i = 0; i < VEC; i++) {
                        const float t = r * (gc[k][j][i] * wv[j][i] - xc[k][j][i] * m);
                        dw.s[j * VEC + i] += gc[k][j][i] * (xc[k][j][i] * r);
                        d.set(i, ADD ? d[i] + t : t);
                    }
                    d.store_once(dx + (first + k * groups) * D + c);
                }
            }
        }
        dw.turn();
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    // the block's share of dw; with several rows a block, its groups one after the other
    copy_wait<0>();
    __syncthreads();
    float* acc = reinterpret_cast<float*>(dynamic);
    float* out = WIDE ? dw_part + blockIdx.x * (int64_t)D : acc + group * D;
#pragma unroll
    for (int j = 0; j < NV; j++)
#pragma unroll
        for (int i = 0; i < VEC; i++) {
            const int c = (lane + j * tpr) * VEC + i;
            if ((FULL || c < D)) out[c] = dw.total(j * VEC + i);
        }
    if (!WIDE) {
        __syncthreads();
        for (int c = threadIdx.x; c < D; c += blockDim.x) {
            double s = 0;
            for (int k = 0; k < groups; k++) s += acc[k * D + c];
            dw_part[blockIdx.x * (int64_t)D + c] = (float)s;
        }
    }
    done();
}

// Rows of any width, any alignment: one block a row, the row read twice.
template <class T> __device__ __forceinline__ float any_gain(const void* w, bool w_f32, int64_t c) { return round_to<T>(gain<T>(w, w_f32, c)); }
template <class T, bool ADD>
__global__ void fwd_any(const T* x, const T* res, const void* w, bool w_f32, T* y, T* sum, int64_t rows, int64_t D, float eps) {
    __shared__ float smem[64];
    const int64_t o = blockIdx.x * D;
    float ss = 0.f;
    for (int64_t c = threadIdx.x; c < D; c += blockDim.x) {
        float v = to_float(x[o + c]);
        if (ADD) { v = round_to<T>(v + to_float(res[o + c])); sum[o + c] = from_float<T>(v); }
        ss += v * v;
    }
    const float r = inverse_root<T>(block_sum(ss, smem) / D + eps);
    for (int64_t c = threadIdx.x; c < D; c += blockDim.x)
        y[o + c] = from_float<T>(any_gain<T>(w, w_f32, c) * round_to<T>(to_float((ADD ? sum : x)[o + c]) * r));
}
template <class T, bool ADD>
__global__ void bwd_any(const T* g, const T* x, const T* dsum, const void* w, bool w_f32, T* dx, float* rstd, int64_t rows, int64_t D, float eps) {
    __shared__ float smem[64];
    const int64_t o = blockIdx.x * D;
    float ss = 0.f, dot = 0.f;
    for (int64_t c = threadIdx.x; c < D; c += blockDim.x) {
        const float v = to_float(x[o + c]);
        ss += v * v; dot += to_float(g[o + c]) * any_gain<T>(w, w_f32, c) * v;
    }
    const float2 sum = block_sum(make_float2(ss, dot), smem);
    const float r = inverse_root<T>(sum.x / D + eps), k = sum.y / D * r * r;
    for (int64_t c = threadIdx.x; c < D; c += blockDim.x) {
        const float t = r * (to_float(g[o + c]) * any_gain<T>(w, w_f32, c) - to_float(x[o + c]) * k);
        dx[o + c] = from_float<T>(ADD ? t + to_float(dsum[o + c]) : t);
    }
    if (threadIdx.x == 0) rstd[blockIdx.x] = r;
}
template <class T>
__global__ void dw_any(const T* g, const T* x, const float* rstd, float* dw_part, int64_t rows, int64_t D) {
    const int64_t c = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (c >= D) return;
    double s = 0;
    for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) s += to_float(g[row * D + c]) * (to_float(x[row * D + c]) * rstd[row]);
    dw_part[blockIdx.y * D + c] = (float)s;
}

// How a row is spread: up to 64 vectors over the lanes of one warp, more over the warps of a block, at most `most` in a thread;
// ragged, unaligned or very wide rows take `*_any`. On an H200 the forward wants many warps with little under way each, the backward few warps that copy three rows ahead.
struct Plan { int nv, tpr, shift; bool wide, fast, full; };     // full: every thread has all its vectors
template <class T> Plan plan(int64_t D, bool aligned, int most) {
    constexpr int VEC = 16 / sizeof(T);
    const int64_t vecs = D / VEC;
    Plan p{1, 32, 0, vecs > 64, aligned && D % VEC == 0, false};
    if (p.wide) {
        p.nv = most == 2 || vecs <= 128 ? 2 : vecs <= 256 ? 4 : 8;
        p.tpr = (int)(ceil_div(vecs, 32 * p.nv) * 32);
        p.fast = p.fast && vecs <= 512 * p.nv;
    }
    else if (vecs <= 32) p.tpr = pow2_at_least(vecs);
    else p.nv = 2;
    while (1 << p.shift < p.tpr) p.shift++;
    p.full = vecs == p.nv * p.tpr;
    return p;
}

template <bool ADD> void forward(const Tensor& x, const Tensor* res, const Tensor& w, double eps, Tensor& y, Tensor* sum) {
    check_gain("rms_norm", w, x);
    const int64_t D = w.numel(), rows = D ? x.numel() / D : 0;
    if (!rows) return;
    torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
    const cudaStream_t s = stream_of(x);
    const bool w_f32 = w.scalar_type() == ScalarType::Float;
    DISPATCH(x.scalar_type(), "rms_norm", {
        const T *px = (const T*)x.const_data_ptr(), *pr = ADD ? (const T*)res->const_data_ptr() : nullptr;
        T *py = (T*)y.mutable_data_ptr(), *ps = ADD ? (T*)sum->mutable_data_ptr() : nullptr;
        const void* pw = w.const_data_ptr();
        const Plan p = plan<T>(D, aligned16(px) && aligned16(pr) && aligned16(py) && aligned16(ps) && aligned16(pw), 8);
        auto launch = [&](auto kernel, int threads, int each) {
            kernel<<<ceil_div(rows, each), threads, 0, s>>>(px, pr, pw, w_f32, py, ps, rows, (int)D, p.shift, one_over(D), (float)eps);
        };
        auto wide = [&](auto nv) { launch(fwd_kernel<T, nv.value, 1, true, false, ADD>, p.tpr, 1); };
        auto row = [&](auto tpr) {
            if (w_f32) fwd_row<T, float, tpr.value, ADD><<<rows, tpr.value, 0, s>>>(px, pr, (const float*)pw, py, ps, (float)eps);
            else fwd_row<T, T, tpr.value, ADD><<<rows, tpr.value, 0, s>>>(px, pr, (const T*)pw, py, ps, (float)eps);
        };
        auto narrow = [&](auto nv, auto R) {
            const int each = FWD_THREADS / p.tpr * R.value;
            if (p.full && rows % each == 0) launch(fwd_kernel<T, nv.value, R.value, false, true, ADD>, FWD_THREADS, each);
            else launch(fwd_kernel<T, nv.value, R.value, false, false, ADD>, FWD_THREADS, each);
        };
        using std::integral_constant;
        using one = integral_constant<int, 1>; using two = integral_constant<int, 2>;
        const int64_t vecs = p.fast ? D * (int64_t)sizeof(T) / 16 : 0;
        if (vecs == 128) row(integral_constant<int, 64>());
        else if (vecs == 256) row(integral_constant<int, 128>());
        else if (vecs == 512) row(integral_constant<int, 256>());
        else if (vecs == 1024) row(integral_constant<int, 512>());
        else if (!p.fast) fwd_any<T, ADD><<<grid_of(rows, "rms_norm"), 256, 0, s>>>(px, pr, pw, w_f32, py, ps, rows, D, (float)eps);
        else if (p.wide && p.nv == 8) wide(integral_constant<int, 8>());
        else if (p.wide && p.nv == 4) wide(integral_constant<int, 4>());
        else if (p.wide) wide(two());
        else if (p.nv == 2) narrow(two(), one());
        else narrow(one(), two());
    });
    check_launch("rms_norm forward");
}

// What a kernel of the backward is made of, and the most shared memory that a launch of it asks for
template <int NV_, int R_, int STAGES_, bool WIDE_, bool FULL_> struct Ring {
    static constexpr int NV = NV_, R = R_, STAGES = STAGES_, THREADS = WIDE_ ? 1024 / STAGES_ : BWD_THREADS;
    static constexpr bool WIDE = WIDE_, FULL = FULL_;
    static constexpr int bytes(int threads, bool add) { return STAGES * R * NV * (add ? 3 : 2) * threads * 16; }
    static_assert(bytes(THREADS, true) <= 98 << 10, "a block of sm_86, sm_89 and sm_120 can have 99 KiB, and the kernel declares some itself");
};
template <bool ADD> void backward(const Tensor& g, const Tensor& x, const Tensor* dsum, const Tensor& w, double eps, Tensor& dx, Tensor& dw) {
    check_gain("rms_norm", w, x);
    const int64_t D = w.numel(), rows = D ? x.numel() / D : 0;
    if (!rows) { torch::stable::zero_(dw); return; }
    torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
    const cudaStream_t s = stream_of(x);
    const bool w_f32 = w.scalar_type() == ScalarType::Float;
    DISPATCH(x.scalar_type(), "rms_norm", {
        const T *pg = (const T*)g.const_data_ptr(), *px = (const T*)x.const_data_ptr(), *pd = ADD ? (const T*)dsum->const_data_ptr() : nullptr;
        T* pdx = (T*)dx.mutable_data_ptr();
        const void* pw = w.const_data_ptr();
        const Plan p = plan<T>(D, aligned16(pg) && aligned16(px) && aligned16(pd) && aligned16(pdx) && aligned16(pw), 2);
        int64_t parts = rows < 256 ? rows : 256;
        Tensor part = x;
        if (!p.fast) {
            part = torch::stable::new_empty(x, {parts, D}, ScalarType::Float);
            Tensor rstd = torch::stable::new_empty(x, {rows}, ScalarType::Float);
            bwd_any<T, ADD><<<grid_of(rows, "rms_norm"), 256, 0, s>>>(pg, px, pd, pw, w_f32, pdx, (float*)rstd.mutable_data_ptr(), rows, D, (float)eps);
            dw_any<T><<<dim3(ceil_div(D, 128), parts), 128, 0, s>>>(pg, px, (const float*)rstd.const_data_ptr(), (float*)part.mutable_data_ptr(), rows, D);
        } else {
            auto launch = [&](auto ring) {
                using K = decltype(ring);
                const auto kernel = bwd_kernel<T, K::NV, K::R, K::STAGES, K::WIDE, K::FULL, ADD>;
                constexpr int R = K::R, most = K::bytes(K::THREADS, ADD);
                const int threads = K::WIDE ? p.tpr : BWD_THREADS, groups = threads / p.tpr, smem = K::bytes(threads, ADD);   // of short rows also `groups` rows of float32
                // of the widest rows: the limit belongs to the kernel, and another thread may be about to launch it for wider ones
                if (most > 32 << 10) cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
                const int64_t want = (int64_t)sm_count() * (threads < BWD_AT_ONCE ? BWD_AT_ONCE / threads : 1), have = ceil_div(rows, groups * R);
                parts = want < have ? want : have;
                part = torch::stable::new_empty(x, {parts, D}, ScalarType::Float);
                kernel<<<parts, threads, smem, s>>>(pg, px, pd, pw, w_f32, pdx, (float*)part.mutable_data_ptr(), rows, (int)D, p.shift, one_over(D), (float)eps);
            };
            if (p.wide && p.tpr > 256) launch(Ring<2, 1, 2, true, false>());            // four stages would not fit
            else if (p.wide && p.full) launch(Ring<2, 1, 4, true, true>());
            else if (p.wide) launch(Ring<2, 1, 4, true, false>());
            else if (p.nv == 2) launch(Ring<2, 1, 4, false, false>());
            else if (p.full) launch(Ring<1, 2, 4, false, true>());
            else launch(Ring<1, 2, 4, false, false>());
        }
        check_launch("rms_norm backward");
        reduce_parts<T>(part.const_data_ptr(), dw.mutable_data_ptr(), w_f32, parts, D, s);
    });
    check_launch("rms_norm gain gradient");
}

Tensor rms_norm(const Tensor& x_, const Tensor& w_, double eps) {
    const Tensor x = torch::stable::contiguous(x_), w = torch::stable::contiguous(w_);
    Tensor y = torch::stable::empty_like(x);
    forward<false>(x, nullptr, w, eps, y, nullptr);
    return y;
}
std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& g_, const Tensor& x_, const Tensor& w_, double eps) {
    const Tensor g = torch::stable::contiguous(g_), x = torch::stable::contiguous(x_), w = torch::stable::contiguous(w_);
    Tensor dx = torch::stable::empty_like(x), dw = torch::stable::empty_like(w);
    backward<false>(g, x, nullptr, w, eps, dx, dw);
    return {dx, dw};
}
// y = norm(x + res), h = x + res
std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x_, const Tensor& res_, const Tensor& w_, double eps) {
    const Tensor x = torch::stable::contiguous(x_), res = torch::stable::contiguous(res_), w = torch::stable::contiguous(w_);
    Tensor y = torch::stable::empty_like(x), h = torch::stable::empty_like(x);
    forward<true>(x, &res, w, eps, y, &h);
    return {y, h};
}
std::tuple<Tensor, Tensor> add_rms_norm_backward(const Tensor& gy_, const Tensor& gh_, const Tensor& h_, const Tensor& w_, double eps) {
    const Tensor gy = torch::stable::contiguous(gy_), gh = torch::stable::contiguous(gh_), h = torch::stable::contiguous(h_), w = torch::stable::contiguous(w_);
    Tensor dh = torch::stable::empty_like(h), dw = torch::stable::empty_like(w);
    backward<true>(gy, h, &gh, w, eps, dh, dw);
    return {dh, dw};
}
STABLE_TORCH_LIBRARY_IMPL(XTRAIN_NS, CUDA, m) {
    m.impl("rms_norm", TORCH_BOX(&rms_norm));
    m.impl("rms_norm_backward", TORCH_BOX(&rms_norm_backward));
    m.impl("add_rms_norm", TORCH_BOX(&add_rms_norm));
    m.impl("add_rms_norm_backward", TORCH_BOX(&add_rms_norm_backward));
}
#endif

STABLE_TORCH_LIBRARY_FRAGMENT(XTRAIN_NS, m) {
    m.def("rms_norm(Tensor x, Tensor w, float eps) -> Tensor");
    m.def("rms_norm_backward(Tensor g, Tensor x, Tensor w, float eps) -> (Tensor, Tensor)");
    m.def("add_rms_norm(Tensor x, Tensor res, Tensor w, float eps) -> (Tensor, Tensor)");
    m.def("add_rms_norm_backward(Tensor gy, Tensor gh, Tensor h, Tensor w, float eps) -> (Tensor, Tensor)");
}
