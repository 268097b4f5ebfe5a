// Flash attention, what all its kernels share: the problem, which keys a query sees, the gradient's first step, the torch ops.
//
//   S = scale q k^T     P = softmax(S)     o = P v     lse = log sum exp S          (rows: queries, columns: keys)
//   delta = rowsum(do * o) - dlse     dv = P^T do     dS = P * (do v^T - delta)     dq = scale dS k     dk = scale dS^T q
//
// Everything is added up in one order: a block owns a tile of queries (o, dq) or a tile of keys (dk, dv, over all query heads of the group); where the owner of keys adds to dq, it waits for its turn.
#pragma once
#include "common.cuh"
#include <algorithm>
#include <optional>

// Kernels by what a launch of each asks for, as `shared_bytes` is asked: bytes of shared memory beside what the kernel itself declares, or -1 if these files have no such kernel.
// Every card since sm_80 gives a block 99 KiB (sm_80 itself 163, Hopper 227), of which a kernel's own declarations are part.
enum Launch { FORWARD, BACKWARD_KEYS, BACKWARD_QUERIES, FEW, HOPPER_FORWARD, HOPPER_SHORT_FORWARD, HOPPER_BACKWARD };
constexpr int SMALL = 99 * 1024, HOPPER_MOST = 227 * 1024, OWN_MOST = 1024; // what every card gives, what Hopper does; room left for what a kernel declares

#ifdef __CUDACC__
struct Rows { // [B, H, N, D] with any strides, the last one 1
    void* p;
    int64_t b, h, n;
    template <class T> __device__ T* at(int64_t ib, int64_t ih) const { return (T*)p + ib * b + ih * h; }
};
struct Flash {
    Rows q, k, v, o, g, dq, dk, dv;
    float *lse, *delta; // [B, H, T]; delta is scratch
    const float* g_lse; // [B, H, T], or null
    const int *pad, *key_runs, *query_runs; // [B], [2, T], [2, S], or null
    int B, H, Hkv, group, T, S, D, causal;
    float scale, scale_log2;
};
HD int tiles_of(int n, int width) { return (n + width - 1) / width; }
struct Run { int lo, hi; };

// The keys that query i of batch row b sees. Both ends ascend with i, so the first and the last query of a tile speak for all of it.
__device__ __forceinline__ Run keys_of(const Flash& f, int b, int i) {
    if (f.key_runs) return {f.key_runs[i], f.key_runs[f.T + i]};
    return {f.pad ? min(max(f.pad[b], 0), f.S) : 0, f.causal ? max(i + 1 + f.S - f.T, 0) : f.S};
}
// The queries that see key j.
__device__ __forceinline__ Run queries_of(const Flash& f, int b, int j) {
    if (f.query_runs) return {f.query_runs[j], f.query_runs[f.S + j]};
    const int lo = f.causal ? max(j - (f.S - f.T), 0) : 0;
    return {lo, f.pad && j < f.pad[b] ? lo : f.T};
}
// Of rows [r0, r0+n) that end at N: tiles [begin, end) of `width` in which anything is seen, and from where to where every row sees everything.
struct Span { int begin, end, all_lo, all_hi; };
template <class F> __device__ __forceinline__ Span span_of(F run, int r0, int n, int N, int width) {
    const Run first = run(r0), last = run(min(r0 + n, N) - 1);
    return {first.lo / width, tiles_of(last.hi, width), last.lo, first.hi};
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

// delta[b, h, t] = sum over d of g * o, less g_lse; `lanes` threads for a row, VEC elements each at a time.
template <class T, int VEC> __global__ void delta_kernel(const Flash f, int lanes) {
    const int64_t row = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / lanes, rows = (int64_t)f.B * f.H * f.T;
    const int lane = threadIdx.x % lanes;
    float s = 0;
    if (row < rows) {
        const int64_t t = row % f.T, bh = row / f.T;
        const T* g = f.g.at<const T>(bh / f.H, bh % f.H) + t * f.g.n;
        const T* o = f.o.at<const T>(bh / f.H, bh % f.H) + t * f.o.n;
        for (int d = lane * VEC; d < f.D; d += lanes * VEC) {
            const Vec<T, VEC> a = Vec<T, VEC>::load(g + d), b = Vec<T, VEC>::load(o + d);
#pragma unroll
            for (int i = 0; i < VEC; i++) s = fmaf(a[i], b[i], s);
        }
    }
    s = lane_sum(s, lanes);
    if (row < rows && lane == 0) f.delta[row] = s - (f.g_lse ? f.g_lse[row] : 0.f);
}

// Does a tensor's memory suit 16-byte copies of rows of D elements?
inline bool vectors(const Tensor& t, int size) {
    const int64_t n = 16 / size;
    bool ok = aligned16(t.const_data_ptr()) && t.stride(3) == 1 && t.size(3) % n == 0;
    for (int i = 0; i < 3; i++) ok = ok && (t.size(i) == 1 || t.stride(i) % n == 0);
    return ok;
}
inline Tensor readable(const Tensor& t, bool vec) { // as it is if it can be
    return (vec ? vectors(t, 2) : t.stride(3) == 1 || t.size(3) == 1) ? t : torch::stable::contiguous(t);
}
// An empty tensor of this shape, heads inside of tokens if they are so in `t`
inline Tensor empty_as(const Tensor& t, bool heads_inside) {
    const int64_t B = t.size(0), H = t.size(1), N = t.size(2), D = t.size(3);
    return heads_inside ? torch::stable::transpose(torch::stable::new_empty(t, {B, N, H, D}), 1, 2) : torch::stable::new_empty(t, {B, H, N, D});
}
inline bool heads_inside(const Tensor& t) { return t.stride(1) < t.stride(2); }
inline Rows rows_of(const Tensor& t) { return {const_cast<void*>(t.const_data_ptr()), t.stride(0), t.stride(1), t.stride(2)}; }
inline const int* ints(const std::optional<Tensor>& t, const char* name) {
    if (!t) return nullptr;
    STD_TORCH_CHECK(t->scalar_type() == ScalarType::Int && t->is_contiguous(), "flash: ", name, " must be contiguous int32");
    return (const int*)t->const_data_ptr();
}
// Kernels count the rows of a head and the blocks in 32 bits; no tile has less than 16 rows
inline void countable(const Tensor& q, const Tensor& k) {
    int64_t most = 0;
    for (int i = 0; i < 4; i++) most = std::max({most, q.size(i), k.size(i)});
    STD_TORCH_CHECK(most < (1ll << 31) - 256 && (double)q.size(0) * (double)std::max(q.size(1) * ceil_div(q.size(2), 16), k.size(1) * ceil_div(k.size(2), 16)) < (double)(1ll << 31),
                    "flash: more rows than the kernels count (2^31 of a head, 2^31 tiles of 16 in all); call it on parts");
}
inline Flash problem(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& pad, const std::optional<Tensor>& key_runs,
                     const std::optional<Tensor>& query_runs, bool causal, double scale) {
    Flash f{};
    f.q = rows_of(q), f.k = rows_of(k), f.v = rows_of(v);
    f.pad = ints(pad, "pad"), f.key_runs = ints(key_runs, "key_runs"), f.query_runs = ints(query_runs, "query_runs");
    f.B = q.size(0), f.H = q.size(1), f.T = q.size(2), f.D = q.size(3), f.Hkv = k.size(1), f.S = k.size(2);
    f.group = f.Hkv ? f.H / f.Hkv : 0, f.causal = causal, f.scale = scale, f.scale_log2 = (float)(scale * 1.4426950408889634);
    return f;
}
inline void allow_smem(const void* kernel, int bytes) { allow_smem("flash", kernel, bytes); }
template <class T> void run_delta(const Flash& f, bool vec, cudaStream_t s) {
    constexpr int N = 16 / sizeof(T);
    const int64_t rows = (int64_t)f.B * f.H * f.T;
    if (!rows) return;
    const int lanes = std::min(32, pow2_at_least(ceil_div(f.D, vec ? N : 1)));
    const int64_t blocks = ceil_div(rows * lanes, 256);
    if (vec) delta_kernel<T, N><<<blocks, 256, 0, s>>>(f, lanes);
    else delta_kernel<T, 1><<<blocks, 256, 0, s>>>(f, lanes);
}

// The ops, over `Impl::forward<T>(f, stream)` and `Impl::backward<T>(f, stream)`; Impl::VEC says whether they copy 16 bytes at a time.
template <class Impl> std::tuple<Tensor, Tensor> flash(const Tensor& q_, const Tensor& k_, const Tensor& v_, const std::optional<Tensor>& pad, const std::optional<Tensor>& key_runs,
                                                       const std::optional<Tensor>& query_runs, bool causal, double scale) {
    countable(q_, k_);
    torch::stable::accelerator::DeviceGuard guard(q_.get_device_index());
    const Tensor q = readable(q_, Impl::VEC), k = readable(k_, Impl::VEC), v = readable(v_, Impl::VEC);
    Tensor o = empty_as(q, true), lse = torch::stable::new_empty(q, {q.size(0), q.size(1), q.size(2)}, ScalarType::Float);
    Flash f = problem(q, k, v, pad, key_runs, query_runs, causal, scale);
    f.o = rows_of(o), f.lse = (float*)lse.mutable_data_ptr();
    std::optional<Tensor> scratch;
    if (const int64_t n = Impl::scratch(f)) scratch = torch::stable::new_empty(q, {n}, ScalarType::Float), f.delta = (float*)scratch->mutable_data_ptr();
    if (o.numel() || lse.numel()) Impl::dispatch(q.scalar_type(), f, false, stream_of(q));
    check_launch("flash");
    return {o, lse};
}
template <class Impl> std::tuple<Tensor, Tensor, Tensor> flash_backward(const Tensor& g_, const std::optional<Tensor>& g_lse, const Tensor& q_, const Tensor& k_, const Tensor& v_, const Tensor& o,
                                                                        const Tensor& lse, const std::optional<Tensor>& pad, const std::optional<Tensor>& key_runs,
                                                                        const std::optional<Tensor>& query_runs, bool causal, double scale) {
    countable(q_, k_);
    torch::stable::accelerator::DeviceGuard guard(q_.get_device_index());
    const Tensor q = readable(q_, Impl::VEC), k = readable(k_, Impl::VEC), v = readable(v_, Impl::VEC), g = readable(g_, Impl::VEC);
    Tensor dq = empty_as(q, heads_inside(q_)), dk = empty_as(k, heads_inside(k_)), dv = empty_as(v, heads_inside(v_));
    std::optional<Tensor> gl;
    if (g_lse) gl = torch::stable::contiguous(*g_lse);
    Flash f = problem(q, k, v, pad, key_runs, query_runs, causal, scale);
    Tensor scratch = torch::stable::new_empty(q, {Impl::backward_scratch(f)}, ScalarType::Float);
    f.o = rows_of(o), f.g = rows_of(g), f.dq = rows_of(dq), f.dk = rows_of(dk), f.dv = rows_of(dv);
    f.lse = (float*)lse.const_data_ptr(), f.delta = (float*)scratch.mutable_data_ptr(), f.g_lse = gl ? (const float*)gl->const_data_ptr() : nullptr;
    if (dq.numel() || dk.numel()) Impl::dispatch(q.scalar_type(), f, true, stream_of(q));
    check_launch("flash backward");
    return {dq, dk, dv};
}
#define FLASH_OPS(Impl)                                        \
    SHARED_BYTES                                               \
    STABLE_TORCH_LIBRARY_IMPL(XTRAIN_NS, CUDA, m) {            \
        m.impl("flash", TORCH_BOX(&flash<Impl>));              \
        m.impl("flash_backward", TORCH_BOX(&flash_backward<Impl>)); \
    }
#else
#define FLASH_OPS(Impl) SHARED_BYTES
#endif
// `shared_bytes` of the file that defines it; without a tensor, so a machine without a GPU can ask
#define SHARED_BYTES STABLE_TORCH_LIBRARY_IMPL(XTRAIN_NS, CompositeExplicitAutograd, m) { m.impl("shared_bytes", TORCH_BOX(&shared_bytes)); }

STABLE_TORCH_LIBRARY_FRAGMENT(XTRAIN_NS, m) {
    m.def("shared_bytes(int launch, int head_dim) -> int");
    m.def("flash(Tensor q, Tensor k, Tensor v, Tensor? pad, Tensor? key_runs, Tensor? query_runs, bool causal, float scale) -> (Tensor, Tensor)");
    m.def("flash_backward(Tensor g, Tensor? g_lse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor? pad, Tensor? key_runs, Tensor? query_runs, bool causal, float scale) -> (Tensor, Tensor, Tensor)");
}
