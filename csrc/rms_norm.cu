// RMSNorm y = w * x / sqrt(mean(x^2) + eps) and its gradient, with an optional residual add in the same pass.
// A row lives in the registers of `tpr` threads, so x is read once; the backward recomputes 1/rms from x instead of
// keeping it. x * r is rounded to T before the gain, as in the definition (and in transformers), gains in float32 too.
// Each block of the backward owns a fixed set of rows and sums its share of dw in registers; a second kernel adds the
// shares in block order, so two runs give the same bits.
#include "common.cuh"

#ifdef __CUDACC__
constexpr int FWD_THREADS = 128, BWD_THREADS = 128;
constexpr int BWD_STAGES = 2;                                     // rows on their way to a thread, the one it works on included

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
// w * round(x * r), rounded again
template <class T, int N> __device__ __forceinline__ Vec<T, N> normed(const Vec<T, N>& x, float r, const Vec<T, N>& w) {
    Vec<T, N> o;
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        const float2 f = to_floats(x.pair(i));
        o.pair(i) = mul_rn(w.pair(i), from_floats<typename Vec<T, N>::P>(f.x * r, f.y * r));
    }
    return o;
}
// Sums over `width` neighbouring lanes of N numbers at once, so that their exchanges overlap
template <int N> __device__ __forceinline__ void lane_sums(float (&x)[N], int width) {
#pragma unroll
    for (int o = 16; o; o >>= 1)
        if (o < width)
#pragma unroll
            for (int k = 0; k < N; k++) x[k] += __shfl_xor_sync(~0u, x[k], o);
}

// R rows a thread at once, NV vectors of each. WIDE: a row has tpr / 32 whole warps (and R is 1), else tpr <= 32 lanes of one.
template <class T, int NV, int R, bool WIDE, bool ADD>
__global__ void __launch_bounds__(WIDE ? 512 : FWD_THREADS, 1) fwd_kernel(const T* __restrict__ x, const T* __restrict__ res, const void* __restrict__ w, bool w_f32,
                                                                        T* __restrict__ y, T* __restrict__ sum, int64_t rows, int D, int tpr, float eps) {
    constexpr int VEC = 16 / sizeof(T);
    using V = Vec<T, VEC>;
    __shared__ float partial[16];
    const int groups = blockDim.x / tpr, lane = threadIdx.x % tpr, group = threadIdx.x / tpr;
    const int64_t first = blockIdx.x * (int64_t)(groups * R) + group;
    V v[R][NV];
    float ss[R] = {};
#pragma unroll
    for (int k = 0; k < R; k++)
#pragma unroll
        for (int j = 0; j < NV; j++) {
            const int c = (lane + j * tpr) * VEC;
            if (first + k * groups < rows && c < D) v[k][j] = V::load(x + (first + k * groups) * D + c);
        }
#pragma unroll
    for (int k = 0; k < R; k++)
#pragma unroll
        for (int j = 0; j < NV; j++) {
            const int c = (lane + j * tpr) * VEC;
            if (first + k * groups >= rows || c >= D) continue;
            if (ADD) {
                const int64_t o = (first + k * groups) * D + c;
                const V r = V::load(res + o);
#pragma unroll
                for (int i = 0; i < VEC / 2; i++) v[k][j].pair(i) = add_rn(v[k][j].pair(i), r.pair(i));
                v[k][j].store_once(sum + o);
            }
#pragma unroll
            for (int i = 0; i < VEC; i++) ss[k] += v[k][j][i] * v[k][j][i];
        }
    lane_sums(ss, WIDE ? 32 : tpr);
    if (WIDE) {
        const int warps = tpr / 32;
        if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = ss[0];
        __syncthreads();
        ss[0] = 0.f;
        for (int k = 0; k < warps; k++) ss[0] += partial[group * warps + k];
    }
#pragma unroll
    for (int k = 0; k < R; k++) {
        const float r = __frsqrt_rn(ss[k] / D + eps);
#pragma unroll
        for (int j = 0; j < NV; j++) {
            const int c = (lane + j * tpr) * VEC;
            if (first + k * groups < rows && c < D) {
                v[k][j].repack();
                normed(v[k][j], r, load_gain<T, VEC>(w, w_f32, c)).store_once(y + (first + k * groups) * D + c);
            }
        }
    }
}

// dx = r*(g*w) - x * r^3 * mean(g*w*x) [+ dsum];  dw = sum over rows of g * x * r
// Each thread copies its own vectors of the next rows to shared memory while it works on these, so the loads in flight do not
// depend on registers or occupancy, and only the sums over a row need a barrier.
template <class T, int NV, int R, bool WIDE, bool ADD>
__global__ void __launch_bounds__(WIDE ? 512 : BWD_THREADS, 1) bwd_kernel(const T* __restrict__ g, const T* __restrict__ x, const T* __restrict__ dsum, const void* __restrict__ w, bool w_f32,
                                                                        T* __restrict__ dx, float* __restrict__ dw_part, int64_t rows, int D, int tpr, float eps) {
    constexpr int VEC = 16 / sizeof(T), IN = ADD ? 3 : 2, STAGES = BWD_STAGES;
    using V = Vec<T, VEC>;
    __shared__ float2 partial[2][16];
    extern __shared__ __align__(16) unsigned char dynamic[];
    V* ring = reinterpret_cast<V*>(dynamic);                      // [STAGES][R][NV][IN][blockDim.x]
    const int groups = WIDE ? 1 : blockDim.x / tpr, lane = WIDE ? threadIdx.x : threadIdx.x % tpr, group = WIDE ? 0 : threadIdx.x / tpr;
    const int64_t stride = gridDim.x * (int64_t)(groups * R);
    float dw[NV][VEC] = {};
    V wv[NV];
#pragma unroll
    for (int j = 0; j < NV; j++) if ((lane + j * tpr) * VEC < D) wv[j] = load_gain<T, VEC>(w, w_f32, (lane + j * tpr) * VEC);
    auto slot = [&](int stage, int k, int j, int which) { return ring + (((stage * R + k) * NV + j) * IN + which) * blockDim.x + threadIdx.x; };
    auto fetch = [&](int64_t first, int stage) {
#pragma unroll
        for (int k = 0; k < R; k++)
#pragma unroll
            for (int j = 0; j < NV; j++) {
                const int c = (lane + j * tpr) * VEC;
                const int64_t row = first + k * groups;
                if (row < rows && c < D) {
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
                if (first + k * groups < rows && (lane + j * tpr) * VEC < D) {
                    xc[k][j] = *slot(stage, k, j, 0); gc[k][j] = *slot(stage, k, j, 1);
#pragma unroll
                    for (int i = 0; i < VEC; i++) sums[2 * k] += xc[k][j][i] * xc[k][j][i], sums[2 * k + 1] += gc[k][j][i] * wv[j][i] * xc[k][j][i];
                }
        lane_sums(sums, WIDE ? 32 : tpr);
        if (WIDE) {
            if (threadIdx.x % 32 == 0) partial[turn][threadIdx.x / 32] = {sums[0], sums[1]};
            __syncthreads();
            sums[0] = sums[1] = 0.f;
            for (int k = 0; k < blockDim.x / 32; k++) sums[0] += partial[turn][k].x, sums[1] += partial[turn][k].y;
        }
#pragma unroll
        for (int k = 0; k < R; k++) {
            const float r = __frsqrt_rn(sums[2 * k] / D + eps), m = sums[2 * k + 1] / D * r * r;
#pragma unroll
            for (int j = 0; j < NV; j++) {
                const int c = (lane + j * tpr) * VEC;
                if (first + k * groups < rows && c < D) {
                    V d;
                    if (ADD) d = *slot(stage, k, j, 2);
                    xc[k][j].repack(); gc[k][j].repack();
#pragma unroll
                    for (int i = 0; i < VEC; i++) {
                        const float t = r * (gc[k][j][i] * wv[j][i] - xc[k][j][i] * m);
                        dw[j][i] += gc[k][j][i] * (xc[k][j][i] * r);
                        d.set(i, ADD ? d[i] + t : t);
                    }
                    d.store_once(dx + (first + k * groups) * D + c);
                }
            }
        }
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
            if (c < D) out[c] = dw[j][i];
        }
    if (!WIDE) {
        __syncthreads();
        for (int c = threadIdx.x; c < D; c += blockDim.x) {
            float s = 0.f;
            for (int k = 0; k < groups; k++) s += acc[k * D + c];
            dw_part[blockIdx.x * (int64_t)D + c] = s;
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
    const float r = __frsqrt_rn(block_sum(ss, smem) / D + eps);
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
    const float r = __frsqrt_rn(sum.x / D + eps), k = sum.y / D * r * r;
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
    float s = 0.f;
    for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) s += to_float(g[row * D + c]) * (to_float(x[row * D + c]) * rstd[row]);
    dw_part[blockIdx.y * D + c] = s;
}

// How a row is spread: up to 64 vectors over the lanes of one warp, more over whole warps; ragged, unaligned or very wide
// rows take `*_any`. On an H200 few loads in flight and evict-first stores are fastest: the forward has 64 threads for a row of
// up to 8 vectors each, the backward 2 vectors a thread, one row ahead, and 512 threads on a multiprocessor.
struct Plan { int nv, tpr; bool wide, fast; };
template <class T> Plan plan(int64_t D, bool aligned, bool forward) {
    constexpr int VEC = 16 / sizeof(T);
    const int64_t vecs = D / VEC;
    Plan p{1, 32, vecs > 64, aligned && D % VEC == 0};
    if (p.wide) {
        if (forward) p.nv = vecs <= 128 ? 2 : vecs <= 256 ? 4 : 8;
        else p.nv = 2;
        p.tpr = (int)(ceil_div(vecs, 32 * p.nv) * 32);
        p.fast = p.fast && vecs <= 512 * p.nv;
    }
    else if (vecs <= 32) p.tpr = pow2_at_least(vecs);
    else p.nv = 2;
    return p;
}

template <bool ADD> void forward(const Tensor& x, const Tensor* res, const Tensor& w, double eps, Tensor& y, Tensor* sum) {
    const int64_t D = w.numel(), rows = D ? x.numel() / D : 0;
    if (!rows) return;
    torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
    const cudaStream_t s = stream_of(x);
    const bool w_f32 = w.scalar_type() == ScalarType::Float;
    DISPATCH(x.scalar_type(), "rms_norm", {
        const T *px = (const T*)x.const_data_ptr(), *pr = ADD ? (const T*)res->const_data_ptr() : nullptr;
        T *py = (T*)y.mutable_data_ptr(), *ps = ADD ? (T*)sum->mutable_data_ptr() : nullptr;
        const void* pw = w.const_data_ptr();
        const Plan p = plan<T>(D, aligned16(px) && aligned16(pr) && aligned16(py) && aligned16(ps) && aligned16(pw), true);
        auto launch = [&](auto kernel, int R) {
            const int threads = FWD_THREADS % p.tpr ? p.tpr : FWD_THREADS;
            kernel<<<ceil_div(rows, threads / p.tpr * R), threads, 0, s>>>(px, pr, pw, w_f32, py, ps, rows, (int)D, p.tpr, (float)eps);
        };
        if (!p.fast) fwd_any<T, ADD><<<rows, 256, 0, s>>>(px, pr, pw, w_f32, py, ps, rows, D, (float)eps);
        else if (p.wide && p.nv == 8) launch(fwd_kernel<T, 8, 1, true, ADD>, 1);
        else if (p.wide && p.nv == 4) launch(fwd_kernel<T, 4, 1, true, ADD>, 1);
        else if (p.wide) launch(fwd_kernel<T, 2, 1, true, ADD>, 1);
        else if (p.nv == 2) launch(fwd_kernel<T, 2, 1, false, ADD>, 1);
        else launch(fwd_kernel<T, 1, 2, false, ADD>, 2);
    });
    check_launch("rms_norm forward");
}

template <bool ADD> void backward(const Tensor& g, const Tensor& x, const Tensor* dsum, const Tensor& w, double eps, Tensor& dx, Tensor& dw) {
    const int64_t D = w.numel(), rows = D ? x.numel() / D : 0;
    if (!rows) { torch::stable::zero_(dw); return; }
    torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
    const cudaStream_t s = stream_of(x);
    const bool w_f32 = w.scalar_type() == ScalarType::Float;
    DISPATCH(x.scalar_type(), "rms_norm", {
        const T *pg = (const T*)g.const_data_ptr(), *px = (const T*)x.const_data_ptr(), *pd = ADD ? (const T*)dsum->const_data_ptr() : nullptr;
        T* pdx = (T*)dx.mutable_data_ptr();
        const void* pw = w.const_data_ptr();
        const Plan p = plan<T>(D, aligned16(pg) && aligned16(px) && aligned16(pd) && aligned16(pdx) && aligned16(pw), false);
        int64_t parts = rows < 256 ? rows : 256;
        Tensor part = x;
        if (!p.fast) {
            part = torch::stable::new_empty(x, {parts, D}, ScalarType::Float);
            Tensor rstd = torch::stable::new_empty(x, {rows}, ScalarType::Float);
            bwd_any<T, ADD><<<rows, 256, 0, s>>>(pg, px, pd, pw, w_f32, pdx, (float*)rstd.mutable_data_ptr(), rows, D, (float)eps);
            dw_any<T><<<dim3(ceil_div(D, 128), parts), 128, 0, s>>>(pg, px, (const float*)rstd.const_data_ptr(), (float*)part.mutable_data_ptr(), rows, D);
        } else {
            auto launch = [&](auto kernel, int R) {
                const int threads = p.wide ? p.tpr : BWD_THREADS, groups = threads / p.tpr;
                int smem = BWD_STAGES * R * p.nv * (ADD ? 3 : 2) * threads * 16;
                if (!p.wide && smem < groups * D * 4) smem = groups * D * 4;
                if (smem > 32 << 10) cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem);
                const int64_t want = (int64_t)sm_count() * (512 / threads), have = ceil_div(rows, groups * R);
                parts = want < have ? want : have;
                part = torch::stable::new_empty(x, {parts, D}, ScalarType::Float);
                kernel<<<parts, threads, smem, s>>>(pg, px, pd, pw, w_f32, pdx, (float*)part.mutable_data_ptr(), rows, (int)D, p.tpr, (float)eps);
            };
            if (p.wide) launch(bwd_kernel<T, 2, 1, true, ADD>, 1);
            else if (p.nv == 2) launch(bwd_kernel<T, 2, 1, false, ADD>, 1);
            else launch(bwd_kernel<T, 1, 2, false, ADD>, 2);
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
