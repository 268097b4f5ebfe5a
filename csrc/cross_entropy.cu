// Cross-entropy of one row of V logits: loss = lse(z) - z[target], d loss/dz = softmax(z) - onehot(target).
// Forward reads the row once: every thread keeps a running maximum and a sum that is rescaled when the maximum grows, then
// the block merges them in a fixed tree. Reads V, writes the loss, the maximum m and the sum s = sum exp(z - m). Backward reads V and writes V.
// `loss_and_grad_` does both for the fused head and writes over the logits: the row waits in the shared memory of one block, or of a
// cluster of them, for its second use. Reads V, writes V. `grad_columns_` is the backward over some of a row's columns, in place.
// A target outside [0, V) that is not `ignore`: NaN loss and NaN gradients. Nothing is read or written out of bounds.
// Options: z-loss (z * lse^2 is added) and soft-cap (z becomes cap * tanh(z / cap)); 0 turns either off.
#include "common.cuh"
#include <cmath>

// For 16-bit logits the hardware's own 2^x; in float32 its last two bits would be missed, and there is time for better.
template <class T> HD float exp_of(float x) {
#ifdef __CUDA_ARCH__
    if (sizeof(T) == 2) {
        float y;
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
        return y;
    }
#endif
    return expf(x);
}
struct Lse { float m, s; };                                         // max, and sum of exp(z - max)
template <bool CAP> HD float capped(float z, float cap) { return CAP ? cap * tanhf(z / cap) : z; }

// Of what one thread has seen of a row
template <class T> struct Running : Lse {
    HD Running() : Lse{-INFINITY, 0.f} {}
    template <int N> HD void take(float (&x)[N]) {                  // a power of two of them
        float top = x[0];
        for (int k = 1; k < N; k++) top = fmaxf(top, x[k]);
        if (top > m) { s *= exp_of<T>(m - top); m = top; }
        const float base = m > -INFINITY ? m : 0.f;
        for (int k = 0; k < N; k++) x[k] = exp_of<T>(x[k] - base);  // subtract first: a common offset must cost nothing
        for (int n = N / 2; n; n /= 2)
            for (int k = 0; k < n; k++) x[k] += x[k + n];
        s += x[0];
    }
    HD void take(float x) { float one[1] = {x}; take(one); }
};
HD float loss_of(Lse a, float y_target, float z_loss) {
    const float log_s = logf(a.s), lse = a.m + log_s;
    return (a.m - y_target) + log_s + z_loss * lse * lse;
}
// dz = (k * exp(y - m) - g * onehot) * dy/dz
HD float factor(float g, Lse a, float z_loss) { return g * (1.f + 2.f * z_loss * (a.m + logf(a.s))) / a.s; }
template <class T, bool CAP> HD float grad_one(float x, float m, float k, float g, float cap) {
    const float y = capped<CAP>(x, cap), d = k * exp_of<T>(y - m) - g;
    return CAP ? d * (1.f - (y / cap) * (y / cap)) : d;
}

#ifdef __CUDACC__
constexpr int FWD_THREADS = 256, FWD_BLOCKS = 6, GRAD_THREADS = 512, GRAD_BLOCKS = 2; // and blocks on a multiprocessor: tried on an H200
constexpr int BOTH_THREADS = 384, BOTH_BLOCKS = 2, MAX_PARTS = 8;   // a cluster of 8 is what every card with clusters can do
constexpr int U = 2;                                                // vectors that a thread asks for at once

// Parts of a row become one: the larger maximum, and every sum moved over to it. All threads get the answer.
__device__ __forceinline__ Lse warp_merge(Lse x) {
    float m = x.m;
    for (int o = 16; o; o >>= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, o));
    return {m, lane_sum(m == -INFINITY ? x.s : x.s * expf(x.m - m), 32)};
}
__device__ __forceinline__ Lse block_merge(Lse x, Lse* smem) {
    const int lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    x = warp_merge(x);
    if (lane == 0) smem[threadIdx.x >> 5] = x;
    __syncthreads();
    return warp_merge(lane < warps ? smem[lane] : Lse{-INFINITY, 0.f});
}
// The same over the blocks of a cluster; `all` is a place for each of them, in every one.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ Lse cluster_merge(Lse x, Lse* all, int rank, int parts) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x < parts) {
        unsigned at;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"((unsigned)__cvta_generic_to_shared(all + rank)), "r"(threadIdx.x));
        asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(x.m), "f"(x.s) : "memory");
    }
    cluster_arrive();
    cluster_wait();
    const int lane = threadIdx.x & 31;
    x = warp_merge(lane < parts ? all[lane] : Lse{-INFINITY, 0.f});
#endif
    return x;
}

// A row, or what one block has of it: elements before the first 16-byte boundary, vectors, and what is left behind the last.
template <class T> struct Row {
    static constexpr int VEC = 16 / sizeof(T);
    using V16 = Vec<T, VEC>;
    int64_t V, tail;
    int head, first, last;                                          // my vectors are first … last - 1; 32 bits suffice for one row
    bool ends;                                                      // are head and tail mine?
    __device__ Row(const T* p, int64_t V, int part = 0, int parts = 1) : V(V), ends(part == 0) {
        head = int((16 - (reinterpret_cast<uintptr_t>(p) & 15)) & 15) / (int)sizeof(T);
        if (head > V) head = (int)V;
        const int vecs = (int)((V - head) / VEC), each = (vecs + parts - 1) / parts;
        tail = head + (int64_t)vecs * VEC;
        first = min(part * each, vecs);
        last = min(first + each, vecs);
    }
    __device__ int64_t at(int vec) const { return head + (int64_t)vec * VEC; }
    template <class F> __device__ void each_end(F f) const {
        if (!ends) return;
        if (threadIdx.x < head) f((int64_t)threadIdx.x);
        if (tail + threadIdx.x < V) f(tail + threadIdx.x);          // fewer than VEC are left
    }
};

template <class T, bool CAP> __device__ __forceinline__ void take(Running<T>& r, const typename Row<T>::V16& v, float cap) {
    float x[Row<T>::VEC];
#pragma unroll
    for (int k = 0; k < Row<T>::VEC; k++) x[k] = capped<CAP>(v[k], cap);
    r.take(x);
}
// The first `cached` vectors come into `cache`, all of them under way at once. Each thread fetches its own and reads them again, now
// and for the gradient, so no barrier is needed.
template <class T, bool CAP> __device__ __forceinline__ void fetch(Running<T>& r, const T* z, const Row<T>& row, float cap, typename Row<T>::V16* cache, int cached) {
    const int step = blockDim.x, quarter = (cached + 4 * step - 1) / (4 * step) * step;
#pragma unroll
    for (int q = 0; q < 4; q++) {
        for (int i = q * quarter + threadIdx.x; i < min((q + 1) * quarter, cached); i += step) copy_async(cache + i, z + row.at(row.first + i));
        copy_commit();
    }
    auto eat = [&](int q) { for (int i = q * quarter + threadIdx.x; i < min((q + 1) * quarter, cached); i += step) take<T, CAP>(r, cache[i], cap); };
    copy_wait<3>(); eat(0);
    copy_wait<2>(); eat(1);
    copy_wait<1>(); eat(2);
    copy_wait<0>(); eat(3);
}
template <class T, bool CAP> __device__ __forceinline__ Lse row_lse(const T* z, const Row<T>& row, float cap, Lse* smem, typename Row<T>::V16* cache = nullptr, int cached = 0) {
    const int step = blockDim.x;
    Running<T> r;
    if (cache) fetch<T, CAP>(r, z, row, cap, cache, cached);
    row.each_end([&](int64_t i) { r.take(capped<CAP>(to_float(z[i]), cap)); });
    for (int i = row.first + cached + threadIdx.x; i < row.last; i += step * U) {
        typename Row<T>::V16 v[U];
#pragma unroll
        for (int u = 0; u < U; u++) if (i + u * step < row.last) v[u] = Row<T>::V16::load(z + row.at(i + u * step));
#pragma unroll
        for (int u = 0; u < U; u++) {
            const int j = i + u * step;
            if (j >= row.last) break;
            take<T, CAP>(r, v[u], cap);
        }
    }
    return block_merge(r, smem);
}
// What makes dz of z, and the one-hot's element `t`: the thread that has its vector writes it again at the end, so that the others need
// not ask whether they are it.
template <class T, bool CAP> struct Gradient {
    static constexpr int VEC = Row<T>::VEC;
    float m, k, g, cap, zt;
    int64_t t;
    bool mine;
    __device__ Gradient(const T* z, const Row<T>& row, int64_t t, float cap, int cached = 0) : cap(cap), t(t) {
        const int64_t vec = (t - row.head) / VEC - row.first, turn = vec < cached ? vec : vec - cached;
        mine = t >= row.head && t < row.tail && vec >= 0 && vec < row.last - row.first && turn % blockDim.x == threadIdx.x;
        zt = mine ? to_float(z[t]) : 0.f;
    }
    __device__ void set(Lse a, float g_, float z_loss) { m = a.m; k = factor(g_, a, z_loss); g = g_; }
    __device__ T one(float x, float onehot = 0.f) const { return from_float<T>(grad_one<T, CAP>(x, m, k, onehot, cap)); }
    __device__ void vec(typename Row<T>::V16 v, T* to) const {
#pragma unroll
        for (int q = 0; q < VEC; q++) v.v[q] = one(v[q]);
        v.store_once(to);
    }
    __device__ void ends(const T* z, T* dz, const Row<T>& row) const {
        row.each_end([&](int64_t i) { dz[i] = one(to_float(z[i]), i == t ? g : 0.f); });
        if (mine) dz[t] = one(zt, g);
    }
};
// Vectors `from` and following. `dz` may be `z`; if not, its rows may begin elsewhere within 16 bytes, and then loads go one by one. `ready`
// finds what the gradient still needs, while the first loads are under way.
template <class T, bool CAP, class F> __device__ __forceinline__ void row_grad(const T* z, T* dz, const Row<T>& row, int from, Gradient<T, CAP>& grad, F ready) {
    using V16 = typename Row<T>::V16;
    const int step = blockDim.x;
    const bool alike = ((reinterpret_cast<uintptr_t>(z) ^ reinterpret_cast<uintptr_t>(dz)) & 15) == 0;
    auto load = [&](V16* v, int i) {
#pragma unroll
        for (int u = 0; u < U; u++, i += step) {
            if (i >= row.last) break;
            if (alike) v[u] = V16::load(z + row.at(i));
            else
#pragma unroll
                for (int q = 0; q < Row<T>::VEC; q++) v[u].v[q] = z[row.at(i) + q];
        }
    };
    V16 v[U], next[U];
    int i = from + threadIdx.x;
    load(v, i);
    ready();
    for (; i < row.last; i += step * U) {
        load(next, i + step * U);
#pragma unroll
        for (int u = 0; u < U; u++) {
            if (i + u * step < row.last) grad.vec(v[u], dz + row.at(i + u * step));
            v[u] = next[u];
        }
    }
}
template <class T> __device__ __forceinline__ void zero(T* p, const Row<T>& row) {
    const typename Row<T>::V16 none{};
    row.each_end([&](int64_t i) { p[i] = from_float<T>(0.f); });
    for (int i = row.first + threadIdx.x; i < row.last; i += blockDim.x) none.store(p + row.at(i));
}

template <class T, bool CAP>
__global__ void __launch_bounds__(FWD_THREADS, FWD_BLOCKS) fwd_kernel(const T* __restrict__ z, int64_t stride, const int64_t* __restrict__ target, float* __restrict__ loss, Lse* __restrict__ stats, int64_t V, int64_t ignore, float z_loss, float cap) {
    __shared__ Lse smem[32];
    const int64_t r = blockIdx.x, t = target[r];
    if (t == ignore) { if (threadIdx.x == 0) { loss[r] = 0.f; stats[r] = {0.f, 1.f}; } return; }
    const T* p = z + r * stride;
    const Lse a = row_lse<T, CAP>(p, Row<T>(p, V), cap, smem);
    if (threadIdx.x == 0) {
        const bool known = t >= 0 && t < V;
        loss[r] = known ? loss_of(a, capped<CAP>(to_float(p[t]), cap), z_loss) : NAN;
        stats[r] = {a.m, known ? a.s : NAN};
    }
}
// Of columns `begin` and following; `target` and `stats` are those of whole rows.
template <class T, bool CAP>
__global__ void __launch_bounds__(GRAD_THREADS, GRAD_BLOCKS) bwd_kernel(const float* __restrict__ g, int64_t g_stride, const T* z, int64_t stride, const int64_t* __restrict__ target, const Lse* __restrict__ stats, T* dz, int64_t dz_stride, int64_t begin, int64_t V, int64_t ignore, float z_loss, float cap) {
    const int64_t r = blockIdx.x, t = target[r];
    T* out = dz + r * dz_stride;
    const Row<T> row(out, V);
    if (t == ignore) return zero(out, row);
    const T* p = z + r * stride;
    Gradient<T, CAP> grad(p, row, t - begin, cap);
    row_grad<T, CAP>(p, out, row, row.first, grad, [&] { grad.set(stats[r], g[r * g_stride], z_loss); });
    grad.ends(p, out, row);
}
// A row belongs to the `parts` blocks of a cluster, so that all of it can wait in shared memory.
template <class T, bool CAP>
__global__ void __launch_bounds__(BOTH_THREADS, BOTH_BLOCKS) both_kernel(T* z, int64_t stride, const int64_t* __restrict__ target, const float* __restrict__ weight, float* __restrict__ loss, int64_t V, int64_t ignore, float z_loss, float cap, int cached, int parts) {
    __shared__ Lse smem[32], all[MAX_PARTS];
    extern __shared__ int4 dynamic[];
    auto* cache = reinterpret_cast<typename Row<T>::V16*>(dynamic);
    const int64_t r = blockIdx.x / parts, t = target[r];
    const int rank = blockIdx.x % parts;
    const float g = weight ? weight[r] : 1.f;
    T* p = z + r * stride;
    const Row<T> row(p, V, rank, parts);
    if (t == ignore || g == 0.f) {
        if (rank == 0 && threadIdx.x == 0) loss[r] = 0.f;
        return zero(p, row);
    }
    if (parts > 1) cluster_arrive();
    cached = min(cached, row.last - row.first);
    const bool known = t >= 0 && t < V;
    const float zt = known ? to_float(p[t]) : NAN;                                       // before anything is overwritten
    Gradient<T, CAP> grad(p, row, t, cap, cached);
    Lse a = row_lse<T, CAP>(p, row, cap, smem, cache, cached);
    if (parts > 1) { cluster_wait(); a = cluster_merge(a, all, rank, parts); }           // every block has begun; every block is done reading
    __syncthreads();
    if (rank == 0 && threadIdx.x == 0) loss[r] = g * loss_of(a, capped<CAP>(zt, cap), z_loss);
    grad.set({a.m, known ? a.s : NAN}, g, z_loss);
#pragma unroll 4
    for (int i = threadIdx.x; i < cached; i += blockDim.x) grad.vec(cache[i], p + row.at(row.first + i));
    row_grad<T, CAP>(p, p, row, row.first + cached, grad, [] {});
    grad.ends(p, p, row);
}
// Threads of a block, into how many blocks a row is cut, and how many bytes each of them may keep
struct Share { int threads, parts, bytes; };
inline Share share_of(const void* kernel, int64_t row_bytes) {
    const int most = of_device(cudaDevAttrMaxSharedMemoryPerBlockOptin), per_sm = of_device(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    int room = per_sm / BOTH_BLOCKS - 2048, parts = 1;                                   // the system keeps 1 KiB a block, and there are `smem` and `all`
    room = (room < most - 1024 ? room : most - 1024) / 16 * 16;
    if (hopper_code(kernel)) while (parts < MAX_PARTS && row_bytes > (int64_t)room * parts) parts *= 2;
    const int64_t need = (row_bytes / 16 + parts - 1) / parts * 16;
    const int bytes = (int)(need < room ? need : room);
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, room);     // more than 48 KiB is only given when asked for; not `bytes`, for another thread may be about to launch this for longer rows
    return {row_bytes > 32 << 10 ? BOTH_THREADS : 128, parts, bytes};
}
#endif

// Rows may lie apart (a slice of a padded vocabulary); within a row the logits must follow one another, or a copy is made.
inline Tensor dense_rows(const Tensor& z) { return z.stride(1) == 1 || z.size(1) == 1 ? z : torch::stable::contiguous(z); }
inline void check_in_place(const Tensor& z, const char* name) {
    STD_TORCH_CHECK((z.stride(1) == 1 || z.size(1) == 1) && (z.size(0) < 2 || z.stride(0) >= z.size(1)), name, ": each row of the logits must be contiguous, and no two may overlap");
}
#define BY_CAP(cap, ...) if (cap > 0) { constexpr bool CAP = true; __VA_ARGS__ } else { constexpr bool CAP = false; __VA_ARGS__ }
// Around the backward of a GPU or of a CPU
template <auto BACKWARD> Tensor cross_entropy_backward(const Tensor& g, const Tensor& z_, const Tensor& target, const Tensor& stats, int64_t ignore, double z_loss, double cap) {
    const Tensor z = dense_rows(z_);
    Tensor dz = torch::stable::new_empty(z, {z.size(0), z.size(1)});
    BACKWARD(g, z, target, stats, dz, 0, ignore, z_loss, cap);
    return dz;
}
// Writes over logits that nobody else holds, as loss_and_grad_ does: for the fused head only. Rows may lie further apart than V, so that a matrix
// product finds each of them aligned. Makes gradients of the columns `begin` and following of a row; `target`, `stats` are the row's.
template <auto BACKWARD> void grad_columns_(Tensor z, const Tensor& g, const Tensor& target, const Tensor& stats, int64_t begin, int64_t ignore, double z_loss, double cap) {
    check_in_place(z, "grad_columns_");
    BACKWARD(g, z, target, stats, z, begin, ignore, z_loss, cap);
}

#ifdef __CUDACC__
std::tuple<Tensor, Tensor> cross_entropy(const Tensor& z_, const Tensor& target_, int64_t ignore, double z_loss, double cap) {
    const Tensor z = dense_rows(z_), target = torch::stable::contiguous(target_);
    const int64_t N = z.size(0), V = z.size(1);
    Tensor loss = torch::stable::new_empty(z, {N}, ScalarType::Float), stats = torch::stable::new_empty(z, {N, 2}, ScalarType::Float);
    if (!N) return {loss, stats};
    torch::stable::accelerator::DeviceGuard guard(z.get_device_index());
    DISPATCH(z.scalar_type(), "cross_entropy", BY_CAP(cap, {
        fwd_kernel<T, CAP><<<grid_of(N, "cross_entropy"), FWD_THREADS, 0, stream_of(z)>>>((const T*)z.const_data_ptr(), z.stride(0), target.const_data_ptr<int64_t>(), loss.mutable_data_ptr<float>(), (Lse*)stats.mutable_data_ptr(), V, ignore, (float)z_loss, (float)cap);
    }));
    check_launch("cross_entropy forward");
    return {loss, stats};
}
void backward(const Tensor& g, const Tensor& z, const Tensor& target_, const Tensor& stats_, Tensor& dz, int64_t begin, int64_t ignore, double z_loss, double cap) {
    const int64_t N = z.size(0);
    if (!N) return;
    const Tensor target = torch::stable::contiguous(target_), stats = torch::stable::contiguous(stats_);
    torch::stable::accelerator::DeviceGuard guard(z.get_device_index());
    DISPATCH(z.scalar_type(), "cross_entropy", BY_CAP(cap, {
        bwd_kernel<T, CAP><<<grid_of(N, "cross_entropy"), GRAD_THREADS, 0, stream_of(z)>>>(g.const_data_ptr<float>(), g.stride(0), (const T*)z.const_data_ptr(), z.stride(0), target.const_data_ptr<int64_t>(), (const Lse*)stats.const_data_ptr(), (T*)dz.mutable_data_ptr(), dz.stride(0), begin, z.size(1), ignore, (float)z_loss, (float)cap);
    }));
    check_launch("cross_entropy backward");
}
// Writes weight * d loss / d logits over whole rows, and returns weight * loss.
Tensor loss_and_grad_(Tensor z, const Tensor& target_, const std::optional<Tensor>& weight_, int64_t ignore, double z_loss, double cap) {
    check_in_place(z, "loss_and_grad_");
    const int64_t N = z.size(0), V = z.size(1);
    const Tensor target = torch::stable::contiguous(target_);
    std::optional<Tensor> weight;
    if (weight_) weight = torch::stable::contiguous(*weight_);
    STD_TORCH_CHECK(!weight || weight->scalar_type() == ScalarType::Float, "loss_and_grad_: weight must be float32");
    Tensor loss = torch::stable::new_empty(z, {N}, ScalarType::Float);
    if (!N) return loss;
    torch::stable::accelerator::DeviceGuard guard(z.get_device_index());
    DISPATCH(z.scalar_type(), "cross_entropy", BY_CAP(cap, {
        const auto kernel = both_kernel<T, CAP>;
        const Share p = share_of((const void*)kernel, V * sizeof(T));
        cudaLaunchAttribute cluster{};
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim = {(unsigned)p.parts, 1, 1};
        cudaLaunchConfig_t c{};
        c.gridDim = grid_of(N * p.parts, "cross_entropy"); c.blockDim = p.threads; c.dynamicSmemBytes = p.bytes; c.stream = stream_of(z); c.attrs = &cluster; c.numAttrs = p.parts > 1;
        cudaLaunchKernelEx(&c, kernel, (T*)z.mutable_data_ptr(), z.stride(0), target.const_data_ptr<int64_t>(), weight ? weight->const_data_ptr<float>() : (const float*)nullptr, loss.mutable_data_ptr<float>(), V, ignore, (float)z_loss, (float)cap, p.bytes / 16, p.parts);
    }));
    check_launch("cross_entropy fused");
    return loss;
}
STABLE_TORCH_LIBRARY_IMPL(XTRAIN_NS, CUDA, m) {
    m.impl("cross_entropy", TORCH_BOX(&cross_entropy));
    m.impl("cross_entropy_backward", TORCH_BOX(&cross_entropy_backward<&backward>));
    m.impl("grad_columns_", TORCH_BOX(&grad_columns_<&backward>));
    m.impl("loss_and_grad_", TORCH_BOX(&loss_and_grad_));
}
#endif

// The CPU half: float32 only, one row after the other, with the arithmetic above.
inline Lse merge(Lse a, Lse b) {
    const float m = fmaxf(a.m, b.m);
    if (m == -INFINITY) return {m, a.s + b.s};                      // 0, or NaN where a logit was
    return {m, a.s * expf(a.m - m) + b.s * expf(b.m - m)};
}
template <bool CAP> Lse row_lse_cpu(const float* z, int64_t V, float cap) {
    Running<float> r[64];                                           // as many "threads", merged in a tree
    Lse a[64];
    int64_t i = 0;
    for (float x[8]; i + 8 <= V; i += 8) {
        for (int k = 0; k < 8; k++) x[k] = capped<CAP>(z[i + k], cap);
        r[i / 8 % 64].take(x);
    }
    for (; i < V; i++) r[i % 64].take(capped<CAP>(z[i], cap));
    for (int k = 0; k < 64; k++) a[k] = r[k];
    for (int n = 32; n; n /= 2)
        for (int k = 0; k < n; k++) a[k] = merge(a[k], a[k + n]);
    return a[0];
}
template <bool CAP> void row_grad_cpu(const float* z, float* dz, int64_t V, int64_t t, Lse a, float g, float z_loss, float cap) {
    const float k = factor(g, a, z_loss);
    for (int64_t i = 0; i < V; i++) dz[i] = grad_one<float, CAP>(z[i], a.m, k, i == t ? g : 0.f, cap);
}
inline void check_cpu(const Tensor& z) { STD_TORCH_CHECK(z.scalar_type() == ScalarType::Float, "cross_entropy: the CPU half takes float32"); }
std::tuple<Tensor, Tensor> cross_entropy_cpu(const Tensor& z_, const Tensor& target_, int64_t ignore, double z_loss, double cap) {
    check_cpu(z_);
    const Tensor z = dense_rows(z_), target = torch::stable::contiguous(target_);
    const int64_t N = z.size(0), V = z.size(1), *t = target.const_data_ptr<int64_t>();
    Tensor loss = torch::stable::new_empty(z, {N}), stats = torch::stable::new_empty(z, {N, 2});
    float* l = loss.mutable_data_ptr<float>();
    Lse* st = (Lse*)stats.mutable_data_ptr();
    for (int64_t n = 0; n < N; n++) {
        const float* p = z.const_data_ptr<float>() + n * z.stride(0);
        const bool known = t[n] >= 0 && t[n] < V;
        if (t[n] == ignore) { l[n] = 0.f; st[n] = {0.f, 1.f}; continue; }
        BY_CAP(cap, {
            st[n] = row_lse_cpu<CAP>(p, V, (float)cap);
            l[n] = known ? loss_of(st[n], capped<CAP>(p[t[n]], (float)cap), (float)z_loss) : NAN;
        })
        if (!known) st[n].s = NAN;
    }
    return {loss, stats};
}
void backward_cpu(const Tensor& g, const Tensor& z, const Tensor& target_, const Tensor& stats_, Tensor& dz, int64_t begin, int64_t ignore, double z_loss, double cap) {
    check_cpu(z);
    const Tensor target = torch::stable::contiguous(target_), stats = torch::stable::contiguous(stats_);
    const int64_t V = z.size(1), *t = target.const_data_ptr<int64_t>();
    const Lse* st = (const Lse*)stats.const_data_ptr();
    for (int64_t n = 0; n < z.size(0); n++) {
        const float* p = z.const_data_ptr<float>() + n * z.stride(0);
        float* d = dz.mutable_data_ptr<float>() + n * dz.stride(0);
        if (t[n] == ignore) { for (int64_t i = 0; i < V; i++) d[i] = 0.f; continue; }
        BY_CAP(cap, { row_grad_cpu<CAP>(p, d, V, t[n] - begin, st[n], g.const_data_ptr<float>()[n * g.stride(0)], (float)z_loss, (float)cap); })
    }
}
Tensor loss_and_grad_cpu_(Tensor z, const Tensor& target_, const std::optional<Tensor>& weight, int64_t ignore, double z_loss, double cap) {
    check_cpu(z);
    check_in_place(z, "loss_and_grad_");
    const Tensor target = torch::stable::contiguous(target_);
    const int64_t N = z.size(0), V = z.size(1), *t = target.const_data_ptr<int64_t>();
    Tensor loss = torch::stable::new_empty(z, {N});
    float* l = loss.mutable_data_ptr<float>();
    for (int64_t n = 0; n < N; n++) {
        float* p = z.mutable_data_ptr<float>() + n * z.stride(0);
        const float g = weight ? weight->const_data_ptr<float>()[n * weight->stride(0)] : 1.f;
        const bool known = t[n] >= 0 && t[n] < V;
        if (t[n] == ignore || g == 0.f) { l[n] = 0.f; for (int64_t i = 0; i < V; i++) p[i] = 0.f; continue; }
        BY_CAP(cap, {
            const Lse a = row_lse_cpu<CAP>(p, V, (float)cap);
            l[n] = g * loss_of(a, known ? capped<CAP>(p[t[n]], (float)cap) : NAN, (float)z_loss);
            row_grad_cpu<CAP>(p, p, V, t[n], {a.m, known ? a.s : NAN}, g, (float)z_loss, (float)cap);
        })
    }
    return loss;
}

STABLE_TORCH_LIBRARY_FRAGMENT(XTRAIN_NS, m) {
    m.def("cross_entropy(Tensor logits, Tensor target, int ignore_index, float z_loss, float softcap) -> (Tensor, Tensor)");
    m.def("cross_entropy_backward(Tensor g, Tensor logits, Tensor target, Tensor stats, int ignore_index, float z_loss, float softcap) -> Tensor");
    m.def("grad_columns_(Tensor(a!) logits, Tensor g, Tensor target, Tensor stats, int begin, int ignore_index, float z_loss, float softcap) -> ()");
    m.def("loss_and_grad_(Tensor(a!) logits, Tensor target, Tensor? weight, int ignore_index, float z_loss, float softcap) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(XTRAIN_NS, CPU, m) {
    m.impl("cross_entropy", TORCH_BOX(&cross_entropy_cpu));
    m.impl("cross_entropy_backward", TORCH_BOX(&cross_entropy_backward<&backward_cpu>));
    m.impl("grad_columns_", TORCH_BOX(&grad_columns_<&backward_cpu>));
    m.impl("loss_and_grad_", TORCH_BOX(&loss_and_grad_cpu_));
}
