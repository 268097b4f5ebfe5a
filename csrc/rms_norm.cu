// RMSNorm y = w * x / sqrt(mean(x^2) + eps) and its gradient, with an optional residual add in the same pass.
// A row lives in the registers of `tpr` threads, so x is read once; the backward recomputes 1/rms from x instead of
// keeping it. Each block owns a fixed set of rows and sums its share of dw in registers; a second kernel adds the
// shares in block order, so two runs give the same bits.
#include "common.cuh"

#ifdef __CUDACC__
// N gains at once, as `gain` reads them
template <class T, int N> __device__ __forceinline__ void gains(const void* w, bool w_f32, int i, float (&out)[N]) {
    if (w_f32) {
#pragma unroll
        for (int k = 0; k < N; k += 4) {
            const float4 f = *reinterpret_cast<const float4*>(static_cast<const float*>(w) + i + k);
            out[k] = f.x; out[k + 1] = f.y; out[k + 2] = f.z; out[k + 3] = f.w;
        }
    } else {
        const Vec<T, N> v = Vec<T, N>::load(static_cast<const T*>(w) + i);
#pragma unroll
        for (int k = 0; k < N; k++) out[k] = v[k];
    }
}

// NV vectors of VEC elements a thread; BLOCK: a row has the whole block, else tpr <= 32 lanes of a warp.
template <class T, int NV, bool BLOCK, bool ADD>
__global__ void __launch_bounds__(BLOCK ? 512 : 256) fwd_kernel(const T* __restrict__ x, const T* __restrict__ res, const void* __restrict__ w, bool w_f32,
                                                                 T* __restrict__ y, T* __restrict__ sum, int64_t rows, int D, int tpr, float eps) {
    constexpr int VEC = 16 / sizeof(T);
    using V = Vec<T, VEC>;
    __shared__ float smem[64];
    const int per_block = BLOCK ? 1 : blockDim.x / tpr, lane = BLOCK ? threadIdx.x : threadIdx.x % tpr;
    const int64_t row = blockIdx.x * (int64_t)per_block + (BLOCK ? 0 : threadIdx.x / tpr);
    const bool live = row < rows;
    V v[NV];
    float ss = 0.f;
#pragma unroll
    for (int j = 0; j < NV; j++) {
        const int c = (lane + j * tpr) * VEC;
        if (live && c < D) {
            v[j] = V::load(x + row * D + c);
            if (ADD) {
                const V r = V::load(res + row * D + c);
#pragma unroll
                for (int i = 0; i < VEC; i++) v[j].set(i, v[j][i] + r[i]);
                v[j].store(sum + row * D + c);
            }
#pragma unroll
            for (int i = 0; i < VEC; i++) ss += v[j][i] * v[j][i];
        }
    }
    ss = BLOCK ? block_sum(ss, smem) : lane_sum(ss, tpr);
    const float r = __frsqrt_rn(ss / D + eps);
#pragma unroll
    for (int j = 0; j < NV; j++) {
        const int c = (lane + j * tpr) * VEC;
        if (live && c < D) {
            float wv[VEC];
            gains<T, VEC>(w, w_f32, c, wv);
#pragma unroll
            for (int i = 0; i < VEC; i++) v[j].set(i, wv[i] * (v[j][i] * r));
            v[j].store(y + row * D + c);
        }
    }
}

// dx = r*(g*w) - x * r^3 * mean(g*w*x) [+ dsum];  dw = sum over rows of g * x * r
// Each thread copies its own vectors of the next STAGES rows to shared memory while it works on this one, so the loads in
// flight do not depend on registers or occupancy, and only the sums over a row need a barrier.
template <class T, int NV, bool BLOCK, bool ADD, int STAGES>
__global__ void __launch_bounds__(BLOCK ? 512 : 256) bwd_kernel(const T* __restrict__ g, const T* __restrict__ x, const T* __restrict__ dsum, const void* __restrict__ w, bool w_f32,
                                                                 T* __restrict__ dx, float* __restrict__ dw_part, int64_t rows, int D, int tpr, float eps) {
    constexpr int VEC = 16 / sizeof(T), IN = ADD ? 3 : 2;
    using V = Vec<T, VEC>;
    __shared__ float smem[2][64];
    extern __shared__ __align__(16) unsigned char dynamic[];
    V* ring = reinterpret_cast<V*>(dynamic);                      // [STAGES][IN][NV][blockDim.x]
    const int per_block = BLOCK ? 1 : blockDim.x / tpr, lane = BLOCK ? threadIdx.x : threadIdx.x % tpr, slot = BLOCK ? 0 : threadIdx.x / tpr;
    const int64_t stride = (int64_t)gridDim.x * per_block;
    float dw[NV][VEC] = {};
    float wv[NV][VEC];
#pragma unroll
    for (int j = 0; j < NV; j++) if ((lane + j * tpr) * VEC < D) gains<T, VEC>(w, w_f32, (lane + j * tpr) * VEC, wv[j]);
    auto at = [&](int stage, int which, int j) { return ring + ((stage * IN + which) * NV + j) * blockDim.x + threadIdx.x; };
    auto fetch = [&](int64_t row, int stage) {
#pragma unroll
        for (int j = 0; j < NV; j++) {
            const int c = (lane + j * tpr) * VEC;
            if (row < rows && c < D) {
                copy_async(at(stage, 0, j), x + row * D + c);
                copy_async(at(stage, 1, j), g + row * D + c);
                if (ADD) copy_async(at(stage, 2, j), dsum + row * D + c);
            }
        }
        copy_commit();
    };
    int64_t row = blockIdx.x * (int64_t)per_block + slot;
#pragma unroll
    for (int k = 0; k < STAGES - 1; k++) fetch(row + k * stride, k);
    int stage = 0, turn = 0;
    for (int64_t base = blockIdx.x * (int64_t)per_block; base < rows; base += stride, row += stride, turn ^= 1) {
        const bool live = row < rows;
        fetch(row + (STAGES - 1) * stride, stage == 0 ? STAGES - 1 : stage - 1);
        copy_wait<STAGES - 1>();
        V xc[NV], gc[NV];
        float2 sum = {0.f, 0.f};                                  // x^2 and g*w*x
#pragma unroll
        for (int j = 0; j < NV; j++) {
            if (live && (lane + j * tpr) * VEC < D) {
                xc[j] = *at(stage, 0, j); gc[j] = *at(stage, 1, j);
#pragma unroll
                for (int i = 0; i < VEC; i++) sum.x += xc[j][i] * xc[j][i], sum.y += gc[j][i] * wv[j][i] * xc[j][i];
            }
        }
        sum = BLOCK ? block_sum(sum, smem[turn]) : make_float2(lane_sum(sum.x, tpr), lane_sum(sum.y, tpr));
        const float r = __frsqrt_rn(sum.x / D + eps), k = sum.y / D * r * r;
#pragma unroll
        for (int j = 0; j < NV; j++) {
            const int c = (lane + j * tpr) * VEC;
            if (live && c < D) {
                V d;
                if (ADD) d = *at(stage, 2, j);
#pragma unroll
                for (int i = 0; i < VEC; i++) {
                    const float t = r * (gc[j][i] * wv[j][i] - xc[j][i] * k);
                    dw[j][i] += gc[j][i] * xc[j][i] * r;
                    d.set(i, ADD ? d[i] + t : t);
                }
                d.store(dx + row * D + c);
            }
        }
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    // the block's share of dw; with several rows a block, its row slots one after the other
    copy_wait<0>();
    __syncthreads();
    float* acc = reinterpret_cast<float*>(dynamic);
    float* out = BLOCK ? dw_part + blockIdx.x * (int64_t)D : acc + slot * D;
#pragma unroll
    for (int j = 0; j < NV; j++)
#pragma unroll
        for (int i = 0; i < VEC; i++) {
            const int c = (lane + j * tpr) * VEC + i;
            if (c < D) out[c] = dw[j][i];
        }
    if (!BLOCK) {
        __syncthreads();
        for (int c = threadIdx.x; c < D; c += blockDim.x) {
            float s = 0.f;
            for (int k = 0; k < per_block; k++) s += acc[k * D + c];
            dw_part[blockIdx.x * (int64_t)D + c] = s;
        }
    }
}

// Rows of any width, any alignment: one block a row, the row read twice.
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
        y[o + c] = from_float<T>(gain<T>(w, w_f32, c) * (to_float((ADD ? sum : x)[o + c]) * r));
}
template <class T, bool ADD>
__global__ void bwd_any(const T* g, const T* x, const T* dsum, const void* w, bool w_f32, T* dx, float* rstd, int64_t rows, int64_t D, float eps) {
    __shared__ float smem[64];
    const int64_t o = blockIdx.x * D;
    float ss = 0.f, dot = 0.f;
    for (int64_t c = threadIdx.x; c < D; c += blockDim.x) {
        const float v = to_float(x[o + c]);
        ss += v * v; dot += to_float(g[o + c]) * gain<T>(w, w_f32, c) * v;
    }
    const float2 sum = block_sum(make_float2(ss, dot), smem);
    const float r = __frsqrt_rn(sum.x / D + eps), k = sum.y / D * r * r;
    for (int64_t c = threadIdx.x; c < D; c += blockDim.x) {
        const float t = r * (to_float(g[o + c]) * gain<T>(w, w_f32, c) - to_float(x[o + c]) * k);
        dx[o + c] = from_float<T>(ADD ? t + to_float(dsum[o + c]) : t);
    }
    if (threadIdx.x == 0) rstd[blockIdx.x] = r;
}
template <class T>
__global__ void dw_any(const T* g, const T* x, const float* rstd, float* dw_part, int64_t rows, int64_t D) {
    const int64_t c = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    if (c >= D) return;
    float s = 0.f;
    for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) s += to_float(g[row * D + c]) * to_float(x[row * D + c]) * rstd[row];
    dw_part[blockIdx.y * D + c] = s;
}

// A thread holds up to 4 vectors. Up to 128 of them (D 1024 in bf16) a row fits one warp, up to 512 times as many a block; wider or unaligned rows take `*_any`.
struct Plan { int nv, tpr, threads; bool block, fast; };
template <class T, int MAX> Plan plan(int64_t D, bool aligned) {
    constexpr int VEC = 16 / sizeof(T);
    const int64_t vecs = D / VEC;
    Plan p{MAX, 32, 256, vecs > 32 * MAX, aligned && D % VEC == 0 && vecs <= 512 * MAX};
    if (p.block) p.tpr = p.threads = (int)ceil_div(vecs, 32 * MAX) * 32;
    else if (vecs <= 32) { p.nv = 1; p.tpr = pow2_at_least(vecs); }
    else if (vecs <= 64) p.nv = 2;
    return p;
}
#ifndef FWD_NV
#define FWD_NV 2
#define BWD_NV 2
#define BWD_BLOCKS 4
#define BWD_STAGES 2
#endif
#define LAUNCH(KERNEL, MAX, blocks, ...)                                           \
    if (p.block) KERNEL(MAX, true)<<<blocks, p.threads, smem, s>>>(__VA_ARGS__);    \
    else if (p.nv == 4) KERNEL(4, false)<<<blocks, p.threads, smem, s>>>(__VA_ARGS__); \
    else if (p.nv == 2) KERNEL(2, false)<<<blocks, p.threads, smem, s>>>(__VA_ARGS__); \
    else KERNEL(1, false)<<<blocks, p.threads, smem, s>>>(__VA_ARGS__)
#define FWD(NV, BLOCK) fwd_kernel<T, NV, BLOCK, ADD>
#define BWD(NV, BLOCK) bwd_kernel<T, NV, BLOCK, ADD, BWD_STAGES>
#define BIG(NV, BLOCK) cudaFuncSetAttribute(BWD(NV, BLOCK), cudaFuncAttributeMaxDynamicSharedMemorySize, smem)

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
        const Plan p = plan<T, FWD_NV>(D, aligned16(px) && aligned16(pr) && aligned16(py) && aligned16(pw));
        if (!p.fast) fwd_any<T, ADD><<<rows, 256, 0, s>>>(px, pr, pw, w_f32, py, ps, rows, D, (float)eps);
        else { const int smem = 0; LAUNCH(FWD, FWD_NV, ceil_div(rows, p.block ? 1 : p.threads / p.tpr), px, pr, pw, w_f32, py, ps, rows, (int)D, p.tpr, (float)eps); }
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
        const Plan p = plan<T, BWD_NV>(D, aligned16(pg) && aligned16(px) && aligned16(pd) && aligned16(pdx) && aligned16(pw));
        int64_t parts;
        Tensor part = x;
        if (!p.fast) {
            parts = rows < 256 ? rows : 256;
            part = torch::stable::new_empty(x, {parts, D}, ScalarType::Float);
            Tensor rstd = torch::stable::new_empty(x, {rows}, ScalarType::Float);
            bwd_any<T, ADD><<<rows, 256, 0, s>>>(pg, px, pd, pw, w_f32, pdx, (float*)rstd.mutable_data_ptr(), rows, D, (float)eps);
            dw_any<T><<<dim3(ceil_div(D, 128), parts), 128, 0, s>>>(pg, px, (const float*)rstd.const_data_ptr(), (float*)part.mutable_data_ptr(), rows, D);
        } else {
            const int per_block = p.block ? 1 : p.threads / p.tpr;
            const int nv = p.block ? BWD_NV : p.nv;
            int smem = BWD_STAGES * (ADD ? 3 : 2) * nv * p.threads * 16;
            if (!p.block && smem < per_block * D * 4) smem = per_block * D * 4;
            if (p.block) BIG(BWD_NV, true); else if (p.nv == 4) BIG(4, false); else if (p.nv == 2) BIG(2, false); else BIG(1, false);
            const int64_t want = (int64_t)sm_count() * (p.block && p.threads < 256 ? BWD_BLOCKS * 256 / p.threads : BWD_BLOCKS), have = ceil_div(rows, per_block);
            parts = want < have ? want : have;
            part = torch::stable::new_empty(x, {parts, D}, ScalarType::Float);
            float* pp = (float*)part.mutable_data_ptr();
            LAUNCH(BWD, BWD_NV, parts, pg, px, pd, pw, w_f32, pdx, pp, rows, (int)D, p.tpr, (float)eps);
        }
        check_launch("rms_norm backward");
        const dim3 block(32, 32);
        if (w_f32) sum_parts<float><<<ceil_div(D, 32), block, 0, s>>>((const float*)part.const_data_ptr(), (float*)dw.mutable_data_ptr(), (int)parts, D);
        else sum_parts<T><<<ceil_div(D, 32), block, 0, s>>>((const float*)part.const_data_ptr(), (T*)dw.mutable_data_ptr(), (int)parts, D);
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
